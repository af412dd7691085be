"""Sums over ranks that are multiplied, and what MindSpore adds to them; prints the weights after each case's two steps.

    python ../../dry_run/compute.py -n 2 moved.py CASE ...       squares, square, tensor
"""

import os
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE)
if "OMPI_COMM_WORLD_SIZE" in os.environ:
    init()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")


class Net(nn.Cell):
    def __init__(self, case):
        super().__init__()
        self.case = case
        self.w = Parameter(Tensor(np.arange(12).reshape(4, 3) / 10, ms.float32), name="w")

    def construct(self, x):
        if self.case == "squares":
            s = ops.matmul(x, self.w).sum(0)
            return (s * s).mean()
        return ops.matmul(x, self.w).sum(0).square().mean()


class Step(nn.TrainOneStepCell):
    """With a loss that is scaled, and gradients that are unscaled."""

    def __init__(self, network, optimizer, case):
        super().__init__(network, optimizer)
        self.scale, self.map = Tensor(1024.0, ms.float32), ops.HyperMap()
        self.case = case

    def construct(self, x):
        gradients = ops.grad(self.scaled, None, self.weights)(x)
        unscale = self.multiply if self.case == "tensor" else self.divide
        return self.optimizer(self.map(unscale, gradients))

    def multiply(self, gradient):
        return gradient * (1 / self.scale)

    def divide(self, gradient):
        return gradient / self.scale

    def scaled(self, x):
        return self.network(x) * self.scale


for case in sys.argv[1:]:
    net = Net(case)
    step = Step(net, nn.Momentum(net.trainable_params(), 0.01, 0.9, weight_decay=0.5), case)
    for _ in range(2):
        step(Tensor(np.random.RandomState(0).randn(8, 4), ms.float32))
    print(f"{case}: {np.round(net.w.asnumpy().sum(), 4)}", flush=True)
