"""On CPU MindSpore's AllGather and Broadcast carry 32 bits of a number of 64, and nothing says so. Outside of graphs
they carry all here, as on cards.
"""

import functools

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.common.api import _pynative_executor
from mindspore.ops.primitive import jit_context


def whole(collective, values, carry):
    """What carry(collective, values) returns, those of float64 and int64 with all their bits."""
    if not isinstance(values, Tensor) or jit_context():  # while a graph is recorded, numbers would become constants
        return carry(collective, values)
    if not values.shape and isinstance(collective, ops.AllGather):  # MindSpore crashes
        raise ValueError("AllGather joins the ranks' tensors along their first axis, and a single number has none: "
                         "give it x.reshape(1)")
    # A gradient would be lost on the way; of integers there is none.
    if values.dtype != ms.int64 and (values.dtype != ms.float64 or _pynative_executor.grad_flag()):
        return carry(collective, values)
    numbers = values.asnumpy()
    halves = np.ascontiguousarray(numbers).reshape(numbers.shape or 1).view(np.int32)
    carried = carry(collective, Tensor(halves)).asnumpy().view(numbers.dtype)
    return Tensor(carried if numbers.shape else carried.reshape(()))


def take_over():
    """Have both carry whole numbers where they are called outside of graphs."""
    gather, broadcast = ops.AllGather.__call__, ops.Broadcast.__call__

    @functools.wraps(gather)
    def gather_whole(self, values):
        return whole(self, values, gather)

    @functools.wraps(broadcast)
    def broadcast_whole(self, all_values):
        if not isinstance(all_values, (list, tuple)):
            return broadcast(self, all_values)
        return tuple(whole(self, values, lambda one, values: broadcast(one, (values,))[0]) for values in all_values)

    ops.AllGather.__call__, ops.Broadcast.__call__ = gather_whole, broadcast_whole
