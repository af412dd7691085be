"""ResNet-50 on CIFAR-10 with gradient accumulation: large batches on cards without room for them.

256 images a step on each of 8 cards, 32 at a time (without a card the same command rehearses):
    bash run_grad_accumulation.sh /path/cifar-10-batches-bin 8 -- --batch-size 256 --micro-batches 8
A small run that a laptop does in a minute:
    bash run_grad_accumulation.sh /path/cifar-10-batches-bin 2 -- --steps 4 --image-size 32

The gradients of the micro batches are added up on each rank; after the last of them their mean is
averaged over the ranks, once, and the weights are updated. That is one step with the whole batch,
but for batch norm, which knows only the images of its micro batch; with --freeze-bn it is the same.
It is for data parallel. In automatic parallel, mindspore.parallel.nn.GradAccumulation does it.
Each rank prints its own loss, but MindSpore counts the micro batches as steps:
    epoch: 1 step: 8, loss is 2.3050792
"""

import sys

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
from mindspore import nn
from mindspore.train import Model

import checkpoints
from accuracy import print_accuracy
from cell_wrapper import TrainWithAccumulation
from cifar10_files import at_least, memory_of_a_rank
from loss import SoftmaxCrossEntropyExpand
from resnet import resnet50
from resnet50_distributed_training import (create_dataset, join_ranks, make_parser,
                                           to_network_input, train)


def test_train_cifar(argv=()):
    """Train and test; pytest finds this name, python calls it with the command line."""
    parser = make_parser()
    parser.add_argument("--micro-batches", type=at_least(1), default=4, help="parts of a batch")
    parser.add_argument("--freeze-bn", action="store_true",
                        help="batch norm keeps its mean and variance (0 and 1 in a new network)")
    parser.add_argument("--test-images", type=at_least(0), help="test on so many; 0: no test")
    args = parser.parse_args(argv)
    checkpoints.check_options(parser, args)
    images, rest = divmod(args.batch_size, args.micro_batches)
    if rest:
        parser.error(f"--micro-batches {args.micro_batches} must divide --batch-size "
                     f"{args.batch_size}")
    if args.check:
        print(f"needs {memory_of_a_rank(args.image_size, images)} MB a rank on CPU")
        return

    rank, rank_size = join_ranks("data_parallel")
    # A step of MindSpore takes a micro batch; ours take a batch.
    dataset = create_dataset(args.data_path, images, rank, rank_size, args.image_size,
                             args.steps and args.steps * args.micro_batches)
    dataset = dataset.take(dataset.get_dataset_size() // args.micro_batches * args.micro_batches)
    ms.set_seed(1)  # distributed: all ranks start from the same weights
    net = resnet50(num_classes=10, blocks=args.blocks)
    for _, cell in net.cells_and_names():
        if args.freeze_bn and isinstance(cell, nn.BatchNorm2d):
            cell.use_batch_statistics = False
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
    network = nn.WithLossCell(net, SoftmaxCrossEntropyExpand(sparse=True))
    model = Model(TrainWithAccumulation(network, optimizer, args.micro_batches, rank_size))
    train(model, dataset, args, rank, rank_size, loss_every=args.micro_batches)
    print_accuracy(net, args, to_network_input(args.image_size), rank, rank_size)


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
    ranks.leave()  # distributed: all ranks end together
