"""On CPU, lets oneDNN choose the layout of convolutions: ResNet-50's step takes half the time.

take_over() is called in each process that trains, once MindSpore has its device. convolutions.c, beside this file,
says how it works. It is compiled at the first use; without a C compiler, with a MindSpore whose oneDNN is not version 3
(2.7, 2.8), on another processor than x86-64 (not tried there), or with CONVOLUTIONS=plain in the environment all stays
as it is in MindSpore.
"""

import ctypes
import os
import platform
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent


def take_over():
    """Make this process's convolutions quick; returns whether they are."""
    import mindspore
    onednn = Path(mindspore.__file__).parent / "lib" / "libdnnl.so.3"
    if os.getenv("CONVOLUTIONS") == "plain" or not onednn.is_file() or platform.machine() != "x86_64":
        return False
    file = runpy.run_path(str(HERE / "native.py"))["build"]("convolutions.c")
    if not file:
        return False
    library = ctypes.CDLL(file)
    library.take_over.restype = ctypes.c_bool
    if not library.take_over(os.fsencode(onednn)):
        return False
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "DEFAULT")  # the plain ones would be slow with AVX-512
    return True
