"""Around every rank: tells the launcher what the rank's script writes and how it ends, and ends it with the launcher.

    python tools/agent.py --agent SCRIPT options ...       what tools/launch.py has mpirun or msrun start
Variables: RANKS_LAUNCHER, where to report; RANKS_LOG, the rank's log, where no launcher keeps one. Messages are lines
of JSON. The launcher may ask where the script stands (look), and hand it a word (word), which checkpoints.py awaits.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # a far shell's PYTHONSAFEPATH leaves it out
# What PYTHONPATH names is the script's: it may have files that are called as this folder's modules or Python's own.
sys.path.sort(key=lambda folder: not folder.startswith((os.path.dirname(__file__), os.path.dirname(os.__file__))))

import contextlib
import ctypes
import errno
import fcntl
import json
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import termios
import time
from pathlib import Path

import binding
import linux

HERE = Path(__file__).resolve().parent
# What a machine's own start files (.bashrc) must not set for its ranks alone: the launcher decides for all.
FROM_LAUNCHER = re.compile("(ALL_REDUCE|BIND_RANKS|CONVOLUTIONS|DEVICE_TARGET|DATA_PATH|PYTHONINSPECT|PYTHONSAFEPATH)$|"
                           "MS_")
UTF8 = {"PYTHONIOENCODING": "utf-8:backslashreplace"}  # what scripts print is read as that, in any locale


class Agent:
    """Of one rank."""

    def __init__(self, script):
        env = os.environ
        if "RANKS_GIVEN" in env:  # what mpirun hands on to other machines
            given = {*env.pop("RANKS_GIVEN").split()}
            for name in [name for name in env if FROM_LAUNCHER.match(name) and name not in given]:
                del env[name]
        self.rank = env.get("OMPI_COMM_WORLD_RANK") or env.get("RANK_ID") or env["MS_NODE_ID"]
        host, port, self.token = env.pop("RANKS_LAUNCHER").split()
        self.link = socket.create_connection((host, int(port)), timeout=60)
        end_when_dead(self.link, in_time=False)  # but by self.cut_off()
        self.room = select.poll()
        self.room.register(self.link, select.POLLOUT | select.POLLRDHUP)
        self.out, self.log, self.wrote = 1, None, 0  # in bytes
        self.rest, self.asked, self.seen = bytearray(), bytearray(), b""  # what has come and is not whole yet
        self.told = 0  # when the launcher last heard of lines
        self.code = None  # what the launcher has been told
        self.word = b""  # the last one of the script
        self.script_ended = False  # and only MindSpore's clean-up is left
        self.scheduler_of, self.met = 0, False  # rank 0: its process, until it ends; have all ranks met?
        if "RANKS_LOG" in env:  # such as device%/train.log%: the folder and the file of a rank
            self.log = Path.cwd() / env.pop("RANKS_LOG").replace("%", self.rank)
            os.chdir(self.log.parent)
        binding.bind(env)
        self.scheduler = env.get("MS_ROLE") == "MS_SCHED"  # msrun starts it as it starts a rank; it is not one
        self.words, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env.update(UTF8, PYTHONUNBUFFERED="1", RANKS_WORDS=str(theirs.fileno()), RANKS_SAVING=str(HERE / "saving.py"))
        if not self.scheduler:
            env.update(RANKS_RANK=self.rank)
        self.script = subprocess.Popen([sys.executable, *script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[theirs.fileno()],
                                       preexec_fn=die_and_be_seen)  # noqa: PLW1509  # safe: there is one thread
        theirs.close()
        self.files = selectors.DefaultSelector()
        for file, hear in ((self.link, self.obey), (self.script.stdout, self.copy), (self.words, self.pass_on)):
            self.files.register(file, selectors.EVENT_READ, hear)

    def run(self):
        """Stay until the script has ended; this process then ends with its code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.end)
        for number in linux.SCRIPTS_OWN:
            signal.signal(number, lambda number, _: self.script.send_signal(number))
        self.tell(rank=int(self.rank), token=self.token, host=socket.gethostname(), pid=self.script.pid,
                  agent=os.getpid(), is_scheduler=self.scheduler)
        self.write(b"")  # the log is there from the start
        ended = False
        while not ended:
            ended = self.script.poll() is not None  # before the last look at what it wrote
            signal_of_end = self.scheduler_of and not ended and self.end_of_scheduler()
            for key, _ in self.files.select(0 if ended else 0.2):
                key.data(key.fileobj)
            if self.cut_off():
                self.end()
            if signal_of_end:
                self.miss_scheduler(signal_of_end)
        if self.rest:
            self.tell(lines=[self.rest.decode(errors="replace")])
        code = self.script.returncode
        if self.script_ended and code in (-signal.SIGSEGV, -signal.SIGABRT):
            said = f"MindSpore's clean-up crashed (signal {-code}) after the script had ended well"
            self.write(said.encode() + b"\n")
            self.tell(lines=[said])
            code = 0
        if self.scheduler and code < 0:
            self.write(f"the scheduler was ended by signal {-code}\n".encode())
        code = code if code >= 0 else 128 - code  # as in a shell
        self.tell(wrote=self.wrote, full=linux.is_full("."))
        self.tell(code=code)  # as notice() of the launcher knows it
        self.code = code
        self.await_receipt()
        if code:
            self.clear_away()  # after a good end what the script has started may be meant to stay
        os._exit(code)

    def tell(self, **what):
        """Tell the launcher something; end if it wants that, though it may not listen."""
        if self.scheduler:  # what it writes is in a log of its own
            what.pop("lines", None)
        data = json.dumps(what).encode() + b"\n" if what else b""
        try:
            while data:
                state = sum(state for _, state in self.room.poll(1000))
                if state & ~select.POLLOUT or self.cut_off():
                    self.end()
                if not state:
                    continue
                with contextlib.suppress(BlockingIOError):  # Linux is short of memory
                    data = data[self.link.send(data, socket.MSG_DONTWAIT):]
        except OSError:
            self.end()

    def await_receipt(self):
        """Wait until the launcher's machine has all that was told. If it never does, the network is down: then nobody
        else ends mpirun's daemon here.
        """
        end = time.monotonic() + 20
        while any(fcntl.ioctl(self.link, termios.TIOCOUTQ, bytes(4))) and time.monotonic() < end:
            if self.cut_off():
                end_orted()
                break
            if any(state & ~select.POLLOUT for _, state in self.room.poll(0)):  # the launcher has ended
                break
            time.sleep(0.02)

    def cut_off(self):
        """Has the launcher's machine answered nothing for 12 s? A launcher that does not read, as after Ctrl-Z, is not
        dead: its machine answers that there is no room, which TCP_USER_TIMEOUT would take for nothing.
        """
        about = struct.unpack("8B13I", self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60))
        retransmits, probes, unacknowledged, silent_ms = about[2], about[3], about[12], about[20]
        return silent_ms > 12000 and (retransmits if unacknowledged else probes) > 2

    def copy(self, pipe):
        """The script has written something: to the log, and to the launcher."""
        data = os.read(pipe.fileno(), 1 << 20)
        if not data:
            self.files.unregister(pipe)
        self.write(data)
        lines = take_lines(data, self.rest)
        if lines or time.monotonic() > self.told + 5:  # a bar that moves in its line is a sign of life, too
            self.told = time.monotonic()
            self.tell(lines=[line.decode(errors="replace") for line in lines])

    def write(self, data):
        """Write to the log."""
        try:
            if self.log and self.out == 1:
                self.out = open_log(self.log.name, self.rank)
            while data:  # a signal cuts a write short
                written = os.write(self.out, data)
                self.wrote, data = self.wrote + written, data[written:]
        except OSError as error:
            if self.out == 1 and error.errno == errno.EIO:
                self.end()  # mpirun, which reads it, is gone: the launcher says so
            self.fail(f"OSError: the log of rank {self.rank} cannot be written: {error.strerror}", 1)

    def fail(self, said, code):
        """The rank has failed, and its script does not know it."""
        self.tell(lines=[said], code=code)
        self.code = code
        self.end()

    def end_of_scheduler(self):
        """The number of the signal that has ended it; else 0."""
        stat = linux.stat_of(self.scheduler_of)
        return int(stat[49]) & 127 if stat and stat[0] == "Z" else 0

    def miss_scheduler(self, number):
        """A signal has ended it, and maybe rank 0, too. Once all have met, MindSpore ends ranks up to 20 s later."""
        how = f"process {self.scheduler_of} of rank 0, was ended by signal {number}"
        self.scheduler_of = 0
        if self.met:  # KILL: rank 0 ends itself, or Linux has ended the scheduler with it
            return number != signal.SIGKILL and self.tell(scheduler=how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.script.wait(1)
        return self.fail(f"MindSpore's scheduler, {how} before all ranks had met", 128 + number)

    def obey(self, link):
        """The launcher asks for something, or is gone."""
        for request in map(json.loads, take_lines(receive(link) or self.end(), self.asked)):
            if "look" in request:  # this would take too long here
                look = subprocess.Popen([sys.executable, HERE / "stacks.py", str(self.script.pid)],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        preexec_fn=linux.die_with_parent)  # noqa: PLW1509  # safe: there is one thread
                self.files.register(look.stdout, selectors.EVENT_READ, self.take_in)
            elif "signal" in request:
                self.script.send_signal(request["signal"])
            else:
                with contextlib.suppress(OSError):  # the script has ended
                    self.words.send(request["word"].encode())
                self.tell(told=request["word"])

    def take_in(self, pipe):
        """Where the script stands."""
        data = os.read(pipe.fileno(), 1 << 20)
        self.seen += data
        if not data:
            self.files.unregister(pipe)
            self.tell(seen=json.loads(self.seen or "null"))
            self.seen = b""

    def pass_on(self, words):
        """A word of the script for the launcher."""
        word = receive(words)
        if word.startswith(b"ended "):
            self.script_ended = True
            self.tell(weights=word[6:].decode())
        elif word in (b"leaving", b"released"):  # False: it waits for nobody
            self.tell(leaving=word == b"leaving")
        elif word in (b"joins", b"met"):
            self.met = self.met or word == b"met"
            self.tell(**{word.decode(): True})
        elif word.startswith(b"scheduler "):
            self.scheduler_of = int(word[10:])
        elif word:
            self.word = word
            self.tell(word=word.decode())
        else:
            self.files.unregister(words)

    def end(self, *by_signal):
        """End the script and this process."""
        if not by_signal:
            end_orted()
        elif self.code is None:  # by mpirun, or by somebody's kill
            with contextlib.suppress(OSError):  # no room, for one: the launcher does not read
                # The signal may have come in the middle of a message.
                self.link.send(b'\n{"ended": %d}\n' % by_signal[0], socket.MSG_DONTWAIT)
        self.clear_away()
        word = self.word  # it may not have been told
        with contextlib.suppress(OSError):  # there is no other word, or the launcher is gone
            while word and self.code is None:
                if word.startswith(b"kept "):
                    self.link.send(b"\n%s\n" % json.dumps({"word": word.decode()}).encode(), socket.MSG_DONTWAIT)
                word = self.words.recv(999, socket.MSG_DONTWAIT)
        os._exit(143 if self.code is None else self.code)

    def clear_away(self):
        """Free the memory of Open MPI, which a killed rank leaves, and end all that the script has started."""
        job = os.getenv("OMPI_MCA_ess_base_jobid", "0")  # noqa: SIM112  # its real name
        for segment in Path("/dev/shm").glob(f"vader_segment.*.{os.getuid()}.{int(job):x}.{self.rank}"):
            with contextlib.suppress(OSError):  # mpirun was quicker
                segment.unlink()
        end_session(self.script)  # last, for mpirun waits a second only before it kills this process


def take_lines(data, rest):
    """The lines that data ends, bytes without \\n; rest, a bytearray, holds what is no whole line yet."""
    *lines, last = data.split(b"\n")
    if lines:
        lines[0] = bytes(rest) + lines[0]
        rest.clear()
    rest += last  # in its place: to join them anew each time would take a long line's length squared
    return lines


def receive(link):
    """What has come; nothing at the end of the connection."""
    try:
        return link.recv(1 << 20)
    except OSError:
        return b""


def connected(link, hear=None):
    """Is the other end still there? hear is called with what it has sent; without it, that is lost."""
    try:
        link.setblocking(False)
        while data := link.recv(1 << 20):
            if hear:
                hear(data)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def open_log(name, rank):
    """Open a rank's log, such as train.log3, and write its environment beside it."""
    write_environment(name.replace("train", "env").replace(f".log{rank}", f"{rank}.log"))
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


def end_orted():
    """End mpirun's daemon of this machine, which may miss mpirun's end for minutes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{os.getppid()}/comm").read_text() == "orted\n":
                os.kill(os.getppid(), number)
                time.sleep(2)


def end_session(child):
    """End a rank's script with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 2
        for pid in linux.session_of(child.pid):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, number)
        while linux.session_of(child.pid) and time.monotonic() < deadline:
            child.poll()
            time.sleep(0.02)


def write_environment(file):
    """Write the variables that matter to a rank; not all, some may be secrets."""
    kept = re.compile("(RANK|DEVICE|MS|HCCL|ASCEND|GLOG|GRAPH_OP|OMP|ONEDNN|CUDA|NCCL)_|"
                      "(DATA_PATH|PATH|PYTHONPATH|LD_LIBRARY_PATH|LAUNCH_DIR)$")
    Path(file).write_text("".join(f"{name}={os.environ[name]}\n" for name in sorted(os.environ) if kept.match(name)),
                          encoding="utf-8", errors="surrogateescape")


def die_and_be_seen():
    """The same, for a script; and its parent with all that it starts may read its memory, as py-spy must."""
    linux.die_with_parent()
    ctypes.CDLL(None).prctl(0x59616D61, os.getppid(), 0, 0, 0)  # PR_SET_PTRACER


def end_when_dead(link, in_time=True):
    """Have Linux end a connection after 12 s without a sign of life of the other machine; in_time: also where something
    is on its way there, or the other end has no room for it. On one machine nothing is needed.
    """
    link.settimeout(None)
    with contextlib.suppress(OSError):  # the other end is closed already
        if link.getpeername()[0] == link.getsockname()[0]:
            return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 4), ("KEEPINTVL", 2), ("KEEPCNT", 4), ("USER_TIMEOUT", 12000 * in_time)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


if __name__ == "__main__":
    Agent(sys.argv[2:]).run()
