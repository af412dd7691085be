"""Finds and checks the pictures of a Fruits-360 tree before training starts.

    python fruits_files.py FOLDER        lists the files of a tree that are no picture, one a line
"""

import argparse
import collections
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from cifar10_files import MAKER, at_least, memory_of_a_rank  # noqa: F401  # for the scripts

EXAMPLE = (f"or make a small one: python {os.path.relpath(MAKER)} fruits FOLDER"
           if MAKER.is_file() else "or fetch Fruits-360")
PARTS = ("Training", "Test")

Fruits = collections.namedtuple("Fruits", "folder classes train_images test_images")


def fruits_folder(text):
    """For argparse: check a folder of Training/<class>/<picture> and Test/<class>/<picture>.

    Returns:
        Fruits: folder, a Path; classes, their names in the order of their labels; train_images and
        test_images, how many pictures the two parts hold.

    Raises:
        argparse.ArgumentTypeError: what is missing or wrong, where, and what to do.
    """
    try:
        return _check(text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check(text):
    if not text:
        raise ValueError("no data set given: use --data-path FOLDER or set DATA_PATH")
    if not (folder := Path(text)).is_dir():
        how = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"the data folder {folder} {how} (looked from {Path.cwd()}); "
                         f"give an absolute path, {EXAMPLE}")
    classes, test_classes = (_classes_of(folder / part) for part in PARTS)
    for name in sorted(set(classes) ^ set(test_classes)):
        has, lacks = PARTS if name in classes else reversed(PARTS)
        raise ValueError(f"{folder / has} has the class {name}, {folder / lacks} has not; "
                         "both need the same classes")
    train, test = (sorted((folder / part).glob("*/*")) for part in PARTS)
    named = {folder / part / name for part in PARTS for name in classes}
    for empty in sorted(named - {file.parent for file in (*train, *test)}):
        raise ValueError(f"the class {empty} has no picture you may read; add, chmod or remove it")
    if bad := no_pictures(folder):
        raise ValueError(f"{bad[0]} is no picture that can be read (one of {len(bad)}); chmod or "
                         f"remove it; all are listed by python fruits_files.py {folder}")
    return Fruits(folder, classes, len(train), len(test))


def _classes_of(part):
    if not part.is_dir():
        raise ValueError(f"{part.parent} has no folder {part.name}; "
                         f"give the folder that holds Training/ and Test/, {EXAMPLE}")
    classes = sorted(item.name for item in part.iterdir() if item.is_dir())
    if len(classes) < 2:
        raise ValueError(f"{part} has {len(classes) or 'no'} class folder; its pictures belong "
                         f"into one folder a class, {part}/<class>/, two or more")
    return classes


def no_pictures(folder):
    """What lies in the class folders of a tree that MindSpore cannot read as a picture."""
    files = [file for part in PARTS for file in sorted(Path(folder, part).glob("*/*"))]
    with ThreadPoolExecutor() as pool:
        return [file for file, good in zip(files, pool.map(_is_picture, files)) if not good]


def _is_picture(file):
    try:
        data = file if file.is_file() else ""  # a named pipe would be waited for
        for look in ("verify", "load"):  # for what was cut off; of a PNG, its last bytes are needed
            with Image.open(data, formats=("JPEG", "PNG", "BMP", "TIFF", "PPM")) as picture:
                getattr(picture, look)()
        return picture.mode != "F" and min(picture.size) > 1  # RandomCrop cannot pad 1 pixel
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], PARTS[0]).is_dir():
        sys.exit(f"usage: python fruits_files.py FOLDER, which holds {PARTS[0]}/ and {PARTS[1]}/")
    for each in no_pictures(sys.argv[1]):
        print(each)
