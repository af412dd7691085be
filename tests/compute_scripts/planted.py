"""One rank of a computed run whose plan has a bug: mpirun -n 2 python planted.py BUG SCRIPT [args ...].

The bugs are put into the plan after MindSpore made it, before it is computed.
"""
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2] / "dry_run"))
import compute  # noqa: E402

if os.environ.get(compute.READY) != "computed":
    os.execve(sys.executable, [sys.executable, *sys.argv], compute.environment())
compute.use_all_cores()
compute.load_mindspore()
import computed_rank  # noqa: E402
import plan  # noqa: E402

BUG, RANK = sys.argv[1], int(os.environ["OMPI_COMM_WORLD_RANK"])
read, found_before = plan.read, []


def cut_gradient(nodes):
    """The gradient of a parameter is not summed over the ranks."""
    node = next(node for node in nodes if node.op == "AllReduce" and "mirror" in node.instance)
    node.op = "Depend"


def wrong_sum(nodes):
    """Rank 1 wants the largest where rank 0 wants the sum."""
    if RANK == 1:
        next(node for node in nodes if node.op == "AllReduce").attributes["op"] = "max"


def lost_send(nodes):
    """A Send goes out with another number than its Receive waits for."""
    if RANK == 0:
        next(node for node in nodes if node.op == "Send").attributes["sr_tag"] += 100


def no_kernel(nodes):
    """An operator that no CPU has."""
    node = next(node for node in nodes if node.op == "MatMul")
    node.op = "MatMulOfCards"


def other_shape(nodes):
    """The plan promises another shape than the kernel makes."""
    node = next(node for node in nodes if node.op == "MatMul")
    node.planned = [(dtype, (*shape[:-1], shape[-1] + 1)) for dtype, shape in node.planned]


def read_with_bug(*args):
    """plan.read, then the bug."""
    found = read(*args)
    if not found_before:
        globals()[BUG](found.nodes)
    found_before.append(found)
    return found


plan.read = read_with_bug
sys.exit(computed_rank.main(sys.argv[2], sys.argv[3:]))
