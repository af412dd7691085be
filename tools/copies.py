"""Checks that files which should be equal, or differ in a known way only, still are.

    python tools/copies.py          says what differs, exit code 1 if anything does
    python tools/copies.py --fix    refreshes the copies from their originals, and the approved patches

Lessons are copied out folder by folder, so they share no code: where two need the same file, one holds the
original and the other a copy, whose second line says "copy of PATH". Scripts that should differ in a few lines
have that difference in tests/approved/, as a patch that is read and approved when it changes.
"""

import difflib
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
DECLARATION = re.compile(r"^(?:# )?\(?[Cc]opy of ([\w./-]+)[;,]")
APPROVED = {  # patch: (from, to)
    "tests/approved/train_cpu_to_train_ddp.patch": ("mnist_ddp/train_cpu.py", "mnist_ddp/train_ddp.py"),
    "tests/approved/train_alone_to_train_distributed.patch":
        ("own_model/train_alone.py", "own_model/train_distributed.py"),
    "tests/approved/gpu_single_train_to_gpu_distributed_train.patch":
        ("resnet50_gpu/gpu_single_train.py", "resnet50_gpu/gpu_distributed_train.py"),
    "tests/approved/resnet50_ascend_to_gpu.patch":
        ("resnet50_ascend/resnet50_distributed_training.py", "resnet50_gpu/resnet50_distributed_training_gpu.py"),
    **{f"tests/approved/resnet50_ascend_to_{variant}.patch":
        ("resnet50_ascend/resnet50_distributed_training.py",
         f"resnet50_ascend/resnet50_distributed_training_{variant}.py")
       for variant in ("pipeline", "dataset_slice", "grad_accumulation")},
}


def lesson_files(repo):
    """Source files of the lesson folders, sorted."""
    return sorted(file for pattern in ("*/*.py", "*/*.sh", "*/known_errors.txt") for file in repo.glob(pattern)
                  if file.parent.name not in ("tests", "tools", "data", "runs"))


def expected_copy(original, name):
    """What a copy must look like: the original with the declaration as its second line."""
    first, rest = original.read_text(encoding="utf-8").split("\n", 1)
    inside = original.suffix == ".py" and first.count(chr(34) * 3) == 1  # of a docstring of several lines
    mark = "" if inside else "# "
    return f"{first}\n{mark}Copy of {name}; tools/copies.py --fix refreshes it.\n{rest}"


def difference(repo, source, target):
    """The unified difference between two files, as one text."""
    lines = [(repo / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in (source, target)]
    return "".join(difflib.unified_diff(*lines, source, target, n=1))


def check(repo=REPO, approved=None, fix=False):
    """Compare everything that is declared.

    Returns:
        (problems, compared): sentences, and how many comparisons were made.
    """
    problems, compared, copies = missing_errors(repo, fix), 0, set()
    for file in lesson_files(repo):
        lines = file.read_text(encoding="utf-8").splitlines()
        declared = DECLARATION.match(lines[1]) if len(lines) > 1 else None
        if not declared:
            continue
        compared += 1
        copies.add(file)
        original = repo / declared.group(1)
        if not original.is_file():
            problems.append(f"{file.relative_to(repo)}: its original {declared.group(1)} does not exist")
            continue
        expected = expected_copy(original, declared.group(1))
        if fix:
            file.write_text(expected, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != expected:
            problems.append(f"{file.relative_to(repo)} is no longer a copy of {declared.group(1)}; change the "
                            "original, then: python tools/copies.py --fix")
    for patch, (source, target) in (APPROVED if approved is None else approved).items():
        compared += 1
        text = difference(repo, source, target)
        if fix:
            (repo / patch).parent.mkdir(parents=True, exist_ok=True)
            (repo / patch).write_text(text, encoding="utf-8")
        elif not (repo / patch).is_file() or (repo / patch).read_text(encoding="utf-8") != text:
            problems.append(f"{source} and {target} differ in other lines than {patch} approves; if that is meant: "
                            "python tools/copies.py --fix, and read what changed")
    problems += undeclared(repo, copies)
    return problems, compared


def missing_errors(repo, fix):
    """Launchers read known_errors.txt from their own folder: sentences about those that have none; fix makes it."""
    problems, original = [], "tools/known_errors.txt"
    for launcher in sorted(repo.glob("*/launch_common.sh")):
        file = launcher.with_name("known_errors.txt")
        if fix and not file.exists():
            file.write_text(expected_copy(repo / original, original), encoding="utf-8")
        elif not file.exists():
            problems.append(f"{file.relative_to(repo)} is missing, which launchers read: python tools/copies.py --fix")
    return problems


def undeclared(repo, copies):
    """Files of one name in two lessons that are nearly equal, though neither is declared to be a copy."""
    problems = []
    by_name = {}
    for file in lesson_files(repo):
        if file not in copies:
            by_name.setdefault(file.name, []).append(file)
    for same_name in by_name.values():
        for first, second in zip(same_name, same_name[1:]):
            texts = [file.read_text(encoding="utf-8").splitlines() for file in (first, second)]
            if difflib.SequenceMatcher(None, *texts, autojunk=False).ratio() > 0.8:
                problems.append(f"{second.relative_to(repo)} is nearly {first.relative_to(repo)}; declare it in its "
                                f"second line: Copy of {first.relative_to(repo)}; ...")
    return problems


def main():
    if sys.argv[1:] not in ([], ["--fix"]):
        sys.exit("usage: python tools/copies.py [--fix]")
    problems, compared = check(fix=sys.argv[1:] == ["--fix"])
    for problem in problems:
        print(problem, file=sys.stderr)
    if not compared:
        print("nothing was compared: no copy is declared", file=sys.stderr)
    print(f"{compared} comparisons, {len(problems)} differences")
    sys.exit(bool(problems) or not compared)


if __name__ == "__main__":
    main()
