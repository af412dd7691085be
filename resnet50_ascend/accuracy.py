"""Tests a network on several ranks: each image once, by one of them.
"""

import mindspore as ms
import mindspore.dataset as ds
from mindspore import ops
from mindspore.train import Model

from cifar10_files import check_cifar10_folder


def print_accuracy(net, args, transforms, rank, rank_size):
    """Count over all ranks what the network gets right, and print it on rank 0.

    Args:
        net: from float32 (batch_size, 3, height, width) to logits, float32 (batch_size, classes).
        args: data_path, the folder with test_batch.bin; test_images, how many of them all ranks
            test together (0: no test, None: all); batch_size, images a step on each rank.
        transforms: from a uint8 picture (32, 32, 3) to what net takes.

    In data parallel the statistics of batch norm become their mean over the ranks.
    """
    images, batch_size = check_cifar10_folder(args.data_path)[1], args.batch_size
    if args.test_images is not None:
        images = min(args.test_images, images)
    if images == 0:
        return
    # distributed: automatic parallel cuts every batch by itself, so all ranks bring the same one;
    # in data parallel each tests its share, with the mean of what batch norm has seen on the ranks
    share, shares = (0, 1) if rank_size == 1 else (rank, rank_size)
    if ms.get_auto_parallel_context("parallel_mode") == "auto_parallel":
        ms.set_auto_parallel_context(dataset_strategy="full_batch")
        share, shares = 0, 1
    elif rank_size > 1:
        for parameter in net.untrainable_params():
            ops.assign(parameter, sum_over_ranks(parameter) / rank_size)

    # Filled up with image 0, not counted, to full batches: all ranks take as many steps.
    mine = list(range(share, images, shares))
    steps = -(-images // (shares * batch_size))
    filled = mine + [0] * (steps * batch_size - len(mine))
    dataset = ds.Cifar10Dataset(args.data_path, usage="test", sampler=ds.SubsetSampler(filled))
    dataset = dataset.map(transforms, "image").batch(batch_size)
    model, right = Model(net), []
    for image, label in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        logits = model.predict(ms.Tensor(image)).asnumpy()
        right.extend(logits.argmax(axis=1) == label)
    count = int(sum(right[:len(mine)]))
    # distributed: add up the counts of all ranks; one of them says it
    if shares > 1:
        count = int(sum_over_ranks(ms.Tensor([count], ms.float32)).asnumpy()[0])
    if rank == 0:
        print(f"accuracy: {count / images:.4f} ({count} of {images} test images)", flush=True)


def sum_over_ranks(value):
    """Add up a tensor of every rank by all-reduce; all ranks get the sum."""
    return ops.AllReduce(ops.ReduceOp.SUM)(value)
