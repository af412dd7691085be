"""ResNet with one block a stage on 32x32 pictures, in every way to compute it; the losses should be the same.

    python resnet.py stand_alone OUT --parts 2 --part-axis batch
    python dry_run/compute.py -n 2 resnet.py auto_parallel OUT

Batch norm looks at the pictures that it is given. Where ranks or micro batches have some of them each, one process
computes the same if its batch norm looks at the same parts: --parts.
"""
import argparse
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import LossMonitor, Model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "resnet50_ascend"))
from resnet import resnet50  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=("stand_alone", "auto_parallel", "pipeline", "strips"))
parser.add_argument("out", type=Path)
parser.add_argument("--parts", type=int, default=1, help="stand_alone: batch norm looks at so many parts of the batch")
parser.add_argument("--micro-batches", type=int, default=1, help="add up the gradients of so many parts of the batch")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--sink", action="store_true")
parser.add_argument("--evaluate", action="store_true")
args = parser.parse_args()
BATCH = 8

ms.set_context(mode=ms.GRAPH_MODE)
rank, ranks = 0, 1
if args.mode != "stand_alone":
    init()
    rank, ranks = get_rank(), get_group_size()
    mode = "auto_parallel" if args.mode == "auto_parallel" else "semi_auto_parallel"
    ms.set_auto_parallel_context(parallel_mode=mode)
    if args.mode == "pipeline":
        ms.set_auto_parallel_context(pipeline_stages=2)
    if args.mode == "strips":
        ms.set_auto_parallel_context(dataset_strategy=((1, 1, 1, ranks), (1,)))

random = np.random.default_rng(5)
PICTURES = random.standard_normal((args.steps * BATCH, 3, 32, 32)).astype(np.float32)
LABELS = random.integers(0, 10, args.steps * BATCH).astype(np.int32)


class BatchNormOfParts(nn.Cell):
    """A batch norm that looks at each part of a batch by itself, as ranks do; the statistics of part 0 are kept."""

    def __init__(self, whole):
        super().__init__(auto_prefix=False)
        self.whole = whole
        self.norm = ops.BatchNorm(is_training=True, epsilon=whole.eps, momentum=whole.momentum)
        self.others = nn.CellList([nn.BatchNorm2d(whole.num_features, use_batch_statistics=True)
                                   for _ in range(args.parts - 1)])
        for parameter in self.others.get_parameters():
            parameter.name = f"{whole.gamma.name}.{parameter.name}"

    def construct(self, x):
        parts = ops.split(x, x.shape[0] // args.parts)
        gamma, beta = self.whole.gamma, self.whole.beta
        outputs = (self.norm(parts[0], gamma, beta, self.whole.moving_mean, self.whole.moving_variance)[0],)
        for i in range(args.parts - 1):
            other = self.others[i]
            outputs += (self.norm(parts[i + 1], gamma, beta, other.moving_mean, other.moving_variance)[0],)
        return ops.concat(outputs)


def replace_batch_norms(cell):
    """Put BatchNormOfParts in the place of every batch norm."""
    for name, inner in list(cell.name_cells().items()):
        if isinstance(inner, nn.BatchNorm2d):
            cell._cells[name] = BatchNormOfParts(inner)  # setattr would rename the parameters
        else:
            replace_batch_norms(inner)
    if isinstance(cell, nn.SequentialCell):
        cell.cell_list = list(cell._cells.values())


class Loss(nn.Cell):
    """The mean cross entropy; a part of it, where the losses of micro batches are added up."""

    def __init__(self, net, divide):
        super().__init__(auto_prefix=False)
        self.net, self.divide = net, divide
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=False)
        self.one_hot, self.mean = ops.OneHot(), ops.ReduceMean()
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)

    def construct(self, pictures, labels):
        return self.mean(self.loss(self.net(pictures), self.one_hot(labels, 10, self.on, self.off))) / self.divide


class InMicroBatches(nn.Cell):
    """What a PipelineCell computes, in one process."""

    def __init__(self, loss):
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, pictures, labels):
        size = pictures.shape[0] // args.micro_batches
        total = 0
        for i in range(args.micro_batches):
            total += self.loss(pictures[i * size:(i + 1) * size], labels[i * size:(i + 1) * size])
        return total


net = resnet50(10, (1, 1, 1, 1))
for parameter in net.get_parameters():
    if parameter.requires_grad:
        values = 0.5 * random.standard_normal(parameter.shape) / np.sqrt(max(1, parameter.size / parameter.shape[0]))
        parameter.set_data(Tensor((1 + 0.1 * values if "gamma" in parameter.name else values).astype(np.float32)))
if args.mode == "strips":
    net.conv1.conv2d.shard(((1, 1, 1, ranks), (1, 1, 1, 1)))
trained, saved = net.trainable_params(), list(net.get_parameters())
if args.parts > 1:
    replace_batch_norms(net)
if args.mode == "pipeline":
    for number, layer in enumerate((net.layer1, net.layer2, net.layer3, net.layer4)):
        layer[0].pipeline_stage = number // 2
optimizer = nn.Momentum(trained, 0.002, 0.9)
loss = Loss(net, args.micro_batches if args.mode == "stand_alone" else 1)  # Model divides a pipeline's gradients
if args.mode == "pipeline":
    loss = nn.PipelineCell(loss, args.micro_batches)
elif args.micro_batches > 1:
    loss = InMicroBatches(loss)

pictures, labels = PICTURES, LABELS
batch = BATCH
if args.mode == "strips":
    pictures = np.split(PICTURES, ranks, 3)[rank]
elif ranks > 1:
    share = ranks if args.mode == "auto_parallel" else ranks // 2
    mine = np.arange(len(PICTURES)).reshape(args.steps, share, -1)[:, rank % share].reshape(-1)
    pictures, labels, batch = PICTURES[mine], LABELS[mine], BATCH // share
dataset = ds.NumpySlicesDataset((np.ascontiguousarray(pictures), labels), shuffle=False).batch(batch)


class Show(LossMonitor):
    """Print all digits."""

    def step_end(self, run_context):
        found = run_context.original_args()
        loss = float(found.net_outputs.asnumpy())
        if args.mode == "pipeline":
            loss /= args.micro_batches
        print(f"rank {rank} step: {found.cur_step_num - 1}, loss is {loss:.7f}", flush=True)


model = Model(loss, optimizer=optimizer)
model.train(1, dataset, callbacks=[Show()], dataset_sink_mode=args.sink)
args.out.mkdir(parents=True, exist_ok=True)
np.savez(args.out / f"held_{rank}.npz", **{value.name: value.asnumpy() for value in saved})
if args.evaluate:
    net.set_train(False)
    if ranks > 1:
        ms.set_auto_parallel_context(dataset_strategy="full_batch")
        pictures, batch = PICTURES, BATCH
    np.save(args.out / f"answer_{rank}.npy", net(Tensor(pictures[:batch])).asnumpy())
if args.mode in ("auto_parallel", "strips"):
    ms.save_checkpoint(net, str(args.out / f"whole_{rank}.ckpt"), integrated_save=True)
