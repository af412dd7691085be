"""A script for tests: all-reduces of many kinds, each compared with NumPy; rank 0 prints what was wrong, or "right".

Run by mpirun; the folder of ranks.py is the first argument.
"""

import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[1])
import mindspore as ms
import ranks
from mindspore import nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.mint.distributed import all_reduce

OPERATIONS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
ms.set_context(mode=ms.GRAPH_MODE)
ranks.join()
init()
rank, size = get_rank(), get_group_size()


class AllReduce(nn.Cell):
    """An all-reduce as a compiled graph; its backward pass is an all-reduce, too."""

    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, value):
        return self.all_reduce(value)


def data(of_rank, dtype, count):
    return np.random.RandomState(of_rank).randint(1, 5, count).astype(dtype)  # sums are exact in all types


def check(what, found, operation, members, dtype, count):
    """Print whether a result is NumPy's."""
    wanted = OPERATIONS[operation](np.stack([data(member, dtype, count) for member in members]), 0).astype(dtype)
    print(f"{what} of {count} {dtype}: {'right' if np.array_equal(found, wanted) else 'WRONG'}", flush=True)


world = list(range(size))
for dtype, count in itertools.product(("float32", "float16"), (1, 1000, 300_000)):
    check("sum in a graph", AllReduce()(ms.Tensor(data(rank, dtype, count))).asnumpy(), "sum", world, dtype, count)


class SumAndMaximum(nn.Cell):
    """Which MindSpore took for the sum a second time."""

    def __init__(self):
        super().__init__()
        self.sum, self.maximum = ops.AllReduce(), ops.AllReduce(ops.ReduceOp.MAX)

    def construct(self, value):
        return self.sum(value), self.maximum(value)


try:
    _, found = SumAndMaximum()(ms.Tensor(data(rank, "float32", 5)))
    check("maximum beside a sum", found.asnumpy(), "max", world, "float32", 5)
except RuntimeError as error:
    print("maximum beside a sum:", "right" if "only support reduce sum on CPU" in str(error) else error, flush=True)
gradient = ms.grad(AllReduce())(ms.Tensor(data(rank, "float32", 5))).asnumpy()
print(f"gradient: {'right' if (gradient == size).all() else 'WRONG'}", flush=True)
for operation, dtype in itertools.product(OPERATIONS, ("float32", "int32", "int8")):
    value = ms.Tensor(data(rank, dtype, 700))
    all_reduce(value, operation)
    check(operation, value.asnumpy(), operation, world, dtype, 700)
for name, members in (("pair", world[:2]), ("backwards", world[::-1])):
    if rank in members:
        create_group(name, members)
        value = ms.Tensor(data(rank, "float32", 700))
        all_reduce(value, "sum", name)
        check(f"sum in the group {name}", value.asnumpy(), "sum", members, "float32", 700)


class Pair(nn.Cell):
    """Two weights with one gradient, the data's mean, of which MindSpore would make one sum, as of an LSTM's biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (ms.Parameter(ms.ops.ones(5) * number, name=f"{number}") for number in (1, 2))

    def construct(self, value):
        return (value * (self.first + self.second)).sum()


ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
pair = Pair()
decayed = nn.Momentum(pair.trainable_params(), 0.1, 0.9, weight_decay=0.5)
nn.TrainOneStepCell(pair, decayed)(ms.Tensor(data(rank, "float32", 5)))
mean = np.mean([data(member, "float32", 5) for member in world], 0)
for number, parameter in enumerate(pair.trainable_params(), 1):
    right = np.allclose(parameter.asnumpy(), number - 0.1 * (mean + 0.5 * number), atol=1e-5)
    print(f"weight {number} of a pair: {'right' if right else 'WRONG'}", flush=True)


class Unscaled(nn.TrainOneStepCell):
    """A loss that is scaled by a Tensor, and gradients unscaled by it: MindSpore would scale the weight decay, too."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.scale, self.each = ms.Tensor(1024.0, ms.float32), ops.HyperMap()

    def construct(self, value):
        gradients = self.grad_reducer(ops.grad(self.scaled, None, self.weights)(value))
        return self.optimizer(self.each(ops.partial(ops.mul, 1 / self.scale), gradients))

    def scaled(self, value):
        return self.network(value) * self.scale


pair = Pair()
unscaled = Unscaled(pair, nn.Momentum(pair.trainable_params(), 0.1, 0.9, weight_decay=0.5))
unscaled(ms.Tensor(data(rank, "float32", 5)))
right = [np.allclose(parameter.asnumpy(), number - 0.1 * (mean + 0.5 * number), atol=1e-5)
         for number, parameter in enumerate(pair.trainable_params(), 1)]
print(f"decay of unscaled gradients: {'right' if all(right) else 'WRONG'}", flush=True)


class Gate(nn.Cell):
    """A sum over ranks times a weight that is used elsewhere, too, whose gradient there MindSpore would add up, too."""

    def __init__(self):
        super().__init__()
        self.weight, self.all_reduce = ms.Parameter(ms.Tensor([1.0, 2.0]), name="weight"), ops.AllReduce()

    def construct(self, rows):
        return (rows + self.weight).square().mean() + (self.all_reduce(rows.sum(0)) * self.weight).sum()


gate, rows = Gate(), [data(member, "float32", 8).reshape(4, 2) for member in world]
nn.TrainOneStepCell(gate, nn.SGD(gate.trainable_params(), 0.1))(ms.Tensor(rows[rank]))
gradient = np.mean([2 * (one + [1, 2]).sum(0) / 8 for one in rows], 0) + np.sum(rows, (0, 1))
right = np.allclose(gate.weight.asnumpy(), [1, 2] - 0.1 * gradient, rtol=1e-4)
print(f"gradient beside a sum: {'right' if right else 'WRONG'}", flush=True)
library = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "mpi_allreduce" in line]
print(f"sums by MPI: {ctypes.CDLL(library.pop()).sums() if library else 'none'}", flush=True)
if "--no-leave" not in sys.argv:
    ranks.leave()
