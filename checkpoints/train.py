"""Save on every rank, be killed, resume: a small network, whole checkpoints or slices.

    python train.py                                              one process
    bash run.sh data_parallel 2                                  2 cards, or processes on a CPU
    bash run.sh data_parallel 2 -- --resume --epochs 10          go on after what is saved
    bash run.sh data_parallel 2 --restarts 3 -- --ckpt-dir new   do so after each failure
    bash run.sh hybrid_parallel 2 -- --ckpt-dir slices --sliced  each rank saves what it holds
    bash run.sh semi_auto_parallel 2 --dry-run -- --ckpt-dir semi   MindSpore cuts, on cards
After each epoch, of 4 steps, rank r saves ckpt/rank_<r>/net-<epoch>_4.ckpt:
    resumed after epoch 5 from ckpt/rank_1/net-5_4.ckpt
    rank 1 of 2 on CPU, hybrid_parallel: weight (512, 64)
    epoch: 6 step: 1, loss is 0.060995
What one process alone would not need is marked: grep -n "distributed:" train.py
"""

import argparse
import os
from pathlib import Path

import ranks  # first: MindSpore's own import is quicker then
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

import checkpoints
import slices
from network import (BATCH, COLUMNS, ROWS, SAMPLES, STEPS, Net, check_mode, make_samples)

# ----------------------------------------------------------------------------------------- settings
parser = argparse.ArgumentParser(description="Train with checkpoints.", usage=argparse.SUPPRESS)
MODES = ("data_parallel", "hybrid_parallel", "semi_auto_parallel")
parser.add_argument("--mode", default=MODES[0], choices=MODES)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Momentum")
checkpoints.add_options(parser, folder="ckpt")
parser.add_argument("--sliced", action="store_true", help="save only what this rank holds")
parser.add_argument("--load", type=Path, metavar="DIR",
                    help="begin with the whole parameters in another job's --ckpt-dir")
parser.add_argument("--check", action="store_true", help="only check the options")
args = parser.parse_args()
checkpoints.check_options(parser, args)
if args.epochs < 1 or not 0 < args.lr < 1e9:
    parser.error("--epochs must be at least 1, --lr must be greater than 0, not huge")
try:
    check_mode(args.mode, int(os.getenv("RANK_SIZE", "1")))
    if args.mode == "semi_auto_parallel" and args.sliced and args.resume:
        raise ValueError("what MindSpore has cut it loads whole: convert_checkpoints.py and --load")
    if args.load and args.check:
        slices.Saved(args.load).whole()
except (OSError, ValueError) as error:
    parser.error(str(error))
args.check and parser.exit()

# ------------------------------------------------------------------------------ device, other ranks
ms.set_context(mode=ms.GRAPH_MODE)
# distributed: connect to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
rank, rank_size = 0, 1
if ranks.join():
    init()
    rank, rank_size = get_rank(), get_group_size()
    by_hand = args.mode != "semi_auto_parallel"  # there gradients are of the mean over all ranks
    ms.set_auto_parallel_context(parallel_mode=args.mode, gradients_mean=by_hand)
elif args.mode != "data_parallel":
    parser.error(f"{args.mode} needs a launcher: bash run.sh {args.mode} 2")
folder = args.ckpt_dir / f"rank_{rank}"  # distributed: no two ranks write one file
saved = checkpoints.Checkpoints(folder, slices.PREFIX, rank_size, keep=3)
# distributed: MindSpore cuts the whole batch, and writes down how it cuts the parameters
if args.mode == "semi_auto_parallel":
    ms.set_auto_parallel_context(dataset_strategy="full_batch", strategy_ckpt_config={
        "save_file": str(folder.absolute() / "strategy.json"), "only_trainable_params": False})

# ------------------------------------------------------------------------------- network, optimizer
net, mine = Net(args.mode, rank, rank_size), slice(0, BATCH)
if args.mode == "data_parallel":  # distributed: which samples of each batch this rank sees
    mine = slice(rank * BATCH // rank_size, (rank + 1) * BATCH // rank_size)
optimizer = nn.Momentum(net.trainable_params(), args.lr, 0.9)
train_step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()


# ------------------------------------------------------------------------------------ save and load
def what_to_save():
    """The training step; in hybrid parallel, where MindSpore cannot, its slices made whole."""
    if args.mode != "hybrid_parallel" and not args.sliced:
        return train_step
    # distributed: AllGather joins rows, and our slices are columns: so transposed. A file of
    # slices says whose they are: those of another rank would load, too
    return [{"name": "rank", "data": Tensor(rank)}] * args.sliced + [
        {"name": parameter.name, "data": ops.AllGather()(parameter.T).T
         if parameter.layerwise_parallel and not args.sliced else parameter}
        for parameter in train_step.get_parameters()]


def what_to_load(parameters):
    """The opposite of what_to_save(): all that is in a file, or this rank's columns of it."""
    return slices.of_rank(parameters, rank, rank_size, cut=args.mode == "hybrid_parallel")


def load(folder):
    """Load whole parameters of a job with other ranks or another mode."""
    try:
        parameters = slices.Saved(folder).whole(net) if rank == 0 else {}
    except (OSError, ValueError) as error:
        saved.refuse(str(error))
    parameters |= {p.name: p for p in optimizer.get_parameters() if p.name.startswith(
        ("learning_rate", "global_step")) or (p.size == 1 and p.name not in parameters)}  # own ones
    # distributed: rank 0 reads, Broadcast gives the others the same: nobody reads another file
    for parameter in train_step.get_parameters():
        shape = (ROWS, COLUMNS) if parameter.shape == net.weight.shape else parameter.shape
        value = parameters.get(name := parameter.name, Tensor(np.zeros(shape), parameter.dtype))
        if rank_size > 1:
            [value] = ops.Broadcast(0)((Tensor(value.asnumpy()),))
        parameters[name] = Parameter(value, name=name)
    ms.load_param_into_net(train_step, what_to_load(parameters), strict_load=True)


first_epoch = saved.resume(train_step, args.resume, what_to_load)
if args.load and (first_epoch, saved.first_step) == (0, 0):
    load(args.load)

# -------------------------------------------------------------------------------------------- train
print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}, {args.mode}: "
      f"weight {net.weight.shape}", flush=True)
if first_epoch >= args.epochs:
    print(f"nothing left to train: {first_epoch} of --epochs {args.epochs} are saved", flush=True)
x, y = make_samples()
for epoch in range(first_epoch + 1, args.epochs + 1):
    order = np.random.default_rng(epoch).permutation(SAMPLES)  # of this epoch, whenever it runs
    done = saved.first_step if epoch == first_epoch + 1 else 0
    for step, batch in enumerate(order.reshape(-1, BATCH)[done:], start=done + 1):
        loss = train_step(Tensor(x[batch[mine]]), Tensor(y[batch[mine]]))
        print(f"epoch: {epoch} step: {step}, loss is {float(loss):.5g}", flush=True)
        if saved.is_last(loss) or step == STEPS:
            saved.save(what_to_save(), epoch, step, STEPS, integrated_save=not args.sliced)
ranks.leave()  # distributed: all ranks end together
