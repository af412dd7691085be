"""Declared copies, and the checker itself."""

import shutil
import sys

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import copies


def test_copies_are_up_to_date():
    problems, compared = copies.check()
    assert compared >= 3
    assert not problems


@pytest.fixture
def repo(tmp_path):
    """A small repository with one declared copy."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    original = '"""What it is.\n"""\n' + "".join(f"line_{number} = {number}\n" for number in range(20))
    (tmp_path / "a" / "common.py").write_text(original)
    (tmp_path / "b" / "common.py").write_text(copies.expected_copy(tmp_path / "a" / "common.py", "a/common.py"))
    return tmp_path


def test_the_checker_passes_a_good_copy_and_counts_it(repo):
    assert copies.check(repo) == ([], 1)


def test_the_checker_finds_a_changed_copy_and_mends_it(repo):
    with (repo / "b" / "common.py").open("a") as file:
        file.write("another = 1\n")
    problems, _ = copies.check(repo)
    assert "b/common.py is no longer a copy of a/common.py" in problems[0]
    copies.check(repo, fix=True)
    assert copies.check(repo) == ([], 1)


@pytest.mark.parametrize(("name", "lines"), [("common.py", 1), ("common.sh", 3)])
def test_the_checker_finds_a_copy_nobody_declared(name, lines, repo):
    text = lines * (repo / "a" / "common.py").read_text()
    for folder in ("a", "c"):
        (repo / folder).mkdir(exist_ok=True)
        (repo / folder / name).write_text(text)
    problems, _ = copies.check(repo)
    assert f"c/{name} is nearly a/{name}" in problems[0]


def test_the_checker_finds_a_missing_original(repo):
    (repo / "a" / "common.py").unlink()
    assert "does not exist" in copies.check(repo)[0][0]


def test_the_checker_compared_nothing_is_a_failure(tmp_path):
    assert copies.check(tmp_path) == ([], 0)
    (tmp_path / "tools").mkdir()
    shutil.copy(jobs.REPO / "tools" / "copies.py", tmp_path / "tools")
    result = jobs.run(jobs.PYTHON, tmp_path / "tools" / "copies.py", cwd=tmp_path)
    assert result.code == 1
    assert "nothing was compared" in result.output
