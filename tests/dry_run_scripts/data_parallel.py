"""A two-layer network in data parallel: gradients of 1,738 float32 parameters are all-reduced."""
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)


class Net(nn.Cell):
    """16 -> 64 -> 10."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Dense(16, 64)
        self.fc2 = nn.Dense(64, 10)

    def construct(self, x):
        return self.fc2(ops.relu(self.fc1(x)))


samples = (np.ones((256, 16), np.float32), np.zeros(256, np.int32))
data = NumpySlicesDataset(samples, ["x", "y"], num_shards=get_group_size(), shard_id=get_rank()).batch(4)
net = Net()
model = ms.Model(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
                 nn.Momentum(net.trainable_params(), 0.1, 0.9))
model.train(2, data, callbacks=ms.train.LossMonitor(1), dataset_sink_mode=False)
print("not reached in a dry run")
