"""ResNet-50 on Fruits-360 on one card: what gpu_distributed_train.py spreads over several.

    export CUDA_VISIBLE_DEVICES=0
    export DATA_PATH=/path/fruits-360
    python3 gpu_single_train.py
A small run that a laptop without a card does in a minute (python tools/make_datasets.py fruits /tmp/fruits makes the
data): python3 gpu_single_train.py --data-path /tmp/fruits --epochs 1 --steps 4 --image-size 32 --test-size 32

DATA_PATH holds Training/<class>/ and Test/<class>/. It prints its loss, once an epoch where the data are sunk to the
card, once a step elsewhere, and saves ckpt/fruit_360_renet50-<epoch>_<step>.ckpt after each epoch:
    train dataset batch num: 2115
    test dataset batch num: 709
    epoch: 1 step: 2115, loss is 4.219570636749268
    ...
    eval result: {'accuracy': 0.676348730606488}
Compare with: diff gpu_single_train.py gpu_distributed_train.py
"""

import argparse
import os
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import LossMonitor, Model

import checkpoints
from fruits_files import check_fruits_folder
from gpu_libraries import choose_device
from resnet import resnet50



# ---------------------------------------------------------------------------------------------- settings
def parse_arguments():
    """Read and check the options; returns them with classes, train and test, which check_fruits_folder() found."""
    parser = argparse.ArgumentParser(description="Train ResNet-50 on a folder of pictures, such as Fruits-360.")
    parser.add_argument("--data-path", default=os.getenv("DATA_PATH"), help="folder of Training and Test (DATA_PATH)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step")
    parser.add_argument("--crop-size", type=int, default=32, help="training sees a random crop of this size,")
    parser.add_argument("--image-size", type=int, default=100, help="resized to this")
    parser.add_argument("--test-size", type=int, default=128, help="testing sees the whole picture, resized to this")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), metavar="N",
                        help="blocks in each stage of ResNet; 1 1 1 1 compiles several times faster")
    parser.add_argument("--no-augment", action="store_true", help="train on whole pictures: no random crops and flips")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Momentum(0.9)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, order of the images, random crops")
    parser.add_argument("--steps", type=int, help="stop each epoch after this many steps")
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
    try:
        args.classes, args.train, args.test = check_fruits_folder(args.data_path, args.skip_bad)
        if len(args.train) < args.batch_size:
            raise ValueError(f"the {len(args.train)} training images are fewer than --batch-size {args.batch_size}; "
                             "use a smaller one")
        prefixes = [checkpoints.PREFIX]
        args.first_epoch = checkpoints.first_epoch(args.ckpt_dir, prefixes, args.resume, len(args.classes))
    except ValueError as error:
        parser.error(str(error))
    return args


# ---------------------------------------------------------------------------------------------- data set
def create_dataset(args, mode, batch_size):
    """Make the pipeline over the "train" or the "test" images.

    Returns:
        A dataset of (image, label) batches: float32 (batch, 3, size, size), about -1 to 1; int32 (batch,). Training
        draws a new order each epoch.
    """
    ds.config.set_seed(args.seed)
    if mode == "train":
        sampler = ds.RandomSampler()
        sampler.add_child(ds.SubsetSampler(args.train))
    else:
        share = args.test
        sampler = ds.SubsetSampler(share)
    folder = str(Path(args.data_path) / ("Training" if mode == "train" else "Test"))
    dataset = ds.ImageFolderDataset(folder, sampler=sampler, decode=True)

    normalise = [ds.vision.Normalize([127.5] * 3, [127.5] * 3), ds.vision.HWC2CHW()]
    if mode == "test":
        transforms = [ds.vision.Resize((args.test_size, args.test_size)), *normalise]
    elif args.no_augment:
        transforms = [ds.vision.Resize((args.image_size, args.image_size)), *normalise]
    else:
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

    train_dataset = create_dataset(args, "train", args.batch_size)
    test_dataset = create_dataset(args, "test", args.batch_size)
    if args.steps:
        train_dataset = train_dataset.take(args.steps)
    train_batch_num = train_dataset.get_dataset_size()
    print(f"train dataset batch num: {train_batch_num}", flush=True)
    print(f"test dataset batch num: {test_dataset.get_dataset_size()}", flush=True)

    ms.set_seed(args.seed)
    net = resnet50(len(args.classes), args.blocks)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    # The tutorial gives the optimizer loss_scale=1024 but does not scale the loss, so that each gradient is divided
    # by 1024 and the learning rate is 0.00001 in truth; without loss scaling there is nothing to undo.
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=args.lr, momentum=0.9)
    model = Model(net, loss_fn=loss, optimizer=optimizer)

    prefix = checkpoints.PREFIX
    if args.resume:
        checkpoints.load(model.train_network, args.ckpt_dir, prefix, args.first_epoch)
        ds.config.set_fast_recovery(False)  # pass over the finished epochs' data, as if training had never stopped
        train_dataset.set_init_step(args.first_epoch * train_batch_num)
    callbacks = [checkpoints.SaveCheckpoint(args.ckpt_dir, prefix), LossMonitor()]
    if args.first_epoch < args.epochs:
        model.train(args.epochs, train_dataset, callbacks=callbacks, dataset_sink_mode=not args.no_sink,
                    initial_epoch=args.first_epoch)

    correct, full = 0, 0
    for image, label in test_dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        full = max(full, len(image))
        filled = np.resize(image, (full, *image.shape[1:]))  # the last batch, too: one compiled graph serves them all
        correct += np.sum(model.predict(ms.Tensor(filled)).asnumpy().argmax(axis=1)[:len(label)] == label)
    print(f"eval result: {{'accuracy': {float(correct / len(args.test))}}}", flush=True)


if __name__ == "__main__":
    run_train()
