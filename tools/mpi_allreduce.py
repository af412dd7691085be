"""On CPU, lets MPI add up gradients in place of MindSpore's own all-reduce (MCCL), which takes several times as long.

ranks.py calls set_up() in each rank that mpirun started. mpi_allreduce.c, beside this file, is compiled at the first
use, into __pycache__, by Open MPI's mpicc; without a compiler, or where that folder cannot be written, all stays with
MCCL. So do other operations than the sum, other numbers than float32, and groups of some ranks: the C code is told.
With ALL_REDUCE=MCCL in the environment nothing is changed. Ranks on several machines need ALL_REDUCE=MPI in theirs, for
they cannot tell each other in time whether all have a compiler.
"""

import atexit
import contextlib
import ctypes
import os
import re
import runpy
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def set_up():
    """Let MPI sum in this process, one of the ranks of mpirun; all ranks must call it.

    Returns:
        What to call at the end of all ranks, with the seconds to wait for them; it does nothing if MPI is not used.
    """
    env, wanted = os.environ, os.getenv("ALL_REDUCE", "")
    size, one_host = env["OMPI_COMM_WORLD_SIZE"], env["OMPI_COMM_WORLD_SIZE"] == env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    # In a computed plan (dry_run/compute.py), MPI already is at work, and MCCL has little to do.
    if size == "1" or wanted == "MCCL" or "ASCEND_PLAN" in env or not (one_host or wanted == "MPI"):
        return abs
    env.setdefault("UCX_MEM_EVENTS", "no")  # with MPI comes UCX, unused, which would patch libc; py-spy reads less then
    if one_host:  # all do as rank 0 does, so that no two ranks wait for each other in vain
        # The key is of this job: the folder may hold the note of one that was killed and had mpirun's PID before.
        note = Path(env["PMIX_SERVER_TMPDIR"], f"all_reduce{env.get('OMPI_MCA_orte_precondition_transports', '')}")
        if env["OMPI_COMM_WORLD_RANK"] == "0":
            draft = note.with_suffix(".draft")
            draft.write_text(build() or "")
            draft.rename(note)
        file = wait_for(note)
    else:
        file = build()
        if not file:
            raise RuntimeError("ALL_REDUCE=MPI needs Open MPI's mpicc, a C compiler, and the right to write into "
                               f"{HERE}/__pycache__; without ALL_REDUCE=MPI the ranks start, too")
        if not networks_chosen():  # not /32: of 32 bits Open MPI makes the mask of none
            own_address = runpy.run_path(str(HERE / "linux.py"))["own_address"](env["MS_SCHED_HOST"])
            env["OMPI_MCA_btl_tcp_if_include"] = f"{own_address}/31"
    if not file:
        return abs
    # Shared memory and TCP, for others take a second to end; and a rank that waits leaves its core to others, without
    # which 4 ranks on 2 cores take a second for a step.
    for name, value in (("pml", "ob1"), ("btl", "self,vader,tcp"), ("btl_vader_single_copy_mechanism", "none"),
                        ("mpi_yield_when_idle", "1")):
        env.setdefault(f"OMPI_MCA_{name}", value)
    library = ctypes.CDLL(file)
    library.finish.argtypes, library.take_over.argtypes = [ctypes.c_double], [ctypes.c_int, ctypes.c_double]
    library.take_over(int(size), float(env.get("MS_CPU_COMM_OP_TIMEOUT", "300")))
    atexit.register(library.finish, 2)  # of a script that ends otherwise than by ranks.leave()
    return library.finish


def networks_chosen():
    """Has somebody told Open MPI which networks to take, in the environment, by mpirun's options or in its files?"""
    told = "\n".join(name.replace("OMPI_MCA_", "") for name in os.environ)
    for file in ("~/.openmpi/mca-params.conf", f"{open_mpi()}/etc/openmpi-mca-params.conf",
                 "/etc/openmpi/openmpi-mca-params.conf"):  # Debian's
        with contextlib.suppress(OSError):
            told += "\n" + Path(os.path.expanduser(file)).read_text(errors="replace")
    return re.search(r"^\s*btl_tcp_if_(in|ex)clude", told, re.MULTILINE)


def wait_for(note):
    """What rank 0 wrote into a file."""
    for _ in range(6000):
        if note.exists():
            return note.read_text()
        time.sleep(0.01)
    raise TimeoutError("rank 0 did not say within 60 s how to reduce")


def build():
    """The path of the compiled library, made now if need be; None if that cannot be."""
    prefix = open_mpi()
    compiler = prefix and prefix / "bin" / "mpicc"
    if not (compiler and compiler.is_file()):
        return None
    return runpy.run_path(str(HERE / "native.py"))["build"]("mpi_allreduce.c", compiler)


def open_mpi():
    """The folder of the Open MPI that started this process; another one could not join its ranks. None if unknown."""
    pid = os.getpid()
    try:
        while pid > 1:
            program = Path(os.readlink(f"/proc/{pid}/exe"))
            if program.name.startswith(("mpirun", "orterun", "orted")):
                return program.parent.parent
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:
        pass
    return None
