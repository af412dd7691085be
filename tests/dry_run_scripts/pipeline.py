"""A pipeline of two stages: the first holds fc1, the second fc2."""
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init
from mindspore.dataset import NumpySlicesDataset

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, full_batch=True)


class Net(nn.Cell):
    """16 -> 64 -> 10, one layer a stage."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Dense(16, 64)
        self.fc2 = nn.Dense(64, 10)
        self.fc1.pipeline_stage = 0
        self.fc2.pipeline_stage = 1

    def construct(self, x):
        return self.fc2(ops.relu(self.fc1(x)))


samples = (np.ones((32, 16), np.float32), np.ones((32, 10), np.float32))
data = NumpySlicesDataset(samples, ["x", "y"]).batch(16)
net = nn.PipelineCell(nn.WithLossCell(Net(), nn.MSELoss()), 4)
model = ms.Model(net, optimizer=nn.Momentum(net.trainable_params(), 0.1, 0.9))
model.train(1, data, dataset_sink_mode=True)
