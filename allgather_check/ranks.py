"""Makes a script one of several ranks, and starts them. Skip it when reading the lesson.
Copy of mnist_ddp/ranks.py; tools/copies.py --fix refreshes it.

A script imports it before mindspore, which then loads more quickly; join() comes before
mindspore.communication.init(), and leave() is the last line. On CPU, join() sets the MS_* variables
by which ranks find each other, and rank 0 starts a scheduler (MindSpore's "dynamic cluster").
As a program it starts ranks:            python ranks.py -n 4 train.py -- options of train.py
It leaves that to tools/launch.py beside the lesson, or, copied out alone, starts them plainly.
"""

import atexit
import contextlib
import ctypes
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
_joined, _end_mpi = False, abs  # did join() prepare this process (None: it ends)? what ends MPI

os.environ.setdefault("GLOG_v", "3")  # MindSpore prints errors only
_tools = HERE.parent / "tools" / "in_rank.py"  # has more ways to be quick, and looks for faults
_more = runpy.run_path(str(_tools)) if _tools.is_file() and __name__ != "__main__" else {}


def join():
    """Prepare for init(); returns False if no launcher started this process: it must not init()."""
    global _joined, _end_mpi
    import mindspore as ms
    env, by_mpirun = os.environ, "OMPI_COMM_WORLD_SIZE" in os.environ
    rank = env.get("OMPI_COMM_WORLD_RANK" if by_mpirun else "RANK_ID", "0")
    size = env.get("OMPI_COMM_WORLD_SIZE" if by_mpirun else "RANK_SIZE", "1")
    _more.get("prepare", abs)(launched := by_mpirun or "MS_ROLE" in env or size != "1")
    on_cpu = (target := ms.get_context("device_target")) == "CPU"
    if launched and target == "GPU" and hasattr(ms, "runtime"):
        ms.runtime.launch_blocking()  # else sums are read before NCCL has made them: wrong numbers
    if by_mpirun and not on_cpu and "OPAL_PREFIX" in env:
        with contextlib.suppress(OSError):  # init() itself finds only the system's
            ctypes.CDLL(f"{env['OPAL_PREFIX']}/lib/libmpi.so.40", ctypes.RTLD_GLOBAL)
    if on_cpu and "avx512f" in Path("/proc/cpuinfo").read_text():
        env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # AVX-512's plain convolutions are slow
    env.setdefault("MS_CPU_COMM_OP_TIMEOUT", "300")  # s; others may still compile
    if not on_cpu or not launched or ("MS_ROLE" in env and not by_mpirun):
        return launched  # msrun has set all variables
    one_host = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
    note = Path(env.get("PMIX_SERVER_TMPDIR", "."),  # mpirun's, by its PID; so with the job's key
                "scheduler" + env.get("OMPI_MCA_orte_precondition_transports", ""))
    if one_host:
        env.update(MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=str(_free_port()) if rank == "0" else
                   _wait_for(lambda: note.exists() and note.read_text(), "rank 0 did not start"))
    elif not {"MS_SCHED_HOST", "MS_SCHED_PORT"} <= env.keys():
        sys.exit("The ranks run on several hosts: tell them where rank 0 is with mpirun -x "
                 "MS_SCHED_HOST=<address of its host> -x MS_SCHED_PORT=<a free port there> ... "
                 "(or, if no launcher started this process: unset RANK_SIZE OMPI_COMM_WORLD_SIZE)")
    env.update(MS_WORKER_NUM=size, MS_NODE_ID=rank, MS_ROLE="MS_WORKER")
    if rank == "0":
        _start_scheduler()
        _ = one_host and note.write_text(env["MS_SCHED_PORT"])
    _joined, _end_mpi = True, _more["use_mpi"]() if by_mpirun and _more else abs
    return True


def leave(code=0):
    """End this process with an exit code; if join() prepared it, together with all ranks."""
    global _joined
    if (error := sys.exc_info()[0]) and not code:  # try ... finally: an error ends this process
        _ = _more and atexit.register(leave, code)  # it was caught, if that is called
    elif _joined or (code and _joined is False):  # else Python ends it: under msrun, on a card
        joined, _joined = _joined, None
        if joined and not error:  # MindSpore's clean-up crashes one time in ten, after all results
            _more.get("end_threads", abs)(240)  # first: who waits alone loses the scheduler
            _meet()
            _end_mpi(60)
        _more["finish_writing"](alone=bool(error)) if _more else sys.stdout.flush()
        os._exit(int(code or 0))


def _start_scheduler():
    """Start the scheduler as a copy of this process, which ends with it; return once it listens."""
    where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    if _listens(*where):
        sys.exit("port {1} of {0} is in use; choose another MS_SCHED_PORT".format(*where))
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.environ["MS_ROLE"] = "MS_SCHED"
        from mindspore.communication import init
        try:
            init()
        finally:
            os._exit(0)
    _wait_for(lambda: _listens(*where) or os.waitpid(pid, os.WNOHANG)[0], "no scheduler listens")
    _listens(*where) or sys.exit("the scheduler that rank 0 started has ended; it says why above")


def _meet():
    """Return when all ranks are here: all connect to rank 0, which hangs up after the last."""
    import mindspore as ms
    if not ms.communication.GlobalComm.INITED:
        sys.exit("the ranks have not met: call mindspore.communication.init() after ranks.join()")
    rank, host = int(os.environ["MS_NODE_ID"]), os.environ["MS_SCHED_HOST"]
    with socket.create_server((host if rank == 0 else "", 0), backlog=999) as server:
        ports = [server.getsockname()[1]]
        if os.environ["MS_WORKER_NUM"] != "1":  # float32 is exact below 2**24
            ports = ms.ops.AllGather()(ms.Tensor(ports, ms.float32)).asnumpy()
        if rank > 0:
            socket.create_connection((host, int(ports[0])), timeout=60).recv(1)
        server.settimeout(60)
        _ = [server.accept()[0] for _ in ports[1:] if rank == 0]


def _wait_for(answer, failure):
    for _ in range(3000):
        if value := answer():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"{failure} within 60 s")


def _listens(*address):
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(address) == 0


def _free_port():  # below those that Linux gives out
    for port in random.sample(range(20000, 30000), 999):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as name:  # it is taken
            name.bind(f"\0ranks {port}")
            if not _listens("127.0.0.1", port):
                return port
    sys.exit("no port from 20000 to 29999 is free")


def main(argv):
    """Hand over to tools/launch.py, or start the ranks plainly; returns the exit code."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:  # stdin, stdout or stderr is closed
        os.set_inheritable(file, True)
    for name in ("PYTHONINSPECT", "PYTHONSAFEPATH"):  # no rank could end, or import its neighbours
        os.environ.pop(name, None)
    if (tools := HERE.parent / "tools" / "launch.py").is_file():
        os.execv(sys.executable, [sys.executable, tools, "--lesson", HERE, *argv])
    given = argv[:argv.index("--")] if "--" in argv else argv
    if {"-h", "--help"} & set(argv):  # the head of the launcher explains it
        text = (HERE / given[given.index("--usage") + 1].split()[1]).read_text()
        return print(text.split("\nset -")[0].replace("\n# ", "\n").partition("\n")[2])
    script = next(place for place, word in enumerate(given) if word.endswith(".py"))
    size, command = given[given.index("-n") + 1], [given[script], *argv[len(given) + 1:]]
    needing = [word for word in given[:script] if re.match("--(host|table|dry|time|re|on-)", word)]
    needing += [one for one in given[script + 1:] if not re.match(r"--(wi|la)\w+$|.*m.+run", one)]
    if needing or not re.fullmatch("[1-9][0-9]*", size):
        print(f"{needing[0]} needs the folder tools/ beside {HERE.name}/; copy it there" if needing
              else f"the number of ranks must be a number from 1, not '{size}'", file=sys.stderr)
        return 2
    if "--check" in given and subprocess.run([sys.executable, *command, "--check"], check=False,
                                             env={**os.environ, "RANK_SIZE": size}).returncode:
        return 2  # it has said why
    print(f"starting {size} ranks plainly: the folder tools/, copied beside {HERE.name}/, would "
          "check more, name a rank that fails and explain why", flush=True)
    os.environ.pop("RANK_TABLE_FILE", None)  # mpirun and msrun need none, on Ascend, too
    start = ["sh", "-c", 'mkdir -p log_output/1 || exit 2; exec "$0" "$@"',  # mpirun would hang
             "mpirun", "-n", size, "--oversubscribe", "--bind-to", "none", "--output-filename",
             "log_output", "--merge-stderr-to-stdout",
             *["--allow-run-as-root"] * (os.geteuid() == 0), sys.executable, "-u"]
    if re.search("[ =]msrun ", " ".join([*given, ""])) or os.path.exists("/dev/davinci_manager"):
        start = ["msrun", f"--worker_num={size}", f"--local_worker_num={size}", "--join=True",
                 f"--master_port={_free_port()}", "--log_dir=log_msrun"]
    return os.execvp(start[0], [*start, *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
