"""One rank of a computed run: the script in an ordinary CPU process, its parallel graphs planned for Ascend.

When a graph is compiled in semi_auto_parallel or auto_parallel, MindSpore is told for that moment that its device
is an Ascend card and that the front end is enough (no kernels). So it plans as on a card: it cuts the parameters,
inserts the collectives, and refuses what it would refuse there. The graph is taken out as MindIR and computed by
run_plan.py.
"""
import collections
import contextlib
import ctypes
import dis
import functools
import gc
import inspect
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import mindspore as ms
from mindspore import Parameter, _c_expression, context, nn
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import management
from mindspore.train import Model

import graph_ir
import plan
import run_plan
from collectives import Collectives, note_of_job
from layouts import Slices, parameters_of
from modes import (
    OPTIMIZERS,
    NewOptimizer,
    decides_while_it_runs,
    describe,
    interleaved,
    look_at_callbacks,
    nothing_compiled,
    notes_of,
    optimizer_alone,
    pipeline_by_hand,
    planned_mode,
    rank_of_another,
    slices_of_arguments,
    stage_that_is_not,
)
from neighbour import of_tools
from plan import PlanError

GROUP = "hccl_world_group"


class Computer:
    """Stands between MindSpore's executors and the script."""

    def __init__(self):
        self.computations, self.links, self.phase = {}, None, ""
        self.replicas, self.slices = {}, Slices()
        self.joined = False  # does the script leave it to this program to connect the ranks?
        self.lazy = False  # has it a cell with @lazy_inline?
        self.refusal = None  # what MindSpore raised where it could not plan a graph
        self.said = set()

    def say(self, line):
        """One line for the user, by rank 0, once."""
        if line not in self.said and management.get_rank() == 0:
            print(line, flush=True)
        self.said.add(line)

    def connect(self):
        """Connect to the other ranks, at the first plan."""
        if self.links is None:
            if not management.GlobalComm.INITED:
                raise PlanError("a parallel graph is compiled before init(); call init() first")
            self.links = Collectives(management.get_rank(), management.get_group_size())
            # what a card's world is called; here a name for MindSpore's own books
            _c_expression.CollectiveManager.get_instance().create_group(GROUP, list(range(self.links.rank_size)))

    @contextlib.contextmanager
    def as_on_ascend(self, folder):
        """MindSpore's front end plans for an Ascend card, and stops there; the graph as text goes to `folder`."""
        context = MSContext.get_instance()
        changed = {"MS_DEV_PRECOMPILE_ONLY": "1", "MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS_PATH": str(folder),
                   "MS_DEV_DUMP_IR_PASSES": "validate,step_parallel"}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        context.set_param(ms_ctx_param.device_target, "Ascend")
        try:
            yield
        finally:
            context.set_param(ms_ctx_param.device_target, "CPU")
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def plan_graph(self, executor, compile_graph, obj, phase, arguments):
        """Plan one graph and prepare its computation; returns what MindSpore's compile returns."""
        self.connect()
        if wrong := (optimizer_alone(obj) or pipeline_by_hand(obj) or stage_that_is_not(obj)
                     or decides_while_it_runs(obj) or interleaved(self.lazy)):
            raise PlanError(wrong, by_all=True)
        if wrong := rank_of_another():
            raise PlanError(wrong)
        if phase.startswith("export"):
            self.say("computed on CPU: ms.export writes what this plan has each rank compute, with its slices of data "
                     "and weights; for a network that predicts, load the checkpoints in one process, and export there")
        self.say(f"MindSpore has no {planned_mode()} on CPU: its Ascend plan is computed here")
        if self.lazy:
            self.say("computed on CPU: @lazy_inline, as one graph; a dry run compiles it as written")
        # In mpirun's folder, which goes with it even if this process is killed.
        with tempfile.TemporaryDirectory(prefix="ascend_plan_", dir=os.getenv("PMIX_SERVER_TMPDIR")) as folder:
            with self.as_on_ascend(folder):
                try:
                    done = compile_graph(executor, obj, *arguments)
                except Exception as error:
                    self.refusal = error
                    raise
            files = sorted(Path(folder).rglob("*_validate_*.ir"))
            text = graph_ir.read(files[-1]) if files else ""
            if where := graph_ir.python_in(text):  # MindSpore would raise
                raise PlanError(f"a part of this graph is Python that runs while the graph does ({where}), which is "
                                "not computed; use MindSpore's operators there, and for the sparse gradients of "
                                "nn.EmbeddingLookup nn.Embedding",
                                by_all=ms.get_auto_parallel_context("pipeline_stages") == 1)
            model = executor.get_func_graph_proto(phase, "mind_ir", False)
            layouts = executor.get_parameter_layout(phase) if hasattr(executor, "get_parameter_layout") else {}
            if wrong := self.slices.wrong(parameters_of(obj), layouts, self.links.rank):
                raise PlanError(wrong)
            found = plan.read(model, phase, layouts, text)
            planned = "".join(map(graph_ir.read, Path(folder).rglob("*step_parallel_end_*.ir")))
            found.notes = notes_of(obj, text, planned, layouts)
            # Now: the class AutoParallel takes its settings back after a compilation.
            found.stages, found.slices = ms.get_auto_parallel_context("pipeline_stages"), slices_of_arguments()
        keep = os.environ.get("COMPUTE_KEEP")
        if keep:
            Path(keep, f"rank_{self.links.rank}_graph_{len(self.computations)}.mindir").write_bytes(model)
        del model
        gc.collect()
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what planning took, hundreds of MB for ResNet-50
        computation = run_plan.Computation(found, self.links, self.parameters(obj, found),
                                           len(self.computations) + 1)
        self.computations[phase] = computation
        self.replicas.update(computation.replicas())
        notes = computation.notes()
        if issubclass(type(obj), nn.TrainOneStepCell):
            notes += computation.changed_twice()
        for note in notes:
            self.say(f"computed on CPU: {note}")
        return done

    def finish(self):
        """The end of all ranks: compare what they hold in common, then end MPI. Returns the exit code."""
        size, wrong = int(os.getenv("OMPI_COMM_WORLD_SIZE", "1")), ""
        if size > 1 and not management.GlobalComm.INITED:
            wrong = (f"the script never called mindspore.communication.init(), so each of the {size} processes ran "
                     "alone; call it before the network is built")
        elif size > 1 and not self.computations:
            wrong = nothing_compiled()
            if ms.get_auto_parallel_context("parallel_mode") == "stand_alone":
                self.say("compute.py: the script asks for no parallel mode (set_auto_parallel_context), so no plan was "
                         "computed: the ranks share what the script itself has them exchange")
        if wrong:
            show(PlanError(wrong, by_all=True), int(os.environ["OMPI_COMM_WORLD_RANK"]))
            return 1
        if self.links is None and not self.joined:  # the script has seen to it that its ranks end together
            return 0
        try:
            self.links = self.links or Collectives(management.get_rank(), management.get_group_size())
            trouble = run_plan.unlike_replicas(self.replicas, self.links)
            if trouble and self.links.rank == 0:
                print(f"compute.py: {trouble}", file=sys.stderr, flush=True)
            self.links.finish()
        except PlanError as error:
            show(error, self.links.rank)
            return 1
        return int(bool(trouble))

    @staticmethod
    def parameters(obj, found):
        """The script's Parameters by name; of several of one name that of the optimizer that a function uses."""
        known = parameters_of(obj)
        for _, cell in obj.cells_and_names() if hasattr(obj, "cells_and_names") else ():
            if issubclass(type(cell), NewOptimizer):  # it keeps its learning rates, of one name in all, in lists
                known.update((value.name, value) for group in cell.param_groups for value in group.values()
                             if issubclass(type(value), Parameter))
        wanted = set(found.parameters.values()) - known.keys()
        named, own = collections.defaultdict(dict), used_by(obj)
        for item in gc.get_objects() if wanted else ():
            if issubclass(type(item), Parameter) and item.name in wanted:
                named[item.name][id(item)] = item
        for name, items in named.items():
            meant = [item for key, item in items.items() if len(items) == 1 or key in own]
            if len(meant) != 1:
                raise PlanError(f"the script has two parameters {name!r}, and the plan wants one")
            known[name] = meant[0]
        for parameter in known.values():
            if parameter.has_init:
                parameter.init_data()
        return known

    def watch(self, executor):
        """Plan what an executor class compiles in a parallel mode, and compute it."""
        compile_graph, run_graph = executor.compile, executor.__call__

        def compile_or_plan(this, obj, args, kwargs, phase, *rest):
            ms.set_context(enable_compile_cache=False)  # it would take a graph of another plan
            if not planned_mode():
                return compile_graph(this, obj, args, kwargs, phase, *rest)
            return self.plan_graph(this, compile_graph, obj, phase, (args, kwargs, phase, *rest))

        def run_or_compute(this, args, phase):
            if phase in self.computations:
                return self.computations[phase](*args)
            return run_graph(this, args, phase)

        executor.compile = compile_or_plan
        executor.__call__ = run_or_compute

    def watch_functions(self, executor):
        """Functions under `jit` run through the PyNative executor, which is told the graph just before."""
        setter = next(name for name in ("set_jit_compile_phase", "set_jit_compile_status") if hasattr(executor, name))
        set_phase, run_graph = getattr(executor, setter), executor.grad_jit

        def note_phase(this, *args):
            self.phase = args[-1]
            return set_phase(this, *args)

        def run_or_compute(this, *args):
            if self.phase in self.computations:
                return self.computations[self.phase](*args)
            return run_graph(this, *args)

        setattr(executor, setter, note_phase)
        executor.grad_jit = run_or_compute


def used_by(function):
    """The parameters, as a set of their id, of the optimizers that a function takes from its module or around it."""
    if not inspect.isfunction(function):
        return set()
    values = [function.__globals__.get(step.argval) for step in dis.get_instructions(function)
              if step.opname == "LOAD_GLOBAL"]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            values.append(cell.cell_contents)
    return {id(one) for value in values if issubclass(type(value), OPTIMIZERS) for one in parameters_of(value).values()}


def be_a_cpu(computer):
    """This process is MindSpore on CPU, also where a script asks for an Ascend card by name."""
    MSContext.get_instance().register_check_env_callback(lambda *_: None)  # it would look for the rest of CANN
    MSContext.get_instance().register_set_env_callback(lambda *_: None)
    ms.set_context(device_target="CPU")
    NewOptimizer.__repr__ = object.__repr__  # MindSpore asks for it while it plans, and it would compute on the card
    of_tools("convolutions.py", "take_over")()
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # AVX-512's plain convolutions are slow
    # Both ways to ask for a device end here; a card's number means nothing here.
    set_target = context._Context.set_device_target
    context._Context.set_device_target = lambda this, target: set_target(this, "CPU")
    if hasattr(ms, "set_device"):
        ms.set_device = lambda device_target, device_id=None: None
    names = nn.Cell.cell_init_args

    def name_cell(cell, name):
        """@lazy_inline names cells that keep a graph of their own; the numbers are the same when all is one graph."""
        computer.lazy = computer.lazy or name.startswith("lazy_inline_")
        names.fset(cell, "" if name.startswith("lazy_inline_") else name)

    nn.Cell.cell_init_args = names.setter(name_cell)
    train = Model.train

    @functools.wraps(train)
    def train_without_sink(model, *args, **kwargs):
        bound = inspect.signature(train).bind(model, *args, **kwargs)
        if bound.arguments.get("dataset_sink_mode") and planned_mode():
            computer.say("computed on CPU: dataset_sink_mode=True, without sink")
            bound.arguments.update(dataset_sink_mode=False)
        return train(*bound.args, **bound.kwargs)

    Model.train = train_without_sink
    look_at_callbacks(lambda wrong: PlanError(wrong, by_all=True))


def join_cluster(computer):
    """Where mpirun started this rank and nobody has told MindSpore of the others: tell it."""
    init = management.init

    def join_and_init(backend_name=None):
        if "OMPI_COMM_WORLD_RANK" in os.environ and "MS_ROLE" not in os.environ:
            of_tools("find_others.py", "take_over")()
            set_cluster()
            computer.joined = True
        elif not {"OMPI_COMM_WORLD_RANK", "MS_ROLE"} & os.environ.keys():
            raise PlanError("no mpirun has started this rank: compute.py -n N SCRIPT starts N of them, or mpirun -n N "
                            "python compute.py --rank SCRIPT")
        return init() if backend_name in ("hccl", "nccl", None) else init(backend_name)

    management.init = ms.communication.init = join_and_init


def set_cluster():
    """Set MindSpore's variables of a cluster from mpirun's; rank 0 starts the scheduler."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] != os.environ["OMPI_COMM_WORLD_SIZE"]:
        raise PlanError("the ranks run on several hosts: the script must set up MindSpore's cluster itself (MS_ROLE)")
    os.environ.update(MS_WORKER_NUM=os.environ["OMPI_COMM_WORLD_SIZE"], MS_SCHED_HOST="127.0.0.1",
                      MS_NODE_ID=str(rank))
    file = note_of_job("compute_scheduler_port")
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            os.environ["MS_SCHED_PORT"] = str(probe.getsockname()[1])
        start_scheduler()
        draft = file.with_suffix(".draft")
        draft.write_text(os.environ["MS_SCHED_PORT"])
        draft.replace(file)
    else:
        deadline = time.monotonic() + 60
        while not file.exists():
            time.sleep(0.02)
            if time.monotonic() > deadline:
                raise PlanError("rank 0 did not start MindSpore's scheduler within 60 s")
        os.environ["MS_SCHED_PORT"] = file.read_text()
    os.environ["MS_ROLE"] = "MS_WORKER"


def start_scheduler():
    """MindSpore's scheduler, a copy of this process that ends with it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.environ["MS_ROLE"] = "MS_SCHED"
        try:
            management.init()
        finally:
            REALLY_EXIT(0)


REALLY_EXIT, SELF = os._exit, os.getpid()


def leave(computer, code):
    """End this process at once, after MPI's own end where all went well; MindSpore's clean-up sometimes crashes."""
    if os.getpid() == SELF:  # not in a process that the script forked
        flush()
        code = code or computer.finish()
        flush()
    REALLY_EXIT(code)


def flush():
    """Write what the standard streams hold back, unless the script has closed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def show(error, rank, refusal=None):
    """What cannot be planned (refusal: MindSpore's error) or computed is a sentence; other errors are the script's."""
    cause = error
    while cause is not None and not isinstance(cause, PlanError):
        cause = cause.__cause__ or cause.__context__
    if error is refusal:
        about = describe(error, (str(Path(__file__).parent), "<"))
        print(f"compute.py: MindSpore cannot plan this for Ascend (its own lines above, if any, say more): "
              f"{about['type']}: {about['message']}", file=sys.stderr)
        if about["file"]:
            print(f"{about['file']}:{about['line']}: {about['code']}", file=sys.stderr)
        if about["hint"]:
            print(about["hint"], file=sys.stderr)
        sys.stderr.flush()
    elif cause is None:
        traceback.print_exception(type(error), error, error.__traceback__)
    elif cause.by_all and rank != 0:
        time.sleep(2)  # mpirun ends all ranks with the first: let rank 0 tell it
    else:
        print(f"compute.py: {cause}", file=sys.stderr, flush=True)


def main(script, args):
    """Run the script as `python SCRIPT args ...` would, and end this process."""
    computer = Computer()
    finish_writing = of_tools("ending.py", "finish_writing")
    be_a_cpu(computer)
    join_cluster(computer)
    os._exit = lambda code: leave(computer, code)
    for name in ("GraphExecutor_", "JitExecutor_"):
        if hasattr(_c_expression, name):
            computer.watch(getattr(_c_expression, name))
    computer.watch_functions(_c_expression.PyNativeExecutor_)
    for name in ("compute", "computed_rank", "plan", "run_plan", "collectives", "meeting", "graph_ir", "layouts",
                 "modes", "stand_ins"):
        sys.modules.pop(name, None)  # the script may have modules of these names
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 0
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")  # it may change the folder
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  # whatever a script raises ends it
        show(error, management.get_rank() if management.GlobalComm.INITED else 0, computer.refusal)
        code = 1
    finish_writing(alone=bool(code))
    leave(computer, code)
