"""Declared copies and approved differences, and the checker itself."""

import re
import shutil
import sys

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import copies


def test_copies_and_patches_are_up_to_date():
    problems, compared = copies.check()
    assert compared >= 3
    assert not problems


def test_every_line_that_train_ddp_adds_is_marked():
    patch = copies.difference(jobs.REPO, "mnist_ddp/train_cpu.py", "mnist_ddp/train_ddp.py")
    added = [line for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    code = (jobs.REPO / "mnist_ddp/train_ddp.py").read_text().split('"""', 2)[2]
    of_code = [line[1:] for line in added if f"\n{line[1:]}\n" in code and line[1:].strip()]
    assert len(of_code) > 20
    assert [line for line in of_code if "distributed:" not in line] == []
    assert set(re.findall(r".*distributed:.*", code)) == set(of_code), "a marked line stands in train_cpu.py too"


@pytest.fixture
def repo(tmp_path):
    """A small repository with one declared copy."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    original = "# What it is\n" + "".join(f"line {number}\n" for number in range(20))
    (tmp_path / "a" / "common.sh").write_text(original)
    (tmp_path / "b" / "common.sh").write_text(copies.expected_copy(tmp_path / "a" / "common.sh", "a/common.sh"))
    return tmp_path


def test_the_checker_passes_a_good_copy_and_counts_it(repo):
    assert copies.check(repo, {}) == ([], 1)


def test_the_checker_finds_a_changed_copy_and_mends_it(repo):
    with (repo / "b" / "common.sh").open("a") as file:
        file.write("another line\n")
    problems, _ = copies.check(repo, {})
    assert "b/common.sh is no longer a copy of a/common.sh" in problems[0]
    copies.check(repo, {}, fix=True)
    assert copies.check(repo, {}) == ([], 1)


def test_the_checker_finds_a_copy_nobody_declared(repo):
    (repo / "c").mkdir()
    shutil.copy(repo / "a" / "common.sh", repo / "c")
    problems, _ = copies.check(repo, {})
    assert "c/common.sh is nearly a/common.sh" in problems[0]


def test_the_checker_finds_a_missing_original_and_an_unapproved_difference(repo):
    (repo / "a" / "common.sh").unlink()
    assert "does not exist" in copies.check(repo, {})[0][0]
    (repo / "a" / "one.py").write_text("x = 1\n")
    (repo / "a" / "two.py").write_text("x = 2\n")
    approved = {"a.patch": ("a/one.py", "a/two.py")}
    assert any("a.patch approves" in problem for problem in copies.check(repo, approved)[0])


def test_the_checker_compared_nothing_is_a_failure(tmp_path):
    assert copies.check(tmp_path, {}) == ([], 0)
    (tmp_path / "tools").mkdir()
    shutil.copy(jobs.REPO / "tools" / "copies.py", tmp_path / "tools")
    tool = tmp_path / "tools" / "copies.py"
    tool.write_text(re.sub(r"APPROVED = \{.*?\n\}", "APPROVED = {}", tool.read_text(), flags=re.DOTALL))
    result = jobs.run(jobs.PYTHON, tool, cwd=tmp_path)
    assert result.code == 1
    assert "nothing was compared" in result.output
