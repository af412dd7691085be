"""Tests a network on several ranks: each image once, by one of them.
"""

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops
from mindspore.train import Model

from cifar10_files import check_cifar10_folder


def print_accuracy(net, args, transforms, rank, rank_size):
    """Count over all ranks what the network gets right, and print it on rank 0.

    Args:
        net: from float32 (batch_size, 3, height, width) to logits, float32 (batch_size, classes).
        args: data_path; batch_size of a rank; test_images of all ranks together, None: all.
        transforms: from a uint8 picture (32, 32, 3) to what net takes.
    """
    there, batch_size = check_cifar10_folder(args.data_path)[1], args.batch_size
    if (images := there if args.test_images is None else min(args.test_images, there)) == 0:
        if rank == 0 and args.test_images != 0:
            print("no accuracy: the data have no test_batch.bin", flush=True)
        return
    # distributed: batch norm has seen this rank's images only: take the mean over the ranks
    for cell in (cell for _, cell in net.cells_and_names() if isinstance(cell, nn.BatchNorm2d)):
        if rank_size > 1 and cell.moving_mean.shape == (cell.num_features,):  # else cut by channels
            for parameter in cell.moving_mean, cell.moving_variance:
                ops.assign(parameter, ops.AllReduce()(parameter) / rank_size)
    share, shares = rank, rank_size  # distributed: each rank tests a share of the images
    # distributed: but automatic parallel cuts every batch by itself, so all bring the same one
    if ms.get_auto_parallel_context("parallel_mode") == "auto_parallel":
        ms.set_auto_parallel_context(dataset_strategy="full_batch")
        share, shares, batch_size = 0, 1, batch_size * rank_size  # as in training: cut alike

    # Filled up with image 0, not counted, to full batches: all ranks take as many steps.
    mine = list(range(share, images, shares))
    steps = -(-images // (shares * batch_size))
    filled = mine + [0] * (steps * batch_size - len(mine))
    dataset = ds.Cifar10Dataset(args.data_path, usage="test", sampler=ds.SubsetSampler(filled))
    dataset = dataset.map(transforms, "image").batch(batch_size)
    model, right = Model(net), []
    for image, label in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        right.extend(model.predict(ms.Tensor(image)).asnumpy().argmax(axis=1) == label)
    count = int(sum(right[:len(mine)]))
    # distributed: add up the counts of all ranks; one of them says it
    if shares > 1:
        count = int(ops.AllReduce()(ms.Tensor([count], ms.float32)).asnumpy()[0])
    if rank == 0:
        print(f"accuracy: {count / images:.4f} ({count} of {images} test images)", flush=True)
