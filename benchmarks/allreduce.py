"""Seconds of MindSpore's all-reduce on CPU (MCCL) for each size: rank 0 prints the median over 3 to 200 calls."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mnist_ddp"))
import mindspore as ms
import mpirun_on_cpu
import numpy as np
from mindspore import ops
from mindspore.communication import get_rank, init

mpirun_on_cpu.join_ranks()
init()
all_reduce = ops.AllReduce()
for count in (1 << 10, 1 << 13, 1 << 16, 1 << 19, 670_000, 1 << 22, 25 << 20):
    value, times = ms.Tensor(np.ones(count, np.float32)), []
    for _ in range(max(3, min(200, (1 << 25) // count))):
        begin = time.perf_counter()
        result = all_reduce(value)
        result[:1].asnumpy()  # the call returns before it is done
        times.append(time.perf_counter() - begin)
    if get_rank() == 0:
        print(f"allreduce {4 * count} bytes: {sorted(times)[len(times) // 2]:.6f} s", flush=True)
mpirun_on_cpu.leave_ranks()
