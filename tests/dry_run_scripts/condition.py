"""Collectives in a condition and in a loop."""

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE)
init()


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.reduce, self.gather = ops.AllReduce(), ops.AllGather()

    def construct(self, x):
        if x.sum() > 0:
            x = self.reduce(x)
        y, i = self.gather(x), 0
        while y.sum() > i:
            y = self.reduce(y) - 1
            i = i + 1
        return y


Net()(ms.Tensor([[1.0, 2.0]]))
