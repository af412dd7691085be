"""Batch norm over the images of all ranks: synchronise_batch_norm(net, rank_size).

Plain batch norm takes mean and variance of its own rank's images: with 8 images instead of 32 they
are noisier, and accuracy falls. Here all ranks add up their sums before they normalise, so that N
ranks compute what one rank with the whole batch would.
"""

from mindspore import float32, nn, ops


class SyncBatchNorm(nn.Cell):
    """The nn.BatchNorm2d local, with its parameters, and statistics over all ranks.

    Input and output: (batch, channels, height, width), also float16; the same batch on each rank.
    """

    def __init__(self, local, rank_size):
        super().__init__()
        self.gamma, self.beta = local.gamma, local.beta
        self.moving_mean, self.moving_variance = local.moving_mean, local.moving_variance
        self.eps, self.momentum = local.eps, local.momentum  # 0.1, the share of the new value
        self.rank_size, self.of_batch = rank_size, local.use_batch_statistics  # None: in training
        self.all_reduce = ops.AllReduce()  # sum over ranks; its gradient is a sum over ranks, too

    def construct(self, x):
        channels, kind, x = x.shape[1], x.dtype, x.astype(float32)  # float16 ends at 65,504
        if self.training if self.of_batch is None else self.of_batch:
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
        return (x * scale.reshape((1, -1, 1, 1)) + shift.reshape((1, -1, 1, 1))).astype(kind)


def synchronise_batch_norm(net, rank_size):
    """Replace each nn.BatchNorm2d of a network; after init(), before the optimizer is made."""
    names, made = [(parameter, parameter.name) for parameter in net.get_parameters()], {}
    for _, parent in list(net.cells_and_names()):
        for index, (name, cell) in enumerate(list(parent._cells.items())):  # one may be held twice
            if isinstance(cell, nn.BatchNorm2d):
                if type(cell).construct is not nn.BatchNorm2d.construct:
                    raise TypeError(f"{type(cell).__name__} has a construct() of its own, which a "
                                    "synchronised batch norm lacks: move it into a cell around it")
                made[cell] = made.get(cell) or SyncBatchNorm(cell, rank_size)
                if isinstance(parent, nn.SequentialCell):
                    parent[index] = made[cell]
                else:
                    setattr(parent, name, made[cell])
    for parameter, name in names:  # as before, so that checkpoints fit with and without
        parameter.name = name
