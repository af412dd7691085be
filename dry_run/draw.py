"""Draw the plan of a dry run: who holds which slice of what, and which ranks talk to each other.

A column a rank; above, a picture of each of the biggest parameters with the slice that the rank holds filled;
below, a line a collective. `dry_run.py --draw FILE.svg` writes it, from the facts that report.py has gathered.
"""
import textwrap
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import graph_ir
from report import POINT_TO_POINT, amount, short, spell

MOST_RANKS = 16   # columns that a page can show
LABELS = 232      # width of what is written on the left
BOX = 64          # the longer side of a parameter's picture
GREY, DARK = "#bbb", "#333"


def printable(text):
    """A text without what XML does not allow in a file."""
    return text and "".join(char if char.isprintable() else "?" for char in text)


class Page:
    """An SVG that grows from top to bottom."""

    def __init__(self, width):
        self.width, self.y = width, 0
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"})
        self.back = self.add("rect", width="100%", height="100%", fill="white")

    def add(self, kind, text=None, title=None, under=None, **attributes):
        """One element; a title is what a browser shows under the mouse."""
        names = {name.replace("_", "-"): f"{value:g}" if isinstance(value, float) else str(value)
                 for name, value in attributes.items()}
        element = ET.SubElement(self.root if under is None else under, kind, names)
        element.text = printable(text)
        if title:
            ET.SubElement(element, "title").text = printable(title)
        return element

    def write(self, x, y, text, size=11, anchor="start", weight="normal", room=None, fill="black"):
        """A line of text; one longer than `room` loses its middle, and keeps it as its title."""
        most = int((room or self.width) / size / 0.58)
        cut = text if len(text) <= most else f"{text[:most // 2 - 1]}…{text[1 - most // 2:]}"
        element = self.add("text", cut, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill)
        if weight != "normal":
            element.set("font-weight", weight)
        if cut != text:
            ET.SubElement(element, "title").text = printable(text)

    def line(self, x1, y1, x2, y2, stroke="black", width=1, **more):
        """A straight line."""
        return self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width, **more)

    def text(self):
        """The file."""
        self.root.set("viewBox", f"0 0 {self.width} {self.y}")
        self.root.set("width", str(self.width))
        self.root.set("height", str(self.y))
        ET.indent(self.root, " ")
        return ET.tostring(self.root, encoding="unicode") + "\n"


def spelled_slice(parameter):
    """What of a parameter a rank holds, as Python would write it: '[0:512, 32:64]', or 'whole'."""
    if parameter["own"]:
        return "its own slice"
    if parameter["slice_shape"] == parameter["shape"]:
        return "whole"
    cuts = [":" if have == full else f"{begin}:{begin + have}" for begin, have, full in
            zip(parameter["begin"], parameter["slice_shape"], parameter["shape"])]
    while cuts[-1] == ":":
        cuts.pop()
    return f"[{', '.join(cuts)}]"


def is_cut(parameter):
    """Whether a rank holds a part of a parameter only."""
    return parameter["own"] or parameter["slice_shape"] != parameter["shape"]


def biggest(ranks, most):
    """The names of the trained parameters to draw, those first that are cut."""
    found = {}
    for about in ranks:
        for p in about["parameters"]:
            if p["trained"]:
                key = (not is_cut(p), -graph_ir.size(p["dtype"], p["shape"]))
                found[p["name"]] = min(key, found.get(p["name"], key))
    return sorted(found, key=found.get)[:most]


def picture(page, x, y, rank, p):
    """A parameter as a box: rows are its dimension 0, columns the first other one that is cut; the slice filled."""
    shape, held, begin = p["shape"] or [1], p["slice_shape"] or [1], p["begin"] or [0]
    across = next((d for d in range(1, len(shape)) if held[d] != shape[d]), 1)
    (rows, row, height), (columns, column, width) = (
        (shape[d], begin[d], held[d]) if d < len(shape) else (1, 0, 1) for d in (0, across))
    if len(shape) == 1:  # a vector lies, and is never taller than a bar
        (rows, row, height), (columns, column, width) = (columns, column, width), (rows, row, height)
    down, right = (max(16, min(BOX, BOX * side // other)) for side, other in ((rows, columns), (columns, rows)))
    down = 16 if len(shape) == 1 else down
    x, y = x - right / 2, y + (BOX - down) / 2
    page.add("rect", x=x, y=y, width=right, height=down, fill="white", stroke="black")
    page.add("rect", x=x + right * column / columns, y=y + down * row / rows, width=right * width / columns,
             height=down * height / rows, fill=GREY if p["own"] else DARK,
             title=f"rank {rank}: {p['name']} {spelled_slice(p)}")
    for k in range(1, rows // height):
        page.line(x, y + down * k * height / rows, x + right, y + down * k * height / rows, width=0.5)
    for k in range(1, columns // width):
        page.line(x + right * k * width / columns, y, x + right * k * width / columns, y + down, width=0.5)


def parameters(page, ranks, at, column):
    """The pictures of the biggest parameters, and what else each rank holds."""
    stages = sorted({about["stage"] for about in ranks})
    drawn = []
    for stage in stages:
        drawn += [name for name in biggest([a for a in ranks if a["stage"] == stage], 4 if len(stages) == 1 else 2)
                  if name not in drawn]
    for name in drawn:
        held = {about["rank"]: p for about in ranks for p in about["parameters"] if p["name"] == name}
        p = next(iter(held.values()))
        page.write(12, page.y + 26, name, 12, weight="bold", room=LABELS - 20)
        page.write(12, page.y + 42, f"{p['dtype']} {tuple(p['shape'])}", room=LABELS - 20)
        page.write(12, page.y + 57, amount(graph_ir.size(p["dtype"], p["shape"])), room=LABELS - 20)
        for rank, own in held.items():
            picture(page, at[rank], page.y + 4, rank, own)
            for i, part in enumerate(textwrap.wrap(spelled_slice(own), column // 6)[:2]):
                page.write(at[rank], page.y + BOX + 18 + 12 * i, part, 10, "middle")
        page.y += BOX + 40
    page.write(12, page.y + 12, "all other, optimizer's included", 12, weight="bold")
    page.write(12, page.y + 42, "bytes of all parameters", 12, weight="bold")
    for about in ranks:
        rest = [p for p in about["parameters"] if p["name"] not in drawn]
        cut = sum(map(is_cut, rest))
        lines = ([f"{cut} cut"] if cut else []) + [f"{len(rest) - cut} whole"]
        page.write(at[about["rank"]], page.y + 12, ", ".join(lines), 10, "middle")
        page.write(at[about["rank"]], page.y + 42, amount(about["parameter_bytes"]), 10, "middle")
    page.y += 60


def collectives(ranks):
    """Of all ranks the collectives a step: {(what, count, bytes): {ranks: those of them that run it}}.

    Messages are told by their Send, as (from, to); a Receive only where its Send is missing or was not looked at.
    """
    calls = defaultdict(list)  # (rank, op, reduce, members in order) -> bytes of each
    for about in ranks:
        for c in about["collectives"]:
            ends = c["ranks"]
            if c["op"] in POINT_TO_POINT:
                other = ends[c["peer"]] if c["peer"] is not None and c["peer"] < len(ends) else about["rank"]
                ends = [about["rank"], other] if c["op"] == "Send" else [other, about["rank"]]
            calls[about["rank"], f"{c['op']} {c['reduce']}".strip(), tuple(ends)].append(c["bytes"])
    rows = defaultdict(lambda: defaultdict(list))
    for (rank, what, ends), sizes in calls.items():
        if what == "Receive" and calls.get((ends[0], "Send", ends)) == sizes:
            continue
        rows[what, len(sizes), sum(sizes)][ends].append(rank)
    return rows


def lanes(groups, at):
    """Put groups below each other where they would cover each other: [[(ranks, those who run it)]]."""
    found = []
    for ends, users in sorted(groups.items(), key=lambda group: (group[0][0] > group[0][-1], group[0])):
        span = [at[rank] for rank in ends if rank in at]
        if not span:
            continue
        for lane in found:
            if all(max(span) < low or min(span) > high for low, high, *_ in lane):
                lane.append((min(span), max(span), ends, users))
                break
        else:
            found.append([(min(span), max(span), ends, users)])
    return found


def messages(page, ranks, at):
    """A row for each kind of collective."""
    rows = collectives(ranks)
    page.write(12, page.y + 22, "Collectives a step" if rows else "Collectives a step: none", 14, weight="bold")
    page.y += 34
    threads = [page.line(x, page.y, x, page.y, GREY, stroke_dasharray="2 3") for x in at.values()]
    for (what, count, size), groups in rows.items():
        page.write(12, page.y + 16, f"{what} × {count}", 12, weight="bold", room=LABELS - 20)
        page.write(12, page.y + 31, f"{amount(size)} a rank")
        below = lanes(groups, at)
        for i, lane in enumerate(below):
            y = page.y + 18 + 16 * i
            for low, high, ends, users in lane:
                label = f"{what} x {count}, {size:,} B, {spell(users)} of {short(ends)}"
                if what in POINT_TO_POINT:
                    label = f"{what} x {count}, {size:,} B, rank {ends[0]} to {ends[1]}"
                    page.line(at.get(ends[0], low), y, at.get(ends[1], high), y, width=1.5, title=label,
                              marker_end="url(#arrow)")
                    continue
                page.line(low, y, high, y, width=1.5, title=label)
                for rank in set(ends) & set(at):
                    page.add("circle", cx=at[rank], cy=y, r=4.5, stroke="black",
                             fill="black" if rank in users else "white")
        page.y += max(44, 16 * len(below) + 22)
    for thread in threads:
        thread.set("y2", str(page.y - 4))


def heading(page, whole, ranks, at, column):
    """Title, legend, and the columns' names; frames of the stages are drawn by `draw` when their height is known."""
    name = " ".join([Path(whole["script"]).name, *whole["args"]])
    size = max(11, min(15, int((page.width - 20) / 0.6 / len(name))))
    page.write(12, 26, name, size, weight="bold", room=page.width - 20)
    left = f"; drawn: {spell([about['rank'] for about in ranks])}" if len(ranks) < whole["rank_size"] else ""
    page.write(12, 46, f"the plan for {spell(range(whole['rank_size']))} on Ascend, from a dry run{left}")
    legend = [("filled: held by this rank", DARK, 0), ("held by other ranks", "white", 165),
              ("in a collective", None, 300)]
    for text, fill, x in legend:
        if fill:
            page.add("rect", x=12 + x, y=57, width=12, height=12, fill=fill, stroke="black")
        else:
            page.line(12 + x, 63, 36 + x, 63, width=1.5)
            page.add("circle", cx=24 + x, cy=63, r=4.5)
        page.write((30 if fill else 42) + x, 67, text)
    page.line(436, 63, 460, 63, width=1.5, marker_end="url(#arrow)")
    page.write(466, 67, "Send to Receive")
    for about in ranks:
        page.write(at[about["rank"]], 114, f"rank {about['rank']}", 13, "middle", "bold", column)
    page.y = 122


def draw(whole):
    """The SVG of a whole report, or None when no rank compiled."""
    ranks = [about for about in whole["ranks"] if about["compiled"]][:MOST_RANKS]
    if not ranks:
        return None
    column = 104 if len(ranks) <= 8 else 76
    staged, at, x = len({about["stage"] for about in ranks}) > 1, {}, LABELS
    frames = defaultdict(list)
    for about, before in zip(ranks, [ranks[0], *ranks]):
        x += 16 if about["stage"] != before["stage"] else 0
        at[about["rank"]] = x + column / 2
        frames[about["stage"]].append(x)
        x += column
    page = Page(max(x + 12, 580))
    arrow = page.add("marker", under=page.add("defs"), id="arrow", markerWidth=8, markerHeight=8, refX=7, refY=4,
                     orient="auto")
    page.add("path", under=arrow, d="M0,0 L8,4 L0,8 z")
    heading(page, whole, ranks, at, column)
    parameters(page, ranks, at, column)
    page.line(12, page.y, x, page.y, GREY)
    messages(page, ranks, at)
    if staged:
        for stage, lefts in frames.items():
            page.add("rect", x=lefts[0], y=82, width=lefts[-1] - lefts[0] + column, height=page.y - 82, fill="none",
                     stroke="black", rx=6)
            page.write((lefts[0] + lefts[-1] + column) / 2, 97, f"pipeline stage {stage}", 11, "middle")
    faults = [f"FAULT {fault['text']}" for fault in whole["faults"]]
    failed = [about["rank"] for about in whole["ranks"] if not about["compiled"]]
    faults += [f"{spell(failed)} did not compile"] if failed else []
    for line in (part for fault in faults for part in textwrap.wrap(fault, int(page.width / 7))):
        page.y += 16
        page.write(12, page.y, line, 12, weight="bold")
    page.y += 12
    return page.text()
