"""Convolutions in oneDNN's own layout: right for all kinds, in use under every launcher, plain where they cannot be."""

import importlib.util
import re
import shutil
from pathlib import Path

import forks
import jobs
import numpy as np
import pytest

TOOLS = jobs.REPO / "tools"
VERSION_3 = (Path(importlib.util.find_spec("mindspore").origin).parent / "lib/libdnnl.so.3").is_file()
with_version_3 = pytest.mark.skipif(not VERSION_3, reason="this MindSpore's oneDNN is not version 3")


def kinds(folder, tools, isa=None):
    """Results and gradients of all kinds of convolutions, none if that fails, and what was printed."""
    done = forks.run(jobs.REPO / "tests/convolution_kinds.py", folder / "all.npz", cwd=folder,
                     env={"TOOLS": str(tools), "ONEDNN_VERBOSE": "1", **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})})
    if done.code:
        return [], done.output
    with np.load(folder / "all.npz") as arrays:
        return [arrays[name] for name in arrays.files], jobs.succeeded(done).output


def difference(arrays, expected):
    """The largest, as a part of each array's largest number."""
    assert len(arrays) == len(expected) > 40
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(arrays, expected))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What MindSpore computes by itself."""
    def make(folder):
        _, printed = kinds(folder, "", "AVX2")
        assert "convolution,jit" not in printed

    with np.load(jobs.made_once(tmp_path_factory, "plain convolutions", make) / "all.npz") as arrays:
        return [arrays[name] for name in arrays.files]


@with_version_3
@pytest.mark.parametrize("isa", [None, "SSE41", "AVX2"])  # None: the best that this processor has
def test_all_kinds_are_right(isa, plain, tmp_path):
    arrays, printed = kinds(tmp_path, TOOLS, isa)
    assert len(re.findall("exec,cpu,convolution,(?:jit|brg)", printed)) > 30, printed
    assert difference(arrays, plain) < 1e-5


@with_version_3
@pytest.mark.parametrize(("old", "new"), [
    ("given[i].which != result)\n            status = copy", "given[i].which == 0)\n            status = copy"),
    ("memory[i] && given[i].which == result", "memory[i] && given[i].which == 0"),
    ("record->copies[i] && record->which[i] != which", "record->copies[i] && false"),
    ("best->taken = true", "best->taken = false"),
])
def test_planted_bugs_are_found(old, new, plain, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("convolutions.py", "native.py", "linker_table.h"):
        shutil.copy(TOOLS / name, tools)
    text = (TOOLS / "convolutions.c").read_text()
    assert text.count(old) == 1
    (tools / "convolutions.c").write_text(text.replace(old, new))
    arrays, printed = kinds(tmp_path, tools)
    assert "quick: True" in printed
    assert not arrays or not difference(arrays, plain) < 1e-3, printed


def has_quick_convolutions(output):
    """Does what a rank of a lesson has printed with ONEDNN_VERBOSE=1 show some in oneDNN's own layout?"""
    return bool(re.search("exec,cpu,convolution,(jit|brg).*blocked:aBcd", output))


@pytest.mark.parametrize("env", [{"CC": "false"}, {"CC": "no-such-compiler"}, {"CONVOLUTIONS": "plain"}])
def test_without_a_compiler_or_where_it_is_wanted_they_are_plain(env, tmp_path):
    """There is no compiler, or only CC is wrong, or CONVOLUTIONS=plain."""
    done = jobs.run(jobs.PYTHON, "-c", f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
                    "import convolutions, os; print(convolutions.take_over(), os.getenv('ONEDNN_MAX_CPU_ISA'))",
                    cwd=tmp_path, env=env)
    quick = env == {"CC": "no-such-compiler"} and VERSION_3
    assert jobs.succeeded(done).output.split()[-2:] == [str(quick), "DEFAULT" if quick else "None"]
