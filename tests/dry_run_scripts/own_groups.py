"""A group by hand: ranks should agree on it, and on what they do in it. The argument plants a fault."""
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_rank, init

fault = sys.argv[1]
ms.set_context(mode=ms.GRAPH_MODE)
init()
rank = get_rank()
create_group("pair", [0, 1, 2] if fault == "members" and rank == 1 else [0, 1])


class Step(nn.Cell):
    """Two collectives over the pair."""

    def __init__(self):
        super().__init__()
        self.swapped = fault == "order" and rank == 1
        self.gather = ops.AllGather(group="pair")
        self.reduce = ops.AllReduce(group="pair")

    def construct(self, x):
        if self.swapped:
            return self.gather(self.reduce(x))
        return self.reduce(self.gather(x))


Step()(Tensor(np.ones((2, 3)), ms.float32))
