"""Handwritten digits, data parallel: every rank trains the same network on its own share of the images.

One process, as a check that all is installed:
    python train_ddp.py --data-path /path/MNIST_Data/train
One machine, 4 processes (4 cards, or the CPU where there is none):
    export DATA_PATH=/path/MNIST_Data/train/
    mpirun -n 4 --allow-run-as-root --output-filename log_output --merge-stderr-to-stdout python train_ddp.py
  or bash run.sh (checks everything first), or without Open MPI: bash run_msrun.sh
On a CPU with fewer than 4 cores, add --oversubscribe to a hand-typed mpirun; run.sh does it by itself.

Every rank prints its loss every 10 steps, and rank 0 the accuracy over all test images, if there are any:
    epoch: 0, step: 0, loss is 2.3025854
    ...
    accuracy: 0.9370
The lines that one process alone would not need are marked: grep -n "distributed:" train_ddp.py
"""

import argparse
import os
import sys
from pathlib import Path

import mpirun_on_cpu  # distributed: lets mpirun work on CPU too
import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops  # distributed: ops
from mindspore.communication import get_group_size, get_rank, init  # distributed: who am I, how many are we

from mnist_files import check_mnist_folder

# ---------------------------------------------------------------------------------------------- settings
parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
parser.add_argument("--data-path", default=os.getenv("DATA_PATH"), help="folder of the MNIST files (DATA_PATH)")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each rank")
parser.add_argument("--lr", type=float, default=0.01, help="learning rate of SGD")
parser.add_argument("--seed", type=int, default=1, help="initial weights and order of the images")
parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
parser.add_argument("--ckpt-dir", type=Path, help="save a checkpoint here after each epoch")
parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint in --ckpt-dir")
parser.add_argument("--check", action="store_true", help="only check the options and the data, then stop")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.steps or 1) < 1 or args.lr <= 0:
    parser.error("--epochs, --batch-size, --steps and --lr must be greater than 0")
if args.resume and not args.ckpt_dir:
    parser.error("--resume needs --ckpt-dir, the folder that was given when the checkpoints were saved")
try:
    train_images, test_images = check_mnist_folder(args.data_path)
except ValueError as error:
    parser.error(str(error))
if args.check:
    sys.exit()

# ------------------------------------------------------------------------------- device and other ranks
ms.set_context(mode=ms.GRAPH_MODE)
rank, rank_size = 0, 1  # distributed: as long as nobody says otherwise
if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "MS_ROLE", "RANK_ID")):  # distributed: launched
    mpirun_on_cpu.join_ranks()  # distributed: needed by mpirun on CPU only
    init()  # distributed: connect to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
    mpirun_on_cpu.take_own_cores()  # distributed: faster on CPU; not needed
    rank, rank_size = get_rank(), get_group_size()  # distributed: which rank this is, and of how many
    ms.set_auto_parallel_context(  # distributed: every rank holds all weights,
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)  # distributed: gradients are averaged
    print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}", flush=True)  # distributed: hello
else:  # distributed: started by hand, so say what starts several
    print("One process. To start 4: bash run.sh DATA_PATH 4, or mpirun -n 4 python train_ddp.py, "  # distributed:
          "or bash run_msrun.sh DATA_PATH 4", flush=True)  # distributed: (without Open MPI)
ms.set_seed(args.seed)
steps_per_epoch = train_images // (args.batch_size * rank_size)  # distributed: a step is rank_size batches
if steps_per_epoch == 0:
    parser.error(f"the {train_images} training images are fewer than one step needs; use a smaller --batch-size")


# ---------------------------------------------------------------------------------------------- data set
def create_dataset(usage, batch_size, epoch=0):
    """Make the pipeline of one epoch over the "train" or the "test" images.

    Returns:
        A dataset of (image, label) batches: float32 (batch, 1, 28, 28), normalised; int32 (batch,).
    """
    ds.config.set_seed(args.seed + epoch)  # a new order each epoch, the same after --resume
    if usage == "train":
        sampler = ds.DistributedSampler(num_shards=rank_size, shard_id=rank)  # distributed: a share of the shuffle
    else:
        sampler = ds.SubsetSampler(list(range(rank, test_images, rank_size)))  # distributed: no image twice
    dataset = ds.MnistDataset(str(args.data_path), usage=usage, sampler=sampler)
    dataset = dataset.map([ds.vision.Rescale(1.0 / 255.0, 0),
                           ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
                           ds.vision.HWC2CHW()], "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    # In training every step has a full batch, so one compiled graph serves them all; in a test no image is lost.
    return dataset.batch(batch_size, drop_remainder=usage == "train")


# --------------------------------------------------------------------------------- network and optimizer
class Network(nn.Cell):
    """784-512-512-10: (batch, 1, 28, 28) float32 images to (batch, 10) float32 logits."""

    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 512, weight_init="normal", bias_init="zeros"),
            nn.ReLU(),
            nn.Dense(512, 10, weight_init="normal", bias_init="zeros"),
        )

    def construct(self, x):
        return self.dense_relu_sequential(self.flatten(x))


class TrainStep(nn.Cell):
    """One training step, compiled as one graph: (image, label) to the loss of this batch, a scalar."""

    def __init__(self, network, optimizer):
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_fn = nn.CrossEntropyLoss()
        self.optimizer = optimizer
        self.loss_and_gradients = ms.value_and_grad(self.forward, None, optimizer.parameters)
        self.reduce_gradients = nn.Identity()  # distributed: one rank has nothing to average; several
        if rank_size > 1:  # distributed: all-reduce: each gets the mean of all gradients, so weights stay equal
            self.reduce_gradients = nn.DistributedGradReducer(optimizer.parameters)  # distributed:

    def forward(self, image, label):
        return self.loss_fn(self.network(image), label)

    def construct(self, image, label):
        loss, gradients = self.loss_and_gradients(image, label)
        gradients = self.reduce_gradients(gradients)  # distributed: the only talk between ranks in a step
        self.optimizer(gradients)
        return loss


net = Network()
optimizer = nn.SGD(net.trainable_params(), args.lr)
train_step = TrainStep(net, optimizer)
train_step.set_train()


# ------------------------------------------------------------------------------------------- checkpoints
def checkpoint_folder():
    return args.ckpt_dir / f"rank_{rank}"  # distributed: a folder a rank, no two ranks write one file


def save(epoch):
    """Save weights and optimizer after an epoch: under another name first, so that no half file is ever found."""
    checkpoint_folder().mkdir(parents=True, exist_ok=True)
    draft = checkpoint_folder() / "draft.ckpt"
    draft.unlink(missing_ok=True)
    ms.save_checkpoint(train_step, str(draft))
    draft.replace(checkpoint_folder() / f"epoch_{epoch}.ckpt")


def resume():
    """Load the newest checkpoint and return the epoch to go on with."""
    newest = max((int(file.stem.split("_")[1]) for file in checkpoint_folder().glob("epoch_*.ckpt")), default=-1)
    newest = int(over_ranks(min, newest))  # distributed: a killed job may not have saved on all
    if newest < 0:
        parser.error(f"nothing to resume: no epoch_*.ckpt in {checkpoint_folder()}")
    ms.load_param_into_net(train_step, ms.load_checkpoint(str(checkpoint_folder() / f"epoch_{newest}.ckpt")))
    return newest + 1


# ---------------------------------------------------------------------------------------- train and test
def over_ranks(combine, value):  # distributed:
    """Apply sum() or min() to a number that every rank has; all ranks get the same result."""  # distributed:
    if rank_size == 1:  # distributed:
        return value  # distributed:
    return combine(ops.AllGather()(ms.Tensor([value], ms.float32)).asnumpy().tolist())  # distributed:


def test_accuracy():
    """Share of the test images that the network gets right."""
    net.set_train(False)
    correct = 0
    for image, label in create_dataset("test", batch_size=500):
        correct += int((net(image).argmax(axis=1) == label).sum())
    net.set_train(True)
    correct = over_ranks(sum, correct)  # distributed: every rank counted its own share
    return correct / test_images


first_epoch = resume() if args.resume else 0
for epoch in range(first_epoch, args.epochs):
    for step, (image, label) in enumerate(create_dataset("train", args.batch_size, epoch)):
        if step == args.steps:
            break
        loss = train_step(image, label)
        if step % 10 == 0:
            print(f"epoch: {epoch}, step: {step}, loss is {loss}", flush=True)
    if args.ckpt_dir:
        save(epoch)
    if test_images:
        accuracy = test_accuracy()
        if rank == 0:  # distributed: all ranks know it,
            print(f"accuracy: {accuracy:.4f}", flush=True)  # distributed: one says it
mpirun_on_cpu.leave_ranks()  # distributed: all ranks end together (mpirun on CPU only)
