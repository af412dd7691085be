"""Saves a checkpoint after each epoch, and resumes from the newest one that all ranks saved whole.

    checkpoints.add_options(parser)                             # --ckpt-dir, --resume [if-saved]
    checkpoints.check_options(parser, args)                     # ends if they cannot be followed
    saved = checkpoints.Checkpoints(folder, prefix, rank_size)  # this rank's own folder or prefix
    first_epoch = saved.resume(train_network, args.resume, dataset=dataset)  # 0: from the start
    model.train(args.epochs, dataset, callbacks=[saved], initial_epoch=first_epoch)  # if < epochs
Weights and optimizer are in the file; a new learning rate is the script's. A dataset passes over
what was used: a loop of your own needs one iterator, of all epochs from the first. An order of your
own goes by the epoch's number (and saved.first_step). TERM to the launcher: all save, and end.
"""

import contextlib
import os
import re
import runpy
import zlib
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
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
        raise ArgumentTypeError(f"{folder} cannot be made or written to; choose another")
    return folder


def check_options(parser, args):
    """End with a sentence if --resume has no folder, or new files would mix with earlier ones."""
    folder = args.ckpt_dir
    found = Checkpoints.found = [file for pattern in ("*-*_*.ckpt", "*/*-*_*.ckpt") if folder
                                 for file in folder.glob(pattern)]
    if args.resume and not folder:
        parser.error("--resume needs --ckpt-dir, the folder that the checkpoints were saved in")
    if found and not args.resume:
        parser.error(f"{folder} holds checkpoints of an earlier run; go on from them with "
                     "--resume, or choose another --ckpt-dir")
    if folder and getattr(args, "check", False):
        print(f"saves in {folder}")  # the launcher lets no second job save there


def load(file):
    """Read a file: {name: Parameter}, {} if damaged; ValueError if it exceeds memory."""
    os.access(file, os.R_OK) or Checkpoints.refuse(f"{file} may not be read; chmod or chown it")
    for left in reversed(range(4)):
        try:
            return ms.load_checkpoint(str(file), crc_check=True)
        except ValueError as error:
            if "memory" not in str(error):
                break
            if left == 0:
                raise
            b"1" * (4 * file.stat().st_size)  # MindSpore counts cached files as used; clear them
    return {}


class Checkpoints(Callback):
    """Saves <folder>/<prefix>-<epoch>_<step>.ckpt on each of rank_size ranks; keep: None is all."""
    refuse = ArgumentParser(usage=SUPPRESS).error  # one sentence of the whole job, exit code 2
    found = ()  # by check_options(): files of any rank; those of this one may be elsewhere
    entries = "rank_size", "unfinished", "batch size", "lr crc"  # unfinished: steps of its epoch
    lacking = "; without rates of mindspore.experimental, DynamicLossScaler's scale: see README.md"

    def __init__(self, folder, prefix, rank_size, keep=None):
        super().__init__()
        self.folder, self.prefix, self.rank_size, self.keep = folder, prefix, rank_size, keep
        self.done = self.first_step = self.batch = self.rates = 0  # batch, rates: not known
        self.dry_run = "MS_SIMULATION_LEVEL" in os.environ  # it trains nothing: no file is touched
        words = os.getenv("RANKS_SAVING")  # of a launcher, which may end this rank after a step
        self.launcher = runpy.run_path(words)["Launcher"]() if words else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.refuse(f"{folder} cannot be written to ({error.strerror}); use another --ckpt-dir")

    def on_train_epoch_begin(self, run_context):
        state = run_context.original_args()  # a schedule may go by the steps of all epochs
        of_epoch = self.first_step if state.cur_epoch_num == self.done + 1 else 0
        state.cur_step_num = (state.cur_epoch_num - 1) * state.batch_num + of_epoch

    def on_train_step_end(self, run_context):
        state = run_context.original_args()
        each = getattr(state.train_network, "micro_batches", 1)  # only after these do ranks meet
        if state.cur_step_num % each == 0 and self.is_last(state.net_outputs):
            step = (state.cur_step_num - 1) % state.batch_num + 1
            self.save(state.train_network, state.cur_epoch_num, step, state.batch_num)

    def on_train_epoch_end(self, run_context):
        state = run_context.original_args()
        self.save(state.train_network, state.cur_epoch_num, state.batch_num)
        state.train_dataset.set_init_step(0)  # another call of Model.train passes over nothing

    def is_last(self, result):
        """To ask after each step, with its loss: has the launcher, on TERM, made it the last?"""
        return bool(self.launcher and self.launcher.ends_after(result))

    def save(self, network, epoch, step, steps=0, **options):
        """Save a cell or [{"name", "data"}] after step of steps; never returns after the last."""
        if self.dry_run:
            return
        draft = self.folder / f"{self.prefix}.draft.ckpt"  # so that no half file is ever found
        draft.unlink(missing_ok=True)
        extra = {"unfinished": steps, "batch size": self.batch} if step < steps else {}
        if (stages := ms.get_auto_parallel_context("pipeline_stages")) > 1:
            options["integrated_save"] = False  # of other stages MindSpore gathers nothing
            extra[f"rank_{ms.communication.get_rank()}_of_{stages}_stages"] = 1
        # The last entry is rank_size: a file that was cut off lacks it.
        ms.save_checkpoint(network, str(draft), crc_check=True, **options,
                           append_dict={**extra, "lr crc": self.rates, "rank_size": self.rank_size})
        draft.replace(self.folder / f"{self.prefix}-{epoch}_{step}.ckpt")
        for (old, _), file in self.files().items():
            if self.keep and old <= epoch - self.keep:
                file.unlink()
        self.launcher and self.launcher.saved(f"epoch {epoch}, step {step}")

    def files(self):
        """The files of all epochs, whole or not: {(epoch, step): path}."""
        names = re.compile(re.escape(self.prefix) + r"-(\d+)_(\d+)\.ckpt")
        return {(int(name[1]), int(name[2])): file for file in self.folder.iterdir()
                if (name := names.fullmatch(file.name)) and not file.is_fifo()}  # would hang

    def newest(self, limit=(float("inf"),)):
        """Read the newest whole file up to a limit: (epoch, step), {name: value}; or (0, 0), {}."""
        for saved, file in sorted(each for each in self.files().items() if each[0] <= limit)[::-1]:
            parameters = load(file) if file.exists() else {}  # a link may lead nowhere
            if "rank_size" in parameters:
                return saved, parameters
            print(f"warning: {file} is cut off or damaged; passed over", flush=True)
        return (0, 0), {}

    def resume(self, network, how, change=dict, dataset=None):
        """Load the newest file that all ranks saved whole, or end with a sentence.

        Returns how many epochs are done (0: none, or how, args.resume, is None), sets first_step:
        steps done of the next. change may cut {name: Parameter}; dataset passes over what is done.
        """
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            self.refuse(f"{self.folder} cannot be read or written to; use another --ckpt-dir")
        self.batch = 0 if dataset is None else dataset.get_batch_size()
        network.check_names_and_refresh_name()  # as at its first step: no two have one name then
        own = {p.name: p for p in network.get_parameters()}
        taken = own.keys() & {*self.entries}
        taken and self.refuse(f"rename parameter {min(taken)}: checkpoints hold another so called")
        names = [name for name in own if re.fullmatch(r"(.*\.)?learning_rate(_group_\d+)?", name)]
        self.rates = zlib.crc32(b"".join(own[name].asnumpy().tobytes() for name in names))
        if not how or self.dry_run:
            return 0
        for file in self.folder.glob("*.ckpt"):
            if not re.search(r"-\d+_\d+\.ckpt$|\.draft\.ckpt$", file.name):
                print(f"{file} passed over: it is not named {self.prefix}-<epoch>_<step>.ckpt")
        limit, agreed, most = (float("inf"),), False, []
        while not agreed:  # a rank that was killed may lack the last file
            saved, parameters = self.newest(limit)
            saved_by = int(parameters.pop("rank_size", self.rank_size))
            if saved_by != self.rank_size:  # other shares of the data, and perhaps other slices
                self.refuse(f"{self.folder} holds checkpoints of {saved_by} ranks, these are "
                            f"{self.rank_size}; resume with {saved_by}, or take another --ckpt-dir")
            of_all = [list(saved)] if self.rank_size == 1 else (
                ops.AllGather()(ms.Tensor([saved], ms.float32)).asnumpy().tolist())
            limit, agreed, most = tuple(min(of_all)), min(of_all) == max(of_all), max(most, *of_all)
        files, (epoch, step) = self.files(), saved
        lost = files if most > [0, 0] else {*self.found} - {*files.values()}  # ranks moved
        if saved == (0, 0) and (how == "always" or len(lost) > 1):
            self.refuse(f"nothing to resume: {self.folder} and the other ranks' folders share no "
                        "whole epoch; start all ranks where they were, or name another --ckpt-dir")
        for file in [files[key] for key in files if key > saved]:  # or they would mix with new ones
            file.replace(f"{file}.{file.lstat().st_ctime_ns}.unused")
        if saved == (0, 0):
            return 0
        _, steps, batch, rates = (int(parameters.pop(name, 0)) for name in self.entries)
        where = f"in epoch {epoch} after step {step}" if steps else f"after epoch {epoch}"
        self.done, self.first_step = (epoch - 1, step) if steps else (epoch, 0)
        if (stages := ms.get_auto_parallel_context("pipeline_stages")) > 1:  # another's is refused
            parameters.pop(f"rank_{ms.communication.get_rank()}_of_{stages}_stages", None)
            held = ops.AllReduce()(ms.Tensor([name in parameters for name in own], ms.float32))
            parameters = {n: own[n].init_data() for n in (own if held.min() else ())} | parameters
        parameters |= {name: own[name] for name in names if rates != self.rates}  # of the script
        now = steps if dataset is None else dataset.get_dataset_size()
        fits = batch in (0, self.batch) and steps in (0, 1, now)  # 1: of how many is not known
        if dataset is not None:
            ms.dataset.config.set_fast_recovery(False)  # samples and crops of finished steps, too
            dataset.set_init_step(self.done * now + self.first_step)
        with contextlib.suppress(RuntimeError):  # other shapes
            if fits and ms.load_param_into_net(network, change(parameters)) == ([], []):
                lacks = any(hasattr(o, "param_groups") or "DynamicLossScaler" in str(type(o))
                            for _, c in network.cells_and_names() for o in (c, *vars(c).values()))
                print(f"resumed {where} from {files[saved]}{lacks * self.lacking}", flush=True)
                return self.done
        return self.refuse(f"{files[saved]} " + (
            "is of another network or rank; resume with the options (such as --blocks)" if fits else
            f"was saved in an epoch of {steps} steps of {batch}, now {now} of {self.batch}; resume "
            "with the --steps and --batch-size") + " of the job that saved it")
