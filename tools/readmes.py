"""Checks the pages of this project against each other, against the files, and against what their commands print.

    python tools/readmes.py                     both languages, links, paths, options: says what differs; seconds
    python tools/readmes.py --run [PAGE...]     also types the commands of the pages and compares their output; minutes
    python tools/readmes.py --fix [PAGE...]     the same, without the shortcuts below, and writes what was printed

X.md and X_CN.md must have the same headings, code blocks, tables and links. The ```bash blocks of a page are one
session, typed in its folder (or, where they name files from there, in the root) of a copy of the project. A ```text
block shows what the block before it prints: numbers may differ, "..." stands for any lines, and the lines of
different ranks may come in another order. A line that is nothing but a command in backquotes counts as a block.
What cannot be typed here as it stands has a substitute in SUBSTITUTES; one that nothing needs is an error.
"""

import argparse
import collections
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ONE_LANGUAGE = {"DEVELOPERS.md"}
# (pattern in a command, what is typed instead, why). $SCRATCH is a folder of the run's own; fix: used by --fix, too.
SUBSTITUTES = [
    (r"/path/MNIST_Data", '"$MNIST"', "a small data set"),
    (r"/path/(dataset|cifar-10-batches-bin)", '"$CIFAR10"', "a small data set"),
    (r"/tmp/", "$SCRATCH/", "a folder of the run's own"),
    (r"^make test$", "make --dry-run test", "this is part of make test"),
    (r"^make bench$", "make -C .. --dry-run bench", "half an hour, and PyTorch; tests/test_speed.py runs a part of it"),
    (r"pip install -r \.\./requirements-gpu\.txt",
     "test -s ../requirements-gpu.txt; mkdir -p $SCRATCH/site/nvidia/runtime/lib; "
     "touch $SCRATCH/site/nvidia/runtime/lib/libcudart.so.11.0; export PYTHONPATH=$SCRATCH/site",
     "1.7 GB; an empty library stands in"),
    (r"^python gpu_libraries\.py", "python gpu_libraries.py || test $? = 2", "no card: it must say what is missing"),
    (r"(--rank-size (?:8|16))(?: --ranks \S+)?(.*) train\.py",
     r"\1 --ranks 0-1\2 tests/dry_run_scripts/data_parallel.py", "the reader's own script; two ranks of all"),
    (r"^python3 tools/doctor\.py$", "python3 tools/doctor.py || test $? = 1", "it may find a fault of this machine"),
    (r"^(python3 tools/doctor\.py explain) log_output/\S+$",
     r"echo 'not enough slots available' >$SCRATCH/log; \1 $SCRATCH/log", "a log with a known message"),
]
QUICK = [  # left out by --fix
    (r"--steps 8 (.*)--test-images 1000", r"--steps 2 --batch-size 8 --blocks 0 0 0 0 \1--test-images 100",
     "fewer images and layers"),
    (r"--rank-size 8 (tests/dry_run_scripts/semi_auto)", r"--rank-size 8 --ranks 0-1 \1", "two ranks of eight"),
    (r"(run_gpu\.sh .*)--steps 4 (.*)--test-images 1000",
     r"\1--steps 2 --batch-size 4 --blocks 0 0 0 0 \2--test-images 20", "fewer images and layers"),
    (r"(gpu_\w+_train\.py .*)--steps 4", r"\1--steps 2 --batch-size 4 --blocks 0 0 0 0 --image-size 32",
     "smaller"),
    (r"(make_datasets.py fruits \S+)", r"\1 --test-images 2", "fewer images"),
    (r"^(python \S*make_datasets\.py cifar10 )(\S+)", r'ln -s "$(dirname "$CIFAR10")" \2; \1\2', "it is there already"),
    (r"^((?:GLOG_v=3 msrun|mpirun) .*train_distributed\.py)$", r"\1 --epochs 1", "fewer epochs"),
    (r"(run_pipeline\.sh .*)--steps 8", r"\1--steps 2 --batch-size 8 --micro-batches 2 --blocks 1 0 0 1",
     "fewer images, layers and micro batches"),
    (r"--time-limit 12s", "--time-limit 5s", "a shorter time"),
    (r"^(bash run\.sh \S+MNIST_Data 4 .*)$", r"\1 --epochs 1 --steps 2", "fewer steps"),
    (r"^mpirun -n 4 (.*train_ddp\.py .*)$", r"mpirun -n 2 \1 --epochs 1 --steps 2", "fewer ranks and steps"),
]
# Output blocks without a command: what prints them, found by their first line.
PRINTED_BY = {
    r"^Ranks 0-7 FAILED":
        "python dry_run/dry_run.py --rank-size 8 --ranks 0-1 tests/dry_run_scripts/semi_auto.py 1 3 16",
    r"^run\.sh: rank 1 failed, exit code 137":
        "(sleep 5; for _ in {1..400}; do ! grep -q 'step: 3' device1/train.log1 || break; sleep 0.5; done; "
        "for process in /proc/[0-9]*; do "
        "[[ $(readlink $process/cwd) != $PWD/device1 ]] || ! grep -qz '^RANKS_RANK=1$' $process/environ || "
        "kill -9 ${process#/proc/}; done) 2>/dev/null & "
        "DEVICE_TARGET=CPU bash run.sh \"$CIFAR10\" 2 -- --epochs 9 --image-size 32 --batch-size 4 --blocks 0 0 0 0 "
        "--parallel-mode data_parallel",
}
# Blocks whose commands a test of its own runs, for they need several machines, or somebody who kills; or because it
# looks at the numbers, too. It must name their scripts.
RUN_BY_TEST = {r"run_mpirun_[12]\.sh|--nodes 2|check_hosts\.py": "tests/test_several_machines.py",
               r"--restarts 3|--strategy semi": "tests/test_checkpoints.py",
               r"--epochs 1 --steps 21": "tests/test_mnist_ddp.py"}
SOURCES = (".py", ".sh", ".md", ".txt", ".patch", ".png", ".toml", ".c")  # .json: also what commands make
COMMANDS = ("python", "python3", "bash", "make", "mpirun", "msrun")
OTHER_COMMANDS = ("|", "&&", ";", "pip", "grep", "diff", "make", "git", "ssh", "npu-smi", "hccn_tool", "pytest")
OWN_NAMES = {"train.py", "your_script.py", "script.py",  # names that stand for the reader's files
             "train-cpu.py", "net.py", "nccl_allgather.py"}  # and files of the tutorials that have another name here


@dataclasses.dataclass
class Block:
    """A code block: its language, its lines, and the number of its first line in the page, from 1."""

    language: str
    lines: list
    number: int

    def first_line(self):
        return next((line for line in self.lines if line.strip() not in ("", "...")), "")


@dataclasses.dataclass
class Page:
    path: Path
    headings: list = dataclasses.field(default_factory=list)  # levels
    blocks: list = dataclasses.field(default_factory=list)
    tables: list = dataclasses.field(default_factory=list)  # [cells in each row]
    links: list = dataclasses.field(default_factory=list)
    codes: list = dataclasses.field(default_factory=list)  # (line number, inline code)

    def where(self, number):
        return f"{self.path.relative_to(REPO) if self.path.is_relative_to(REPO) else self.path}:{number}"


def parse(path):
    """Read a page."""
    page, fence, in_table = Page(path), None, False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            if fence is None:
                fence = Block(line.strip("` "), [], number + 1)
                page.blocks.append(fence)
            else:
                fence = None
        elif fence is not None:
            fence.lines.append(line)
        else:
            if line.startswith("#"):
                page.headings.append(len(line) - len(line.lstrip("#")))
            if line.startswith("|"):
                cells = len(re.findall(r"(?<!\\)\|", line)) - 1
                page.tables = page.tables if in_table else [*page.tables, []]
                page.tables[-1].append(cells)
            in_table = line.startswith("|")
            page.codes += [(number, code) for code in re.findall(r"`([^`]+)`", line)]
            page.links += re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", line))
            alone = re.fullmatch(r"`([^`]+)`", line)
            if alone and alone[1].split()[0] in COMMANDS:
                page.blocks.append(Block("bash", [alone[1]], number))
    return page


def own_files(repo):
    """The project's files, relative to it: not what its commands made, if git is there to tell."""
    command = ["git", "-C", repo, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(command, capture_output=True, text=True, check=False) if (repo / ".git").exists() else None
    if git and git.returncode == 0:
        files = [Path(name) for name in git.stdout.split("\0") if name]
    else:
        files = [file.relative_to(repo) for file in repo.rglob("*")]
    made = {".git", "runs", "data", "__pycache__"}
    return [file for file in files if (repo / file).is_file() and not made.intersection(file.parts)
            and not file.parts[0].startswith(".venv")]


def find_pages(repo=REPO):
    """All pages of the project in English, sorted."""
    files = [*repo.glob("*.md"), *repo.glob("[!.]*/*.md")]
    return sorted(file for file in files if not file.stem.endswith("_CN") and file.parent.name not in ("runs", "data"))


def chinese(path):
    return path.with_name(f"{path.stem}_CN.md")


# ----------------------------------------------------------------------------------------------- without running
def compare_languages(page, other):
    """What differs between a page and its Chinese twin, sentences."""
    problems = []
    pair = f"{page.where(1)[:-2]} and {other.path.name}"

    def same(what, first, second):
        for number, (one, two) in enumerate(zip(first, second), 1):
            if one != two:
                problems.append(f"{pair}: {what} {number} differs: {one!r} and {two!r}")
                return
        if len(first) != len(second):
            longer, where = (first, page) if len(first) > len(second) else (second, other)
            problems.append(f"{pair}: {len(first)} and {len(second)} times a {what}; the first that only "
                            f"{where.path.name} has: {longer[min(len(first), len(second))]!r}")

    same("heading (its level)", page.headings, other.headings)
    same("table (cells in each row)", page.tables, other.tables)
    same("code block (its language)", [one.language for one in page.blocks], [one.language for one in other.blocks])
    for one, two in zip(page.blocks, other.blocks):
        same(f"line of the code block at line {one.number} and {two.number},", code_of(one), code_of(two))
    links = [collections.Counter(map(untranslated, one.links)) for one in (page, other)]
    for one, mine, others in ((page, *links), (other, *reversed(links))):
        itself = {untranslated(one.path.name), untranslated(chinese(page.path).name)}
        problems += [f"{pair}: only {one.path.name} has the link {link}" for link in mine - others
                     if link not in itself]
    return problems


def untranslated(link):
    """A link with the English page's name; a link between the languages is the same from both sides."""
    return re.sub(r"_CN(?=\.md)", "", link)


def code_of(block):
    """The lines of a block; commands without their comments, which are translated."""
    if block.language == "console":  # a line that begins with $ is a command, others are printed
        return [re.sub(r"\s+# .*", "", line) if line.startswith("$ ") else line for line in block.lines]
    if block.language not in ("bash", "python", "diff"):
        return block.lines
    return [re.sub(r"(^|\s+)# .*", "", line) for line in block.lines]


def commands_of(page):
    """All commands that a page shows, in blocks and in the text: (line number, command)."""
    for block in page.blocks:
        if block.language == "bash":
            yield from ((block.number + offset, line) for offset, line in enumerate(code_of(block)))
    for number, code in page.codes:
        if len(code.split()) > 1:
            yield number, code


def check_links(page):
    problems = []
    for link in page.links:
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = page.path.parent / target if target else page.path
        if not file.exists():
            problems.append(f"{page.where(1)}: the link {link} leads nowhere; no {target} from {page.path.parent}")
        elif anchor and anchor not in anchors(file):
            problems.append(f"{page.where(1)}: the link {link} leads to no heading; there are {sorted(anchors(file))}")
    return problems


def anchors(file):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def made_by(page):
    """Names that the page's own commands make."""
    text = "\n".join(command for _, command in commands_of(page))
    return set(re.findall(r"(?:>|-o|--output|--ckpt-dir|--json|--keep)[ =]*([\w./-]+)", text))


def check_paths(page):
    """Files that a page names in code must exist: what ends like a source, or starts with a folder of the project."""
    problems, made = [], made_by(page) | OWN_NAMES
    files = [file for file in own_files(REPO) if len(file.parts) <= 2]
    every_name, folders = {file.name for file in files}, {file.parts[0] for file in files if len(file.parts) == 2}
    words = [(number, word) for number, code in [*page.codes, *commands_of(page)]
             for word in re.split(r"[\s=:;()'\"]+", code)]
    for number, word in words:
        if word in made or not re.fullmatch(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*/?", word):
            continue
        in_folder = word.split("/")[0] in folders and "/" in word and not word.startswith(".")
        if not in_folder and not word.endswith(SOURCES):
            continue
        found = any((base / word).exists() for base in (page.path.parent, REPO)) or word in every_name
        if not found and not word.startswith(("runs/", "data/")):
            problems.append(f"{page.where(number)}: {word} does not exist, neither from {page.path.parent.name}/ nor "
                            "from the root")
    return problems


def sources_of(script, seen=None):
    """The text of a script and of all scripts of the project that it names or imports."""
    seen = set() if seen is None else seen
    if script.resolve() in seen:
        return ""
    seen.add(script.resolve())
    text = script.read_text(encoding="utf-8")
    names = re.findall(r"[\w/.-]+\.(?:py|sh)\b", text) + [f"{name}.py" for name in
                                                         re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)]
    parts = [text]
    for name in names:
        for base in (script.parent, REPO):
            file = base / name.lstrip("/")
            if file.is_file() and "tests" not in file.parts[len(REPO.parts):]:
                parts.append(sources_of(file, seen))
                break
    return "\n".join(parts)


def launcher_help(name, cache={}):  # noqa: B006  # the cache is meant to stay
    """What mpirun or msrun say about their options."""
    if name not in cache:
        command = [name, "--help", *(["all"] if name == "mpirun" else [])]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        found = shutil.which(name, path=path)
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run([found, *command[1:]], capture_output=True, text=True, check=False,
                              env={**os.environ, **root}) if found else None
        cache[name] = done.stdout + done.stderr if done else None
    return cache[name]


def knows(text, option):
    """Does a source or a help text have an option? (mpirun writes some of its own with one dash.)"""
    if option == "--help" and "argparse" in text:
        return True
    return bool(re.search(rf"(?<![\w-])--?{re.escape(option[2:])}(?![\w-])", text))


def check_options(page):
    """Each --option must be known to the script or launcher after which it stands."""
    problems = []
    for number, command in commands_of(page):
        texts, who = [], ""
        for word in command.split():
            file = next((base / word for base in (page.path.parent, REPO) if (base / word).is_file()), None)
            if word in ("mpirun", "msrun"):
                texts, who = [launcher_help(word)], word
            elif file and file.suffix in (".py", ".sh"):
                texts, who = [*texts, sources_of(file)], word
            elif word in OTHER_COMMANDS:
                texts = []
            option = re.match(r"--[a-z][\w-]*", word)
            if option and texts and None not in texts and not any(
                    knows(text, option[0]) for text in texts):
                problems.append(f"{page.where(number)}: {who} knows no option {option[0]}")
    folder = "*.??" if page.path.parent != REPO else "*/*.??"
    everything = "\n".join(file.read_text(encoding="utf-8") for file in
                           [*page.path.parent.glob(folder), *REPO.glob("tools/*.py")] if file.suffix in (".py", ".sh"))
    known = everything + "".join(launcher_help(name) or "" for name in ("mpirun", "msrun"))
    for number, code in page.codes:
        for option in re.findall(r"^--[a-z][\w-]*", code):
            if not knows(known, option):
                problems.append(f"{page.where(number)}: no script of {page.path.parent.name}/ knows {option}")
    return problems


def check_blocks(page):
    """Blocks that are neither commands nor their output: Python must parse, a diff's lines must stand in the folder."""
    problems = []
    sources = [compact(file.read_text(encoding="utf-8")) for file in page.path.parent.glob("*.*")
               if file.suffix in (".py", ".sh")]
    for block in page.blocks:
        where = page.where(block.number)
        if block.language == "python":
            try:
                compile("\n".join(block.lines), where, "exec")
            except SyntaxError as error:
                problems.append(f"{where}: this Python does not parse: {error}")
        elif block.language == "diff":
            for line in block.lines:
                is_code = line[:1] in "+-" and not line.startswith(("+++", "---"))
                if is_code and not any(compact(line[1:]) in source for source in sources):
                    problems.append(f"{where}: no script of {page.path.parent.name}/ has the line {line[1:].strip()!r}")
        elif block.language == "console" and page.path.parent.name != "rank_tables":
            problems.append(f"{where}: only tests/test_rank_table.py runs console blocks; write ```bash and ```text")
        elif block.language not in ("bash", "text", "console"):
            problems.append(f"{where}: nothing checks a block of {block.language!r}; use bash, text, python or diff")
    return problems


def compact(text):
    """Code without comments, spaces and line breaks."""
    return "".join(re.sub(r"  # .*", "", text).split())


def check_page(path):
    """All that can be said about a page and its twin without running anything."""
    page = parse(path)
    problems = check_links(page) + check_paths(page) + check_options(page) + check_blocks(page)
    if path.name in ONE_LANGUAGE:
        return problems
    if not chinese(path).exists():
        return [*problems, f"{page.where(1)}: {chinese(path).name} is missing"]
    other = parse(chinese(path))
    return problems + check_links(other) + check_paths(other) + check_options(other) + compare_languages(page, other)


# -------------------------------------------------------------------------------------------------- by running
class Session:
    """The commands of one page, typed one after the other in a copy of the project.

    Attributes:
        outputs: [(command block, its text block or None, what it printed)].
        problems: sentences about commands that failed.
        used: the patterns of the substitutes that were needed.
    """

    def __init__(self, path, scratch, datasets, quick=True, timeout=1800):
        self.page, self.scratch, self.timeout = parse(path), Path(scratch), timeout
        self.substitutes = SUBSTITUTES + (QUICK if quick else [])
        self.variables = {**datasets, **({"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"} if quick else {})}
        self.outputs, self.problems, self.used = [], [], set()

    def pairs(self):
        """(command block, the text block that follows it, or None) in the order of the page."""
        blocks, number = self.page.blocks, 0
        while number < len(blocks):
            block = blocks[number]
            following = blocks[number + 1] if number + 1 < len(blocks) else None
            if block.language == "bash":
                shown = following if following and following.language == "text" else None
                yield block, shown
                number += shown is not None
            elif block.language == "text":
                command = next((text for first, text in PRINTED_BY.items()
                                if re.search(first, block.first_line())), None)
                if command:
                    yield Block("bash", [command], block.number), block
                else:
                    self.problems.append(f"{self.page.where(block.number)}: no command stands before this output; "
                                         "write one, or name it in PRINTED_BY of tools/readmes.py")
            number += 1

    def typed(self, block):
        """The lines that are typed for a block, substitutes in place."""
        lines = []
        for line in code_of(block):
            typed = line
            for pattern, replacement, _ in self.substitutes:
                if re.search(pattern, typed):
                    self.used.add(pattern)
                    typed = re.sub(pattern, replacement, typed)
            lines.append(typed)
        return lines

    def folder_for(self, lines):
        """The page's folder, or the root if only there the files that the commands name are found."""
        words = [word for line in lines for word in line.split() if word.endswith((".py", ".sh"))]
        here = self.page.path.parent
        return REPO if words and not (here / words[0]).exists() and (REPO / words[0]).exists() else here

    def run(self):
        """Type everything; returns the problems."""
        clone = self.scratch / "clone"
        for file in own_files(REPO):
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / file, clone / file)
        for library in (REPO / "tools").glob("__pycache__/*.so"):  # what the launchers compile at their first use
            (clone / "tools/__pycache__").mkdir(exist_ok=True)
            shutil.copy2(library, clone / "tools/__pycache__")
        script, pairs, folder = ["set -o pipefail"], list(self.pairs()), None
        for number, (block, _) in enumerate(pairs):
            lines = self.typed(block)
            elsewhere = test_for(lines)
            if elsewhere:
                self.check_elsewhere(block, lines, elsewhere)
                lines = ["true"]
            elif folder != self.folder_for(lines):
                folder = self.folder_for(lines)
                script.append(f"cd {shlex.quote(str(clone / folder.relative_to(REPO)))}")
            script += [f"exec >{shlex.quote(str(self.scratch / f'output {number}'))} 2>&1",
                       "trap 'echo \"@@ exit code $?: $BASH_COMMAND\"' ERR", *lines, "wait", "trap - ERR"]
        (self.scratch / "session.sh").write_text("\n".join(script) + "\n", encoding="utf-8")
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("MS_", "OMPI_", "DATA_", "DEVICE_"))}
        environment.update(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", VIRTUAL_ENV=sys.prefix,
                           XDG_CACHE_HOME=os.getenv("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
                           HOME=str(self.scratch), SCRATCH=str(self.scratch), TMPDIR="/tmp",
                           OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           **{name: str(value) for name, value in self.variables.items()})
        with subprocess.Popen(["bash", self.scratch / "session.sh"], env=environment, stdin=subprocess.DEVNULL,
                              start_new_session=True) as process:
            try:
                process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                self.problems.append(f"{self.page.where(1)}: its commands did not end within {self.timeout} s; shorten "
                                     "them in QUICK of tools/readmes.py")
        for number, (block, shown) in enumerate(pairs):
            file = self.scratch / f"output {number}"
            printed = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
            self.outputs.append((block, shown, [line for line in printed if not line.startswith("@@ ")]))
            expected_to_fail = bool(shown) and any(re.search(first, shown.first_line()) for first in PRINTED_BY)
            for line in printed:
                if line.startswith("@@ ") and not expected_to_fail:
                    self.problems.append(f"{self.page.where(block.number)}: {line[3:]}; its output ends:\n    " +
                                         "\n    ".join(printed[-12:]))
                    break
            if shown and not test_for(block.lines):
                self.problems += [f"{self.page.where(shown.number)}: {text}"
                                  for text in compare(shown.lines, self.outputs[-1][2])]
        return self.problems

    def check_elsewhere(self, block, lines, test):
        """Commands that a test of its own runs: it must exist and name every script of them; it gets its data ready."""
        text = (REPO / test).read_text(encoding="utf-8") if (REPO / test).exists() else ""
        named = {Path(script).name for script in re.findall(r"[\w/]+\.(?:sh|py)", "\n".join(lines))}
        for script in named - {"make_datasets.py"}:
            if script not in text:
                self.problems.append(f"{self.page.where(block.number)}: is typed by {test} only, which does not "
                                     f"run {script}")


LETTERS = str.maketrans("0123456789", "abcdefghij")


def test_for(lines):
    """The test that runs these commands instead, or None."""
    return next((test for pattern, test in RUN_BY_TEST.items() if re.search(pattern, "\n".join(lines))), None)


def normal(line):
    """A line as it is compared: numbers become #, but for the numbers of ranks; paths and spaces lose their detail."""
    line = re.sub(r"/(?:[\w.-]+/)*clone/|/path/", "", line)
    line = re.sub(r"\bon [\w.-]+, (CPU|GPU|Ascend)", r"on HOST, \1", line)
    line = re.sub(r"\b(rank[. ]?)(\d+)", lambda found: found[1] + found[2].translate(LETTERS), line)
    line = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)*(?:e[-+]?\d+)?", "#", line).replace("# to # s", "# s")
    return " ".join(line.split())


def compare(shown, printed):
    """What a text block shows and the command did not print, and, without "...", the other way round: sentences."""
    left = [normal(line) for line in printed if line.strip()]
    problems = []
    for line in shown:
        if line.strip() and line.strip() != "...":
            if normal(line) in left:
                left.remove(normal(line))
            else:
                return [f"the page shows {line!r}, which is not printed; printed is:\n    " +
                        "\n    ".join(printed[:40])]
    if "..." not in [line.strip() for line in shown] and left:
        problems.append(f"printed, too, is {left[0]!r}; add it, or ... in its place")
    return problems


def fixed(shown, printed):
    """A text block with what was printed now: its own choice of lines, or, where one is gone, all or both ends."""
    rest, lines = list(printed), []
    for line in shown:
        match = next((one for one in rest if normal(one) == normal(line)), None)
        if line.strip() in ("", "..."):
            lines.append(line)
        elif match is not None:
            rest.remove(match)
            lines.append(match)
        else:
            return printed if len(printed) <= 16 else [*printed[:6], "...", *printed[-6:]]
    return lines


def write_outputs(session):
    """Put what was printed into the page and its twin."""
    for path in (session.page.path, chinese(session.page.path)):
        blocks = [block for block in parse(path).blocks if block.language == "text"]
        shown = [(old, printed) for _, old, printed in session.outputs if old]
        lines = path.read_text(encoding="utf-8").splitlines()
        for block in reversed(blocks):
            printed = next((printed for old, printed in shown if old.lines == block.lines), None)
            if printed:
                start = block.number - 1
                lines[start:start + len(block.lines)] = fixed(block.lines, printed)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_datasets(folder):
    """The data sets that stand for the reader's; returns variables with their paths."""
    tool = REPO / "tools" / "make_datasets.py"
    for name in ("mnist", "cifar10"):
        subprocess.run([sys.executable, tool, name, folder / name], check=True, stdout=subprocess.DEVNULL)
    return {"MNIST": folder / "mnist", "CIFAR10": folder / "cifar10" / "cifar-10-batches-bin"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="type the commands, too")
    parser.add_argument("--fix", action="store_true", help="type the commands and write what they print")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="such as mnist_ddp/README.md (all)")
    arguments = parser.parse_args()
    pages = [path.resolve() for path in arguments.pages] or find_pages()
    unknown = [path for path in pages if path not in find_pages()]
    if unknown:
        parser.error(f"{unknown[0]} is no page of the project in English")
    problems = [problem for path in pages for problem in check_page(path)]
    if arguments.run or arguments.fix:
        with tempfile.TemporaryDirectory() as folder:
            datasets = make_datasets(Path(folder))
            for path in pages:
                scratch = Path(tempfile.mkdtemp(dir=folder))
                timeout = 3600 if arguments.fix else 600
                session = Session(path, scratch, datasets, quick=not arguments.fix, timeout=timeout)
                found = session.run()
                print(f"{path.relative_to(REPO)}: {len(session.outputs)} blocks typed, {len(found)} problems",
                      flush=True)
                if arguments.fix:
                    write_outputs(session)
                problems += found
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(pages)} pages, {len(problems)} problems")
    sys.exit(bool(problems) or not pages)


if __name__ == "__main__":
    main()
