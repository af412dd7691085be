"""Seconds of an all-reduce on CPU for each size, by MPI, or with ALL_REDUCE=MCCL in the environment by MindSpore's own:
rank 0 prints the median over 3 to 200 calls.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mnist_ddp"))
import mindspore as ms
import numpy as np
import ranks
from mindspore import nn, ops
from mindspore.communication import get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)  # in the other mode the main thread spins, and slows the exchange down
ranks.join()
init()


class Exchange(nn.Cell):
    """An all-reduce as a compiled graph, as in the lessons."""

    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, value):
        return self.all_reduce(value)


all_reduce = Exchange()
for count in (1 << 10, 1 << 13, 1 << 16, 1 << 19, 670_000, 1 << 22, 25 << 20):
    value, times = ms.Tensor(np.ones(count, np.float32)), []
    all_reduce(value)  # compiles
    for _ in range(max(3, min(200, (1 << 25) // count))):
        begin = time.perf_counter()
        all_reduce(value).asnumpy()  # the call returns before it is done
        times.append(time.perf_counter() - begin)
    if get_rank() == 0:
        print(f"allreduce {4 * count} bytes: {sorted(times)[len(times) // 2]:.6f} s", flush=True)
ranks.leave()
