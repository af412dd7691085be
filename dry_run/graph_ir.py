"""Read the compiled graphs that MindSpore writes as text (MS_DEV_SAVE_GRAPHS, `*_validate_*.ir`).

`validate` is the last graph of the compiler's frontend: strategies are applied, collectives are inserted,
parameters have the shape that this rank keeps. What the backend does later (kernels, memory, fusion) is not
in it.
"""
from __future__ import annotations

import math
import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

BYTES = {"Bool": 1, "Int4": 1, "Int8": 1, "UInt8": 1, "Int16": 2, "UInt16": 2, "Float16": 2, "BFloat16": 2,
         "Int32": 4, "UInt32": 4, "Float32": 4, "Int64": 8, "UInt64": 8, "Float64": 8, "Complex64": 8,
         "Complex128": 16}
COLLECTIVES = ("AllReduce", "AllGather", "AllGatherV", "ReduceScatter", "ReduceScatterV", "Broadcast",
               "Reduce", "Send", "Receive", "AlltoAll", "AllToAll", "AllToAllv", "AlltoAllV",
               "NeighborExchange", "NeighborExchangeV2", "CollectiveScatter", "CollectiveGather", "Barrier",
               "BatchISendIRecv")
ON_SLICES = re.compile(r"BatchParallel: Bool\(1\)|Arg(?:[mM]ax|[mM]in)(?:WithValue)?\(|"
                       r"TensorScatter(?:Add|Sub|Mul|Div)\(")  # what on_slices() looks at
PARAMETER = re.compile(r"^%para\d+_[^:]*: <Ref\[Tensor\[(\w+)\]\], \(([-\d, ]*)\), ref_key=([^,>]+)",
                       re.MULTILINE)
NODE = re.compile(r"^  %\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(")
NEXT_NODE = re.compile(r"\n(?=  (?:%\d+|Return)\()")  # a node has many lines, if it has constant tensors
CALL = re.compile(r" = call (@[^(\s]+)\(| = %\d+\[(@.*?)\]\(")  # the second calls what a Partial or a Switch gave
CALLED = re.compile(r"@+(?!Partial\(|FuncUnion\()([^@\s(),\]][^\s(),\]]*)")  # @@: a graph that a graph has returned
NO_GRADIENT = re.compile("StopGradient|UpdateState|Arg[mM](ax|in)(Ext)?|((Not)?Eq|Greater|Less|Logical)[A-Za-z]*|"
                         "(Zeros|Ones)Like[A-Za-z]*|Shape|Sign|Floor|Ceil|Round")
MIXES = re.compile(r"(Batch)?MatMul\w*|Dense|Conv\w*|Gather\w*|Embedding\w*")  # a slice with what others hold
MENTIONED = re.compile(r"(?<!\$\()@([^\s(),:\]]+)")  # $(@graph:value) is a value of a graph around this one
PLANNED_SUM = re.compile(r" = AllReduce\((%\d+)\) \{instance name: (\w+).* group_rank_ids: \(([\d, ]*)\)")
SCOPE = re.compile(r"Fullname with scope: \((.*)/")
SOURCE = re.compile(r"# In file (.+?):(\d+)[~,]")


class Collective(NamedTuple):
    """One collective of a graph, as one rank runs it."""

    op: str
    group: str                  # the group's name
    ranks: tuple[int, ...]      # the group's members where the graph names them, else empty
    dtype: str
    shape: tuple[int, ...]      # of what this rank contributes; of the result for AllGather and Receive
    bytes: int                  # of a tensor of this shape
    reduce: str                 # "sum", "max", ... or ""
    fusion: int                 # the backend joins equal numbers above 0 into one call
    peer: int | None            # Send and Receive: the other rank, counted within the group
    tag: int | None             # Send and Receive
    source: str                 # the user's line, "file:line", or "" where the compiler inserted it


class Graph(NamedTuple):
    """What the dry run wants to know of one graph."""

    parameters: dict            # name -> (dtype, shape)
    collectives: list           # in the order of the text, subgraphs as often as they are called, both of a condition
    output: object              # nested tuples of (dtype, shape)


def split_top(text):
    """Split at commas that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def leaf_types(text):
    """'Tuple[Tensor[Float32],Tuple[Tensor[Int32]*2]]' -> ['Float32', 'Int32', 'Int32']."""
    text, _, times = text.partition("*") if text.rfind("*") > text.rfind("]") else (text, "", "1")
    name, _, inside = text.partition("[")
    if name in ("Tuple", "List", "Ref"):
        leaves = [leaf for part in split_top(inside[:-1]) for leaf in leaf_types(part)]
    else:
        leaves = [inside[:-1] or name]
    return leaves * int(times)


def value(types, shape):
    """Join the leaf types (an iterator) with the shape's text: nested tuples of (dtype, shape)."""
    head, _, inside = shape.partition("(")
    if head in ("TupleShape", "ListShape"):
        return tuple(value(types, part) for part in split_top(inside[:-1]))
    dims = () if shape == "NoShape" else tuple(int(dim) for dim in inside[:-1].split(",") if dim.strip())
    return next(types), dims


def values(text):
    """'(<Tensor[Float32], (4, 3)>, <Bool, NoShape>)' -> [('Float32', (4, 3)), ('Bool', ())]."""
    found = []
    for item in re.findall(r"<([^<>]*)>", text):
        kind, shape = (split_top(item) + ["NoShape"])[:2]
        found.append(value(iter(leaf_types(kind)), shape))
    return found


def leaves_of(tree):
    """The (dtype, shape) leaves of what `value` returns."""
    if tree and isinstance(tree[0], str):
        return [tree]
    return [leaf for part in tree for leaf in leaves_of(part)]


def size(dtype, shape):
    """Bytes of a tensor; unknown dimensions (-1) count as one."""
    return BYTES.get(dtype, 8) * math.prod(abs(dim) for dim in shape)


def collective(op, attributes, types, source):
    """Make a Collective of a node's attributes and of its line of types."""
    def find(pattern, default=None):
        match = re.search(pattern, attributes)
        return match.group(1) if match else default

    inputs, _, outputs = types.partition(" -> ")
    tensors = [leaf for tree in values(outputs if op in ("AllGather", "AllGatherV", "Receive") else inputs)
               for leaf in leaves_of(tree) if leaf[0] in BYTES]
    ranks = find(r"group_rank_ids: \(([\d, ]*)\)") or find(r"rank_list: \(([\d, ]*)\)") or ""
    peer, tag = find(r"(?:dest|src)_rank: I64\((\d+)\)"), find(r"sr_tag: I64\((\d+)\)")
    dtype, shape = tensors[0] if tensors else ("", ())
    return Collective(
        op, group=find(r'group: "([^"]*)"', ""), ranks=tuple(map(int, re.findall(r"\d+", ranks))),
        dtype=dtype, shape=shape, bytes=sum(size(*tensor) for tensor in tensors),
        reduce=find(r'[ {]op: "(\w+)"', ""), fusion=int(find(r"fusion: I64\((-?\d+)\)", 0)),
        peer=peer and int(peer), tag=tag and int(tag), source=source)


def user_line(lines):
    """The last 'In file' of some lines that is not MindSpore's own, as 'file:line', or ''."""
    for line in reversed(lines):
        match = SOURCE.search(line)
        if match and "-packages/" not in match.group(1):
            return f"{match.group(1)}:{match.group(2)}"
    return ""


def python_in(text):
    """Where a graph has Python that runs while the graph does, "PyExecute, file:line"; None if it has none."""
    found = re.search(r"= PyExecute\(.*((?:\n      .*)*)", text)
    return found and ", ".join(filter(None, ("PyExecute", user_line(found[1].splitlines()))))


def users_frame(stack, own):
    """The innermost frame of the user's files in a stack of the module traceback, or None.

    Args:
        stack: a list of FrameSummary, the innermost last.
        own: how the names of this program's files begin, as a tuple.
    """
    others = ("<frozen", os.path.dirname(os.__file__), *own)
    return next((frame for frame in reversed(stack)
                 if "-packages/" not in frame.filename and not frame.filename.startswith(others)), None)


def user_frame(error, own):
    """The innermost line of the user's files that led to an exception, (file, line, text); own: as in users_frame()."""
    if isinstance(error, SyntaxError):
        return error.filename, error.lineno, (error.text or "").strip()
    frame = users_frame(traceback.extract_tb(error.__traceback__), own)
    return (frame.filename, frame.lineno, frame.line) if frame else ("", 0, "")


def describe(error, own):
    """What a person needs of an exception: its first paragraph and the user's line."""
    text = str(error)
    file, line, code = user_frame(error, own)
    places = [place for place in SOURCE.findall(re.sub(r"\n(# \d+ )?In file", "\n# In file", text))
              if "-packages/" not in place[0]]
    if places:  # a line of the network says more than the call of train(); numbered, the innermost is the last
        file, number = places[-1 if "\n# 0 In file" in text else 0]
        line = int(number)
        code = Path(file).read_text(errors="replace").splitlines()[line - 1].strip() if Path(file).is_file() else ""
    return {"type": type(error).__name__, "message": text.partition("\n\n---")[0].strip(), "file": file,
            "line": line, "code": code}


def norms_of_slices(text):
    """How many norms of ops.clip_by_global_norm a graph takes without adding up what other ranks hold.

    MindSpore adds it up by an AllReduce of its own, between the sum of the squares (AddN) and its root.
    """
    count = 0
    for subgraph in text.split("\nsubgraph @")[1:] if "_ClipByGlobalNorm(" in text else ():
        nodes = dict(re.findall(r"^  (%\d+)\(.*?\) = (.*(?:\n      .*)*)", subgraph, re.MULTILINE))
        for node in nodes.values():
            if node.startswith("PrimFunc_Sqrt(") and "_ClipByGlobalNorm(" in node:
                before = node
                while before and not re.match(r"PrimFunc_AddN\(|AllReduce\(.*PARALLEL_GLOBALNORM", before):
                    first = re.match(r"\w+\((%\d+)", before)
                    before = nodes.get(first[1], "") if first else ""
                count += before.startswith("PrimFunc_AddN(")
    return count


def norms_of_optimizers(text):
    """What, as scripts call it, takes norms or means of weights or gradients in a graph's optimizer, sorted."""
    operators = {"LARSUpdate": "nn.LARS", "Lamb": "nn.Lamb", "Centralization": "grad_centralization"}
    found = {operators[name] for name in re.findall(rf" = ({'|'.join(operators)})\(", text)}
    return sorted(found | {"nn.AdaFactor"} if "-AdaFactor/" in text else found)


def trained_by(planned):
    """Names of the parameters whose gradients the graph `step_parallel_end`, a text, asks for; and those of all."""
    names = dict(re.findall(r"^%(para\d+_[^:]*): <Ref.*?ref_key=([^,>]+)", planned, re.MULTILINE))
    return {names.get(ref) for ref in re.findall(r"= RefToEmbed\((?:\$\(@[^:]+:|%)(para\d+_[^)]+)\)", planned)}, names


def only_read(planned):
    """Names of parameters that the graph `step_parallel_end`, a text, uses without their gradient; none where it asks
    for no gradient at all.
    """
    trained, names = trained_by(planned)
    lines = [line for line in re.findall(r"\n  %\d+\(.*", planned) if " = Receive(" not in line]  # it only names one
    used = {names.get(ref) for line in lines for ref in re.findall(r"[:%](para\d+_[^),: ]+)(?=[),])", line)}
    return used - trained if trained else set()


def norms_of_shared(text, planned):
    """Names of trained parameters that a stage sends to another one which uses them, too, where all's norm is taken."""
    if "_ClipByGlobalNorm(" not in text:
        return []
    return sorted(set(re.findall(r"= Send\((?:\$\(@[^:]+:|%)para\d+_([^),]+)", text)) & trained_by(planned)[0])


def unreduced(planned, wanted):
    """What MindSpore forgets to add up, or to exchange, on the way back.

    It puts _MirrorOperator, which adds up the gradient of a parameter, before all operators but Transpose. What it puts
    into a cell with a bprop of its own, that or a collective, does nothing: the bprop is what runs on the way back.

    Args:
        planned: the graph `step_parallel_end` as text.
        wanted: names of parameters that some ranks hold alike.

    Returns:
        ({name of a parameter that is transposed: sources}, sources of such cells); sources, a set, are "file:line" of
        scripts.
    """
    trained, names = trained_by(planned)
    transposed, cells = {}, set()
    for subgraph in planned.split("\nsubgraph attr:")[1:] if trained else ():
        about, *nodes = NEXT_NODE.split(subgraph)
        loaded = {}
        if "primal_of_bprop: 1" in about and re.search(rf"= (_Mirror\w*|{'|'.join(COLLECTIVES)})\(", subgraph):
            cells.add(user_line(about.splitlines()))
        for node in nodes if "= J(@" not in subgraph else ():
            head, operator = node.partition("\n      : ")[0], NODE.match(node)
            taken = {names.get(ref) for ref in re.findall(r"[:%](para\d+_[^),]+)", head)}.union(
                *(loaded.get(value, ()) for value in re.findall(r"%\d+(?=[,)])", head.partition(" = ")[2])))
            if operator and operator[1] in ("Load", "Cast"):
                loaded[re.match(r"  (%\d+)", head)[1]] = taken
            elif "in_strategy: " in head and not (operator and operator[1] == "Receive"):  # which only names one
                for name in taken & trained & wanted:
                    if is_returned(nodes, node):
                        transposed.setdefault(name, set()).update({user_line(node.splitlines())} - {""})
    return transposed, cells - {""}


def by_inputs(planned):
    """Does a plan that cuts something, the text `step_parallel_end`, use gradients by inputs? Those by parameters come
    before them.
    """
    return bool(re.search(r"(in|gen)_strategy: \([^}]*[2-9]", planned) and re.search(
        r"= TupleGetItem\(%\d+, I64\([1-9]\d*\)\).*\n +: \(<Tuple\[Object:EnvType", planned))


def outside(planned, cut):
    """Where a step multiplies slices besides the function that it differentiates: MindSpore plans only that.

    Args:
        planned: the graph `step_parallel_end` as text.
        cut: names of parameters of which a rank holds a slice.

    Returns:
        "file:line" of scripts, a set; "" in it: MindSpore does not say where.
    """
    names = trained_by(planned)[1]
    bodies = {re.match("[^ (]+", part)[0]: part.partition("\n")[2].partition("\n}\n")[0]
              for part in planned.split("\nsubgraph @")[1:]}
    found, differentiated = set(), re.findall(r"= J\(@([^\s(),]+)\)", planned)
    reached = set(differentiated)
    while differentiated:
        more = {*MENTIONED.findall(re.sub("\n      # .*", "", bodies.get(differentiated.pop(), "")))} - reached
        reached |= more
        differentiated += more
    for name, body in bodies.items() if reached else ():
        slices = set()  # values that are, or are made of, a slice
        for node in NEXT_NODE.split(body) if name not in reached else ():
            head, _, comments = node.partition("\n      : ")
            operator = NODE.match(head)
            if not operator or operator[1] in ("UpdateState", "MakeTuple"):
                continue
            inputs = head.partition(" = ")[2].partition(")")[0]
            inputs = inputs.partition(",")[0] if operator[1] == "Depend" else inputs
            if not (slices.intersection(re.findall(r"%\d+\b", inputs)) or cut.intersection(
                    names.get(ref) for ref in re.findall(r"[%:](para\d+_[^),]+)", inputs + ")"))):
                continue
            slices.add(re.match(r"  (%\d+)", head)[1])
            if MIXES.fullmatch(operator[1]):
                found.add(next((f"{place[1]}:{place[2]}" for line in comments.splitlines() if (
                    place := SOURCE.search(line)) and "-packages/" not in place[1] and not re.search(
                        r"/\s*(async )?def ", line)), ""))
    return found


def moved_into_sums(text):
    """Where MindSpore has made AllReduce(x + z) * y of AddN((AllReduce(x) * y, z)), and y is not 1 / N: by a pass meant
    for the mean of a gradient and its weight decay. What it makes is in the scope of AddN, a planned sum in that of the
    operator which it is for.

    Returns:
        "file:line" of scripts, a set; "" in it: MindSpore does not say where.
    """
    found = set()
    for subgraph in text.split("\nsubgraph @")[1:] if "AddN(" in text else ():
        nodes, moved, lines = {}, {}, {}  # by number; of a sum: how many ranks, and its line; by its name: its line
        for node in NEXT_NODE.split(subgraph)[1:]:
            head = node.partition("\n      : ")[0]
            number = head.partition("(")[0].strip()
            nodes[number] = node
            if planned := PLANNED_SUM.search(head):
                inside = nodes.get(planned[1], "")
                its_line = lines.setdefault(planned[2], user_line(inside.splitlines()))
                if " = PrimFunc_AddN(" in inside and SCOPE.findall(inside) == SCOPE.findall(node):
                    moved[number] = planned[3].count(",") + 1, user_line(node.splitlines()) or its_line
            product = moved and re.search(r" = PrimFunc_Mul\((.*?)\) (?:primitive|cnode)_", head)
            pair = split_top(product[1]) if product else []
            for factor, other in zip(pair, pair[::-1]):
                value = re.fullmatch(r"Tensor\(shape=\[\], dtype=\w+, value=(.*)\)", other)
                if factor in moved and not (value and abs(float(value[1]) * moved[factor][0] - 1) < 1e-3):
                    found.add(moved[factor][1])
    return found - {""} or found


def is_returned(nodes, node):
    """Does a subgraph return what a node of it makes, or what is made of that, and that has a gradient?"""
    reached = {re.match(r"  (%\d+)", node)[1]}
    for other in nodes[nodes.index(node) + 1:]:
        if reached.intersection(re.findall(r"%\d+(?=[,)])", other.partition("\n")[0].partition("(")[2])):
            if other.startswith("  Return("):
                return True
            operator = NODE.match(other)
            if not operator or not NO_GRADIENT.fullmatch(operator[1]):
                reached.add(re.match(r"  (%\d+)", other)[1])
    return False


def on_slices(text):
    """What each rank computes on its slice alone, whatever belongs to it on other ranks.

    MindSpore cuts operators that it has no rule for by their first dimension (BatchParallelInfo, which ignores a
    strategy of the script). An index along an axis that is cut counts within a slice. Where the rows of a tensor are
    cut, some of its scattering operators take a row of the ranks before as one of theirs (the mask of their rule does
    not know negative differences).

    Returns:
        {(kind, operator): sources}: kind is "no rule", "index" or "rows"; sources, a set, are "file:line" of scripts.
    """
    found = {}
    for subgraph in text.split("\nsubgraph @")[1:] if ON_SLICES.search(text) else ():
        for node in NEXT_NODE.split(subgraph)[1:]:
            head, _, comments = node.partition("\n      : ")
            if not ON_SLICES.search(head):
                continue
            strategy = re.findall(r"in_strategy: \(\((.*?)\)", head)
            cuts = [int(cut) for cut in re.findall(r"\d+", strategy[-1] if strategy else "")]
            if not cuts:  # outside of what is differentiated, or of a number
                continue
            operator = NODE.match(head)
            if not operator:
                continue
            number, name = head.partition("(")[0].strip(), operator[1]
            axis = re.search(r"(?:axis: |\w\(%\d+, )I64\((-?\d+)\)", head)
            depth = re.match(r"\(<[^>]*>, <Tensor\[Int\d+\], \((?:\d+, )*(\d+)\)>", comments)  # of the indices
            kind = ""
            if "BatchParallel: Bool(1)" in head:
                kind = "no rule" * (max(cuts) > 1)
            elif name.startswith("TensorScatter"):
                kind = "rows" * (max(cuts[:int(depth[1]) if depth else 1]) > 1)
            # An operator with Value in its name has two results: is the index used?
            elif axis and cuts[int(axis[1]) % len(cuts)] > 1 and ("Value" not in name or re.search(
                    rf"TupleGetItem\({number}, I64\(0\)\).*\n.*\n      # Fullname with scope: \((?!Gradients/)",
                    subgraph)):
                kind = "index"
            if kind:
                found.setdefault((kind, name), set()).update({user_line(comments.splitlines())} - {""})
    return found


def read(path):
    """The text of a graph's file."""
    return path.read_text(encoding="utf-8", errors="replace")


def parse(text):
    """Read one graph.

    Args:
        text: content of a `*_validate_*.ir` file.

    Returns:
        Graph.
    """
    parameters = {name: (dtype, tuple(int(dim) for dim in shape.split(",") if dim.strip()))
                  for dtype, shape, name in PARAMETER.findall(text)}
    entry = re.match(r"# IR entry: @(\S+)", text).group(1)
    steps, output = {}, ()  # of each subgraph its collectives and calls (of one subgraph or one of some), in order
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("subgraph @"):
            name = line[len("subgraph @"):].partition("(")[0]
            steps[name] = []
        elif line.startswith("  %"):
            node = NODE.match(line)
            called = CALL.search(line)
            if called:
                steps[name].append(CALLED.findall(called.group(1) or called.group(2)))
            elif node and node.group(1) in COLLECTIVES:
                end = next(j for j in range(i + 1, len(lines)) if not lines[j].startswith("      "))
                steps[name].append(collective(node.group(1), line.partition("cnode_")[0], lines[i + 1],
                                              user_line(lines[i:end])))
        elif line.startswith("  Return(") and name == entry:
            try:
                output = values(lines[i + 1])[0]
            except (StopIteration, ValueError, IndexError):
                output = ()  # a kind of value not known here; who uses it gets an empty tuple

    def expand(name, outer, other_sides):
        """(collectives, subgraphs) of a subgraph, without those that other sides of a condition have reached."""
        found, reached = [], {name}
        for step in steps.get(name, ()):
            if isinstance(step, Collective):
                found.append(step)
                continue
            here = set()
            for side in step:
                if side not in {*outer, *other_sides, *here}:  # in outer: a loop, and how often is not known
                    more, subgraphs = expand(side, (*outer, side), other_sides | here)
                    found += more
                    here |= subgraphs
            reached |= here
        return found, reached

    return Graph(parameters, expand(entry, (entry,), set())[0], output)
