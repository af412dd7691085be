"""The network of this lesson, written for each parallel mode, its training step, and its samples.

    x (64, 512) -> MatMul with weight (512, 128) -> ReLU -> sum over columns -> + bias -> (64,)
"""

import os

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

ROWS, COLUMNS = 512, 128  # of the weight
SAMPLES, BATCH = 256, 64  # the batch of one step, over all ranks together
BY_MINDSPORE = ("semi_auto_parallel", "auto_parallel")  # modes in which MindSpore cuts


def make_samples(seed):
    """Noise x (256, 512), and what a network of other weights makes of it, y (256,); float32."""
    random = np.random.default_rng([seed, 1])
    x = (random.standard_normal((SAMPLES, ROWS)) / np.sqrt(ROWS)).astype(np.float32)
    weight, bias = initial_values(seed + 1)
    return x, np.maximum(x @ weight, 0).sum(axis=-1) + bias


def initial_values(seed):
    """Make a random weight (512, 128) and a zero bias (1,), float32: the same on every rank."""
    random = np.random.default_rng([seed, 2])
    weight = (0.1 * random.standard_normal((ROWS, COLUMNS))).astype(np.float32)
    return weight, np.zeros(1, np.float32)


def columns_of(rank, rank_size):
    """The columns of the weight that a rank holds, as a slice."""
    width = COLUMNS // rank_size
    return slice(rank * width, (rank + 1) * width)


class Net(nn.Cell):
    """The network as one process has it; data and auto parallel use it as it is."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")
        self.bias = Parameter(Tensor(bias), name="bias")
        self.matmul, self.relu, self.reduce_sum = ops.MatMul(), ops.ReLU(), ops.ReduceSum()

    def construct(self, x):
        return self.reduce_sum(self.relu(self.matmul(x, self.weight)), -1) + self.bias


class HybridParallelNet(Net):
    """Hybrid parallel: this rank's columns of the weight, and the collective, by hand."""

    def __init__(self, weight, bias, rank, rank_size):
        # distributed: a slice, which is not to be averaged: other ranks hold other columns
        super().__init__(np.ascontiguousarray(weight[:, columns_of(rank, rank_size)]), bias)
        self.weight.layerwise_parallel = True
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        # distributed: the sum of own columns only, so add the other ranks' sums
        x = self.reduce_sum(self.relu(self.matmul(x, self.weight)), -1)
        return self.all_reduce(x) + self.bias


class SemiAutoParallelNet(Net):
    """Semi-auto parallel: how to cut each operator's inputs; MindSpore does the rest."""

    def __init__(self, weight, bias, slices):
        super().__init__(weight, bias)
        # distributed: x whole, the weight's columns in slices; what follows stays cut as MatMul
        # left it, so MindSpore inserts the AllReduce of hybrid parallel
        self.matmul.shard(((1, 1), (1, slices)))
        self.relu.shard(((1, slices),))
        self.reduce_sum.shard(((1, slices),))


class TrainStep(nn.Cell):
    """From this rank's x (samples, 512) and y (samples,) to the loss of the whole batch.

    ranks: how many add up by hand: all in data and hybrid parallel, else 1.
    """

    def __init__(self, net, optimizer, ranks):
        super().__init__(auto_prefix=False)
        self.net, self.optimizer, self.ranks = net, optimizer, ranks
        self.loss_and_gradients = ms.value_and_grad(self.forward, None, optimizer.parameters)
        self.add_up = self.reduce_gradients = nn.Identity()
        # distributed: by hand. The ranks differentiate the sum of their losses; each is divided by
        # the number of ranks, so that the sum is the loss of the whole batch. In hybrid parallel,
        # too: all compute the same loss, and the gradient of AllReduce adds it up once a rank.
        if ranks > 1:
            self.add_up = ops.AllReduce()  # of the loss, only to print it
            # Adds up the gradients of what all ranks hold, and leaves slices (layerwise_parallel).
            self.reduce_gradients = nn.DistributedGradReducer(optimizer.parameters, mean=False)

    def forward(self, x, y):
        return ((self.net(x) - y) ** 2).mean() / self.ranks

    def construct(self, x, y):
        loss, gradients = self.loss_and_gradients(x, y)
        gradients = self.reduce_gradients(gradients)
        loss = ops.depend(loss, self.optimizer(gradients))
        return self.add_up(loss)


def check_mode(mode, ranks, slices=1):
    """Raise a ValueError if a mode cannot run here, or not with so many ranks or slices."""
    target = os.getenv("DEVICE_TARGET") or ms.get_context("device_target")
    if mode in BY_MINDSPORE and target == "CPU" and "ASCEND_PLAN" not in os.environ:
        raise ValueError(f"MindSpore has no {mode} on CPU; run.sh computes it for 2 or more ranks "
                         "of one machine, with the folders dry_run/ and tools/ beside this one")
    if mode in BY_MINDSPORE and ranks not in (1, 2, 4) and ranks % 8:
        raise ValueError(f"MindSpore has {mode} for 1, 2, 4, 8, 16, ... ranks, not for {ranks}")
    if mode == "stand_alone" and ranks > 1:
        raise ValueError(f"stand_alone is one process, not {ranks}; choose another mode")
    if mode == "data_parallel" and BATCH % ranks:
        raise ValueError(f"the batch of {BATCH} samples cannot be shared equally by {ranks} ranks; "
                         f"start 1, 2, 4, ... {BATCH}")
    if mode == "hybrid_parallel" and COLUMNS % ranks:
        raise ValueError(f"the weight's {COLUMNS} columns cannot be cut into {ranks} equal slices, "
                         f"one a rank; start 1, 2, 4, ... {COLUMNS} ranks")
    if mode == "semi_auto_parallel" and (slices < 1 or COLUMNS % slices or ranks % slices):
        raise ValueError(f"the strategy ((1, 1), (1, {slices})) does not fit: the slices must "
                         f"divide the weight's {COLUMNS} columns and the {ranks} ranks")
