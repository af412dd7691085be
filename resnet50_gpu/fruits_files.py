"""Finds and checks the picture files of a Fruits-360 tree before training starts. The same in one process and many."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

EXAMPLE = "or make a small one: python tools/make_datasets.py fruits FOLDER"


def check_fruits_folder(folder, skip_bad=False):
    """Check that a folder holds Training/<class>/<picture> and Test/<class>/<picture>.

    Args:
        folder: the folder with Training and Test; str, Path or None.
        skip_bad: leave out files that are no picture, instead of refusing the folder.

    Returns:
        (classes, train, test): sorted names of the classes; and for each part the positions of its good pictures,
        a list of int. Positions count as MindSpore's ImageFolderDataset does: class by class, all files by name.

    Raises:
        ValueError: what is missing or wrong, where, and what to do.
    """
    if not folder:
        raise ValueError("no data set given: use --data-path FOLDER or set DATA_PATH")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist (looked from {Path.cwd()}); give an absolute path, "
                         f"{EXAMPLE}")
    classes, train = _check_part(folder / "Training", skip_bad)
    test_classes, test = _check_part(folder / "Test", skip_bad)
    for name in sorted(set(classes) ^ set(test_classes)):
        has, lacks = ("Training", "Test") if name in classes else ("Test", "Training")
        raise ValueError(f"{folder / has} has the class {name}, {folder / lacks} has not; both need the same classes")
    return classes, train, test


def _check_part(part, skip_bad):
    if not part.is_dir():
        raise ValueError(f"{part.parent} has no folder {part.name}; give the folder that holds Training/ and Test/, "
                         f"{EXAMPLE}")
    classes = sorted(item.name for item in part.iterdir() if item.is_dir())
    if not classes:
        raise ValueError(f"{part} has no class folder; its pictures belong into one folder a class, {part}/<class>/")
    files, of_class = [], []
    for name in classes:
        in_class = sorted((file for file in (part / name).iterdir() if file.is_file()), key=lambda file: file.name)
        files += in_class
        of_class += [name] * len(in_class)
    with ThreadPoolExecutor() as pool:
        good = list(pool.map(_is_picture, files))
    if not skip_bad and not all(good):
        raise ValueError(f"{files[good.index(False)]} is no picture that can be read ({good.count(False)} such in "
                         f"{part}); remove it, or go on without with --skip-bad")
    for name in classes:
        if not any(is_good for is_good, its_class in zip(good, of_class) if its_class == name):
            raise ValueError(f"the class {part / name} holds no picture; add some or remove its folder")
    return classes, [position for position, is_good in enumerate(good) if is_good]


def _is_picture(file):
    try:
        with Image.open(file) as picture:
            picture.load()  # a header alone does not show that a file was cut off
    except (OSError, SyntaxError, ValueError):
        return False
    return True
