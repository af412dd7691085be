"""The options of every launcher, and what --help says of them; tools/launch.py loads this file.

The first part of a launcher's --help is the comment at the head of its file: it is written once.
"""

import argparse
import difflib
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What neighbours add: file, heading in --help, and the options that need it.
NEIGHBOURS = {
    "tools/machines.py": ("several machines", ("--hosts", "--hostfile", "--nodes")),
    "rank_tables/start.py": ("rank tables", ("--table",)),
    "dry_run/start.py": ("without a card", ("--dry-run",)),
}
STALLED = 75  # the exit code of --on-stall end
VARIABLES = (
    ("DATA_PATH", "the folder of the data, where none is named"),
    ("DEVICE_TARGET", "Ascend, GPU or CPU (what this machine has)"),
    ("STALL_MINUTES", "when no rank has written for so long, say where each stands (30)"),
    ("RANK_TABLE_FILE", "the rank table, for launchers that take one"),
    ("MS_SCHED_HOST, ..._PORT", "where ranks of a table or several machines meet (here, a free port)"),
    ("CUDA_VISIBLE_DEVICES", "the NVIDIA cards to use (all)"),
    ("OMP_NUM_THREADS", "threads of a rank's operators on CPU (its share of the cores)"),
    ("GLOG_v", "how much MindSpore prints: 0 all, 1 much, 2 warnings, 3 errors (3)"),
)
EXIT_CODES = (
    ("0", "all ranks ended well"),
    ("2", "bad input: nothing was started, or only a far rank could see it"),
    (str(STALLED), "no rank got on for STALL_MINUTES (--on-stall end)"),
    ("124", "--time-limit was reached"),
    ("130, 143", "ended by Ctrl-C, by TERM"),
    ("others", "the failed rank's; 128 + number of a signal, so 137 after kill -9"),
)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def duration(text):
    """Seconds of a time such as 90 (minutes), 1h30m, 45s or 2d."""
    if re.fullmatch(r"\d*\.?\d+", text) and float(text) > 0:
        return 60 * float(text)
    parts = re.findall(r"(\d*\.?\d+)([smhd])", text)
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if seconds <= 0 or "".join(map("".join, parts)) != text:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write minutes, such as 90, or 1h30m, 45s")
    return seconds


def ranks_shown(text):
    """The ranks of "0,2-3" as a set; "all" and "first" as they are."""
    if text in ("all", "first"):
        return text
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text):
        raise argparse.ArgumentTypeError(f"'{text}' names no ranks; write all, first, or ranks such as 0,3 or 0-3")
    spans = [part.partition("-") for part in text.split(",")]
    if wrong := [f"{low}-{high}" for low, _, high in spans if high and int(high) < int(low)]:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' ends before it begins; write the lower rank first")
    return {rank for low, _, high in spans for rank in range(int(low), int(high or low) + 1)}


def not_empty(text):
    """The name of a file or folder as it is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a file or folder, or leave it out (is a variable not set?)")
    return text


def new_parser(words):
    """The parser of the options that all launchers have; words are what the user has typed: bash NAME ..."""
    parser = Parser(prog=Path(words[1]).name if words else "ranks.py", usage=" ".join(words) or None, add_help=False,
                    formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                        prog, max_help_position=30, width=100))
    hidden = parser.add_argument_group()
    for option, given in (  # what a launcher tells this program
            ("--lesson", {"required": True, "type": Path}), ("script", {"nargs": "?"}), ("-n", {"required": True}),
            ("--folder", {}), ("--check", {"action": "store_true"}), ("--in", {"dest": "inside", "type": not_empty}),
            ("--usage", {}), ("--plan", {"action": "store_true"})):
        hidden.add_argument(option, help=argparse.SUPPRESS, **given)
    add = parser.add_argument_group("options").add_argument
    add("-h", "--help", action="help", help="show this; the script's own options: -- --help")
    add("--with", "--launcher", dest="launcher", choices=("mpirun", "msrun", "table"), default="mpirun",
        help="what starts the ranks; table: this program, on Ascend with a rank table")
    add("--restarts", type=int, default=0, metavar="N",
        help="start again after a failure, up to N times, with --resume=if-saved for the script (0)")
    add("--time-limit", type=duration, metavar="TIME",
        help="end the job after so long, as TERM does: minutes, or such as 1h30m; exit code 124")
    add("--grace", type=float, default=30, metavar="SECONDS", help="at TERM, and at the --time-limit, a script that "
        "saves (-- --ckpt-dir DIR) has so long to end its step and save; 0: none (30)")
    add("--on-stall", choices=("warn", "end"), default="warn", help="when no rank writes for STALL_MINUTES, and none "
        f"gets on: say where each stands (warn), or also end the job, with exit code {STALLED}")
    add("--show", type=ranks_shown, default="all", metavar="all|first|0,3", help="whose lines to show (all)")
    add("--timestamps", action="store_true", help="the time before each line that is shown")
    add("--report", type=not_empty, metavar="FILE",
        help="write at the end, however it ends, what came of the job, as JSON")
    add("--bind", choices=("cores", "numa", "no"), help="tie each rank to its share of the cores, or to a NUMA node "
        "(on CPU ranks take their own cores after init(); on cards: no)")
    add("--memory", type=int, default=500, metavar="MB", help="what a rank takes on CPU, to check before the start")
    add("--logs", type=not_empty, metavar="DIR", help="folder of the logs (log_output; msrun: log_msrun)")
    add("--background", action="store_true", help="return at once, where the launcher makes a folder for the run")
    return parser


def head_of(launcher):
    """The comment at the head of a launcher, without its marks."""
    try:
        lines = launcher.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return ""
    end = next((place for place, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line[2:] for line in lines[:end] if not line.startswith(("# shellcheck", "#SBATCH")))


def table(heading, rows):
    return "\n".join([f"{heading}:", *(f"  {name:26}  {meaning}" for name, meaning in rows)])


def load(file):
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(argv):
    """Read the options; args.options are the script's, behind --. Neighbours' modules (args.neighbours) add theirs."""
    # Users mean their home by --ckpt-dir=~/runs, too, where bash leaves the ~ as it is.
    argv = [re.sub("^(--[a-z-]+=)~(?=/|$)", lambda found: found[1] + os.path.expanduser("~"), word) for word in argv]
    cut = argv.index("--") if "--" in argv else len(argv)
    own, options = argv[:cut], argv[cut + 1:]
    words = next((own[place + 1] for place, word in enumerate(own[:-1]) if word == "--usage"), "").split()
    lesson, modules, parser = Path(own[own.index("--lesson") + 1]), [], new_parser(words)
    parser.set_defaults(dry_run=False, first=None, scheduler=None, meeting=None)  # neighbours ask for each other's
    for name, (heading, needing) in NEIGHBOURS.items():
        file = next((place for place in (ROOT / name, lesson / name) if place.is_file()), None)
        missing = set(needing) & set(own) if not file else None
        if missing:
            parser.error(f"{missing.pop()} needs the folder {name.split('/')[0]}/ beside {lesson.name}/; copy it there")
        if file:
            modules.append(load(file))
            modules[-1].add_options(parser.add_argument_group(heading))
    parser.description = head_of(lesson / parser.prog)
    parser.epilog = "\n\n".join([table("variables", VARIABLES), table("exit codes", EXIT_CODES)])
    args, others = parser.parse_known_args(own)
    script = Path(args.script or "the script").name
    if others:
        known = [option for action in parser._actions for option in action.option_strings if action.help is not
                 argparse.SUPPRESS]
        near = difflib.get_close_matches(others[0], known, 1, 0.8)
        after = f"; did you mean {near[0]}?" if near else f"; options of {script} go after --"
        parser.error(f"unrecognized arguments: {' '.join(others)}{after if others[0][0] == '-' else ''} "
                     f"(bash {parser.prog} --help explains all)")
    if not args.script and options:
        args.script, *options = options
    if {"-h", "--help"} & set(options) and os.path.isfile(args.script or ""):
        os.execv(sys.executable, [sys.executable, args.script, "--help"])
    if args.restarts < 0 or (args.restarts and not any(word.startswith("--ckpt-dir") for word in options)):
        parser.error("--restarts takes a whole number, and needs -- --ckpt-dir DIR, where the ranks save")
    if ("--ckpt-dir", "") in zip(options, options[1:]) or "--ckpt-dir=" in options:
        parser.error("--ckpt-dir is empty; name a folder, or leave it out (is a variable not set?)")
    if args.memory < 1:
        parser.error(f"--memory takes a number of MB from 1, not {args.memory}")
    if not args.grace >= 0:
        parser.error(f"--grace takes a number of seconds from 0, not {args.grace}")
    args.name, args.options, args.neighbours = parser.prog, options, modules
    args.logs = os.path.normpath(args.logs or ("log_msrun" if args.launcher == "msrun" else "log_output"))
    args.folder = args.folder or ("device" if args.launcher == "table" else None)
    if args.background and not args.inside:
        parser.error("--background needs a launcher that makes a folder for the run; here write nohup bash "
                     f"{parser.prog} ... >log 2>&1 &")
    args.saves = []  # where the script saves, if its check says so
    args.jobs, args.failures, args.timed_out = [], [], False  # what --report tells
    args.report = os.path.abspath(args.report) if args.report else None
    args.deadline = time.monotonic() + args.time_limit if args.time_limit else float("inf")
    # What neighbours may change: where ranks find this process, more options of mpirun or msrun, a rank's machine.
    args.address, args.command, args.place = "127.0.0.1", [], lambda rank: ""
    args.runner = []  # what runs the script in place of Python alone
    return args
