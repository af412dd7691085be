"""What the launcher and its helpers ask of Linux: processes of a session, names and folders of one job, addresses."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import signal
import socket
from pathlib import Path

SCRIPTS_OWN = signal.SIGUSR1, signal.SIGUSR2  # batch systems and mpirun send them for the script, if it waits for one


def stat_of(pid):
    """What Linux says of a process of this machine: [state, parent, group, session, ...]; None if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return None


def stats_of(*leaders):
    """The same of all processes of sessions, those included that ended and wait to be cleared: {pid: stat_of()}."""
    stats = {int(folder.name): stat_of(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    return {pid: stat for pid, stat in stats.items() if stat and stat[3] in map(str, leaders)}


def session_of(*leaders):
    """The processes of sessions that still run."""
    return [pid for pid, stat in stats_of(*leaders).items() if stat[0] != "Z"]


TAKEN = []  # names and folders that this process has taken


def take(name):
    """Take a name until this process ends; False if another one of this machine has it."""
    taken = socket.socket(socket.AF_UNIX)
    try:
        taken.bind(f"\0{name}")
    except OSError as error:
        taken.close()
        return error.errno != errno.EADDRINUSE
    TAKEN.append(taken)
    return True


def release(name):
    """Let others take a name."""
    for taken in TAKEN[:]:
        if isinstance(taken, socket.socket) and taken.getsockname() == f"\0{name}".encode():
            TAKEN.remove(taken)
            taken.close()


def key_of(path):
    """A path for take(), whatever its length."""
    return hashlib.sha256(os.path.realpath(path).encode(errors="surrogateescape")).hexdigest()


def take_folder(path):
    """Take a folder until this process ends; False if another one has it, in a container of this machine, too.

    A file system that has no locks of folders (NFS) lets all have it.
    """
    with contextlib.suppress(OSError):  # it may not be read
        TAKEN.append(os.open(path, os.O_RDONLY))
        try:
            fcntl.flock(TAKEN[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def is_full(path):
    """Has the disk of a file or folder less than 1 MB left? Not if it is gone."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize < 1 << 20
    return False


def own_address(other):
    """The address of this machine by which it reaches another one: those of docker0 and such are alike on all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing: it only asks for the route
        return probe.getsockname()[0]


def die_of(number):
    """End this process by a signal. Of SIGINT a shell has the exit code 130, and sees only so that Ctrl-C was meant to
    end the loop around it, too.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def die_with_parent(by=signal.SIGKILL):
    """However the parent ends, kill -9 included, Linux then ends this process."""
    ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
