"""Rank 0 sends what rank 1, or the rank named, never receives; further ranks only take part in an AllReduce."""
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)
init()


class Step(nn.Cell):
    """One exchange."""

    def __init__(self, sends):
        super().__init__()
        self.sends = sends
        self.send = ops.Send(sr_tag=7, dest_rank=int(sys.argv[1] if sys.argv[1:] else 1), group="hccl_world_group")
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        if self.sends:
            x = ops.depend(x, self.send(x))
        return self.all_reduce(x)


Step(get_rank() == 0)(Tensor(np.ones((2, 3)), ms.float32))
