"""Lets mpirun start MindSpore ranks on CPU. Not needed to understand the lesson: skip it when reading.

On Ascend and GPU, MindSpore takes its ranks from mpirun. On CPU it cannot: there the ranks of a job find each
other through one more process, the scheduler, and read its address and their own rank from the MS_* variables
(the "dynamic cluster", which msrun sets up by itself). join_ranks() fills those variables from what mpirun
says, and rank 0 starts the scheduler. It does nothing without mpirun, under msrun, or on Ascend and GPU.

Import this module before mindspore: its clean-up at exit must run after MindSpore's own, and handlers run last
in, first out.
"""

import atexit
import ctypes
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # MindSpore's log: errors only (2 would add warnings while ranks meet)

_leave = None  # what this rank does last, after MindSpore's own clean-up
_EXIT_WAIT_S = 15.0


@atexit.register
def _at_exit():
    if _leave:
        _leave()


def join_ranks():
    """Prepare this process for mindspore.communication.init() where mpirun started it on a CPU machine.

    Raises:
        SystemExit: the ranks run on several hosts and nobody said where the scheduler is.
        TimeoutError: rank 0 or its scheduler did not come up within a minute.
    """
    global _leave
    import mindspore as ms

    under_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ
    if not under_mpirun or "MS_ROLE" in os.environ or ms.get_context("device_target") != "CPU":
        return
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    one_host = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == os.environ["OMPI_COMM_WORLD_SIZE"]
    if not one_host and "MS_SCHED_PORT" not in os.environ:
        sys.exit("The ranks run on several hosts: tell them where rank 0 is with "
                 "mpirun -x MS_SCHED_HOST=<address of rank 0's host> -x MS_SCHED_PORT=<a free port there> ...")
    os.environ["MS_WORKER_NUM"] = str(size)
    os.environ.setdefault("MS_SCHED_HOST", "127.0.0.1")
    # mpirun makes this folder for the job, the same one for all ranks of a host, and removes it at the end.
    job_folder = Path(os.environ["PMIX_SERVER_TMPDIR"])
    if rank == 0:
        port = int(os.environ.setdefault("MS_SCHED_PORT", str(_free_port())))
        scheduler_pid = _start_scheduler(port)
        _write(job_folder / "scheduler_port", str(port))
        _leave = functools.partial(_end_scheduler, scheduler_pid, job_folder, size)
    elif one_host:
        os.environ["MS_SCHED_PORT"] = _wait_until(lambda: _read(job_folder / "scheduler_port"), 60,
                                                  "rank 0 did not start its scheduler")
        _leave = functools.partial(_write, job_folder / f"rank_{rank}_left", "")
    os.environ["MS_NODE_ID"] = str(rank)
    os.environ["MS_ROLE"] = "MS_WORKER"


def _start_scheduler(port):
    """Start the scheduler as a copy of this process (no second import of MindSpore); return once it listens."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        # However rank 0 ends, kill -9 included, Linux then ends the scheduler (1 is PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.environ["MS_ROLE"] = "MS_SCHED"
        from mindspore.communication import init
        try:
            init()
        finally:
            os._exit(0)

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex((os.environ["MS_SCHED_HOST"], port)) == 0

    _wait_until(listens, 60, f"the scheduler does not listen on port {port}")
    return pid


def _end_scheduler(pid, job_folder, size):
    """Let the other ranks say goodbye to the scheduler, then end it: rank 0 leaves last."""
    deadline = time.monotonic() + (0 if hasattr(sys, "last_value") else _EXIT_WAIT_S)  # after an error: at once
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return
        if all((job_folder / f"rank_{rank}_left").exists() for rank in range(1, size)):
            break
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _write(path, text):
    """Write a file that readers see whole or not at all; the folder may be gone when the job has been ended."""
    try:
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="ascii")
        draft.replace(path)
    except FileNotFoundError:
        pass


def _read(path):
    return path.read_text(encoding="ascii") if path.exists() else None


def _wait_until(answer, seconds, failure):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = answer()
        if value:
            return value
        time.sleep(0.02)
    raise TimeoutError(f"{failure} within {seconds} s")
