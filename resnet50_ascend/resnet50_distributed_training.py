"""ResNet-50 on CIFAR-10, on several Ascend cards: automatic parallel, or data parallel.

One machine with 8 cards (or 2; without cards the same command rehearses with CPU processes):
    bash run.sh /path/cifar-10-batches-bin 8
Two machines with 8 cards each; on the second one, 8 in place of the 0:
    bash run_cluster.sh /path/cifar-10-batches-bin /path/rank_table.json 16 0
A small run that a laptop does in a minute:
    bash run.sh /path/cifar-10-batches-bin 2 -- --epochs 1 --steps 6 --image-size 32
One process (the tutorial's pytest -s -v resnet50_distributed_training.py works too):
    DATA_PATH=/path/cifar-10-batches-bin python resnet50_distributed_training.py
Each rank prints the loss of its own images (on Ascend once an epoch), at the end rank 0 accuracy:
    epoch: 1 step: 156, loss is 2.0084
    accuracy: 0.6214 (6214 of 10000 test images)
What makes it distributed is marked: grep -n "distributed:" resnet50_distributed_training.py
"""

import argparse
import os
import sys

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import LossMonitor, Model

import checkpoints
from accuracy import print_accuracy
from cifar10_files import at_least, cifar10_folder, memory_of_a_rank
from loss import SoftmaxCrossEntropyExpand
from resnet import resnet50


def make_parser():
    """The options of this script that its variations have, too."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]; --help lists them")
    add = parser.add_argument
    add("--data-path", type=cifar10_folder, default=os.getenv("DATA_PATH", ""), metavar="DIR")
    add("--epochs", type=at_least(1), default=10)
    add("--steps", type=at_least(1), help="end each epoch after so many steps")
    add("--batch-size", type=at_least(1), default=32, help="images a step, on each rank")
    add("--image-size", type=at_least(32), default=224, help="pictures are resized to it")
    add("--blocks", type=at_least(0), nargs=4, default=(3, 4, 6, 3), help="1 0 0 0 compiles sooner")
    add("--no-sink", action="store_true", help="hand over the data step by step, see the README")
    add("--check", action="store_true", help="only check options and data, then stop")
    checkpoints.add_options(parser)  # --ckpt-dir and --resume
    return parser


def join_ranks(parallel_mode, **settings):
    """Connect to the other ranks, if there are any, with MindSpore's settings for parallel_mode."""
    ms.set_context(mode=ms.GRAPH_MODE)
    if "DEVICE_TARGET" in os.environ:
        ms.set_context(device_target=os.environ["DEVICE_TARGET"])
    target = ms.get_context("device_target")
    # distributed: the card of this rank, if run.sh started it; mpirun and msrun leave the choice
    if target == "Ascend" and "DEVICE_ID" in os.environ:
        ms.set_context(device_id=int(os.environ["DEVICE_ID"]))

    # distributed: if a launcher started several ranks, connect to them and average the gradients
    if not ranks.join():
        print("One process. To start 8: bash run.sh DATA_PATH 8", flush=True)
        return 0, 1
    init()  # HCCL on Ascend, NCCL on GPU, MCCL on CPU
    if target == "CPU" and parallel_mode == "auto_parallel" and "ASCEND_PLAN" not in os.environ:
        parallel_mode = "data_parallel"
        if get_rank() == 0:
            print("MindSpore has no automatic parallel on CPU (run.sh computes it, on one machine, "
                  "with dry_run/ beside this folder): going on in data parallel.", flush=True)
    mean = parallel_mode == "data_parallel"  # else the loss is the mean over all ranks already
    ms.set_auto_parallel_context(parallel_mode=parallel_mode, gradients_mean=mean, **settings)
    print(f"rank {get_rank()} of {get_group_size()} on {target}, {parallel_mode}", flush=True)
    return get_rank(), get_group_size()


def to_network_input(image_size):
    """From a uint8 RGB picture (32, 32, 3) to float32 (3, image_size, image_size), normalised."""
    return [ds.vision.Resize((image_size, image_size)), ds.vision.Rescale(1.0 / 255.0, 0.0),
            ds.vision.Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
            ds.vision.HWC2CHW()]


def create_dataset(data_path, batch_size=32, rank_id=0, rank_size=1, image_size=224, steps=None):
    """Batches of float32 (batch_size, 3, image_size, image_size) and of int32 (batch_size,)."""
    ds.config.set_seed(1)
    # distributed: all ranks shuffle alike; rank r takes the images r, r + rank_size, ...
    dataset = ds.Cifar10Dataset(data_path, usage="train", shuffle=True, num_shards=rank_size,
                                shard_id=rank_id, num_samples=steps * batch_size if steps else None)
    crop_and_flip = [ds.vision.RandomCrop((32, 32), (4, 4, 4, 4)), ds.vision.RandomHorizontalFlip()]
    dataset = dataset.map(crop_and_flip + to_network_input(image_size), "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=True)


def train(model, dataset, args, rank, rank_size, loss_every=1):
    """Train all epochs, or with --resume those that are left; save after each with --ckpt-dir."""
    callbacks, first_epoch = [LossMonitor(loss_every)], 0
    if args.ckpt_dir:
        folder = args.ckpt_dir / f"ckpt_{rank}"  # distributed: no two ranks write one file
        saved = checkpoints.Checkpoints(folder, "auto_parallel", rank_size, keep=3)
        callbacks.append(saved)
        first_epoch = saved.resume(model.train_network, args.resume, dataset=dataset)
    if first_epoch < args.epochs:
        model.train(args.epochs, dataset, callbacks=callbacks, dataset_sink_mode=not args.no_sink,
                    initial_epoch=first_epoch)


def test_train_cifar(argv=()):
    """Train and test; pytest finds this name, python calls it with the command line."""
    parser = make_parser()
    parser.add_argument("--parallel-mode", choices=("auto_parallel", "data_parallel"),
                        default="auto_parallel", help="cut each operator as is best, or the batch")
    parser.add_argument("--test-images", type=at_least(0), help="test on so many; 0: no test")
    args = parser.parse_args(argv)
    checkpoints.check_options(parser, args)
    if args.check:
        print(f"needs {memory_of_a_rank(args.image_size, args.batch_size)} MB a rank on CPU")
        return
    rank, rank_size = join_ranks(args.parallel_mode)  # distributed: which rank, of how many
    dataset = create_dataset(args.data_path, args.batch_size, rank, rank_size, args.image_size,
                             args.steps)
    ms.set_seed(1)  # distributed: all ranks start from the same weights
    net = resnet50(num_classes=10, blocks=args.blocks)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
    model = Model(net, loss_fn=SoftmaxCrossEntropyExpand(sparse=True), optimizer=optimizer)
    train(model, dataset, args, rank, rank_size)
    print_accuracy(net, args, to_network_input(args.image_size), rank, rank_size)


if __name__ == "__main__":
    test_train_cifar(sys.argv[1:])
    ranks.leave()  # distributed: all ranks end together
