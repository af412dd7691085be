"""Chooses the device, and says why MindSpore does not use an NVIDIA card. Skip it when reading.

    python gpu_libraries.py              says what MindSpore lacks to use a card
    python gpu_libraries.py --ranks N    for run_gpu.sh: checks the cards that N ranks would take
                                         and prints how many there are and the target, "2 GPU"
MindSpore looks for its GPU plugin only when CUDA_HOME names a CUDA 11 toolkit, and goes on with the
CPU, without a word, when a library is missing. See README.md, "With pip alone".
"""

import os
import re
import shutil
import subprocess
import sys

TOOLKIT = ("CUDA_HOME must name a folder whose bin/nvcc reports CUDA 11.6 to 11.8; "
           'see "With pip alone" in the README')
CARD = r"[0-9]+|GPU-[0-9a-f-]+"


def visible_cards():
    """The cards that the driver lists and CUDA_VISIBLE_DEVICES leaves, their numbers or UUIDs.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES does not name cards of this machine, each once.
    """
    listing = ""
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                                 check=False).stdout
    numbers = re.findall(r"^GPU (\d+):", listing, re.MULTILINE)
    wanted = os.getenv("CUDA_VISIBLE_DEVICES")
    if wanted in (None, "", "-1"):
        return numbers if wanted is None else []  # the others are the usual ways to hide all cards
    if not re.fullmatch(f"({CARD})(,({CARD}))*", wanted):
        raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}'; write numbers of cards with commas "
                         "between them, such as 2,3")
    cards = wanted.split(",")
    for card in cards:
        if cards.count(card) > 1:
            raise ValueError(f"CUDA_VISIBLE_DEVICES is '{wanted}' and names {card} twice")
        if numbers and card not in numbers and f"UUID: {card}" not in listing:
            raise ValueError(f"CUDA_VISIBLE_DEVICES names card {card}, which nvidia-smi -L does "
                             f"not list; it lists {len(numbers)}, numbered from 0")
    return cards if numbers else []


def check_cards(ranks):
    """Check the cards for so many ranks, a text; returns ([card], "GPU" or "CPU").

    Raises:
        ValueError: the ranks cannot run on these cards.
    """
    cards = visible_cards()
    target = os.getenv("DEVICE_TARGET") or ("GPU" if cards else "CPU")
    if target not in ("GPU", "CPU"):
        raise ValueError(f"DEVICE_TARGET is '{target}'; write GPU or CPU")
    if target == "CPU" or not re.fullmatch("[0-9]*", ranks):  # ranks.py will refuse the number
        return cards, target
    if not cards or int(ranks or 1) > len(cards):
        raise ValueError(f"{ranks or 1} ranks need {ranks or 1} cards, {len(cards)} are visible "
                         "(CUDA_VISIBLE_DEVICES, nvidia-smi -L); start fewer, or rehearse on the "
                         "CPU with DEVICE_TARGET=CPU")
    if why := reason():
        raise ValueError(f"MindSpore cannot use the cards; {why}. DEVICE_TARGET=CPU rehearses "
                         "without")
    return cards, target


def reason():
    """Why MindSpore cannot use a card here, one sentence; "" if it can load all that it needs."""
    return _toolkit_problem() or _library_problem()


def _toolkit_problem():
    home = os.getenv("CUDA_HOME")
    if not home:
        return f"CUDA_HOME is not set: {TOOLKIT}"
    nvcc = os.path.join(home, "bin", "nvcc")
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
    try:
        import mindspore as ms
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

    target = os.getenv("DEVICE_TARGET")
    if target:
        ms.set_context(device_target=target)
    elif ms.get_context("device_target") == "CPU":
        try:
            why = visible_cards() and reason()
        except ValueError as error:
            why = error
        if why:
            print(f"warning: there is an NVIDIA card, but training runs on the CPU: {why}",
                  file=sys.stderr, flush=True)


def main():
    if sys.argv[1:2] == ["--ranks"]:
        try:
            cards, target = check_cards("".join(sys.argv[2:]))
        except ValueError as error:
            print(f"run_gpu.sh: {error}", file=sys.stderr)
            sys.exit(2)
        print(len(cards), target)
        return
    cause = reason()
    print(cause or "MindSpore loads its GPU plugin.", file=sys.stderr if cause else sys.stdout)
    sys.exit(2 if cause else 0)


if __name__ == "__main__":
    main()
