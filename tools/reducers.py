"""Looks at how gradients will be averaged, where MindSpore takes settings without a word that make the mean wrong; and
after the training, on CPU, whether all ranks hold the same weights.
"""

import contextlib
import functools
import json
import os
import re
import runpy
import sys
import weakref
import zlib
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, bfloat16, float16, float32, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.experimental.optim import Optimizer as NewOptimizer
from mindspore.ops import functional
from mindspore.parallel._auto_parallel_context import auto_parallel_context

OPTIMIZERS = weakref.WeakSet()  # those that scripts have made, and still hold
LAST = []  # of them, held here, too: the function that made it may have returned
SEEN = set()  # what the script has made: "reducer", "group" (that of some ranks), "collective", "sum" (of gradients)
SET = {}  # id of a Parameter: the checksum of what set_data() has put into it since the first step, as a checkpoint's
ALIKE = runpy.run_path(str(Path(__file__).with_name("alike.py")))
FUNCTIONS = re.compile(r"(inner|dist)_comm_(all_reduce|all_gather|reduce_scatter|broadcast)\w*_op")
BLOCK = 1 << 16  # numbers that are looked at together


def refuse(parameters, mean, degree, size):
    """End with a sentence if the gradients of these parameters would not become their mean over all ranks."""
    settings = auto_parallel_context()
    mode, stages = settings.get_parallel_mode(), settings.get_pipeline_stages()
    if mode not in ("data_parallel", "hybrid_parallel"):
        return
    alone = [parameter.name for parameter in parameters if parameter.param_info.is_in_pynative_shard]
    if alone:
        sys.exit(f"shard() of a cell switches off the exchange of gradients, here those of {len(alone)} parameters "
                 f"({alone[0]}, ...): each rank would train alone. Leave it out in {mode}")
    if stages > 1:
        sys.exit(f"pipeline_stages={stages} makes gradients wrong in {mode}; leave it out (a pipeline is trained in "
                 "semi_auto_parallel or auto_parallel)")
    if mean and degree not in (None, size) and settings.get_device_num_is_set() and degree == settings.get_device_num():
        sys.exit(f"device_num={degree} of set_auto_parallel_context is not the number of ranks, {size}, by which "
                 "gradients are to be divided; leave it out")


def take_over():
    """Have nn.DistributedGradReducer, which Model.train makes, too, look first."""
    def make(self, parameters, mean=None, degree=None, *more, made=nn.DistributedGradReducer.__init__, **named):
        parameters = parameters if isinstance(parameters, (list, tuple)) else list(parameters)
        group = named.get("group", more[1] if len(more) > 1 else GlobalComm.WORLD_COMM_GROUP)
        size = get_group_size(group)
        averaged = auto_parallel_context().get_gradients_mean() if mean is None else mean
        refuse(parameters, averaged, degree, size)
        made(self, parameters, mean, degree, *more, **named)
        SEEN.add("reducer" if group == GlobalComm.WORLD_COMM_GROUP else "group")
        # A multiple may be meant: of gradients that are accumulated.
        if averaged and degree and degree % size and get_rank() == 0:
            print(f"warning: gradients are summed over {size} ranks and divided by {degree}, the degree given to "
                  f"DistributedGradReducer; their mean wants {size}", flush=True)
        by_default = mean is None or degree is not None  # a degree, as Model gives, is for a mean
        in_data_parallel = auto_parallel_context().get_parallel_mode() == "data_parallel"
        if in_data_parallel and by_default and not averaged and size > 1 and get_rank() == 0 and "sum" not in SEEN:
            SEEN.add("sum")
            print(f"warning: gradients are summed over {size} ranks, not averaged, which is right only if the loss is "
                  f"a sum, or divided by {size} already; else give gradients_mean=True to set_auto_parallel_context",
                  flush=True)

    nn.DistributedGradReducer.__init__ = make
    for kind in ops.AllReduce, ops.ReduceScatter:
        after(kind, "__init__", keep_apart)
    after(ops.AllReduce, "__init__", keep_out)
    for name in "nn.optim.optimizer", "nn.optim.thor", "experimental.optim.optimizer":
        module = sys.modules.get(f"mindspore.{name}")
        if isinstance(getattr(module, "op_add", None), ops.AddN):
            module.op_add = ADDN


def keep_apart(collective):
    """Of two collectives of one tensor in a graph MindSpore makes one, but not where there may be side effects. That is
    wrong where one adds up and the other takes the maximum; and for two weights with one gradient, as the biases of an
    nn.LSTM: it adds the weight decay of the first before the sum, and the second gets a sum for a mean.
    """
    collective.add_prim_attr("side_effect_hidden", True)


def keep_out(_):
    """Have two tensors added by Add where MindSpore takes AddN, as for two gradients of one value: of
    AddN((AllReduce(x) * y, z)) it makes AllReduce(x + z) * y, which is right for a weight decay only, and only where y
    is 1 / N. Autodiff in a planned mode is left as it is; there dry_run/ tells of it.
    """
    if auto_parallel_context().get_parallel_mode() not in ("semi_auto_parallel", "auto_parallel"):
        functional.addn = ops.addn = ADDN


def make_addn(plain, kinds):
    """Returns a function, for graphs, too, which look for names here in its closure only: the sum of some tensors, as
    ever but for two of these kinds.
    """
    def addn(values):
        return values[0] + values[1] if len(values) == 2 and values[0].dtype in kinds else plain(values)

    addn.__module__ = functional.__name__  # they want one that can be imported, and this file is none
    return addn


ADDN = make_addn(ops.AddN(), (float16, float32, bfloat16))


def after(kind, method, do):
    """Have a method of a class do(self) in the end."""
    as_ever = getattr(kind, method)

    @functools.wraps(as_ever)
    def wrapped(self, *given, **named):
        result = as_ever(self, *given, **named)
        do(self)
        return result

    setattr(kind, method, wrapped)


def take_note():
    """Note what a script makes that tells whether all ranks should hold the same weights."""
    def hold(optimizer):
        OPTIMIZERS.add(optimizer)
        LAST[:] = [optimizer]

    for kind in (nn.Optimizer, NewOptimizer):
        after(kind, "__init__", hold)
    for kind in (ops.AllReduce, ops.AllGather, ops.ReduceScatter, ops.Broadcast):
        after(kind, "__init__", lambda _: SEEN.add("collective"))
    # What the functions of these modules call.
    modules = ("mindspore.communication.comm_func", "mindspore.mint.distributed.distributed")
    for module in filter(None, map(sys.modules.get, modules)):
        for kind in {type(value) for name, value in vars(module).items() if FUNCTIONS.fullmatch(name)}:
            after(kind, "__call__", lambda _: SEEN.add("collective"))
    set_data = Parameter.set_data

    @functools.wraps(set_data)
    def set_and_note(self, *given, **named):
        result = set_data(self, *given, **named)
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of a type that NumPy lacks
            if self.shape and not self.has_init and any(map(has_stepped, OPTIMIZERS)):  # a number may be a rate
                SET[id(self)] = checksum(self)
        return result

    Parameter.set_data = set_and_note


def has_stepped(optimizer):
    """Has it, as far as it can be told?"""
    steps = getattr(optimizer, "global_step", None)
    return steps is None or bool(steps.asnumpy().any())


def checksum(parameter):
    """Of some numbers of a parameter; training changes nearly all."""
    values = parameter.asnumpy().ravel()
    return zlib.crc32(np.ascontiguousarray(values[::len(values) // 4096 + 1]))


def trained():
    """What the optimizers train."""
    return {id(one): one for optimizer in OPTIMIZERS for one in optimizer.parameters}.values()


def weights():
    """Of trained(): the norm, a sum that tells two sets of weights apart, and one of their shapes."""
    norm, seen, network = 0.0, 0.0, 0
    wave = np.cos(np.arange(BLOCK))  # of a difference a product with it sees 0.7 of the norm, on the average
    for one in trained():
        values = one.asnumpy().ravel()
        if one.layerwise_parallel or values.dtype.kind == "c":
            continue
        number = zlib.crc32(f"{one.name} {one.shape}".encode())
        network += number >> 16
        for start in range(0, values.size, BLOCK):
            part = values[start:start + BLOCK].astype(np.float64)
            norm += part @ part
            number = number * 69069 % (1 << 32)  # two layers or blocks that have changed places count as others
            seen += part @ wave[:part.size] * (1 + number / (1 << 32))
    return norm ** 0.5, seen, network


def own():
    """Of this rank what tools/alike.py compares."""
    mode = auto_parallel_context().get_parallel_mode()
    try:
        with np.errstate(all="ignore"):
            # Whatever is meant where ranks exchange by hand, or one has loaded weights since the training. But in data
            # parallel a collective without a reducer is for the loss that is shown.
            by_hand = ("collective" in SEEN and not (SEEN | {mode}) & {"reducer", "data_parallel"}) or any(
                SET[id(one)] == checksum(one) for one in trained() if id(one) in SET) or "group" in SEEN
            return [*weights(), by_hand]
    except Exception:  # noqa: BLE001  # all has ended well, and the others wait
        return [0, 0, 0, True]


def why():
    """Of weights that differ."""
    return ("in data parallel all have the same. Their initial weights, learning rates or numbers of steps differ, "
            "or a gradient was not averaged (a weight that is each rank's own wants layerwise_parallel=True)"
            if "reducer" in SEEN else
            "each has trained alone, for nothing made them exchange gradients: no parallel_mode was set before the "
            "training" if auto_parallel_context().get_parallel_mode() != "data_parallel" else
            "Model or nn.TrainOneStepCell was made before parallel_mode was set, or a step by hand lacks "
            "gradients = nn.DistributedGradReducer(optimizer.parameters)(gradients); if they are averaged in "
            "another way, some weight began as another, or was left out")


def compare():
    """Say it if ranks that should have the same weights have not; all ranks must call it."""
    mine = own()  # before the collective, which it would take note of
    rows = ops.AllGather()(Tensor(np.array(mine, np.float32))).asnumpy().reshape(-1, 4)
    if (different := ALIKE["others"](rows.tolist())) and get_rank() == 0:
        print(ALIKE["warning"](different, 0, why()), flush=True)


def compare_in_the_end(ranks):
    """Have ranks.leave() compare, where the ranks wait for each other; in a computed plan, compute.py does so.

    Under msrun they do not. Returns what tells the launcher of this rank's weights, in words: it compares.
    """
    if "ASCEND_PLAN" in os.environ:
        return str
    take_note()
    if "MS_ROLE" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return lambda: json.dumps([*own(), why()]) if GlobalComm.INITED else ""

    def meet(meet=ranks._meet):
        if GlobalComm.INITED and get_group_size() > 1:
            compare()
        meet()

    ranks._meet = meet
    return str
