"""The drawing of a plan (dry_run.py --draw): what it shows is what the report says."""

import collections
import copy
import json
import sys
import xml.etree.ElementTree as ET

import jobs
import pytest

DRY_RUN = jobs.REPO / "dry_run" / "dry_run.py"
SCRIPT = jobs.REPO / "parallel_modes" / "parallel_modes.py"
sys.path.insert(0, str(DRY_RUN.parent))

import draw  # noqa: E402
import report as reporting  # noqa: E402


def drawn(folder, ranks, script, *options, tool=DRY_RUN):
    """Draw the plan of some ranks; returns (the report as JSON, the drawing)."""
    jobs.succeeded(jobs.run(jobs.PYTHON, tool, "--rank-size", ranks, "--json", "plan.json", "--draw", "plan.svg",
                            script, *options, cwd=folder, timeout=300))
    return json.loads((folder / "plan.json").read_text()), (folder / "plan.svg").read_text(encoding="utf-8")


@pytest.fixture
def staged(two_stages):
    """Two stages on 4 ranks: (the report as JSON, the drawing)."""
    return two_stages[0], two_stages[2]


def parts(svg):
    """All texts of a drawing, and all titles (what a browser shows under the mouse)."""
    root = ET.fromstring(svg)
    return tuple([element.text for element in root.iter(f"{{http://www.w3.org/2000/svg}}{kind}")]
                 for kind in ("text", "title"))


def check_collectives(report, svg):
    """Each collective of the report is a line with its count and bytes, and no other line is there."""
    texts, titles = parts(svg)
    expected = collections.defaultdict(list)
    for about in report["ranks"]:
        for c in about["collectives"]:
            ends = f"ranks {c['ranks'][0]}-{c['ranks'][-1]}"
            if c["op"] in ("Send", "Receive"):
                other = c["ranks"][c["peer"]]
                first, last = (about["rank"], other) if c["op"] == "Send" else (other, about["rank"])
                ends = f"rank {first} to {last}"
            expected[about["rank"], f"{c['op']} {c['reduce']}".strip(), ends].append(c["bytes"])
    lines = {title for title in titles if " x " in title}
    told = set()
    for (_, call, ends), sizes in expected.items():
        what = call.replace("Receive", "Send")  # a message is one arrow
        told.add(f"{what} x {len(sizes)}, {sum(sizes):,} B, {ends}{' of ' + ends[6:] if ' to ' not in ends else ''}")
        assert f"{what} × {len(sizes)}" in texts
        assert f"{sum(sizes):,} B a rank" in texts
    assert lines == told


def check_slices(report, svg, rows, columns):
    """The columns of the weight lie side by side, each on its own rank."""
    texts, titles = parts(svg)
    width = columns // len(report["ranks"])
    for about in report["ranks"]:
        rank = about["rank"]
        weight = next(p for p in about["parameters"] if p["name"] == "weight")
        assert (weight["shape"], weight["slice_shape"]) == ([rows, columns], [rows, width])
        assert f"rank {rank}: weight [:, {rank * width}:{(rank + 1) * width}]" in titles
        assert f"rank {rank}: bias whole" in titles
        assert {f"rank {rank}", f"[:, {rank * width}:{(rank + 1) * width}]"} <= set(texts)


def test_slices_are_drawn_where_they_are(tmp_path):
    sliced = drawn(tmp_path, 2, SCRIPT, "--mode", "semi_auto_parallel")
    check_slices(*sliced, 512, 128)
    check_collectives(*sliced)


def test_stages_are_drawn_as_columns(staged):
    report, svg = staged
    check_collectives(report, svg)
    texts, titles = parts(svg)
    assert {"rank 0", "rank 1", "rank 2", "rank 3", "pipeline stage 0", "pipeline stage 1"} <= set(texts)
    for rank in range(4):
        held = {title.split()[2] for title in titles if title.startswith(f"rank {rank}:")}
        assert held == ({"fc1.weight", "fc1.bias"} if rank < 2 else {"fc2.weight", "fc2.bias"})


def test_wrong_slices_are_noticed(tmp_path):
    """Planted: every rank's slice is drawn as rank 0's."""
    tool = jobs.planted("dry_run", tmp_path, "report.py", (
        '"begin": slice_begin(rank, layout, shape, groups)', '"begin": slice_begin(0, layout, shape, groups)'))
    report, svg = drawn(tmp_path, 2, SCRIPT, "--mode", "semi_auto_parallel", tool=tool / "dry_run.py")
    with pytest.raises(AssertionError):
        check_slices(report, svg, 512, 128)


def test_where_a_slice_begins():
    """Ranks 4 to 7 as a 2 x 2 matrix: dimension 0 cut by one axis, by both, and by the optimizer, too."""
    def begin(rank, tensor_map, held, shape, group=""):
        return reporting.slice_begin(rank, [[2, 2], tensor_map, held, 0, True, group, [8, 8]], shape, {"two": [6, 7]})

    assert [begin(rank, [0, -1], [4, 8], [4, 8]) for rank in range(4, 8)] == [[0, 0], [4, 0], [0, 0], [4, 0]]
    assert [begin(rank, [-1, 1], [8, 4], [8, 4]) for rank in range(4, 8)] == [[0, 0], [0, 0], [0, 4], [0, 4]]
    assert [begin(rank, [[1, 0], -1], [2, 8], [2, 8]) for rank in range(4, 8)] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    assert [begin(rank, [1, -1], [4, 8], [2, 8], "two") for rank in (6, 7)] == [[4, 0], [6, 0]]


@pytest.mark.parametrize("plant", ["one AllReduce less", "bytes", "another reader of a Send", "one rank less"])
def test_wrong_collectives_are_noticed(staged, plant):
    other = copy.deepcopy(staged[0])
    calls = other["ranks"][0]["collectives"]
    if plant == "one AllReduce less":
        calls.remove(next(c for c in calls if c["op"] == "AllReduce"))
    elif plant == "bytes":
        calls[-1]["bytes"] += 4
    elif plant == "another reader of a Send":
        send = next(c for c in calls if c["op"] == "Send")
        send["peer"] = (send["peer"] + 1) % len(send["ranks"])
    else:
        del other["ranks"][1]
    with pytest.raises(AssertionError):
        check_collectives(staged[0], draw.draw(other))


def test_a_faulty_plan_is_drawn_with_its_faults(staged):
    other = copy.deepcopy(staged[0])
    send = next(c for c in other["ranks"][0]["collectives"] if c["op"] == "Send")
    send["peer"] = None
    other["ranks"][3].update(compiled=False, parameters=[], collectives=[])
    other["faults"] = [{"text": "rank 0: <Send> to nobody & nothing"}]
    other["args"] = ["a\x1b", "<b>"]
    texts, _ = parts(draw.draw(other))
    parts(draw.draw({**other, "args": ["\x1b" * 400]}))  # too long to be shown whole, still XML
    assert "FAULT rank 0: <Send> to nobody & nothing" in texts
    assert "rank 3 did not compile" in texts and "rank 3" not in texts
    assert "pipeline.py a? <b>" in texts
    for about in other["ranks"]:
        about["compiled"] = False
    assert draw.draw(other) is None


@pytest.mark.parametrize(("file", "sentence"), [
    ("plan.png", "its name must end with .svg"), ("nowhere/plan.svg", "its folder does not exist"),
    ("folder.svg", "it is a folder, a file is wanted")])
def test_a_wrong_name_is_one_sentence(file, sentence, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    result = jobs.run(jobs.PYTHON, DRY_RUN, "--rank-size", 2, "--draw", file, SCRIPT, cwd=tmp_path)
    assert result.code == 2
    assert sentence in result.output
    assert not (tmp_path / "plan.png").exists()
