"""Loads a checkpoint for inference, in one process and without any parallel mode, and prints what the network answers.

    python predict.py ckpt                                       whole files: rank 0's is loaded
    python predict.py ckpt --strategy ckpt/rank_0/strategy.json  slices of semi-auto or auto parallel
Slices of hybrid parallel have no strategy file: merge them first (convert_checkpoints.py ckpt ckpt_1 --ranks 1).

    sample 0: answer 4.32107878, wanted 4.27194309
    ...
"""

import argparse
from pathlib import Path

import mindspore as ms

import checkpoint_files
from networks import SAMPLES, Net, initial_values, make_samples

parser = argparse.ArgumentParser(description="Print the answers of a trained network.")
parser.add_argument("folder", type=Path, help="the --ckpt-dir of the job that saved")
parser.add_argument("--strategy", type=Path, help="how the parameters were cut, by MindSpore's strategy file")
parser.add_argument("--seed", type=int, default=1, help="of the samples")
parser.add_argument("--samples", type=int, default=8, help=f"how many of the {SAMPLES} to show")
args = parser.parse_args()

net = Net(*initial_values(args.seed))  # its values are overwritten
try:
    if args.strategy:
        checkpoint_files.check_strategy(args.strategy, args.folder)
        files = [str(file) for file in checkpoint_files.find(args.folder)]
        ms.load_distributed_checkpoint(net, files, None, str(args.strategy))  # merges slices; None: one process
    else:
        checkpoint_files.check(args.folder, 1)
        ms.load_param_into_net(net, ms.load_checkpoint(str(checkpoint_files.find(args.folder)[0])), strict_load=True)
except ValueError as error:
    parser.error(str(error))

net.set_train(False)
x, y = make_samples(args.seed)
answers = net(ms.Tensor(x)).asnumpy()
for sample in range(args.samples):
    print(f"sample {sample}: answer {answers[sample]:.9g}, wanted {y[sample]:.9g}")
