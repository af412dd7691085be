r"""Handwritten digits, data parallel: each process (rank) trains on its share of the images.

    python train_ddp.py --data-path /path/MNIST_Data/train   one process, to see that all is there
    bash run.sh /path/MNIST_Data/train 4                     4 ranks: cards, or processes on a CPU
    bash run_msrun.sh /path/MNIST_Data/train 4               the same without Open MPI
    bash run_mpirun_1.sh -H HOST1:8,HOST2:8 /path/MNIST_Data/train         two machines
The second one typed by hand (on a CPU with fewer than 4 cores add --oversubscribe to mpirun):
    export DATA_PATH=/path/MNIST_Data/train
    mpirun -n 4 --allow-run-as-root --output-filename log_output --merge-stderr-to-stdout \
        python train_ddp.py
Each rank prints its loss every 10 steps, and rank 0 the accuracy over all test images, if any:
    rank 0 of 4 on CPU
    epoch: 0, step: 0, loss is 2.3022
    accuracy: 0.9370
What one process alone would not need is marked: grep -n "distributed:" train_ddp.py
"""

import argparse
import os
import sys
from pathlib import Path

# distributed: which rank this is, of how many; ops holds what all ranks do together
import ranks
from mindspore import ops
from mindspore.communication import get_group_size, get_rank, init

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mnist_files import mnist_folder

parser = argparse.ArgumentParser(description="Train on MNIST.", usage=argparse.SUPPRESS)
parser.add_argument("--data-path", type=mnist_folder, default=os.getenv("DATA_PATH", ""))
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=sys.maxsize, help="end each epoch after so many")
parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each rank")
parser.add_argument("--lr", type=float, default=0.01, help="learning rate of SGD")
parser.add_argument("--ckpt-dir", type=Path, help="save the trained weights in this folder")
parser.add_argument("--check", action="store_true", help="only check the options and the data")
args = parser.parse_args()
if min(args.epochs, args.steps, args.batch_size) < 1 or not 0 < args.lr < 1e9:
    parser.error("--epochs, --steps, --batch-size and --lr must be greater than 0, --lr not huge")
if args.check:
    sys.exit()
folders, test_images = args.data_path  # of the files, checked; how many test images there are

ms.set_context(mode=ms.GRAPH_MODE)
# distributed: connect to the other ranks (by HCCL on Ascend, NCCL on GPU, MCCL on CPU)
rank, rank_size = 0, 1
if ranks.join():  # started by mpirun, msrun or a launcher
    init()
    rank, rank_size = get_rank(), get_group_size()
    # all ranks hold all weights; gradients are averaged, not summed
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}", flush=True)
else:
    print("One process. To start 4: bash run.sh DATA_PATH 4, or mpirun -n 4 python train_ddp.py")

ms.set_seed(1)  # the same initial weights in every process


# ------------------------------------------ data set (for a model of your own: put yours here)
def create_dataset(usage, batch_size, epoch=0):
    """Batches of the "train" or "test" images: float32 (batch, 1, 28, 28) and int32 (batch,)."""
    ds.config.set_seed(1 + epoch)  # another order in each epoch
    if usage == "train":
        # distributed: this rank's share of the images, which all ranks shuffle alike (the seed)
        sampler = ds.DistributedSampler(num_shards=rank_size, shard_id=rank)
    else:
        # distributed: images rank, rank + rank_size ..., so that none is counted twice
        sampler = ds.SubsetSampler(list(range(rank, test_images, rank_size)))
    dataset = ds.MnistDataset(folders[usage], usage=usage, sampler=sampler)
    dataset = dataset.map([ds.vision.Rescale(1 / 255, 0), ds.vision.Normalize((0.1307,), (0.3081,)),
                           ds.vision.HWC2CHW()], "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    # In training, only full batches: one compiled graph serves all, and all ranks make equal steps.
    return dataset.batch(batch_size, drop_remainder=usage == "train")


# ----------------------------- network and optimizer (for a model of your own: put yours here)
net = nn.SequentialCell(  # float32 images (batch, 1, 28, 28) to float32 logits (batch, 10)
    nn.Flatten(), nn.Dense(28 * 28, 512, weight_init="normal", bias_init="zeros"), nn.ReLU(),
    nn.Dense(512, 512, weight_init="normal", bias_init="zeros"), nn.ReLU(),
    nn.Dense(512, 10, weight_init="normal", bias_init="zeros"))
optimizer = nn.SGD(net.trainable_params(), args.lr)


class TrainStep(nn.Cell):
    """One training step, compiled as one graph: (image, label) to the loss of this batch."""

    def __init__(self):
        super().__init__(auto_prefix=False)  # weights keep their names
        self.optimizer = optimizer
        loss = nn.WithLossCell(net, nn.CrossEntropyLoss())
        self.loss_and_gradients = ms.value_and_grad(loss, None, optimizer.parameters)
        # distributed: each rank gets the mean of all gradients (all-reduce): weights stay equal
        self.reduce_gradients = nn.Identity()
        if rank_size > 1:
            self.reduce_gradients = nn.DistributedGradReducer(optimizer.parameters)

    def construct(self, image, label):
        loss, gradients = self.loss_and_gradients(image, label)
        gradients = self.reduce_gradients(gradients)  # distributed: the ranks' only talk in a step
        self.optimizer(gradients)
        return loss


# ---------------------------------------------------------------------------------- train and test
train_step = TrainStep()
if create_dataset("train", args.batch_size).get_dataset_size() == 0:
    parser.error("there are fewer images than one step needs; use a smaller --batch-size")
for epoch in range(args.epochs):
    net.set_train()
    for step, (image, label) in enumerate(create_dataset("train", args.batch_size, epoch)):
        if step == args.steps:
            break
        loss = train_step(image, label)
        if step % 10 == 0:
            print(f"epoch: {epoch}, step: {step}, loss is {float(loss):.5g}", flush=True)
    if test_images:
        net.set_train(False)
        correct = 0
        for image, label in create_dataset("test", 500):
            correct += int((net(image).argmax(axis=1) == label).sum())
        # distributed: each rank counted in its own images; all-reduce adds up the counts
        if rank_size > 1:
            correct = float(ops.AllReduce()(ms.Tensor([correct], ms.float32))[0])
        if rank == 0:  # one rank is enough to say it
            print(f"accuracy: {correct / test_images:.4f}", flush=True)
if args.ckpt_dir:
    args.ckpt_dir.mkdir(parents=True, exist_ok=True)
    # distributed: a file a rank, no two ranks write the same
    ms.save_checkpoint(net, str(args.ckpt_dir / f"rank_{rank}.ckpt"))
ranks.leave()  # distributed: all ranks end together (needed on CPU)
