"""Every collective of dry_run/collectives.py against NumPy: mpirun -n 3 python exchanges.py."""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dry_run"))
import compute  # noqa: E402

compute.load_mindspore()
import mindspore as ms  # noqa: E402
from mpi4py import MPI  # noqa: E402

MPI.Init()
import collectives  # noqa: E402
import run_plan  # noqa: E402
from plan import Node  # noqa: E402

RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
links = collectives.Collectives(RANK, RANKS)
WORLD, PAIR = tuple(range(RANKS)), (0, 2)
links.make_groups([WORLD, PAIR])
links.number_pairs([(WORLD, 7, sender, (sender + 1) % RANKS) for sender in WORLD])
checks = 0


def data(rank, shape=(6, 4)):
    """What a rank contributes, float64."""
    return np.random.default_rng(rank).integers(1, 5, shape).astype(float)


def run(kind, group, tensor, planned=(), peer=-1, **attributes):
    """Run one collective."""
    node = Node(kind, kind, "out", [], attributes, list(planned))
    return links.operator(node, group, peer, kind)(tensor)


def check(found, expected, dtype):
    """The type, the shape and every number."""
    global checks
    assert found.dtype == dtype, (found.dtype, dtype)
    found = found.astype(ms.float32).asnumpy()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    checks += 1


REDUCE = {"sum": sum, "prod": np.multiply.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}
for dtype in (ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int32, ms.int64):
    for group in (WORLD, PAIR):
        if RANK not in group:
            continue
        parts = [data(rank) for rank in group]
        mine = ms.Tensor(parts[group.index(RANK)].astype(np.float32)).astype(dtype)
        for name, reduce in REDUCE.items():
            total = reduce(parts) if name == "sum" else reduce(np.stack(parts))
            check(run("AllReduce", group, mine, op=name), total, dtype)
            check(run("ReduceScatter", group, mine, op=name), np.split(total, len(group))[group.index(RANK)], dtype)
        check(run("AllGather", group, mine), np.concatenate(parts), dtype)
        check(run("Broadcast", group, (mine,), root_rank=group[-1])[0], parts[-1], dtype)
        columns = data(RANK, (2, 6))
        every = [np.split(data(rank, (2, 6)), len(group), 1)[group.index(RANK)] for rank in group]
        check(run("AlltoAll", group, ms.Tensor(columns.astype(np.float32)).astype(dtype), split_count=len(group),
                  split_dim=1, concat_dim=0), np.concatenate(every), dtype)
    after, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    mine = ms.Tensor(data(RANK).astype(np.float32)).astype(dtype)
    run("Send", WORLD, mine, peer=after, sr_tag=7)
    check(run("Receive", WORLD, mine, [(dtype, (6, 4))], before, sr_tag=7), data(before), dtype)

# A scalar keeps its shape; a strip of a picture gets its neighbours' borders, and gives back their gradients.
check(run("AllReduce", WORLD, ms.Tensor(2.0, ms.float32), op="sum"), np.array(2.0 * RANKS), ms.float32)
whole = np.random.default_rng(9).integers(0, 9, (1, 2, 3, 4 * RANKS)).astype(np.float32)
left, right = (2 if RANK else 0), (1 if RANK < RANKS - 1 else 0)
strip = {"send_rank_ids": [-1, -1, RANK + 1 if right else -1, -1, -1, -1, RANK - 1 if left else -1, -1],
         "send_lens": [0, 0, 1 if left else 0, 2 if right else 0], "recv_lens": [0, 0, left, right]}
strip["recv_rank_ids"] = strip["send_rank_ids"]
mine = ms.Tensor(np.ascontiguousarray(whole[..., 4 * RANK:4 * RANK + 4]))
wide = whole[..., 4 * RANK - left:4 * RANK + 4 + right]
check(run("NeighborExchangeV2", WORLD, mine, **strip), wide, ms.float32)
gradient = np.zeros_like(whole)
for rank in WORLD:  # each rank's gradient of its wide strip is rank + 1
    begin, end = 4 * rank - (2 if rank else 0), 4 * rank + 4 + (1 if rank < RANKS - 1 else 0)
    gradient[..., begin:end] += rank + 1
back = {"send_rank_ids": strip["recv_rank_ids"], "recv_rank_ids": strip["send_rank_ids"],  # as MindSpore plans it
        "send_lens": strip["recv_lens"], "recv_lens": strip["send_lens"]}
check(run("NeighborExchangeV2Grad", WORLD, ms.Tensor(np.full(wide.shape, RANK + 1, np.float32)), **back),
      gradient[..., 4 * RANK:4 * RANK + 4], ms.float32)
# What a step reads before it writes: NumPy's array and MindSpore's tensor are otherwise one memory.
for dtype in (ms.float32, ms.bfloat16):
    copy = run_plan.copied(mine.astype(dtype))
    assert copy.dtype == dtype and not np.shares_memory(copy.asnumpy(), mine.asnumpy())
    np.testing.assert_array_equal(copy.astype(ms.float32).asnumpy(), mine.asnumpy())
links.finish()
print(f"rank {RANK}: {checks} checks passed", flush=True)
