"""The network of this lesson, written for each parallel mode, and the samples it learns from.

    x (batch, 512) -> MatMul with weight (512, 128) -> ReLU -> ReduceSum over the 128 columns -> + bias (1,) -> (batch,)

Net is the network itself. HybridParallelNet and SemiAutoParallelNet show only what their mode adds to it.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

ROWS, COLUMNS = 512, 128  # of the weight
SAMPLES, BATCH = 256, 64  # the batch of one step, over all ranks together
SLICED = ("weight", "moments.weight")  # what hybrid parallel cuts: the weight, and its momentum in the optimizer


def make_samples(seed):
    """Make the samples: what a second network of the same form, with other weights, answers to random numbers.

    Returns:
        float32 x (256, 512) and y (256,).
    """
    random = np.random.default_rng([seed, 1])
    x = (random.standard_normal((SAMPLES, ROWS)) / np.sqrt(ROWS)).astype(np.float32)
    weight, bias = initial_values(seed + 1)
    return x, np.maximum(x @ weight, 0).sum(axis=-1) + bias


def initial_values(seed):
    """The same random weight (512, 128) and zero bias (1,) on every rank, float32."""
    random = np.random.default_rng([seed, 2])
    return (0.1 * random.standard_normal((ROWS, COLUMNS))).astype(np.float32), np.zeros(1, np.float32)


class Net(nn.Cell):
    """The network, as one process would have it; data and auto parallel use it as it is."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")
        self.bias = Parameter(Tensor(bias), name="bias")
        self.matmul = ops.MatMul()
        self.relu = ops.ReLU()
        self.reduce_sum = ops.ReduceSum()

    def construct(self, x):
        return self.reduce_sum(self.relu(self.matmul(x, self.weight)), -1) + self.bias


def columns_of(rank, rank_size):
    """The columns of the weight that a rank holds in hybrid parallel, as a slice."""
    width = COLUMNS // rank_size
    return slice(rank * width, (rank + 1) * width)


class HybridParallelNet(Net):
    """Hybrid parallel: this rank's columns of the weight, and the collective, written by hand."""

    def __init__(self, weight, bias, rank, rank_size):
        super().__init__(np.ascontiguousarray(weight[:, columns_of(rank, rank_size)]), bias)  # distributed: a slice
        self.weight.layerwise_parallel = True  # distributed: other ranks hold other columns: never average it
        self.all_reduce = ops.AllReduce()  # distributed:

    def construct(self, x):
        x = self.reduce_sum(self.relu(self.matmul(x, self.weight)), -1)  # distributed: the sum of own columns only,
        return self.all_reduce(x) + self.bias  # distributed: so add the other ranks' sums


class SemiAutoParallelNet(Net):
    """Semi-auto parallel: the network of one process, and how to cut each operator's inputs; MindSpore does it."""

    def __init__(self, weight, bias, slices):
        super().__init__(weight, bias)
        self.matmul.shard(((1, 1), (1, slices)))  # distributed: x whole, the weight's columns in slices
        self.relu.shard(((1, slices),))  # distributed: its input stays cut as MatMul left it
        self.reduce_sum.shard(((1, slices),))  # distributed: so MindSpore inserts the AllReduce of hybrid parallel
