"""ResNet-50 on Fruits-360 on several cards: what gpu_single_train.py does on one, data parallel.

    export CUDA_VISIBLE_DEVICES=0,1,2,3      # without a card four CPU processes rehearse it
    export DATA_PATH=/path/fruits-360        # pictures: Training/<class>/*.jpg, Test/<class>/*.jpg
    mpirun -n 4 python3 gpu_distributed_train.py
    python3 ranks.py -n 4 --with=msrun --check gpu_distributed_train.py       checked and watched
    mpirun -n 2 python3 gpu_distributed_train.py --epochs 1 --steps 4 --image-size 32   a small run
As root add --allow-run-as-root, on few CPU cores --oversubscribe.
Each rank prints its loss, once an epoch where the data are sunk to the card, else once a step, and
saves ckpt/fruit_360_renet50_<rank>-<epoch>_<step>.ckpt after each epoch; rank 0 prints the result:
    rank size: 4, rank id: 0
    epoch: 1 step: 2115, loss is 4.5366
    eval result: {'accuracy': 0.50}
What one card alone would not need is marked: grep -n "distributed:" gpu_distributed_train.py
"""

import argparse
import os
import sys

# distributed: start and end together, ask who and how many we are, add up over all
import ranks
from mindspore import ops
from mindspore.communication import get_group_size, get_rank, init
from sync_batch_norm import synchronise_batch_norm

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import LossMonitor, Model

import checkpoints
from fruits_files import at_least, fruits_folder, memory_of_a_rank
from gpu_libraries import choose_device
from resnet import resnet50

parser = argparse.ArgumentParser(description="Train on pictures.", usage=argparse.SUPPRESS)
add = parser.add_argument
add("--data-path", type=fruits_folder, default=os.getenv("DATA_PATH", ""), dest="data",
    metavar="DIR", help="the folder of Training/ and Test/ (DATA_PATH); checked before the start")
add("--epochs", type=at_least(1), default=10)
add("--steps", type=at_least(1), help="end each epoch after so many steps")
add("--image-size", type=at_least(32), default=100, help="pixels of a training picture")
add("--blocks", type=at_least(0), nargs=4, default=(3, 4, 6, 3), help="of ResNet; 1 0 0 0: quick")
add("--no-augment", action="store_true", help="train on whole pictures: no crops, no flips")
add("--lr", type=at_least(1e-9), default=0.01, help="learning rate")
add("--no-sink", action="store_true", help="hand over the data step by step: a loss a step")
add("--check", action="store_true", help="only check options and data, then stop")
checkpoints.add_options(parser, folder="ckpt")  # --ckpt-dir, --resume
# distributed: a batch is a rank's; by default all ranks together take the tutorial's 32
add("--batch-size", type=at_least(1), help="pictures a step, on each rank (32 // ranks)")
add("--sync-bn", action="store_true", help="batch norm over the pictures of all ranks")

args = parser.parse_args()
if args.check:
    batch = args.batch_size or 32  # distributed: 32 // ranks is less
    print(f"needs {memory_of_a_rank(args.image_size, batch)} MB a rank on CPU")
    sys.exit()

choose_device()  # DEVICE_TARGET, or what is there
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(0)  # distributed: all ranks start from the same weights
# distributed: connect (NCCL on GPU, MCCL on CPU); all hold all weights, gradients are averaged
rank, rank_size = 0, 1
if ranks.join():
    init()
    rank, rank_size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
else:
    print("One process. To start 4: mpirun -n 4 python3 gpu_distributed_train.py", flush=True)
print(f"rank size: {rank_size}, rank id: {rank}", flush=True)
args.batch_size = args.batch_size or max(1, 32 // rank_size)


def create_dataset(part, sampler, transforms, size):
    """Batches of float32 (batch, 3, size, size), between -1 and 1, and of int32 (batch,)."""
    dataset = ds.ImageFolderDataset(f"{args.data.folder}/{part}", sampler=sampler, decode=True)
    normalise = [ds.vision.Normalize([127.5] * 3, [127.5] * 3), ds.vision.HWC2CHW()]
    dataset = dataset.map([*transforms, ds.vision.Resize((size, size)), *normalise], "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(args.batch_size, drop_remainder=part == "Training")


crop = ds.vision.RandomCrop(32, 4, pad_if_needed=True)
augment = [] if args.no_augment else [crop, ds.vision.RandomHorizontalFlip()]
images = args.steps * args.batch_size if args.steps else None  # None: all
sampler = ds.DistributedSampler(rank_size, rank, num_samples=images)  # distributed: its share
share = range(rank, args.data.test_images, rank_size)  # distributed: each picture is tested once
train_dataset = create_dataset("Training", sampler, augment, args.image_size)
test_size = args.image_size * 128 // 100  # the tutorial trains on 100 pixels and tests on 128
test_dataset = create_dataset("Test", ds.SubsetSampler(share), [], test_size)
if (train_batch_num := train_dataset.get_dataset_size()) == 0:
    parser.error("there are fewer training pictures than a step needs; use a smaller --batch-size")
# distributed: what all ranks know, one says
if rank == 0:
    print(f"train dataset batch num: {train_batch_num}", flush=True)
    print(f"test dataset batch num: {test_dataset.get_dataset_size()}", flush=True)

net = resnet50(len(args.data.classes), args.blocks)  # or a network of your own
# distributed: else batch norm sees this rank's pictures only
if args.sync_bn and rank_size > 1:
    synchronise_batch_norm(net, rank_size)

loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(net.trainable_params(), learning_rate=args.lr, momentum=0.9)
model = Model(net, loss_fn=loss, optimizer=optimizer)
prefix = f"fruit_360_renet50_{rank}"  # distributed: no two ranks write one file
saved = checkpoints.Checkpoints(args.ckpt_dir, prefix, rank_size)  # distributed: of how many
for file in () if args.resume or saved.dry_run else saved.files().values():
    file.replace(f"{file}.{file.lstat().st_ctime_ns}.unused")  # of an earlier run, set aside
first_epoch = saved.resume(model.train_network, args.resume, dataset=train_dataset)
ds.config.set_seed(rank)  # distributed: other crops and flips on each rank
if first_epoch < args.epochs:
    model.train(args.epochs, train_dataset, callbacks=[saved, LossMonitor()],
                dataset_sink_mode=not args.no_sink, initial_epoch=first_epoch)

# distributed: batch norm has seen its own rank's pictures only: average, all test one network
if rank_size > 1 and not args.sync_bn:
    for parameter in net.untrainable_params():
        ops.assign(parameter, ops.AllReduce()(parameter) / rank_size)

correct = 0
for image, label in test_dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
    filled = np.resize(image, (args.batch_size, *image.shape[1:]))  # the last batch, too
    logits = model.predict(ms.Tensor(filled)).asnumpy()[:len(label)]
    correct += np.sum(logits.argmax(axis=1) == label)
# distributed: add up what all ranks have counted; one says it
if rank_size > 1:
    correct = ops.AllReduce()(ms.Tensor([correct], ms.float32)).asnumpy()[0]
if rank == 0:
    print(f"eval result: {{'accuracy': {correct / args.data.test_images}}}", flush=True)
ranks.leave()  # distributed: all ranks end together
