"""Says why MindSpore does not use an NVIDIA card: python gpu_libraries.py. Skip it when reading the lesson.

MindSpore looks for its GPU plugin only when CUDA_HOME names a CUDA 11 toolkit, and goes on with the CPU, without a
word, when a library is missing. See README.md, "With pip alone".
"""

import os
import re
import shutil
import subprocess
import sys

TOOLKIT = 'CUDA_HOME must name a folder whose bin/nvcc reports CUDA 11.6 to 11.8; see "With pip alone" in the README'


def visible_cards():
    """How many cards the driver lists and CUDA_VISIBLE_DEVICES leaves; 0 without a driver."""
    if shutil.which("nvidia-smi") is None or os.getenv("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return len(re.findall(r"^GPU ", listing, re.MULTILINE))


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
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
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
        missing = re.search(r"libmindspore_gpu\S* failed\. (\S+): cannot open shared object", str(error))
        if not missing:
            return f"MindSpore refuses the GPU: {str(error).splitlines()[0]}"
        if missing[1] == "libcuda.so.1":
            return "libcuda.so.1 is missing: install NVIDIA's driver"
        return (f"the library {missing[1]} is missing: pip install -r requirements-gpu.txt, and have its folder on "
                "LD_LIBRARY_PATH")
    return ""


def choose_device():
    """Set MindSpore's device to DEVICE_TARGET (Ascend, GPU, CPU), if given; warn if a card cannot be used."""
    import mindspore as ms

    target = os.getenv("DEVICE_TARGET")
    if target:
        ms.set_context(device_target=target)
    elif ms.get_context("device_target") == "CPU" and visible_cards():
        why = reason()
        print(f"warning: there is an NVIDIA card, but training runs on the CPU: {why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cause = reason()
    print(cause or "MindSpore loads its GPU plugin.", file=sys.stderr if cause else sys.stdout)
    sys.exit(2 if cause else 0)
