"""Compute a rank's plan with the kernels of the CPU, operator by operator."""
from __future__ import annotations

import collections
import functools
import hashlib
import math
import re

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.ops import Primitive
from mindspore.ops.auto_generate import gen_ops_prim
from mindspore.ops.primitive import _run_op

import meeting
from collectives import AT_END, to_array, to_tensor
from layouts import cutting_axes, slice_begin, unlike_shapes
from plan import MONAD, PlanError, where

try:
    from mindspore.common._stub_tensor import _convert_stub
except ImportError:  # after 2.7 operators return tensors at once
    def _convert_stub(value):
        return value

RANDOM = re.compile("Dropout|Random|Normal(?!iz)|Uniform|Multinomial|Gamma|Poisson|Bernoulli")
PASS_ON = ("Depend",)  # their value is their first input
PADS = ("ConstantPadND", "PadV3")
TUPLES = ("MakeTuple", "make_list")
NO_KERNEL = "it has no kernel for that, or none for these types"
ASSIGN = Primitive("Assign")
# Their results may lie in the memory of their inputs; which ones do that differs between versions of MindSpore.
MAY_ALIAS = re.compile("Reshape|Transpose|ExpandDims|Squeeze|Slice|Split|Chunk|Narrow|BroadcastTo|StopGradient|"
                       "Contiguous|Diagonal|Unstack|SelectExt|Unfold|AsStrided|Identity|Flatten|View")


def group_of(node, rank_size):
    """The ranks of a collective, as a sorted tuple."""
    ranks = node.attributes.get("group_rank_ids") or node.attributes.get("rank_list")
    if isinstance(ranks, (tuple, list)) and ranks:
        return tuple(ranks)
    if str(node.attributes.get("group", "")).endswith("_world_group"):
        return tuple(range(rank_size))
    raise PlanError(f"{node.op} ({node.name}) does not say which ranks its group {node.attributes.get('group')!r} has")


def peer_of(node, group):
    """The other rank of a Send or Receive; MindSpore counts it within the group."""
    if node.op not in meeting.POINT_TO_POINT:
        return -1
    peer = node.attributes["dest_rank" if node.op == "Send" else "src_rank"]
    if not 0 <= peer < len(group):
        raise PlanError(f"{node.op} ({node.name}) names rank {peer} of a group of {len(group)}: is the pipeline_stage "
                        "of a cell not below pipeline_stages?")
    return group[peer]


class Computation:
    """A plan, ready to run step after step.

    Args:
        plan: plan.Plan of this rank.
        links: collectives.Collectives; the constructor is itself collective: all ranks must come here.
        parameters: {name: Parameter} of the script.
        number: of the graph, from 1.
    """

    def __init__(self, plan, links, parameters, number):
        self.plan, self.links = plan, links
        self.parameters = {name: parameters.get(name) for name in plan.parameters.values()}
        self.slots, self.values = {}, []
        self.checked = False
        self.held = {}  # the shape of each parameter on this rank
        self.number = number
        for name, value in plan.constants.items():
            self.slot(name, value)
        for name, parameter in plan.parameters.items():
            if self.parameters[parameter] is None:
                raise PlanError(f"the plan has a parameter {parameter!r} that is not found in the script; keep it as "
                                "an attribute of the network or the optimizer")
            self.slot(name, self.parameters[parameter])
        self.inputs = [self.slot(name) for name in plan.inputs]
        self.tuples = set()
        self.shared = set()  # what a view is of, the view, and its parts: they are one memory
        self.one_tensor = {}  # name of what an operator has changed in place -> name of what it has changed
        self.changed = set()  # what is changed in place
        self.made_by = {node.output: node.instance for node in plan.nodes}
        for node in plan.nodes:
            if node.op in TUPLES:
                self.tuples.add(node.output)
            elif changes_input(node) or node.op in PASS_ON:
                self.one_tensor[node.output] = original = self.original(node.inputs[0])
                if node.op not in PASS_ON:
                    self.changed.add(original)
            elif node.op.endswith("View"):
                self.shared |= {node.inputs[0], node.output}
            elif node.op == "TupleGetItem" and node.inputs[0] in self.shared:
                self.shared.add(node.output)
        self.meet()
        self.program = [self.instruction(node, i) for i, node in enumerate(plan.nodes)]
        self.program = [step for step in self.program if step]
        for name in plan.outputs:
            if name not in self.slots:
                raise PlanError(f"the plan's output {name} is made by no operator")
        self.outputs = [self.slots[name] for name in plan.outputs]
        self.free_early()

    def original(self, name):
        """The tensor that a name stands for."""
        return self.one_tensor.get(name, name)

    def slot(self, name, value=None):
        """The place of a value."""
        if name not in self.slots:
            self.slots[name] = len(self.values)
            self.values.append(value)
        return self.slots[name]

    def meet(self):
        """Compare the collectives of all ranks, and what is cut; end with a report where they would wait for ever."""
        mine, self.peers = [], {}
        for node in self.plan.nodes:
            if meeting.is_collective(node.op):
                group = group_of(node, self.links.rank_size)
                peer = peer_of(node, group)
                self.peers[node.output] = group, peer
                mine.append(meeting.Call(node.op, group, detail(node), peer, node.attributes.get("sr_tag", 0),
                                         self.plan.near(node), node.name))
        everyone = [[meeting.Call(*call) for call in calls]
                    for calls in self.links.share([tuple(call) for call in mine])]
        trouble = meeting.stuck(everyone)
        if trouble:
            raise PlanError(f"this plan would hang: {trouble}", by_all=True)
        shapes = self.links.share({name: tuple(layout[6]) for name, layout in self.plan.layouts.items()
                                   if name in self.parameters and len(layout) > 6 and cutting_axes(layout)})
        for text, *_ in unlike_shapes(dict(enumerate(shapes))):
            raise PlanError(text, by_all=True)
        self.alone = not any(everyone)
        self.links.make_groups([call.group for calls in everyone for call in calls])
        self.links.number_pairs([
            (call.group, call.tag, rank, call.peer) for rank, calls in enumerate(everyone) for call in calls
            if call.op == "Send"])

    def notes(self):
        """In which points the numbers may differ from a card's, as sentences."""
        ops = sorted({node.op for node in self.plan.nodes if RANDOM.search(node.op)})
        small = sorted({str(dtype) for node in self.plan.nodes for dtype, _ in node.planned
                        if dtype in (ms.float16, ms.bfloat16)})
        return ([f"{', '.join(ops)}: other random numbers than on a card"] if ops else []) + (
            [f"{', '.join(small)}: rounded otherwise than on a card"] if small else [])

    def changed_twice(self):
        """For nn.TrainOneStepCell: which line of its network changes a parameter twice a step, as sentences.

        It calls the network for the loss, and again for the gradients. MindSpore makes one of both, but in these modes
        not of what changes a parameter.
        """
        changes = collections.Counter()
        for node in self.plan.nodes:
            name = self.plan.parameters.get(self.original(node.inputs[0])) if node.inputs else None
            in_network = node.name.count("/") > 1 and self.plan.source(node)  # "Default/op": of the step itself
            if name and in_network and re.match("Assign|Inplace|Scatter", node.op):
                changes[name, self.plan.source(node)] += 1
        return [f"{line} changes parameter {name!r} once for the loss and once more for the gradients, presumably on "
                "cards, too (in one process MindSpore does it once); take value_and_grad, not nn.TrainOneStepCell"
                for (name, line), times in changes.items() if times % 2 == 0][:1]

    def replicas(self):
        """What other ranks should hold just as this one does.

        Returns:
            {(parameter's name, stage, layout, begin of the slice): Parameter} of what the step trains. A parameter
            that the optimizer's shards cut, or whose layout is interleaved, is left out, and a later stage's unused
            copy of one that several stages use. With the layout, two networks of one script, cut in two ways, are not
            taken for each other.
        """
        found = {}
        for name, parameter in self.parameters.items():
            layout = self.plan.layouts.get(name)
            # A weight of several stages: only the first one's counts, which the others are sent in each step.
            if not layout or not parameter.requires_grad or parameter.param_info.is_pipeline_shared_param:
                continue
            if layout[5] or any(not isinstance(dim, int) for dim in layout[1]):
                continue
            stage, way = self.links.rank // math.prod(layout[0]), (tuple(layout[0]), tuple(layout[1]))
            begin = slice_begin(self.links.rank, layout, layout[2], {})
            found[name, stage, way, tuple(begin)] = parameter
        return found

    def instruction(self, node, index):
        """(function, places of the inputs, place of the output, node), or None where there is nothing to do."""
        if node.op == "UpdateState":
            self.slot(node.output, MONAD)
            return None
        missing = [name for name in node.inputs if name not in self.slots]
        if missing:
            raise PlanError(f"{where(self.plan, node)} uses {missing[0]}, which nothing before it makes")
        if changes_input(node):
            self.refuse_to_change(node)
        places = [self.slots[name] for name in node.inputs]
        if node.op == "Load" and not self.written_while_used(node, index):
            self.slots[node.output] = places[0]
            return None
        if node.op in PASS_ON:
            self.slots[node.output] = places[0]
            return None
        if node.op == "Load":
            run = copied
        elif node.op in TUPLES:
            run = _make_tuple
        elif node.op == "TupleGetItem":
            run = _get_item
        elif meeting.is_collective(node.op):
            run = self.links.operator(node, *self.peers[node.output], where(self.plan, node))
        else:
            run = self.kernel(node)
            if node.output in self.changed and MAY_ALIAS.search(node.op):
                run = _then_copied(run)
        places = [place for place in places if self.values[place] is not MONAD]
        return run, places, self.slot(node.output), node

    def refuse_to_change(self, node):
        """End with a sentence where an operator changes in place what others would not see changed."""
        target = node.inputs[0]
        if {target, self.original(target)} & self.shared:
            raise PlanError(f"{where(self.plan, node)} changes a tensor in place that has a view, which is not "
                            "computed: make a new tensor, as in a = a + 1")
        if self.made_by.get(target, "").startswith("redistribution_op"):
            raise PlanError(f"{where(self.plan, node)} changes a tensor in place that is cut in another way there: "
                            "MindSpore plans to change a copy of it, and the change is lost, presumably on cards, too; "
                            "make a new tensor, as in a = a + 1")

    def written_while_used(self, load, index):
        """Whether a parameter that is read by value changes while the value is still needed."""
        parameter, aliases = self.original(load.inputs[0]), {load.output}
        written = False
        for node in self.plan.nodes[index + 1:]:
            used, passed = aliases.intersection(node.inputs), node.op in (*PASS_ON, *TUPLES, "TupleGetItem")
            if used and (passed or MAY_ALIAS.search(node.op)):
                aliases.add(node.output)
            if used and written and not passed and node.op != "UpdateState":
                return True
            written = written or (node.op not in ("Load", *PASS_ON) and parameter in map(self.original, node.inputs))
        return bool(aliases.intersection(self.plan.outputs))

    def kernel(self, node):
        """An operator of MindSpore, run on CPU."""
        primitive = Primitive(node.op)
        for name, value in node.attributes.items():
            if name in ("in_layout", "out_layout"):  # the strategy, which has been followed
                continue
            if isinstance(value, PlanError):
                raise PlanError(f"{where(self.plan, node)}: {name}: {value}")
            primitive.add_prim_attr(name, value)
        if node.instance:
            primitive.set_prim_instance_name(node.instance)
        op = node.op
        if op.endswith("View"):  # run as others are, it would return what its memory happens to hold
            view = getattr(gen_ops_prim, op)()
            return _then_copied(view)

        mixed = bool(self.tuples.intersection(node.inputs))

        def run(*inputs):
            return _convert_stub(_run_op(primitive, op, [*map(unmixed, inputs)] if mixed else inputs))

        if op in PADS and node.attributes.get("paddings_contiguous", True):
            run = functools.partial(padded, run)
        kernel = run

        def run_or_widen(*inputs):
            """Many kernels of the CPU have no bfloat16: they compute in float32, and the result is rounded."""
            try:
                return kernel(*inputs)
            except (TypeError, RuntimeError, ValueError):
                wide = [value.astype(ms.float32) if isinstance(value, Tensor) and not isinstance(value, Parameter)
                        and value.dtype == ms.bfloat16 else value for value in inputs]
                if all(new is old for new, old in zip(wide, inputs)):
                    raise
                return rounded(kernel(*wide))

        if any(dtype == ms.bfloat16 for dtype, _ in node.planned):
            run = run_or_widen
        return functools.partial(in_place, run) if changes_input(node) else run

    def free_early(self):
        """Note after which operator each value is needed no more."""
        last = {}
        for number, (_, places, _, _) in enumerate(self.program):
            last.update(dict.fromkeys(places, number))
        kept = set(self.outputs) | {place for place, value in enumerate(self.values) if value is not None}
        frees = collections.defaultdict(list)
        for place, number in last.items():
            if place not in kept:
                frees[number].append(place)
        self.program = [(*step, frees.get(number, ())) for number, step in enumerate(self.program)]

    def __call__(self, *arguments):
        """One run: the graph's arguments in, its results out."""
        if len(arguments) != len(self.inputs):
            raise PlanError(f"the plan takes {len(self.inputs)} arguments and got {len(arguments)}")
        if not self.alone:
            self.links.agree(f"a run of graph {self.number}")
            if not self.checked:
                self.compare(arguments)
        self.look_at_slices()
        values = list(self.values)
        for place, argument, promised in zip(self.inputs, arguments, self.plan.inputs.values()):
            values[place] = argument
            if promised and isinstance(argument, Tensor) and min(promised[1], default=0) >= 0 and (
                    tuple(argument.shape) != promised[1]):
                raise PlanError(
                    f"the plan takes an argument of the shape {promised[1]} and got {tuple(argument.shape)}: MindSpore "
                    'planned this graph for the whole batch; give it that, with dataset_strategy="full_batch"')
        for run, places, out, node, frees in self.program:
            try:
                values[out] = run(*[values[place] for place in places])
                if not self.checked:
                    self.check(node, values[out])
            except PlanError:
                raise
            except Exception as error:
                whole = "" if reason(error) == NO_KERNEL else self.or_whole(node)
                raise PlanError(
                    f"the CPU cannot compute {where(self.plan, node)} as the plan wants it "
                    f"({reason(error)}); use another operator there, or train this network on cards only{whole}"
                ) from error
            for place in frees:
                values[place] = None
        results = [values[place] for place in self.outputs]
        if not self.checked:
            self.tell_notes()
            if not self.alone:
                self.compare_numbers(results)
        self.checked = True
        return results[0] if len(results) == 1 else tuple(results)

    def look_at_slices(self):
        """Refuse what the script has put in a parameter's place since the last run, unless it is a slice, too."""
        for name, parameter in self.parameters.items():
            now = tuple(parameter.shape)
            if now != (held := self.held.setdefault(name, now)):
                raise PlanError(f"this rank holds {held} of {name!r}, and the script has put {now} in its place: give "
                                "set_data() this rank's slice, or call it before the first step")

    def compare(self, arguments):
        """In the first step: do all ranks bring the same batch, or the same slice of it, where they should?"""
        slices = self.plan.slices if isinstance(self.plan.slices, tuple) else (self.plan.slices,) * len(arguments)
        own = self.plan.stages == 1 and not any(slices)
        if not (any(slices) or own) or not self.parameters:  # without parameters a graph puts slices together, to save
            return
        ranks = self.links.rank_size // self.plan.stages
        arrays = [to_array(argument) for argument in arguments if isinstance(argument, Tensor)]
        shapes, everyone = zip(*self.links.share(([array.shape for array in arrays], [
            hashlib.sha256(array.tobytes()).digest() for array in arrays])))
        for rank, others in enumerate(shapes) if own else ():
            if others != shapes[0]:
                raise PlanError(
                    f"rank {rank} brings a batch of the shapes {others}, rank 0 one of {shapes[0]}, and MindSpore "
                    "plans the graph of each as if all had its size: losses and gradients would be wrong. Give all "
                    "ranks batches of one size, by shards of one length (num_shards) or drop_remainder=True",
                    by_all=True)
        if own and self.links.rank == 0 and everyone.count(everyone[0]) == ranks > 1 and any(
                len(np.unique(array)) > 1 for array in arrays):
            print("computed on CPU: all ranks bring the same batch, where each should bring its own (dataset_strategy="
                  f"\"data_parallel\"): give the data set num_shards={ranks} and shard_id=rank", flush=True)
        slices = [count for argument, count in zip(arguments, slices) if isinstance(argument, Tensor)]
        for number, count in enumerate(slices):
            if not count or ranks % count:
                continue
            first = {}  # MindSpore gives neighbours the same slice
            for rank, digests in enumerate(everyone):
                place = rank % ranks * count // ranks
                other = first.setdefault(place, rank)
                if digests[number:number + 1] == everyone[other][number:number + 1]:
                    continue
                if count == 1:
                    raise PlanError(
                        'dataset_strategy ("full_batch", or ones) says that all ranks bring the same batch, and '
                        f"rank {rank} brings another one than rank {other}: shuffle with one seed and leave out "
                        'num_shards and shard_id, or set dataset_strategy="data_parallel", where each rank brings its '
                        "own", by_all=True)
                raise PlanError(
                    f"dataset_strategy cuts argument {number + 1} into {count} slices for {ranks} ranks, so neighbours "
                    f"bring the same slice, and rank {rank} brings another one than rank {other}: with num_shards="
                    f"{count} and shard_id=rank % {ranks} // {ranks // count} they do", by_all=True)

    def tell_notes(self):
        """After the first step: what is known to be wrong with the plan's numbers."""
        first_of_stage = self.links.rank % (self.links.rank_size // self.plan.stages) == 0
        for note in self.plan.notes if first_of_stage else ():
            print(f"computed on CPU: {note}", flush=True)

    def compare_numbers(self, results):
        """After the first step: does the graph return the same numbers on all ranks, as a loss must be?"""
        if not self.parameters:
            return
        mine = [float(leaf.astype(ms.float32).asnumpy()) for leaf in flatten(results)
                if isinstance(leaf, Tensor) and not leaf.shape]
        everyone = list(enumerate(self.links.share(mine)))[-(self.links.rank_size // self.plan.stages):]
        first, theirs = everyone[0]  # the last stage of a pipeline has the loss
        for rank, numbers in everyone:
            for number, other in zip(theirs, numbers):
                if self.links.rank == 0 and abs(other - number) > 1e-4 * max(1, abs(number)):
                    print(f"computed on CPU: this graph returns {number:.6g} on rank {first} and {other:.6g} on rank "
                          f"{rank}; in this mode it should be one number. An operator of the plan works on a rank's "
                          "slice alone. If it is the mean of nn.SoftmaxCrossEntropyWithLogits(sparse=True), gradients "
                          "become too large: use nn.CrossEntropyLoss, or ops.ReduceMean() of all losses. If it is a "
                          "number of parameters or gradients that are cut, such as a norm, it is each rank's own",
                          flush=True)
                    return

    def check(self, node, value):
        """In the first step: does each operator make what the plan promises?"""
        if not node.planned or node.op in (*TUPLES, "Send", "Barrier"):
            return
        leaves = list(flatten(value))
        for (dtype, shape), leaf in zip(node.planned, leaves):
            if isinstance(leaf, Tensor) and min(shape, default=0) >= 0 and (
                    tuple(leaf.shape) != shape or leaf.dtype != dtype):
                raise PlanError(f"{where(self.plan, node)} made {leaf.dtype} {tuple(leaf.shape)} where the plan has "
                                f"{dtype} {shape}: on the CPU this operator differs from the card's"
                                f"{self.or_whole(node)}")

    def or_whole(self, node):
        """In the first step: what else may be wrong with an operator that takes a parameter, for a sentence."""
        loads = {load.output: load.inputs[0] for load in self.plan.nodes if load.op == "Load"}
        for name in node.inputs if not self.checked else ():
            if parameter := self.plan.parameters.get(loads.get(name, name)):
                return (f"; or, if an operator such as ops.zeros_like() has used parameter {parameter!r} "
                        "before the first step: it could not be cut then; read it by asnumpy(), write it by set_data()")
        return ""


def unlike_replicas(replicas, links):
    """Compare what ranks hold in common.

    Args:
        replicas: {key: Parameter} of this rank.
        links: Collectives; all ranks come here.

    Returns:
        A sentence, or None when all are alike (to 1e-5 of the largest number).
    """
    arrays = {key: parameter.asnumpy() for key, parameter in replicas.items()
              if parameter.dtype in (ms.float32, ms.float64, ms.float16)}
    digests = links.share({key: hashlib.sha256(array.tobytes()).digest() for key, array in arrays.items()}, AT_END)
    holders = collections.defaultdict(set)
    for known in digests:
        for key, digest in known.items():
            holders[key].add(digest)
    unlike = sorted((key for key, found in holders.items() if len(found) > 1), key=str)
    everyone = links.share({key: arrays[key] for key in unlike[:20] if key in arrays}, AT_END)
    for key in unlike[:20]:
        held = {rank: known[key].astype(float) for rank, known in enumerate(everyone) if key in known}
        first = next(iter(held.values()))
        far = max(abs(array - first).max() for array in held.values())
        if not far <= 1e-5 * max(1.0, abs(first).max()):
            return (f"after the last step the ranks {meeting.spell(held)} hold different values of {key[0]!r} (up to "
                    f"{far:.3g} apart), which they should hold alike: a gradient was not reduced over all of them, the "
                    "step takes a number of each rank's own slices (a norm: use ops.clip_by_global_norm; nn.AdaFactor "
                    "takes means), or they did not start alike (ms.set_seed), or have another learning rate")
    return None


def flatten(value):
    """The leaves of nested tuples."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from flatten(part)
    else:
        yield value


def copied(value):
    """Tensors with memory of their own, in place of Parameters, and of tensors that lie in the memory of others."""
    if isinstance(value, (tuple, list)):
        return tuple(copied(part) for part in value)
    return to_tensor(np.array(to_array(value)), value.dtype)


def changes_input(node):
    """Does an operator write its result over its first input? InplaceUpdate, for one, is older and does not."""
    return node.op.startswith("Inplace") and hasattr(gen_ops_prim, node.op)


def in_place(run, tensor, *rest):
    """An operator that changes its first input, run: most kernels leave it as it is, and return a new tensor."""
    result = run(tensor, *rest)
    _run_op(ASSIGN, "Assign", (tensor, result))
    return tensor


def _then_copied(run):
    return lambda *inputs: copied(run(*inputs))


def unmixed(value):
    """A tuple without Parameters: Stack takes them for another type than tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(copied(part) if isinstance(part, Parameter) else part for part in value)
    return value


def padded(run, tensor, widths, *rest):
    """An operator that pads, run: negative widths are cut off here, for its kernel does that well only once."""
    given, widths = widths, [*map(int, widths.asnumpy() if isinstance(widths, Tensor) else widths)]
    if min(widths) >= 0:
        return run(tensor, given, *rest)
    cuts = [slice(None)] * tensor.ndim
    for axis, (before, after) in enumerate(zip(widths[::2], widths[1::2]), start=1):  # the last dimension's first
        cuts[-axis] = slice(max(0, -before), tensor.shape[-axis] - max(0, -after))
    tensor = to_tensor(to_array(tensor)[tuple(cuts)], tensor.dtype)
    return run(tensor, tuple(max(0, width) for width in widths), *rest) if max(widths) > 0 else tensor


def rounded(value):
    """float32 tensors as bfloat16."""
    if isinstance(value, (tuple, list)):
        return tuple(rounded(part) for part in value)
    return value.astype(ms.bfloat16) if isinstance(value, Tensor) and value.dtype == ms.float32 else value


def reason(error):
    """The first line of an error of MindSpore that says something."""
    if "Unsupported op [" in str(error) or "Kernel select failed" in str(error):
        return NO_KERNEL
    lines = (line.strip(" -") for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def detail(node):
    """What the ranks of a collective must agree about, in words."""
    if node.op.startswith("NeighborExchange"):  # each rank has other neighbours; what arrives is measured
        return " ".join(str(dtype) for dtype, _ in node.planned)
    words = [str(node.attributes[name]) for name in ("op", "root_rank", "split_dim", "concat_dim")
             if node.attributes.get(name) is not None and node.op != "AllGather"]
    return " ".join([*words, *(f"{dtype} {shape}" for dtype, shape in node.planned)])


def _make_tuple(*values):
    return values


def _get_item(values, index):
    return values[index]
