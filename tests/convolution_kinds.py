"""Results and gradients of convolutions of many kinds, written to a file: python convolution_kinds.py FILE.npz

The folder of convolutions.py is given as TOOLS in the environment.
"""

import os
import runpy
import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

if os.environ["TOOLS"]:
    print("quick:", runpy.run_path(os.environ["TOOLS"] + "/convolutions.py")["take_over"](), flush=True)
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(1)


def conv2d(shape, out, kernel, **options):
    return shape, nn.Conv2d(shape[1], out, kernel, **{"pad_mode": "pad", **options})


KINDS = [
    conv2d((2, 3, 32, 32), 64, 7, stride=2, padding=3),
    conv2d((2, 64, 9, 9), 64, 3, padding=1),
    conv2d((3, 64, 8, 8), 256, 1),
    conv2d((3, 64, 8, 8), 128, 1, stride=2),
    conv2d((2, 128, 1, 1), 512, 1),
    conv2d((2, 16, 5, 7), 24, (3, 5), padding=(0, 2, 1, 3), has_bias=True),
    conv2d((2, 16, 12, 12), 16, 3, dilation=2, padding=2),
    conv2d((2, 16, 10, 10), 32, 3, group=4, padding=1),
    conv2d((2, 16, 10, 10), 16, 3, group=16, padding=1),  # depthwise
    conv2d((2, 5, 6, 6), 7, 3, pad_mode="same", has_bias=True),
    conv2d((1, 1, 4, 4), 1, 2),
    ((2, 6, 20), nn.Conv1d(6, 12, 5, stride=2)),
    ((2, 8, 7, 7), nn.Conv2dTranspose(8, 16, 4, stride=2, pad_mode="pad", padding=1)),
    ((1, 4, 5, 6, 7), nn.Conv3d(4, 8, 3, pad_mode="same")),
]


class All(nn.Cell):
    """All of them in one graph: MindSpore may compute some at the same time."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.CellList([cell for _, cell in KINDS])
        self.count = len(KINDS)

    def construct(self, *inputs):
        return [self.kinds[i](inputs[i]) for i in range(self.count)]


class Loss(nn.Cell):
    """One number that depends on all of them."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, *inputs):
        total = 0.0
        for out in self.net(*inputs):
            total += ops.ReduceSum()(out * ops.sin(out))
        return total


net = All()
inputs = [ms.Tensor(random.standard_normal(shape), ms.float32) for shape, _ in KINDS]
for parameter in net.get_parameters():
    parameter.set_data(ms.Tensor(random.standard_normal(parameter.shape) * 0.1, ms.float32))
gradients = ops.GradOperation(get_all=True, get_by_list=True)(Loss(net), ms.ParameterTuple(net.get_parameters()))
for _ in range(2):  # the second time, all copies are ready
    to_inputs, to_parameters = gradients(*inputs)
    arrays = [*net(*inputs), *to_inputs, *to_parameters]
np.savez(sys.argv[1], *[array.asnumpy() for array in arrays])
