"""Auto parallel: MindSpore itself chooses how to cut two large layers."""
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init
from mindspore.dataset import NumpySlicesDataset

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="recursive_programming",
                             full_batch=True)


class Net(nn.Cell):
    """512 -> 4096 -> 512, with far larger weights than activations."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Dense(512, 4096)
        self.fc2 = nn.Dense(4096, 512)

    def construct(self, x):
        return self.fc2(ops.relu(self.fc1(x)))


samples = (np.ones((16, 512), np.float32), np.ones((16, 512), np.float32))
data = NumpySlicesDataset(samples, ["x", "y"]).batch(8)
net = Net()
model = ms.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
model.train(1, data, dataset_sink_mode=False)
