"""Does this cluster communicate at all? Run this before any training.

    mpirun -n 4 python allgather_check.py       4 cards, or 4 CPU processes where there is no card
    bash run.sh 4                               the same, with checks before the start
    msrun --master_port=28118 --worker_num=4 --local_worker_num=4 --join=True allgather_check.py
(msrun: without Open MPI; any free port. mpirun: as root add --allow-run-as-root, with fewer than 4
cores and no cards --oversubscribe.)
Rank 0 prints what AllGather brings to all, the number of each rank:
    [[0.]
     [1.]
     [2.]
     [3.]]
and every rank whether AllGather, AllReduce and Broadcast gave what they must:
    rank 0 of 4 on node-a, CPU 0: AllGather ok, AllReduce ok, Broadcast ok
The exit code is 0 if all are right on this rank, 1 if not, 2 if nobody launched several ranks.
"""

import argparse
import os
import platform
import sys

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

parser = argparse.ArgumentParser(description="Check that the launched ranks can communicate.")
parser.add_argument("--timeout", type=int, default=120,
                    help="seconds to wait until all ranks are there (CPU)")
args = parser.parse_args()


class Net(nn.Cell):
    """The three collectives as one graph: the x of all ranks, the sum of all y, and rank 0's z."""

    def construct(self, x, y, z):
        return ops.AllGather()(x), ops.AllReduce()(y), ops.Broadcast(0)((z,))[0]


def check():
    """Print the gathered matrix (rank 0) and a line of verdicts; return True if all were right."""
    rank, rank_size = get_rank(), get_group_size()
    outputs = Net()(
        ms.Tensor(np.array([[rank]], np.float32)),
        ms.Tensor(np.array([1, rank], np.float32)),  # sums: N, and 0 + 1 + ... + (N - 1)
        ms.Tensor(np.array([rank + 7], np.float32)))  # afterwards everyone has rank 0's 7
    gathered, reduced, sent = (output.asnumpy() for output in outputs)
    if rank == 0:  # all have the same, as the verdicts say
        print(gathered, flush=True)
    right = {
        "AllGather": np.array_equal(gathered.ravel(), np.arange(rank_size)),
        "AllReduce": np.array_equal(reduced, [rank_size, rank_size * (rank_size - 1) / 2]),
        "Broadcast": np.array_equal(sent, [7]),
    }
    device = f"{ms.get_context('device_target')} {ms.get_context('device_id')}"
    verdicts = ", ".join(f"{name} {'ok' if ok else 'WRONG'}" for name, ok in right.items())
    print(f"rank {rank} of {rank_size} on {platform.node()}, {device}: {verdicts}", flush=True)
    return all(right.values())


ms.set_context(mode=ms.GRAPH_MODE)
os.environ.setdefault("MS_TOPO_TIMEOUT", str(args.timeout))
try:
    if not ranks.join():  # prepares a rank on CPU; False if this process runs alone
        parser.error("one rank alone; start 4: mpirun -n 4 python allgather_check.py")
    init()
    all_right = check()
except (RuntimeError, TimeoutError) as error:
    sys.exit(f"The ranks could not talk to each other: {str(error).strip().splitlines()[0]}\n"
             "Is every rank running? Look for the one that ended or never started, and at its log.")
if not all_right:
    print("A collective gave a wrong result: do not train on this cluster. Check that all ranks "
          "run the same MindSpore, and the network between the hosts.", file=sys.stderr)
ranks.leave(0 if all_right else 1)  # all ranks end together (for CPU)
sys.exit(0 if all_right else 1)
