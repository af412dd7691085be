"""The drawing of a plan (dry_run.py --draw): what it shows is what the report says."""

import json
import xml.etree.ElementTree as ET

import jobs
import pytest

DRY_RUN = jobs.REPO / "dry_run" / "dry_run.py"
SCRIPT = jobs.REPO / "parallel_modes" / "parallel_modes.py"


def words(file):
    """All texts of an SVG, one after the other."""
    return " | ".join(element.text or "" for element in ET.parse(file).iter() if element.tag.endswith("text"))


def drawn(tool, folder):
    """Draw the plan of 2 ranks; returns (the report as JSON, the texts of the drawing)."""
    jobs.succeeded(jobs.run(jobs.PYTHON, tool, "--rank-size", 2, "--json", "plan.json", "--draw", "plan.svg", SCRIPT,
                            "--mode", "semi_auto_parallel", cwd=folder))
    return json.loads((folder / "plan.json").read_text()), words(folder / "plan.svg")


def check_drawing(report, text):
    """Every rank, every collective with its count, and every slice of the weight stand in the drawing."""
    for about in report["ranks"]:
        assert f"rank {about['rank']}" in text
        for collective in about["collectives"]:
            assert f"{collective['op']} {collective.get('reduce', '') or ''}".strip().split()[0] in text
    columns = [next(item["slice_shape"][1] for item in about["parameters"] if item["name"] == "weight")
               for about in report["ranks"]]
    begin = 0
    for width in columns:
        assert f"[:, {begin}:{begin + width}]" in text
        begin += width
    assert begin == 128


@pytest.mark.parametrize("bug", [False, True])
def test_the_drawing_shows_the_plan(bug, tmp_path):
    tool = DRY_RUN
    if bug:  # every rank's slice drawn as rank 0's
        tool = jobs.planted("dry_run", tmp_path, "report.py", (
            '"begin": slice_begin(rank, layout, shape, groups)', '"begin": slice_begin(0, layout, shape, groups)'))
        tool = tool / "dry_run.py"
    report, text = drawn(tool, tmp_path)
    if bug:
        with pytest.raises(AssertionError):
            check_drawing(report, text)
    else:
        check_drawing(report, text)


@pytest.mark.parametrize(("file", "sentence"), [
    ("plan.png", "its name must end with .svg"), ("nowhere/plan.svg", "its folder does not exist")])
def test_a_wrong_name_is_one_sentence(file, sentence, tmp_path):
    result = jobs.run(jobs.PYTHON, DRY_RUN, "--rank-size", 2, "--draw", file, SCRIPT, cwd=tmp_path)
    assert result.code == 2
    assert sentence in result.output
