"""Semi-auto parallel: a batch cut into `rows`, the columns of a (512, 128) weight into `columns` slices."""
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import init
from mindspore.dataset import NumpySlicesDataset

rows, columns, batch = map(int, sys.argv[1:])
ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)


class Net(nn.Cell):
    """One sliced matrix product, one that is not."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((512, 128)), ms.float32), name="weight")
        self.matmul = ops.MatMul().shard(((rows, 1), (1, columns)))
        self.fc = nn.Dense(128, 10)

    def construct(self, x):
        x = self.matmul(x, self.weight)
        return self.fc(x)


samples = (np.ones((4 * batch, 512), np.float32), np.ones((4 * batch, 10), np.float32))
data = NumpySlicesDataset(samples, ["x", "y"]).batch(batch)
net = Net()
model = ms.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
model.train(1, data, dataset_sink_mode=True)
