"""What a shell, its limits and the machine leave to ranks: for the launchers and dry_run/compute.py, before a start.

Each function raises ValueError with one sentence for what cannot work. This file needs no neighbour.
"""

import contextlib
import errno
import os
import re
import resource
import shutil
import socket
from pathlib import Path

MB = 1 << 20
FILE_SIZE = 10  # MB
MPIRUNS_FILES = 10  # MB: measured, 8.4 with 1 to 8 ranks
ADDRESSES, DATA, STACK = 2900, 1600, 0.5  # MB: measured, a rank starts and trains with a little more
FILES, FILES_OF_A_RANK = 40, 5  # measured: with 2 ranks all ends well from 50 on, with 16 from 120
STAY_HERE = "OMPI_MCA_ras", "^slurm,tm,lsf,gridengine"
ANY_NAME = "OMPI_MCA_regx", "naive"  # else mpirun can read no host name with an _
ALONE = "OMPI_MCA_plm", "isolated"  # else mpirun wants ssh, though it does not use it
OWN_SETTINGS = (STAY_HERE, ANY_NAME, ALONE)  # of mpirun, not of the user


def look(ranks, mpirun, warn):
    """Look at all but the memory, and make TMPDIR's path absolute; mpirun: is it what starts the ranks?"""
    look_at_ulimit(ranks, warn)
    look_at_loopback()
    look_at_name()
    look_at_mindspores_logs()
    if os.path.isdir(os.getenv("TMPDIR", "")):
        os.environ["TMPDIR"] = os.path.abspath(os.environ["TMPDIR"])  # ranks may run in folders of their own
    if not mpirun:
        return
    name, place = folder_of_mpirun()
    if not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
        raise ValueError(f"{name or 'the folder for temporary files'} is {place or 'empty'}, which is no folder where "
                         "you may write, and mpirun needs one; "
                         f"{f'unset {name}, or name' if name else 'set TMPDIR to'} another one")
    look_at_disk(place, ranks, MPIRUNS_FILES, "mpirun's own files", "set TMPDIR to another folder")  # it would hang


def folder_of_mpirun():
    """Where mpirun has its own files: (the variable that says so, or ""; the folder)."""
    name = next((name for name in ("TMPDIR", "TEMP", "TMP") if name in os.environ), "")  # in Open MPI's order
    return name, os.getenv(name, "/tmp")


def look_at_disk(place, ranks, need, what, way_out):
    """Is there room for need MB in a folder, and for the files of so many ranks?"""
    disk, free = os.statvfs(place), shutil.disk_usage(place).free
    entries = disk.f_favail if disk.f_files else MB  # so many more files; some file systems do not count them
    if free == 0 or free < need * MB or entries < FILES_OF_A_RANK * ranks:
        full = "is full" if free == 0 else f"has {free // MB} MB free" if free < need * MB else "takes no more files"
        raise ValueError(f"the disk of {place} {full}, and {what} go there{f' ({need} MB)' * (need > 0)}; free some "
                         f"(df -h, df -i), or {way_out}")


def nearest(path):
    """What there is of a path: its nearest folder, or what is in the way of one."""
    path = Path(os.path.abspath(path))
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def look_at_mindspores_logs():
    """Can the folder be written that MindSpore's own logs go to, if its variables want files?"""
    if os.getenv("GLOG_logtostderr") != "0":  # noqa: SIM112  # their real names
        return
    folder = Path(os.getenv("GLOG_log_dir", ""))  # noqa: SIM112
    if not os.getenv("GLOG_log_dir"):  # noqa: SIM112
        raise ValueError("GLOG_logtostderr=0 has MindSpore write files, and GLOG_log_dir does not say where; set it to "
                         "a folder, or unset GLOG_logtostderr")
    place = nearest(folder)
    if folder.is_absolute() and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise ValueError(f"GLOG_log_dir is {folder}, where you may not write, and GLOG_logtostderr=0 has MindSpore "
                         "write files there; unset GLOG_logtostderr, or name another folder")


def stay_here():
    """Make mpirun start its ranks on this machine only: in an allocation of Slurm it would ask that for others."""
    os.environ.setdefault(*STAY_HERE)
    if not (shutil.which("ssh") or shutil.which("rsh")):
        os.environ.setdefault(*ALONE)


def look_at_ulimit(ranks, warn):
    """What ulimit allows; the limit of open files is raised where that can be done."""
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= size < FILE_SIZE * MB:
        raise ValueError(f"files may have {size // 1024} KB at most here (ulimit -f), and logs and checkpoints need "
                         "more; start in a shell where ulimit -f says unlimited")
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds >= 0:
        warn(f"a process may compute for {seconds} s here (ulimit -t); Linux kills a rank that takes more")
    for option, limit, least in (("v", resource.RLIMIT_AS, ADDRESSES), ("d", resource.RLIMIT_DATA, DATA),
                                 ("s", resource.RLIMIT_STACK, STACK)):
        size, _ = resource.getrlimit(limit)
        if 0 <= size < least * MB:
            warn(f"ulimit -{option} is {size // 1024} KB here; MindSpore needs {1024 * least:.0f} KB or more, and "
                 f"fails in odd ways without: ulimit -{option} unlimited")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + FILES_OF_A_RANK * ranks
    if 0 <= most < need:  # mpirun would hang
        raise ValueError(f"only {most} files may be open at a time here (ulimit -Hn), and {ranks} ranks need about "
                         f"{need}; start fewer, or in a shell with a higher limit")
    if 0 <= files < 4 * need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4 * need if most < 0 else min(4 * need, most), most))


def look_at_loopback():
    """Can processes of this machine reach each other?"""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "ip addr add 127.0.0.1/8 dev lo" if error.errno == errno.EADDRNOTAVAIL else "ip link set lo up"
        raise ValueError(f"127.0.0.1 cannot be reached ({os.strerror(error.errno) if error.errno else error}), and the "
                         f"ranks talk over it; as root: {remedy}") from None


def look_at_name():
    """Has this machine a name?"""
    name = socket.gethostname()
    if not name:
        raise ValueError("this machine has no host name, and ranks without one wait for each other for ever; give it "
                         "one, as root: hostname NAME (docker run --hostname NAME)")
    if not re.fullmatch("[A-Za-z0-9.-]+", name):
        os.environ.setdefault(*ANY_NAME)


def left_in_container(groups="/proc/self/cgroup", mounted="/sys/fs/cgroup"):
    """The MB that the control groups of this process, such as a container's, leave it; None if they set no limit."""
    left = []
    for line in Path(groups).read_text(errors="replace").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        of_version = ("memory.max", "memory.current", "inactive_file") if not kinds else (
            "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        top = Path(mounted, kinds)
        inner = top / path.lstrip("/")
        for place in (inner, *inner.parents) if inner.is_dir() else (top,):  # a container may see its own group as /
            with contextlib.suppress(OSError, ValueError, TypeError):
                most, used = (int((place / name).read_text()) for name in of_version[:2])
                spare = re.search(rf"^{of_version[2]} (\d+)$", (place / "memory.stat").read_text(), re.MULTILINE)
                left.append(most - used + int(spare[1]))  # files that were read make room
            if place == top:
                break
    return min(left) // MB if left else None


def look_at_memory(ranks, each):
    """Is there memory for ranks that take so many MB each?"""
    free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text()).group(1)) // 1024
    with contextlib.suppress(OSError, ValueError):
        free = min([free, *[max(0, left) for left in [left_in_container()] if left is not None]])
    if ranks * each > free:
        raise ValueError(f"{ranks} ranks need about {ranks * each} MB of memory ({each} MB each), "
                         f"{free} MB are free; start fewer, or take smaller pictures or batches")
