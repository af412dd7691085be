"""What a launcher prints. It waits for a reader that pauses (Ctrl-S, `| less`), but not once the job is to be ended."""

import errno
import os
import select
import sys
import time


def takes_more(file, seconds, *wake):
    """Does a file take more, at once or within so many seconds (None: for ever)? wake: what ends the waiting."""
    files = select.poll()
    files.register(file, select.POLLOUT)
    for other in wake:
        files.register(other, select.POLLIN)
    found = files.poll(None if seconds is None else 1000 * seconds)
    return file.fileno() in [number for number, _ in found]


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
            rest = f"{line}\n".encode(file.encoding, file.errors)
            try:
                while rest and self.room(file):
                    self.moving.clear()
                    rest = rest[os.write(file.fileno(), rest[:select.PIPE_BUF]):]
            except (OSError, ValueError) as error:
                self.full |= getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

    def room(self, file):
        if self.hurry is None and self.job:
            left = self.job.args.deadline - time.monotonic()
            if takes_more(file, max(0, left) if left < 1e6 else None, self.job.wake):
                return True
            self.hurry = 0.2
        if takes_more(file, self.hurry):
            return True
        self.hurry = 0
        return False
