"""The second epoch of two ranks of ResNet, again in one process: its losses, and all parameters in <name>.npz.

    python second_epoch.py DATA NAME:SHARDS:MOMENTA:CHECKPOINT:CHECKPOINT ...

Each goes on from what the ranks have saved after their first epoch, puts the batches of SHARDS ranks together to 16
pictures a step, and has a batch norm that looks at each half of them by itself, as ranks or micro batches do.
MOMENTA is 1; other numbers, by which the momenta are multiplied, are planted bugs.
"""
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import resnet
import resnet50_distributed_training as lesson
from checkpoints import load
from loss import SoftmaxCrossEntropyExpand

BATCH, PARTS = 16, 2


class BatchNormOfParts(nn.BatchNorm2d):
    def construct(self, x):
        return ops.concat([self.bn_train(part, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
                           for part in ops.split(x, x.shape[0] // PARTS)])


ms.set_context(mode=ms.GRAPH_MODE)
resnet.nn.BatchNorm2d = BatchNormOfParts
net = resnet.resnet50(10, (1, 1, 1, 1))
optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
step = nn.TrainOneStepCell(nn.WithLossCell(net, SoftmaxCrossEntropyExpand(sparse=True)), optimizer).set_train()
for job in sys.argv[2:]:
    name, shards, momenta, *files = job.split(":")
    read = []
    for shard in range(int(shards)):
        dataset = lesson.create_dataset(sys.argv[1], BATCH // int(shards), shard, int(shards), 32, 2)
        epochs = dataset.create_tuple_iterator(num_epochs=2, output_numpy=True)
        read.append([list(epochs) for _ in range(2)][1])
    loaded = {key: value.asnumpy() for file in files for key, value in load(Path(file)).items()}
    for parameter in step.get_parameters():
        factor = np.float32(momenta) if parameter.name.startswith("moments") else 1
        parameter.set_data(ms.Tensor(factor * loaded[parameter.name], parameter.dtype))
    for pieces in zip(*read):
        images, labels = (np.concatenate(piece) for piece in zip(*pieces))
        print(f"{name}: loss is", step(ms.Tensor(images), ms.Tensor(labels)))
    np.savez(f"{name}.npz", **{parameter.name: parameter.asnumpy() for parameter in step.get_parameters()})
