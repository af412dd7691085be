"""Runs the real commands of the lessons and collects evidence of what they did.

Every process of a job carries the job's own mark in its environment, so that left-over processes are found
whatever process group or session they moved to, and only they are ended.
"""

import dataclasses
import contextlib
import fcntl
import functools
import importlib.util
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's threads, one a core, would spin in each process that imports it
import numpy as np  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
MARK = "LESSON_TEST_JOB"
PATIENCE = 3  # a timeout catches what hangs; on a busy machine what does not may take several times as long
SHALLOW = ("--blocks", 0, 0, 0, 0)  # 5 convolutions and a layer, which compile many times faster than a ResNet-50
TAKEN = []  # the names of the ports that free_port() has given out here
# Before a command: root without the right to read and write all files, as other users are.
AS_USER = () if os.geteuid() != 0 else (PYTHON, "-c", (
    "import ctypes, os, sys\nfor right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH\n"
    "    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP\nos.execvp(sys.argv[1], sys.argv[1:])"))
UNSHARE = ("unshare",) if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user")
# A shell's background job ignores Ctrl-C and hands that on to all it starts; tests that press Ctrl-C undo it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclasses.dataclass
class Result:
    """What a command did: exit code (130 where it died of SIGINT, as a shell has it), output (stdout and stderr
    together), seconds, processes it left behind.
    """

    code: int
    output: str
    seconds: float
    left_over: list

    def ranks(self):
        """Ranks that said hello: {rank: world size}."""
        return {int(rank): int(size) for rank, size in re.findall(r"rank (\d+) of (\d+) on", self.output)}


def free_port():
    """A TCP port of this machine that no other test gets, as the next one: nobody uses them, and nobody will, for
    Linux gives out higher ones, and launchers take 20000 to 29999.
    """
    for port in random.sample(range(10000, 20000, 2), 999):
        name = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # it is taken
            name.bind(f"\0tests {port}")
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
            TAKEN.append(name)
            return port
    raise AssertionError("no port from 10000 to 19999 is free")


def environment_of(pid):
    """The environment a process was started with, a set of b"NAME=VALUE"; empty if it has ended or is not ours."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def command_of(pid):
    """The program that a process runs and its arguments, as bytes; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid):
    """The process id of a process's parent; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:
        return 0


def marked(mark):
    """Process ids whose environment carries a mark, zombies left out."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if f"{MARK}={mark}".encode() in environment_of(pid)]


def clean_environment():
    """The variables that a command starts with: this process's, without those of launchers, pytest and developers."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("MS_", "OMPI_", "PMIX_", "RANK_", "DATA_PATH", "DEVICE_", "PYTEST",
                                        "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"))}
    return {**environment, "PATH": f"{Path(PYTHON).parent}:{environment['PATH']}"}


class Job:
    """A command that runs while the test looks at it; use as a context manager, its processes end with the block."""

    def __init__(self, *command, cwd, env=None):
        self.mark = uuid.uuid4().hex
        self.command = [str(part) for part in command]
        environment = {**clean_environment(), MARK: self.mark, **(env or {})}
        self.log = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed in __exit__
        self.started = time.monotonic()
        self.process = subprocess.Popen(self.command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def output(self):
        return Path(self.log.name).read_text(errors="replace")

    def wait_for(self, pattern, timeout=90):
        """Wait until the output matches a pattern; return the match."""
        deadline = time.monotonic() + PATIENCE * timeout
        while time.monotonic() < deadline:
            match = re.search(pattern, self.output(), re.MULTILINE)
            if match:
                return match
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.output()}"
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} was not printed within {PATIENCE * timeout} s:\n{self.output()}")

    def rank_process(self, rank, timeout=20):
        """The process id of a rank's script, by the number that its launcher gave it; waits until it is there."""
        deadline = time.monotonic() + PATIENCE * timeout
        while time.monotonic() < deadline:
            for pid in marked(self.mark):
                # A rank's children (the scheduler of rank 0, workers of a data set) have its environment, too. ranks.py
                # marks the script's process; without it, mpirun and msrun do.
                for name in ("RANKS_RANK", "OMPI_COMM_WORLD_RANK", "MS_NODE_ID"):
                    of_rank = f"{name}={rank}".encode()
                    if (of_rank in environment_of(pid) and of_rank not in environment_of(parent_of(pid))
                            and b"python" in command_of(pid) and b"--agent" not in command_of(pid)):
                        return pid
            time.sleep(0.1)
        raise AssertionError(f"no process of rank {rank} runs:\n{self.output()}")

    def finish(self, timeout=120):
        """Wait for the end of the command; return a Result."""
        try:
            code = self.process.wait(max(0.0, self.started + PATIENCE * timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE * timeout} s: {self.command}\n"
                                 f"{self.output()}") from None
        code = 128 + signal.SIGINT if code == -signal.SIGINT else code
        seconds = time.monotonic() - self.started
        left_over = marked(self.mark)
        deadline = time.monotonic() + 2  # a log follower may need a moment
        while left_over and time.monotonic() < deadline:
            time.sleep(0.1)
            left_over = marked(self.mark)
        return Result(code, self.output(), seconds, left_over)


def run(*command, cwd, env=None, timeout=120):
    """Run a command to its end; return a Result."""
    with Job(*command, cwd=cwd, env=env) as job:
        return job.finish(timeout)


def soon(seconds=10):
    """The seconds within which a launcher must have ended what failed; more where processes wait for a core."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def succeeded(result):
    """Assert that a job ended well and left nothing behind; return it."""
    assert result.code == 0, f"exit code {result.code}:\n{result.output}"
    assert not result.left_over, f"processes left: {result.left_over}\n{result.output}"
    return result


def losses(log):
    """All losses that a log file holds, in order."""
    return [float(value) for value in re.findall(r"loss is ([-+.\deE]+)", Path(log).read_text())]


def parameters(checkpoint):
    """The parameters of a whole checkpoint: {name: float64 array}; read here, for MindSpore takes seconds to load."""
    data = Path(checkpoint).read_bytes()
    if data[-17:-10] == b"crc_num":
        data, check_sum = data[:-17], int.from_bytes(data[-10:], "big")
        assert zlib.crc32(data) == check_sum, f"{checkpoint} is damaged"
    values = {value.tag: value.tensor for value in checkpoint_format().Checkpoint.FromString(data).value}
    _ = [values.pop(name, None) for name in ("lr crc", "rank_size")]  # no parameters
    assert values, f"{checkpoint} holds no parameter"
    return {name: np.frombuffer(value.tensor_content, value.tensor_type.lower()).reshape(
        [dim for dim in value.dims if value.dims != [0]]).astype(np.float64) for name, value in values.items()}


@functools.cache
def checkpoint_format():
    """MindSpore's own description of its checkpoint files, without the rest of MindSpore."""
    file = Path(importlib.util.find_spec("mindspore").origin).parent / "train" / "checkpoint_pb2.py"
    with mock.patch.dict(os.environ, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python"):  # as MindSpore does
        return SimpleNamespace(**runpy.run_path(str(file)))


def largest_difference(first, second):
    """The largest difference between two sets of parameters with the same names."""
    assert first.keys() == second.keys()
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def planted(lesson, folder, script, *changes):
    """Copy a lesson and plant a bug: each change (old, new) must be found exactly once in the script.

    Returns:
        The folder of the copy.
    """
    copy = Path(folder) / "planted"
    copy.mkdir()
    for file in (REPO / lesson).iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    if not (copy.parent / "tools").exists():  # ranks.py finds the launcher there
        (copy.parent / "tools").symlink_to(REPO / "tools")
    text = (copy / script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {script}"
        text = text.replace(old, new)
    (copy / script).write_text(text)
    return copy


def made_once(tmp_path_factory, name, make):
    """A folder that make(folder) fills, once for all the workers of a test session; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed at it
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def stand_in(file, script):
    """Make a program of some lines of sh."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def path_with_gpus(folder, count):
    """A PATH that begins with a folder in which nvidia-smi lists some cards; UUIDs GPU-00000000-aaaa and so on."""
    lines = [f"echo 'GPU {card}: NVIDIA X (UUID: GPU-{8 * str(card)}-aaaa)'" for card in range(count)]
    stand_in(folder / "nvidia-smi", "\n".join(lines))
    return f"{folder}:{Path(PYTHON).parent}:{os.environ['PATH']}"
