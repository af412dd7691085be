"""Gradients of two halves of a batch, clipped by the norm of all; both layers are cut, by a strategy or as shards.

    python dry_run/compute.py -n 2 norms.py added      added up: MindSpore's plan takes each rank's own norm
    python dry_run/compute.py -n 2 norms.py at_once    of the sum of the losses: the norm of all
    ... twice          clipped twice: the second norm is each rank's own
    ... nothing_cut    added up, where all ranks hold all: the norm of all
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)
init()
random = np.random.default_rng(1)
X, Y, FIRST, SECOND = (random.standard_normal(shape).astype(np.float32) for shape in (
    (16, 16), (16, 8), (16, 32), (32, 8)))


class Net(nn.Cell):
    """(batch, 16) to (batch, 8)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Parameter(Tensor(FIRST), name="first"), Parameter(Tensor(SECOND), name="second")
        self.cut, self.whole = ops.MatMul(), ops.MatMul()
        if how != "nothing_cut":
            self.cut.shard(((1, 1), (1, 2)))

    def construct(self, x):
        return self.whole(self.cut(x, self.first), self.second)


class Step(nn.Cell):
    """One step of training."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.net = Net()
        self.optimizer = nn.SGD(self.net.trainable_params(), 0.1)
        self.of_half = ms.value_and_grad(self.loss, None, self.optimizer.parameters)
        self.of_both = ms.value_and_grad(self.sum_of_losses, None, self.optimizer.parameters)
        self.added, self.twice = how in ("added", "nothing_cut"), how == "twice"

    def loss(self, x, y):
        return ((self.net(x) - y) ** 2).mean()

    def sum_of_losses(self, x, y):
        return self.loss(x[:8], y[:8]) + self.loss(x[8:], y[8:])

    def construct(self, x, y):
        if self.added:
            loss, one = self.of_half(x[:8], y[:8])
            more, other = self.of_half(x[8:], y[8:])
            loss, gradients = loss + more, (one[0] + other[0], one[1] + other[1])
        else:
            loss, gradients = self.of_both(x, y)
        if self.twice:
            gradients = ops.clip_by_global_norm(gradients, 0.1)
        return ops.depend(loss, self.optimizer(ops.clip_by_global_norm(gradients, 0.05)))


for how in sys.argv[1:]:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=how != "nothing_cut",
                                 dataset_strategy="data_parallel" if how == "nothing_cut" else "full_batch",
                                 parallel_optimizer_config={"parallel_optimizer_threshold": 0})
    step = Step().set_train()
    for _ in range(2):
        print(f"rank {get_rank()} {how}: loss is", step(Tensor(X), Tensor(Y)), flush=True)
