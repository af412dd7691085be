"""Finds and checks the MNIST files of a folder before training starts. The same in one process and in many."""

import struct
from pathlib import Path

# The IDX format (http://yann.lecun.com/exdb/mnist): big-endian magic number and sizes, then one byte a value.
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049


def check_mnist_folder(folder):
    """Check the IDX files of a folder.

    Args:
        folder: the folder that holds train-images-idx3-ubyte and train-labels-idx1-ubyte and, optionally,
            t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; str, Path or None.

    Returns:
        (train_images, test_images): how many images the files hold; test_images is 0 without test files.

    Raises:
        ValueError: what is missing or wrong, in which file, and what to do.
    """
    if not folder:
        raise ValueError("no data set given: use --data-path FOLDER or set DATA_PATH")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist (looked from {Path.cwd()}); "
                         f"give an absolute path, or make the set: python tools/make_datasets.py mnist {folder}")
    train_images = _count(folder, "train")
    test_files = [folder / name for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")]
    return train_images, _count(folder, "t10k") if any(file.exists() for file in test_files) else 0


def _count(folder, part):
    images = _items(folder / f"{part}-images-idx3-ubyte", IMAGES_MAGIC, dimensions=3)
    labels = _items(folder / f"{part}-labels-idx1-ubyte", LABELS_MAGIC, dimensions=1)
    if images != labels:
        raise ValueError(f"{folder}: {part} has {images} images but {labels} labels; fetch both files again")
    return images


def _items(file, magic, dimensions):
    if not file.is_file():
        packed = " (there is a .gz of it: gunzip it)" if file.with_name(file.name + ".gz").exists() else ""
        raise ValueError(f"{file.parent} has no file {file.name}{packed}; give the folder with the four MNIST files")
    with file.open("rb") as stream:
        header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or struct.unpack(">i", header[:4])[0] != magic:
        raise ValueError(f"{file} is not an MNIST file (its first four bytes should be the number {magic}); "
                         "fetch it again")
    sizes = struct.unpack(f">{dimensions}i", header[4:])
    expected = len(header) + sizes[0] * (sizes[1] * sizes[2] if dimensions == 3 else 1)
    if sizes[0] < 1 or (dimensions == 3 and sizes[1:] != (28, 28)):
        raise ValueError(f"{file} should hold at least one 28x28 image, its header says {sizes}; fetch it again")
    if file.stat().st_size != expected:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, its header promises {expected}: it is damaged "
                         "or was cut off; fetch it again")
    return sizes[0]
