"""The ranks of a dry run: MindSpore is imported once, then a process is forked for each rank.

Started by dry_run.py. One line of JSON comes on stdin: ranks, jobs (so many at a time), timeout (s a rank), folder,
runs, script, args, front_end. Lines of JSON go to stdout: {"ready": true} after the import, and of each rank that ends
{"rank", "status" (as of os.wait4; null: ended for its time), "seconds", "peak_bytes"}. When stdin ends, dry_run.py is
gone or has had enough, and all ranks are ended.
"""
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path

from neighbour import of_tools

PR_SET_PDEATHSIG = 1


def prctl(option, value):
    """A setting of this process, by Linux."""
    ctypes.CDLL(None).prctl(option, value)


def kill_session(pid):
    """End a rank with all that it started; it may have ended by itself, or have no session yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


class Ranks:
    """The processes of a dry run."""

    def __init__(self, job, tell):
        self.job, self.tell = job, tell
        self.waiting, self.running = list(job["ranks"]), {}  # running: pid -> [rank, when it began, in time]

    def run(self, run_rank):
        """Fork all ranks, a few at a time, and tell how each ends; returns early when stdin ends."""
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.job["jobs"]:
                    self.fork(self.waiting.pop(0), run_rank)
                if select.select([0], [], [], 0.02)[0]:  # nothing more is sent, so this is the end
                    break
                for pid in list(self.running):
                    self.look_after(pid)
        finally:
            for pid in self.running:
                kill_session(pid)
                os.waitpid(pid, 0)

    def fork(self, rank, run_rank):
        """Start one rank, in a session of its own, so that workers of the data set can be ended with it."""
        folder, parent = Path(self.job["folder"]) / f"rank_{rank}", os.getpid()
        (folder / "graphs").mkdir(parents=True)
        begin, pid = time.monotonic(), os.fork()
        if pid:
            self.running[pid] = [rank, begin, True]
            return
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for stream, name, flags in ((0, os.devnull, os.O_RDONLY),
                                    (1, folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            file = os.open(name, flags, 0o666)
            os.dup2(file, stream)
            os.close(file)
        os.dup2(1, 2)
        os.close(self.tell.fileno())
        os.environ.update(RANK_ID=str(rank), DEVICE_ID=str(rank % 8), MS_DEV_SAVE_GRAPHS_PATH=str(folder / "graphs"))
        try:
            run_rank(folder / "facts.json", folder / "graphs", self.job)
        finally:  # it ends by itself, with os._exit
            os._exit(1)

    def look_after(self, pid):
        """End a rank that takes too long; tell of one that has ended, and end what is left of its session."""
        rank, begin, in_time = self.running[pid]
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if in_time and time.monotonic() > begin + self.job["timeout"]:
                self.running[pid][2] = False
                kill_session(pid)
            return
        kill_session(pid)  # while its number is its own
        _, status, usage = os.wait4(pid, 0)
        del self.running[pid]
        print(json.dumps({"rank": rank, "status": status if in_time else None, "peak_bytes": usage.ru_maxrss << 10,
                          "seconds": round(time.monotonic() - begin, 2)}), file=self.tell, flush=True)


def main():
    job = json.loads(sys.stdin.readline())
    tell = os.fdopen(os.dup(1), "w")  # not inherited by programs that a rank starts
    os.dup2(2, 1)  # what MindSpore prints goes to the log
    of_tools("quick_import.py", "import_mindspore")()
    import one_rank
    gc.freeze()  # the ranks share what the import has made; looking through it for garbage would copy it
    prctl(PR_SET_PDEATHSIG, 0)  # from here on, stdin tells of dry_run.py's end, and all ranks can be ended
    print(json.dumps({"ready": True}), file=tell, flush=True)
    Ranks(job, tell).run(one_rank.run)


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except Exception:  # noqa: BLE001  # the last line is shown
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:  # at once: MindSpore's own end would wait for devices
        os._exit(code)
