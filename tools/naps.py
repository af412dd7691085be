"""Has a process ask often whether the other ranks are there, before init(): naps.c says how."""

import ctypes
import os
import runpy
from pathlib import Path


def find_others_soon():
    """Ask every second, and with a C compiler still more often; NAPS=long in the environment leaves it to MindSpore."""
    if os.getenv("NAPS") == "long":
        return
    os.environ.setdefault("MS_RETRY_INTERVAL_LOWER", "1")
    os.environ.setdefault("MS_RETRY_INTERVAL_UPPER", "1")
    file = runpy.run_path(str(Path(__file__).with_name("native.py")))["build"]("naps.c")
    if file:
        ctypes.CDLL(file).shorten_naps()
