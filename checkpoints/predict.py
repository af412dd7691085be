"""Loads a checkpoint in one process, without any parallel mode, and prints the network's answers.

    python predict.py ckpt                                         whole files: rank 0's is loaded
    python predict.py ckpt --strategy ckpt/rank_0/strategy.json    slices of semi-auto parallel
Slices of hybrid parallel have no strategy file: make them whole first, with convert_checkpoints.py.

    sample 0: answer 4.32107878, wanted 4.27194309
"""

import argparse
from pathlib import Path

import mindspore as ms

import slices
from network import SAMPLES, Net, make_samples

parser = argparse.ArgumentParser(description="Print a network's answers.", usage=argparse.SUPPRESS)
parser.add_argument("folder", type=Path, help="the --ckpt-dir of the job that saved")
parser.add_argument("--strategy", type=Path, help="how the parameters were cut")
parser.add_argument("--samples", type=int, default=8, help=f"how many of the {SAMPLES} to show")
args = parser.parse_args()
if not 0 < args.samples <= SAMPLES:
    parser.error(f"--samples is a number from 1 to {SAMPLES}")

net = Net()  # its values are overwritten
try:
    saved = slices.Saved(args.folder)
    if args.strategy:
        slices.check_strategy(args.strategy, saved)
        # MindSpore merges the slices; None: there is one process, which needs all of them
        files = [str(file) for file in saved.files]
        ms.load_distributed_checkpoint(net, files, None, str(args.strategy))
    else:
        ms.load_param_into_net(net, saved.whole(net), strict_load=True)
except (OSError, ValueError) as error:
    parser.error(str(error))

net.set_train(False)
x, y = make_samples()
answers = net(ms.Tensor(x)).asnumpy()
for sample in range(args.samples):
    print(f"sample {sample}: answer {answers[sample]:.9g}, wanted {y[sample]:.9g}")
