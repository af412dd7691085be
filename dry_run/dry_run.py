"""Compile every rank's Ascend graph of a training script, on any machine: no NPU, no CANN.

    python dry_run/dry_run.py --rank-size 8 train.py --epochs 1        all 8 ranks
    python dry_run/dry_run.py --rank-size 16 --ranks 0,8-15 train.py   some of them
    python dry_run/dry_run.py --rank-size 8 --data cifar10 train.py    DATA_PATH is a tiny stand-in data set

The script is run as it is, with everything behind its name as its arguments, once a rank, until one step has
been compiled. Prints progress on stderr and the report on stdout; see README.md beside this file.
Exit codes: 0 all ranks compiled and agree; 1 a rank failed or ranks disagree; 2 bad arguments or no compiler.
"""
import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import draw
import report
import stand_ins

HERE = Path(__file__).resolve().parent
LAUNCHERS = ("OMPI_", "PMIX_", "MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_", "RANK_TABLE_FILE")
MEMORY_A_RANK = 2 << 30  # what a rank is allowed for when jobs are counted; small networks take 0.6 GiB


def numbers(text):
    """'0,8-10' -> [0, 8, 9, 10]."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(set(found))


def arguments():
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --rank-size N [options] SCRIPT [args ...]", description=__doc__.partition("\n")[0])
    parser.add_argument("--rank-size", type=int, required=True, metavar="N", help="ranks of the whole job")
    parser.add_argument("--ranks", metavar="LIST", help="which to compile, as 0,8-15; default: all")
    parser.add_argument("--jobs", type=int, metavar="N", help="ranks at a time; default: by cores and memory")
    parser.add_argument("--timeout", type=float, default=900, metavar="S",
                        help="seconds a rank may take; default: %(default)s")
    parser.add_argument("--runs", type=int, default=1, metavar="N",
                        help="end a rank when a graph would run more often than this; default: %(default)s; "
                        "more for scripts that run one graph several times a step")
    parser.add_argument("--data", choices=("cifar10", "mnist"),
                        help="export DATA_PATH: a folder with a tiny stand-in data set")
    parser.add_argument("--json", metavar="FILE", help="write the whole report there as JSON")
    parser.add_argument("--draw", metavar="FILE.svg", help="draw the plan there: slices, stages and collectives")
    parser.add_argument("--keep", metavar="DIR", help="keep each rank's output and graphs there")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if options.rank_size < 1:
        parser.error(f"--rank-size {options.rank_size}: a job has at least 1 rank")
    try:
        options.ranks = numbers(options.ranks) if options.ranks else list(range(options.rank_size))
    except ValueError:
        parser.error(f"--ranks {options.ranks}: write ranks as 0,8-15")
    if not options.ranks or options.ranks[0] < 0 or options.ranks[-1] >= options.rank_size:
        parser.error(f"--ranks: a job of {options.rank_size} has the ranks 0 to {options.rank_size - 1}")
    for name in ("jobs", "timeout", "runs"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: must be above 0")
    if not Path(options.script).is_file():
        parser.error(f"{options.script}: no such script")
    for name, file in (("json", options.json), ("draw", options.draw)):
        if file and not Path(file).resolve().parent.is_dir():
            parser.error(f"--{name} {file}: its folder does not exist")
        if file and Path(file).is_dir():
            parser.error(f"--{name} {file}: it is a folder, a file is wanted")
    if options.draw and not options.draw.endswith(".svg"):
        parser.error(f"--draw {options.draw}: an SVG is drawn, so its name must end with .svg")
    keep = Path(options.keep) if options.keep and os.path.exists(options.keep) else None
    if keep and (not keep.is_dir() or any(keep.iterdir())):
        parser.error(f"--keep {options.keep}: must be new or empty")
    if not importlib.util.find_spec("mindspore"):
        parser.error(f"{sys.executable} has no mindspore; pip install mindspore")
    return options


def stand_in_data(kind, folder):
    """Write the smallest data set that MindSpore accepts: black pictures, all of class 0."""
    folder.mkdir()
    if kind == "cifar10":  # a file holds 10,000 records of 1 + 3,072 bytes, or it is refused
        for name in ("data_batch_1.bin", "test_batch.bin"):
            with open(folder / name, "wb") as file:
                file.truncate(10_000 * 3073)
    else:
        for name, count in (("train", 8192), ("t10k", 1024)):
            for part, header, record in (("images-idx3", (2051, count, 28, 28), 784),
                                         ("labels-idx1", (2049, count), 1)):
                with open(folder / f"{name}-{part}-ubyte", "wb") as file:
                    file.write(struct.pack(f">{len(header)}i", *header))
                    file.truncate(4 * len(header) + count * record)


def jobs_at_a_time(wanted, ranks):
    """How many ranks to run side by side."""
    if wanted:
        return wanted
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    return max(1, min(len(os.sched_getaffinity(0)), free // MEMORY_A_RANK, ranks))


def kill_session(process):
    """End a rank with all that it started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Ranks:
    """The processes of a dry run."""

    def __init__(self, options, folder, environment):
        self.options, self.folder, self.environment = options, folder, environment
        self.lock = threading.Lock()
        self.running, self.stopped = set(), False

    def stop(self):
        """End all processes; no further ones start."""
        with self.lock:
            self.stopped = True
            for process in self.running:
                kill_session(process)

    def run(self, rank):
        """Compile one rank; returns what the report says of it."""
        folder = self.folder / f"rank_{rank}"
        facts_file, log_file, graphs = folder / "facts.json", folder / "log.txt", folder / "graphs"
        command = [sys.executable, str(HERE / "one_rank.py"), str(facts_file), str(graphs),
                   str(self.options.runs), self.options.script, *self.options.args]
        environment = {**self.environment, "RANK_ID": str(rank), "DEVICE_ID": str(rank % 8),
                       "MS_DEV_SAVE_GRAPHS_PATH": str(graphs)}
        begin = time.monotonic()
        with self.lock:
            if self.stopped:  # the folder may be on its way out
                return None
            graphs.mkdir(parents=True)
            with open(log_file, "wb") as log:
                # a session of its own, so that workers of the data set can be ended with it
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                           stderr=subprocess.STDOUT, start_new_session=True)
            self.running.add(process)
        status, usage = self.wait(process, begin + self.options.timeout)
        with self.lock:
            self.running.discard(process)
        seconds = time.monotonic() - begin
        facts = json.loads(facts_file.read_text()) if facts_file.exists() else None
        log = log_file.read_text(errors="replace").strip()
        about = report.rank_facts(rank, self.options.rank_size, facts, log)
        if facts is None:
            if status is None:
                how = f"not done after {self.options.timeout:g} s (--timeout)"
            elif os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                how = (f"ended by {name} (in PyNative mode operators run one by one, which needs CANN: use "
                       "GRAPH_MODE or jit)")
            else:
                how = f"ended with exit code {os.WEXITSTATUS(status)}, without Python's doing"
            about["error"]["message"] = f"{how}; its last line: {log[log.rfind(chr(10)) + 1:]}"
        return {**about, "seconds": round(seconds, 2), "peak_bytes": usage.ru_maxrss << 10}

    @staticmethod
    def wait(process, deadline):
        """Wait for a process, then end what is left of its session.

        Returns:
            (status as of os.wait4, or None when it was ended for its time; its resource usage).
        """
        in_time = True
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if in_time and time.monotonic() > deadline:
                in_time = False
                kill_session(process)
            time.sleep(0.05)
        process.returncode = status  # it has been waited for, Popen must not
        kill_session(process)
        return (status if in_time else None), usage


def environment_of(options, root):
    """The variables that all ranks share: MindSpore's simulation, and the stand-ins when there is no CANN."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # level 0 compiles; higher levels ask CANN for its operators
    environment.update(MS_SIMULATION_LEVEL="0", RANK_SIZE=str(options.rank_size), MS_DEV_SAVE_GRAPHS="1",
                       MS_DEV_DUMP_IR_PASSES="validate", PYTHONUNBUFFERED="1")
    environment.pop("GLOG_v", None)
    if root:
        for name, value in (("LD_LIBRARY_PATH", root / "latest" / "lib64"), ("PYTHONPATH", root / "python")):
            environment[name] = os.pathsep.join(filter(None, [str(value), os.environ.get(name)]))
        environment["ASCEND_OPP_PATH"] = str(root / "opp")
    return environment


def say(line):
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def compile_ranks(options, folder, environment):
    """Compile the ranks a few at a time; returns what the report says of each."""
    jobs = jobs_at_a_time(options.jobs, len(options.ranks))
    say(f"compiling {report.spell(options.ranks)} of {options.rank_size}, {jobs} at a time")
    ranks, done = Ranks(options, folder, environment), []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(ranks.run, rank) for rank in options.ranks]):
                about = future.result()
                done.append(about)
                say(f"rank {about['rank']} {'compiled' if about['compiled'] else 'FAILED'} after "
                    f"{about['seconds']:.1f} s ({len(done)} of {len(options.ranks)})")
        finally:
            ranks.stop()
    return sorted(done, key=lambda about: about["rank"])


def end(number, _):
    """Has Python clean up, once: a second Ctrl-C or signal would break that off."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    say(f"dry_run: ended by {signal.Signals(number).name}")
    sys.exit(128 + number)


def main():
    """Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    options = arguments()
    try:
        return dry_run(options)
    except OSError as error:
        say(f"dry_run: {error}; --keep, --json, --draw and TMPDIR must name places with room where you may write")
    except stand_ins.StandInError as error:
        say(str(error))
    return 2


def find_stand_ins(package, version):
    """The folder of the stand-ins; built if there are none yet."""
    begin = time.monotonic()
    try:
        root, built = stand_ins.build(package, version)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise stand_ins.StandInError(f"dry_run: stand-ins for CANN cannot be kept: {error}; set DRY_RUN_CACHE to a "
                                     "folder where you may write") from None
    say(f"stand-ins for CANN: {root}" + (f", built in {time.monotonic() - begin:.1f} s" if built else ""))
    return root


def dry_run(options):
    """Returns the exit code."""
    version = importlib.metadata.version("mindspore")
    cann = stand_ins.real_cann()
    root = None if cann else find_stand_ins(Path(importlib.util.find_spec("mindspore").origin).parent, version)
    with tempfile.TemporaryDirectory(prefix="dry_run_") as folder:
        environment = environment_of(options, root)
        if options.data:
            stand_in_data(options.data, Path(folder) / options.data)
            environment["DATA_PATH"] = str(Path(folder) / options.data)
        ranks = compile_ranks(options, Path(options.keep or folder).resolve(), environment)
    whole = {"script": options.script, "args": options.args, "mindspore": version,
             "cann": f"the installed CANN ({cann})" if cann else "stand-ins for CANN",
             "rank_size": options.rank_size, "ranks": ranks, "faults": report.faults(ranks)}
    print(report.text(whole), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    picture = options.draw and draw.draw(whole)
    if picture:
        Path(options.draw).write_text(picture, encoding="utf-8")
    elif options.draw:
        say(f"--draw {options.draw}: no rank compiled, so nothing is drawn")
    return int(bool(whole["faults"]) or not all(about["compiled"] for about in ranks))


if __name__ == "__main__":
    sys.exit(main())
