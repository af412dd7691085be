"""train_alone.py for several processes: ten lines are added or changed, each marked.

    mpirun -n 2 python train_distributed.py          checked before and watched: bash run.sh 2
    msrun --master_port=28118 --worker_num=2 --local_worker_num=2 --join=True train_distributed.py
Each rank prints a loss every 10 steps, and saves ckpt/rank_<rank>/surface-<epoch>_<step>.ckpt:
    rank 1 of 2 on CPU
    epoch: 1 step: 10, loss is 0.1674
"""

import argparse

import ranks  # distributed: 1. the file beside this one; for ranks on CPU
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init  # distributed: 2. who am I?
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint

parser = argparse.ArgumentParser(description="Train a small network.", usage=argparse.SUPPRESS)
parser.add_argument("--epochs", type=int, default=5)
# distributed: 3. two ranks share the 64 samples of a step
parser.add_argument("--batch-size", type=int, default=32, help="samples a step, on each rank")
args = parser.parse_args()
if min(args.epochs, args.batch_size) < 1:
    parser.error("--epochs and --batch-size must be at least 1")

ms.set_context(mode=ms.GRAPH_MODE)
# distributed: 4. prepares a rank on CPU
if not ranks.join():
    parser.error("one process alone; start two: mpirun -n 2 python train_distributed.py")
init()  # distributed: 5. connects to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
rank, rank_size = get_rank(), get_group_size()  # distributed: 6. which rank, of how many
# distributed: 7. all ranks hold all weights, and average their gradients
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}", flush=True)

ms.set_seed(1)


def create_dataset(batch_size):
    """4,096 points and their heights on the surface: float32 (batch_size, 2), (batch_size, 1)."""
    points = np.random.RandomState(1).uniform(-1, 1, (4096, 2)).astype(np.float32)
    heights = np.sin(3 * points[:, :1]) * points[:, 1:]
    dataset = ds.NumpySlicesDataset(
        (points, heights), ["point", "height"], shuffle=False,
        num_shards=rank_size, shard_id=rank,  # distributed: 8. this rank's share of the samples
    )
    return dataset.batch(batch_size, drop_remainder=True)


dataset = create_dataset(args.batch_size)
steps = dataset.get_dataset_size()
if steps == 0:
    parser.error("4,096 samples are fewer than one step needs; use a smaller --batch-size")
net = nn.SequentialCell(nn.Dense(2, 64), nn.Tanh(), nn.Dense(64, 64), nn.Tanh(), nn.Dense(64, 1))
model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
folder = f"ckpt/rank_{rank}"  # distributed: 9. a folder a rank, no two ranks write one file
at_the_end = CheckpointConfig(save_checkpoint_steps=args.epochs * steps)
save = ModelCheckpoint("surface", folder, at_the_end)
model.train(args.epochs, dataset, callbacks=[LossMonitor(10), save], dataset_sink_mode=False)
ranks.leave()  # distributed: 10. all ranks end together (for CPU)
