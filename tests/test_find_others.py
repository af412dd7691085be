"""How the ranks of a job find each other: naps cut short at the start, and an address that no other job has.

And the libraries that do such things: made anew where they are broken, done without where they cannot be loaded.
"""

import os
import re
import runpy
import shutil
from pathlib import Path

import jobs
import pytest

NAPS = """
import ctypes, sys, time

class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

def nap(*asked):
    begin = time.monotonic()
    assert library.nap(ctypes.byref(Timespec(*asked)), None) == 0
    return time.monotonic() - begin

library = ctypes.CDLL(sys.argv[1])
assert library.take_over(True) == 0, "there is no MindSpore here"
assert 0.02 <= nap(100, 5) < 50
assert 0.02 <= nap(0, 500_000_000)
assert 0.005 <= nap(0, 5_000_000), "a short one is not made shorter"
time.sleep(1)
assert 0.1 <= nap(100, 0) < 50
assert library.nap(ctypes.byref(Timespec(0, -1)), None) == -1, "as nanosleep(), which refuses it"
begin = time.monotonic()
for _ in range(6):
    assert library.long_nap(100) == 0
assert 1.2 <= time.monotonic() - begin < 50, "each is twice as long as the one before"
"""


def test_a_nap_is_at_most_a_tenth_of_the_time_waited(tmp_path):
    library = runpy.run_path(str(jobs.REPO / "tools/native.py"))["build"]("find_others.c")
    jobs.succeeded(jobs.run(jobs.PYTHON, "-c", NAPS, library, cwd=tmp_path))


@pytest.mark.parametrize(("launcher", "naps"), [("msrun", "short"), ("mpirun", "long")])
def test_ranks_ask_often_and_listen_where_no_other_job_does(launcher, naps, tmp_path):
    """Where all jobs do, a rank may get the port of one that has died, and with it the numbers sent to that one.

    Also in a folder called mindspore: the path of all libraries then has that word in it; only MindSpore's own may be
    changed.
    """
    folder = tmp_path / "mindspore" / "lib"
    for name in ("allgather_check", "tools"):
        shutil.copytree(jobs.REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    result = jobs.succeeded(jobs.run("bash", folder / "allgather_check/run.sh", 2, "--launcher", launcher, cwd=tmp_path,
                                     env={"GLOG_v": "1", "NAPS": naps}))
    assert list(folder.glob("tools/__pycache__/find_others-*.so"))
    assert result.output.count("AllReduce ok") == 2
    logs = [*tmp_path.glob("log_output/1/rank.*/stdout"), *tmp_path.glob("log_output/worker_*.log")]
    assert len(logs) == 2
    told = "\n".join(log.read_text(errors="replace") for log in logs)
    port, = {int(port) for port in re.findall(r"the scheduler port:(\d+)", told)}
    assert re.findall(r"is generate uuid is:.*, the ip:([\d.]+), ", told) == 2 * [f"127.77.{port >> 8}.{port & 255}"]
    waits = []  # in seconds: between two questions, and from the first to the answer
    for log in logs:
        text, asked = log.read_text(errors="replace"), {}
        for pid, minute, second in re.findall(
                r"\((\d+),\w+,python\w*\):\S*:(\d\d):(\d\d\.\d+)\.\d+ .*Topology build timed out., retry", text):
            asked.setdefault(pid, []).append(60 * int(minute) + float(second))
        waits += [later - earlier for times in asked.values() for earlier, later in zip(times, times[1:])]
        waits += [float(cost) / 1000 for cost in re.findall(r"\]BuildCluster costs ([\d.]+) msec", text)]
    assert waits
    assert (min(waits) < 0.4) == (naps == "short")  # MindSpore's shortest is 0.5


# ------------------------------------------------------------------------------------- libraries that cannot be loaded
BUILT = "import runpy, sys; print(runpy.run_path(sys.argv[1])['build']('find_others.c'))"


def test_a_library_that_was_cut_off_is_made_anew(tmp_path):
    for name in ("native.py", "find_others.c", "linker_table.h"):
        shutil.copy(jobs.REPO / "tools" / name, tmp_path)
    sizes = []
    for _ in range(2):
        library = Path(jobs.succeeded(jobs.run(jobs.PYTHON, "-c", BUILT, "native.py", cwd=tmp_path)).output.strip())
        sizes.append(library.stat().st_size)
        os.truncate(library, 1000)
    assert sizes[0] == sizes[1] > 1000


def test_ranks_do_without_libraries_where_no_program_may_be_run(tmp_path):
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o noexec tmpfs . && cd . && exec "$@"']
    if jobs.run(*mount, "sh", "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    copy_and_run = ('cp -r "$1/allgather_check" "$1/tools" . && rm -rf tools/__pycache__ && '
                    "bash allgather_check/run.sh 2 && ! ls tools/__pycache__/*.so")
    jobs.succeeded(jobs.run(*mount, "sh", "bash", "-c", copy_and_run, "bash", jobs.REPO, cwd=tmp_path))
