"""The MNIST tutorial's training step as its page prints it, on today's MindSpore: the side that speed.py compares with.

Only what no longer runs is changed: the launch on CPU (ranks.py), and usage="train", without which
MnistDataset would read the test images too. Network, data pipeline, eager step and printed lines are the tutorial's.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mnist_ddp"))
import mindspore as ms
import mindspore.dataset as ds
import ranks
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

BATCH_SIZE = int(os.getenv("BATCH_SIZE", "32"))

ms.set_context(mode=ms.GRAPH_MODE)
ranks.join()
init()
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
ms.set_seed(1)


class Network(nn.Cell):
    """(batch, 1, 28, 28) float32 to (batch, 10) float32 logits."""

    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512, weight_init="normal", bias_init="zeros"), nn.ReLU(),
            nn.Dense(512, 512, weight_init="normal", bias_init="zeros"), nn.ReLU(),
            nn.Dense(512, 10, weight_init="normal", bias_init="zeros"))

    def construct(self, x):
        return self.dense_relu_sequential(self.flatten(x))


def create_dataset(batch_size):
    """The tutorial's pipeline: each image goes through the operations by itself, then they are batched."""
    dataset = ds.MnistDataset(os.environ["DATA_PATH"], "train", num_shards=get_group_size(), shard_id=get_rank())
    dataset = dataset.map([ds.vision.Rescale(1.0 / 255.0, 0), ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
                           ds.vision.HWC2CHW()], "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size)


net = Network()
data_set = create_dataset(BATCH_SIZE)
optimizer = nn.SGD(net.trainable_params(), 1e-2)
loss_fn = nn.CrossEntropyLoss()


def forward_fn(data, target):
    """The loss of a batch, and the logits."""
    logits = net(data)
    return loss_fn(logits, target), logits


grad_fn = ms.value_and_grad(forward_fn, None, net.trainable_params(), has_aux=True)
grad_reducer = nn.DistributedGradReducer(optimizer.parameters)
for epoch in range(int(sys.argv[1])):
    for step, (image, label) in enumerate(data_set):
        if step == int(sys.argv[2]):
            break
        (loss_value, _), gradients = grad_fn(image, label)
        gradients = grad_reducer(gradients)
        optimizer(gradients)
        if step % 10 == 0:
            print(f"epoch: {epoch}, step: {step}, loss is {loss_value}", flush=True)
ranks.leave()
