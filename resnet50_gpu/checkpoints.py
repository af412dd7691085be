"""Saves and finds the checkpoints of the Fruits-360 scripts: ckpt/<prefix>-<epoch>_<step>.ckpt."""

import re
import sys

import mindspore as ms
from mindspore.train import Callback

from load_whole import load as load_checkpoint

PREFIX = "fruit_360_renet50"  # the tutorial's spelling


class SaveCheckpoint(Callback):
    """Save weights and optimizer after each epoch. Unlike ModelCheckpoint it adds no suffix to a name that exists."""

    def __init__(self, folder, prefix):
        super().__init__()
        self.folder, self.prefix = folder, prefix

    def on_train_epoch_end(self, run_context):
        state = run_context.original_args()
        draft = self.folder / f"{self.prefix}.draft.ckpt"
        draft.unlink(missing_ok=True)  # left by a run that was killed
        ms.save_checkpoint(state.train_network, str(draft))  # under another name first: no half file is ever found
        draft.replace(self.folder / f"{self.prefix}-{state.cur_epoch_num}_{state.batch_num}.ckpt")


def first_epoch(folder, prefixes, resume, classes):
    """How many epochs are done already, before training starts.

    Args:
        folder: the folder of the checkpoints, Path; made if it does not exist.
        prefixes: the prefix of each rank's files.
        resume: go on after the newest epoch that every prefix has a checkpoint of; else refuse to overwrite any.
        classes: number of classes of this data set.

    Returns:
        That epoch's number, counted from 1; 0 without resume.

    Raises:
        ValueError: there are checkpoints without resume, or none to resume, or they are of another network.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--ckpt-dir {folder} cannot be made ({error.strerror}); choose another folder") from error
    if not resume:
        if any(folder.glob(f"{PREFIX}*-*_*.ckpt")):
            raise ValueError(f"{folder} holds checkpoints of an earlier run; go on from them with --resume, or choose "
                             "another --ckpt-dir")
        return 0
    saved = [_by_epoch(folder, prefix) for prefix in prefixes]
    common = set.intersection(*map(set, saved))  # a job that was killed may not have saved its last epoch on all ranks
    if not common:
        raise ValueError(f"nothing to resume: {folder} holds no epoch of {' and '.join(prefixes)}; start without "
                         "--resume, or with as many ranks as before")
    newest = max(common)
    shape = getattr(load_checkpoint(saved[0][newest]).get("fc.weight"), "shape", None)
    if shape != (classes, 2048):
        raise ValueError(f"{saved[0][newest]} is the checkpoint of another network: its last layer, fc.weight, has the "
                         f"shape {shape}, this data set needs ({classes}, 2048); choose another --ckpt-dir")
    return newest


def load(network, folder, prefix, epoch):
    """Load the checkpoint of an epoch, weights and optimizer; ends the process if it is of another network."""
    file = _by_epoch(folder, prefix)[epoch]
    if any(ms.load_param_into_net(network, load_checkpoint(file))):
        sys.exit(f"{file} is of another network; resume with the --blocks of the run that saved it")
    print(f"resumed after epoch {epoch} from {file}", flush=True)


def _by_epoch(folder, prefix):
    return {int(re.search(r"-(\d+)_\d+$", file.stem).group(1)): file for file in folder.glob(f"{prefix}-*_*.ckpt")}
