"""Checks that files which should be equal still are.

    python tools/copies.py          says what differs, exit code 1 if anything does
    python tools/copies.py --fix    refreshes the copies from their originals

Lessons are copied out folder by folder, so they share no code: where two need the same file, one holds the
original and the other a copy, whose second line says "Copy of PATH; ...".
"""

import difflib
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
DECLARATION = re.compile(r"Copy of ([\w./-]+);")
NOT_LESSONS = ("tests", "tools", "data", "runs")
SHORT = 40  # lines; a launcher of so few may well look like its neighbour's


def lesson_files(repo):
    """Source files of the lesson folders, sorted."""
    return sorted(file for pattern in ("*/*.py", "*/*.sh") for file in repo.glob(pattern)
                  if file.parent.name not in NOT_LESSONS)


def expected_copy(original, name):
    """What a copy must look like: the original with the declaration as the second line of its docstring."""
    first, rest = original.read_text(encoding="utf-8").split("\n", 1)
    return f"{first}\nCopy of {name}; tools/copies.py --fix refreshes it.\n{rest}"


def check(repo=REPO, fix=False):
    """Compare everything that is declared.

    Returns:
        (problems, compared): sentences, and how many comparisons were made.
    """
    problems, copies = [], set()
    for file in lesson_files(repo):
        lines = file.read_text(encoding="utf-8").splitlines()
        declared = DECLARATION.match(lines[1]) if len(lines) > 1 else None
        if not declared:
            continue
        copies.add(file)
        original = repo / declared[1]
        if not original.is_file():
            problems.append(f"{file.relative_to(repo)}: its original {declared[1]} does not exist")
        elif file.read_text(encoding="utf-8") != expected_copy(original, declared[1]):
            if fix:
                file.write_text(expected_copy(original, declared[1]), encoding="utf-8")
            else:
                problems.append(f"{file.relative_to(repo)} is no longer a copy of {declared[1]}; change the original, "
                                "then: python tools/copies.py --fix")
    return problems + undeclared(repo, copies), len(copies)


def undeclared(repo, copies):
    """Files of one name in two lessons that are nearly equal, though neither is declared to be a copy."""
    problems, by_name = [], {}
    for file in lesson_files(repo):
        lines = file.read_text(encoding="utf-8").splitlines()
        if file not in copies and (file.suffix == ".py" or len(lines) > SHORT):
            by_name.setdefault(file.name, []).append((file.relative_to(repo), lines))
    for same_name in by_name.values():
        for (first, text), (second, other) in zip(same_name, same_name[1:]):
            if difflib.SequenceMatcher(None, text, other, autojunk=False).ratio() > 0.8:
                problems.append(f"{second} is nearly {first}; declare it in its second line: Copy of {first}; ...")
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
