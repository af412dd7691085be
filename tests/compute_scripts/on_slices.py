"""Operators along the batch, which semi-automatic parallel cuts in two: what has no rule, an index, and rows.

    python on_slices.py median                                    one process
    python dry_run/compute.py -n 2 on_slices.py median index ...  the plan of two ranks; one line for each
"""
import os
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE)
if {"OMPI_COMM_WORLD_SIZE", "MS_SIMULATION_LEVEL"} & os.environ.keys():  # by compute.py, dry_run.py
    init()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
X, WEIGHT = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((4, 16), (16, 8)))


class Net(nn.Cell):
    """(4, 16) to (8,)."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = Parameter(Tensor(WEIGHT), name="weight"), how
        self.flatten = nn.Flatten()
        cut = 2 if how in ("cut argmax", "cut rows") else 1
        self.argmax = ops.Argmax(0).shard(((cut, 1),))
        self.add = ops.TensorScatterAdd().shard(((cut, 1), (1, 1), (1, 1)))

    def construct(self, x):
        y = ops.matmul(x, self.weight)
        if self.how == "median":
            return ops.median(y, 0)[0]
        if self.how == "transposed":
            return ops.median(y.T, 1)[0]
        if self.how == "index":
            value, index = ops.max(y, 0)
            return value + index
        if self.how in ("scalar", "value"):
            alone = ops.celu(ops.hardswish(self.flatten(x)))
            return ops.masked_fill(alone, x < 0, 0.1) if self.how == "scalar" else ops.max(y, 0)[0]
        if "rows" in self.how:
            return self.add(y, Tensor([[1], [3]], ms.int32), y[:2])
        return ops.argmax(y, 0) if self.how == "argmax" else self.argmax(y)


for each in sys.argv[1:]:
    print(f"{each} {Net(each)(Tensor(X)).asnumpy().round(4).tolist()}", flush=True)
