"""ResNet-50 on CIFAR-10 with sliced pictures: each card reads a strip of every picture, not some of the pictures.

For pictures that are too large for one card. Here they are small, to show how it is written. On the 8 cards of a
machine each reads 28 of the 224 columns of all 256 pictures of a batch:
    bash run_dataset_slice.sh /path/cifar-10-batches-bin 8
Without a card (MindSpore has no semi-automatic parallel on CPU) compile each rank's graph for Ascend:
    bash run_dataset_slice.sh --dry-run 8

The first convolution works on the strips; the cards send each other the columns that its 7x7 window needs from beside.
Its results, half as wide and high, are exchanged, so that from there on each card has whole pictures, an eighth of
them. For really large pictures give more layers the strategy.
Each rank prints the loss of the batch, as resnet50_distributed_training.py does. There is no test at the end.
The lines that one process alone would not need are marked:
    grep -n "distributed:" resnet50_distributed_training_dataset_slice.py
"""

import argparse
import os
import re
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init  # distributed: who am I, how many are we
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint

from cifar10_files import check_cifar10_folder
from load_whole import load_whole
from resnet import resnet50


# ---------------------------------------------------------------------------------------------- settings
def parse_arguments(argv):
    """Read and check the options; returns them with train_images, the size of the data set."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]; --help lists them",
                                     description="Train ResNet-50 on CIFAR-10. DATA_PATH names cifar-10-batches-bin.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="images a step, on all ranks together")
    parser.add_argument("--image-size", type=int, default=224, help="pictures are resized to it; 32 is their own size")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), metavar="N",
                        help="blocks in each stage of ResNet; 1 1 1 1 compiles several times faster")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Momentum(0.9)")
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the images, random crops")
    parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
    parser.add_argument("--no-sink", action="store_true", help="hand over the data step by step, see the README")
    parser.add_argument("--ckpt-dir", help="save checkpoints in its folders ckpt_<rank> after each epoch")
    parser.add_argument("--resume", nargs="?", const="always", choices=("always", "if-saved"),
                        help="go on after the last epoch saved in --ckpt-dir; if-saved: or begin, if there is none")
    parser.add_argument("--check", action="store_true", help="only check the options and the data, then stop")
    args = parser.parse_args(argv)
    for name, least in (("epochs", 1), ("batch_size", 1), ("steps", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.image_size < 32 or args.lr <= 0 or min(args.blocks) < 1:
        parser.error("--image-size must be at least 32, --lr and all --blocks greater than 0")
    if args.resume and not args.ckpt_dir:
        parser.error("--resume needs --ckpt-dir, the folder that was given when the checkpoints were saved")
    check_slices(parser, args)  # distributed:
    args.data_path = os.getenv("DATA_PATH")
    try:
        args.train_images, _ = check_cifar10_folder(args.data_path)
        if args.ckpt_dir:
            # A relative folder means: from where the launcher was started, not from this rank's deviceN/.
            args.ckpt_dir = Path(os.getenv("LAUNCH_DIR", ""), args.ckpt_dir)
            args.ckpt_dir.mkdir(parents=True, exist_ok=True)
            if args.check and not args.resume and any(args.ckpt_dir.glob("ckpt_*/*.ckpt")):
                parser.error(f"{args.ckpt_dir} holds checkpoints of an earlier run; go on from them with --resume, "
                             "or choose another --ckpt-dir")
            if not os.access(args.ckpt_dir, os.W_OK):
                parser.error(f"--ckpt-dir {args.ckpt_dir} may not be written to; choose another folder")
    except OSError as error:
        parser.error(f"--ckpt-dir {args.ckpt_dir} cannot be made ({error.strerror}); choose another folder")
    except ValueError as error:
        parser.error(str(error))
    return args


def check_slices(parser, args):  # distributed:
    """Do the pictures and the batch fit the number of ranks?"""
    rank_size = int(os.getenv("RANK_SIZE") or os.getenv("OMPI_COMM_WORLD_SIZE") or os.getenv("MS_WORKER_NUM") or 1)
    if os.getenv("DEVICE_TARGET", ms.get_context("device_target")) == "CPU":
        parser.error("MindSpore has no semi-automatic parallel on CPU; to compile this for Ascend instead, without a "
                     f"card: bash run_dataset_slice.sh --dry-run {max(rank_size, 2)}")
    if rank_size == 1:
        parser.error("slices are for several ranks; start them with run_dataset_slice.sh")
    if args.image_size % (4 * rank_size):  # the window reaches 3 columns to each side, and moves by 2
        parser.error(f"--image-size {args.image_size} must be a multiple of {4 * rank_size}, so that each of the "
                     f"{rank_size} ranks has a strip of 4, 8, 12, ... columns")
    if args.batch_size % rank_size:
        parser.error(f"--batch-size {args.batch_size} must be a multiple of the number of ranks, {rank_size}, which "
                     "share the pictures after the first convolution")


# --------------------------------------------------------------------------------- join the other ranks
def join_ranks():
    """Connect to the other ranks; returns (rank, rank_size)."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if "DEVICE_TARGET" in os.environ:
        ms.set_context(device_target=os.environ["DEVICE_TARGET"])
    target = ms.get_context("device_target")
    if target == "Ascend" and "DEVICE_ID" in os.environ:  # distributed: the card of this rank
        ms.set_context(device_id=int(os.environ["DEVICE_ID"]))  # distributed:
    init()  # distributed: connect (HCCL on Ascend, NCCL on GPU)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", gradients_mean=True)  # distributed:
    print(f"rank {get_rank()} of {get_group_size()} on {target}, a strip each", flush=True)  # distributed: hello
    return get_rank(), get_group_size()  # distributed:


def sum_over_ranks(value):  # distributed:
    """Add up a tensor of every rank by all-reduce; all ranks get the sum."""  # distributed:
    return ops.AllReduce(ops.ReduceOp.SUM)(value)  # distributed:


# ---------------------------------------------------------------------------------------------- data set
# Mean and standard deviation of CIFAR-10's red, green and blue. The tutorial lists them as blue, green, red, but
# Cifar10Dataset gives RGB: in the tutorial's order no channel but green would come out with mean 0 and deviation 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def to_network_input(image_size, rank_id, rank_size):
    """Transforms from a uint8 picture (32, 32, 3) to the rank's strip of it, float32 (3, image_size, width)."""
    width = image_size // rank_size  # distributed:
    strip = ds.vision.Crop((0, rank_id * width), (image_size, width))  # distributed: SlicePatches would make them all
    return [ds.vision.Resize((image_size, image_size)), strip, ds.vision.Rescale(1.0 / 255.0, 0.0),
            ds.vision.Normalize(MEAN, STD), ds.vision.HWC2CHW()]


def create_dataset(data_path, batch_size=256, rank_id=0, rank_size=1, image_size=224, seed=1, steps=None):
    """Make the training pipeline of a rank; steps: only so many batches of each epoch.

    Returns:
        A dataset of (image, label) batches: float32 (batch_size, 3, image_size, image_size / rank_size); int32
        (batch_size,). All ranks have the same images in the same order, and rank r the r-th strip of each.
    """
    ds.config.set_seed(seed)
    dataset = ds.Cifar10Dataset(data_path, usage="train", shuffle=True, num_samples=steps and steps * batch_size)
    crop_and_flip = [ds.vision.RandomCrop((32, 32), (4, 4, 4, 4)), ds.vision.RandomHorizontalFlip()]
    dataset = dataset.map(crop_and_flip + to_network_input(image_size, rank_id, rank_size), "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=True)


# -------------------------------------------------------------------------------------------------- loss
class SoftmaxCrossEntropyExpand(nn.Cell):
    """Softmax cross entropy built of small operators, each of which automatic parallel can split by itself.

    Args:
        sparse: labels are class numbers, int32 (batch,); else one-hot, float32 (batch, classes).

    Input: logits, float32 (batch, classes), and labels. Output: the mean loss of the batch, a float32 scalar.
    A probability below 1e-24 counts as 1e-24, so one image's loss is at most 55.3.
    """

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse
        self.one_hot = ops.OneHot()
        self.one, self.zero = ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
        self.max_of_row = ops.ReduceMax(keep_dims=True)
        self.sum_of_row = ops.ReduceSum(keep_dims=True)
        self.sum = ops.ReduceSum()
        self.mean = ops.ReduceMean()
        self.sub, self.exp, self.div, self.log = ops.Sub(), ops.Exp(), ops.RealDiv(), ops.Log()
        self.add, self.mul, self.neg = ops.Add(), ops.Mul(), ops.Neg()
        self.least = ms.Tensor(1e-24, ms.float32)  # the logarithm of 0 would be -inf

    def construct(self, logits, labels):
        if self.sparse:
            labels = self.one_hot(labels, logits.shape[1], self.one, self.zero)
        powers = self.exp(self.sub(logits, self.max_of_row(logits, -1)))  # at most 1: no overflow
        probabilities = self.div(powers, self.sum_of_row(powers, -1))
        log_probabilities = self.log(self.add(probabilities, self.least))
        return self.mean(self.neg(self.sum(self.mul(log_probabilities, labels), -1)))


# ------------------------------------------------------------------------------------------- checkpoints
def resume(train_network, folder, rank_size, epochs, required):
    """Load the newest epoch that all ranks have saved whole, weights and optimizer; returns its number.

    If there is none, returns 0, or ends the process if one is required.
    """
    ranks = [int(name[5:]) for name in os.listdir(folder.parent) if re.fullmatch(r"ckpt_\d+", name)]  # distributed:
    if required and max(ranks) >= rank_size:  # distributed: other shards, and on cards perhaps other slices
        sys.exit(f"{folder.parent} holds checkpoints of {max(ranks) + 1} ranks, these are {rank_size}; "  # distributed:
                 f"resume with {max(ranks) + 1} ranks, or choose another --ckpt-dir")  # distributed:
    file_of = {int(re.search(r"-(\d+)_\d+\.ckpt$", file.name).group(1)): file
               for file in sorted(folder.glob("*-*_*.ckpt"), key=lambda file: file.stat().st_mtime)}
    whole = [epoch in file_of and bool(load_whole(file_of[epoch])) for epoch in range(epochs + 1)]
    if rank_size > 1:  # distributed: a killed job may not have saved its last epoch on all ranks
        ranks_with_it = sum_over_ranks(ms.Tensor(whole, ms.float32))  # distributed:
        whole = list(ranks_with_it.asnumpy() == rank_size)  # distributed:
    newest = max((epoch for epoch in range(epochs + 1) if whole[epoch]), default=0)
    if newest == 0 and required:
        sys.exit(f"nothing to resume: {folder} and the other ranks' folders share no whole epoch up to {epochs}; "
                 "resume with as many ranks as were started before, or start without --resume")
    for epoch, file in file_of.items():
        if newest < epoch <= epochs:  # not of all ranks: another resume must not mix it with what they save now
            file.replace(f"{file}.unused")
    if newest:
        unlike = ms.load_param_into_net(train_network, load_whole(file_of[newest]))
        if any(unlike):
            sys.exit(f"{file_of[newest]} is of another network; resume with the --blocks of the job that saved it")
        print(f"resumed after epoch {newest} from {file_of[newest]}", flush=True)
    return newest


# ------------------------------------------------------------------------------------------------- train
def test_train_cifar(argv=()):
    """Train; pytest finds this name, python calls it with the command line."""
    args = parse_arguments(argv)
    if args.check:
        return
    rank, rank_size = join_ranks()
    if rank == 0:  # distributed: one says it
        print(f"{args.train_images} training images", flush=True)
    dataset = create_dataset(args.data_path, args.batch_size, rank, rank_size, args.image_size, args.seed,
                             args.steps)
    steps = dataset.get_dataset_size()
    if steps == 0:
        sys.exit(f"the {args.train_images} training images are fewer than one step needs; use a smaller --batch-size")

    # After create_dataset, whose seed is another on each rank: it also seeds what weights are drawn from.
    ms.set_seed(args.seed)  # distributed: all ranks start from the same weights
    strategy = (1, 1, 1, rank_size)  # distributed: into how many parts batch, channels, height and width are cut
    ms.set_auto_parallel_context(dataset_strategy=(strategy, (1,)))  # distributed: the pictures so, the labels not
    net = resnet50(num_classes=10, blocks=args.blocks)
    net.conv1.conv2d.shard((strategy, (1, 1, 1, 1)))  # distributed: first convolution: the same; its weight is whole
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=args.lr, momentum=0.9)
    model = Model(net, loss_fn=SoftmaxCrossEntropyExpand(sparse=True), optimizer=optimizer)
    callbacks = [LossMonitor()]
    first_epoch = 0
    if args.ckpt_dir:
        folder = args.ckpt_dir / f"ckpt_{rank}"  # distributed: a folder a rank, no two ranks write one file
        folder.mkdir(exist_ok=True)
        # The folder as a function: else MindSpore takes another name after each resume, and clears away fewer files.
        callbacks.append(ModelCheckpoint("auto_parallel", lambda _: str(folder), CheckpointConfig(
            save_checkpoint_steps=steps, keep_checkpoint_max=3, append_info=["epoch_num"])))
        if args.resume:
            first_epoch = resume(model.train_network, folder, rank_size, args.epochs, args.resume == "always")
            # Pass over the finished epochs' data, random crops included: as if training had never stopped.
            ds.config.set_fast_recovery(False)
            dataset.set_init_step(first_epoch * steps)
    if first_epoch < args.epochs:
        model.train(args.epochs, dataset, callbacks=callbacks, dataset_sink_mode=not args.no_sink,
                    initial_epoch=first_epoch)


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
