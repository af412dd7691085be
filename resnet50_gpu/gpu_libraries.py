"""Chooses the device, and says why MindSpore does not use an NVIDIA card. Skip it when reading.

    python gpu_libraries.py              says what MindSpore lacks to use a card
    python gpu_libraries.py --ranks N    for run_gpu.sh: checks the cards that N ranks would take
                                         and prints how many there are and the target, "2 GPU"
MindSpore looks for its GPU plugin only when CUDA_HOME names a CUDA 11 toolkit, and goes on with the
CPU, without a word, when a library is missing. See README.md, "With pip alone".
"""

import os
import re
import subprocess
import sys

TOOLKIT = ("CUDA_HOME must name a folder whose bin/nvcc reports CUDA 11.6 to 11.8; "
           'see "With pip alone" in the README')


def visible_cards():
    """The cards that the driver lists and CUDA_VISIBLE_DEVICES leaves, their numbers or UUIDs.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES does not name cards of this machine, each once.
    """
    listing = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True,
                             check=False).stdout
    numbers, wanted = re.findall(r"^GPU (\d+):", listing, re.M), os.getenv("CUDA_VISIBLE_DEVICES")
    if wanted in (None, "", "-1"):
        return numbers if wanted is None else []  # the others are the usual ways to hide all cards
    cards = wanted.split(",")
    if not all(re.fullmatch("[0-9]+|GPU-[0-9a-f-]+", card) for card in cards):
        raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}'; write numbers of cards with commas "
                         "between them, such as 2,3")
    for card in cards:
        if cards.count(card) > 1:
            raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}' and names {card} twice")
        if numbers and card not in numbers and f"UUID: {card}" not in listing:
            raise ValueError(f"CUDA_VISIBLE_DEVICES names card {card}, which nvidia-smi -L does "
                             f"not list; it lists {len(numbers)}, numbered from 0")
    return cards if numbers else []


def check_cards(ranks):
    """Check the cards for so many ranks, a text; returns (number of cards, "GPU" or "CPU").

    Raises:
        ValueError: the ranks cannot run on these cards.
    """
    cards = len(visible_cards())
    target = os.getenv("DEVICE_TARGET") or ("GPU" if cards else "CPU")
    if target not in ("GPU", "CPU"):
        raise ValueError(f"DEVICE_TARGET is '{target}'; write GPU or CPU")
    if target == "GPU" and re.fullmatch("[0-9]*", ranks):  # else ranks.py refuses the number
        if int(ranks or 1) > cards:
            raise ValueError(f"{ranks or 1} ranks need {ranks or 1} cards, {cards} are visible "
                             "(CUDA_VISIBLE_DEVICES, nvidia-smi -L); start fewer, or rehearse on "
                             "the CPU with DEVICE_TARGET=CPU")
        if why := reason():
            raise ValueError(f"MindSpore cannot use the cards; {why}. DEVICE_TARGET=CPU rehearses "
                             "without")
    return cards, target


def reason():
    """Why MindSpore cannot use a card here, one sentence; "" if it can load all that it needs."""
    return _toolkit_problem() or _library_problem()


def _toolkit_problem():
    nvcc = os.path.join(os.getenv("CUDA_HOME", ""), "bin", "nvcc")
    if not os.getenv("CUDA_HOME"):
        return f"CUDA_HOME is not set: {TOOLKIT}"
    if not os.access(nvcc, os.X_OK):
        return f"{nvcc} is no program that may be run: {TOOLKIT}"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False,
                              timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{nvcc} does not run ({error}): {TOOLKIT}"
    release = re.search(r"release (\d+)\.(\d+),", said)
    if not release:
        return f"{nvcc} --version does not name a release: {TOOLKIT}"
    if not (11, 6) <= (int(release[1]), int(release[2])) < (12, 0):
        return f"{nvcc} is of CUDA {release[1]}.{release[2]}, the plugin is for 11.6: {TOOLKIT}"
    return ""


def _library_problem():
    import mindspore as ms

    try:
        ms.set_context(device_target="GPU")
    except (RuntimeError, ValueError) as error:
        missing = re.search(r"libmindspore_gpu\S* failed\. (\S+): cannot open shared object",
                            str(error))
        if not missing:
            return f"MindSpore refuses the GPU: {str(error).splitlines()[0]}"
        if missing[1] == "libcuda.so.1":
            return "libcuda.so.1 is missing: install NVIDIA's driver"
        return (f"the library {missing[1]} is missing: pip install -r requirements-gpu.txt, "
                "and have its folder on LD_LIBRARY_PATH")
    return ""


def choose_device():
    """Set MindSpore's device to DEVICE_TARGET (GPU, CPU), if given; warn of a card that is idle."""
    import mindspore as ms

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
