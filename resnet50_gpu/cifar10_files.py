"""Checks the CIFAR-10 files of a folder before training starts, and types for argparse.
Copy of resnet50_ascend/cifar10_files.py; tools/copies.py --fix refreshes it.
"""

import argparse
import os
import re
from pathlib import Path

# The binary version (https://www.cs.toronto.edu/~kriz/cifar.html): a file holds 10,000 records
# of one label byte and 3 * 32 * 32 bytes of picture. MindSpore reads files of exactly this size.
RECORD_BYTES, RECORDS = 1 + 3 * 32 * 32, 10_000
SOURCE = "fetch and unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MAKER = Path(__file__).resolve().parent.parent / "tools" / "make_datasets.py"
if MAKER.is_file():  # it is not, where the lesson was copied out alone
    SOURCE += f", or make a small stand-in: python {os.path.relpath(MAKER)} cifar10 FOLDER"


def cifar10_folder(text):
    """For argparse: the folder, if check_cifar10_folder() finds nothing wrong.

    That of cifar-10-batches-bin will do, too; rank 0 says so, or if images are missing.
    """
    given, inner = text, Path(text) / "cifar-10-batches-bin"
    if text and os.path.isdir(inner) and not any(Path(text).glob("data_batch_*")):
        text = str(inner)
    try:
        images, _ = check_cifar10_folder(text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    first = os.getenv("OMPI_COMM_WORLD_RANK", os.getenv("RANK_ID", "0")) == "0"
    if first and (text != given or images != 5 * RECORDS):
        print(f"data: {text}, {images:,} of CIFAR-10's 50,000 training images", flush=True)
    return text


def at_least(least):
    """For argparse: a type for numbers, whole as least is, that are not smaller, and not huge."""
    def number(text):
        value = type(least)(text)
        if not least <= value < 2**31:
            raise argparse.ArgumentTypeError(f"must be at least {least}, below 2**31, not {text}")
        return value
    return number


def memory_of_a_rank(image_size, batch_size):
    """The MB that a rank of the ResNet-50 lessons takes on CPU: measured were 1,200 with small
    pictures, 4,600 with 32 of 224x224; what is above 1,200 grows with the pixels of a batch.
    """
    return 1200 + image_size * image_size * batch_size * 21 // 10_000


def check_cifar10_folder(folder):
    """Check the folder cifar-10-batches-bin; it may lack test_batch.bin.

    Args:
        folder: str, Path or None.

    Returns:
        (train_images, test_images): how many images the files hold.

    Raises:
        ValueError: what is missing or wrong, where, and what to do.
    """
    if not folder:
        raise ValueError("no data set given: set DATA_PATH to the folder cifar-10-batches-bin")
    if not (folder := Path(folder)).is_dir():
        how = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"the data folder {folder} {how} (looked from {Path.cwd()}); "
                         f"give the absolute path of cifar-10-batches-bin, or {SOURCE}")
    # MindSpore reads what has .bin at the end and data_batch or test_batch anywhere in its name.
    files = sorted(path for path in folder.iterdir() if path.name.endswith(".bin"))
    good = [path for path in files if re.fullmatch(r"(data_batch_\d+|test_batch)\.bin", path.name)]
    for path in files:
        if not path.is_file() or (path not in good and re.search("(data|test)_batch", path.name)):
            raise ValueError(f"MindSpore would read {path}, too, which is no file of CIFAR-10 or "
                             "a link that leads nowhere; correct it or move it elsewhere")
        if path in good:
            _check_file(path)
    tests = sum(path.name == "test_batch.bin" for path in good)
    if len(good) == tests:
        has = ("holds the Python version of CIFAR-10" if (folder / "data_batch_1").exists() else
               "has no data_batch_*.bin")
        raise ValueError(f"{folder} {has}, so it is not the binary version of CIFAR-10; {SOURCE}")
    return RECORDS * (len(good) - tests), RECORDS * tests


def _check_file(file):
    data = file.read_bytes()
    if len(data) != RECORDS * RECORD_BYTES:
        raise ValueError(f"{file} has {len(data)} bytes, a file of CIFAR-10's binary version has "
                         f"{RECORDS * RECORD_BYTES}: it is damaged or was cut off; fetch it again")
    labels = data[::RECORD_BYTES]
    if max(labels) > 9:
        raise ValueError(f"{file}: record {labels.index(max(labels))} has the label {max(labels)}, "
                         "CIFAR-10's are 0 to 9; fetch the binary version again")
