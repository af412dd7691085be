"""ResNet-50 on CIFAR-10, on several Ascend cards: automatic parallel, or data parallel.

One machine with 8 cards (or 2; on a machine without cards the same command rehearses with CPU processes):
    bash run.sh /path/cifar-10-batches-bin 8
Two machines with 8 cards each, on each of them:
    bash run_cluster.sh /path/cifar-10-batches-bin /path/rank_table.json 16 0      # server 0
    bash run_cluster.sh /path/cifar-10-batches-bin /path/rank_table.json 16 8      # server 1
A small run that a laptop does in a minute:
    DEVICE_TARGET=CPU bash run.sh /path/cifar-10-batches-bin 2 -- --epochs 1 --steps 6 --image-size 32
One process: DATA_PATH=/path/cifar-10-batches-bin python resnet50_distributed_training.py
  The tutorial's pytest -s -v resnet50_distributed_training.py works too, without options.

Each rank prints its own loss, once an epoch where the data are sunk to the card, once a step elsewhere; at the
end rank 0 prints the accuracy over all test images:
    epoch: 1 step: 156, loss is 2.0084016
    ...
    accuracy: 0.6214 (6214 of 10000 test images)
The lines that one process alone would not need are marked: grep -n "distributed:" resnet50_distributed_training.py
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
    """Read and check the options; returns them with train_images and test_images, the sizes of the data set."""
    parser = argparse.ArgumentParser(usage="resnet50_distributed_training.py [options]; --help lists them",
                                     description="Train ResNet-50 on CIFAR-10. DATA_PATH names cifar-10-batches-bin.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each rank")
    parser.add_argument("--image-size", type=int, default=224, help="pictures are resized to it; 32 is their own size")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), metavar="N",
                        help="blocks in each stage of ResNet; 1 1 1 1 compiles several times faster")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Momentum(0.9)")
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the images, random crops")
    parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
    parser.add_argument("--test-images", type=int, help="test on the first N images only; 0: no test")
    parser.add_argument("--parallel-mode", choices=("auto_parallel", "data_parallel"), default="auto_parallel",
                        help="let MindSpore split every operator as it finds best, or only split the batch")
    parser.add_argument("--no-sink", action="store_true", help="hand over the data step by step, see the README")
    parser.add_argument("--ckpt-dir", help="save checkpoints in its folders ckpt_<rank> after each epoch")
    parser.add_argument("--resume", nargs="?", const="always", choices=("always", "if-saved"),
                        help="go on after the last epoch saved in --ckpt-dir; if-saved: or begin, if there is none")
    parser.add_argument("--check", action="store_true", help="only check the options and the data, then stop")
    args = parser.parse_args(argv)
    for name, least in (("epochs", 1), ("batch_size", 1), ("steps", 1), ("test_images", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.image_size < 32 or args.lr <= 0 or min(args.blocks) < 1:
        parser.error("--image-size must be at least 32, --lr and all --blocks greater than 0")
    if args.resume and not args.ckpt_dir:
        parser.error("--resume needs --ckpt-dir, the folder that was given when the checkpoints were saved")
    args.data_path = os.getenv("DATA_PATH")
    try:
        args.train_images, test_images = check_cifar10_folder(args.data_path)
        args.test_images = test_images if args.test_images is None else min(args.test_images, test_images)
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


# --------------------------------------------------------------------------------- join the other ranks
def join_ranks(parallel_mode):
    """Connect to the other ranks, if this process was launched as one of several; returns (rank, rank_size)."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if "DEVICE_TARGET" in os.environ:
        ms.set_context(device_target=os.environ["DEVICE_TARGET"])
    target = ms.get_context("device_target")
    if target == "Ascend" and "DEVICE_ID" in os.environ:  # distributed: the card of this rank
        ms.set_context(device_id=int(os.environ["DEVICE_ID"]))  # distributed:
    by_run_sh = int(os.getenv("RANK_SIZE", "1")) > 1  # distributed: or by mpirun, or by msrun:
    if not (by_run_sh or "OMPI_COMM_WORLD_SIZE" in os.environ or "MS_ROLE" in os.environ):  # distributed:
        print("One process. To start 8: bash run.sh DATA_PATH 8", flush=True)  # distributed:
        return 0, 1  # distributed:
    init()  # distributed: connect (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
    if target == "CPU" and parallel_mode == "auto_parallel":  # distributed: MindSpore would refuse
        print("MindSpore has no automatic parallel on CPU: going on in data parallel.", flush=True)  # distributed:
        parallel_mode = "data_parallel"  # distributed:
    ms.set_auto_parallel_context(parallel_mode=parallel_mode, gradients_mean=True)  # distributed: average gradients
    print(f"rank {get_rank()} of {get_group_size()} on {target}, {parallel_mode}", flush=True)  # distributed: hello
    return get_rank(), get_group_size()  # distributed:


def sum_over_ranks(value):  # distributed:
    """Add up a tensor of every rank by all-reduce; all ranks get the sum."""  # distributed:
    return ops.AllReduce(ops.ReduceOp.SUM)(value)  # distributed:


# ---------------------------------------------------------------------------------------------- data set
# Mean and standard deviation of CIFAR-10's red, green and blue. The tutorial lists them as blue, green, red, but
# Cifar10Dataset gives RGB: in the tutorial's order no channel but green would come out with mean 0 and deviation 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def to_network_input(image_size):
    """Transforms from a uint8 picture (32, 32, 3) to float32 (3, image_size, image_size), normalised."""
    return [ds.vision.Resize((image_size, image_size)), ds.vision.Rescale(1.0 / 255.0, 0.0),
            ds.vision.Normalize(MEAN, STD), ds.vision.HWC2CHW()]


def create_dataset(data_path, batch_size=32, rank_id=0, rank_size=1, image_size=224, seed=1, steps=None):
    """Make the training pipeline of a rank; steps: only so many batches of each epoch.

    Returns:
        A dataset of (image, label) batches: float32 (batch_size, 3, image_size, image_size); int32 (batch_size,).
        Per epoch all ranks shuffle alike and rank r takes the images r, r + rank_size, ... of that order.
    """
    ds.config.set_seed(seed)
    dataset = ds.Cifar10Dataset(data_path, usage="train", shuffle=True, num_samples=steps and steps * batch_size,
                                num_shards=rank_size, shard_id=rank_id)  # distributed: this rank's share
    ds.config.set_seed(seed + rank_id)  # distributed: other random crops and flips on each rank
    crop_and_flip = [ds.vision.RandomCrop((32, 32), (4, 4, 4, 4)), ds.vision.RandomHorizontalFlip()]
    dataset = dataset.map(crop_and_flip + to_network_input(image_size), "image")
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


# -------------------------------------------------------------------------------------- train and test
def test_train_cifar(argv=()):
    """Train and test; pytest finds this name, python calls it with the command line."""
    args = parse_arguments(argv)
    if args.check:
        return
    rank, rank_size = join_ranks(args.parallel_mode)
    if rank == 0:  # distributed: one says it
        print(f"{args.train_images} training images, {args.test_images} test images", flush=True)
    dataset = create_dataset(args.data_path, args.batch_size, rank, rank_size, args.image_size, args.seed,
                             args.steps)
    steps = dataset.get_dataset_size()
    if steps == 0:
        sys.exit(f"the {args.train_images} training images are fewer than one step needs; use a smaller --batch-size")

    # After create_dataset, whose seed is another on each rank: it also seeds what weights are drawn from.
    ms.set_seed(args.seed)  # distributed: all ranks start from the same weights
    net = resnet50(num_classes=10, blocks=args.blocks)
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
    if args.test_images:
        right = count_right(model, net, args, rank, rank_size)
        if rank == 0:  # distributed: all ranks know it, one says it
            print(f"accuracy: {right / args.test_images:.4f} ({right} of {args.test_images} test images)", flush=True)


def count_right(model, net, args, rank, rank_size):
    """How many of the test images the network gets right; each image is tested once, by one of the ranks."""
    if rank_size > 1 and ms.get_auto_parallel_context("parallel_mode") == "data_parallel":  # distributed: each rank's
        for parameter in net.untrainable_params():  # distributed: batch norm knows its own images only: average it, so
            mean = sum_over_ranks(parameter) / rank_size  # distributed: that all test the same network
            ops.assign(parameter, mean)  # distributed: (left alone in automatic parallel, which may slice it)
    mine = list(range(rank, args.test_images, rank_size))  # distributed: this rank's share
    # Filled up with image 0, not counted, to full batches: all ranks take equally many steps, of one shape.
    steps = -(-args.test_images // (rank_size * args.batch_size))
    filled = mine + [0] * (steps * args.batch_size - len(mine))
    dataset = ds.Cifar10Dataset(args.data_path, usage="test", sampler=ds.SubsetSampler(filled))
    dataset = dataset.map(to_network_input(args.image_size), "image").batch(args.batch_size)
    right = []
    for image, label in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        logits = model.predict(ms.Tensor(image)).asnumpy()
        if len(logits) > len(label):  # distributed: automatic parallel gives the logits of all ranks, in their order
            logits = logits[rank * len(label):(rank + 1) * len(label)]  # distributed: take this rank's
        right.extend(logits.argmax(axis=1) == label)
    count = int(sum(right[:len(mine)]))
    if rank_size > 1:  # distributed: add up all ranks' counts
        count = int(sum_over_ranks(ms.Tensor([count], ms.float32)).asnumpy()[0])  # distributed:
    return count


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
