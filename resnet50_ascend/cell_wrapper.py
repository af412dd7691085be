"""The training step of gradient accumulation. The tutorial's cell_wrapper.py did it by hooks."""

import mindspore as ms
from mindspore import nn, ops


class TrainWithAccumulation(nn.Cell):
    """Training with one micro batch; the last of the micro_batches of a batch updates the weights.

    network is from images, float32 (n, 3, h, w), and labels, int32 (n,), to the loss; this is from
    the same to the mean loss of the batch's micro batches so far, a float32 scalar.
    """

    def __init__(self, network, optimizer, micro_batches, rank_size):
        super().__init__(auto_prefix=False)
        self.optimizer, self.micro_batches = optimizer, micro_batches
        self.network = network.set_train()
        self.loss_and_gradients = ms.value_and_grad(network, None, optimizer.parameters)
        self.sums = optimizer.parameters.clone("sum", init="zeros")
        self.loss_sum = ms.Parameter(ms.Tensor(0.0, ms.float32), "loss_sum", requires_grad=False)
        self.count = ms.Parameter(  # its name lets no job resume with another number of them
            ms.Tensor(0, ms.int32), f"micro_batch_of_{micro_batches}", requires_grad=False)
        self.each = ops.HyperMap()
        self.average = nn.Identity()
        # distributed: average the gradients over the ranks
        if rank_size > 1:
            self.average = nn.DistributedGradReducer(optimizer.parameters, True, rank_size)

    def construct(self, image, label):
        loss, gradients = self.loss_and_gradients(image, label)
        self.each(ops.assign_add, self.sums, gradients)
        self.loss_sum += loss
        self.count += 1
        mean_loss = self.loss_sum / self.count
        if self.count == self.micro_batches:
            gradients = self.each(ops.partial(scaled, 1 / self.micro_batches), self.sums)
            self.optimizer(self.average(gradients))
            self.each(set_to_zero, self.sums)
            self.loss_sum *= 0
            self.count *= 0
        return mean_loss


def scaled(factor, value):
    return value * factor


def set_to_zero(value):
    return ops.assign(value, ops.zeros_like(value))
