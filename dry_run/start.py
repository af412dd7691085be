"""What launchers know of the dry run; tools/launch.py loads this file from here."""

import os
import sys
import tempfile
from pathlib import Path


def add_options(parser):
    """The option of all launchers."""
    parser.add_argument("--dry-run", action="store_true", help="compile all ranks' Ascend graphs here, without a card")


def prepare(args, launch):
    """With --dry-run: check the script's options, then hand over to dry_run.py; this does not return."""
    if not args.dry_run:
        return
    os.environ.pop("DEVICE_TARGET", None)  # Ascend, whatever this machine has
    stand_in = ["--data", "cifar10"] if os.getenv("DATA_PATH") == "" else []
    with tempfile.TemporaryDirectory() as folder:
        if stand_in:  # so that the options are checked, too
            with open(Path(folder) / "data_batch_1.bin", "wb") as file:
                file.truncate(10_000 * 3073)
            os.environ["DATA_PATH"] = folder
        if args.check:
            args.target = "Ascend"
            launch.check_script(args)
    tool = Path(__file__).resolve().with_name("dry_run.py")
    os.execv(sys.executable, [sys.executable, str(tool), "--rank-size", str(args.n), "--ranks",
                              f"{args.local[0]}-{args.local[-1]}", *stand_in, args.script, *args.options])
