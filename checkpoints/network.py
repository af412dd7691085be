"""The small network of this lesson, whole or in slices, and the samples that it learns from.

    x (64, 512) -> MatMul with weight (512, 128) -> ReLU -> sum over columns -> + bias -> (64,)
"""

import os

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

ROWS, COLUMNS = 512, 128  # of the weight
SAMPLES, BATCH = 256, 64  # the batch of one step, over all ranks together
STEPS = SAMPLES // BATCH  # an epoch


def columns_of(rank, rank_size):
    """The columns of the weight that a rank holds, as a slice."""
    width = COLUMNS // rank_size
    return slice(rank * width, (rank + 1) * width)


def check_mode(mode, ranks):
    """Raise a ValueError if a mode cannot run here, on so many ranks."""
    if BATCH % ranks or COLUMNS % ranks:
        raise ValueError(f"{BATCH} samples and {COLUMNS} columns cannot be shared equally by "
                         f"{ranks} ranks; start 1, 2, 4, ... {BATCH}")
    target = os.getenv("DEVICE_TARGET") or ms.get_context("device_target")
    if mode == "semi_auto_parallel" and target == "CPU" and "ASCEND_PLAN" not in os.environ:
        raise ValueError(f"MindSpore has no {mode} on CPU; run.sh computes it for 2 or more ranks "
                         "of one machine, with the folders dry_run/ and tools/ beside this one")


def make_samples():
    """Noise x (256, 512), and what a network of other weights makes of it, y (256,); float32."""
    random = np.random.default_rng(1)
    x = (random.standard_normal((SAMPLES, ROWS)) / np.sqrt(ROWS)).astype(np.float32)
    weight = (0.1 * random.standard_normal((ROWS, COLUMNS))).astype(np.float32)
    return x, np.maximum(x @ weight, 0).sum(axis=-1)


class Net(nn.Cell):
    """The network in one of the parallel modes; parallel_modes/ is the lesson about them."""

    def __init__(self, mode="data_parallel", rank=0, rank_size=1):
        super().__init__()
        weight = 0.1 * np.random.default_rng(2).standard_normal((ROWS, COLUMNS))
        self.by_hand = mode == "hybrid_parallel"
        if self.by_hand:
            weight = weight[:, columns_of(rank, rank_size)]
        self.weight = Parameter(Tensor(weight.astype(np.float32)), name="weight",
                                layerwise_parallel=self.by_hand)  # slices are not to be averaged
        self.bias = Parameter(Tensor(np.zeros(1, np.float32)), name="bias")
        self.matmul, self.relu, self.reduce_sum = ops.MatMul(), ops.ReLU(), ops.ReduceSum()
        self.all_reduce = ops.AllReduce()
        if mode == "semi_auto_parallel":
            self.matmul.shard(((1, 1), (1, rank_size)))
            self.relu.shard(((1, rank_size),))
            self.reduce_sum.shard(((1, rank_size),))

    def construct(self, x):
        x = self.reduce_sum(self.relu(self.matmul(x, self.weight)), -1)
        if self.by_hand:  # x is the sum over own columns: add the others' sums, without gradients
            x = x + ops.stop_gradient(self.all_reduce(x) - x)
        return x + self.bias
