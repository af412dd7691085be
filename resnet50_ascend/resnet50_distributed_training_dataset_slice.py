"""ResNet-50 on CIFAR-10 with sliced pictures: each card reads a strip of every picture.

For pictures that are too large for one card. Here they are small, to show how it is written. On the
8 cards of a machine each reads 28 of the 224 columns of all 256 pictures of a step (8 times 32):
    bash run_dataset_slice.sh /path/cifar-10-batches-bin 8
Without a card, compile each rank's graph for Ascend:
    bash run_dataset_slice.sh --dry-run 8

The first convolution works on the strips; the cards send each other the columns that its 7x7 window
needs from beside. Its results are exchanged, so that from there on each card has whole pictures, 32
of the 256. For really large pictures give more layers the strategy. Each rank prints the loss of
all 256 pictures. There is no test at the end.
"""

import os
import sys

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.train import Model

import checkpoints
import resnet50_distributed_training as base
from cifar10_files import memory_of_a_rank
from loss import SoftmaxCrossEntropyExpand
from resnet import resnet50


def check_slices(parser, args):
    """Do the pictures fit the number of ranks?"""
    rank_size = int(os.getenv("RANK_SIZE") or os.getenv("OMPI_COMM_WORLD_SIZE") or 1)
    target = os.getenv("DEVICE_TARGET") or ms.get_context("device_target")
    if target == "CPU" and "ASCEND_PLAN" not in os.environ:
        parser.error("MindSpore has no semi-automatic parallel on CPU; run_dataset_slice.sh "
                     "computes it for 2 or more ranks of one machine, with the folders "
                     "dry_run/ and tools/ beside this one")
    if rank_size == 1:
        parser.error("slices are for several ranks; start them with run_dataset_slice.sh")
    if args.image_size % (4 * rank_size):  # the window reaches 3 columns to each side, moves by 2
        parser.error(f"--image-size {args.image_size} must be a multiple of {4 * rank_size}, so "
                     f"that each of the {rank_size} ranks has a strip of 4, 8, 12, ... columns")


def create_dataset(data_path, batch_size=32, rank_id=0, rank_size=1, image_size=224, steps=None):
    """The rank_id-th strip of each picture of all ranks' batches, and their labels.

    float32 (rank_size * batch_size, 3, image_size, image_size / rank_size), and int32 labels.
    """
    # distributed: every rank takes all images, in the same order, with the same random crops
    dataset = base.create_dataset(data_path, rank_size * batch_size, 0, 1, image_size, steps)
    # distributed: and keeps its own columns
    width = image_size // rank_size
    mine = slice(rank_id * width, (rank_id + 1) * width)
    return dataset.map(ds.transforms.Slice(None, None, None, mine), "image")


def test_train_cifar(argv=()):
    """Train; pytest finds this name, python calls it with the command line."""
    parser = base.make_parser()
    args = parser.parse_args(argv)
    checkpoints.check_options(parser, args)
    check_slices(parser, args)
    if args.check:
        print(f"needs {memory_of_a_rank(args.image_size, args.batch_size)} MB a rank on CPU")
        return
    rank, rank_size = base.join_ranks("semi_auto_parallel")
    dataset = create_dataset(args.data_path, args.batch_size, rank, rank_size, args.image_size,
                             args.steps)
    # distributed: into how many parts batch, channels, height and width of the pictures are cut;
    # the labels are whole; the first convolution is cut like the pictures, its weight is whole
    strategy = (1, 1, 1, rank_size)
    ms.set_auto_parallel_context(dataset_strategy=(strategy, (1,)))
    ms.set_seed(1)
    net = resnet50(num_classes=10, blocks=args.blocks)
    net.conv1.conv2d.shard((strategy, (1, 1, 1, 1)))
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
    model = Model(net, loss_fn=SoftmaxCrossEntropyExpand(sparse=True), optimizer=optimizer)
    base.train(model, dataset, args, rank, rank_size)


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
    ranks.leave()  # distributed: all ranks end together
