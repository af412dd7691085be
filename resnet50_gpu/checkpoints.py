"""Saves a checkpoint after each epoch, and resumes from the newest one that all ranks saved whole.
Copy of checkpoints/checkpoints.py; tools/copies.py --fix refreshes it.

    checkpoints.add_options(parser)                             # --ckpt-dir, --resume [if-saved]
    checkpoints.check_options(parser, args)                     # ends if they cannot be followed
    saved = checkpoints.Checkpoints(folder, prefix, rank_size)  # this rank's own folder or prefix
    first_epoch = saved.resume(train_network, args.resume)      # 0: from the beginning
    model.train(args.epochs, dataset, callbacks=[saved], initial_epoch=first_epoch)
Weights and optimizer are in the file; the order of the data is not. Seed it by the epoch, or pass
over what the finished epochs took: ds.config.set_fast_recovery(False), then
dataset.set_init_step(first_epoch * steps). So training goes on as if it had never stopped.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import mindspore as ms
from mindspore import ops
from mindspore.train import Callback


def add_options(parser, folder=None):
    """Add --ckpt-dir, whose default is folder (str), and --resume to an argparse parser."""
    parser.add_argument("--ckpt-dir", type=_writable, default=folder, metavar="DIR",
                        help="save a checkpoint here after each epoch")
    parser.add_argument("--resume", nargs="?", const="always", choices=("always", "if-saved"),
                        help="go on after the last epoch saved; if-saved: or begin")


def _writable(text):
    # A relative folder is where the launcher was started; a rank may run elsewhere.
    folder = Path(os.path.relpath(os.getenv("LAUNCH_DIR") or "."), text)
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{folder} cannot be made or written to; choose another")
    return folder


def check_options(parser, args):
    """End with a sentence if --resume has no folder, or new files would mix with earlier ones."""
    if args.resume and not args.ckpt_dir:
        parser.error("--resume needs --ckpt-dir, the folder that the checkpoints were saved in")
    folder = args.ckpt_dir
    files = folder and [*folder.glob("*-*_*.ckpt"), *folder.glob("*/*-*_*.ckpt")]
    if files and not args.resume:
        parser.error(f"{folder} holds checkpoints of an earlier run; go on from them with "
                     "--resume, or choose another --ckpt-dir")


def load(file):
    """ms.load_checkpoint, also where cached files fill the memory; ValueError if it is damaged.

    MindSpore 2.10 refuses a file larger than the memory that nothing uses at all, though the system
    gives its caches to whoever needs memory: so need more than the file takes, and let go of it.
    """
    for _ in range(4):
        try:
            return ms.load_checkpoint(str(file), crc_check=True)
        except ValueError as error:
            if "available memory" not in str(error):
                raise
            b"1" * (4 * file.stat().st_size)
    return ms.load_checkpoint(str(file), crc_check=True)


class Checkpoints(Callback):
    """The checkpoints of a rank, <folder>/<prefix>-<epoch>_<step>.ckpt; rank_size: how many ranks
    save; keep: how many files stay, None: all."""

    def __init__(self, folder, prefix, rank_size, keep=None):
        super().__init__()
        self.folder, self.prefix, self.rank_size, self.keep = folder, prefix, rank_size, keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"{folder} cannot be made ({error.strerror}); choose another --ckpt-dir")

    def on_train_epoch_end(self, run_context):
        state = run_context.original_args()
        self.save(state.train_network, state.cur_epoch_num, state.batch_num)

    def save(self, network, epoch, step, **options):
        """Save a cell, or [{"name", "data"}], after an epoch; options of ms.save_checkpoint."""
        draft = self.folder / f"{self.prefix}.draft.ckpt"  # no half file is ever found
        draft.unlink(missing_ok=True)  # of a run that was killed
        ms.save_checkpoint(network, str(draft), crc_check=True, **options, append_dict={
            "rank_size": self.rank_size})  # the last entry: a file that was cut off lacks it
        draft.replace(self.folder / f"{self.prefix}-{epoch}_{step}.ckpt")
        for old, file in self.files().items():
            if self.keep and old <= epoch - self.keep:
                file.unlink()

    def files(self):
        """The files of all epochs, whole or not: {epoch: path}; of one epoch the newest."""
        names = re.compile(re.escape(self.prefix) + r"-(\d+)_\d+\.ckpt")
        files = sorted(self.folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
        found = [(names.fullmatch(file.name), file) for file in files]
        return {int(match[1]): file for match, file in found if match}

    def newest(self, limit=float("inf")):
        """Read the newest whole file up to an epoch: (epoch, {name: Parameter}); (0, {}): none."""
        files = {epoch: file for epoch, file in self.files().items() if epoch <= limit}
        for epoch in sorted(files, reverse=True):
            parameters = {}
            try:
                parameters = load(files[epoch])
            except ValueError as error:
                if "memory" in str(error):  # that says nothing about the file
                    raise
            if "rank_size" in parameters:
                return epoch, parameters
            print(f"warning: {files[epoch]} is cut off or damaged; passed over", flush=True)
        return 0, {}

    def resume(self, network, how, change=dict):
        """Load the newest epoch that all ranks saved whole; returns it, or ends with a sentence.

        Args:
            network: the cell that was saved.
            how: args.resume: "always"; "if-saved", which returns 0 for none; None: do not resume.
            change: makes the parameters to load, {name: Parameter}, of those in the file.
        """
        if not how:
            return 0
        for file in self.folder.glob("*.ckpt"):
            if not re.search(r"-\d+_\d+\.ckpt$|\.draft\.ckpt$", file.name):
                print(f"{file} passed over: it is not named {self.prefix}-<epoch>_<step>.ckpt",
                      flush=True)
        limit, agreed = float("inf"), False
        while not agreed:  # a rank that was killed may lack the last epoch
            epoch, parameters = self.newest(limit)
            ranks = int(parameters.pop("rank_size", self.rank_size))
            if ranks != self.rank_size:  # other shares of the data, and perhaps other slices
                sys.exit(f"{self.folder} holds checkpoints of {ranks} ranks, these are "
                         f"{self.rank_size}; resume with {ranks}, or choose another --ckpt-dir")
            epochs = [epoch]
            if self.rank_size > 1:
                epochs = ops.AllGather()(ms.Tensor([epoch], ms.float32)).asnumpy().tolist()
            limit, agreed = min(epochs), min(epochs) == max(epochs)
        if epoch == 0 and how == "always":
            sys.exit(f"nothing to resume: {self.folder} and the other ranks' folders share no "
                     "whole epoch; start without --resume, or with as many ranks as before")
        files = self.files()
        for later in (saved for saved in files if saved > epoch):
            files[later].replace(f"{files[later]}.unused")  # or it would mix with the new files
        if epoch:
            try:
                unlike = any(ms.load_param_into_net(network, change(parameters)))
            except RuntimeError:  # other shapes
                unlike = True
            if unlike:
                sys.exit(f"{files[epoch]} is of another network; resume with the options (such as "
                         "--blocks) of the job that saved it")
            print(f"resumed after epoch {epoch} from {files[epoch]}", flush=True)
        return epoch
