"""What a launcher prints. It waits for a reader that pauses (Ctrl-S, `| less`), but not once the job is to be ended."""

import contextlib
import errno
import os
import select
import sys
import time

LAST_WORDS = 2  # s: so long a line may take, once the job is to be ended
NEVER_WAITING = {}  # terminals, opened anew: {device: descriptor}


def ready(seconds, *wanted):
    """The numbers of those files of (file, events) that are ready within so many seconds (None: for ever)."""
    files = select.poll()
    for file, events in wanted:
        files.register(file, events)
    return {number for number, _ in files.poll(None if seconds is None else 1000 * seconds)}


def takes_more(file, seconds):
    """Does a file take more, at once or within so many seconds (None: for ever)?"""
    return bool(ready(seconds, (file, select.POLLOUT)))


def write(file, data):
    """Write a part of data, and say how much; BlockingIOError if there is no room now.

    A terminal says that it has room where it has for a few characters only, and a write then waits for all of them. To
    open it anew lets it wait for no other process that uses it.
    """
    number = file.fileno()
    if os.isatty(number):
        terminal = os.fstat(number).st_rdev
        if terminal not in NEVER_WAITING:
            NEVER_WAITING[terminal] = number
            with contextlib.suppress(OSError):  # it belongs to another user
                NEVER_WAITING[terminal] = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        number = NEVER_WAITING[terminal]
    return os.write(number, data[:select.PIPE_BUF])


def drop_rest(stream):
    """What a stream still holds goes nowhere: Python, at its end, would make it the exit code that it cannot go out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_in_the_end(line):
    """Print the last line of a program that has done its work, also if nobody can read that."""
    try:
        print(line, flush=True)
    except OSError:
        drop_rest(sys.stdout)


class Speech:
    """Lines for the user."""

    def __init__(self, moving):
        self.moving = moving
        self.job = None  # the one that runs: a signal comes to its wake, its args have the --time-limit
        self.full = False  # was there no room for a line where they go?
        self.hurry = None  # a signal has come, or the time is over: so long a line may wait now, in seconds

    def say(self, line, to=None):
        """Print a line; when nobody reads any more, the job goes on in silence."""
        to = to or sys.stdout
        for file in getattr(to, "files", [to]):
            began = time.monotonic()
            rest = memoryview(f"{line}\n".encode(file.encoding, file.errors))
            try:
                while rest and self.room(file) and (self.hurry is None or time.monotonic() < began + LAST_WORDS):
                    self.moving.clear()
                    try:
                        rest = rest[write(file, rest):]
                    except BlockingIOError:
                        if self.hurry == 0:
                            break
                        time.sleep(0.05)
                self.hurry = 0 if rest else self.hurry
            except (OSError, ValueError) as error:
                self.full |= getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

    def room(self, file):
        """Wait until a file takes more; False if it does not, and the job is to be ended."""
        while self.hurry is None and self.job:
            ours, news = ((file, select.POLLOUT), (self.job.wake, select.POLLIN)), ()
            if not (found := ready(0, *ours)):  # nobody reads: what happens to the ranks meanwhile?
                left = self.job.args.deadline - time.monotonic()
                news = self.job.awaited()
                found = ready(max(0, min(1, left)), *ours, *news)
            if self.job.wake.fileno() in found or time.monotonic() >= self.job.args.deadline:
                self.hurry = 0.2
            elif file.fileno() in found:
                return True
            for number in found & dict(news).keys():
                self.job.notice(number)
            if not found and any(rank["code"] for rank in self.job.ranks.values()):
                self.job.end_ranks()  # one that had failed before
        if takes_more(file, self.hurry):
            return True
        self.hurry = 0
        return False
