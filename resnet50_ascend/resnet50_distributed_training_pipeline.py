"""ResNet-50 on CIFAR-10 as a pipeline: every group of cards holds some of the layers.

Two stages on 8 cards (or CPU processes): cards 0-3 hold the first 8 blocks, cards 4-7 the last 8:
    bash run_pipeline.sh /path/cifar-10-batches-bin 8

A batch goes through in micro batches: while the last stage works on the first of them, the first
stage works on others. Within a stage the cards share the images, as in data parallel. Only the last
stage knows the loss: see device7/train.log7; what the others print means nothing. No test follows.
"""

import os
import sys

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
from mindspore import nn, ops
from mindspore.train import Model

import checkpoints
from cifar10_files import at_least, memory_of_a_rank
from loss import SoftmaxCrossEntropyExpand
from resnet import resnet50
from resnet50_distributed_training import create_dataset, join_ranks, make_parser, train


def check_pipeline(parser, args):
    """Do the options fit each other, the network and the ranks?"""
    rank_size = int(os.getenv("RANK_SIZE") or os.getenv("OMPI_COMM_WORLD_SIZE") or 1)
    target = os.getenv("DEVICE_TARGET") or ms.get_context("device_target")
    if target == "CPU" and "ASCEND_PLAN" not in os.environ:
        parser.error("MindSpore has no pipeline on CPU; run_pipeline.sh computes it for 2 or more "
                     "ranks of one machine, with the folders dry_run/ and tools/ beside this one")
    if args.stages > (most := sum(max(n, 1) for n in args.blocks)) or rank_size % args.stages:
        parser.error(f"--stages {args.stages} must divide the number of ranks, {rank_size}, and be "
                     f"at most {most}, the number of the network's blocks")
    if args.micro_batches < args.stages or args.batch_size % args.micro_batches:
        parser.error(f"--micro-batches {args.micro_batches} must divide --batch-size, "
                     f"{args.batch_size}, and be at least --stages, {args.stages}")


class LossOfMicroBatch(nn.Cell):
    """The loss over the number of micro batches: added up, it is the mean over the batch."""

    def __init__(self, net, micro_batches):
        super().__init__(auto_prefix=False)
        self.net, self.micro_batches = net, micro_batches
        self.loss = SoftmaxCrossEntropyExpand(sparse=True)

    def construct(self, image, label):
        loss = self.loss(self.net(image), label)
        # PipelineCell adds up losses and gradients, Model divides the gradients: divide the value.
        return loss - ops.stop_gradient(loss * (1 - 1 / self.micro_batches))


def cut_into_stages(net, stages):
    """Tell each block of the network which stage holds it: equally many each, or one more."""
    blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    for number, block in enumerate(blocks):
        block.pipeline_stage = number * stages // len(blocks)
    net.conv1.pipeline_stage = net.bn1.pipeline_stage = 0
    net.fc.pipeline_stage = stages - 1


def test_train_cifar(argv=()):
    """Train; pytest finds this name, python calls it with the command line."""
    parser = make_parser()
    parser.add_argument("--stages", type=at_least(2), default=2, help="parts of the network")
    parser.add_argument("--micro-batches", type=at_least(1), default=4, help="parts of a batch")
    args = parser.parse_args(argv)
    checkpoints.check_options(parser, args)
    check_pipeline(parser, args)
    if args.check:
        print(f"needs {memory_of_a_rank(args.image_size, args.batch_size)} MB a rank on CPU")
        return

    # distributed: the layers are cut by hand, so the mode is semi-automatic
    rank, rank_size = join_ranks("semi_auto_parallel", pipeline_stages=args.stages)
    ranks_a_stage = rank_size // args.stages
    print(f"stage {rank // ranks_a_stage} of {args.stages}", flush=True)

    # distributed: rank r of each stage reads the same: the first needs images, the last labels
    dataset = create_dataset(args.data_path, args.batch_size, rank % ranks_a_stage, ranks_a_stage,
                             args.image_size, args.steps)
    ms.set_seed(1)  # distributed: all ranks start from the same weights
    net = resnet50(num_classes=10, blocks=args.blocks)
    cut_into_stages(net, args.stages)  # distributed: which layers are whose
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
    # distributed: micro batches go through the stages one after the other
    pipeline = nn.PipelineCell(LossOfMicroBatch(net, args.micro_batches), args.micro_batches)
    train(Model(pipeline, optimizer=optimizer), dataset, args, rank, rank_size)


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
    ranks.leave()  # distributed: all ranks end together
