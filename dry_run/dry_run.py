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
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = {os.path.dirname(os.path.abspath(__file__))} - {*sys.path}  # PYTHONSAFEPATH leaves it out
os.environ.pop("PYTHONSAFEPATH", None)  # the ranks need their neighbours, too
import draw  # noqa: E402
import fork_ranks  # noqa: E402
import report  # noqa: E402
import stand_ins  # noqa: E402

HERE = Path(__file__).resolve().parent
LAUNCHERS = ("OMPI_", "PMIX_", "MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_", "RANK_TABLE_FILE")
QUIET = 20   # s without a line, where a line cannot move
ROOM = 1 << 20  # bytes that the smallest network's graphs and log take
CLEAR = "\r\033[K"
MEMORY_A_RANK = 2 << 30  # what a rank is allowed for when jobs are counted; small networks take 0.6 GiB


def numbers(text):
    """'0,8-10' -> [0, 8, 9, 10]."""
    found = []
    for part in text.split(","):
        first, last = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part).groups()
        found += range(int(first), int(last or first) + 1)
    return sorted(set(found))


def whole(text):
    """A number of ranks or the like: '8' -> 8."""
    if not re.fullmatch("[0-9]{1,5}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number below 100000")
    return int(text)


def arguments():
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --rank-size N [options] SCRIPT [args ...]", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank-size", type=whole, required=True, metavar="N", help="ranks of the whole job")
    parser.add_argument("--ranks", metavar="LIST", help="which to compile, as 0,8-15; default: all")
    parser.add_argument("--jobs", type=whole, metavar="N", help="ranks at a time; default: by cores and memory")
    parser.add_argument("--timeout", type=float, default=900, metavar="S",
                        help="seconds a rank may take; default: %(default)s")
    parser.add_argument("--runs", type=whole, default=1, metavar="N",
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
    for wrong, sentence in (
            (options.rank_size < 1, f"--rank-size {options.rank_size}: a job has at least 1 rank"),
            (not os.path.exists(os.readlink("/proc/self/cwd")), "this folder has been removed; change to another one"),
            (not Path(options.script).is_file(), f"{options.script}: no such script"),
            *((getattr(options, name) == "", f"--{name} is empty; name a file or folder, or leave it out (is a "
               "variable not set?)") for name in ("json", "draw", "keep"))):
        if wrong:
            parser.error(sentence)
    try:
        options.ranks = numbers(options.ranks) if options.ranks is not None else list(range(options.rank_size))
    except AttributeError:  # no match
        parser.error(f"--ranks '{options.ranks}': write ranks as 0,8-15")
    if not options.ranks or options.ranks[0] < 0 or options.ranks[-1] >= options.rank_size:
        parser.error(f"--ranks: a job of {options.rank_size} has the ranks 0 to {options.rank_size - 1}")
    for name in ("jobs", "timeout", "runs"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:  # nor nan
            parser.error(f"--{name} {getattr(options, name)}: must be above 0")
    for name, file in (("json", options.json), ("draw", options.draw)):
        if file and (fault := fault_of(name, Path(file))):
            parser.error(f"--{name} {file}: {fault}")
    if options.draw and not options.draw.endswith(".svg"):
        parser.error(f"--draw {options.draw}: an SVG is drawn, so its name must end with .svg")
    keep = Path(options.keep) if options.keep and os.path.exists(options.keep) else None
    if keep and (not keep.is_dir() or any(keep.iterdir())):
        parser.error(f"--keep {options.keep}: must be new or empty")
    if not importlib.util.find_spec("mindspore"):
        parser.error(f"{sys.executable} has no mindspore; pip install mindspore")
    return options


def fault_of(name, path):
    """Why no report (json) or drawing (draw) may be written there; "" if it may."""
    if not path.resolve().parent.is_dir():
        return "its folder does not exist"
    if path.is_dir():
        return "it is a folder, a file is wanted"
    if not path.is_file() or path.is_relative_to("/dev"):
        return ""
    try:
        with path.open("rb") as file:
            head = file.read(99)
    except OSError as error:
        return f"it is there, and cannot be read ({error.strerror}); name a new one"
    own = not head or re.match({"json": rb'\s*\{\s*"script"', "draw": rb"\s*<"}[name], head)
    return "" if own else "it is there, and holds something else; name a new one"


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


class Ranks:
    """The processes of a dry run: fork_ranks.py, and what it forks."""

    def __init__(self, job, environment, log):
        self.job, self.log, self.ready = job, log, False
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "fork_ranks.py")], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, start_new_session=True,
                preexec_fn=lambda: fork_ranks.prctl(fork_ranks.PR_SET_PDEATHSIG, signal.SIGKILL))  # noqa: PLW1509
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End all processes."""
        if not self.ready:  # then it has forked none, and does not listen yet
            self.process.kill()
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()

    def messages(self, pause):
        """What fork_ranks.py tells, as dicts, until its end; None whenever nothing came for a pause."""
        data, channel = b"", self.process.stdout.fileno()
        while True:
            if not select.select([channel], [], [], pause)[0]:
                yield None
                continue
            more = os.read(channel, 1 << 16)
            *lines, data = (data + more).split(b"\n")
            for message in map(json.loads, lines):
                self.ready = True
                if "rank" in message:
                    yield message
            if not more:
                return

    def facts(self, told):
        """What the report says of a rank that has ended.

        Args:
            told: the dict that fork_ranks.py told of it.
        """
        rank, status = told["rank"], told["status"]
        folder = Path(self.job["folder"]) / f"rank_{rank}"
        file, log = folder / "facts.json", folder / "log.txt"
        facts = json.loads(file.read_text()) if file.exists() else None
        log = (log if log.exists() else self.log).read_text(errors="replace").strip()
        about = report.rank_facts(rank, self.job["rank_size"], facts, log)
        if facts is None:
            if status is None:
                how = f"not done after {self.job['timeout']:g} s (--timeout)"
            elif os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                how = f"ended by {signal.Signals(number).name} (" + (
                    "by Linux, if memory ran out: fewer at a time with --jobs)" if number == signal.SIGKILL else
                    "in PyNative mode operators run one by one, which needs CANN: use GRAPH_MODE or jit; in a graph "
                    "it is MindSpore's compiler that failed)")
            else:
                how = f"ended with exit code {os.WEXITSTATUS(status)}, without Python's doing"
            if shutil.disk_usage(folder.parent).free < ROOM:
                how += f"; the disk of {folder.parent} is full, another one goes with --keep DIR or TMPDIR"
            said = report.last_words(log)
            about["error"]["message"] = how + (f"; its last line: {said}" if said else "")
        return {**about, "seconds": told["seconds"], "peak_bytes": told["peak_bytes"]}


class Progress:
    """Tells on stderr how far a dry run is: a line a rank, and in between one that moves, on a terminal."""

    def __init__(self, ranks, rank_size, jobs):
        self.count, self.jobs, self.seconds = len(ranks), jobs, []
        self.begin = self.said = time.monotonic()
        self.moving = sys.stderr is not None and sys.stderr.isatty()
        self.pause = 1 if self.moving else QUIET  # s
        say(f"compiling {report.spell(ranks)} of {rank_size}, {jobs} at a time; a rank of a small network takes 1 to "
            "3 s, of ResNet-50 10 to 20 s")

    def left(self):
        """About how long the rest takes, in words; "" where that is not known."""
        if not self.seconds:
            return ""
        rounds, elapsed = -(-self.count // self.jobs), time.monotonic() - self.begin
        left = rounds * sum(self.seconds) / len(self.seconds) - elapsed
        return f", about {left:.0f} s left" if left >= 1 and len(self.seconds) < self.count else ""

    def tell(self, about):
        """A rank has ended; `about` is what the report says of it."""
        self.seconds.append(about["seconds"])
        say(f"{CLEAR * self.moving}rank {about['rank']} {'compiled' if about['compiled'] else 'FAILED'} after "
            f"{about['seconds']:.1f} s ({len(self.seconds)} of {self.count}{self.left()})")

    def wait(self):
        """Nothing has happened for a while."""
        text = (f"{time.monotonic() - self.begin:.0f} s, {len(self.seconds)} of {self.count} ranks done"
                f"{self.left()} ...")
        say(f"{CLEAR}{text}", end="") if self.moving else say(text)

    def end(self):
        """No rank is left."""
        if self.moving:
            say(CLEAR, end="")


def environment_of(options, root):
    """The variables that all ranks share: MindSpore's simulation, and the stand-ins when there is no CANN."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # level 0 compiles; higher levels ask CANN for its operators
    environment.update(MS_SIMULATION_LEVEL="0", RANK_SIZE=str(options.rank_size), MS_DEV_SAVE_GRAPHS="1",
                       MS_DEV_DUMP_IR_PASSES="validate,step_parallel", PYTHONUNBUFFERED="1")
    for name in ("GLOG_v", "DEVICE_TARGET"):  # the device is Ascend, whatever this machine has
        environment.pop(name, None)
    if root:
        for name, value in (("LD_LIBRARY_PATH", root / "latest" / "lib64"), ("PYTHONPATH", root / "python")):
            environment[name] = os.pathsep.join(filter(None, [str(value), os.environ.get(name)]))
        environment["ASCEND_OPP_PATH"] = str(root / "opp")
    return environment


def say(line, end="\n"):
    """Progress; when nobody reads any more, the work goes on in silence."""
    with contextlib.suppress(OSError):
        print(line, end=end, file=sys.stderr, flush=True)


def compile_ranks(options, folder, environment, front_end):
    """Compile the ranks a few at a time; returns what the report says of each."""
    jobs = jobs_at_a_time(options.jobs, len(options.ranks))
    folder.mkdir(parents=True, exist_ok=True)
    job = {"ranks": options.ranks, "rank_size": options.rank_size, "jobs": jobs, "timeout": options.timeout,
           "folder": str(folder), "runs": options.runs, "script": options.script, "args": options.args,
           "front_end": front_end}
    done = []
    with Ranks(job, environment, folder / "start.txt") as ranks:
        progress = Progress(options.ranks, options.rank_size, jobs)
        for told in ranks.messages(progress.pause):
            if told:
                done.append(ranks.facts(told))
                progress.tell(done[-1])
            else:
                progress.wait()
        progress.end()
        lost = set(options.ranks) - {about["rank"] for about in done}
        code = ranks.process.wait()  # as of Popen; facts() wants it as of os.wait4
        done += [ranks.facts({"rank": rank, "status": -code if code < 0 else code << 8, "seconds": 0, "peak_bytes": 0})
                 for rank in lost]
    return sorted(done, key=lambda about: about["rank"])


def end(number, _):
    """Has Python clean up, once: a second Ctrl-C or signal would break that off."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    say(f"dry_run: ended by {signal.Signals(number).name}")
    if number == signal.SIGINT:  # Python then dies of it: Ctrl-C ends a shell's loop around this, too
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
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
        with contextlib.suppress(OSError):  # Python, at its end, writes what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # nobody reads the report any more
            return 141
        say(f"dry_run: {error}; --keep, --json, --draw and TMPDIR must name places with room where you may write")
    except stand_ins.StandInError as error:
        say(str(error))
    return 2


def find_stand_ins(package, version):
    """The folder of the stand-ins; built if there are none yet."""
    begin = time.monotonic()
    root, built = stand_ins.build(package, version)
    say(f"stand-ins for CANN: {root}" + (f", built in {time.monotonic() - begin:.1f} s" if built else ""))
    return root


def dry_run(options):
    """Returns the exit code."""
    version = importlib.metadata.version("mindspore")
    cann = stand_ins.real_cann()
    root = None if cann else find_stand_ins(Path(importlib.util.find_spec("mindspore").origin).parent, version)
    with tempfile.TemporaryDirectory(prefix="dry_run_") as folder:
        environment = {**environment_of(options, root), "TMPDIR": folder}  # what data sets' workers leave goes with it
        if options.data:
            stand_in_data(options.data, Path(folder) / options.data)
            environment["DATA_PATH"] = str(Path(folder) / options.data)
        # with CANN the rest of the compiler runs, too
        ranks = compile_ranks(options, Path(options.keep or folder).resolve(), environment, front_end=not cann)
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
