"""A hand-written training loop of three graphs: gradients, their reduction, the optimizer."""
import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import init
from mindspore.dataset import NumpySlicesDataset

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
init()
net = nn.Dense(16, 10)
loss_fn = nn.MSELoss()
optimizer = nn.SGD(net.trainable_params(), 0.01)


def forward(x, y):
    """The loss of one batch."""
    return loss_fn(net(x), y)


gradients = ms.value_and_grad(forward, None, net.trainable_params())
reduce = nn.DistributedGradReducer(optimizer.parameters)
data = NumpySlicesDataset((np.ones((64, 16), np.float32), np.ones((64, 10), np.float32)), ["x", "y"]).batch(4)
for step, (x, y) in enumerate(data):
    loss, grads = gradients(x, y)
    optimizer(reduce(grads))
    print("step", step)
