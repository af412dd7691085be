"""train_alone.py for several processes: ten lines more, each marked.

    mpirun -n 2 python train_distributed.py        or, checked and watched over: bash run.sh 2
    msrun --worker_num=2 --local_worker_num=2 --join=True train_distributed.py
Every rank prints its loss every 10 steps, and saves ckpt/rank_<rank>/surface-<epoch>_<step>.ckpt at the end:
    rank 1 of 2 on CPU
    epoch: 1 step: 10, loss is 0.1674
"""

import argparse

import mindspore as ms
import mindspore.dataset as ds
import mpirun_on_cpu  # distributed: 1. lets mpirun start ranks on CPU, too
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init  # distributed: 2. who am I, how many are we
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint

parser = argparse.ArgumentParser(description="Train a small network.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="samples a step")
args = parser.parse_args()
if min(args.epochs, args.batch_size) < 1:
    parser.error("--epochs and --batch-size must be at least 1")

ms.set_context(mode=ms.GRAPH_MODE)
mpirun_on_cpu.join_ranks()  # distributed: 3. needed by mpirun on CPU only
init()  # distributed: 4. connect to the other ranks (HCCL on Ascend, NCCL on GPU, MCCL on CPU)
rank, rank_size = get_rank(), get_group_size()  # distributed: 5. which rank this is, and of how many
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)  # distributed: 6. average gradients
print(f"rank {rank} of {rank_size} on {ms.get_context('device_target')}", flush=True)
ms.set_seed(1)


def create_dataset(batch_size):
    """Points and the height of the surface there: float32 (batch_size, 2) and (batch_size, 1), 4,096 of them."""
    points = np.random.RandomState(1).uniform(-1, 1, (4096, 2)).astype(np.float32)
    heights = np.sin(3 * points[:, :1]) * points[:, 1:]
    dataset = ds.NumpySlicesDataset((points, heights), ["point", "height"], shuffle=False,
                                    num_shards=rank_size, shard_id=rank)  # distributed: 7. this rank's share
    return dataset.batch(batch_size, drop_remainder=True)


batch_size = args.batch_size // rank_size  # distributed: 8. all ranks together take a batch
dataset = create_dataset(batch_size)
steps = dataset.get_dataset_size()
if steps == 0:
    parser.error("4,096 samples are fewer than one step needs; use a smaller --batch-size")
net = nn.SequentialCell(nn.Dense(2, 64), nn.Tanh(), nn.Dense(64, 64), nn.Tanh(), nn.Dense(64, 1))
model = Model(net, loss_fn=nn.MSELoss(), optimizer=nn.Momentum(net.trainable_params(), 0.1, 0.9))
folder = f"ckpt/rank_{rank}"  # distributed: 9. a folder a rank, no two ranks write one file
save = ModelCheckpoint("surface", folder, CheckpointConfig(save_checkpoint_steps=args.epochs * steps))
model.train(args.epochs, dataset, callbacks=[LossMonitor(10), save], dataset_sink_mode=False)
mpirun_on_cpu.leave_ranks()  # distributed: 10. all ranks end together (mpirun on CPU only)
