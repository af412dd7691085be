"""Merges the slices of a job and cuts them again: for other ranks, another mode, or one whole file.

Hybrid parallel, whose slices MindSpore knows nothing of, by hand:
    python convert_checkpoints.py ckpt two --ranks 2      slices or whole files -> 2 ranks' slices
    python convert_checkpoints.py ckpt whole --ranks 1    -> one whole file
Semi-auto parallel, with the strategy files that its jobs wrote (rank_0/strategy.json):
    python convert_checkpoints.py ckpt two --strategy ckpt/rank_0/strategy.json --to-strategy OTHER
    python convert_checkpoints.py ckpt whole --strategy ckpt/rank_0/strategy.json
What was saved last is converted. Prints what it read and wrote:
    ckpt: epoch 5, 4 ranks, weight (512, 32)
    two: epoch 5, 2 ranks, weight (512, 64)
"""

import argparse
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

import slices
from network import COLUMNS, ROWS, columns_of

parser = argparse.ArgumentParser(description="Merge and cut slices.", usage=argparse.SUPPRESS)
parser.add_argument("source", type=Path, help="the --ckpt-dir of the job that saved")
parser.add_argument("target", type=Path, help="a new folder")
parser.add_argument("--ranks", type=int, help="by hand: cut for so many ranks; 1: whole")
parser.add_argument("--strategy", type=Path, help="by MindSpore: strategy of the job that saved")
parser.add_argument("--to-strategy", type=Path, help="of the job that will load; none: whole")
args = parser.parse_args()
if (args.ranks is None) == (args.strategy is None):
    parser.error("give either --ranks (hybrid parallel) or --strategy (semi-auto parallel)")
if args.to_strategy and not args.strategy:
    parser.error("--to-strategy needs --strategy, the file of the job that saved")
if args.ranks is not None and (args.ranks < 1 or COLUMNS % args.ranks):
    parser.error(f"the weight's {COLUMNS} columns cannot be cut into {args.ranks} equal slices; "
                 f"give 1, 2, 4, ... {COLUMNS}")
if args.target.exists() and (not args.target.is_dir() or any(args.target.iterdir())):
    parser.error(f"{args.target} is not empty; give a new folder")


def by_hand(saved):
    """Merge the slices and cut them for args.ranks ranks; returns what each rank has."""
    whole = {name: np.concatenate([rank[name].asnumpy() for rank in saved.ranks], axis=1)
             if saved.slices > 1 and value.shape == saved.ranks[0]["weight"].shape
             else value.asnumpy() for name, value in saved.ranks[0].items()}
    columns = [columns_of(rank, args.ranks) for rank in range(args.ranks)]
    return [{name: Tensor(value[:, own].copy() if value.shape == (ROWS, COLUMNS) else value)
             for name, value in whole.items()} for own in columns]


def by_mindspore(saved):
    """Let MindSpore merge and cut, as the strategy files say; returns what each rank has."""
    with tempfile.TemporaryDirectory() as folder:
        for rank, parameters in enumerate(saved.ranks):
            file = Path(folder, "from", f"rank_{rank}", "net.ckpt")
            file.parent.mkdir(parents=True)
            ms.save_checkpoint([{"name": name, "data": value}
                                for name, value in parameters.items()], str(file))
        ms.transform_checkpoints(f"{folder}/from", f"{folder}/to", "net", str(args.strategy),
                                 str(args.to_strategy) if args.to_strategy else None)
        ranks = len(list(Path(folder, "to").glob("rank_*")))
        return [ms.load_checkpoint(f"{folder}/to/rank_{r}/net{r}.ckpt") for r in range(ranks)]


def describe(folder, saved):
    print(f"{folder}: epoch {saved.epoch}, {len(saved.files)} ranks, "
          f"weight {saved.ranks[0]['weight'].shape}", flush=True)


try:
    saved = slices.Saved(args.source)
    if args.strategy:
        slices.check_strategy(args.strategy, saved)
    if args.to_strategy:
        slices.check_strategy(args.to_strategy)
    if args.ranks and saved.slices not in (1, len(saved.files)):
        raise ValueError(f"{args.source} has {saved.slices} slices in {len(saved.files)} files; if "
                         "semi-auto parallel cut them so, give --strategy in place of --ranks")
    describe(args.source, saved)
    ranks = by_hand(saved) if args.ranks else by_mindspore(saved)
    args.target.mkdir(parents=True, exist_ok=True)
    for rank, parameters in enumerate(ranks):
        slices.write(parameters, args.target, rank, len(ranks), saved.epoch, saved.step)
    describe(args.target, slices.Saved(args.target))
except (OSError, ValueError) as error:
    parser.error(str(error))
