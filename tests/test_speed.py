"""The speed page is what the committed figures give; the benchmark measures what really runs. No speed is tested."""

import json
import shutil

import jobs
import pytest

BENCHMARKS = jobs.REPO / "benchmarks"
PAGES = ("README.md", "README_CN.md", "benchmarks/README.md", "benchmarks/README_CN.md")


def check_page(repo, *options):
    return jobs.run(jobs.PYTHON, repo / "benchmarks/speed_page.py", *options, cwd=repo)


@pytest.fixture
def copied_pages(tmp_path):
    """A copy of the benchmarks and of the READMEs."""
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    for name in PAGES[:2]:
        shutil.copy(jobs.REPO / name, tmp_path)
    return tmp_path


def test_pages_and_picture_are_those_of_the_committed_figures():
    assert jobs.succeeded(check_page(jobs.REPO)).output == ""


def test_another_figure_or_a_changed_page_is_found(copied_pages):
    data = copied_pages / "benchmarks/speed.json"
    report = json.loads(data.read_text())
    for row in report["parts"]["mnist"]:
        if (row["name"], row["ranks"], row["size"]) == ("lesson", 2, 32):
            row["runs"] = [{**run, "step": 1.1 * run["step"]} for run in row["runs"]]
    data.write_text(json.dumps(report))
    result = check_page(copied_pages)
    assert result.code == 1
    assert [line.split()[0] for line in result.output.splitlines()] == [*PAGES[2:], *PAGES[:2], "benchmarks/speed.png"]
    jobs.succeeded(check_page(copied_pages, "--fix"))
    assert jobs.succeeded(check_page(copied_pages)).output == ""
    page = copied_pages / PAGES[2]
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| lesson | 2 | 32 |"))
    page.write_text(text.replace(row, row.replace("| 32 |", "| 33 |")))
    result = check_page(copied_pages)
    assert (result.code, result.output.split()[0]) == (1, PAGES[2])


def test_every_row_was_measured_at_least_five_times():
    report = json.loads((BENCHMARKS / "speed.json").read_text())
    assert report["parts"].keys() == {"mnist", "batches", "profile", "resnet", "first_loss", "allreduce"}
    for part, rows in report["parts"].items():
        for row in rows:
            assert len(row["runs"]) == report["repeats"] >= 5, (part, row)
            assert all(value > 0 for run in row["runs"] for name, value in run.items()
                       if name not in ("exchange", "waiting", "data")), (part, row)


def test_the_profile_of_a_step_adds_up(mnist, cifar10, tmp_path):
    (tmp_path / "out" / "work").mkdir(parents=True)
    (tmp_path / "out" / "work" / "diary.txt").touch()
    result = jobs.succeeded(jobs.run(
        jobs.PYTHON, BENCHMARKS / "speed.py", "--parts", "profile", "--repeats", 1, "--mnist", mnist,
        "--cifar10", cifar10, "--output", "out", cwd=tmp_path, timeout=400))
    report = json.loads((tmp_path / "out/speed.json").read_text())
    rows = {row["ranks"]: row["runs"][0] for row in report["parts"]["profile"]}
    assert rows.keys() == {1, 2}
    for ranks, row in rows.items():
        parts = {name: value for name, value in row.items() if name != "step"}
        assert min(parts.values()) >= 0
        assert row["compute"] > 0
        assert row["step"] == pytest.approx(sum(parts.values()), rel=0.3), "medians of the parts, not of their sum"
        assert (row["exchange"] > 0) == (ranks > 1)
    assert "| 2 |" in result.output
    assert not result.left_over
    left = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert [path for path in left if "work" in path] == ["work", "work/diary.txt"]


def test_bad_arguments_and_missing_data(cifar10, tmp_path):
    for arguments, sentence in (
            (("--parts", "mnist,sound"), "--parts takes some of mnist,batches"),
            (("--repeats", 0), "--repeats 1 or more"),
            (("--mnist", "nowhere"), "nowhere does not exist; make it with tools/make_datasets.py")):
        result = jobs.run(jobs.PYTHON, BENCHMARKS / "speed.py", *arguments, "--cifar10", cifar10, cwd=tmp_path)
        assert result.code == 2
        assert sentence in result.output
