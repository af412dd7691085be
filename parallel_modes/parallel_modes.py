"""One small network in each of MindSpore's parallel modes: the losses are the same, the slices not.

One process, to compare with:
    python parallel_modes.py --mode stand_alone
4 processes (4 cards, or the CPU where there is none):
    bash run.sh data_parallel 4        each rank holds all weights and sees a quarter of the batch
    bash run.sh hybrid_parallel 4      each rank holds a quarter of the weight and sees the batch
Ascend cards, or without any card a compilation for them:
    bash run.sh semi_auto_parallel 4 --dry-run    you say how operators are cut, MindSpore does it
    bash run.sh auto_parallel 4 --dry-run         MindSpore decides that, too

Every rank prints what it holds, rank 0 in every mode the loss of the whole batch:
    rank 1 of 4 on CPU, hybrid_parallel: weight (512, 32), bias (1,), samples 0-63 of 64
    step: 0, loss is 1.5373
What one process alone would not need is marked: grep -n "distributed:" *.py
"""

import argparse
import os
from pathlib import Path

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

from networks import (BATCH, BY_MINDSPORE, SAMPLES, HybridParallelNet, Net, SemiAutoParallelNet,
                      TrainStep, check_mode, initial_values, make_samples)

# ----------------------------------------------------------------------------------------- settings
MODES = ("stand_alone", "data_parallel", "hybrid_parallel", *BY_MINDSPORE)
SEARCH_MODES = ("recursive_programming", "sharding_propagation", "dynamic_programming")
parser = argparse.ArgumentParser(description="Train in a parallel mode.", usage=argparse.SUPPRESS)
parser.add_argument("--mode", choices=MODES, required=True)
parser.add_argument("--slices", type=int,
                    help="semi-auto: slices of the weight's columns (default: one a rank)")
parser.add_argument("--search-mode", choices=SEARCH_MODES, default=SEARCH_MODES[0],
                    help="auto: how MindSpore searches")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Momentum")
parser.add_argument("--ckpt-dir", type=Path, help="save what each rank holds after the last step")
parser.add_argument("--check", action="store_true", help="only check the options")
args = parser.parse_args()
if args.steps < 0 or not 0 < args.lr < 1e9:
    parser.error("--steps must not be negative, --lr must be greater than 0, not huge")
if args.slices is not None and args.mode != "semi_auto_parallel":
    parser.error(f"--slices is for semi_auto_parallel; {args.mode} does not take it")


def check(rank_size):
    try:
        check_mode(args.mode, rank_size, rank_size if args.slices is None else args.slices)
    except ValueError as error:
        parser.error(str(error))


if args.check:
    check(int(os.getenv("RANK_SIZE", "1")))
    parser.exit()

# ------------------------------------------------------------------------------ device, other ranks
ms.set_context(mode=ms.GRAPH_MODE)
# distributed: connect to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
rank, rank_size = 0, 1
if ranks.join():
    init()
    rank, rank_size = get_rank(), get_group_size()
elif args.mode != "stand_alone":
    parser.error(f"{args.mode} needs a launcher: bash run.sh {args.mode} 2; "
                 "one process alone is --mode stand_alone")
check(rank_size)
# distributed: the mode, before the network is made
ms.set_auto_parallel_context(parallel_mode=args.mode)
if args.mode in BY_MINDSPORE:  # every rank brings the whole batch, MindSpore cuts it as it needs it
    ms.set_auto_parallel_context(dataset_strategy="full_batch", search_mode=args.search_mode)

# ---------------------------------------------------------------------- samples, network, optimizer
x, y = make_samples(seed=1)
mine = slice(0, BATCH)  # which samples of each batch this rank sees
initial = initial_values(seed=1)
net, ranks_by_hand = Net(*initial), 1
# distributed: what each mode changes
if args.mode == "data_parallel":
    share = BATCH // rank_size
    mine, ranks_by_hand = slice(rank * share, (rank + 1) * share), rank_size
elif args.mode == "hybrid_parallel":
    net, ranks_by_hand = HybridParallelNet(*initial, rank, rank_size), rank_size
elif args.mode == "semi_auto_parallel":
    net = SemiAutoParallelNet(*initial, args.slices or rank_size)

optimizer = nn.Momentum(net.trainable_params(), args.lr, 0.9)
train_step = TrainStep(net, optimizer, ranks_by_hand).set_train()

# -------------------------------------------------------------------------------------------- train
for step in range(args.steps):
    start = step * BATCH % SAMPLES
    loss = train_step(ms.Tensor(x[start:][mine]), ms.Tensor(y[start:][mine]))
    if step == 0:  # now MindSpore, too, has cut what it cuts
        print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}, {args.mode}: "
              f"weight {net.weight.shape}, bias {net.bias.shape}, "
              f"samples {mine.start}-{mine.stop - 1} of {BATCH}", flush=True)
    if rank == 0:  # all ranks know it: one says it
        print(f"step: {step}, loss is {float(loss):.5g}", flush=True)
if args.ckpt_dir:
    folder = args.ckpt_dir / f"rank_{rank}"  # distributed: no two ranks write one file
    folder.mkdir(parents=True, exist_ok=True)
    ms.save_checkpoint(train_step, str(folder / "parallel_modes.ckpt"), integrated_save=False)
ranks.leave()  # distributed: all ranks end together
