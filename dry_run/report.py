"""Put the ranks of a dry run side by side: what each holds and sends, and where they disagree."""
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import graph_ir
from layouts import slice_begin, sliced_over, unlike_shapes

POINT_TO_POINT = ("Send", "Receive")
UNEVEN = ("AlltoAll", "AllToAll", "AlltoAllV", "AllToAllv", "AllGatherV", "ReduceScatterV",
          "CollectiveScatter", "CollectiveGather")  # members may bring different shapes
LOG_LINE = re.compile(r"\[(WARNING|INFO)\] \w+\(")
LOG_ERROR = re.compile(r"^\[ERROR\] \w+\([^)]*\):\S+ \[[^\]]+\] (?:\w+\] )?(.*)$", re.MULTILINE)


def rank_facts(rank, rank_size, facts, log):
    """What the report says of one rank.

    Args:
        rank, rank_size: its number, and how many there are.
        facts: what one_rank.py wrote of it, or None when it wrote nothing.
        log: all it printed.

    Returns:
        A dict for the JSON report; `error` is None when the rank compiled.
    """
    about = {"rank": rank, "compiled": False, "error": None, "stage": 0, "parameters": [],
             "parameter_bytes": 0, "trained_bytes": 0, "collectives": [], "notes": []}
    if facts is None:
        about["error"] = {"type": "", "message": "the process ended without a word", "file": "", "line": 0,
                          "code": "", "reasons": []}
        return about
    error = wrong_device(facts) or facts["error"] or missing_steps(facts, rank_size)
    if error:
        reasons = [text for text in LOG_ERROR.findall(log)
                   if not text.startswith("CheckFailed") and not text.endswith("failed.")]
        if re.search(r" itself with \d+$", error["message"]) and log:  # the script has said why
            reasons += filter(None, [last_words(log)])
        about["error"] = {**error, "reasons": list(dict.fromkeys(reasons))[:3]}
        return about
    about["compiled"], about["notes"] = True, sorted(set(facts["notes"]))
    graphs = [graph_ir.parse(graph_ir.read(Path(path))) for path in facts["graphs"]]
    for graph in graphs:
        for collective in graph.collectives:
            ranks = collective.ranks or facts["groups"].get(collective.group) or range(rank_size)
            about["collectives"].append({**collective._asdict(), "ranks": list(ranks)})
    groups = {c["group"]: c["ranks"] for c in about["collectives"]}
    parameters = {name: kept for graph in graphs for name, kept in graph.parameters.items()}
    for name, (dtype, shape) in parameters.items():
        layout = facts["layouts"].get(name)
        full = layout[6] if layout and len(layout) > 6 else shape
        about["parameters"].append({
            "name": name, "dtype": dtype, "shape": list(full), "slice_shape": list(shape),
            "bytes": graph_ir.size(dtype, shape), "trained": name in facts["trained"],
            "own": name in facts["layerwise"],
            "over_ranks": sliced_over(rank, layout, shape, groups) if layout else [rank],
            "begin": slice_begin(rank, layout, shape, groups) if layout else [0] * len(shape)})
        if layout:
            about["stage"] = rank // math.prod(layout[0])
    about["parameter_bytes"] = sum(p["bytes"] for p in about["parameters"])
    about["trained_bytes"] = sum(p["bytes"] for p in about["parameters"] if p["trained"])
    return about


def last_words(log):
    """The last line of a log that is no warning of MindSpore's."""
    return next((line for line in reversed(log.splitlines()) if line.strip() and not LOG_LINE.match(line)), "")


def wrong_device(facts):
    """The error of a script that did not run on Ascend, or None."""
    if facts["plugin_error"]:
        text = (f"MindSpore's Ascend plugin did not load: {facts['plugin_error']}; with CANN installed, "
                "source its set_env.sh first")
    elif facts["device"] != "Ascend":
        text = (f"the script chose device {facts['device']} itself (set_device or set_context); "
                "a dry run is of Ascend: leave the choice to MindSpore or to a flag")
    else:
        return None
    return {"file": "", "line": 0, "code": "", **(facts["error"] or {}), "type": "", "message": text}


def missing_steps(facts, rank_size):
    """The error of a script that ran through but was no distributed training, or None."""
    text = None
    if rank_size > 1 and not facts["initialised"]:
        text = ("the script never called mindspore.communication.init(), so each of the "
                f"{rank_size} processes trains alone; call it before the network is built")
    elif not facts["network"]:
        text = (f"the script compiled no graph{' but that of its optimizer' * bool(facts['graphs'])}; a dry run sees "
                "graphs only: GRAPH_MODE, or functions and cells under mindspore.jit")
    return text and {"type": "", "message": text, "file": "", "line": 0, "code": ""}


def faults(ranks):
    """What ranks that should agree do not agree on.

    Args:
        ranks: dicts of `rank_facts`; only those that compiled are compared.

    Returns:
        A list of {"kind", "group", "ranks", "text", "source"}.
    """
    ranks = {about["rank"]: about for about in ranks if about["compiled"]}
    groups = list(group_faults(ranks))
    explained = {fault["group"] for fault in groups}
    return [*groups, *message_faults(ranks), *shape_faults(ranks),
            *(fault for fault in sequence_faults(ranks) if fault["group"] not in explained)]


def group_faults(ranks):
    """Groups of one name with different members."""
    seen = defaultdict(dict)  # group -> members -> [(rank, source)]
    for rank, about in ranks.items():
        for c in about["collectives"]:
            seen[c["group"]].setdefault(tuple(c["ranks"]), []).append((rank, c["source"]))
    for group, variants in seen.items():
        users = {members: sorted({rank for rank, _ in uses}) for members, uses in variants.items()}
        for members, using in users.items():
            outside = [rank for rank in using if rank not in members]
            if outside:
                yield {"kind": "group", "group": group, "ranks": outside, "source": variants[members][0][1],
                       "text": f"{spell(outside)} uses group {group!r} of ranks {short(members)}, "
                               "and is not among them"}
        for members, using in list(users.items())[1:]:
            first, others = next(iter(users.items()))
            if set(members) & set(others) or set(first) & set(using):
                yield {"kind": "group", "group": group, "ranks": using, "source": variants[members][0][1],
                       "text": f"group {group!r} is ranks {short(members)} for {spell(using)}, "
                               f"but ranks {short(first)} for {spell(others)}"}


def message_faults(ranks):
    """Sends without their Receive, and Receives without their Send."""
    messages = {"Send": defaultdict(list), "Receive": defaultdict(list)}
    for rank, about in ranks.items():
        for c in about["collectives"]:
            if c["op"] in messages:
                if c["peer"] is None or c["peer"] >= len(c["ranks"]):
                    yield {"kind": c["op"], "group": c["group"], "ranks": [rank], "source": c["source"],
                           "text": f"rank {rank}: {c['op']} names "
                                   f"{'no rank' if c['peer'] is None else 'rank ' + str(c['peer'])} of group "
                                   f"{c['group']!r}, which has {len(c['ranks'])} members"}
                    continue
                other = c["ranks"][c["peer"]]
                ends = (rank, other) if c["op"] == "Send" else (other, rank)
                key = (*ends, c["group"], c["tag"], c["dtype"], tuple(c["shape"]))
                messages[c["op"]][key].append(c["source"])
    for op, other_op, own, far in (("Send", "Receive", 0, 1), ("Receive", "Send", 1, 0)):
        for key, sources in messages[op].items():
            lacking = len(sources) - len(messages[other_op].get(key, ()))
            if lacking > 0 and key[far] in ranks:
                word = "to" if op == "Send" else "from"
                yield {"kind": op, "group": key[2], "ranks": [key[own], key[far]], "source": sources[-1],
                       "text": (f"rank {key[own]}: {op} {word} rank {key[far]} (group {key[2]!r}, "
                                f"tag {key[3]}, {key[4]} {key[5]}) has no {other_op} on rank {key[far]}"
                                + (f", {lacking} times" if lacking > 1 else ""))}


def shape_faults(ranks):
    """Parameters of which ranks hold slices of unlike wholes."""
    cut = {rank: {p["name"]: p["shape"] for p in about["parameters"] if p["trained"] and p["shape"] != p["slice_shape"]}
           for rank, about in ranks.items()}
    for text, *between in unlike_shapes(cut):
        yield {"kind": "shape", "group": "", "ranks": between, "source": "", "text": text}


def sequence_faults(ranks):
    """Members of a group that do not run the same collectives in the same order."""
    members = {c["group"]: c["ranks"] for about in ranks.values() for c in about["collectives"]}
    for group, inside in members.items():
        runs = {}  # rank -> [(what, source)]
        for rank in inside:
            if rank in ranks:
                runs[rank] = [(call(c), c["source"]) for c in ranks[rank]["collectives"]
                              if c["group"] == group and c["op"] not in POINT_TO_POINT]
        if len(runs) < 2:
            continue
        first = max(runs, key=lambda rank: (len(runs[rank]), -rank))
        for rank, own in runs.items():
            theirs = runs[first]
            if [what for what, _ in own] == [what for what, _ in theirs]:
                continue
            at = next((i for i, (a, b) in enumerate(zip(own, theirs)) if a[0] != b[0]), len(own))
            here = own[at][0] if at < len(own) else "nothing"
            source = own[at][1] if at < len(own) else theirs[at][1]
            yield {"kind": "sequence", "group": group, "ranks": [first, rank], "source": source,
                   "text": f"group {group!r}: as number {at + 1} rank {rank} runs {here}, "
                           f"but rank {first} runs {theirs[at][0]}"}


def call(c):
    """A collective as all members must run it."""
    shape = "" if c["op"] in UNEVEN else f" of {c['dtype']} {tuple(c['shape'])}"
    return f"{c['op']}{' ' + c['reduce'] if c['reduce'] else ''}{shape}"


def short(ranks):
    """[0, 1, 2, 3, 7] -> '0-3,7'."""
    parts = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def spell(ranks):
    """'rank 3' or 'ranks 0-7'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {short(ranks)}"


def amount(count):
    """Bytes for people, exact up to a megabyte: '6,952 B', '97.5 MiB'."""
    return f"{count:,} B" if count < 1 << 20 else f"{count / (1 << 20):,.1f} MiB"


def alike(about):
    """Ranks for which this is equal are described once."""
    error = about["error"] or {}
    calls = Counter((call(c), c["op"], c["bytes"], c["fusion"], len(c["ranks"]))
                    for c in about["collectives"])
    return (about["stage"], error.get("message"), error.get("line"), tuple(error.get("reasons", ())),
            tuple((p["name"], tuple(p["slice_shape"])) for p in about["parameters"]),
            tuple(sorted(calls.items())))


def table(rows, indent="    "):
    """Columns of equal width; the first row is the heading."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return [indent + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows]


def text(report):
    """The report as people read it."""
    command = " ".join([report["script"], *report["args"]])
    ranks = report["rank_size"]
    lines = [f"Dry run of {command} as {ranks} ranks: MindSpore {report['mindspore']}, {report['cann']}", ""]
    kinds = defaultdict(list)
    for about in report["ranks"]:
        kinds[alike(about)].append(about)
    staged = any(about["stage"] for about in report["ranks"])
    for same in kinds.values():
        lines += failed(same) if same[0]["error"] else compiled(same, staged)
        lines.append("")
    for fault in report["faults"]:
        lines.append(f"FAULT {fault['text']}" + (f"\n      {fault['source']}" if fault["source"] else ""))
    for note in sorted({note for about in report["ranks"] for note in about["notes"]}):
        lines += [f"NOTE {note}", ""]
    bad = [about["rank"] for about in report["ranks"] if about["error"]]
    count = len(report["faults"])
    lines.append(f"{len(report['ranks']) - len(bad)} of {len(report['ranks'])} ranks compiled"
                 + (f", {spell(bad)} failed" if bad else "")
                 + f"; {count or 'no'} fault{'s' if count != 1 else ''} between ranks.")
    if len(report["ranks"]) < report["rank_size"]:
        lines.append(f"Only these of {report['rank_size']} ranks were looked at: "
                     f"{short([about['rank'] for about in report['ranks']])}.")
    return "\n".join(lines)


def failed(same):
    """The lines about ranks that failed alike."""
    error = same[0]["error"]
    lines = [f"{spell([about['rank'] for about in same])} FAILED".capitalize().replace("failed", "FAILED")]
    said = ": ".join(filter(None, [error["type"], error["message"]]))
    lines += [f"    {line}" for line in said.splitlines()[:8]]
    lines += [f"    {reason}" for reason in error["reasons"]]
    if error["file"]:
        lines.append(f"    {error['file']}:{error['line']}: {error['code']}")
    if error.get("hint"):
        lines.append(f"    {error['hint']}")
    return lines


def compiled(same, staged):
    """The lines about ranks that compiled alike."""
    ranks = [about["rank"] for about in same]
    parameters = same[0]["parameters"]
    seconds = [about["seconds"] for about in same]
    stage = f", pipeline stage {same[0]['stage']}" if staged else ""
    peak = max(about["peak_bytes"] for about in same)
    took = sorted({f"{min(seconds):.1f}", f"{max(seconds):.1f}"}, key=float)
    lines = []
    lines.append(f"{spell(ranks).capitalize()}{stage}: compiled in {' to '.join(took)} s, "
                 f"at most {amount(peak)} of this machine's memory a rank")
    if not parameters:
        return lines + collective_lines(same)
    lines.append(f"  Parameters a rank: {amount(same[0]['parameter_bytes'])} in {len(parameters)} tensors, "
                 f"{amount(same[0]['trained_bytes'])} of it trained, the rest optimizer state and counters")
    sliced = [p for p in parameters if p["slice_shape"] != p["shape"]]
    if sliced:
        lines.append(f"  Sliced, {amount(sum(p['bytes'] for p in sliced))}:")
        lines += table([("name", "full shape", "slice shape", "over ranks"),
                        *((p["name"], tuple(p["shape"]), tuple(p["slice_shape"]), slices_of(same, i))
                          for i, p in enumerate(parameters) if p["slice_shape"] != p["shape"])])
    own = [p for p in parameters if p["own"]]
    if own:
        lines.append("  A slice by the script's own hand (layerwise_parallel): "
                     + ", ".join(f"{p['name']} {tuple(p['shape'])}" for p in own))
    whole = [p for p in parameters if p["slice_shape"] == p["shape"] and not p["own"]]
    lines.append(f"  Replicated: {len(whole)} tensors, {amount(sum(p['bytes'] for p in whole))}")
    if staged:
        names = [p["name"] for p in parameters if p["trained"]]
        more = f" and {len(names) - 12} more (all with --json)" if len(names) > 12 else ""
        lines.append(f"  Trained in this stage: {', '.join(names[:12])}{more}")
    return lines + collective_lines(same)


def slices_of(same, index):
    """Over which ranks parameter `index` is sliced, for all of some ranks: '0-3; 4-7'."""
    return some(map(short, sorted({tuple(about["parameters"][index]["over_ranks"]) for about in same})))


def across(calls):
    """Over which ranks some collectives go: '0-3; 4-7', for messages '0 to 2; 1 to 3'."""
    if calls[0][1]["op"] not in POINT_TO_POINT:
        return some(map(short, sorted({tuple(c["ranks"]) for _, c in calls})))
    word = "to" if calls[0][1]["op"] == "Send" else "from"
    pairs = sorted({(rank, *c["ranks"][c["peer"]:][:1] * (c["peer"] is not None)) for rank, c in calls})
    return some(f"{rank} {word} {other[0] if other else 'a rank outside of its group'}" for rank, *other in pairs)


def some(names):
    """The first four of some names, and how many more there are."""
    names = list(names)
    return "; ".join(names[:4]) + (f"; {len(names) - 4} more" if len(names) > 4 else "")


def collective_lines(same):
    """The table of collectives of ranks that compiled alike."""
    if not same[0]["collectives"]:
        return ["  Collectives a step: none"]
    parameters = same[0]["parameters"]
    rows, kinds = [("collective", "over ranks", "count", "bytes a step", "")], defaultdict(list)
    for about in same:
        for c in about["collectives"]:
            kinds[c["op"], c["reduce"], len(c["ranks"])].append((about["rank"], c))
    for (op, reduce, _), calls in kinds.items():
        own = [c for rank, c in calls if rank == same[0]["rank"]]
        total = sum(c["bytes"] for c in own)
        fused = {(c["group"], c["fusion"]) for c in own if c["fusion"] > 0}
        alone = sum(c["fusion"] <= 0 for c in own)
        notes = []
        trained = Counter((p["dtype"], tuple(p["slice_shape"])) for p in parameters if p["trained"])
        reduced = Counter((c["dtype"], tuple(c["shape"])) for c in own)
        if op == "AllReduce" and trained and not trained - reduced:
            notes.append(f"all gradients: {amount(same[0]['trained_bytes'])}")
        if len(fused) < len(own) - alone:
            notes.append(f"{len(own) - alone} to be fused into {len(fused)}")
        rows.append((f"{op} {reduce}".strip(), across(calls), len(own), amount(total), ", ".join(notes)))
    return ["  Collectives a step:", *table(rows)]
