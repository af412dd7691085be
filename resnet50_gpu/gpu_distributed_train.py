"""ResNet-50 on Fruits-360 on several cards: what gpu_single_train.py does on one, data parallel.

Four cards (or, where there is no card, four CPU processes as a rehearsal):
    export CUDA_VISIBLE_DEVICES=0,1,2,3
    export DATA_PATH=/path/fruits-360
    mpirun -n 4 python3 gpu_distributed_train.py
  as root add --allow-run-as-root, on a CPU with fewer than 4 cores --oversubscribe.
Without Open MPI:
    msrun --worker_num=4 --local_worker_num=4 --join=True gpu_distributed_train.py
A small run that a laptop does in two minutes (python tools/make_datasets.py fruits /tmp/fruits makes the data):
    mpirun -n 2 python3 gpu_distributed_train.py --data-path /tmp/fruits --epochs 1 --steps 4 --image-size 32 \\
        --test-size 32

DATA_PATH holds Training/<class>/ and Test/<class>/. Every rank prints its loss, once an epoch where the data are sunk
to the card, once a step elsewhere, and saves ckpt/fruit_360_renet50_<rank>-<epoch>_<step>.ckpt after each epoch:
    rank size: 4, rank id: 0
    train dataset batch num: 2115
    test dataset batch num: 178
    epoch: 1 step: 2115, loss is 4.536644458770752
    ...
    eval result: {'accuracy': 0.50}
The lines that one card alone would not need are marked: grep -n "distributed:" gpu_distributed_train.py
"""

import argparse
import os
from pathlib import Path

import mpirun_on_cpu  # distributed: lets mpirun work on CPU too
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops  # distributed: ops
from mindspore.communication import get_group_size, get_rank, init  # distributed: who am I, how many are we
from mindspore.train import LossMonitor, Model

import checkpoints
from fruits_files import check_fruits_folder
from gpu_libraries import choose_device
from resnet import resnet50
from sync_batch_norm import synchronise_batch_norm  # distributed: batch norm over all ranks' images

launched = next((int(os.environ[name]) for name in ("OMPI_COMM_WORLD_SIZE", "MS_WORKER_NUM")  # distributed: by mpirun
                 if name in os.environ), 1)  # distributed: or msrun, as one of so many ranks


# ---------------------------------------------------------------------------------------------- settings
def parse_arguments():
    """Read and check the options; returns them with classes, train and test, which check_fruits_folder() found."""
    parser = argparse.ArgumentParser(description="Train ResNet-50 on a folder of pictures, such as Fruits-360.")
    parser.add_argument("--data-path", default=os.getenv("DATA_PATH"), help="folder of Training and Test (DATA_PATH)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, of all ranks")  # distributed:
    parser.add_argument("--crop-size", type=int, default=32, help="training sees a random crop of this size,")
    parser.add_argument("--image-size", type=int, default=100, help="resized to this")
    parser.add_argument("--test-size", type=int, default=128, help="testing sees the whole picture, resized to this")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), metavar="N",
                        help="blocks in each stage of ResNet; 1 1 1 1 compiles several times faster")
    parser.add_argument("--no-augment", action="store_true", help="train on whole pictures: no random crops and flips")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Momentum(0.9)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, order of the images, random crops")
    parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
    parser.add_argument("--sync-bn", action="store_true", help="batch norm over all ranks' images")  # distributed:
    parser.add_argument("--no-sink", action="store_true", help="hand over the data step by step: a loss for each step")
    parser.add_argument("--skip-bad", action="store_true", help="leave out files that are no picture")
    parser.add_argument("--ckpt-dir", type=Path, default=Path("ckpt"), help="save a checkpoint here after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on after the last epoch saved in --ckpt-dir")
    parser.add_argument("--check", action="store_true", help="only check the options and the data, then stop")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "steps", "crop_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.image_size, args.test_size) < 32 or args.lr <= 0 or min(args.blocks) < 1:
        parser.error("--image-size and --test-size must be at least 32, --lr and all --blocks greater than 0")
    if args.batch_size % launched:  # distributed: each rank takes an equal part
        parser.error(f"--batch-size {args.batch_size} cannot be shared equally by {launched} ranks; "  # distributed:
                     f"use a multiple of {launched}")  # distributed:
    try:
        args.classes, args.train, args.test = check_fruits_folder(args.data_path, args.skip_bad)
        if len(args.train) < args.batch_size:
            raise ValueError(f"the {len(args.train)} training images are fewer than --batch-size {args.batch_size}; "
                             "use a smaller one")
        prefixes = [f"{checkpoints.PREFIX}_{rank}" for rank in range(launched)]  # distributed: a name for each rank
        if len(args.test) < launched:  # distributed: a rank without an image could not test
            raise ValueError(f"{len(args.test)} test images are fewer than {launched} ranks")  # distributed:
        args.first_epoch = checkpoints.first_epoch(args.ckpt_dir, prefixes, args.resume, len(args.classes))
    except ValueError as error:
        parser.error(str(error))
    return args


# ---------------------------------------------------------------------------------------------- data set
def create_dataset(args, mode, batch_size, rank, rank_size):  # distributed: which share of how many
    """Make the pipeline over the "train" or the "test" images.

    Returns:
        A dataset of (image, label) batches: float32 (batch, 3, size, size), about -1 to 1; int32 (batch,). Training
        draws a new order each epoch.
    """
    ds.config.set_seed(args.seed)
    if mode == "train":
        sampler = ds.DistributedSampler(rank_size, rank)  # distributed: one order; places rank, rank + rank_size ...
        sampler.add_child(ds.SubsetSampler(args.train))
    else:
        share = args.test[rank::rank_size]  # distributed: each image is tested by one of the ranks
        sampler = ds.SubsetSampler(share)
    folder = str(Path(args.data_path) / ("Training" if mode == "train" else "Test"))
    dataset = ds.ImageFolderDataset(folder, sampler=sampler, decode=True)

    normalise = [ds.vision.Normalize([127.5] * 3, [127.5] * 3), ds.vision.HWC2CHW()]
    if mode == "test":
        transforms = [ds.vision.Resize((args.test_size, args.test_size)), *normalise]
    elif args.no_augment:
        transforms = [ds.vision.Resize((args.image_size, args.image_size)), *normalise]
    else:
        ds.config.set_seed(args.seed + rank)  # distributed: other random crops and flips on each rank
        transforms = [ds.vision.RandomCrop((args.crop_size, args.crop_size), (4, 4, 4, 4)),
                      ds.vision.RandomHorizontalFlip(),
                      ds.vision.Resize((args.image_size, args.image_size)), *normalise]
    dataset = dataset.map(transforms, "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=mode == "train")  # in a test no image is lost


# -------------------------------------------------------------------------------------- train and test
def run_train():
    args = parse_arguments()
    if args.check:
        return
    choose_device()
    ms.set_context(mode=ms.GRAPH_MODE)
    rank, rank_size = 0, 1  # distributed: as long as nobody says otherwise
    if launched > 1:  # distributed:
        mpirun_on_cpu.join_ranks()  # distributed: needed by mpirun on CPU only
        init()  # distributed: connect to the other ranks (NCCL on GPU, MCCL on CPU, HCCL on Ascend)
        rank, rank_size = get_rank(), get_group_size()  # distributed: which rank this is, and of how many
        ms.set_auto_parallel_context(  # distributed: every rank holds all weights,
            parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)  # distributed: gradients are averaged
    else:  # distributed: say what starts several
        print("One process. To start 4: mpirun -n 4 python3 gpu_distributed_train.py", flush=True)  # distributed:
    print(f"rank size: {rank_size}, rank id: {rank}", flush=True)  # distributed: hello
    local_batch = args.batch_size // rank_size  # distributed: the cards share the batch
    train_dataset = create_dataset(args, "train", local_batch, rank, rank_size)  # distributed:
    test_dataset = create_dataset(args, "test", local_batch, rank, rank_size)  # distributed:
    if args.steps:
        train_dataset = train_dataset.take(args.steps)
    train_batch_num = train_dataset.get_dataset_size()
    print(f"train dataset batch num: {train_batch_num}", flush=True)
    print(f"test dataset batch num: {test_dataset.get_dataset_size()}", flush=True)

    # After create_dataset(), whose seed is another on each rank: it also seeds what weights are drawn from.
    ms.set_seed(args.seed)  # distributed: all ranks start from the same weights
    net = resnet50(len(args.classes), args.blocks)
    if args.sync_bn and rank_size > 1:  # distributed: else batch norm sees this rank's images only
        synchronise_batch_norm(net, rank_size)  # distributed:
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    # The tutorial gives the optimizer loss_scale=1024 but does not scale the loss, so that each gradient is divided
    # by 1024 and the learning rate is 0.00001 in truth; without loss scaling there is nothing to undo.
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=args.lr, momentum=0.9)
    model = Model(net, loss_fn=loss, optimizer=optimizer)

    prefix = f"{checkpoints.PREFIX}_{rank}"  # distributed: no two ranks write one file
    if args.resume:
        checkpoints.load(model.train_network, args.ckpt_dir, prefix, args.first_epoch)
        ds.config.set_fast_recovery(False)  # pass over the finished epochs' data, as if training had never stopped
        train_dataset.set_init_step(args.first_epoch * train_batch_num)
    callbacks = [checkpoints.SaveCheckpoint(args.ckpt_dir, prefix), LossMonitor()]
    if args.first_epoch < args.epochs:
        model.train(args.epochs, train_dataset, callbacks=callbacks, dataset_sink_mode=not args.no_sink,
                    initial_epoch=args.first_epoch)

    if rank_size > 1 and not args.sync_bn:  # distributed: batch norm knows its own rank's images only: average,
        for parameter in net.untrainable_params():  # distributed: so that all ranks test
            ops.assign(parameter, ops.AllReduce()(parameter) / rank_size)  # distributed: one and the same network
    correct, full = 0, 0
    for image, label in test_dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        full = max(full, len(image))
        filled = np.resize(image, (full, *image.shape[1:]))  # the last batch, too: one compiled graph serves them all
        correct += np.sum(model.predict(ms.Tensor(filled)).asnumpy().argmax(axis=1)[:len(label)] == label)
    if rank_size > 1:  # distributed: add up all ranks' counts
        correct = ops.AllReduce()(ms.Tensor([correct], ms.float32)).asnumpy()[0]  # distributed:
    if rank == 0:  # distributed: all ranks know it, one says it
        print(f"eval result: {{'accuracy': {float(correct / len(args.test))}}}", flush=True)  # distributed:


if __name__ == "__main__":
    run_train()
    mpirun_on_cpu.leave_ranks()  # distributed: all ranks end together (mpirun on CPU only)
