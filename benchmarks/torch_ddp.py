"""The lessons' work in PyTorch DDP over gloo, as its own tutorials write it: the side that speed.py compares with.

    torchrun --nproc_per_node 2 benchmarks/torch_ddp.py mnist  --data DIR --epochs 3
    torchrun --nproc_per_node 2 benchmarks/torch_ddp.py resnet --data DIR --steps 12
    torchrun --nproc_per_node 2 benchmarks/torch_ddp.py allreduce

Same data, batch, network, precision (float32) and optimizer as the lessons. --weights FILE.npz: their initial
weights, so that the first loss must be theirs up to the order of the images.
"""

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Mnist(Dataset):
    """Training images, normalised as in the lesson: float32 (1, 28, 28), and labels."""

    def __init__(self, folder):
        images = np.fromfile(f"{folder}/train-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 1, 28, 28)
        labels = np.fromfile(f"{folder}/train-labels-idx1-ubyte", np.uint8)[8:]
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return (self.images[index].float() / 255 - 0.1307) / 0.3081, self.labels[index]


class Cifar10(Dataset):
    """Training images with the lesson's crop, flip and normalisation: float32 (3, 32, 32), and labels."""

    def __init__(self, folder):
        records = np.fromfile(f"{folder}/data_batch_1.bin", np.uint8).reshape(-1, 3073)
        self.labels = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32))
        self.mean = torch.tensor((0.4914, 0.4822, 0.4465)).view(3, 1, 1)
        self.std = torch.tensor((0.2023, 0.1994, 0.2010)).view(3, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        x, y = torch.randint(0, 9, (2,)).tolist()
        image = nn.functional.pad(self.images[index], (4, 4, 4, 4))[:, y:y + 32, x:x + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.std, self.labels[index]


def mlp():
    """The MNIST lesson's network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                         nn.Linear(512, 10))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a short cut, as in resnet50_ascend/resnet.py."""

    def __init__(self, in_channels, channels, stride):
        super().__init__()
        out = 4 * channels
        self.conv1, self.bn1 = nn.Conv2d(in_channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Identity()
        if stride != 1 or in_channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(in_channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        return torch.relu(self.bn3(self.conv3(out)) + self.downsample(x))


def resnet50():
    """ResNet-50 for 10 classes."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for blocks, channels, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels_in, channels, stride if block == 0 else 1))
            channels_in = 4 * channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 10))


def load_weights(network, file):
    """Copy weights from arrays in the order and shapes of the network's parameters."""
    with np.load(file) as arrays, torch.no_grad():
        values = [arrays[name] for name in arrays.files]
        parameters = list(network.parameters())
        assert [tuple(p.shape) for p in parameters] == [value.shape for value in values], "not this network's weights"
        for parameter, value in zip(parameters, values):
            parameter.copy_(torch.from_numpy(value))


def train(args, rank, rank_size):
    """Train and print losses as the lessons do."""
    mnist = args.work == "mnist"
    network, data = (mlp(), Mnist(args.data)) if mnist else (resnet50(), Cifar10(args.data))
    if args.weights:
        load_weights(network, args.weights)
    if rank_size > 1:
        network = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0 if mnist else 0.9)
    sampler = DistributedSampler(data, rank_size, rank, seed=1)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    loss_fn = nn.CrossEntropyLoss()
    every = 10 if mnist else 1
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (image, label) in enumerate(loader):
            if step == args.steps:
                break
            optimizer.zero_grad()
            loss = loss_fn(network(image), label)
            loss.backward()
            optimizer.step()
            if step % every == 0 and rank == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {loss.item()}", flush=True)


def all_reduce(rank):
    """Seconds of an all-reduce for each size; the median over 3 to 200 calls."""
    for count in (1 << 10, 1 << 13, 1 << 16, 1 << 19, 670_000, 1 << 22, 25 << 20):
        value, times = torch.ones(count), []
        for _ in range(max(3, min(200, (1 << 25) // count))):
            begin = time.perf_counter()
            dist.all_reduce(value)
            times.append(time.perf_counter() - begin)
            value.fill_(1)
        if rank == 0:
            print(f"allreduce {4 * count} bytes: {sorted(times)[len(times) // 2]:.6f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=("mnist", "resnet", "allreduce"))
    parser.add_argument("--data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--weights")
    args = parser.parse_args()
    torch.manual_seed(1)
    rank, rank_size = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    if rank_size > 1:
        dist.init_process_group("gloo")
    if args.work == "allreduce":
        all_reduce(rank)
    else:
        train(args, rank, rank_size)
    if rank_size > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's clean-up aborts now and then


if __name__ == "__main__":
    main()
