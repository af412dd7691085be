"""Chooses the device, and says why MindSpore does not use an NVIDIA card. Skip it when reading.

    python gpu_libraries.py              says what MindSpore lacks to use a card (see README.md)
    python gpu_libraries.py --ranks N    for run_gpu.sh: checks the cards that N ranks would take
                                         and prints how many there are and the target, "2 GPU"
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

TOOLKIT = ("CUDA_HOME must name a folder whose bin/nvcc reports CUDA 11.6 to 11.8; "
           'see "With pip alone" in resnet50_gpu/README.md')


def visible_cards():
    """The cards, numbers or UUIDs, that the driver lists and CUDA_VISIBLE_DEVICES leaves.

    ValueError: it does not name cards of this machine, each once.
    """
    listing = subprocess.getoutput("nvidia-smi -L")
    numbers, wanted = re.findall(r"^GPU (\d+):", listing, re.M), os.getenv("CUDA_VISIBLE_DEVICES")
    if wanted in (None, "", "-1"):
        return numbers if wanted is None else []  # the others are the usual ways to hide all cards
    for card in (cards := wanted.split(",")):
        if not re.fullmatch("[0-9]+|GPU-[0-9a-f-]+", card):
            raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}'; write numbers of cards with "
                             "commas between them, such as 2,3")
        if cards.count(card) > 1:
            raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}' and names {card} twice")
        if numbers and card not in numbers and f"UUID: {card}" not in listing:
            raise ValueError(f"CUDA_VISIBLE_DEVICES names card {card}, which nvidia-smi -L does "
                             f"not list; it lists {len(numbers)}, numbered from 0")
    return cards if numbers else []


def check_cards(ranks):
    """Check the cards for so many ranks, a text; returns (number of cards, "GPU" or "CPU")."""
    cards = len(visible_cards())
    if (target := os.getenv("DEVICE_TARGET") or ("GPU" if cards else "CPU")) not in ("GPU", "CPU"):
        raise ValueError(f"DEVICE_TARGET is '{target}'; write GPU or CPU")
    if target == "GPU" and re.fullmatch("[0-9]*", ranks):  # else ranks.py refuses the number
        if int(ranks or 1) > cards:
            raise ValueError(f"{ranks or 1} ranks need {ranks or 1} cards, {cards} are visible; "
                             "start fewer, or rehearse on the CPU with DEVICE_TARGET=CPU")
        if why := reason():
            raise ValueError(f"MindSpore cannot use the cards; {why}. DEVICE_TARGET=CPU rehearses")
    return cards, target


def reason():
    """Why MindSpore cannot use a card here, one sentence; "" if it can load all that it needs."""
    nvcc = os.path.join(os.getenv("CUDA_HOME", ""), "bin", "nvcc")
    if not os.getenv("CUDA_HOME"):
        return f"CUDA_HOME is not set: {TOOLKIT}"
    if not os.access(nvcc, os.X_OK):
        return f"{nvcc} is no program that may be run: {TOOLKIT}"
    said = subprocess.getoutput(f"{shlex.quote(nvcc)} --version")
    cuda = re.search(r"release (\d+\.\d+),", said)
    if not cuda or cuda[1] not in ("11.6", "11.7", "11.8"):
        return f"{nvcc} is of CUDA {cuda[1] if cuda else '?'}, the plugin is for 11.6: {TOOLKIT}"
    import mindspore as ms
    try:
        ms.set_context(device_target="GPU")
    except (RuntimeError, ValueError) as error:
        missing = re.search(r"libmindspore_gpu\S* failed\. (\S+): cannot open shared", str(error))
        if not missing:
            return f"MindSpore refuses the GPU: {str(error).splitlines()[0]}"
        return (f"the library {missing[1]} is missing: install NVIDIA's driver (for libcuda.so.1), "
                "pip install -r requirements-gpu.txt, and have its folder on LD_LIBRARY_PATH")
    return ""


def choose_device():
    """Set the device to DEVICE_TARGET, if given; warn of an idle card; make convolutions quick."""
    import mindspore as ms
    tools = Path(__file__).resolve().parent.parent / "tools"
    if (tools / "convolutions.py").is_file():
        runpy.run_path(str(tools / "loss_lines.py"))  # says how long it will take
        runpy.run_path(str(tools / "convolutions.py"))["take_over"]()
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # read at the first convolution
    if target := os.getenv("DEVICE_TARGET"):
        ms.set_context(device_target=target)
    elif ms.get_context("device_target") == "CPU":
        try:
            why = visible_cards() and reason()
        except ValueError as error:
            why = error
        if why:
            print(f"warning: there is an NVIDIA card, but training runs on the CPU: {why}",
                  file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "4")  # what MindSpore says of it is in the sentence below
    try:
        if sys.argv[1:2] == ["--ranks"]:
            print(*check_cards("".join(sys.argv[2:])))
        elif why := reason():
            raise ValueError(why)
        else:
            print("MindSpore loads its GPU plugin.")
    except ValueError as error:
        print(f"run_gpu.sh: {error}" if sys.argv[1:] else error, file=sys.stderr)
        sys.exit(2)
