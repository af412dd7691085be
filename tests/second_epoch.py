"""The second epoch of two ranks of ResNet, again in one process: its losses, and all parameters in <name>.npz.

    python second_epoch.py DATA NAME:SHARDS:MOMENTA:CHECKPOINT:CHECKPOINT ...

Each goes on from what the ranks have saved after their first epoch, puts the batches of SHARDS ranks together to 8
pictures a step, and has a batch norm that looks at each half of them by itself, as ranks or micro batches do. A rank
has statistics of its own half, those of rank 1 are called <name>_1; micro batches (of the NAME pipeline) share them.
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

BATCH, PARTS = 8, 2


class BatchNormOfMicroBatches(nn.BatchNorm2d):
    def construct(self, x):
        return ops.concat([self.bn_train(part, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
                           for part in ops.split(x, x.shape[0] // PARTS)])


class BatchNormOfRanks(nn.BatchNorm2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in ("moving_mean", "moving_variance"):
            setattr(self, f"{name}_1", ms.Parameter(getattr(self, name), name=f"{name}_1", requires_grad=False))

    def construct(self, x):
        first, second = ops.split(x, x.shape[0] // PARTS)
        return ops.concat([
            self.bn_train(first, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0],
            self.bn_train(second, self.gamma, self.beta, self.moving_mean_1, self.moving_variance_1)[0]])


def training_step(batch_norm):
    """A ResNet of two blocks, its loss and optimizer."""
    resnet.nn.BatchNorm2d = batch_norm
    net = resnet.resnet50(10, (1, 0, 0, 1))
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    return nn.TrainOneStepCell(nn.WithLossCell(net, SoftmaxCrossEntropyExpand(sparse=True)), optimizer).set_train()


ms.set_context(mode=ms.GRAPH_MODE)
of_ranks, of_micro_batches = training_step(BatchNormOfRanks), training_step(BatchNormOfMicroBatches)
for job in sys.argv[2:]:
    name, shards, momenta, *files = job.split(":")
    step = of_micro_batches if "pipeline" in name else of_ranks
    read = []
    for shard in range(int(shards)):
        dataset = lesson.create_dataset(sys.argv[1], BATCH // int(shards), shard, int(shards), 32, 2)
        epochs = dataset.create_tuple_iterator(num_epochs=2, output_numpy=True)
        read.append([list(epochs) for _ in range(2)][1])
    held = [{key: value.asnumpy() for key, value in load(Path(file)).items()} for file in files]
    loaded = {**held[1], **held[0], **{f"{key}_1": value for key, value in held[1].items() if ".moving_" in key}}
    for parameter in step.get_parameters():
        factor = np.float32(momenta) if parameter.name.startswith("moments") else 1
        parameter.set_data(ms.Tensor(factor * loaded[parameter.name], parameter.dtype))
    for pieces in zip(*read):
        images, labels = (np.concatenate(piece) for piece in zip(*pieces))
        print(f"{name}: loss is", step(ms.Tensor(images), ms.Tensor(labels)))
    np.savez(f"{name}.npz", **{parameter.name: parameter.asnumpy() for parameter in step.get_parameters()})
