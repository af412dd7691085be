"""Checks the MNIST files of a folder before training starts. Not needed to understand the lesson.

The IDX format (http://yann.lecun.com/exdb/mnist): big-endian magic number and sizes, then one byte
a value.
"""

import struct
from argparse import ArgumentTypeError
from pathlib import Path


def mnist_folder(text):
    """Check the IDX files of a folder; made to be the type= of an argparse option.

    Args:
        text: the folder of train-images-idx3-ubyte and train-labels-idx1-ubyte and, if there are
            test images, of t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.

    Returns:
        (folder, test images): a str, and how many test images there are, 0 without test files.

    Raises:
        ArgumentTypeError: what is missing or wrong, in which file, and what to do.
    """
    if not text:
        raise ArgumentTypeError("no data set: give its folder or set DATA_PATH")
    folder = Path(text)
    if not folder.is_dir():
        raise ArgumentTypeError(
            f"the data folder {folder} does not exist (looked from {Path.cwd()}); give an absolute "
            f"path, or make the set: python tools/make_datasets.py mnist {folder}")
    _count(folder, "train")
    return str(folder), _count(folder, "t10k") if any(folder.glob("t10k-*-ubyte")) else 0


def _count(folder, part):
    """The number of images of "train" or "t10k"."""
    images = _items(folder / f"{part}-images-idx3-ubyte", magic=2051, dimensions=3)
    labels = _items(folder / f"{part}-labels-idx1-ubyte", magic=2049, dimensions=1)
    if images != labels:
        raise ArgumentTypeError(f"{folder}: {part} has {images} images but {labels} labels; "
                                "fetch both files again")
    return images


def _items(file, magic, dimensions):
    """The number of images or labels of a file, by its header; its size must fit."""
    if not file.is_file():
        packed = file.with_name(file.name + ".gz").exists()
        raise ArgumentTypeError(f"{file.parent} has no file {file.name}"
                                f"{' (there is a .gz of it: gunzip it)' if packed else ''}; "
                                "give the folder with the four MNIST files")
    with file.open("rb") as stream:
        header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or struct.unpack(">i", header[:4])[0] != magic:
        raise ArgumentTypeError(f"{file} is not an MNIST file (its first four bytes should be the "
                                f"number {magic}); fetch it again")
    items, *image = struct.unpack(f">{dimensions}i", header[4:])
    if items < 1 or image not in ([], [28, 28]):
        raise ArgumentTypeError(f"{file} should hold at least one 28x28 image, its header says "
                                f"{items} of {image}; fetch it again")
    expected = len(header) + items * (28 * 28 if image else 1)
    if file.stat().st_size != expected:
        raise ArgumentTypeError(f"{file} has {file.stat().st_size} bytes, its header promises "
                                f"{expected}: it is damaged or was cut off; fetch it again")
    return items
