"""One small network, trained in each of MindSpore's parallel modes: the losses are the same, the slices are not.

One process, to compare with:
    python parallel_modes.py --mode stand_alone
4 processes (4 cards, or the CPU where there is none):
    bash run.sh data_parallel 4             every rank holds all weights and sees a quarter of the batch
    bash run.sh hybrid_parallel 4           every rank holds a quarter of the weight and sees the whole batch
Ascend cards, or without any card a compilation for them:
    bash run.sh semi_auto_parallel 4 --dry-run      you say how operators are cut, MindSpore inserts the collectives
    bash run.sh auto_parallel 4 --dry-run           MindSpore decides that, too

Every rank prints what it holds and, in every mode, the loss of the whole batch:
    rank 1 of 4 on CPU, hybrid_parallel: weight (512, 32), bias (1,), samples 0-63 of 64
    step: 0, loss is 1.5373
The lines that one process alone would not need are marked: grep -n "distributed:" *.py
"""

import argparse
import os
from pathlib import Path

import mpirun_on_cpu  # distributed: lets mpirun work on CPU too
import mindspore as ms
from mindspore import nn, ops  # distributed: ops
from mindspore.communication import get_group_size, get_rank, init  # distributed: who am I, how many are we

import checkpoint_files
from networks import BATCH, COLUMNS, SAMPLES, HybridParallelNet, Net, SemiAutoParallelNet, initial_values, make_samples

# ---------------------------------------------------------------------------------------------- settings
MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
SEARCH_MODES = ("recursive_programming", "sharding_propagation", "dynamic_programming")
parser = argparse.ArgumentParser(description="Train one small network in one of MindSpore's parallel modes.")
parser.add_argument("--mode", choices=MODES, required=True)
parser.add_argument("--slices", type=int, help="semi-auto: slices of the weight's columns (default: one a rank)")
parser.add_argument("--search-mode", choices=SEARCH_MODES, default=SEARCH_MODES[0], help="auto: how to search")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Momentum")
parser.add_argument("--seed", type=int, default=1, help="samples and initial weights")
parser.add_argument("--ckpt-dir", type=Path, help="save a checkpoint to CKPT_DIR/rank_<rank>/ after the last step")
parser.add_argument("--sliced", action="store_true", help="save this rank's slices only (integrated_save=False)")
parser.add_argument("--load", type=Path, metavar="DIR", help="start with the checkpoints of this --ckpt-dir")
parser.add_argument("--check", type=int, metavar="N", help="only check the options for N ranks, then stop")
args = parser.parse_args()
by_mindspore = args.mode in ("semi_auto_parallel", "auto_parallel")  # it cuts and inserts collectives by itself


def check(ranks):
    """End with a sentence if the options do not fit so many ranks; return how many slices --load has."""
    if args.steps < 0 or args.lr <= 0 or args.seed < 0:
        parser.error("--steps and --seed must not be negative, --lr must be greater than 0")
    if args.mode == "stand_alone" and ranks > 1:
        parser.error(f"stand_alone is one process, not {ranks}; choose another --mode, or start it without a launcher")
    dry_run = "MS_SIMULATION_LEVEL" in os.environ
    if by_mindspore and ms.get_context("device_target") == "CPU" and not dry_run:
        parser.error(f"MindSpore has no {args.mode} on CPU; on a machine without cards compile it for Ascend instead: "
                     f"bash run.sh {args.mode} {ranks} --dry-run")
    if args.mode == "data_parallel" and BATCH % ranks:
        parser.error(f"the batch of {BATCH} samples cannot be shared equally by {ranks} ranks; "
                     f"start 1, 2, 4, ... {BATCH}")
    if args.mode == "hybrid_parallel" and COLUMNS % ranks:
        parser.error(f"the weight's {COLUMNS} columns cannot be cut into {ranks} equal slices, one a rank; "
                     f"start 1, 2, 4, ... {COLUMNS} ranks")
    if args.slices is not None and args.mode != "semi_auto_parallel":
        parser.error(f"--slices is for semi_auto_parallel; {args.mode} does not take it")
    slices = ranks if args.slices is None else args.slices
    if args.mode == "semi_auto_parallel" and (slices < 1 or COLUMNS % slices or ranks % slices):
        parser.error(f"the strategy ((1, 1), (1, {slices})) does not fit: the slices must divide the weight's "
                     f"{COLUMNS} columns and the {ranks} ranks; choose another --slices")
    try:
        return args.load and checkpoint_files.check(args.load, ranks if args.mode == "hybrid_parallel" else 1)
    except ValueError as error:
        return parser.error(str(error))


if args.check is not None:
    check(args.check)
    parser.exit()

# ------------------------------------------------------------------------------- device and other ranks
ms.set_context(mode=ms.GRAPH_MODE)
rank, rank_size = 0, 1  # distributed: as long as nobody says otherwise
launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "MS_ROLE", "RANK_ID"))  # distributed:
if launched:  # distributed:
    mpirun_on_cpu.join_ranks()  # distributed: needed by mpirun on CPU only
    init()  # distributed: connect to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
    rank, rank_size = get_rank(), get_group_size()  # distributed: which rank this is, and of how many
slices_to_load = check(rank_size)
if not launched and args.mode != "stand_alone":  # distributed: started by hand, so say what starts several
    parser.error(f"{args.mode} needs a launcher: bash run.sh {args.mode} 2; one process alone is --mode stand_alone")
ms.set_auto_parallel_context(parallel_mode=args.mode)  # distributed: before the network is made
if by_mindspore:  # distributed:
    ms.set_auto_parallel_context(  # distributed: every rank brings the whole batch, MindSpore cuts it as it needs it
        dataset_strategy="full_batch", search_mode=args.search_mode)  # distributed:
    if args.ckpt_dir:  # distributed: how the parameters were cut: slices cannot be merged without it
        strategy_file = args.ckpt_dir.absolute() / f"rank_{rank}" / "strategy.json"  # distributed:
        strategy_file.parent.mkdir(parents=True, exist_ok=True)  # distributed:
        ms.set_auto_parallel_context(strategy_ckpt_config={  # distributed:
            "save_file": str(strategy_file), "only_trainable_params": False})  # distributed:

# ------------------------------------------------------------------------- samples, network, optimizer
x, y = make_samples(args.seed)
mine = slice(0, BATCH)  # which samples of each batch this rank sees
if args.mode == "data_parallel":
    share = BATCH // rank_size  # distributed: only in data parallel
    mine = slice(rank * share, (rank + 1) * share)  # distributed: each its own share

initial = initial_values(args.seed)
if args.mode == "hybrid_parallel":
    net = HybridParallelNet(*initial, rank, rank_size)  # distributed: slices and AllReduce by hand
elif args.mode == "semi_auto_parallel":
    net = SemiAutoParallelNet(*initial, args.slices or rank_size)  # distributed: slices by strategy
else:
    net = Net(*initial)
optimizer = nn.Momentum(net.trainable_params(), args.lr, 0.9)


class TrainStep(nn.Cell):
    """One training step, compiled as one graph: x (samples, 512), y (samples,) to the loss of the whole batch."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.net, self.optimizer = net, optimizer
        self.loss_and_gradients = ms.value_and_grad(self.forward, None, optimizer.parameters)
        self.parts = 1
        self.add_up = self.reduce_gradients = nn.Identity()  # distributed: MindSpore, or one rank, needs no more
        if args.mode in ("data_parallel", "hybrid_parallel"):  # distributed:
            # What the ranks differentiate together is the sum of their losses. So that this sum is the loss of the
            # whole batch, each rank's part is its loss divided by the number of ranks. In data parallel that makes
            # the mean of the shares. In hybrid parallel all ranks compute the same loss, and the gradient of
            # AllReduce, another AllReduce, adds it up once a rank: undivided, a slice's gradient would be rank_size
            # times too large. (Semi-auto parallel divides, too: _VirtualDiv in its graph.)
            self.parts = rank_size  # distributed:
            self.add_up = ops.AllReduce()  # distributed: of the parts of the loss, only to print it
            # distributed: add the gradients of what all ranks hold, leave those of slices alone (layerwise_parallel)
            self.reduce_gradients = nn.DistributedGradReducer(optimizer.parameters, mean=False)

    def forward(self, x, y):
        return ((self.net(x) - y) ** 2).mean() / self.parts  # distributed: / parts

    def construct(self, x, y):
        loss, gradients = self.loss_and_gradients(x, y)
        gradients = self.reduce_gradients(gradients)  # distributed: every rank gets the same
        loss = ops.depend(loss, self.optimizer(gradients))
        return self.add_up(loss)  # distributed: add_up


train_step = TrainStep()
train_step.set_train()
if args.load:
    checkpoint_files.load(train_step, args.load, slices_to_load, rank, rank_size)  # distributed: rank, rank_size

# ------------------------------------------------------------------------------------- train and save
for step in range(args.steps):
    start = step * BATCH % SAMPLES
    loss = train_step(ms.Tensor(x[start:start + BATCH][mine]), ms.Tensor(y[start:start + BATCH][mine]))
    if step == 0:  # now MindSpore, too, has cut what it cuts
        print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}, {args.mode}: weight "
              f"{net.weight.shape}, bias {net.bias.shape}, samples {mine.start}-{mine.stop - 1} of {BATCH}", flush=True)
    print(f"step: {step}, loss is {loss}", flush=True)
if args.ckpt_dir:
    checkpoint_files.save(train_step, args.ckpt_dir, rank, rank_size, args.sliced)  # distributed: rank, rank_size
mpirun_on_cpu.leave_ranks()  # distributed: all ranks end together (mpirun on CPU only)
