"""Trains towards the mean of the targets and what the network says itself, which it is asked in several places; or with
a penalty of the gradient by its input."""
import os
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops
ms.set_context(mode=ms.GRAPH_MODE)
if "OMPI_COMM_WORLD_SIZE" in os.environ:
    ms.communication.init()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
rng = np.random.default_rng(1)
first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (4, 8)))
x, y = (Tensor(rng.normal(size=(8, 4)).astype(np.float32)) for _ in "xy")


def say(*words):
    if os.getenv("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(*words, flush=True)


class Net(nn.Cell):
    def __init__(self, where):
        super().__init__()
        self.widen = nn.Dense(4, 8, weight_init=Tensor(first), has_bias=False)
        self.narrow = nn.Dense(8, 4, weight_init=Tensor(second), has_bias=False)
        self.widen.matmul.shard(((2, 1), (1, 1)) if where == "batch is cut" else ((1, 1), (2, 1)))
        self.narrow.matmul.shard(((2, 1), (1, 1)) if where == "batch is cut" else ((1, 2), (1, 2)))

    def construct(self, x):
        return self.narrow(self.widen(x))


class Step(nn.Cell):
    def __init__(self, where):
        super().__init__(auto_prefix=False)
        self.net, self.where = Net(where), where
        self.optimizer = nn.Momentum(self.net.trainable_params(), 0.1, 0.9)
        self.run = ms.value_and_grad(self.loss, None, self.optimizer.parameters)

    def loss(self, x, y):
        if self.where == "inside":
            y = (y + ops.stop_gradient(self.net(x))) / 2
        loss = ((self.net(x) - y) ** 2).mean()
        if self.where == "penalty":
            loss = loss + (ms.grad(self.net)(x) ** 2).mean()
        return loss

    def construct(self, x, y):
        if self.where in ("outside", "batch is cut"):
            y = (y + self.net(x)) / 2
        if self.where == "scaled":
            y = (y + ops.matmul(ops.matmul(x, (1 * self.net.widen.weight).T), (1 * self.net.narrow.weight).T)) / 2
        loss, gradients = self.run(x, y)
        return ops.depend(loss, self.optimizer(gradients))


for where in ("inside", "outside", "scaled", "batch is cut", "graph of its own", "penalty"):
    say("case", where)
    step = Step(where)
    for _ in range(3):
        target = (y + step.net(x)) / 2 if "graph" in where else y
        say("loss", step(x, target).asnumpy())
