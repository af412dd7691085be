"""What a launcher looks at before the start, beside its options: memory, /dev/shm, disks, GPUs; for tools/launch.py.

look() raises ValueError with one sentence for what cannot work, and prints one for what may not.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import limits
import linux

MB = 1 << 20
# Measured: Open MPI asks for 4.2 MB a rank, a worker process of a data set for 10 MB (pictures of 224x224, batch 8).
SHM_OF_A_RANK, SHM_OF_A_WORKER = 5, 10  # MB
LITTLE = 100  # MB
PATIENCE = 60  # s
LOGS = "the ranks' logs"


@functools.cache
def nvidia_smi(*options):
    """What nvidia-smi prints; asked once. Empty where there is none."""
    try:
        asked = subprocess.Popen(["nvidia-smi", *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, encoding="utf-8", errors="replace")
    except OSError:
        return ""
    try:
        return asked.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: where the driver hangs, it may not even end
        raise ValueError(f"nvidia-smi gives no answer within {PATIENCE} s: the driver hangs; restart the machine, or "
                         "rehearse with DEVICE_TARGET=CPU") from None


def gpus():
    """The UUIDs of this machine's NVIDIA cards, in their order; with CUDA_VISIBLE_DEVICES, of those."""
    listing = re.findall(r"^GPU (\d+):(?:.*UUID: ([\w-]+))?", nvidia_smi("-L"), re.MULTILINE)
    cards = {number: uuid or number for number, uuid in listing}
    visible = os.getenv("CUDA_VISIBLE_DEVICES")
    if visible is None or not cards:
        return list(cards.values())
    names = [name.strip() for name in visible.split(",")]
    return [cards.get(name) or next((uuid for uuid in cards.values() if name and uuid.startswith(name)), name)
            for name in names if name not in ("", "-1")]


def look(args, say):
    """Look at all; args as options.parse() and check() of tools/launch.py made them."""
    def warn(sentence):
        say(f"{args.name}: warning: {sentence}", sys.stderr)

    ranks = len(args.local)
    limits.look(ranks, args.launcher == "mpirun", warn)
    if not args.command:
        limits.stay_here()
    if args.target == "GPU":
        look_at_gpus(ranks, warn)
    if args.target == "Ascend" and not (args.command or shutil.which("npu-smi") or any(Path("/dev").glob("davinci*"))):
        raise ValueError("DEVICE_TARGET is Ascend, and there is neither npu-smi nor a /dev/davinci*: this machine has "
                         "no Ascend card; DEVICE_TARGET=CPU rehearses")
    if args.target == "CPU":
        limits.look_at_memory(ranks, args.memory)
    look_at_shm(args, ranks, warn)
    look_at_logs(args)
    look_at_disks(args, warn)
    look_at_script(args, warn)


def look_at_script(args, warn):
    text = Path(args.script).read_text(errors="replace")
    if args.n > 1 and "mindspore" in text and not re.search(r"\b(init|init_process_group|ranks)\b", text):
        warn(f"{Path(args.script).name} has no init(): unless a module that it imports calls "
             f"mindspore.communication.init(), each of the {args.n} ranks trains alone")


def look_at_gpus(ranks, warn):
    cards = gpus()
    if len(cards) < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, {len(cards)} are visible (nvidia-smi -L, "
                         "CUDA_VISIBLE_DEVICES); start fewer")
    users = re.findall(r"^([\w-]+), *(\d+), *(.*?), *(\d+) *MiB", nvidia_smi(
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"), re.MULTILINE)
    busy = [f"card {place} by process {pid} ({os.path.basename(name)}, {used} MB)"
            for place, uuid in enumerate(cards[:ranks]) for card, pid, name, used in users if card == uuid]
    if busy:
        warn(f"in use already: {'; '.join(busy[:4])}{' ...' * (len(busy) > 4)}; end it, or name free cards in "
             "CUDA_VISIBLE_DEVICES")


def look_at_shm(args, ranks, warn, place="/dev/shm"):
    """Is there room in /dev/shm for what mpirun's ranks, NCCL and data sets with worker processes put there?"""
    text = Path(args.script).read_text(errors="replace")
    workers = re.findall(r"num_parallel_workers\s*=\s*(\d+)", text) if "python_multiprocessing=True" in text else []
    need = SHM_OF_A_WORKER * ranks * sum(map(int, workers))
    if args.target != "CPU" or args.runner:
        need += SHM_OF_A_RANK * ranks
    if not need:  # ranks on CPU meet by TCP: measured, they put nothing there
        return
    try:
        free = shutil.disk_usage(place).free // MB
    except OSError as error:
        raise ValueError(f"{place} cannot be used ({error.strerror}), and the ranks share memory there; mount it: "
                         f"mount -t tmpfs tmpfs {place}") from None
    if free < need:
        warn(f"{place} has {free} MB free, {ranks} ranks need about {need} MB there; docker run --shm-size=1g, or "
             f"mount -o remount,size=1g {place}")


def folder_of_logs(args, path):
    """In which of the folders of logs a path is, or None."""
    logs = [args.inside] if args.inside else [
        f"{args.folder}{rank}" for rank in args.local] if args.folder else [args.logs]
    whole = Path(os.path.abspath(path))
    return next((name for name in logs if Path(os.path.abspath(name)) in (whole, *whole.parents)), None)


def values_of(args, option):
    """What the user gives an option of the script, as often as it is there."""
    return [word.partition("=")[2] or following for word, following in
            zip(args.options, [*args.options[1:], ""]) if re.match(f"{option}(=|$)", word)]


def look_at_logs(args):
    """Is anything there that the ranks need?"""
    needed = (args.script, os.getenv("DATA_PATH"), os.getenv("RANK_TABLE_FILE"), *values_of(args, "--data-path"))
    for path in needed:
        if path and os.path.exists(path) and (moved := folder_of_logs(args, path)) and os.path.isdir(moved):
            raise ValueError(f"{path} is in {moved}, the folder of the logs, which each start moves aside; move it "
                             "elsewhere, or start in another folder")


def look_at_disks(args, warn):
    """Room for logs and, where the script saves, for checkpoints."""
    given = args.saves or values_of(args, "--ckpt-dir")[-1:]
    limits.look_at_disk(os.getcwd(), len(args.local), 0, LOGS, "start in another folder")
    for what, path in ((LOGS, os.getcwd()), *(("checkpoints", path) for path in given if path)):
        place = limits.nearest(path)
        if what == "checkpoints":
            whole = Path(os.path.abspath(path))
            if not place.is_dir():
                raise ValueError(f"--ckpt-dir {path} cannot be made: {place} is no folder; name another one")
            if not os.access(place, os.W_OK):
                raise ValueError(f"--ckpt-dir {path} cannot be written: {place} is not yours; name another folder")
            if moved := folder_of_logs(args, path):
                raise ValueError(f"--ckpt-dir {path} is in {moved}, the folder of the logs, which each start moves "
                                 "aside; name another one")
            try:
                os.makedirs(whole, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--ckpt-dir {path} cannot be made ({error.strerror}); name another one") from None
            # a job has one rank 0, but a launcher on each of its machines, which may share a disk
            first = args.local[0]
            if not (linux.take(f"ranks save {first} {linux.key_of(whole)}") and (first or linux.take_folder(whole))):
                raise ValueError(f"--ckpt-dir {path} is that of a job that runs on this machine; wait for its end, or "
                                 "name another one")
        free = shutil.disk_usage(place).free
        if free < LITTLE * MB:
            warn(f"the disk of {place} has {free // MB} MB free, and {what} go there; free some (df -h), or name "
                 "another folder")
