"""Handwritten digits in one process: what train_ddp.py spreads over several ranks.

    python train_cpu.py --data-path /path/MNIST_Data/train

It runs on whatever MindSpore finds, an Ascend or NVIDIA card or the CPU, and prints its loss every 10 steps and,
if there are test images, the accuracy after each epoch:
    epoch: 0, step: 0, loss is 2.3025854
    ...
    accuracy: 0.9370
Compare with: diff train_cpu.py train_ddp.py
"""

import argparse
import os
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn

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
ms.set_seed(args.seed)
steps_per_epoch = train_images // args.batch_size
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
        sampler = ds.RandomSampler()
    else:
        sampler = ds.SequentialSampler()
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

    def forward(self, image, label):
        return self.loss_fn(self.network(image), label)

    def construct(self, image, label):
        loss, gradients = self.loss_and_gradients(image, label)
        self.optimizer(gradients)
        return loss


net = Network()
optimizer = nn.SGD(net.trainable_params(), args.lr)
train_step = TrainStep(net, optimizer)
train_step.set_train()


# ------------------------------------------------------------------------------------------- checkpoints
def checkpoint_folder():
    return args.ckpt_dir


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
    if newest < 0:
        parser.error(f"nothing to resume: no epoch_*.ckpt in {checkpoint_folder()}")
    ms.load_param_into_net(train_step, ms.load_checkpoint(str(checkpoint_folder() / f"epoch_{newest}.ckpt")))
    return newest + 1


# ---------------------------------------------------------------------------------------- train and test
def test_accuracy():
    """Share of the test images that the network gets right."""
    net.set_train(False)
    correct = 0
    for image, label in create_dataset("test", batch_size=500):
        correct += int((net(image).argmax(axis=1) == label).sum())
    net.set_train(True)
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
        print(f"accuracy: {accuracy:.4f}", flush=True)
