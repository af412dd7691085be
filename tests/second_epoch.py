"""The second epoch of two ranks of ResNet, again in one process: its losses, and all parameters in one.npz.

    python second_epoch.py DATA SHARDS PARTS BATCH CHECKPOINT ...

It goes on from what the ranks have saved after their first epoch, puts the batches of SHARDS ranks together to BATCH
pictures a step, and has a batch norm that looks at PARTS parts of them by themselves, as ranks or micro batches do.
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
data, shards, parts, batch, *files = sys.argv[1:]
shards, parts, batch = int(shards), int(parts), int(batch)


class BatchNormOfParts(nn.BatchNorm2d):
    def construct(self, x):
        return ops.concat([self.bn_train(part, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
                           for part in ops.split(x, x.shape[0] // parts)])


ms.set_context(mode=ms.GRAPH_MODE)
resnet.nn.BatchNorm2d = BatchNormOfParts
read = []
for shard in range(shards):
    dataset = lesson.create_dataset(data, batch // shards, shard, shards, 32, 2)
    epochs = dataset.create_tuple_iterator(num_epochs=2, output_numpy=True)
    read.append([list(epochs) for _ in range(2)][1])
net = resnet.resnet50(10, (1, 1, 1, 1))
optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
step = nn.TrainOneStepCell(nn.WithLossCell(net, SoftmaxCrossEntropyExpand(sparse=True)), optimizer).set_train()
loaded = {name: value for file in files for name, value in load(Path(file)).items()}
for parameter in step.get_parameters():
    parameter.set_data(ms.Tensor(loaded[parameter.name].asnumpy()))
for pieces in zip(*read):
    images, labels = (np.concatenate(piece) for piece in zip(*pieces))
    print("loss is", step(ms.Tensor(images), ms.Tensor(labels)))
np.savez("one.npz", **{parameter.name: parameter.asnumpy() for parameter in step.get_parameters()})
