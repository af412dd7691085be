"""What launchers know of the dry run and of computed plans; tools/launch.py loads this file from here."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BY_MINDSPORE_ON_CPU = {"data_parallel", "hybrid_parallel", "stand_alone"}  # the modes that need no plan


def add_options(parser):
    """The option of all launchers."""
    parser.add_argument("--dry-run", action="store_true", help="compile all ranks' Ascend graphs here, without a card")


def prepare(args, launch):
    """With --dry-run: check the script's options, then hand over to dry_run.py; this does not return.

    With --plan: on CPU, where MindSpore has no such parallel mode, have compute.py run the script of each rank.
    """
    if not args.dry_run:
        if args.plan and args.target == "CPU" and args.n > 1 and not BY_MINDSPORE_ON_CPU & set(args.options):
            compute_plan(args)
        return
    needless = {"--report": args.report, "--time-limit": args.time_limit, "--restarts": args.restarts,
                "--background": args.background}
    for option in filter(needless.get, needless):
        raise ValueError(f"{option} is for ranks that train, and --dry-run only compiles; leave it out")
    stand_in = ["--data", "cifar10"] if os.getenv("DATA_PATH") == "" else []
    with tempfile.TemporaryDirectory() as folder:
        if stand_in:  # so that the options are checked, too
            with open(Path(folder) / "data_batch_1.bin", "wb") as file:
                file.truncate(10_000 * 3073)
            os.environ["DATA_PATH"] = folder
        if args.check:
            args.target = "Ascend"
            launch.check_script(args)
    tool = HERE / "dry_run.py"
    os.execv(sys.executable, [sys.executable, str(tool), "--rank-size", str(args.n), "--ranks",
                              f"{args.local[0]}-{args.local[-1]}", *stand_in, args.script, *args.options])


def compute_plan(args):
    """See to it that the ranks' script runs under compute.py, which needs mpirun."""
    by_msrun, far = args.launcher == "msrun", len(args.machines) > 1
    if (by_msrun or far) and {"semi_auto_parallel", "auto_parallel"} & set(args.options):
        raise ValueError("a plan is computed on CPU " + (
            "under mpirun only; leave out --launcher msrun" if by_msrun else
            "on one machine only; leave out --hosts and --hostfile"))
    if by_msrun or far or args.first is not None:
        return  # ranks that do not share an mpirun and a machine could not exchange their numbers
    if subprocess.run([sys.executable, HERE / "compute.py", "--check"], check=False).returncode:
        raise ValueError  # it has said why
    for name in ("MS_SCHED_HOST", "MS_SCHED_PORT"):  # for a table's ranks; mpirun's find each other by themselves
        os.environ.pop(name, None)
    args.launcher, args.runner = "mpirun", [str(HERE / "compute.py"), "--rank"]
    os.environ["ASCEND_PLAN"] = "wanted"  # so that the script does not refuse the mode
