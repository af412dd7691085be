"""--report FILE: what came of a job, as JSON, however it ended; and what --time-limit ended. For tools/launch.py."""

import contextlib
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time

TIMED_OUT = 124  # the exit code of a job that --time-limit ended, as of the command timeout
BY_SIGNAL = {128 + number: name for name, number in (("SIGHUP", 1), ("SIGINT", 2), ("SIGQUIT", 3), ("SIGTERM", 15))}


def prepare(args):
    """Before the start: ValueError if the file cannot be written; from now on a signal is noted in it, too."""
    args.began, args.started = time.time(), time.monotonic()  # somebody may set the clock
    if not args.report:
        return
    try:
        if os.path.realpath(args.report) == os.path.realpath(args.inside or args.logs):
            raise OSError(0, "there will be the logs")
        trial = partly(place_of(args.report))
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT, 0o666))
        os.unlink(trial)
        with contextlib.suppress(OSError):  # of an earlier job: this one may be killed before it writes its own
            os.unlink(place_of(args.report))
    except OSError as error:
        name, args.report = args.report, None
        raise ValueError(f"--report {name} cannot be written: {error.strerror}; name a file in a folder where you may "
                         "write") from None

    def end(number, _):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)


def place_of(name):
    """Where links lead; OSError for what must not be replaced by a file: folders, /dev/stdout, what is no report."""
    path = os.path.realpath(name)
    if (os.path.lexists(path) and not os.path.isfile(path)) or re.match("/dev/(?!shm/)|/proc/", name):
        raise OSError(0, "it is no ordinary file")
    if os.path.isfile(path) and os.path.getsize(path):
        with open(path, "rb") as file:
            if not re.match(rb'\{\s*"exit_code": ', file.read(99)):
                raise OSError(0, "it is there, and holds other things than a report")
    return path


def partly(path):
    """Where a file is written until it is whole, in the same folder."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")


def finish(args, code, say):
    """Say that the time was up, if it was, and write the file; returns the exit code."""
    args.timed_out &= code != 0  # a job that ended well just then has ended well
    if args.timed_out:
        say(f"{args.name}: ended after {time.monotonic() - args.started:.0f} s, the --time-limit; exit code "
            f"{TIMED_OUT}", sys.stderr)
        code = TIMED_OUT
    if args.report:
        draft = partly(os.path.realpath(args.report))
        try:
            path = place_of(args.report)
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(content(args, code), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            with contextlib.suppress(OSError):  # it was not made
                os.unlink(draft)
            say(f"{args.name}: the report {args.report} could not be written: {error.strerror}", sys.stderr)
    return code


def number_of(text):
    """A loss as a number; as the text that the rank printed where JSON has none for it (nan, inf)."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def knows_no_loss(rank):
    """Is it of a pipeline stage before the last, where the loss is 0?"""
    return rank["first_loss"] == rank["last_loss"] == 0


def content(args, code):
    """The report: a dictionary. Lists and numbers that are not known are empty and null."""
    job, folder = args.jobs[-1] if args.jobs else None, os.readlink("/proc/self/cwd")  # also if it has been deleted
    ranks = [{
        "rank": number,
        "host": rank["host"],
        "exit_code": rank["code"],
        "lines": rank["count"],
        "first_loss": number_of(rank["losses"][0]) if rank["losses"] else None,
        "last_loss": number_of(rank["losses"][-1]) if rank["losses"] else None,
        "log": os.path.normpath(os.path.join(folder, job.log_of(number))),
    } for number, rank in sorted(job.ranks.items())] if job else []
    ended_by = "time limit" if args.timed_out else BY_SIGNAL.get(code) if job is None or job.stopped else None
    return {
        "exit_code": code,
        "ended_by": ended_by,
        "first_failure": next(iter(args.failures), None),
        "failures": args.failures,  # of each start
        "seconds": round(time.monotonic() - args.started, 2),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(args.began)),
        "restarts": max(0, len(args.jobs) - 1),
        "last_loss": next((rank["last_loss"] for rank in sorted(ranks, key=knows_no_loss)
                           if rank["last_loss"] is not None), None),
        "world_size": args.n,
        "ranks": ranks,
        "script": args.script,
        "options": args.options,
        "launcher": args.launcher,
        "target": getattr(args, "target", None),
        "host": socket.gethostname(),
        "folder": folder,
        "command": [sys.executable, *sys.argv],
        "versions": versions(args.launcher),
    }


def versions(launcher):
    """What ran the job: Python, MindSpore and, if it was used, Open MPI."""
    import importlib.metadata  # takes as long as all other imports of a launcher's start
    found = {"python": platform.python_version()}
    try:
        found["mindspore"] = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        found["mindspore"] = None
    if launcher == "mpirun":
        try:
            said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
        except OSError:
            said = ""
        found["mpirun"] = (re.search(r"\d+\.\d+\.\d+", said) or [None])[0]
    return found
