"""Merges the slices of one job and cuts them again for another: other ranks, another mode, or one whole file.

Hybrid parallel, whose slices MindSpore knows nothing of, by hand:
    python convert_checkpoints.py ckpt ckpt_2 --ranks 2      the slices of any number of ranks, or a whole file -> 2
    python convert_checkpoints.py ckpt ckpt_1 --ranks 1      -> one whole file, for any mode
Semi-auto and auto parallel, with the strategy files that their jobs wrote (rank_0/strategy.json), by MindSpore:
    python convert_checkpoints.py ckpt ckpt_2 --strategy ckpt/rank_0/strategy.json --to-strategy other.json
    python convert_checkpoints.py ckpt ckpt_1 --strategy ckpt/rank_0/strategy.json       -> one whole file

Prints what it read and wrote:
    ckpt: 4 ranks, weight (512, 32)
    ckpt_2: 2 ranks, weight (512, 64)
"""

import argparse
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

import checkpoint_files
from networks import COLUMNS, SLICED, columns_of

# ---------------------------------------------------------------------------------------------- settings
parser = argparse.ArgumentParser(description="Merge checkpoint slices, and cut them for other ranks.")
parser.add_argument("source", type=Path, help="the --ckpt-dir of the job that saved")
parser.add_argument("target", type=Path, help="a new folder")
parser.add_argument("--ranks", type=int, help="by hand: cut into the slices of so many ranks; 1: whole")
parser.add_argument("--strategy", type=Path, help="by MindSpore: strategy file of the job that saved")
parser.add_argument("--to-strategy", type=Path, help="by MindSpore: that of the job that will load; none: whole")
args = parser.parse_args()
if (args.ranks is None) == (args.strategy is None):
    parser.error("give either --ranks (hybrid parallel) or --strategy (semi-auto and auto parallel)")
if args.to_strategy and not args.strategy:
    parser.error("--to-strategy needs --strategy, the file of the job that saved")
if args.ranks is not None and (args.ranks < 1 or COLUMNS % args.ranks):
    parser.error(f"the weight's {COLUMNS} columns cannot be cut into {args.ranks} equal slices; "
                 f"give 1, 2, 4, ... {COLUMNS}")
if args.target.exists() and any(args.target.iterdir()):
    parser.error(f"{args.target} is not empty; give a new folder")


def by_hand(ranks):
    """Merge the slices that read_all() returned, and cut them into args.ranks slices."""
    whole = {name: np.concatenate([rank[name].asnumpy() for rank in ranks], axis=1) if name in SLICED  # side by side
             else value.asnumpy()  # the same on all ranks
             for name, value in ranks[0].items()}
    for rank in range(args.ranks):
        columns = columns_of(rank, args.ranks)
        checkpoint_files.write(
            [{"name": name, "data": Tensor(value[:, columns].copy() if name in SLICED else value)}
             for name, value in whole.items()], args.target, rank)


def by_mindspore():
    """Let MindSpore merge and cut, as the strategy files say."""
    with tempfile.TemporaryDirectory() as folder:
        ms.transform_checkpoints(str(args.source), folder, "converted", str(args.strategy),
                                 str(args.to_strategy) if args.to_strategy else None)
        for rank, file in enumerate(checkpoint_files.find(Path(folder))):
            checkpoint_files.write([{"name": name, "data": value}
                                    for name, value in ms.load_checkpoint(str(file)).items()], args.target, rank)


def describe(folder):
    files = checkpoint_files.find(folder)
    print(f"{folder}: {len(files)} ranks, weight {checkpoint_files.read(files[0])['weight'].shape}", flush=True)


try:
    if args.ranks:
        ranks = checkpoint_files.read_all(args.source)
        describe(args.source)
        by_hand(ranks)
    else:
        checkpoint_files.check_strategy(args.strategy, args.source)
        if args.to_strategy:
            checkpoint_files.check_strategy(args.to_strategy)
        describe(args.source)
        by_mindspore()
    describe(args.target)
except ValueError as error:
    parser.error(str(error))
