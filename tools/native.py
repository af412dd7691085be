"""Compiles the C files of this folder at their first use."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
END = b"whole"  # of a library; who loads it does not read that far


def build(name, compiler=None):
    """The path of the library made of a C file of this folder, now if need be, in __pycache__; None if that fails, or
    if it cannot be loaded from there.

    compiler: its path; None for the machine's C compiler (the variable CC, or cc).
    """
    source = HERE / name
    try:
        compiler = Path(shutil.which(compiler or os.getenv("CC", "")) or shutil.which("cc"))
        texts = source.read_bytes() + (HERE / "linker_table.h").read_bytes()
        made_by = f"{compiler} {compiler.stat().st_mtime_ns} {platform.machine()} {platform.libc_ver()}"
        key = hashlib.sha256(texts + made_by.encode()).hexdigest()[:16]
        library = HERE / "__pycache__" / f"{source.stem}-{key}.so"
        if os.statvfs(HERE).f_flag & os.ST_NOEXEC:
            return None
        if library.is_file() and not library.read_bytes().endswith(END):  # cut off, by a crash or as it was copied;
            library.unlink()  # to load it would end this process
        if not library.is_file():
            library.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                draft = Path(folder, library.name)
                subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", draft, source, "-lm", "-ldl"], check=True,
                               stdin=subprocess.DEVNULL, capture_output=True, timeout=50)
                draft.write_bytes(draft.read_bytes() + END)
                draft.rename(library)  # whole or not at all: others may be at it, too
        ctypes.CDLL(str(library))
        return str(library)
    except (TypeError, OSError, subprocess.SubprocessError):
        return None
