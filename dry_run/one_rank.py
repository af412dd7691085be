"""Run one rank of a dry run: a training script, unmodified, in MindSpore's simulation.

fork_ranks.py calls `run` in a process of its own. The script compiles its graphs as it would on an Ascend card.
Running a graph is replaced by returning zeros of the shapes the graph promises, and the process ends when a graph is
about to run for the (runs + 1)th time: by then one step has been compiled whole, however many graphs it is made of.
Nothing is computed, so no data is read ahead, either: of each data set only the shapes and types are asked for, by
one sample. What was seen goes to a file as JSON, the graphs to a folder.
"""
import contextlib
import ctypes
import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import graph_ir
import mindspore as ms
import numpy as np
from layouts import Slices, parameters_of
from mindspore import _c_expression
from mindspore.communication import GlobalComm
from mindspore.dataset.engine import datasets
from modes import (
    OPTIMIZERS,
    describe,
    look_at_callbacks,
    notes_of,
    optimizer_alone,
    pipeline_by_hand,
    rank_of_another,
    stage_that_is_not,
)

facts = {"device": ms.get_context("device_target"), "plugin_error": "", "initialised": False, "graphs": [],
         "evaluated": [], "groups": {}, "layouts": {}, "trained": [], "layerwise": [], "network": False,
         "notes": [], "error": None}
outputs, runs = {}, {}  # of each graph, by its phase
slices = Slices()
REALLY_EXIT = os._exit
OWN = (__file__, str(Path(__file__).with_name("fork_ranks.py")), "<string>")
FRONT_END = {"MS_DEV_PRECOMPILE_ONLY": "1"}  # after "validate", the graph that is read, comes nothing more to report


def finish():
    """Write the facts and end at once: MindSpore's own end would wait for devices."""
    if job.failed and not facts["error"]:
        facts["error"] = describe(job.failed, OWN)
    facts["graphs"] = facts["graphs"] or facts["evaluated"]
    facts["initialised"] = bool(GlobalComm.INITED)
    facts["device"] = ms.get_context("device_target")
    optimizers = [cell for cell in gc.get_objects() if issubclass(type(cell), OPTIMIZERS)]
    facts["trained"] = sorted({parameter.name for cell in optimizers for parameter in cell.parameters
                               if not parameter.param_info.is_pipeline_shared_param})  # an earlier stage's, sent here
    facts["layerwise"] = sorted({parameter.name for cell in optimizers for parameter in cell.get_parameters()
                                 if parameter.layerwise_parallel})  # and its momentum
    draft = job.file.with_suffix(".part")
    draft.write_text(json.dumps(facts))
    draft.rename(job.file)  # whole or not at all
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script has closed it
            stream.flush()
    REALLY_EXIT(1 if facts["error"] else 0)


def end_script(code):
    """In place of os._exit(), by which ranks.leave() ends a script: what was seen is kept."""
    if os.getpid() != job.pid:  # a process that the script forked
        REALLY_EXIT(code)
    sys.exit(code)


def zeros(tree):
    """What a graph returns, as zeros: nested tuples of tensors and numbers."""
    if tree and not isinstance(tree[0], str):
        return tuple(zeros(part) for part in tree)
    if not tree:
        return ()
    dtype, shape = tree
    if dtype not in graph_ir.BYTES:
        return None
    return ms.Tensor(np.zeros([abs(dim) for dim in shape], np.float32), getattr(ms, dtype.lower()))


def run_graph(phase):
    """Stand in for one run of a graph."""
    runs[phase] = runs.get(phase, 0) + (not job.evaluating)
    if runs[phase] > job.runs:
        finish()
    return zeros(outputs.get(phase, ()))


def watch(executor):
    """Note the graphs that an executor class compiles, and let it run none."""
    compile_graph = executor.compile

    def compile_and_note(self, obj, args, kwargs, phase, *rest):
        if wrong := optimizer_alone(obj) or pipeline_by_hand(obj) or stage_that_is_not(obj) or rank_of_another():
            job.failed = RuntimeError(wrong)
            raise job.failed
        ms.set_context(enable_compile_cache=False)  # a graph of an earlier run tells nothing of this one
        before = set(job.graphs.rglob("*.ir"))
        os.environ.update(FRONT_END if job.front_end else {})
        try:
            done = compile_graph(self, obj, args, kwargs, phase, *rest)
        except Exception as error:
            job.failed = error  # should the script catch it
            raise
        else:
            job.failed = None
        finally:
            for name in FRONT_END if job.front_end else ():
                del os.environ[name]
        layouts = self.get_parameter_layout(phase) if hasattr(self, "get_parameter_layout") else {}
        written = sorted(set(job.graphs.rglob("*.ir")) - before)
        planned = "".join(graph_ir.read(path) for path in written if "step_parallel_end" in path.name)
        for path in written:
            if "_validate_" in path.name:
                facts["evaluated" if job.evaluating else "graphs"].append(str(path))
                facts["network"] = facts["network"] or not issubclass(type(obj), OPTIMIZERS)
                text = graph_ir.read(path)
                facts["notes"] += notes_of(obj, text, planned, layouts)
                outputs[phase] = graph_ir.parse(text).output
        facts["layouts"].update(layouts)
        rank = ms.communication.get_rank() if GlobalComm.INITED else 0
        if wrong := slices.wrong(parameters_of(obj), layouts, rank):
            job.failed = RuntimeError(wrong)
            raise job.failed
        return done

    executor.compile = compile_and_note
    executor.__call__ = lambda self, args, phase: run_graph(phase)


def watch_functions(executor):
    """Functions under `jit` run through the PyNative executor, which is told the graph just before."""
    names = ("set_jit_compile_phase", "set_jit_compile_status")  # 2.10, 2.7
    setter = next(name for name in names if hasattr(executor, name))
    set_phase = getattr(executor, setter)
    current = [""]

    def note_phase(self, *args):
        current[0] = args[-1]
        return set_phase(self, *args)

    setattr(executor, setter, note_phase)
    executor.grad_jit = lambda self, *args: run_graph(current[0])


def note_groups(manager):
    """Note the communication groups that a script makes by hand."""
    create_group = manager.create_group

    def create_and_note(self, name, ranks, *rest):
        facts["groups"][name] = list(ranks)
        return create_group(self, name, ranks, *rest)

    manager.create_group = create_and_note


def feed_nothing():
    """With data sink a pipeline would fill a queue that nobody empties, and a thread wait for it without rest."""
    transfer = datasets.TransferDataset

    def wanted(node):
        return getattr(node, "offload", None) or any(map(wanted, node.children))

    def offload_model(self):  # the operators of a pipeline that become part of the graph
        if not (wanted(self) or ms.dataset.config.get_auto_offload()):
            return SimpleNamespace(transform_list=[])
        return datasets._ToDevice(self, 1).get_offload_model(self.column_name)

    transfer.send = lambda self, num_epochs=-1: None
    transfer.get_offload_model = offload_model
    transfer.get_data_info = lambda self: (self.children[0].output_types(), self.children[0].output_shapes())
    transfer.get_send_info = lambda self: []
    transfer.get_mbuf_queue_size = lambda self: 0
    ms.dataset.config.set_prefetch_size(1)
    ms.dataset.config.set_num_parallel_workers(1)


def save_nothing():
    """Nothing is trained: a file of it would pass for trained, and take the place of one that is."""
    sys.modules["mindspore.train.serialization"]._exec_save = lambda *args, **kwargs: None
    ms.train.ModelCheckpoint._save_ckpt = lambda *args, **kwargs: None  # it deletes the oldest, too


def evaluate_one_batch():
    """Model.eval(), which many scripts call before they train, is no step."""
    evaluate = ms.Model.eval

    def evaluate_one(self, valid_dataset, *args, **kwargs):
        job.evaluating, parents = True, [*valid_dataset.parent]
        try:
            return evaluate(self, valid_dataset.take(1), *args, **kwargs)
        finally:
            job.evaluating, valid_dataset.parent = False, parents

    ms.Model.eval = evaluate_one


def run(file, graphs, options):
    """Run a script as `python SCRIPT args ...` would, and end this process.

    Args:
        file: the Path for what was seen.
        graphs: the Path where MindSpore saves its graphs.
        options: dict of `script`, `args`, `runs`, and `front_end`: is that all of the compiler that can run here?
    """
    global job
    job = SimpleNamespace(file=file, graphs=graphs, runs=options["runs"], front_end=options["front_end"], failed=None,
                          evaluating=False, pid=os.getpid())
    np.random.seed()  # the ranks' processes begin as copies of one
    if facts["device"] != "Ascend":  # MindSpore's choice when it can load the plugin
        try:
            ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "plugin" / "libmindspore_ascend.so.2"))
        except OSError as error:
            facts["plugin_error"] = str(error)
            finish()
    for name in ("GraphExecutor_", "JitExecutor_"):
        if hasattr(_c_expression, name):
            watch(getattr(_c_expression, name))
    watch_functions(_c_expression.PyNativeExecutor_)
    note_groups(_c_expression.CollectiveManager)
    feed_nothing()
    evaluate_one_batch()
    save_nothing()
    look_at_callbacks(RuntimeError)
    script = options["script"]
    sys.argv = [script, *options["args"]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    for name in ("graph_ir", "layouts", "modes", "one_rank"):
        del sys.modules[name]  # the script may have modules of these names
    os._exit = end_script
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")  # it may change the folder
    except SystemExit as stop:
        # After a graph has run, an exit code judges numbers, and none are computed here.
        if stop.code not in (None, 0) and not facts["graphs"]:
            facts["error"] = {"type": "SystemExit", "message": f"the script ended itself with {stop.code!r}",
                              **dict(zip(("file", "line", "code"), graph_ir.user_frame(stop, OWN)))}
    except BaseException as error:  # noqa: BLE001 - whatever a user's script raises is what we report
        traceback.print_exc()
        judges = runs and isinstance(error, (ArithmeticError, AssertionError))  # numbers, too
        if error is job.failed or not judges:
            facts["error"] = describe(error, OWN)
    finally:
        os._exit = REALLY_EXIT
    finish()
