"""Checks the MNIST files of a folder before training starts. Not needed to understand the lesson.

The IDX format (http://yann.lecun.com/exdb/mnist): big-endian magic number, sizes, then bytes.
"""

import os
import struct
from argparse import ArgumentTypeError
from pathlib import Path


def mnist_folder(text):
    """For argparse: check the files train-images-idx3-ubyte and so on of a folder, or of the one
    below that has them (the tutorial's MNIST_Data/train); rank 0 says so.

    Returns:
        ({"train": folder, "test": folder}, how many images the files named t10k hold, here or in
        test/ beside; 0 without)

    Raises:
        ArgumentTypeError: what is missing or wrong, in which file, and what to do.
    """
    if not text:
        raise ArgumentTypeError("no data set: give its folder or set DATA_PATH")
    if not (folder := Path(text)).is_dir():
        maker = Path(__file__).resolve().parent.parent / "tools" / "make_datasets.py"
        make = f", or make the set: python {os.path.relpath(maker)} mnist {folder}"
        raise ArgumentTypeError(
            f"the data folder {folder} {'is a file' if folder.exists() else 'does not exist'} "
            f"(looked from {Path.cwd()}); give an absolute path" +
            make * (maker.is_file() and not folder.exists()))  # no maker: copied out alone
    depths = () if any(folder.glob("*train*-ubyte")) else ("*", "*/*")
    below = {file.parent for depth in depths for file in folder.glob(f"{depth}/train*-ubyte")}
    train = min(below, key=lambda at: (len(at.parts), at.name != "train", at), default=folder)
    _count(train, "train")
    beside = [at / "test" for at in (train.resolve().parent, train.absolute().parent, folder)]
    places = [at for at in (train, *beside, folder) if any(at.glob("*t10k-*-ubyte*"))]
    test = places[0] if places else "no files t10k-* there or in test/ beside it, so no accuracy"
    rank = os.getenv("OMPI_COMM_WORLD_RANK", os.getenv("RANK_ID", "0"))
    if rank == "0" and not train == test == folder:
        print(f"data: {train}, test images: {test}", flush=True)
    return {"train": str(train), "test": str(test)}, _count(test, "t10k") if places else 0


def _count(folder, part):
    """The number of images of "train" or "t10k"."""
    images = _items(folder, f"{part}-images", "idx3-ubyte", magic=2051, dimensions=3)
    labels = _items(folder, f"{part}-labels", "idx1-ubyte", magic=2049, dimensions=1)
    if images != labels:
        raise ArgumentTypeError(f"{folder}: {part} has {images} images but {labels} labels; "
                                "fetch both files again")
    return images


def _items(folder, name, ending, magic, dimensions):
    """The number of images or labels of a file, by its header; its size must fit."""
    # MindSpore reads each file whose name has both parts, in any place: .gz and copies, too.
    found = sorted(file for file in folder.iterdir() if name in file.name and ending in file.name)
    if len(found) > 1:
        raise ArgumentTypeError(f"{folder}: MindSpore would read {found[0].name} and "
                                f"{found[1].name}; move one of them elsewhere")
    if not found or not found[0].is_file():
        raise ArgumentTypeError(f"{folder} has no file {name}-{ending}; "
                                "give the folder with the four MNIST files")
    file, data = found[0], found[0].read_bytes()
    head = 4 + 4 * dimensions
    if len(data) < head or struct.unpack_from(">i", data)[0] != magic:
        raise ArgumentTypeError(f"{file} is not an MNIST file (its first four bytes should be the "
                                f"number {magic}); gunzip it if it is a .gz, or fetch it again")
    items, *image = struct.unpack_from(f">{dimensions}i", data, 4)
    if items < 1 or image not in ([], [28, 28]):
        raise ArgumentTypeError(f"{file} should hold at least one 28x28 image, its header says "
                                f"{items} of {image}; fetch it again")
    expected = head + items * (28 * 28 if image else 1)
    if len(data) != expected:
        raise ArgumentTypeError(f"{file} has {len(data)} bytes, its header promises "
                                f"{expected}: it is damaged or was cut off; fetch it again")
    if not image and max(data[head:]) > 9:
        raise ArgumentTypeError(f"{file} has a label above 9; fetch it again")
    return items
