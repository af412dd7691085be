"""Jobs with a launcher on each server (run_cluster.sh, msrun --nodes) that start again: the launchers meet each time.

The launcher of rank 0 listens one port above the scheduler's; the others come to it before every start, say what they
run, and all start when all are there. The first meeting makes them one job, with a number that nobody else has; one of
another job, such as the job before or after this one in a loop, is sent away and comes again. A launcher whose ranks
have failed says so, and the others then end theirs at once. Only with --restarts: without it nothing listens, and a
server notices by MindSpore's own means that another one has failed.
"""

import contextlib
import hashlib
import json
import re
import secrets
import select
import socket
import time
from pathlib import Path

ENDS_WITHIN = 120  # s
BEGINS_WITHIN = 20  # s; a launcher that has ended may have been that of the job before
LONGEST = 9999  # bytes of a message
GONE = "the launcher of the ranks from 0 on, on another server, has ended and had not let this one in; see there"
ODD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # by messages of strangers


def if_only_here(host):
    """What to add where others did not come to an address of this machine that each machine has; else ""."""
    return (f"; {host} is an address of each machine itself: if the servers are several machines, set MS_SCHED_HOST on "
            "all to the address of the first") * host.startswith("127.")


def last_of(word):
    """A word of a command without the folders of a path, which may be others on each server."""
    return re.sub(r"[^=]*/(?=.)", "", word.rstrip("/"))


def read_line(link):
    """The line that has come on a connection, if it is whole, and nothing behind it; b"" at the end; None: not yet."""
    there = link.recv(LONGEST, socket.MSG_PEEK)
    if b"\n" in there:
        return link.recv(there.index(b"\n") + 1)
    return None if 0 < len(there) < LONGEST else b""


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
        self.coming, self.told, self.done = [], [], None
        words = [part for word in args.options for part in (word.split("=", 1) if word[:2] == "--" else [word])]
        shown = f"{args.n} ranks on {len(self.all)} servers, {Path(args.script).name} {' '.join(args.options)}"
        runs = repr([args.n, self.all, Path(args.script).name, *map(last_of, words)])
        # What is to be the same, and how people see it; and which job it is, after the first meeting.
        self.job = {"runs": hashlib.sha256(runs.encode()).hexdigest(),
                    "shown": shown.encode(errors="replace").decode()[:300]}
        self.number = ""
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
        self.links, self.told, deadline, said = {}, [], time.monotonic() + self.patience, False
        while self.done or not self.complete():
            if self.done:
                raise ValueError(self.done)
            job.look_at_the_clock()
            if job.signalled():
                return
            if time.monotonic() > deadline:
                raise ValueError(f"no launcher of the other servers within {self.patience} s (--wait) at {self.host}:"
                                 f"{self.port}; start it on each of them, with the same number of --restarts" +
                                 "".join(f"; {other}" for other in self.told[-1:]))
            self.let_in() if self.door else self.call_on()
            if not said and not self.complete():
                said = not self.say(f"{self.name}: waiting for the launchers of the other servers at {self.host}:"
                                    f"{self.port}")
        self.number = self.number or secrets.token_hex(8)  # the others have been given that of the first
        for link in self.links.values() if self.door else ():
            with contextlib.suppress(OSError):  # one that has just ended is heard of later
                link.sendall(json.dumps({"go": self.number}).encode() + b"\n")
        self.patience = max(self.patience, ENDS_WITHIN)  # before a restart each has its own ranks to end

    def complete(self):
        return len(self.links) == (len(self.all) - 1 if self.door else 1)

    def tell_once(self, sentence):
        if sentence not in self.told and len(self.told) < 9:
            self.told.append(sentence)
            self.say(f"{self.name}: waiting: {sentence}")

    def let_in(self):
        """On the first server: somebody may come, a stranger, too."""
        for link in select.select([self.door, *self.coming], [], [], 0.2)[0]:
            with contextlib.suppress(OSError, *ODD):
                if link is self.door:
                    self.coming.append(self.door.accept()[0])
                    self.coming[-1].setblocking(False)
                    continue
                self.coming.remove(link)
                if (line := read_line(link)) is None:
                    self.coming.append(link)
                    time.sleep(0.05)  # the rest is on its way
                else:
                    self.admit(link, json.loads(line))
        # Those that were here say nothing before all are, unless they have ended.
        ended = select.select(self.links.values(), [], [], 0)[0]
        self.links = {first: link for first, link in self.links.items() if link not in ended}

    def admit(self, link, its):
        """A launcher has said what it runs: is it one of this job?"""
        if "code" in its:
            if its["number"] == self.number:  # it has ended between two starts
                self.heed(its)
            return
        link.settimeout(5)
        first, mine = int(its["first"]), self.job["shown"]
        theirs = "".join(letter if letter.isprintable() else "?" for letter in its["shown"])
        wrong = ""
        if its["runs"] != self.job["runs"]:
            wrong = "a launcher of another job is at this port: there {}, here {}"
        elif its["number"] != self.number:
            wrong = ("of one job, {}, a launcher that begins and one that starts again are at this port; end all, and "
                     "start them together, with --resume if they are to go on")
        elif first in self.links:
            wrong = f"the launcher of the ranks from {first} on was started twice: {{}}"
        if wrong:
            self.tell_once(wrong.format(theirs, mine))
            link.sendall(json.dumps({"wrong": wrong.format(mine, theirs)}).encode() + b"\n")
        elif first in self.all[1:]:
            self.links[first] = link

    def call_on(self):
        """On another server: go to the first, and wait until it says that all are there."""
        try:
            if not self.asked:
                self.asked = socket.create_connection((self.host, self.port), timeout=5)
                self.left = float("inf")
                self.asked.sendall(json.dumps({"first": self.own, "number": self.number, **self.job}).encode() + b"\n")
            elif select.select([self.asked], [], [], 0.2)[0]:
                line = read_line(self.asked)
                if line is None:
                    time.sleep(0.1)  # the rest is on its way
                elif "wrong" in (answer := json.loads(line or "{}")):
                    self.tell_once(answer["wrong"])
                    self.asked = None
                    time.sleep(0.5)  # it may be the job before, which ends
                    self.done = GONE if self.number else None
                elif self.number and "code" in answer:
                    self.heed(answer)
                else:
                    self.number = answer["go"]  # or it is none of ours, or has ended
                    self.links, self.asked = {0: self.asked}, None
        except (OSError, *ODD) as error:
            # It was there, and nobody listens any more; after the first meeting its door is open until it ends.
            if time.monotonic() > self.left + BEGINS_WITHIN or (
                    self.number and isinstance(error, ConnectionRefusedError)):
                self.done = GONE
            if self.asked:
                self.left, self.asked = time.monotonic(), None
            time.sleep(0.2)

    def heed(self, said):
        """A server has said how it has ended: will it start again?"""
        if self.over(said):
            ranks = f"ranks from {said['first']} on"
            self.done = (f"the launcher of the {ranks} has vanished" if said.get("vanished") else
                         f"the {ranks}, on another server, have ended with exit code {said['code']}") + (
                             ", and the ranks here do not start again")

    @staticmethod
    def over(said):
        return said.get("over") or said.get("stopped") or said["code"] in (0, 2)

    @staticmethod
    def send(link, what):
        """The last that is said on a connection."""
        with contextlib.suppress(OSError), link:
            link.sendall(json.dumps(what).encode() + b"\n")

    def tell(self, **what):
        """Tell all other servers how it has ended, here unless what["first"] names another server by its first rank:
        the exit code, whether somebody wanted it (stopped), and whether that was the last start (over).
        """
        what = {"first": self.own, "number": self.number, **what}
        links, self.links = self.links.values(), {}
        for link in links:
            with contextlib.suppress(OSError, *ODD):  # has it just said that it has ended, too?
                if select.select([link], [], [], 0)[0]:
                    self.heed(json.loads(read_line(link)))
            self.send(link, what)
        if self.number and self.over(what) and not (self.door or self.done):  # the first may have closed the connection
            with contextlib.suppress(OSError):
                self.send(socket.create_connection((self.host, self.port), timeout=2), what)

    def news(self, link):
        """How it has ended on a server: (exit code, what to say of it, did somebody want it?)."""
        first = next(rank for rank, its in self.links.items() if its is link)
        del self.links[first]
        said = {"code": 1, "stopped": False, "first": first, "vanished": True}
        with contextlib.suppress(OSError, ValueError):
            line = read_line(link)
            said["over"] = line == b""  # killed: one that only lost the network's connection raises an OSError
            said.update({"vanished": False, **json.loads(line or b"")})
        sentence = f"the launcher of the ranks from {said['first']} on has vanished"
        if not said["vanished"]:
            sentence = (f"the ranks from {said['first']} on, on another server, " + (
                "were ended there, by a signal or the --time-limit," if said["stopped"] else "ended") +
                f" with exit code {said['code']}; see there")
        link.close()
        self.heed(said)
        if self.door and said["code"]:
            self.tell(**said)
        return said["code"], sentence, said["stopped"]
