"""Has the ranks of a job find each other soon, and no rank of another job: find_others.c says how."""

import ctypes
import os
import runpy
from pathlib import Path


def take_over():
    """Before init(). Without a C compiler ranks ask every second for others, and listen where those of other jobs do.

    NAPS=long in the environment leaves the waiting to MindSpore.
    """
    short = os.getenv("NAPS") != "long"
    if short:
        os.environ.setdefault("MS_RETRY_INTERVAL_LOWER", "1")
        os.environ.setdefault("MS_RETRY_INTERVAL_UPPER", "1")
    file = runpy.run_path(str(Path(__file__).with_name("native.py")))["build"]("find_others.c")
    if file:
        ctypes.CDLL(file).take_over(short)
