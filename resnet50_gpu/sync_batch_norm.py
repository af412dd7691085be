"""Batch norm over the images of all ranks: synchronise_batch_norm(net, rank_size).

Plain batch norm takes mean and variance of its own rank's images. With 8 images a rank instead of
32 they are noisier, and accuracy falls with each card that is added while the batch of all ranks
stays the same. Here all ranks add up their sums before they normalise, so that N ranks compute what
one rank with the whole batch would.
"""

import mindspore as ms
from mindspore import nn, ops


class SyncBatchNorm(nn.Cell):
    """An nn.BatchNorm2d with statistics over all ranks. It keeps the parameters of the original.

    Args:
        local: the nn.BatchNorm2d to replace.
        rank_size: number of ranks; each has equally many images.

    Input and output: float32 (batch, channels, height, width).
    """

    def __init__(self, local, rank_size):
        super().__init__()
        self.gamma, self.beta = local.gamma, local.beta
        self.moving_mean, self.moving_variance = local.moving_mean, local.moving_variance
        self.eps, self.momentum = local.eps, local.momentum  # 0.1, the share of the new value
        self.rank_size = rank_size
        self.all_reduce = ops.AllReduce()  # sum over ranks; its gradient is a sum over ranks, too

    def construct(self, x):
        channels = x.shape[1]
        if self.training:
            # Values a channel, on all ranks; their sum and sum of squares, both in one message.
            count = self.rank_size * x.shape[0] * x.shape[2] * x.shape[3]
            sums = ops.concat((x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))))
            moments = self.all_reduce(sums) / count
            mean = moments[:channels]
            variance = ops.relu(moments[channels:] - mean * mean)  # rounding may give less than 0
            unbiased = variance * (count / (count - 1))  # as nn.BatchNorm2d keeps it
            old, new = 1 - self.momentum, self.momentum
            ops.assign(self.moving_mean, old * self.moving_mean + new * mean)
            ops.assign(self.moving_variance, old * self.moving_variance + new * unbiased)
        else:
            mean, variance = self.moving_mean, self.moving_variance
        scale = self.gamma * ops.rsqrt(variance + self.eps)
        shift = self.beta - mean * scale
        return x * scale.reshape((1, channels, 1, 1)) + shift.reshape((1, channels, 1, 1))


def synchronise_batch_norm(net, rank_size):
    """Replace each nn.BatchNorm2d of a net, in place; on Ascend by MindSpore's nn.SyncBatchNorm.

    Parameters stay the same objects under the same names, so checkpoints fit with and without. Call
    it after init() and before the optimizer is made.

    Returns:
        How many were replaced.
    """
    names = [(parameter, parameter.name) for parameter in net.get_parameters()]
    replaced = _replace(net, rank_size)
    for parameter, name in names:  # a new home would have given the parameters new names
        parameter.name = name
    return replaced


def _replace(parent, rank_size):
    replaced = 0
    for index, (name, cell) in enumerate(parent.name_cells().items()):
        if not isinstance(cell, nn.BatchNorm2d):
            replaced += _replace(cell, rank_size)
            continue
        if ms.get_context("device_target") == "Ascend":
            new = nn.SyncBatchNorm(cell.num_features, cell.eps, 1 - cell.momentum)
            new.gamma, new.beta = cell.gamma, cell.beta
            new.moving_mean, new.moving_variance = cell.moving_mean, cell.moving_variance
        else:
            new = SyncBatchNorm(cell, rank_size)
        if isinstance(parent, nn.SequentialCell):
            parent[index] = new
        else:
            setattr(parent, name, new)
        replaced += 1
    return replaced
