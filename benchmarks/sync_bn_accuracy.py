"""Accuracy with 1, 2 and 4 ranks at the same global batch, with plain and with synchronised batch norm.

    python tools/make_datasets.py mnist data/mnist
    python benchmarks/sync_bn_accuracy.py --data-path data/mnist --output runs/sync_bn

It starts mpirun once for each row of its table, all seeds in one job. A small network with batch norm, down to 1x1
pixels as ResNet-50 is at 32x32, learns real digits; a step takes 8 images, so a rank has 8, 4 or 2 of them. The
output folder holds the logs, the table, and curves.png (by tools/plot_loss.py): losses of seed 0, accuracies of all.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "resnet50_gpu"))
ROWS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def train(args):
    """One rank's part of a job: train once for each seed and print losses and the accuracy."""
    import mindspore as ms
    import mindspore.dataset as ds
    import ranks
    from mindspore import nn, ops
    from mindspore.communication import get_group_size, get_rank, init
    from sync_batch_norm import synchronise_batch_norm

    ms.set_context(mode=ms.GRAPH_MODE)
    ranks.join()
    init()
    rank, rank_size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)

    def images(usage, sampler, batch_size):
        dataset = ds.MnistDataset(str(args.data_path), usage, sampler=sampler)
        dataset = dataset.map([ds.vision.Rescale(1 / 127.5, -1), ds.vision.HWC2CHW()], "image")
        return dataset.map(ds.transforms.TypeCast(ms.int32), "label").batch(batch_size, drop_remainder=usage == "train")

    def block(in_channels, channels, kernel_size, stride):
        return [nn.Conv2d(in_channels, channels, kernel_size, stride, pad_mode="valid"), nn.BatchNorm2d(channels),
                nn.ReLU()]

    for seed in range(args.seeds):
        ms.set_seed(seed)
        ds.config.set_seed(seed)
        net = nn.SequentialCell(*block(1, 16, 4, 2), *block(16, 32, 3, 2), *block(32, 64, 3, 2), *block(64, 64, 2, 1),
                                nn.Flatten(), nn.Dense(64, 10))  # 28, 13, 6, 2, 1 pixels
        if args.sync_bn:
            synchronise_batch_norm(net, rank_size)
        optimizer = nn.Momentum(net.trainable_params(), args.lr, 0.9)
        loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        step = nn.TrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer)
        step.set_train()
        dataset = images("train", ds.DistributedSampler(rank_size, rank), args.batch_size // rank_size)
        for number, (image, label) in enumerate(dataset.take(args.steps), 1):
            loss = step(image, label)
            if seed == 0:  # the curves that are drawn
                print(f"epoch: 1 step: {number}, loss is {loss.asnumpy()}", flush=True)
        net.set_train(False)
        for parameter in net.untrainable_params():  # plain batch norm: test with the mean of all ranks' statistics
            ops.assign(parameter, ops.AllReduce()(parameter) / rank_size)
        test = images("test", ds.SequentialSampler(), 500)
        right = [net(image).argmax(axis=1).asnumpy() == label.asnumpy() for image, label in test]
        if rank == 0:
            print(f"accuracy: {sum(part.sum() for part in right) / sum(part.size for part in right):.4f}", flush=True)
    ranks.leave()


def run_row(args, ranks, sync):
    """Start one job; return its accuracies, one a seed."""
    folder = args.output / f"{ranks}_{'sync' if sync else 'plain'}"
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *options, "-n", str(ranks), "--oversubscribe", "--bind-to", "none", "--output-filename",
               f"{folder / 'log_output'}:nocopy", "--merge-stderr-to-stdout", sys.executable, __file__, "--rank",
               "--data-path", args.data_path, "--batch-size", args.batch_size, "--steps", args.steps, "--lr", args.lr,
               "--seeds", args.seeds, *(["--sync-bn"] if sync else [])]
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = folder / "log_output" / "1" / "rank.0" / "stdout"
    found = [float(value) for value in re.findall(r"^accuracy: ([\d.]+)$", log.read_text(), re.MULTILINE)]
    if len(found) != args.seeds:
        sys.exit(f"{log} holds {len(found)} accuracies, not {args.seeds}")
    return found


def main():
    parser = argparse.ArgumentParser(description="Accuracy with 1, 2 and 4 ranks, plain and synchronised.")
    parser.add_argument("--data-path", type=Path, required=True, help="folder of the MNIST files")
    parser.add_argument("--output", type=Path, default=Path("runs/sync_bn"))
    parser.add_argument("--batch-size", type=int, default=8, help="images a step, of all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sync-bn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.data_path / "train-images-idx3-ubyte").is_file():
        parser.error(f"{args.data_path} holds no MNIST files: python tools/make_datasets.py mnist {args.data_path}")
    most = max(ranks for ranks, _ in ROWS)
    if min(args.steps, args.seeds, args.batch_size) < 1 or args.batch_size % most:
        parser.error(f"--steps and --seeds must be at least 1, --batch-size a multiple of {most}, the most ranks")
    if args.rank:
        train(args)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    seeds = " | ".join(f"seed {seed}" for seed in range(args.seeds))
    lines = [f"| ranks | images a rank | batch norm | {seeds} | mean |", "|---" * (args.seeds + 4) + "|"]
    for ranks, sync in ROWS:
        values = run_row(args, ranks, sync)
        cells = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {ranks} | {args.batch_size // ranks} | {'synchronised' if sync else 'plain'} | {cells} | "
                     f"{statistics.mean(values):.3f} |")
        print(lines[-1], flush=True)
    (args.output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    folders = [args.output / f"{ranks}_{'sync' if sync else 'plain'}" for ranks, sync in ROWS]
    labels = ",".join(f"{ranks} {'sync' if sync else 'plain'}" for ranks, sync in ROWS)
    plot = [sys.executable, REPO / "tools" / "plot_loss.py", "--output", args.output / "curves.png", "--smooth", "10",
            "--labels", labels]
    subprocess.run([str(part) for part in [*plot, *folders]], check=True)


if __name__ == "__main__":
    main()
