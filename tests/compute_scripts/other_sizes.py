"""A hidden layer that is cut, and larger on rank 1 than on rank 0: only one number is exchanged, so nobody waits."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")


class Net(nn.Cell):
    """(16, 8) to a number."""

    def __init__(self, hidden):
        super().__init__()
        self.first = Parameter(Tensor(np.ones((8, hidden)), ms.float32), name="first")
        self.second = Parameter(Tensor(np.ones((hidden, 4)), ms.float32), name="second")
        self.columns, self.rows = ops.MatMul().shard(((1, 1), (1, 2))), ops.MatMul().shard(((1, 2), (2, 1)))
        self.mean = ops.ReduceMean()

    def construct(self, x):
        return self.mean(self.rows(self.columns(x, self.first), self.second))


net = Net(64 + 8 * get_rank())
step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1)).set_train()
print("loss", step(Tensor(np.ones((16, 8)), ms.float32)))
