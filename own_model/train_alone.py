"""A training script for one process, as yours may look: a small network learns a surface.

    python train_alone.py
It prints a loss every 10 steps, and saves ckpt/surface-<epoch>_<step>.ckpt at the end:
    epoch: 1 step: 10, loss is 0.1908
train_distributed.py is the same script for several processes.
"""

import argparse

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint

parser = argparse.ArgumentParser(description="Train a small network.", usage=argparse.SUPPRESS)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="samples a step")
args = parser.parse_args()
if min(args.epochs, args.batch_size) < 1:
    parser.error("--epochs and --batch-size must be at least 1")

ms.set_context(mode=ms.GRAPH_MODE)

ms.set_seed(1)


def create_dataset(batch_size):
    """4,096 points and their heights on the surface: float32 (batch_size, 2), (batch_size, 1)."""
    points = np.random.RandomState(1).uniform(-1, 1, (4096, 2)).astype(np.float32)
    heights = np.sin(3 * points[:, :1]) * points[:, 1:]
    dataset = ds.NumpySlicesDataset(
        (points, heights), ["point", "height"], shuffle=False,
    )
    return dataset.batch(batch_size, drop_remainder=True)


dataset = create_dataset(args.batch_size)
steps = dataset.get_dataset_size()
if steps == 0:
    parser.error("4,096 samples are fewer than one step needs; use a smaller --batch-size")
net = nn.SequentialCell(nn.Dense(2, 64), nn.Tanh(), nn.Dense(64, 64), nn.Tanh(), nn.Dense(64, 1))
model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
folder = "ckpt"
at_the_end = CheckpointConfig(save_checkpoint_steps=args.epochs * steps)
save = ModelCheckpoint("surface", folder, at_the_end)
model.train(args.epochs, dataset, callbacks=[LossMonitor(10), save], dataset_sink_mode=False)
