"""MindSpore's parallel modes that cut a network, and what does not go with them."""
import functools
import inspect
import math
import re
import sys

import mindspore as ms
from mindspore import nn
from mindspore.communication.management import GlobalComm
from mindspore.experimental.optim import Optimizer as NewOptimizer
from mindspore.parallel._auto_parallel_context import auto_parallel_context
from mindspore.parallel._utils import _get_device_num, _get_global_rank

import graph_ir
from layouts import cutting_axes, held_alike

PLANNED = ("semi_auto_parallel", "auto_parallel")
OPTIMIZERS = (nn.Optimizer, NewOptimizer)
WANTED = ("in {} a network must be compiled, together with its optimizer, and {}: in PyNative mode, MindSpore's "
          "default, it runs operator by operator, and nobody cuts it or reduces its gradients. Call "
          "mindspore.set_context(mode=mindspore.GRAPH_MODE), and train by Model.train or nn.TrainOneStepCell")

TOO_LARGE = ("this plan adds up the gradients of all ranks and does not divide them by their number, so they are too "
             "large")
UNDIVIDED = (f"{TOO_LARGE}, unless the loss has a number for each sample. MindSpore plans so where the function that "
             "is differentiated returns more than its loss (has_aux=True, or a tuple): return the loss alone; and "
             "where the loss is the mean of nn.SoftmaxCrossEntropyWithLogits(sparse=True): use nn.CrossEntropyLoss")
NOT_REPEATED = (f"{TOO_LARGE}: loss_repeated_mean=False (in AutoParallel: disable_loss_repeated_mean()) wants that; "
                "leave it out")
TWICE = ("gradients_mean=True divides the gradients of whole parameters by the number of ranks once more; in {} all "
         "are divided already: leave it out")
NOT_ADDED_UP = ("the gradient of {} is added up over no ranks, though each has a part of it: MindSpore plans so where "
                "a parameter is transposed first ({}). Multiply by it as it is (nn.Dense, "
                "ops.MatMul(transpose_b=True)); with search_mode=\"sharding_propagation\" automatic parallel is right")
OWN_BPROP = ("the cell with a bprop of its own at {} takes a parameter, or exchanges slices in this plan, and "
             "MindSpore puts nothing of that into the bprop: gradients are not added up over the ranks. Leave out the "
             "bprop, or let the cell take whole activations alone")
OUTSIDE = ("a step calls a network that is cut{} outside of the function that it differentiates; MindSpore plans that "
           "function only, and here each rank computes on its slices alone. Call the network in that function, or in a "
           "graph of its own")
BY_INPUTS = ("this graph uses the gradient by an input, which MindSpore's plan adds up over no ranks: each has a part "
             "of it, or one that is too large. Penalties of gradients, PINNs and adversarial inputs are right in "
             "data_parallel")
OWN_NORMS = ("in this plan ops.clip_by_global_norm takes the norm of each rank's own slices, not of all: MindSpore "
             "does not find the parameters of these gradients, as where they were added up or clipped before; "
             "differentiate the sum of the losses, and clip, once")
SLICES_NORMS = ("in this plan {} takes norms or means of each rank's own slices of the weights that are cut, not of "
                "the whole ones: other steps than one process takes. Take another optimizer, or cut none of them")
SHARED_NORMS = ("ops.clip_by_global_norm counts the gradient of {} once for each pipeline stage that uses it: give "
                "each stage a parameter of its own, or clip by value")
MOVED = ("MindSpore makes AllReduce(x + z) * y of AllReduce(x) * y + z{}, which is right only where y is 1 / N: the "
         "gradients of s * s, where s is added up over ranks, are wrong (write ops.square(s)), and so is the weight "
         "decay where gradients are multiplied, as by 1 / scale (divide them, or give sens and loss_scale)")
OTHER_STAGE = ("this pipeline stage uses {} of another stage outside of all cells that have a stage: MindSpore "
               "neither sends it nor adds up its gradient, so that a penalty does nothing. Put what uses it into a "
               "cell of its own, with the pipeline_stage of the last")
SLICED_STAGE = ("this pipeline stage cuts {}: each rank saves its slice, which --resume of checkpoints.py cannot load. "
                "Cut nothing within a stage (strategies, enable_parallel_optimizer), or save otherwise")
LAST_STAGE = ("only the ranks of the last pipeline stage have what this graph returns: the others return zeros, of "
              "which Model.eval makes a loss of 0.0 and an accuracy of 1.0; take the last rank's")
UNSCALED = ("Model trains a pipeline without its loss scale, yet {} divides the gradients by its loss_scale={:g}: the "
            "steps are that much too small. Leave loss_scale out of the optimizer")
BROADCAST = ("parameter_broadcast=True gives all ranks rank 0's slices of what enable_parallel_optimizer cuts, such "
             "as {}: leave it out; after ms.set_seed() the ranks start alike")
OTHER_RANK = ("global_rank={} of set_auto_parallel_context: rank {} would compute what is another rank's; leave it "
              "out: each rank knows its own")
REDUCING = ("{0} has the ranks add up its metric in a graph that MindSpore refuses in {1}: compare the metric in a "
            "callback of your own (run_context.original_args().eval_results), which may call "
            "run_context.request_stop()")
NO_RULE = ("MindSpore has no rule for cutting {}: its plan has each rank compute the slice that it holds of the first "
           "dimension alone, whatever its strategy. Right only where these slices have nothing to do with each other; "
           "else transpose the input first, so that the first dimension is such a one")
CALLED = {"ArgMaxWithValue": "ops.max", "ArgMinWithValue": "ops.min"}  # as scripts have it
# These have no rule and need none: each element, or each row, is computed alone.
ALONE = re.compile("Adaptive(Avg|Max)Pool[23]D|Flatten|Resize.*|Upsample.*|"  # each sample
                   "CeLU|HSwish|Im2Col|IsNan|LRN|Sinc|Muls|Divs|DivMods|PowScalarTensor|(?!.*(Index|Masked|Lerp)).*Scalar")
OWN_INDEX = ("the index of {} counts within each rank's own slice, for the plan cuts the axis that it is taken along: "
             "take it of an operator with a strategy of ones, such as ops.Argmax(1).shard(((1, 1),))")
OWN_ROWS = ("{} writes to wrong rows in this plan, which cuts its first argument along an axis that the indices count: "
            "give it a strategy of ones, such as ops.TensorScatterAdd().shard(((1, 1), (1, 1), (1, 1)))")
OF_SLICES = ("(if the step runs in one process, these may be shapes of slices: some operators, such as addcmul, "
             "MindSpore does not cut; take others in their place, such as ops.mul and ops.add)")
NO_NUMBERS = ("(in this mode parameters have no numbers before the first step: call init_data() of each before its "
              "clone())")
NO_STAGES = "(parameter_broadcast=True compiles a graph without stages: leave it out)"
OF_STAGES = ("(a weight that several stages of a pipeline use cannot be cut by enable_parallel_optimizer: set its "
             "parallel_optimizer = False)")


def planned_mode():
    """The parallel mode, if it is one that cuts a network; else ""."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    return mode if mode in PLANNED else ""


def describe(error, own):
    """graph_ir.describe(), and a hint where an operator of MindSpore takes shapes amiss that may be those of slices."""
    about = graph_ir.describe(error, own)
    shapes = r"For (?:'|primitive\[)(\w+)['\]],? (?!.*strategy).*(?:\b|_)(?:shapes?|dimensions)\b"
    for said, hint in (("init_data must be set Tensor.init", NO_NUMBERS), (
            "is not equal to stage used", NO_STAGES * ms.get_auto_parallel_context("parameter_broadcast"))):
        if planned_mode() and said in about["message"]:
            return {**about, "hint": hint}
    operator = re.match(shapes, about["message"]) if planned_mode() else None
    if operator and operator[1] == "AddN" and ms.get_auto_parallel_context("enable_parallel_optimizer") and (
            ms.get_auto_parallel_context("pipeline_stages") > 1):  # which adds up the stages' gradients
        return {**about, "hint": OF_STAGES}
    return {**about, "hint": OF_SLICES if operator else ""}


def slices_of_arguments():
    """In how many slices the ranks of a stage bring all arguments, or a tuple: each of them.

    1: all ranks bring the same; None: each brings its own, or it is not known.
    """
    strategy = ms.get_auto_parallel_context("dataset_strategy")
    if isinstance(strategy, (tuple, list)):
        return tuple(math.prod(cuts) if isinstance(cuts, (tuple, list)) and all(isinstance(cut, int) for cut in cuts)
                     else None for cuts in strategy)
    return 1 if strategy == "full_batch" else None


def optimizer_alone(obj):
    """What is wrong where an optimizer is about to be compiled without its network in such a mode; else ""."""
    alone = planned_mode() and issubclass(type(obj), OPTIMIZERS)
    return WANTED.format(planned_mode(), "only the optimizer is") if alone else ""


def pipeline_by_hand(obj):
    """What is wrong where nn.TrainOneStepCell is to train a pipeline, whose micro batches it does not know; else ""."""
    by_hand = type(obj) is nn.TrainOneStepCell and issubclass(type(obj.network), nn.PipelineCell)
    return "nn.TrainOneStepCell cannot train an nn.PipelineCell; train it by Model.train" if by_hand else ""


def stage_that_is_not(obj):
    """What is wrong where a cell is in a pipeline stage that is not, which MindSpore plans all the same; else ""."""
    stages = ms.get_auto_parallel_context("pipeline_stages")
    for name, cell in obj.cells_and_names() if issubclass(type(obj), nn.Cell) and stages > 1 else ():
        if (stage := getattr(cell, "pipeline_stage", None) or 0) >= stages:
            return (f"pipeline_stage = {stage} of the cell {name or type(cell).__name__}: with "
                    f"pipeline_stages={stages} there are 0 to {stages - 1}")
    return ""


def decides_while_it_runs(obj):
    """What cannot be computed in a cell that skips a step whose gradients overflow; "" where it does no such thing."""
    scales = issubclass(type(obj), nn.TrainOneStepWithLossScaleCell)
    return ("nn.TrainOneStepWithLossScaleCell decides while the graph runs whether a step counts, which is not "
            "computed; take nn.TrainOneStepCell(network, optimizer, sens=1024.0)") if scales else ""


def rank_of_another():
    """What is wrong where a rank is told to be another one, which is known to its plan alone; else ""."""
    if not (planned_mode() and GlobalComm.INITED):
        return ""
    rank, told = ms.communication.get_rank(), _get_global_rank()
    return OTHER_RANK.format(told, rank) if told != rank else ""


def look_at_callbacks(refusal):
    """Have Model.fit raise refusal(what is wrong) where a callback cannot work in such a mode."""
    fit = ms.Model.fit

    @functools.wraps(fit)
    def look_and_fit(*args, **kwargs):
        given = inspect.signature(fit).bind(*args, **kwargs).arguments.get("callbacks")
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if planned_mode() and isinstance(one, (ms.train.EarlyStopping, ms.train.ReduceLROnPlateau)):
                raise refusal(REDUCING.format(type(one).__name__, planned_mode()))
        return fit(*args, **kwargs)

    ms.Model.fit = look_and_fit


def interleaved(lazy):
    """What is wrong where a pipeline is interleaved and a cell is lazy_inline (lazy), as MindSpore demands; else ""."""
    needs = lazy and auto_parallel_context().get_pipeline_interleave()
    return ("a pipeline with pipeline_interleave needs @lazy_inline, which is not computed; leave both out here, or "
            "compile it with dry_run.py") if needs else ""


def nothing_compiled():
    """What is wrong where a script has compiled nothing in such a mode; "" where that may be meant."""
    pynative = planned_mode() and ms.get_context("mode") == ms.PYNATIVE_MODE
    return WANTED.format(planned_mode(), "nothing is") if pynative else ""


def trained_in_others(obj, stages):
    """Names of what the optimizers in a cell train, and what belongs to other pipeline stages than this rank's."""
    own, trained = _get_global_rank() * stages // _get_device_num(), set()
    names = {True: set(), False: set()}  # of parameters in cells of this stage, and of others
    for _, cell in obj.cells_and_names() if issubclass(type(obj), nn.Cell) else ():
        if issubclass(type(cell), OPTIMIZERS):
            trained |= {parameter.name for parameter in cell.parameters}
        elif (stage := getattr(cell, "pipeline_stage", None)) is not None:
            names[stage == own] |= {parameter.name for parameter in cell.get_parameters()}
    return (trained & names[False]) - names[True]


def notes_of(obj, text, planned, layouts):
    """What is wrong with the numbers of a graph, presumably on cards, too, as a list of sentences.

    Gradients of a common loss are divided by _VirtualDiv (parallel/step_parallel.cc); gradients_mean divides, too, but
    no gradients of slices. Norms of slices are added up by a collective of its own.

    Args:
        obj: the cell or function that was compiled.
        text: the graph `validate` as text.
        planned: the graph `step_parallel_end`, in which nothing has been computed in advance, or "".
        layouts: those of the parameters, by name.
    """
    if not planned_mode():
        return []
    cut, notes = any(map(cutting_axes, layouts.values())), []  # arguments, too
    slices = {name for name, layout in layouts.items() if layout[5] or cutting_axes(layout)}
    sliced = sorted(name for _, _, name in graph_ir.PARAMETER.findall(text) if name in slices)
    if sliced:
        notes += [OWN_NORMS] * bool(graph_ir.norms_of_slices(text))
        names = ", ".join(graph_ir.norms_of_optimizers(text))
        notes += [SLICES_NORMS.format(names)] * bool(names)
    if shared := graph_ir.norms_of_shared(text, planned):
        notes.append(SHARED_NORMS.format(", ".join(shared)))
    shards = sorted(name for name, layout in layouts.items() if layout[5])
    notes += [BROADCAST.format(name) for name in shards[:1] if ms.get_auto_parallel_context("parameter_broadcast")]
    stages = ms.get_auto_parallel_context("pipeline_stages")
    if stages > 1:
        elsewhere = graph_ir.only_read(planned) & trained_in_others(obj, stages)
        notes += [OTHER_STAGE.format(", ".join(sorted(elsewhere)))] * bool(elsewhere)
        resumes = hasattr(sys.modules.get("checkpoints"), "Checkpoints")
        notes += [SLICED_STAGE.format(name) for name in sliced[:1] if resumes]
        evaluates = "(Gradients/" not in text and "= Send(" in text
        optimizer = getattr(obj, "optimizer", None) if type(obj).__name__ == "_TrainGradAccuStepCell" else None
        scale = getattr(optimizer, "loss_scale", 1)
        if _get_global_rank() == 0:  # once for all stages
            notes += [UNSCALED.format(type(optimizer).__name__, scale)] * (scale != 1) + [LAST_STAGE] * evaluates
    notes += [sentence.format(f" ({', '.join(sorted(places))})" * ("" not in places)) for sentence, places in (
        (MOVED, graph_ir.moved_into_sums(text)), (OUTSIDE, graph_ir.outside(planned, slices))) if places]
    if graph_ir.by_inputs(planned):
        notes.append(BY_INPUTS)
    lost, cells = graph_ir.unreduced(planned, {name for name, layout in layouts.items() if held_alike(layout)})
    if lost:
        notes.append(NOT_ADDED_UP.format(", ".join(sorted(lost)), ", ".join(sorted(set().union(*lost.values())))))
    if cells:
        notes.append(OWN_BPROP.format(", ".join(sorted(cells))))
    mean = ms.get_auto_parallel_context("gradients_mean")
    if (planned and "(Gradients/" in text and "_VirtualDiv" not in planned
            and stages == 1 and (sliced if mean else cut or "Grad__Mirror" in text)):
        notes.append(UNDIVIDED if ms.get_auto_parallel_context("loss_repeated_mean") else NOT_REPEATED)
    reduced = "Grad__Mirror" in text or "grad_parallel_optimizer_allgather" in text  # gradients of whole parameters
    if mean and reduced and "_VirtualDiv" in planned:
        notes.append(TWICE.format(planned_mode()))
    sentences = {"no rule": NO_RULE, "index": OWN_INDEX, "rows": OWN_ROWS}
    named = {kind: [] for kind in sentences}
    for (kind, name), sources in sorted(graph_ir.on_slices(text).items()):
        if kind != "no rule" or not ALONE.fullmatch(name):
            named[kind].append(CALLED.get(name, name) + f" ({', '.join(sorted(sources))})" * bool(sources))
    return notes + [sentences[kind].format(", ".join(names)) for kind, names in named.items() if names]
