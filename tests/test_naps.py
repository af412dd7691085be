"""MindSpore's naps while ranks look for each other: cut short at the start, in every process of a job."""

import ctypes
import re
import runpy
import time

import jobs
import pytest

RUN = jobs.REPO / "allgather_check"


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def test_a_nap_is_at_most_a_tenth_of_the_time_waited():
    library = ctypes.CDLL(runpy.run_path(str(jobs.REPO / "tools/native.py"))["build"]("naps.c"))

    def nap(*asked):
        begin = time.monotonic()
        assert library.nap(ctypes.byref(Timespec(*asked)), None) == 0
        return time.monotonic() - begin

    assert library.shorten_naps() == 0  # no MindSpore in this process
    assert 0.02 <= nap(100, 5) < 50
    assert 0.02 <= nap(0, 500_000_000)
    assert 0.005 <= nap(0, 5_000_000)  # a short one is not made longer
    time.sleep(1)
    assert 0.1 <= nap(100, 0) < 50
    assert library.nap(ctypes.byref(Timespec(0, -1)), None) == -1  # as nanosleep(), which refuses it


@pytest.mark.parametrize("launcher", ["mpirun", "msrun"])
def test_ranks_ask_often(launcher, tmp_path):
    jobs.succeeded(jobs.run("bash", RUN / "run.sh", 2, "--launcher", launcher, cwd=tmp_path, env={"GLOG_v": "1"}))
    logs = [*tmp_path.glob("log_output/1/rank.*/stdout"), *tmp_path.glob("log_output/worker_*.log")]
    assert len(logs) == 2
    waits = []  # in seconds: between two questions, and from the first to the answer
    for log in logs:
        text, asked = log.read_text(errors="replace"), {}
        for pid, minute, second in re.findall(
                r"\((\d+),\w+,python\w*\):\S*:(\d\d):(\d\d\.\d+)\.\d+ .*Topology build timed out., retry", text):
            asked.setdefault(pid, []).append(60 * int(minute) + float(second))
        waits += [later - earlier for times in asked.values() for earlier, later in zip(times, times[1:])]
        waits += [float(milliseconds) / 1000 for milliseconds in re.findall(r"\]BuildCluster costs ([\d.]+) msec", text)]
    assert waits
    assert min(waits) < 0.4  # MindSpore's shortest is 0.5
