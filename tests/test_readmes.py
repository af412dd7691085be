"""The pages: both languages alike, every path, link and option real, every command typed, every output compared.

The pages are checked by tools/readmes.py, as a reader of this file would call it; each check of it is proved here by
a page with a planted mistake.
"""

import re
import shutil
import sys

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import readmes

PAGES = {str(path.relative_to(jobs.REPO)): path for path in readmes.find_pages()}
TYPED = [name for name, path in PAGES.items() if list(readmes.Session(path, "", {}).pairs())]


def test_the_pages_are_found():
    folders = {path.parent.name for path in jobs.REPO.glob("[!.]*/README.md")}
    assert {name.split("/")[0] for name in PAGES if "/" in name} == folders
    assert {"README.md", "TROUBLESHOOTING.md", "DEVELOPERS.md"} <= PAGES.keys()
    assert len(TYPED) >= 6


@pytest.mark.parametrize("name", PAGES)
def test_a_page_and_its_twin(name):
    problems = readmes.check_page(PAGES[name])
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", TYPED)
def test_the_commands_of_a_page_print_what_it_shows(name, mnist, cifar10_whole, tmp_path):
    session = readmes.Session(PAGES[name], tmp_path, {"MNIST": mnist, "CIFAR10": cifar10_whole})
    problems = session.run()
    assert not problems, "\n".join(problems)
    assert session.outputs


def test_every_substitute_is_needed():
    """One that no page needs any more hides nothing, but would hide a mistake one day. (/path/ is for new pages.)"""
    sessions = [readmes.Session(PAGES[name], "", {}) for name in TYPED]
    for session in sessions:
        for block, _ in session.pairs():
            session.typed(block)
    used = set().union(*(session.used for session in sessions))
    unused = [pattern for pattern, _, _ in readmes.SUBSTITUTES + readmes.QUICK
              if pattern not in used and not pattern.startswith("/path/")]
    assert not unused, "\n".join(f"tools/readmes.py: no page needs {pattern!r}" for pattern in unused)
    first_lines = [block.first_line() for path in PAGES.values() for block in readmes.parse(path).blocks]
    assert not [first for first in readmes.PRINTED_BY if not any(re.search(first, line) for line in first_lines)]


# ------------------------------------------------------------------------------------------------- the checker itself
PAGE = """# A page

English | [中文](PAGE_CN.md)

```bash
echo 1 image in rank 0   # a comment
python tools/plot_loss.py --help
```

```text
2 image in rank 0
...
```

| a | b |
|---|---|
| `tools/copies.py` | [the root](../README.md) |
"""


def write(folder, page=PAGE, twin=None):
    """Write a page and its twin into the folder docs of a project with tools/; returns the page's path."""
    docs = folder / "docs"
    docs.mkdir(exist_ok=True)
    (docs / "PAGE.md").write_text(page, encoding="utf-8")
    twin = page if twin is None else twin
    twin = twin.replace("PAGE_CN.md", "PAGE.md").replace("a comment", "注释")
    (docs / "PAGE_CN.md").write_text(twin, encoding="utf-8")
    return docs / "PAGE.md"


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "tools").mkdir()
    for name in ("plot_loss.py", "progress.py", "speech.py", "copies.py"):
        (tmp_path / "tools" / name).write_bytes((jobs.REPO / "tools" / name).read_bytes())
    (tmp_path / "README.md").write_text("# The root\n")
    monkeypatch.setattr(readmes, "REPO", tmp_path)
    return tmp_path


def test_a_good_page_passes(project, tmp_path_factory):
    path = write(project)
    assert readmes.check_page(path) == []
    session = readmes.Session(path, tmp_path_factory.mktemp("scratch"), {})
    assert session.run() == []
    (_, shown, printed), = session.outputs
    assert readmes.fixed(shown.lines, printed)[0] == "1 image in rank 0"


def test_what_the_pages_commands_made_is_no_part_of_the_project(project, tmp_path_factory):
    path = write(project, PAGE.replace("`tools/copies.py`", "`device/train.log`"))
    (project / "device").mkdir()
    (project / "device" / "train.log").touch()
    (project / ".gitignore").write_text("device/\n")
    jobs.succeeded(jobs.run("git", "init", "-q", cwd=project))
    assert not any("device" in file.parts for file in readmes.own_files(project))
    assert readmes.check_page(path) == []
    (project / "device" / "train.log").unlink()
    assert readmes.check_page(path) == []
    scratch = tmp_path_factory.mktemp("scratch")
    readmes.Session(path, scratch, {}).run()
    assert (scratch / "clone" / "docs" / "PAGE.md").exists()
    assert not (scratch / "clone" / "device").exists()
    (project / "device" / "train.log").touch()
    shutil.rmtree(project / ".git")
    assert any("device" in file.parts for file in readmes.own_files(project)), "without git all files count"


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("# A page", "# A page\n\n## Another", "heading"),
    ("echo 1", "echo 3", "line of the code block at line 6 and 6, 1 differs"),
    ("2 image", "3 images", "line of the code block"),
    ("| a | b |", "| a | b | c |", "table"),
    ("[the root](../README.md)", "the root", "only PAGE.md has the link ../README.md"),
])
def test_a_difference_between_the_languages_is_found(old, new, problem, project):
    assert PAGE.count(old) == 1
    problems = readmes.check_page(write(project, twin=PAGE.replace(old, new)))
    assert any(problem in text for text in problems), problems


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("../README.md", "../READYOU.md", "docs/PAGE.md:1: the link ../READYOU.md leads nowhere"),
    ("../README.md", "../README.md#no-such", "leads to no heading; there are ['the-root']"),
    ("tools/copies.py", "tools/copy.py", "tools/copy.py does not exist"),
    ("plot_loss.py --help", "plot_loss.py --hurry", "tools/plot_loss.py knows no option --hurry"),
    ("```text", "```", "nothing checks a block of ''"),
    ("```text", "```console", "write ```bash and ```text"),
    ("```text\n2 image", "```python\n2 image", "this Python does not parse"),
    ("```text\n2", "```diff\n+2", "no script of docs/ has the line"),
])
def test_a_mistake_in_both_languages_is_found(old, new, problem, project):
    assert PAGE.count(old) == 1
    problems = readmes.check_page(write(project, PAGE.replace(old, new)))
    assert any(problem in text for text in problems), problems


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("echo 1 image", "echo 1 picture", "docs/PAGE.md:11: the page shows '2 image in rank 0', which is not printed"),
    ("in rank 0   #", "in rank 1   #", "the page shows '2 image in rank 0'"),
    ("\n...\n", "\n", "printed, too, is"),
    ("plot_loss.py --help", "plot_loss.py nowhere", "exit code 2: python tools/plot_loss.py nowhere"),
    ("```bash\necho", "```diff\necho", "no command stands before this output"),
])
def test_what_is_not_printed_is_found(old, new, problem, project, tmp_path_factory):
    assert PAGE.count(old) == 1
    session = readmes.Session(write(project, PAGE.replace(old, new)), tmp_path_factory.mktemp("scratch"), {})
    problems = session.run()
    assert any(problem in text for text in problems), problems


def test_fix_writes_what_was_printed_into_both_languages(project, tmp_path_factory):
    session = readmes.Session(write(project), tmp_path_factory.mktemp("scratch"), {})
    session.run()
    readmes.write_outputs(session)
    for name in ("PAGE.md", "PAGE_CN.md"):
        assert "```text\n1 image in rank 0\n...\n```" in (project / "docs" / name).read_text(encoding="utf-8")
