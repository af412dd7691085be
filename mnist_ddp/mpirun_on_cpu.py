"""Lets mpirun start MindSpore ranks on CPU. Not needed to understand the lesson: skip it when reading.

On Ascend and GPU, MindSpore takes its ranks from mpirun. On CPU it cannot: there the ranks of a job find each
other through one more process, the scheduler, and read its address and their own rank from the MS_* variables
(the "dynamic cluster", which msrun sets up by itself). join_ranks() fills those variables from what mpirun says,
and rank 0 starts the scheduler; leave_ranks() ends it. Both do nothing without mpirun, under msrun, or on Ascend
and GPU. take_own_cores() makes ranks on CPU faster, however they were started.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # before mindspore is imported: its log shows errors only; 2 adds warnings

_scheduler_pid = None
_joined = False
_show_error = sys.excepthook


def _end_at_an_error(kind, error, trace):
    """Show an error that nobody caught, and end: MindSpore's clean-up would keep mpirun waiting, often for seconds."""
    _show_error(kind, error, trace)
    if _joined:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


sys.excepthook = _end_at_an_error  # before mindspore is imported: init() puts its own hook in front of the one it finds


def join_ranks():
    """Prepare this process for mindspore.communication.init() where mpirun started it on a CPU machine.

    Raises:
        SystemExit: the ranks run on several hosts and nobody said where the scheduler is.
        TimeoutError: rank 0 or its scheduler did not come up within a minute.
    """
    global _joined, _scheduler_pid
    import mindspore as ms

    under_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ
    if not under_mpirun or "MS_ROLE" in os.environ or ms.get_context("device_target") != "CPU":
        return
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    one_host = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == os.environ["OMPI_COMM_WORLD_SIZE"]
    if not one_host and not {"MS_SCHED_HOST", "MS_SCHED_PORT"} <= os.environ.keys():
        sys.exit("The ranks run on several hosts: tell them where rank 0 is with "
                 "mpirun -x MS_SCHED_HOST=<address of rank 0's host> -x MS_SCHED_PORT=<a free port there> ...")
    os.environ["MS_WORKER_NUM"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    os.environ.setdefault("MS_SCHED_HOST", "127.0.0.1")
    if rank == 0:
        _scheduler_pid = _start_scheduler()
        _write(_job_folder() / "scheduler_port", os.environ["MS_SCHED_PORT"])
    elif one_host:
        os.environ["MS_SCHED_PORT"] = _wait_until(lambda: _read(_job_folder() / "scheduler_port"), 60,
                                                  "rank 0 did not start its scheduler")
    # How long a collective waits for the other ranks: MindSpore's 30 s are short while some compile on busy cores.
    os.environ.setdefault("MS_CPU_COMM_OP_TIMEOUT", "300")
    os.environ["MS_NODE_ID"] = str(rank)
    os.environ["MS_ROLE"] = "MS_WORKER"
    _joined = True


def take_own_cores():
    """After init(), on CPU: run what comes now on this rank's share of the cores. BIND_RANKS=no turns it off.

    MindSpore's threads spin while they wait. On cores of its own a rank's spinning takes no time from the others; of
    small steps, with much waiting, a third. Not before init(): that would take seconds longer.
    """
    import mindspore as ms
    from mindspore.communication import get_local_rank, get_local_rank_size

    if ms.get_context("device_target") != "CPU" or os.getenv("BIND_RANKS") == "no":
        return
    cores, rank, ranks = sorted(os.sched_getaffinity(0)), get_local_rank(), get_local_rank_size() or 1
    share = len(cores) // ranks
    os.sched_setaffinity(0, cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]])


def leave_ranks(code=0):
    """End this process with an exit code, the last thing a script does; where join_ranks() did nothing, return.

    The ranks wait for each other, then end without MindSpore's own clean-up: about one time in ten that crashes
    (TCPClient::Finalize against its own event thread), after all results are there, and mpirun reports a failure.
    """
    if not _joined:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    here = range(int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]))
    if len(here) < int(os.environ["OMPI_COMM_WORLD_SIZE"]):
        _wait_for_other_hosts()
    _write(_job_folder() / f"rank_{os.environ['OMPI_COMM_WORLD_LOCAL_RANK']}_done", "")
    _wait_until(lambda: all((_job_folder() / f"rank_{local}_done").exists() for local in here), 60,
                "the other ranks did not come to their end")
    if _scheduler_pid:
        os.kill(_scheduler_pid, signal.SIGKILL)
        os.waitpid(_scheduler_pid, 0)
    os._exit(code)


def _wait_for_other_hosts():
    """Return when all ranks have come here: each connects to rank 0, which lets all go when the last one has come."""
    import mindspore as ms
    from mindspore import ops

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    host = os.environ["MS_SCHED_HOST"]
    with socket.create_server((host if rank == 0 else "", 0), backlog=size) as server:
        ports = ops.AllGather()(ms.Tensor([server.getsockname()[1]], ms.float32)).asnumpy()  # exact below 2**24
        if rank > 0:
            with socket.create_connection((host, int(ports[0])), timeout=60) as to_rank_0:
                to_rank_0.recv(1)  # until rank 0 hangs up
            return
        server.settimeout(60)
        others = [server.accept()[0] for _ in range(size - 1)]
    for other in others:
        other.close()


def _start_scheduler():
    """Start the scheduler as a copy of this process (no second import of MindSpore); return its id once it listens."""
    os.environ.setdefault("MS_SCHED_PORT", str(_free_port()))
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
            return probe.connect_ex((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"]))) == 0

    _wait_until(listens, 60, f"the scheduler does not listen on port {os.environ['MS_SCHED_PORT']}")
    return pid


def _job_folder():
    """A folder that mpirun makes for the job, the same one for all ranks of a host, and removes at the end."""
    return Path(os.environ["PMIX_SERVER_TMPDIR"])


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _write(path, text):
    """Write a file that readers see whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="ascii")
    draft.replace(path)


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
