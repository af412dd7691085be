"""Rules of the house (DEVELOPERS.md): how long things are, who imports whom, and what is marked as distributed."""

import ast
import re
import sys
from pathlib import Path

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import copies

LESSONS = ("allgather_check", "mnist_ddp", "resnet50_ascend", "resnet50_gpu", "parallel_modes", "own_model",
           "checkpoints", "several_machines")
PAIRS = {  # (a script for one process, the same for several)
    ("mnist_ddp/train_cpu.py", "mnist_ddp/train_ddp.py"),
    ("own_model/train_alone.py", "own_model/train_distributed.py"),
    ("resnet50_gpu/gpu_single_train.py", "resnet50_gpu/gpu_distributed_train.py"),
}
VARIATIONS = {"resnet50_distributed_training_pipeline.py", "resnet50_distributed_training_dataset_slice.py",
              "resnet50_distributed_training_grad_accumulation.py"}
BASE, VARIATION, LAUNCHER, COLUMNS = 135, 95, 35, 100  # lines; columns
ALL_LESSONS, ALL_BASH, ALL_COPIES, FIRST_LESSON = 5000, 600, 1800, 11  # lines; files of mnist_ddp


def tracked(*patterns):
    """Files of the repository by git's patterns."""
    listed = jobs.run("git", "ls-files", "-z", *patterns, cwd=jobs.REPO).output
    return [jobs.REPO / name for name in listed.split("\0") if name and (jobs.REPO / name).exists()]


def text_of(file):
    return file.read_text(encoding="utf-8")


def count(files):
    return sum(len(text_of(file).splitlines()) for file in files)


def is_copy(file):
    return bool(copies.DECLARATION.match(text_of(file).split("\n")[1]))


CODE = [file for file in tracked(*(f"{lesson}/*" for lesson in LESSONS)) if file.suffix in (".py", ".sh", "")]
SCRIPTS = [file for file in CODE if file.suffix == ".py" and "argparse.ArgumentParser" in text_of(file)
           and "import mindspore" in text_of(file) and file.name != "ranks.py"]
LAUNCHERS = [file for file in CODE if file.suffix == ".sh"]


# ------------------------------------------------------------------------------------------------------- how long
def test_scripts_launchers_and_lines_are_short():
    assert len(SCRIPTS) >= 10
    assert {file.name for file in CODE} >= VARIATIONS
    problems = []
    for file in CODE:
        lines = text_of(file).splitlines()
        limit = (VARIATION if file.name in VARIATIONS else BASE if file in SCRIPTS else
                 LAUNCHER if file in LAUNCHERS else None)
        if limit and len(lines) > limit:
            problems.append(f"{file.relative_to(jobs.REPO)} has {len(lines)} lines, at most {limit}")
        wide = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
        if wide:
            problems.append(f"{file.relative_to(jobs.REPO)}: lines {wide} are wider than {COLUMNS} columns")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("what", "number", "limit"), [
    ("lines in the lesson folders", count(CODE), ALL_LESSONS),
    ("lines of bash", count(tracked("*.sh", ".ci/run", ":!tests")), ALL_BASH),
    ("lines of declared copies", count(file for file in CODE if file.suffix == ".py" and is_copy(file)), ALL_COPIES),
    ("files in the first lesson", len(tracked("mnist_ddp")), FIRST_LESSON),
])
def test_the_whole_stays_small(what, number, limit):
    assert 0 < number <= limit, f"{number} {what}, at most {limit}"


# --------------------------------------------------------------------------------------------------- who imports whom
def foreign_imports(file, names):
    """Modules of the project that a script imports and that do not lie beside it: ["lesson.py imports x.py"]."""
    imported = set()
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    return [f"{file} imports {name}" for name in sorted(imported & names)
            if not (file.parent / f"{name}.py").exists()]


def test_no_lesson_imports_from_another_folder(tmp_path):
    names = {file.stem for file in tracked("*/*.py")} | {file.parent.name for file in tracked("*/*.py")}
    assert {"resnet", "ranks", "train_ddp", "doctor"} <= names
    problems = [problem for file in CODE if file.suffix == ".py" for problem in foreign_imports(file, names)]
    assert not problems, "\n".join(problems)
    (tmp_path / "lesson.py").write_text("import os\nfrom resnet import resnet50\nimport mnist_ddp.train_ddp\n")
    assert len(foreign_imports(tmp_path / "lesson.py", names)) == 2


def test_scripts_of_ranks_import_ranks_before_mindspore():
    """Then MindSpore's import is quicker; what else lies beside a script may import MindSpore, too."""
    found = 0
    for file in (file for file in CODE if file.suffix == ".py"):
        imports = re.findall(r"^(?:import|from) (\w+)", text_of(file), re.MULTILINE)
        if "ranks" in imports:
            found += 1
            before = set(imports[:imports.index("ranks")])
            assert not before & {"mindspore", *(beside.stem for beside in file.parent.glob("*.py"))}, file
    assert found >= 11


# ------------------------------------------------------------------------------------------------------ the marks
MARK = re.compile(r"# distributed:(.*)")


def code_of(text):
    """The lines of a script without its docstring."""
    first = ast.parse(text).body[0]
    return text.splitlines()[first.end_lineno if isinstance(first, ast.Expr) else 0:]


def indent(line):
    return len(line) - len(line.lstrip())


def blocks_of(lines):
    """The marked blocks: {number of the line with the mark: numbers of the lines that it covers}.

    A mark behind a line covers that line. A mark above lines covers those down to the next blank line or to one that is
    less indented than the mark.
    """
    blocks = {}
    for number, line in enumerate(lines):
        mark = MARK.search(line)
        if mark and line[:mark.start()].strip():
            blocks[number] = [number]
        elif mark:
            end = number + 1
            while end < len(lines) and lines[end].strip() and indent(lines[end]) >= mark.start():
                end += 1
            blocks[number] = list(range(number + 1, end))
    return blocks


def problems_of(single, distributed):
    """What is wrong with the marks of a script, given the same script for one process; sentences."""
    lines, sister = code_of(distributed), [line for line in code_of(single) if line.strip()]
    blocks = blocks_of(lines)
    problems = [f"{line.strip()!r} is marked in the script for one process" for line in sister if MARK.search(line)]
    for number, covered in blocks.items():
        if not MARK.search(lines[number])[1].strip():
            problems.append(f"the mark {lines[number].strip()!r} does not say why")
        if not any(lines[one] not in sister for one in covered):
            problems.append(f"the mark {lines[number].strip()!r} covers nothing that one process has not")
    marked = {*blocks, *(number for covered in blocks.values() for number in covered)}
    # Without the marked blocks, what is left must be lines of the sister, in her order. Where she has more, one was.
    place, replaced = 0, False
    for number, line in [*enumerate(lines), (len(lines), None)]:
        if number in marked:
            replaced = True
        elif line is None or line.strip():
            rest = sister[place:]
            if line is not None and line not in rest:
                problems.append(f"{line.strip()!r} is not marked, and one process has it not")
                continue
            skipped = rest if line is None else rest[:rest.index(line)]
            if skipped and not replaced:
                problems.append(f"no marked block stands for {skipped[0].strip()!r}, which only one process has")
            place += len(skipped) + 1
            replaced = False
    return problems


@pytest.mark.parametrize("pair", sorted(PAIRS), ids=lambda pair: Path(pair[1]).name)
def test_what_only_several_ranks_need_is_marked(pair):
    single, distributed = (text_of(jobs.REPO / name) for name in pair)
    assert len(blocks_of(code_of(distributed))) >= 5
    problems = problems_of(single, distributed)
    assert not problems, "\n".join(problems)


ALONE = '''"""One."""
import os
import re

share = 1

for step in range(9):
    print(step)
print("done")
'''
SPREAD = '''"""Several."""
import os
import re
# distributed: who am I?
import ranks

# distributed: a share
share = 1 / ranks.size

for step in range(9):
    # distributed: one says it
    if ranks.first:
        print(step)
print("done")
ranks.leave()  # distributed: together
'''


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("", "", None),
    ("\n# distributed: a share", "\nprint(2)\n# distributed: a share", "'print(2)' is not marked"),
    ("  # distributed: together", "", "'ranks.leave()' is not marked"),
    ("leave()  # distributed: together", "leave()  # distributed:", "does not say why"),
    ("# distributed: a share", "# distributed: ", "does not say why"),
    ("    # distributed: one says it\n", "", "'if ranks.first:' is not marked"),
    ('print("done")\n', 'print("done")  # distributed: no\nprint("done")\n', None),
    ('print("done")\n', '# distributed: no\n\nprint("done")\n', "covers nothing"),
    ("import os\n", "import os  # distributed: no\n", None),
    ("import os\n", "", "stands for 'import os'"),
    ("share = 1 /", "\nshare = 1 /", "'share = 1 / ranks.size' is not marked"),
])
def test_a_missing_empty_or_idle_mark_is_found(old, new, problem):
    text = SPREAD.replace(old, new) if old else SPREAD
    assert text.count(new) >= 1
    problems = problems_of(ALONE, text)
    assert any(problem in one for one in problems) if problem else not problems, problems
