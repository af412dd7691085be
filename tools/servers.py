"""Jobs with a launcher on each server (run_cluster.sh, msrun --nodes) that start again: the launchers meet each time.

The launcher of rank 0 listens one port above the scheduler's; the others come to it before every start, say what they
run, and all start when all are there. One that runs something else, as in the job before or after this one, is sent
away and comes again. A launcher whose ranks have failed says so, and the others then end theirs at once. Only with
--restarts: without it nothing listens, and a server notices by MindSpore's own means that another one has failed.
"""

import contextlib
import json
import select
import socket
import time
from pathlib import Path

ENDS_WITHIN = 120  # s
BEGINS_WITHIN = 20  # s; a launcher that has ended may have been that of the job before


class Servers:
    """The other servers of a job.

    Args:
        args: of the launcher; args.meeting is (address, port, first ranks of all servers), args.local[0] this one's;
            args.wait, seconds, how long the servers wait for each other.
        say: prints a line.
    """

    def __init__(self, args, say):
        self.host, self.port, self.all = args.meeting
        self.name, self.say, self.own, self.links = args.name, say, args.local[0], {}
        self.door, self.asked, self.left, self.patience = None, None, float("inf"), int(args.wait)
        self.job, self.other = [str(args.n), Path(args.script).name, *args.options], None
        if self.port > 65535:
            raise ValueError(f"with --restarts the servers' launchers meet at the port after {self.port - 1}, and "
                             "there is none; set MS_SCHED_PORT (--master-port) to a lower one")
        if self.own == 0:
            try:
                self.door = socket.create_server((self.host, self.port), backlog=99)
            except OSError as error:
                raise ValueError(f"with --restarts the other servers' launchers come to {self.host}:{self.port}, where "
                                 f"this one cannot listen: {error.strerror}; set MS_SCHED_PORT (--master-port) to "
                                 "another port: it is the next one") from None

    def meet(self, job):
        """Wait until the launchers of all servers are here; returns early when a signal has come.

        Raises:
            ValueError: they did not come.
        """
        self.links, deadline, said = {}, time.monotonic() + self.patience, False
        while not self.complete():
            job.look_at_the_clock()
            if job.signalled():
                return
            if time.monotonic() > deadline:
                raise ValueError(f"no launcher of the other servers within {self.patience} s (--wait) at {self.host}:"
                                 f"{self.port}; start it on each of them, with the same number of --restarts" +
                                 self.of_another_job())
            self.let_in() if self.door else self.call_on()
            if not said and not self.complete():
                said = not self.say(f"{self.name}: waiting for the launchers of the other servers at {self.host}:"
                                    f"{self.port}")
        for link in self.links.values() if self.door else ():
            link.sendall(b"go\n")
        self.patience = max(self.patience, ENDS_WITHIN)  # before a restart each has its own ranks to end

    def complete(self):
        return len(self.links) == (len(self.all) - 1 if self.door else 1)

    def same(self, job):
        """Is it this job? Paths may differ from server to server."""
        def words(of):
            return [word for word in of if "/" not in word]
        if words(job) != words(self.job) and job != self.other:
            self.other = job
            self.say(f"{self.name}: waiting{self.of_another_job()}")
        return words(job) == words(self.job)

    def of_another_job(self):
        there, here = (f"{job[0]} ranks of {' '.join(job[1:])}" for job in (self.other or self.job, self.job))
        return f"; a launcher of another job is at this port: there {there}, here {here}" if self.other else ""

    def let_in(self):
        """On the first server: somebody may come."""
        if select.select([self.door], [], [], 0.2)[0]:
            link = self.door.accept()[0]
            link.settimeout(5)
            with contextlib.suppress(OSError, ValueError, TypeError):
                first, job = json.loads(link.makefile().readline(99999))
                if not self.same(job):
                    link.sendall(json.dumps(self.job).encode() + b"\n")
                elif first in self.all[1:]:
                    self.links[first] = link

    def call_on(self):
        """On another server: go to the first, and wait until it says that all are there."""
        try:
            if not self.asked:
                self.asked = socket.create_connection((self.host, self.port), timeout=5)
                self.asked.sendall(json.dumps([self.own, self.job]).encode() + b"\n")
            elif select.select([self.asked], [], [], 0.2)[0]:
                self.asked.settimeout(5)
                answer = self.asked.recv(3)  # no more: news may be behind it
                if answer[:1] == b"[":
                    self.same(json.loads(answer.decode() + self.asked.makefile().readline(99999)))
                    self.left, self.asked = float("inf"), None
                    time.sleep(0.5)  # it may be the job before, which ends
                else:
                    self.links = {0: self.asked} if answer == b"go\n" else {}
                    self.ended()
        except (OSError, ValueError, TypeError):
            if time.monotonic() > self.left + BEGINS_WITHIN:  # it was there, and nobody listens any more
                raise ValueError("the launcher of the ranks from 0 on, on another server, has ended while it waited "
                                 "for others; see there") from None
            self.ended()
            time.sleep(0.2)

    def ended(self):
        """Whom this one has asked has answered, or has ended without an answer."""
        if self.links:
            self.left = float("inf")
        elif self.asked:
            self.left = min(self.left, time.monotonic())
        self.asked = None

    def tell(self, **what):
        """Tell all other servers how it has ended, here unless what["first"] names another server by its first rank:
        the exit code, and whether somebody wanted it.
        """
        what = {"first": self.own, **what}
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.sendall(json.dumps(what).encode() + b"\n")
                link.close()
        self.links = {}

    def news(self, link):
        """How it has ended on a server: (exit code, what to say of it, did somebody want it?)."""
        first = next(rank for rank, its in self.links.items() if its is link)
        del self.links[first]
        said = {"code": 1, "stopped": False, "first": first}
        sentence = f"the launcher of the ranks from {first} on has vanished"
        with contextlib.suppress(OSError, ValueError):
            said.update(json.loads(link.recv(999)))
            sentence = (f"the ranks from {said['first']} on, on another server, " + (
                "were ended there, by a signal or the --time-limit," if said["stopped"] else "ended") +
                f" with exit code {said['code']}; see there")
        link.close()
        if self.door and said["code"]:
            self.tell(**said)
        return said["code"], sentence, said["stopped"]
