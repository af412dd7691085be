"""ResNet-50 on CIFAR-10 as a pipeline: every group of cards holds some of the layers.

Two stages on the 8 cards of a machine: cards 0-3 hold the first 8 blocks of the network, cards 4-7 the last 8:
    bash run_pipeline.sh /path/cifar-10-batches-bin 8
Four stages of two cards each, and more and smaller micro batches, so that cards wait less for each other:
    bash run_pipeline.sh /path/cifar-10-batches-bin 8 -- --stages 4 --micro-batches 16
Without a card (MindSpore has no pipeline on CPU) compile each rank's part for Ascend, and see what it holds and sends:
    bash run_pipeline.sh --dry-run 8

A batch goes through in micro batches: while the last stage works on the first of them, the first stage has long been
working on others. Within a stage the cards share the images, as in data parallel. Only the last stage knows the loss:
see device7/train.log7; what the others print means nothing. There is no test at the end.
The lines that one process alone would not need are marked:
    grep -n "distributed:" resnet50_distributed_training_pipeline.py
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
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each rank of a stage")
    parser.add_argument("--image-size", type=int, default=224, help="pictures are resized to it; 32 is their own size")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), metavar="N",
                        help="blocks in each stage of ResNet; 1 1 1 1 compiles several times faster")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Momentum(0.9)")
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the images, random crops")
    parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
    parser.add_argument("--stages", type=int, default=2, help="parts that the layers are cut into")  # distributed:
    parser.add_argument("--micro-batches", type=int, default=4, help="parts that a batch is cut into")  # distributed:
    parser.add_argument("--no-sink", action="store_true", help="hand over the data step by step, see the README")
    parser.add_argument("--ckpt-dir", help="save checkpoints in its folders ckpt_<rank> after each epoch")
    parser.add_argument("--resume", nargs="?", const="always", choices=("always", "if-saved"),
                        help="go on after the last epoch saved in --ckpt-dir; if-saved: or begin, if there is none")
    parser.add_argument("--check", action="store_true", help="only check the options and the data, then stop")
    args = parser.parse_args(argv)
    for name, least in (("epochs", 1), ("batch_size", 1), ("steps", 1), ("stages", 2)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.image_size < 32 or args.lr <= 0 or min(args.blocks) < 1:
        parser.error("--image-size must be at least 32, --lr and all --blocks greater than 0")
    if args.resume and not args.ckpt_dir:
        parser.error("--resume needs --ckpt-dir, the folder that was given when the checkpoints were saved")
    check_pipeline(parser, args)  # distributed:
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


def check_pipeline(parser, args):  # distributed:
    """Do the options fit each other, the network and the ranks?"""
    rank_size = int(os.getenv("RANK_SIZE") or os.getenv("OMPI_COMM_WORLD_SIZE") or os.getenv("MS_WORKER_NUM") or 1)
    if os.getenv("DEVICE_TARGET", ms.get_context("device_target")) == "CPU":
        parser.error("MindSpore has no pipeline on CPU; to compile this for Ascend instead, without a card: "
                     f"bash run_pipeline.sh --dry-run {max(rank_size, args.stages)}")
    if rank_size % args.stages or args.stages > sum(args.blocks):
        parser.error(f"--stages {args.stages} must divide the number of ranks, {rank_size}, and be at most "
                     f"{sum(args.blocks)}, the number of the network's blocks")
    if args.micro_batches < args.stages or args.batch_size % args.micro_batches:
        parser.error(f"--micro-batches {args.micro_batches} must divide --batch-size, {args.batch_size}, and be at "
                     f"least --stages, {args.stages}, or some stages would never have work")


# --------------------------------------------------------------------------------- join the other ranks
def join_ranks(stages):
    """Connect to the other ranks; returns (rank, rank_size)."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if "DEVICE_TARGET" in os.environ:
        ms.set_context(device_target=os.environ["DEVICE_TARGET"])
    target = ms.get_context("device_target")
    if target == "Ascend" and "DEVICE_ID" in os.environ:  # distributed: the card of this rank
        ms.set_context(device_id=int(os.environ["DEVICE_ID"]))  # distributed:
    init()  # distributed: connect (HCCL on Ascend, NCCL on GPU)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=stages,  # distributed: stages, and
                                 gradients_mean=True)  # distributed: within each of them average the gradients
    print(f"rank {get_rank()} of {get_group_size()} on {target}, stage "  # distributed: hello
          f"{get_rank() * stages // get_group_size()} of {stages}", flush=True)  # distributed:
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


class LossOfMicroBatch(nn.Cell):  # distributed:
    """The network with its loss, divided by the number of micro batches: their sum is then the mean over the batch.

    Input: images, float32 (batch, 3, h, w), and labels, int32 (batch,). Output: a float32 scalar.
    """

    def __init__(self, net, micro_batches):
        super().__init__(auto_prefix=False)
        self.net, self.loss = net, SoftmaxCrossEntropyExpand(sparse=True)
        self.micro_batches = micro_batches

    def construct(self, image, label):
        return self.loss(self.net(image), label) / self.micro_batches


# ---------------------------------------------------------------------------------------------- pipeline
def cut_into_stages(net, stages):  # distributed:
    """Tell each block of the network which stage holds it: equally many blocks each, or one more or less."""
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    for number, block in enumerate(blocks):
        block.pipeline_stage = number * stages // len(blocks)
    net.conv1.pipeline_stage = net.bn1.pipeline_stage = 0
    net.fc.pipeline_stage = stages - 1


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
    rank, rank_size = join_ranks(args.stages)
    if rank == 0:  # distributed: one says it
        print(f"{args.train_images} training images", flush=True)
    ranks_a_stage = rank_size // args.stages  # distributed: rank r of each stage reads the same images: the first stage
    dataset = create_dataset(args.data_path, args.batch_size, rank % ranks_a_stage, ranks_a_stage,  # distributed: needs
                             args.image_size, args.seed, args.steps)  # distributed: pictures, the last one labels
    steps = dataset.get_dataset_size()
    if steps == 0:
        sys.exit(f"the {args.train_images} training images are fewer than one step needs; use a smaller --batch-size")

    # After create_dataset, whose seed is another on each rank: it also seeds what weights are drawn from.
    ms.set_seed(args.seed)  # distributed: all ranks start from the same weights
    net = resnet50(num_classes=10, blocks=args.blocks)
    cut_into_stages(net, args.stages)  # distributed:
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=args.lr, momentum=0.9)
    pipeline = nn.PipelineCell(LossOfMicroBatch(net, args.micro_batches), args.micro_batches)  # distributed:
    model = Model(pipeline, optimizer=optimizer)
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
