"""What cannot be computed: python dry_run/compute.py -n 2 faults.py control_flow."""
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")


class Net(nn.Cell):
    """One of the faults."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.matmul = ops.MatMul().shard(((1, 2), (2, 1)))
        self.weight = ms.Parameter(Tensor(np.ones((8, 8)), ms.float32))

    def construct(self, x):
        if self.fault == "control_flow":
            while x.sum() < 100:
                x = x * 2
        if self.fault == "no_kernel":
            x = x + ops.NPUAllocFloatStatus()()
        return self.matmul(x, self.weight)


fault = sys.argv[1]
net = Net(fault)
for step in range(2):
    if fault == "one_leaves" and step == 1 and get_rank() == 1:
        break
    if fault == "cut_twice" and step == 1:
        held, net = net.weight, Net(fault)
        net.weight, net.matmul = held, ops.MatMul().shard(((2, 1), (1, 1)))
    net(Tensor(np.ones((8, 8)), ms.float32))
    print(f"rank {get_rank()} step {step} done", flush=True)
