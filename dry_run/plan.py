"""A rank's plan: the graph that MindSpore's Ascend compiler made of a step, read from its MindIR.

The plan is taken after strategies are applied: parameters have the shapes that this rank holds, collectives are
inserted, and every operator stands in the order in which it may run.
"""
from __future__ import annotations

import dataclasses

import graph_ir
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.train import mind_ir_pb2 as mind_ir

ATTRIBUTE, TENSOR = mind_ir.AttributeProto, mind_ir.TensorProto
INTEGERS = {ATTRIBUTE.UINT8, ATTRIBUTE.INT8, ATTRIBUTE.UINT16, ATTRIBUTE.INT16, ATTRIBUTE.INT32, ATTRIBUTE.INT64,
            ATTRIBUTE.UINT32, ATTRIBUTE.UINT64}
# of a tensor: MindIR's number of its type -> (the type of its bytes, MindSpore's type)
DTYPES = {TENSOR.FLOAT: (np.float32, mstype.float32), TENSOR.UINT8: (np.uint8, mstype.uint8),
          TENSOR.INT8: (np.int8, mstype.int8), TENSOR.UINT16: (np.uint16, mstype.uint16),
          TENSOR.INT16: (np.int16, mstype.int16), TENSOR.INT32: (np.int32, mstype.int32),
          TENSOR.INT64: (np.int64, mstype.int64), TENSOR.BOOL: (np.bool_, mstype.bool_),
          TENSOR.FLOAT16: (np.float16, mstype.float16), TENSOR.DOUBLE: (np.float64, mstype.float64),
          TENSOR.FLOAT64: (np.float64, mstype.float64), TENSOR.UINT32: (np.uint32, mstype.uint32),
          TENSOR.UINT64: (np.uint64, mstype.uint64), TENSOR.COMPLEX64: (np.complex64, mstype.complex64),
          TENSOR.COMPLEX128: (np.complex128, mstype.complex128), TENSOR.BFLOAT16: (np.uint16, mstype.bfloat16)}


class PlanError(Exception):
    """A plan cannot be computed as it is; the text names the operator, the user's line and what to do.

    Args:
        by_all: all ranks raise the same; one of them tells it.
    """

    def __init__(self, text, by_all=False):
        super().__init__(text)
        self.by_all = by_all


FLOW = ("Switch", "SwitchLayer", "Partial")


class _Monad:
    """What orders side effects in a graph; it carries no value."""

    def __repr__(self):
        return "monad"


MONAD = _Monad()


@dataclasses.dataclass
class Node:
    """One operator of a plan, as one rank runs it."""

    op: str                 # "MatMul"
    name: str               # the scope, "Default/net-Net/MatMul-op0"
    output: str             # the name of its value; inputs are such names, of constants, parameters and arguments too
    inputs: list
    attributes: dict
    planned: list           # (MindSpore dtype, shape) of each output; [] where the plan does not say
    instance: str = ""      # the name that MindSpore gave this use of the operator
    order: int = 0          # how many operators of this kind stand before it


@dataclasses.dataclass
class Plan:
    """One graph of one rank."""

    phase: str
    inputs: dict            # name of each argument -> (MindSpore dtype, shape), or None where the plan does not say
    parameters: dict        # name of the value -> name of the MindSpore Parameter
    constants: dict         # name -> value
    nodes: list
    outputs: list
    layouts: dict           # as MindSpore gives them, by parameter
    text: str               # the same graph, as MindSpore writes it for people, where the user's lines stand
    counts: dict = dataclasses.field(default_factory=dict)  # how many operators of each kind there are
    notes: list = dataclasses.field(default_factory=list)  # what is wrong with its numbers: modes.notes_of()
    stages: int = 1         # of a pipeline
    slices: object = None   # in how many slices the ranks bring the arguments; see modes.slices_of_arguments()

    def near(self, node):
        """The user's line of a node; else its optimizer, "of nn.Lamb"; else, as "near file:line", that of what it works
        on, or of what works on it.
        """
        if self.source(node):
            return self.source(node)
        if optimizer_of(node.name):  # what it works on are other cells' lines
            return optimizer_of(node.name)
        makers = {other.output: other for other in self.nodes}
        for forward in (False, True):
            seen, front = {node.output}, [node]
            while front:
                if forward:
                    front = [other for other in self.nodes if other.output not in seen and any(
                        before.output in other.inputs for before in front)]
                else:
                    front = [makers[name] for before in front for name in before.inputs
                             if name in makers and name not in seen]
                seen.update(other.output for other in front)
                lines = [line for line in map(self.source, front) if line]
                if lines:
                    return f"near {lines[0]}"
        return ""

    def source(self, node):
        """The user's line of a node, "file:line", or "" where the compiler made it or no longer knows."""
        if not hasattr(self, "_sources"):
            self._sources = user_lines(self.text)
        lines = self._sources.get(node.op, [])
        same = self.counts.get(node.op)
        return lines[node.order] if len(lines) == same else ""


def user_lines(text):
    """Of each kind of operator in the text of a graph the users' lines, {"MatMul": ["net.py:12", ""]}."""
    found, lines = {}, text.splitlines()
    for i, line in enumerate(lines):
        match = graph_ir.NODE.match(line)
        if match:
            end = next(j for j in range(i + 1, len(lines) + 1) if j == len(lines) or lines[j][:6].strip())
            found.setdefault(match.group(1), []).append(graph_ir.user_line(lines[i:end]))
    return found


def optimizer_of(scope):
    """"of nn.Lamb" for a node's scope such as Default/optimizer-Lamb/Mul-op0, or ""."""
    kinds = [getattr(nn, cell.rpartition("-")[2], None) for cell in scope.split("/")]
    return next((f"of nn.{kind.__name__}" for kind in kinds if isinstance(kind, type) and issubclass(
        kind, nn.Optimizer)), "")


def flow_line(text):
    """Where the control flow of a graph stands, "file:line: ", or ""."""
    lines = user_lines(text)
    return next((f"{line}: " for op in FLOW for line in lines.get(op, ()) if line), "")


def tensor_of(proto):
    """A constant tensor."""
    if proto.data_type not in DTYPES:
        raise PlanError(f"the plan holds a constant of the unknown type {proto.data_type}")
    bytes_as, dtype = DTYPES[proto.data_type]
    array = np.frombuffer(proto.raw_data, bytes_as).reshape(tuple(proto.dims))
    if dtype == mstype.bfloat16:
        return Tensor((array.astype(np.uint32) << 16).view(np.float32), mstype.bfloat16)
    return Tensor(array.copy(), dtype)


def scalar_of(attribute):
    """The number or text of an attribute, or of an item of a tuple."""
    fields = {ATTRIBUTE.FLOAT: ("floats", "f"), ATTRIBUTE.DOUBLE: ("doubles", "d"), ATTRIBUTE.STRING: ("strings", "s")}
    many, one = fields.get(attribute.type) or ("ints", "i")
    value = getattr(attribute, many)[0] if getattr(attribute, many) else getattr(attribute, one)
    if attribute.type == ATTRIBUTE.BOOL:
        return bool(value)
    return value.decode() if isinstance(value, bytes) else value


SCALARS = INTEGERS | {ATTRIBUTE.BOOL, ATTRIBUTE.FLOAT, ATTRIBUTE.DOUBLE, ATTRIBUTE.STRING}


def value_of(attribute):
    """The Python value or Tensor of a MindIR attribute."""
    kind = attribute.type
    if kind in (ATTRIBUTE.TUPLE, ATTRIBUTE.LIST):
        value = [value_of(part) for part in attribute.values]
        value = tuple(value) if kind == ATTRIBUTE.TUPLE else value
    elif kind in SCALARS:
        value = scalar_of(attribute)
    elif kind == ATTRIBUTE.TENSORS and len(attribute.tensors) == 1:
        proto = attribute.tensors[0]
        alone = not proto.raw_data and not proto.dims  # a type alone, as an operator's dtype
        value = DTYPES[proto.data_type][1] if alone and proto.data_type in DTYPES else tensor_of(proto)
    elif kind in (ATTRIBUTE.UMONAD, ATTRIBUTE.IOMONAD):
        value = MONAD
    elif kind in (ATTRIBUTE.NONE, ATTRIBUTE.TYPE_NULL):
        value = None
    elif kind == getattr(ATTRIBUTE, "FUNCTOR", None):
        raise PlanError("a shape that is known only while the graph runs, as of ops.masked_select() or x[mask], is not "
                        "computed; multiply by the mask")
    else:
        raise PlanError(f"the plan holds a value of the kind {ATTRIBUTE.AttributeType.Name(kind)}, which this program "
                        "does not know")
    return value


def planned_tensors(protos):
    """(dtype, shape) of each."""
    return [(DTYPES[proto.data_type][1], tuple(proto.dims)) for proto in protos if proto.data_type in DTYPES]


def planned_outputs(attribute):
    """(dtype, shape) of what a node promises."""
    if attribute.type == ATTRIBUTE.TENSORS:
        return planned_tensors(attribute.tensors)
    if attribute.type in (ATTRIBUTE.TUPLE, ATTRIBUTE.LIST):
        return [leaf for part in attribute.values for leaf in planned_outputs(part)]
    return []


def read(model_bytes, phase, layouts, text=""):
    """Read a plan.

    Args:
        model_bytes: what the executor's get_func_graph_proto(phase, "mind_ir") returns.
        phase: the graph's name.
        layouts: what get_parameter_layout(phase) returns.
        text: the graph as MindSpore writes it for people, for the users' lines.

    Raises:
        PlanError: it holds what this program cannot compute.
    """
    model = mind_ir.ModelProto()
    model.ParseFromString(model_bytes)
    graph = model.graph
    if graph.map_parameter:
        raise PlanError("the plan holds a hash table (MapParameter), which is not computed on CPU")
    primitives = {primitive.name: primitive for primitive in model.primitives}
    counts, constants, nodes = {}, {}, []
    parameters = {proto.name: proto.ref_key or proto.name.rpartition(":")[2] for proto in graph.parameter}
    inputs = {item.name: (planned_tensors(item.tensor) or [None])[0] for item in graph.input}
    plan = Plan(phase, inputs, parameters, constants, nodes,
                [item.name for item in graph.output], layouts, text, counts)
    for proto in graph.node:
        if proto.op_type == "Constant":
            constants[proto.output[0]] = value_of(proto.attribute[0])
            continue
        primitive = primitives.get(proto.op_type.partition("REF::")[2])
        op = primitive.op_type if primitive else proto.op_type.partition("::")[2].partition(":")[0] or proto.op_type
        node = Node(op, proto.domain or proto.name, proto.output[0], list(proto.input), {}, [],
                    primitive.instance_name if primitive else "", counts.get(op, 0))
        counts[op] = node.order + 1
        nodes.append(node)
        for attribute in proto.attribute:
            if attribute.name == "shape":
                node.planned = planned_outputs(attribute)
        if primitive is None or op in FLOW:
            line, optimizer = flow_line(text), optimizer_of(node.name)
            remedy = ("write the loop or the condition in Python, outside the graph; where you wrote none, the "
                      "function that this line calls has one, as ops.clip_by_norm: use another"
                      if line or not optimizer else
                      "take another optimizer")
            raise PlanError(f"{line}control flow that is decided while the graph runs "
                            f"({', '.join(filter(None, [op, optimizer]))}) is not computed: {remedy}", by_all=True)
        for attribute in primitive.attribute:
            try:
                node.attributes[attribute.name] = value_of(attribute)
            except PlanError as error:
                node.attributes[attribute.name] = error  # who needs it raises it
    return plan


def where(plan, node):
    """A node for people: operator, scope and the user's line."""
    return f"{node.op} ({plan.near(node) or 'made by the compiler'}, {node.name})"
