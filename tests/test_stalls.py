"""Jobs in which no rank writes any more: the launcher says where each rank stands, and which is the odd one out."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import stacks  # noqa: E402

RANKS = jobs.REPO / "mnist_ddp" / "ranks.py"
SLEEPERS = """
import os, signal, sys, time
def load():
    time.sleep(600)
def wait():
    time.sleep(600)
print("hello", flush=True)
if os.environ.get("RANKS_RANK") == "1":
    load()
if os.environ.get("RANKS_RANK") == "3":
    os.kill(os.getpid(), signal.SIGSTOP)
wait()
"""
TRAINING = """
import os, sys, time
sys.path.insert(0, {lesson!r})
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore.communication import get_rank, init
import ranks

class Pictures:
    def __len__(self):
        return 9
    def __getitem__(self, number):
        if number > 3 and get_rank() == 1 and sys.argv[1] == "data":
            time.sleep(600)  # the data set blocks
        return np.ones(8, np.float32)

class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.sum = ms.ops.AllReduce()
    def construct(self, x):
        return self.sum(x * 2)

ms.set_context(mode=ms.GRAPH_MODE)
ranks.join()
init()
net = Net()
for picture, in ds.GeneratorDataset(Pictures(), "picture", shuffle=False).create_tuple_iterator(num_epochs=1):
    if sys.argv[1] == "left out" and get_rank() == 1:
        continue
    print(net(picture).asnumpy()[0], flush=True)  # the collective
time.sleep(600)  # after the loop
"""


def line_of(text, script):
    """The number of the line of a script that has a text in it."""
    return next(number for number, line in enumerate(script.splitlines(), start=1) if text in line)


def start(folder, script, ranks, *options, minutes=0.03, env=None):
    """A job of some ranks of a script; options are the launcher's, and behind -- the script's. On a busy machine ranks
    take longer to their first step, so there they may be silent up to twice as long.
    """
    minutes *= min(2, max(1, os.getloadavg()[0] / 3 / len(os.sched_getaffinity(0))))
    (folder / "train.py").write_text(script)
    cut = options.index("--") if "--" in options else len(options)
    return jobs.Job(jobs.PYTHON, RANKS, "-n", ranks, *options[:cut], "train.py", *options[cut:], cwd=folder,
                    env={"STALL_MINUTES": f"{minutes:.3f}", "DEVICE_TARGET": "CPU", **(env or {})})


@pytest.mark.parametrize("launcher", ["mpirun", "msrun", "table"])
def test_a_rank_that_sleeps(launcher, tmp_path):
    with start(tmp_path, SLEEPERS, 3, "--with", launcher, "--on-stall", "end") as job:
        result = job.finish()
    sleeps, called = [line_of(text, SLEEPERS) for text in ("time.sleep(600)", "    load()")]
    assert result.code == 75, result.output
    assert re.search(r"warning: no rank has written anything for \d+ s; quiet longest: rank \d, since .* the last line "
                     r"of .*: hello", result.output)
    assert (f"ranks.py: rank 1 is in line {sleeps} of train.py:  train.py:{called} > train.py:{sleeps} load > "
            "time.sleep") in result.output
    assert re.search(r"^ranks.py: ranks 0, 2 are in line \d+ of train.py:  train.py:\d+ > train.py:\d+ wait > ",
                     result.output, re.MULTILINE)
    assert "ranks.py: odd one out: rank 1; the others wait for it" in result.output
    assert "ended because no rank gets on (--on-stall end)" in result.output
    assert not result.left_over


def test_ranks_that_do_not_come(tmp_path):
    """As with mpirun, whose daemon on another machine could not call back; here Python's start waits."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nif b'--agent' in open('/proc/self/cmdline', 'rb').read():\n    time.sleep(6)\n")
    with start(tmp_path, "print('here')", 1, minutes=0.03, env={"PYTHONPATH": str(tmp_path)}) as job:
        result = job.finish()
    assert result.code == 0, result.output
    assert re.search(r"^ranks.py: warning: no rank has come in [2-9] s; the last line of log_output/mpirun.log: none$",
                     result.output, re.MULTILINE), result.output
    assert "[rank 0] here" in result.output


def test_ranks_on_cpu_are_looked_at_before_they_give_up_waiting(tmp_path):
    """For that one look the job is not ended."""
    with start(tmp_path, SLEEPERS, 3, "--with", "table", "--on-stall", "end", minutes=30,
               env={"MS_CPU_COMM_OP_TIMEOUT": "5"}) as job:
        job.wait_for("ranks.py: odd one out: rank 1; the others wait for it", timeout=30)
        time.sleep(1)
        assert job.process.poll() is None


def test_a_rank_that_is_stopped(tmp_path):
    assert stacks.standing({"state": "T", "pid": 7, "threads": [], "place": " on node2"})[0] == (
        "is stopped (SIGSTOP): kill -CONT 7 on node2 lets it go on")
    with start(tmp_path, SLEEPERS.replace('"1"', '"none"'), 4, "--with", "table") as job:
        pid = int(job.wait_for(r"rank 3 is stopped \(SIGSTOP\): kill -CONT (\d+) lets it go on")[1])
        job.wait_for("odd one out: rank 3; the others wait for it")
        assert "train.py" in jobs.command_of(pid).decode()
        os.kill(pid, signal.SIGCONT)
        job.wait_for("ranks 0, 1, 2, 3 are in line")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish().code == 143


@pytest.mark.parametrize("which", ["mpirun", "the agent of rank 1"])
def test_what_is_stopped_around_the_ranks_is_named(which, tmp_path):
    script = "print('ready', flush=True)\nwhile True:\n    print('x' * 999, flush=True)\n"
    with start(tmp_path, script, 2, "--with", "mpirun", "--on-stall", "end") as job:
        job.wait_for("(?s)ready.*ready")
        stopped = jobs.parent_of(job.rank_process(1))
        stopped = jobs.parent_of(stopped) if which == "mpirun" else stopped
        if which != "mpirun":
            os.kill(job.rank_process(0), signal.SIGSTOP)
        os.kill(stopped, signal.SIGSTOP)
        result = job.finish(60)
    assert result.code == 75
    assert f"ranks.py: {which} is stopped (SIGSTOP): kill -CONT {stopped} lets it go on\n" in result.output
    assert result.seconds < jobs.soon(40), "60 s for an answer that cannot come"
    assert not result.left_over


@pytest.mark.parametrize(("case", "place"), [("data", "the data set blocks"), ("left out", "after the loop")])
def test_a_rank_that_waits_in_a_collective(case, place, tmp_path):
    script = TRAINING.format(lesson=str(RANKS.parent))
    with start(tmp_path, script, 2, "--", case, minutes=0.1) as job:
        job.wait_for("odd one out: rank 1; the others wait for it")
        output, maps = job.output(), Path(f"/proc/{job.rank_process(0)}/maps").read_text()
    code = re.findall(r" r-xp .*/(libc\.so\.6|libc-[\d.]+so)$", maps, re.MULTILINE)
    assert len(code) == 1, "libc is patched: py-spy reads only the part before"
    assert f"rank 0 waits in AllReduce:  train.py:{line_of('# the collective', script)}" in output
    told = "rank 1 waits for data: .*; the data: train.py:{} __getitem__ > time.sleep" if case == "data" else \
        "rank 1 is in line {0} of train.py:  train.py:{0} > time.sleep"
    assert re.search(told.format(line_of(place, script)), output), output


@pytest.mark.parametrize("end", ["sys.exit()", "ranks.leave(); sys.exit()"])
def test_a_rank_that_has_ended_before_the_others(end, tmp_path):
    """mpirun ends the others then, msrun does not."""
    script = TRAINING.format(lesson=str(RANKS.parent)).replace("        continue", f"        {end}")
    with start(tmp_path, script, 2, "--with", "msrun", "--", "left out", minutes=0.1) as job:
        job.wait_for("ranks.py: rank 1 ended, with exit code 0; who waits for one that has ended waits for ever")
        assert f"rank 0 waits in AllReduce:  train.py:{line_of('# the collective', script)}" in job.output()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish().code == 143


def test_a_rank_that_tests_alone_when_the_others_have_left(tmp_path):
    """With msrun they end then, and nobody waits for them."""
    script = TRAINING.format(lesson=str(RANKS.parent)).replace("        continue", "        ranks.leave(); sys.exit()")
    script = script.replace("print(net(picture)", "1 or print(net(picture)")
    with start(tmp_path, script, 2, "--with", "msrun", "--", "left out", minutes=0.1) as job:
        job.wait_for("ranks.py: rank 0 is in line {0} of train.py:  train.py:{0} > time.sleep".format(
            line_of("after the loop", script)))
        time.sleep(1)
        assert "ended, with exit code 0" not in job.output()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish().code == 143


def test_a_rank_that_is_at_leave_before_the_others(tmp_path):
    """With mpirun it waits there."""
    script = TRAINING.format(lesson=str(RANKS.parent)).replace("        continue", "        ranks.leave()")
    with start(tmp_path, script, 2, "--on-stall", "end", "--", "left out", minutes=0.1) as job:
        result = job.finish(60)
    assert result.code == 75, result.output
    assert "ranks.py: rank 1 waits at ranks.leave() for the others to come there; let all ranks do" in result.output
    assert f"rank 0 waits in AllReduce:  train.py:{line_of('# the collective', script)}" in result.output
    assert "odd one out" not in result.output
    assert not result.left_over


def test_a_rank_that_works_is_no_reason_to_end_the_job(tmp_path):
    script = SLEEPERS.replace("    load()", "    while True: pass")
    with start(tmp_path, script, 2, "--with", "table", "--on-stall", "end") as job:
        job.wait_for(r"(?s)rank 1 works \([01]\.\d cores\).*rank 1 works")
        assert "rank 0 is in line" in job.output()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish().code == 143


TALKS_AGAIN = """
import contextlib, os, time
from pathlib import Path
def looked_at():
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            if any(b"stacks.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.read_text().split()):
                return True
print("hello", flush=True)
while not looked_at():
    time.sleep(0.01)
print("I was only slow", flush=True)
time.sleep(1.5)
print("done", flush=True)
"""


def test_a_rank_that_speaks_while_it_is_looked_at_is_no_reason_to_end_the_job(tmp_path):
    with start(tmp_path, TALKS_AGAIN, 2, "--with", "table", "--on-stall", "end") as job:
        result = job.finish()
    assert "warning: no rank has written anything for" in result.output
    assert result.code == 0, result.output
    assert {"[rank 0] done", "[rank 1] done"} <= {*result.output.splitlines()}


def test_what_is_said_without_py_spy():
    seen = {"pid": 7, "state": "S", "runs": False, "cores": 0.0, "threads": [], "collective": "",
            "problem": "py-spy is not installed"}
    lines, works = stacks.describe({0: seen, 1: {**seen, "state": "D"}, 2: seen, 3: None})
    assert lines == ["ranks 0, 2 are in state S (py-spy is not installed)",
                     "rank 1 is in state D (py-spy is not installed)", "rank 3 does not answer",
                     "odd one out: rank 3; the others wait for it"]
    assert not works
