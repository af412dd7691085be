"""Checks the CIFAR-10 files of a folder before training starts, and types for argparse.
"""

import argparse
from pathlib import Path

# The binary version (https://www.cs.toronto.edu/~kriz/cifar.html): a file holds 10,000 records
# of one label byte and 3 * 32 * 32 bytes of picture. MindSpore reads files of exactly this size.
RECORD_BYTES, RECORDS = 1 + 3 * 32 * 32, 10_000
SOURCE = ("fetch and unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, "
          "or make a small stand-in: python tools/make_datasets.py cifar10 FOLDER")


def cifar10_folder(text):
    """For argparse: the folder as it was given, if check_cifar10_folder() finds nothing wrong."""
    try:
        check_cifar10_folder(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def at_least(least):
    """For argparse: a type for whole numbers that are not smaller."""
    def number(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return int(text)
    return number


def memory_of_a_rank(image_size, batch_size):
    """The MB that a rank of the ResNet-50 lessons takes on CPU.

    Measured were 1,200 with small pictures and 4,600 with 32 pictures of 224x224; what is above
    1,200 grows with the pixels of a batch.
    """
    return 1200 + image_size * image_size * batch_size * 21 // 10_000


def check_cifar10_folder(folder):
    """Check the files of cifar-10-batches-bin.

    Args:
        folder: the folder that holds data_batch_1.bin, ... and, optionally, test_batch.bin; str,
            Path or None.

    Returns:
        (train_images, test_images): how many images the files hold; test_images is 0 without
        test_batch.bin.

    Raises:
        ValueError: what is missing or wrong, where, and what to do.
    """
    if not folder:
        raise ValueError("no data set given: set DATA_PATH to the folder cifar-10-batches-bin")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist (looked from {Path.cwd()}); "
                         f"give the absolute path of cifar-10-batches-bin, or {SOURCE}")
    train_files = sorted(folder.glob("data_batch_*.bin"))
    if not train_files:
        inner = folder / "cifar-10-batches-bin"
        if inner.is_dir():
            raise ValueError(f"{folder} has no data_batch_*.bin, but {inner} is there: "
                             "give that folder")
        if (folder / "data_batch_1").exists() or (folder / "cifar-10-batches-py").exists():
            raise ValueError(f"{folder} holds the Python version of CIFAR-10, the binary version "
                             f"is needed: {SOURCE}")
        raise ValueError(f"{folder} has no data_batch_*.bin, so it is not the binary version of "
                         f"CIFAR-10; {SOURCE}")
    test_files = list(folder.glob("test_batch.bin"))
    for file in train_files + test_files:
        _check_file(file)
    return RECORDS * len(train_files), RECORDS * len(test_files)


def _check_file(file):
    size = file.stat().st_size
    if size != RECORDS * RECORD_BYTES:
        raise ValueError(f"{file} has {size} bytes, a file of CIFAR-10's binary version has "
                         f"{RECORDS * RECORD_BYTES}: it is damaged or was cut off; fetch it again")
    with file.open("rb") as stream:
        for record in (0, RECORDS - 1):
            stream.seek(record * RECORD_BYTES)
            label = stream.read(1)[0]
            if label > 9:
                raise ValueError(f"{file}: record {record} has the label {label}, CIFAR-10's are "
                                 "0 to 9; fetch the binary version again")
