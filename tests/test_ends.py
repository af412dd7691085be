"""How jobs end and start again: TERM saves first, Ctrl-C upon Ctrl-C leaves nothing, restarts with every launcher."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import jobs
import pytest

RANKS = jobs.REPO / "mnist_ddp" / "ranks.py"
CPU = {"DEVICE_TARGET": "CPU"}
SAME = 1e-5


def start(folder, script, ranks, *options, env=None):
    """A job of a script that needs no MindSpore; options are the launcher's, and behind -- the script's."""
    (folder / "train.py").write_text(script)
    cut = options.index("--") if "--" in options else len(options)
    return jobs.Job(jobs.PYTHON, RANKS, "-n", ranks, *options[:cut], "train.py", *options[cut:], cwd=folder,
                    env={**CPU, **(env or {})})


# ------------------------------------------------------------------------------------------------------------ TERM
def losses_of(text, rank):
    """What a rank printed: {(epoch, step): loss}."""
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in
            re.findall(rf"^\[rank {rank}\] epoch: (\d+) step: (\d+), loss is (\S+)$", text, re.MULTILINE)}


def check_term(command, epochs, when, ranks_shown, folder, others=()):
    """TERM in the middle of a job, --resume, and a job that nobody ended: the same losses, each step once.

    With other options, steps would be counted, and data be taken, from a wrong place: (options, what an epoch then is).
    """
    folders = [folder / "broken", folder / "whole"]
    for each in folders:
        each.mkdir()
    with jobs.Job(*command, "--epochs", epochs or 3000, cwd=folders[0], env=CPU) as job:
        job.wait_for(when)
        os.kill(job.process.pid, signal.SIGTERM)
        broken = job.finish(300)
    assert broken.code == 143, broken.output
    assert not broken.left_over
    assert "TERM: the ranks end their step and save, in 30 s at most (--grace)" in broken.output
    said, = re.findall(r"all ranks have saved epoch (\d+), step (\d+); --resume goes on there", broken.output)
    epoch, step = map(int, said)
    assert len(list(folders[0].glob(f"ck/*/*-{epoch}_{step}.ckpt"))) == 2, "both ranks have saved it"
    command = (*command, "--epochs", epochs or epoch + 2)
    for options, now in others:
        refused = jobs.run(*command, *options, "--resume", cwd=folders[0], env=CPU, timeout=300)
        assert refused.code == 2, refused.output
        assert re.search(rf"-{epoch}_{step}\.ckpt was saved in an epoch of 6 steps of 4, now {now}; resume with the "
                         "--steps and --batch-size of the job that saved it$", refused.output, re.MULTILINE)
        assert "Traceback" not in refused.output
    resumed = jobs.succeeded(jobs.run(*command, "--resume", cwd=folders[0], env=CPU, timeout=300))
    whole = jobs.succeeded(jobs.run(*command, cwd=folders[1], env=CPU, timeout=300))
    for rank in ranks_shown:
        expected = losses_of(whole.output, rank)
        first, second = losses_of(broken.output, rank), losses_of(resumed.output, rank)
        assert max(first) == (epoch, step), "no step after the one that was saved"
        assert not first.keys() & second.keys(), "no step twice"
        assert {**first, **second} == pytest.approx(expected, abs=SAME)
    return step


def test_term_loses_nothing(tmp_path):
    check_term(("bash", jobs.REPO / "checkpoints/run.sh", "semi_auto_parallel", 2, "--", "--ckpt-dir", "ck", "--lr",
                0.001), 0, r"\[rank 0\] epoch: 3 step: 2", (0, 1), tmp_path)


def test_term_in_the_middle_of_model_train(cifar10, tmp_path):
    step = check_term(("bash", jobs.REPO / "run.sh", cifar10, 2, "--no-sink", "--", *jobs.SHALLOW, "--image-size", 32,
                       "--batch-size", 4, "--steps", 6, "--test-images", 0, "--parallel-mode", "data_parallel",
                       "--ckpt-dir", "ck"), 2, r"\[rank 0\] epoch: 2 step: 2", (0,), tmp_path, (
                           (("--steps", 5), "5 of 4"), (("--batch-size", 8), "6 of 8")))
    assert step < 6, "in the middle of an epoch"


def test_term_ends_accumulation_after_a_whole_batch(cifar10, tmp_path):
    """Within a batch the ranks do not wait for each other, and would save different steps.

    And after --resume losses are those of whole batches, too.
    """
    command = ("bash", jobs.REPO / "resnet50_ascend/run_grad_accumulation.sh", cifar10, 2, "--", *jobs.SHALLOW,
               "--image-size", 32, "--batch-size", 8, "--micro-batches", 4, "--test-images", 0, "--steps", 10,
               "--ckpt-dir", "ck")
    with jobs.Job(*command, "--epochs", 3000, cwd=tmp_path, env=CPU) as job:
        job.wait_for(r"\[rank 0\] epoch: 1 step: 12")
        os.kill(job.process.pid, signal.SIGTERM)
        broken = job.finish(300)
    epoch, step = map(int, re.search(r"all ranks have saved epoch (\d+), step (\d+); --resume goes on there",
                                     broken.output).groups())
    assert step % 4 == 0
    assert len(list(tmp_path.glob(f"ck/*/*-{epoch}_{step}.ckpt"))) == 2, "both ranks have saved it"
    resumed = jobs.succeeded(jobs.run(*command, "--resume", "--epochs", epoch + 1, cwd=tmp_path, env=CPU, timeout=300))
    expected = [(epoch, later) for later in range(step + 4, 41, 4)] + [(epoch + 1, later) for later in range(4, 41, 4)]
    assert list(losses_of(resumed.output, 0)) == expected


CRASHES = """import atexit, os, sys
import ranks
import mindspore as ms
from mindspore.communication import init
def crash():
    if os.getenv("RANK_ID") == "1":
        os.kill(os.getpid(), 11)
crash.__module__ = "mindspore"  # a part of its clean-up
atexit.register(crash)
ranks.join()
init()
print("sum", ms.ops.AllReduce()(ms.Tensor([1.0])), flush=True)
results = open(f"results{os.environ['RANK_ID']}", "w")
results.write("one\\n")
atexit.register(results.write, "two\\n")
if os.getenv("RANK_ID") == "1":
    FAULT
ranks.leave()
"""


@pytest.mark.parametrize("fault", ["pass", "exit(3)", "sys.excepthook = print; raise ValueError('why')"])
def test_a_crash_of_mindspores_clean_up_after_all_is_done_is_no_failure(fault, tmp_path):
    """Under msrun it runs, and crashes one time in forty."""
    with start(tmp_path, CRASHES.replace("FAULT", fault), 2, "--with", "msrun",
               env={"PYTHONPATH": str(RANKS.parent)}) as job:
        result = job.finish(90)
    assert result.code == (0 if fault == "pass" else 139), result.output
    said = "[rank 1] MindSpore's clean-up crashed (signal 11) after the script had ended well\n"
    assert (said in result.output) == (fault == "pass")
    assert not result.left_over
    if fault == "pass":
        assert [(tmp_path / f"results{rank}").read_text() for rank in range(2)] == ["one\ntwo\n"] * 2


def test_a_pool_whose_processes_would_run_the_script_anew_for_ever(tmp_path):
    script = ("import multiprocessing\nimport ranks\nfrom mindspore.communication import init\nranks.join()\ninit()\n"
              "if __name__ == '__main__':\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
              "        print(pool.map(abs, [-1]))\nranks.leave()\n")
    with start(tmp_path, script, 2, "--with", "mpirun", env={"PYTHONPATH": str(RANKS.parent)}) as job:
        result = job.finish(60)
    assert result.code == 143, result.output
    assert result.output.count("has started runs the script anew, as if it was a rank: put all that") <= 4
    assert re.search(r"rank \d failed, exit code 143\. The end of ", result.output)
    assert not result.left_over


FORKS = """import os, subprocess, sys, time
import ranks
import mindspore as ms
from mindspore.communication import init
killed = subprocess.Popen(["sleep", "99"])
killed.kill()
ranks.join()
time.sleep(3 * int(os.environ["MS_NODE_ID"]))  # rank 0, whose scheduler is looked at, is in init()
init()
add_up = ms.ops.AllReduce()
add_up(ms.Tensor([1.0]))
for end in ("sys.exit(5)", "sys.exit()", "1 / 0", "ranks.leave()"):
    child = os.fork()
    if child == 0:
        exec(end)
    print(end, os.waitpid(child, 0)[1] >> 8, flush=True)
print("sum", add_up(ms.Tensor([1.0])), flush=True)
ranks.leave()
"""


def test_a_process_that_a_rank_forks_ends_for_itself_alone(tmp_path):
    """And not MPI, too, in which the other ranks would take it for its rank. Nor is one that the script has started and
    killed taken for the scheduler."""
    with start(tmp_path, FORKS, 2, env={"PYTHONPATH": str(RANKS.parent)}) as job:
        result = jobs.succeeded(job.finish(60))
    for line in ("sys.exit(5) 5", "sys.exit() 0", "1 / 0 1", "ranks.leave() 0", "sum [2.]"):
        assert sorted(re.findall(rf"^\[rank (\d)\] {re.escape(line)}$", result.output, re.MULTILINE)) == ["0", "1"]
    assert not result.left_over


def test_a_launcher_that_reads_nothing_for_a_while_loses_no_rank(tmp_path):
    """As after Ctrl-Z, or where the terminal stands still: the ranks write on, then wait."""
    script = ("import os, time\nfor step in range(10000):\n    print(step, 'x' * 1000)\n"
              "    while step == 99 and not os.path.exists('stopped'):\n        time.sleep(0.01)\n")
    with start(tmp_path, script, 2, "--show", "first") as job:
        job.wait_for(r"\[rank 0\] 99 x")
        os.kill(job.process.pid, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        time.sleep(16)  # more than the 12 s after which another machine is taken for dead
        os.kill(job.process.pid, signal.SIGCONT)
        result = jobs.succeeded(job.finish(60))
    assert "[rank 0] 9999 x" in result.output
    assert not result.left_over


@pytest.mark.parametrize(("options", "code"), [((), 143), (("--time-limit", "5s"), 124)])
def test_a_job_ends_though_nobody_reads_its_lines(options, code, tmp_path):
    """As where a terminal stands still after Ctrl-S: the launcher waits, but not when TERM comes or time is over."""
    (tmp_path / "train.py").write_text("while True: print('x' * 1000)")
    os.mkfifo(tmp_path / "lines")
    held = os.open(tmp_path / "lines", os.O_RDWR)
    with jobs.Job("bash", "-c", 'exec "$@" &> lines', "bash", jobs.PYTHON, RANKS, "-n", 2, *options, "train.py",
                  cwd=tmp_path, env=CPU) as job:
        deadline = time.monotonic() + 30 * jobs.PATIENCE
        while select.select([], [held], [], 0)[1] and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        if not options:
            os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish(60)
    assert result.code == code
    assert result.seconds < 25 * jobs.PATIENCE
    assert not result.left_over
    assert os.read(held, 1000).startswith(b"[rank ")
    os.close(held)


def test_a_job_ends_though_its_terminal_stands_still(tmp_path):
    """It says that it has room for more, where it has for a few characters only."""
    (tmp_path / "train.py").write_text("while True: print('x' * 1000)")
    master, slave = os.openpty()
    with jobs.Job("bash", "-c", 'exec "$@" &> "$TERMINAL"', "bash", jobs.PYTHON, RANKS, "-n", 2, "--time-limit", "4s",
                  "train.py", cwd=tmp_path, env={**CPU, "TERMINAL": os.ttyname(slave)}) as job:
        result = job.finish(60)
    os.close(master)
    os.close(slave)
    assert result.code == 124
    assert result.seconds < 20 * jobs.PATIENCE
    assert not result.left_over


@pytest.mark.parametrize(("code", "late"), [(7, False), (7, True), (0, True)])
def test_a_rank_that_fails_while_nobody_reads_ends_the_others(code, late, tmp_path):
    """Also one of which the launcher has not heard before; one that ends well does not."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nos.chdir('..')\nif os.environ['RANKS_RANK'] == '1':\n    os.mknod('began')\n    "
        "while not os.path.exists('full'):\n        time.sleep(0.01)\n    "
        f"os.mknod('ended')\n    sys.exit({code})\nopen('pid', 'w').write(str(os.getpid()))\n"
        f"while not {late} and not os.path.exists('began'):\n    time.sleep(0.01)\n"
        f"time.sleep({int(not late)})\n"  # so that the launcher has heard of rank 1 before nobody reads
        "while not os.path.exists('enough'):\n    print('x' * 1000)\n")
    (tmp_path / "sitecustomize.py").write_text(  # the agent of rank 1 comes when nobody reads, that of rank 2 later
        "import os, time\nfile = {'1': 'full', '2': 'over'}.get(os.environ.get('RANK_ID'), '.')\n"
        "if file == 'over':\n    open('last', 'w').write(str(os.getpid()))\n"
        "while 'RANKS_LAUNCHER' in os.environ and not os.path.exists(file):\n    time.sleep(0.01)\n" * late)
    os.mkfifo(tmp_path / "lines")
    held = os.open(tmp_path / "lines", os.O_RDWR)
    with jobs.Job("bash", "-c", 'exec "$@" &> lines', "bash", jobs.PYTHON, RANKS, "-n", 2 + (late and code > 0),
                  "--with", "table", "train.py", cwd=tmp_path, env={**CPU, "PYTHONPATH": str(tmp_path)}) as job:
        deadline = time.monotonic() + 30 * jobs.PATIENCE
        while select.select([], [held], [], 0)[1] and time.monotonic() < deadline:
            time.sleep(0.1)
        (tmp_path / "full").touch()
        while not (tmp_path / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        first = Path("/proc", (tmp_path / "pid").read_text())
        deadline = time.monotonic() + (12 * jobs.PATIENCE if code else 3)
        while first.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert first.exists() == (code == 0)
        (tmp_path / "over").touch()
        if late and code:
            last = Path("/proc", (tmp_path / "last").read_text())
            deadline = time.monotonic() + 5 * jobs.PATIENCE
            while last.exists() and jobs.command_of(last.name) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not jobs.command_of(last.name), "it has ended, though it came late"
        (tmp_path / "enough").touch()
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(held, 1 << 16), b"")], daemon=True)
        reader.start()
        result = job.finish(60)
    assert result.code == code
    assert not result.left_over


def test_a_very_long_line_keeps_no_job_from_its_end(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('x' * 50_000_000)\ntime.sleep(300)\n")
    with jobs.Job("bash", "-c", 'exec "$@" >lines', "bash", jobs.PYTHON, RANKS, "-n", 1, "--time-limit", "6s",
                  "train.py", cwd=tmp_path, env=CPU) as job:
        result = job.finish(90)
    assert result.code == 124
    assert result.seconds < 20 * jobs.PATIENCE


def test_two_jobs_that_start_in_one_folder_at_once(tmp_path):
    """The second waits until the ranks of the first have opened their logs, which it then moves aside."""
    (tmp_path / "train.py").write_text("import os, sys, time\nmine = sys.argv[1] + os.environ['RANKS_RANK']\n"
                                       "open('mine', 'w').write(mine)\ntime.sleep(2)\n"
                                       "print(mine, 'reads', open('mine').read())\n")

    def job(name):
        return jobs.Job(jobs.PYTHON, RANKS, "-n", 2, "--with", "table", "train.py", "--", name, cwd=tmp_path, env=CPU)

    with job("A") as one, job("B") as other:
        results = [jobs.succeeded(each.finish(60)).output for each in (one, other)]
    for name, output in zip("AB", results):
        assert {line.split("] ")[1] for line in output.splitlines() if "reads" in line} == {
            f"{name}{rank} reads {name}{rank}" for rank in range(2)}


def test_a_second_join_is_told(tmp_path):
    """A rank would wait for another scheduler for ever."""
    twice = FORKS.replace("ranks.join()\n", "ranks.join()\nranks.join()\n")
    with start(tmp_path, twice, 2, env={"PYTHONPATH": str(RANKS.parent)}) as job:
        result = job.finish(60)
    assert result.code == 1
    assert "ranks.join() is called once, before init(); leave out the second" in result.output


ASKED = "import os, time\nos.write(int(os.environ['RANKS_WORDS']), b'steps')\nprint('ready', flush=True)\n"


@pytest.mark.parametrize(("options", "seconds"), [(("--grace", 1), 1), (("--grace", 900, "second"), 0)])
def test_ranks_that_do_not_save_in_time_are_ended(options, seconds, tmp_path):
    with start(tmp_path, ASKED + "time.sleep(600)", 2, "--with", "table", *options[:2]) as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.process.pid, signal.SIGTERM)
        job.wait_for("TERM: the ranks end their step")
        if "second" in options:
            os.kill(job.process.pid, signal.SIGTERM)
        sent = time.monotonic()
        result = job.finish()
    assert time.monotonic() - sent < jobs.soon()
    assert result.code == 143
    assert ("not saved within 1 s: rank 0, 1" in result.output) == bool(seconds)
    assert not result.left_over


TESTS = """import runpy, os, time
launcher = runpy.run_path(os.environ['RANKS_SAVING'])['Launcher']()
assert not launcher.ends_after(0.5)
launcher.saved('epoch 1, step 1')
print('ready', flush=True)
time.sleep(600)  # as in a long test
"""


def test_ranks_that_have_saved_and_test_are_not_said_to_have_lost_anything(tmp_path):
    with start(tmp_path, TESTS, 2, "--with", "table", "--grace", 1) as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143
    assert "no step has ended within 1 s, as none does while ranks test\n" in result.output
    assert result.output.count("all ranks have saved epoch 1, step 1; --resume goes on there") == 1


def test_a_rank_that_is_stopped_when_term_comes_is_named(tmp_path):
    with start(tmp_path, TESTS, 2, "--with", "table", "--grace", 1) as job:
        job.wait_for(r"(?s)ready.*ready")
        stopped = job.rank_process(1)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143
    assert (f"not saved within 1 s: rank 0, 1; rank 1 (PID {stopped}) was stopped, by SIGSTOP or a debugger\n"
            in result.output)


def test_a_rank_that_fails_between_term_and_its_save_is_named(tmp_path):
    with start(tmp_path, TESTS, 2, "--with", "table", "--report", "r.json", "--restarts", 2,
               "--", "--ckpt-dir", "ck") as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.process.pid, signal.SIGTERM)
        job.wait_for("TERM: the ranks end their step")
        os.kill(job.rank_process(1), signal.SIGKILL)
        result = job.finish()
    assert result.code == 143
    assert "rank 1 has failed before all had saved\n" in result.output
    assert re.search(r"rank 1 failed, exit code 137\. The end of device1/train\.log1:\n(.*\n)?.*ready\n.*hint: it was "
                     "killed", result.output)
    assert result.output.count("all ranks have saved epoch 1, step 1; --resume goes on there") == 1
    assert "restart 1" not in result.output
    failure, = json.loads((tmp_path / "r.json").read_text())["failures"]
    assert (failure["rank"], failure["exit_code"]) == (1, 137)


def test_what_ranks_save_while_they_are_ended_is_told(tmp_path):
    script = TESTS.replace("print('ready'", """
def save(*_):
    launcher.saved('epoch 2, step 1')
    os._exit(0)
import signal
signal.signal(signal.SIGTERM, save)
print('ready'""")
    with start(tmp_path, script, 2, "--with", "mpirun") as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.process.pid, signal.SIGINT)
        result = job.finish()
    assert result.code == 130
    assert "all ranks have saved epoch 2, step 1; --resume goes on there\n" in result.output, result.output


@pytest.mark.parametrize(("launcher", "handled"), [("mpirun", True), ("mpirun", False), ("msrun", True)])
def test_usr1_of_a_batch_system_is_the_scripts(launcher, handled, tmp_path):
    """mpirun passes it on to what it has started; so does the launcher, while msrun does nothing."""
    handler = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('told')))\n" * handled
    script = f"import signal, sys, time\n{handler}print('ready', flush=True)\ntime.sleep(600)\n"
    with start(tmp_path, script, 2, "--with", launcher) as job:
        job.wait_for(r"(?s)ready.*ready")
        starter = jobs.parent_of(jobs.parent_of(job.rank_process(0)))
        os.kill(starter, signal.SIGUSR1)
        if launcher == "msrun":
            os.kill(job.process.pid, signal.SIGUSR1)
        result = job.finish()
    assert (result.code, result.output.count("] told\n")) == ((0, 2) if handled else (138, 0)), result.output
    assert "memory ran out" not in result.output
    assert not result.left_over


def test_signals_while_a_rank_writes_lose_no_line(tmp_path):
    script = ("import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\nprint('begins')\n"
              "for number in range(200000):\n    print(number, 'y' * 80)\n")
    with start(tmp_path, script, 1, "--with", "mpirun", "--show", "0") as job:
        job.wait_for("begins")
        agent, sent = jobs.parent_of(job.rank_process(0)), 0
        with contextlib.suppress(ProcessLookupError):
            while job.process.poll() is None:
                os.kill(agent, signal.SIGUSR2)
                sent += 1
                time.sleep(0.005)
        assert job.finish().code == 0
    assert sent > 20
    lines = (tmp_path / "log_output/1/rank.0/stdout").read_text().splitlines()
    assert lines == ["begins", *(f"{number} {'y' * 80}" for number in range(200000))]


def test_quit_is_told_and_in_the_report(tmp_path):
    with start(tmp_path, TESTS, 2, "--with", "mpirun", "--report", "report.json") as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.process.pid, signal.SIGQUIT)
        result = job.finish()
    assert result.code == 131
    assert "ranks.py: ended by SIGQUIT, Ctrl-\\, or kill\n" in result.output
    assert "all ranks have saved epoch 1, step 1; --resume goes on there\n" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_code"], report["ended_by"]) == (131, "SIGQUIT")
    assert not result.left_over


def test_mpiruns_folder_goes_with_it(tmp_path):
    (tmp_path / "tmp").mkdir()
    with start(tmp_path, TESTS, 2, "--with", "mpirun", env={"TMPDIR": str(tmp_path / "tmp")}) as job:
        job.wait_for(r"(?s)ready.*ready")
        mpirun = jobs.parent_of(jobs.parent_of(job.rank_process(0)))
        assert [*tmp_path.glob(f"tmp/ompi.*/pid.{mpirun}")]
        os.kill(mpirun, signal.SIGKILL)
        assert job.finish().code == 137
    assert not [*tmp_path.glob("tmp/ompi.*/pid.*")]


CHECKED = """import os, sys
if "--check" in sys.argv:
    sys.exit(print("saves in ck"))
os.makedirs("ck", exist_ok=True)
"""


def test_what_was_deleted_is_not_said_to_be_saved(tmp_path):
    with start(tmp_path, CHECKED + TESTS, 2, "--with", "mpirun", "--check") as job:
        job.wait_for(r"(?s)ready.*ready")
        shutil.rmtree(tmp_path / "ck")
        os.kill(job.rank_process(1), signal.SIGKILL)
        result = job.finish()
    assert result.code == 137
    assert "have saved" not in result.output


INTERRUPTED = """import time
import mindspore as ms
import ranks
ms.set_context(device_target="CPU")
ranks.join()
ms.communication.init()
print("ready", flush=True)
time.sleep(5)
print(ms.ops.AllReduce()(ms.Tensor([1.0])))
ranks.leave()
"""


@pytest.mark.parametrize("launcher", ["mpirun", "msrun"])
def test_ctrl_c_of_one_rank_ends_the_job(launcher, tmp_path):
    """MindSpore's handler would end its connections and let the rank go on: all would hang."""
    with start(tmp_path, INTERRUPTED, 2, "--with", launcher, env={"PYTHONPATH": str(RANKS.parent)}) as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(job.rank_process(1), signal.SIGINT)
        result = job.finish(30)
    assert result.code == 130, result.output
    assert "rank 1 failed, exit code 130" in result.output
    assert not result.left_over


def scheduler_of(rank):
    """The process of MindSpore's scheduler, a copy of rank 0's."""
    return next(int(pid) for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
                if Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{rank}/cmdline").read_bytes())


def schedulers_of(job):
    """Those of msrun."""
    return [pid for pid in jobs.marked(job.mark) if b"MS_ROLE=MS_SCHED" in jobs.environment_of(pid)
            and b"--agent" not in jobs.command_of(pid)]


def test_a_scheduler_that_is_killed_is_named(tmp_path):
    """MindSpore would end one of the ranks, 20 s later; a script may have children of its own."""
    steps = "while True: ms.ops.AllReduce()(ms.Tensor([1.0]))"
    child = f"import os\nos.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '60')\n{steps}"
    script = INTERRUPTED.replace("time.sleep(5)", child)
    with start(tmp_path, script, 2, "--with", "table", env={"PYTHONPATH": str(RANKS.parent)}) as job:
        job.wait_for(r"(?s)ready.*ready")
        scheduler = scheduler_of(job.rank_process(0))
        os.kill(scheduler, signal.SIGKILL)
        killed = time.monotonic()
        result = job.finish(60)
    assert time.monotonic() - killed < jobs.soon()
    assert result.code == 137
    assert "rank 0 failed, exit code 137" in result.output
    assert f"MindSpore's scheduler, process {scheduler} of rank 0, was ended by signal 9" in result.output


@pytest.mark.parametrize("launcher", ["mpirun", "msrun"])
def test_a_scheduler_that_is_ended_in_training_is_named(launcher, tmp_path):
    """MindSpore 2.10 ends a rank 20 s later, which has written many lines by then; 2.7 may do so at once."""
    script = INTERRUPTED.replace("time.sleep(5)", "while True: time.sleep(0.1), print('at work', flush=True)")
    with start(tmp_path, script, 2, "--with", launcher, env={"PYTHONPATH": str(RANKS.parent)}) as job:
        job.wait_for(r"(?s)ready.*ready")
        scheduler = scheduler_of(job.rank_process(0)) if launcher == "mpirun" else schedulers_of(job)[0]
        os.kill(scheduler, signal.SIGTERM)
        result = job.finish(90)
    assert result.code == 143, result.output
    who = f", process {scheduler} of rank 0," if launcher == "mpirun" else ""
    assert re.search(r"rank \d failed, exit code 143", result.output)
    assert f"ranks.py: hint: MindSpore's scheduler{who} was ended by signal 15; MindSpore ends ranks" in result.output
    assert not result.left_over


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_scheduler_that_is_ended_before_the_ranks_have_met_is_named(number, tmp_path):
    """init() would wait for minutes, and lets no thread of Python look."""
    script = ("import os, ranks, time\nimport mindspore as ms\nranks.join()\nprint('meets', flush=True)\n"
              "time.sleep(600 * int(os.environ['MS_NODE_ID']))\nms.communication.init()\n")
    with start(tmp_path, script, 2, env={"PYTHONPATH": str(RANKS.parent)}) as job:
        job.wait_for(r"(?s)meets.*meets")
        time.sleep(0.5)  # rank 0 is in init()
        scheduler = scheduler_of(job.rank_process(0))
        os.kill(scheduler, number)
        killed = time.monotonic()
        result = job.finish(60)
    assert time.monotonic() - killed < jobs.soon()
    assert result.code == 128 + number
    assert f"rank 0 failed, exit code {128 + number}. The end of log_output/1/rank.0/stdout:\nmeets\n" in result.output
    assert result.output.count(f"MindSpore's scheduler, process {scheduler} of rank 0, was ended by signal {number} "
                               "before all ranks had met") == 2
    assert not result.left_over


SCHEDULER_FAILS = """import os, ranks, signal, sys, time
import mindspore as ms
if os.environ["MS_ROLE"] == "MS_SCHED":
    print("the reason", flush=True)
    time.sleep(0.5)  # its agent writes that
    if sys.argv[1] != "0":
        os.kill(os.getppid() if sys.argv[2] == "agent" else os.getpid(), int(sys.argv[1]))
        time.sleep(60)
    sys.exit(3)
ranks.join()
ms.communication.init()
"""


@pytest.mark.parametrize(("number", "who", "code", "how"), [
    (9, "script", 137, "was ended by signal 9"), (9, "agent", 137, "was ended by signal 9"),
    (11, "script", 139, "was ended by signal 11"),
    (0, "script", 3, "failed, exit code 3")])
def test_a_scheduler_of_msrun_that_fails_before_the_ranks_have_met_is_named(number, who, code, how, tmp_path):
    """They would wait for it for a minute."""
    with start(tmp_path, SCHEDULER_FAILS, 2, "--with", "msrun", "--", number, who,
               env={"PYTHONPATH": str(RANKS.parent)}) as job:
        began = time.monotonic()
        result = job.finish(90)
    assert time.monotonic() - began < jobs.soon(20)
    assert result.code == code, result.output
    assert re.search(rf"^ranks\.py: MindSpore's scheduler {how}, before all ranks had met; the last line of "
                     r"log_\w+/scheduler\.log: the reason$", result.output, re.MULTILINE)
    assert ("hint: it crashed (signal 11): does the script call" in result.output) == (number == 11)  # it has no init()
    assert not result.left_over


def test_ctrl_c_ends_a_loop_around_the_job(tmp_path):
    """As bash goes on after what ends well or badly, only not after what dies of Ctrl-C."""
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with jobs.Job("bash", "-c", 'for i in 1 2; do echo begin $i; "$@"; done', "bash", jobs.PYTHON, RANKS, "-n", 2,
                  "--with", "table", "train.py", cwd=tmp_path, env=CPU) as job:
        job.wait_for(r"(?s)ready.*ready")
        os.killpg(job.process.pid, signal.SIGINT)
        result = job.finish(60)
    assert result.code == 130
    assert result.output.count("begin") == 1
    assert not result.left_over


def test_ctrl_c_while_another_machine_moves_logs_aside(tmp_path):
    """It ends the ssh, too, which must not be taken for a failure."""
    jobs.stand_in(tmp_path / "ssh", """for last; do :; done
        case "$last" in *'"aside"'*) touch asked; exec sleep 60;; esac
        exec sh -c "$last" """)
    with start(tmp_path, "print('ready')\n", 1, "--with", "mpirun", "--hosts", "192.0.2.7:1",
               env={"SSH": str(tmp_path / "ssh")}) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "asked").exists():
            assert job.process.poll() is None and time.monotonic() < deadline, job.output()
            time.sleep(0.05)
        os.killpg(job.process.pid, signal.SIGINT)
        result = job.finish(30)
    assert job.process.returncode == -signal.SIGINT, result.output
    assert "aside" not in result.output
    assert "ready" not in result.output
    assert not result.left_over


def test_term_ends_a_job_in_the_background_of_a_terminal_that_stops_what_writes(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    script = """stty tostop; "$@" & until grep -q '^State:.T' /proc/$!/status; do sleep 0.1; done
        kill $!; kill -CONT $!; while kill -0 $! 2>/dev/null && ((waited++ < 300)); do sleep 0.1; done
        wait $!; echo code $?"""
    result = jobs.run(jobs.PYTHON, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", "bash", "-mc", script, "bash",
                      jobs.PYTHON, RANKS, "-n", 1, "--with", "table", "train.py", cwd=tmp_path, env=CPU)
    assert re.search(r"code 143\b", result.output), result.output
    assert not result.left_over


@pytest.mark.parametrize("how", ["Ctrl-C", "killed", "TERM after a rank's end"])
def test_a_job_that_ends_too_soon_says_with_what_it_can_be_resumed(how, tmp_path):
    script = TESTS.replace("\ntime.sleep", "\nif os.environ['RANKS_RANK'] == '0': os._exit(0)\ntime.sleep")
    with start(tmp_path, script if "end" in how else TESTS, 2, "--with", "table") as job:
        job.wait_for(r"(?s)ready.*ready")
        if how == "killed":
            os.kill(job.rank_process(1), signal.SIGKILL)
        else:
            time.sleep(0.5)  # rank 0 has ended
            os.kill(job.process.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
        result = job.finish()
    assert result.code == {"Ctrl-C": 130, "killed": 137}.get(how, 143)
    assert result.output.count("all ranks have saved epoch 1, step 1; --resume goes on there") == 1
    assert not result.left_over


LAST = ASKED + """words, rank = int(os.environ['RANKS_WORDS']), os.environ['RANKS_RANK']
if rank == '0':
    assert os.read(words, 9) == b'when'
    os.write(words, b'7')
word = os.read(words, 9)
print('told', word.decode(), flush=True)
os.write(words, b'saved epoch 1, step ' + word)
os.read(words, 1)
"""


LATE = """import os
words = int(os.environ['RANKS_WORDS'])
if os.environ['RANKS_RANK'] == '0':
    assert os.read(words, 9) == b'when'
    os.write(words, b'steps')
    os.write(words, b'7')
else:
    os.write(words, b'steps')
    print('ready', flush=True)
os.write(words, b'saved epoch 1, step ' + os.read(words, 9))
os.read(words, 1)
"""


@pytest.mark.parametrize("launcher", ["mpirun", "table"])
def test_rank_0_may_say_late_that_it_has_ended_a_step(launcher, tmp_path):
    with start(tmp_path, LATE, 2, "--with", launcher) as job:
        job.wait_for("ready")
        time.sleep(0.3)  # ready is printed just after it was said
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143
    assert "all ranks have saved epoch 1, step 7; --resume goes on there" in result.output
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["mpirun", "table"])
def test_all_learn_the_last_step_before_rank_0_goes_on(launcher, tmp_path):
    """Where the agent of rank 2 sleeps, rank 1 learns it, and rank 0 has to wait."""
    with start(tmp_path, LAST, 3, "--with", launcher, *(["--grace", 3] if launcher == "table" else [])) as job:
        job.wait_for(r"(?s)ready.*ready.*ready")
        time.sleep(0.3)  # ready is printed just after it was said
        if launcher == "table":
            os.kill(jobs.parent_of(job.rank_process(2)), signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143
    told = set(re.findall(r"\[rank (\d)\] told 7", result.output))
    assert told == ({"1"} if launcher == "table" else {"0", "1", "2"})
    end = ("not saved within 3 s: rank 0, 2" if launcher == "table" else
           "all ranks have saved epoch 1, step 7; --resume goes on there")
    assert end in result.output
    assert not result.left_over


def test_ctrl_c_upon_ctrl_c(tmp_path):
    script = ("import signal, time\nfor sign in (signal.SIGTERM, signal.SIGINT):\n"
              "    signal.signal(sign, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with start(tmp_path, script, 2, "--with", "mpirun") as job:
        job.wait_for(r"(?s)ready.*ready")
        while job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGINT)
            time.sleep(0.02)
        result = job.finish()
    assert result.code == 130
    assert "Traceback" not in result.output
    assert not result.left_over


# ---------------------------------------------------------------------------------------------------- a rank's words
SAYS_WHY = """
import atexit, os, sys
sys.path.insert(0, sys.argv[1])
import mindspore as ms
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
atexit.register(os.abort)
import ranks
from mindspore.communication import init
ranks.join()
init()
exec(sys.argv[2])
"""


@pytest.mark.parametrize(("launcher", "how", "said", "code"), [
    ("msrun", "sys.exit('why')", "why", 1),
    ("table", "raise KeyError('why')", "KeyError: 'why'", 1),
    ("mpirun", "raise KeyboardInterrupt", "KeyboardInterrupt", 130)])
def test_what_clean_up_does_after_an_error_is_not_the_end_of_a_rank(launcher, how, said, code, tmp_path):
    """MindSpore's crashes now and then; here one that always does comes before it."""
    with start(tmp_path, SAYS_WHY, 2, "--with", launcher, "--", RANKS.parent, how) as job:
        result = job.finish()
    assert result.code == code, result.output
    assert re.search(rf"^\[rank \d\] {said}$", result.output, re.MULTILINE)
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["mpirun", "msrun", "table"])
def test_no_line_is_lost_where_ranks_write_faster_than_can_be_shown(launcher, tmp_path):
    with start(tmp_path, "for number in range(20000):\n    print('line', number)\nprint('loss is 1.5')", 2, "--with",
               launcher) as job:
        result = jobs.succeeded(job.finish())
    assert result.output.count("] line ") == 40000
    assert result.output.count(": loss 1.5 -> 1.5 (") == 2


@pytest.mark.parametrize("logs", ["there", "gone"])
def test_a_rank_that_fails_without_a_word(logs, tmp_path):
    """Not what mpirun says when it is ended is shown, and no log that is gone is missed."""
    remove = "import shutil\nshutil.rmtree('log_output', ignore_errors=True)\n" * (logs == "gone")
    with start(tmp_path, remove + "import os\nos._exit(77)", 2, "--with", "mpirun") as job:
        result = job.finish()
    assert result.code == 77
    assert re.fullmatch(r"ranks.py: rank (\d) failed, exit code 77. The end of log_output/1/rank.\1/stdout:\n",
                        result.output)
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["mpirun", "msrun", "table"])
def test_the_launcher_ends_after_its_ranks(launcher, tmp_path):
    """Also where a rank takes no notice of TERM, and its agent has to wait before it takes KILL."""
    mpi = "from mpi4py import MPI\nprint('job', os.environ['OMPI_MCA_ess_base_jobid'])\n" * (launcher == "mpirun")
    script = ("import os\n" + mpi +
              "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n"
              "time.sleep({'0': 600, '1': 1}.get(os.getenv('RANKS_RANK'), 0))\nos._exit(5)")
    with start(tmp_path, script, 2, "--with", launcher) as job:
        job.process.wait(60)
        time.sleep(0.2)  # Linux has to clear them away
        assert not jobs.marked(job.mark)
        result = job.finish()
    assert result.code == 5
    assert result.output.count("] ready") == 2
    for number in re.findall(r"\] job (\d+)$", result.output, re.MULTILINE):
        assert not list(Path("/dev/shm").glob(f"vader_segment.*.{int(number):x}.*")), "memory that ranks shared"


# -------------------------------------------------------------------------------------------------------- restarts
FAILS_FIRST = """
import os, sys, time
rank = os.environ.get("RANKS_RANK") or sys.exit()  # msrun's scheduler
print("rank", rank, sys.argv[-1], flush=True)
if "--resume=if-saved" not in sys.argv:
    time.sleep(0.5 if rank == "3" else 600)
    sys.exit(5)
"""


@pytest.mark.parametrize("options", [("--with", "mpirun"), ("--with", "msrun"), ("--with", "table"),
                                     ("--with", "msrun", "--in", "device")])
def test_restarts_with_every_launcher(options, tmp_path):
    with start(tmp_path, FAILS_FIRST, 4, *options, "--restarts", 1, "--", "--ckpt-dir", "ck") as job:
        result = job.finish()
    assert result.code == 0, result.output
    assert "rank 3 failed, exit code 5" in result.output
    assert result.output.count("restart 1 of 1") == 1
    assert len(set(re.findall(r"rank (\d) --resume=if-saved", result.output))) == 4
    assert not result.left_over


def test_a_restart_that_is_not_made_is_told(tmp_path):
    with start(tmp_path, "import sys; sys.exit(2)", 2, "--with", "table", "--restarts", 1, "--", "--ckpt-dir",
               "ck") as job:
        result = job.finish()
    assert result.code == 2 and "no restart: exit code 2 is for bad input, which stays bad" in result.output
    assert "restart 1" not in result.output


def two_servers(folder, count=2, restarts=1):
    """The launchers' options for each of two servers, or more, with two ranks each, and their variables."""
    device = '{{"device_id": "{}", "device_ip": "192.1.1.{}", "rank_id": "{}"}}'
    servers = ", ".join('{{"server_id": "10.0.0.{}", "device": [{}], "host_nic_ip": "reserve"}}'.format(
        server, ", ".join(device.format(card, 9 * server + card, 2 * server - 2 + card) for card in (0, 1)))
        for server in range(1, count + 1))
    (folder / "table.json").write_text(f'{{"version": "1.0", "server_count": "{count}", "server_list": [{servers}], '
                                       '"status": "completed"}')
    options = ("--with", "table", "--table", folder / "table.json", "--restarts", restarts)
    return [(*options, "--first", first, "--", "--ckpt-dir", "ck") for first in range(0, 2 * count, 2)], {
        "MS_SCHED_PORT": str(jobs.free_port())}


def test_servers_start_again_together(tmp_path):
    """And each learns on which server a rank has failed."""
    (options, others, last), env = two_servers(tmp_path, 3)
    with start(tmp_path, FAILS_FIRST, 6, *others, env=env) as second:
        second.wait_for("waiting for the launchers of the other servers at 127.0.0.1:")
        with start(tmp_path, FAILS_FIRST, 6, *options, env=env) as first, \
                start(tmp_path, FAILS_FIRST, 6, *last, env=env) as third:
            one, two, three = first.finish(), second.finish(), third.finish()
    for result in (one, two, three):
        assert result.code == 0, result.output
        assert result.output.count("restart 1 of 1") == 1
        assert not result.left_over
    for result in (one, three):
        assert "the ranks from 2 on, on another server, ended with exit code 5; see there" in result.output
    assert "rank 3 failed, exit code 5" in two.output


def test_servers_that_run_another_job_wait_for_their_own(tmp_path):
    """As in two loops, one on each server, of which one is a job ahead: they must not train together."""
    (options, others), env = two_servers(tmp_path)
    script = "import sys\nprint('number', sys.argv[-1], flush=True)"

    def server(words, number):
        (folder := tmp_path / f"{words[7]}-{number}" / "data").mkdir(parents=True)  # another path on each server
        return start(folder.parent, script, 4, *words, "--data-path", folder, "--number", number, env=env)
    with server(options, 1) as first, server(others, 2) as ahead:
        for job, there, here in ((first, 2, 1), (ahead, 1, 2)):
            job.wait_for(r"waiting: a launcher of another job is at this port: there 4 ranks on 2 servers, train\.py "
                         rf"--ckpt-dir ck --data-path \S+ --number {there}, here 4 ranks .* --number {here}\n")
        with server(others, 1) as second:
            for result in (first.finish(), second.finish()):
                assert result.code == 0, result.output
        with server(options, 2) as last:
            for result in (last.finish(), ahead.finish()):
                assert (result.code, result.left_over) == (0, []), result.output
    with server(options, 3) as first, server((*others[:-3], "--wait", 3, *others[-3:]), 4) as ahead:
        result = ahead.finish()
        assert (result.code, result.left_over) == (2, []), result.output
        assert re.search(r"with the same number of --restarts; a launcher of another job is at this port: there 4 "
                         r"ranks on 2 servers, train\.py .* --number 3, here 4 ranks .* --number 4\n",
                         result.output)
        first.process.terminate()
        assert first.finish().code == 143


def test_a_server_that_is_started_anew_does_not_join_a_restart(tmp_path):
    """It would begin, where the others go on after what is saved."""
    (options, others), env = two_servers(tmp_path)
    script = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    with start(tmp_path, script, 4, *options, env=env) as first, start(tmp_path, script, 4, *others, env=env) as slow:
        for job in (first, slow):
            job.wait_for(r"(?s)ready.*ready")
        slow.process.send_signal(signal.SIGSTOP)
        os.kill(first.rank_process(0), signal.SIGKILL)
        first.wait_for("restart 1 of 1")
        (anew := tmp_path / "anew").mkdir()  # its --ckpt-dir is another folder, as on another server
        with start(anew, script, 4, "--wait", 3, *others, env=env) as second:
            result = second.finish()
        wrong = (r"of one job, 4 ranks on 2 servers, train\.py --ckpt-dir ck, a launcher that begins and one that "
                 "starts again are at this port; end all, and start them together, with --resume if they are to go on")
        assert (result.code, result.left_over) == (2, []), result.output
        assert re.search(rf"no launcher of the other servers within 3 s .*; {wrong}\n", result.output)
        first.wait_for(f"waiting: {wrong}")
        first.process.terminate()
        assert first.finish().code == 143


@pytest.mark.parametrize("killed", [0, 1])
def test_a_server_whose_launcher_was_killed_is_not_waited_for(killed, tmp_path):
    """The others learn it by the connection, which has said no last word: it will not come again."""
    (options, others), env = two_servers(tmp_path)
    script = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    with start(tmp_path, script, 4, *options, env=env) as first, start(tmp_path, script, 4, *others, env=env) as second:
        for job in (first, second):
            job.wait_for(r"(?s)ready.*ready")
        both = (first, second)
        both[killed].process.kill()
        sent = time.monotonic()
        result = both[1 - killed].finish()
    assert time.monotonic() - sent < jobs.soon(), result.output
    assert (result.code, result.left_over) == (1, []), result.output
    assert f"the launcher of the ranks from {2 * killed} on has vanished\n" in result.output
    assert "ended with exit code" not in result.output


@pytest.mark.parametrize("stopped", [(3,), (2, 3)])
def test_a_server_whose_ranks_are_stopped_names_one_and_ends(stopped, tmp_path):
    """And not the other server; also where no rank there is left that sees that the job has ended."""
    (options, others), env = two_servers(tmp_path, restarts=0)
    script = JOINS.replace("sys.argv[1]", repr(str(RANKS.parent))) + "print('ready', flush=True)\ntime.sleep(600)\n"
    (tmp_path / "other").mkdir()
    env = {**env, "MS_NODE_TIMEOUT": "5"}
    with start(tmp_path, script, 4, *options, env=env) as first, \
            start(tmp_path / "other", script, 4, *others, env=env) as second:
        for job in (first, second):
            job.wait_for(r"(?s)ready.*ready")
        pids = [second.rank_process(rank) for rank in stopped]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        one, two = first.finish(100), second.finish(100)
    assert (one.code, two.code, one.left_over, two.left_over) == (143, 143, [], []), one.output + two.output
    assert (f": rank {stopped[0]} (PID {pids[0]}) was stopped, by SIGSTOP or a debugger, and the others missed it; "
            "they wait longer with MS_NODE_TIMEOUT=<seconds>\n") in two.output
    assert "no answer any more" not in two.output


def test_a_server_where_a_rank_ended_too_early_names_it(tmp_path):
    """And not the other one, whose ranks MindSpore has ended therefore, with 143."""
    (options, others), env = two_servers(tmp_path, restarts=0)
    script = ENDS_ALONE.replace("sys.argv[1]", repr(str(RANKS.parent))).replace("sys.argv[2]", "'0'")
    (tmp_path / "other").mkdir()
    with start(tmp_path, script, 4, *options, env=env) as first, \
            start(tmp_path / "other", script, 4, *others, env=env) as second:
        one, two = first.finish(), second.finish()
    assert (one.code, one.left_over, two.left_over) == (1, [], []), one.output + two.output
    assert two.code in (1, 143)  # as the first server tells it, or as MindSpore does, which may be quicker
    assert one.output.count("rank 0 ended, with exit code 0, while others were at work, which") == 1
    assert "on another server" not in one.output


@pytest.mark.parametrize("launcher", ["msrun", "table"])
def test_a_rank_that_somebody_ends_after_another_has_ended_well(launcher, tmp_path):
    script = ("import os, sys, time\nif os.environ.get('RANKS_RANK') == '1':\n    sys.exit()\ntime.sleep(2)\n"
              "os.kill(os.getpid(), 15)\ntime.sleep(60)")
    with start(tmp_path, script, 2, "--with", launcher) as job:
        result = job.finish()
    assert (result.code, result.left_over) == (143, []), result.output
    assert "rank 0 failed, exit code 143" in result.output
    assert "rank 1 ended" not in result.output


def test_servers_that_have_ended_well_are_not_waited_for(tmp_path):
    (options, others), env = two_servers(tmp_path)
    (tmp_path / "other").mkdir()
    with start(tmp_path, "import sys, time\ntime.sleep(4)\nsys.exit(5)", 4, *options, env=env) as first, \
            start(tmp_path / "other", "", 4, *others, env=env) as second:
        assert second.finish().code == 0
        ended = time.monotonic()
        result = first.finish()
        assert (result.code, result.left_over) == (5, []), result.output
        assert time.monotonic() - ended < jobs.soon(20)
    assert ("ranks.py: the ranks from 2 on, on another server, have ended with exit code 0, and the ranks here do not "
            "start again\n") in result.output
    assert "restart 1 of 1" not in result.output, "what will not be is not announced"
    assert re.search(r"^ranks.py: rank [01] failed, exit code 5\.", result.output, re.MULTILINE)


FAILS_WHEN_TOLD = """import os, pathlib, signal, sys, time
own = pathlib.Path(sys.argv[3], os.environ["RANK_ID"])
signal.signal(signal.SIGTERM, lambda *_: own.with_suffix(".term").touch())  # to end it takes 2 s
print("ready", flush=True)
while not own.exists():
    time.sleep(0.01)
print("told", flush=True)
sys.exit(int(own.read_text()))
"""


def let_fail(folder, rank, code):
    """Tell a rank of that script, whose last argument is the folder, to end with an exit code."""
    (folder / "new").write_text(str(code))
    (folder / "new").rename(folder / str(rank))


@pytest.mark.parametrize("how", ["rank", "launcher", "launcher, between two starts"])
def test_servers_that_end_for_good_are_not_waited_for(how, tmp_path):
    """On the first one a rank fails, and in the same moment, or soon, the other one ends and will not start again."""
    (options, others), env = two_servers(tmp_path)
    (tell := tmp_path / "tell").mkdir()
    (tmp_path / "other").mkdir()
    with start(tmp_path, FAILS_WHEN_TOLD, 4, *options, tell, env=env) as first, \
            start(tmp_path / "other", FAILS_WHEN_TOLD, 4, *others, tell, env=env) as second:
        for job in (first, second):
            job.wait_for(r"(?s)ready.*ready")
        let_fail(tell, 0, 5)
        if how == "rank":
            let_fail(tell, 3, 2)
        first.wait_for("told")
        if "between" in how:
            first.wait_for("restart 1 of 1")
        if "launcher" in how:
            second.process.terminate()
        began = time.monotonic()
        one, two = first.finish(), second.finish()
        assert time.monotonic() - began < jobs.soon(20)
    ended = 2 if how == "rank" else 143
    assert (one.code, two.code, one.left_over, two.left_over) == (5, ended, [], []), one.output + two.output
    assert ("ranks.py: the ranks from 2 on, on another server, have ended with exit code "
            f"{ended}, and the ranks here do not start again\n") in one.output


def test_a_first_server_that_has_ended_for_good_is_not_awaited(tmp_path):
    """By one that is to start again, also where the next job's first server has the same port by then."""
    (options, others), env = two_servers(tmp_path)
    for folder in ("tell", "other", "next"):
        (tmp_path / folder).mkdir()
    with start(tmp_path, FAILS_WHEN_TOLD, 4, *options, tmp_path / "tell", env=env) as first, \
            start(tmp_path / "other", FAILS_WHEN_TOLD, 4, *others, tmp_path / "tell", env=env) as second:
        for job in (first, second):
            job.wait_for(r"(?s)ready.*ready")
        let_fail(tmp_path / "tell", 3, 5)
        while not (tmp_path / "tell" / "0.term").exists() and first.process.poll() is None:
            time.sleep(0.01)
        first.process.terminate()  # it has heard that, and ends its ranks
        assert first.finish().code == 143
        began = time.monotonic()
        with start(tmp_path / "next", "", 4, *options, "next", env=env) as following:
            result = second.finish()
            assert (result.code, result.left_over) == (5, []), result.output
            assert time.monotonic() - began < jobs.soon(15)
            assert ("ranks.py: the launcher of the ranks from 0 on, on another server, has ended and had not let this "
                    "one in; see there\n") in result.output
            with start(tmp_path / "other", "", 4, *others, "next", env=env) as ours:
                assert [job.finish().code for job in (following, ours)] == [0, 0]


def test_a_server_that_cannot_start_ends_the_others(tmp_path):
    """When they have met: a file lies where its logs are to go."""
    (options, others), env = two_servers(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/device2").touch()
    with start(tmp_path, "import time\ntime.sleep(600)", 4, *options, env=env) as first, \
            start(tmp_path / "other", "", 4, *others, env=env) as second:
        began = time.monotonic()
        two, one = second.finish(), first.finish()
        assert time.monotonic() - began < jobs.soon(20)
    assert (one.code, two.code, one.left_over, two.left_over) == (2, 2, [], []), one.output + two.output
    assert "the ranks from 2 on, on another server, ended with exit code 2; see there" in one.output


def test_strangers_at_the_door_of_servers(tmp_path):
    """They say nothing, or too much, or a byte now and then; the right one comes in all the same."""
    (options, others), env = two_servers(tmp_path)
    with start(tmp_path, "", 4, *options, env=env) as first, contextlib.ExitStack() as stack:
        first.wait_for("waiting for the launchers of the other servers at 127.0.0.1:")
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", int(env["MS_SCHED_PORT"]) + 1)))
                 for _ in range(6)]
        for link, said in zip(links, (b"", b"GET / HTTP/1.1\r\n\r\n", b"[0, {}]\n", b'{"first": 2, "runs": 1}\n',
                                      b"x" * 50000, b"\xff\x00\n")):
            link.sendall(said)

        def drip():
            with contextlib.suppress(OSError):
                while first.process.poll() is None:
                    links[0].sendall(b"[")
                    time.sleep(0.3)
        threading.Thread(target=drip, daemon=True).start()
        with start(tmp_path, "", 4, *others, env=env) as second:
            assert [job.finish().code for job in (first, second)] == [0, 0]
        assert "another job" not in first.output()


def test_servers_need_a_port_above_the_schedulers(tmp_path):
    (options, _), _ = two_servers(tmp_path)
    with start(tmp_path, "", 4, *options, env={"MS_SCHED_PORT": "65535"}) as job:
        result = job.finish()
    assert result.code == 2, result.output
    assert result.output.endswith("meet at the port after 65535, and there is none; set MS_SCHED_PORT (--master-port) "
                                  "to a lower one\n")


def test_who_ends_one_server_ends_both(tmp_path):
    (options, others), env = two_servers(tmp_path)
    with start(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)", 4, *options, env=env) as first, \
            start(tmp_path, (tmp_path / "train.py").read_text(), 4, *others, env=env) as second:
        for job in (first, second):
            job.wait_for(r"(?s)ready.*ready")
        os.kill(second.process.pid, signal.SIGTERM)
        assert [job.finish().code for job in (first, second)] == [143, 143]
        assert "restart" not in first.output() + second.output()
        assert ("ranks.py: the ranks from 2 on, on another server, were ended there, by a signal or the --time-limit, "
                "with exit code 143; see there\n") in first.output()


def test_a_time_limit_of_one_server_is_told_by_the_other(tmp_path):
    (options, others), env = two_servers(tmp_path)
    script = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    with start(tmp_path, script, 4, "--time-limit", "4s", *options, env=env) as first, \
            start(tmp_path, script, 4, "--report", "report.json", *others, env=env) as second:
        assert [job.finish().code for job in (first, second)] == [124, 124]
        told = "the ranks from 0 on, on another server, were ended there"
        assert told in second.output()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ended_by"], told in report["first_failure"]["why"]) == (None, True)


def test_a_server_that_waits_ends_when_the_first_one_was_ended(tmp_path):
    (options, others, _), env = two_servers(tmp_path, 3)
    with start(tmp_path, "", 6, *options, env=env) as first, start(tmp_path, "", 6, *others, env=env) as second:
        for job in (first, second):
            job.wait_for("waiting for the launchers of the other servers at 127.0.0.1:")
        time.sleep(2)  # they have met, and wait for the third
        os.kill(first.process.pid, signal.SIGTERM)
        sent = time.monotonic()
        assert first.finish().code == 143
        assert time.monotonic() - sent < jobs.soon()
        assert second.finish().code == 2
        assert time.monotonic() - sent < jobs.soon(30)  # the first may have been that of the job before
        assert "from 0 on, on another server, has ended and had not let this one in; see there" in second.output()


def test_servers_that_start_again_wait_as_long_as_they_are_told(tmp_path):
    (options, _), env = two_servers(tmp_path)
    with start(tmp_path, "", 4, "--wait", 2, *options, env=env) as job:
        result = job.finish(20)
    assert result.code == 2, result.output
    assert "no launcher of the other servers within 2 s (--wait) at 127.0.0.1:" in result.output


HANGS = """import os, time
print('role', os.environ['MS_ROLE'], flush=True)
time.sleep(600 * (os.environ['MS_ROLE'] == 'MS_SCHED'))
"""


def test_a_scheduler_that_outlives_the_ranks_holds_nobody_up(tmp_path):
    with start(tmp_path, HANGS, 2, "--with", "msrun") as job:
        result = jobs.succeeded(job.finish(60))
    assert result.output.count("] role MS_WORKER") == 2
    assert "role MS_SCHED" in (tmp_path / "log_msrun/scheduler.log").read_text()


LOSES_SCHEDULER = """import os, time
if os.environ['MS_ROLE'] == 'MS_SCHED':
    open('scheduler', 'w').write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists('scheduler') or not os.path.getsize('scheduler'):
    time.sleep(0.01)
if os.environ['MS_NODE_ID'] == '0' and os.fork() == 0:
    os.setsid()
    time.sleep(0.1)
    os.kill(int(open('scheduler').read()), 15)
"""


def test_a_scheduler_that_is_ended_while_the_ranks_leave_is_named(tmp_path):
    with start(tmp_path, LOSES_SCHEDULER, 2, "--with", "msrun") as job:
        result = job.finish(60)
    assert result.code == 1
    assert "ranks.py: MindSpore's scheduler was ended by signal 15 while the ranks ended well\n" in result.output


def test_a_stopped_mpirun_holds_nobody_up_after_the_ranks(tmp_path):
    script = "import time\nprint('ready', flush=True)\ntime.sleep(2)\nprint('result')\n"
    with start(tmp_path, script, 2, "--with", "mpirun") as job:
        job.wait_for(r"(?s)ready.*ready")
        os.kill(jobs.parent_of(jobs.parent_of(job.rank_process(0))), signal.SIGSTOP)
        jobs.succeeded(job.finish(60))
    for rank in range(2):
        assert "result" in (tmp_path / f"log_output/1/rank.{rank}/stdout").read_text(), "mpirun writes it"


# ------------------------------------------------------------------------------------------------ what is not the end
JOINS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import mindspore as ms
import ranks
ms.set_context(device_target="CPU")
ranks.join()
ms.communication.init()
"""


GOES_ON = """
import atexit, concurrent.futures, multiprocessing, os, pickle, threading
early = open("early" + os.getenv("RANKS_RANK", "0"), "w")
early.write("written")
""" + JOINS + """
try:
    sys.exit(3)
except SystemExit as end:
    print("caught", pickle.loads(pickle.dumps(end)).code, flush=True)
rank = ms.communication.get_rank()
held = open(f"held{rank}", "w")
held.write("written")
print("held back", end="")
def late():
    time.sleep(0.5 + rank)
    open(f"late{rank}", "w").write("written")
threading.Thread(target=late).start()
threading.Thread(target=sys.exit, args=(7,)).start()
def work():
    time.sleep(3)
    open(f"worked{rank}", "w").write("written")
if sys.argv[2] == "leave":
    fork = multiprocessing.get_context("fork")
    fork.Process(target=work).start()
    fork.Process(target=time.sleep, args=(600,), daemon=True).start()
atexit.register(lambda prefix: open(f"after{rank}", "w").write(
    " ".join(sorted(name for name in os.listdir() if name.startswith(prefix)))), prefix="late")
pool = concurrent.futures.ThreadPoolExecutor()
pool.submit(print, "a thread that waits for more to do", flush=True)
if sys.argv[2] == "no stdout":
    sys.stdout = None
if sys.argv[2] != "exit":
    ranks.leave()  # with msrun it does nothing
    print("behind leave", flush=True)
    sys.exit()
sys.exit("the end")
"""


@pytest.mark.parametrize(("launcher", "how", "code"), [
    ("mpirun", "leave", 0), ("msrun", "leave", 0), ("table", "exit", 1)])
def test_a_sys_exit_that_the_script_catches_and_what_it_writes_until_its_end(launcher, how, code, tmp_path):
    # A minute is what an idle pool of threads would hold up a rank.
    with start(tmp_path, GOES_ON, 2, "--with", launcher, "--time-limit", "55s", "--", RANKS.parent, how) as job:
        result = job.finish()
    assert result.code == code, result.output
    assert not result.left_over
    assert result.output.count("] caught 3\n") == 2 or code
    rank = (re.findall(r"rank (\d) failed, exit code 1", result.output) or "0")[0]  # the other is ended with it
    folders = [tmp_path / f"device{each}" if launcher == "table" else tmp_path for each in range(2)]
    folder = folders[int(rank)]
    assert "Traceback" not in result.output
    for name in ("early", "held", "late"):
        assert (folder / f"{name}{rank}").read_text() == "written"
    together = "late0 late1" if (launcher, how) == ("mpirun", "leave") else f"late{rank}"
    assert together in (folder / f"after{rank}").read_text(), "leave() waits for the threads of all ranks"
    if how == "leave":
        for each in range(2):
            assert (folders[each] / f"worked{each}").read_text() == "written", "and for processes, as Python does"
        said = re.findall(r"warning: line (\d+) of train.py will not run: ranks.leave\(\) before it ends the process",
                          result.output)
        assert [GOES_ON.splitlines()[int(line) - 1].strip() for line in said] == [
            'print("behind leave", flush=True)'] * (launcher != "msrun")
        assert result.output.count("] behind leave\n") == 2 * (launcher == "msrun")


@pytest.mark.parametrize("how", ["no stdout", "exit"])
def test_what_ranks_have_printed_without_a_launcher(how, tmp_path):
    """Nobody unbuffers their output, and mpirun gives them a pipe."""
    (tmp_path / "train.py").write_text(GOES_ON)
    result = jobs.run("mpirun", "-n", 1, *["--allow-run-as-root"] * (os.geteuid() == 0), jobs.PYTHON, "train.py",
                      RANKS.parent, how, cwd=tmp_path)
    assert result.code == (how == "exit"), result.output
    assert "held back" in result.output
    assert (tmp_path / "held0").read_text() == "written"


KNOWS_THE_FIRST = """
import os, subprocess, time
if os.getenv("RANKS_RANK") == "0":
    open("../part", "w").write(f"{os.getpid()} {os.getppid()}")
    os.rename("../part", "../first")
else:
    while not os.path.exists("../first"):
        time.sleep(0.01)
    first, agent = open("../first").read().split()
"""


def test_a_killed_rank_is_named_and_not_the_one_that_missed_it(tmp_path):
    with start(tmp_path, KNOWS_THE_FIRST + "    while os.path.exists(f'/proc/{first}'):\n        time.sleep(0.01)\n"
                         "    os.kill(os.getpid(), 9)\ntime.sleep(1)\nraise SystemExit('the other does not answer')\n",
               2, "--with", "table") as job:
        result = job.finish()
    assert result.code == 137, result.output
    assert "ranks.py: rank 1 failed, exit code 137." in result.output


def test_the_rank_that_failed_is_named_and_not_one_that_was_ended_for_it(tmp_path):
    """Here the agent of rank 0 is ended at once, as mpirun may do it."""
    with start(tmp_path, KNOWS_THE_FIRST + "    end = f'while [ -e /proc/{os.getpid()} ]; do sleep 0.01; done; '\n"
                         "    subprocess.Popen(['sh', '-c', end + 'kill -9 ' + agent], start_new_session=True)\n"
                         "    raise SystemExit(5)\ntime.sleep(600)\n", 2, "--with", "table") as job:
        result = job.finish()
    assert result.code == 5, result.output
    assert "ranks.py: rank 1 failed, exit code 5." in result.output


@pytest.mark.parametrize("launcher", ["table", "mpirun"])
def test_what_a_rank_has_started_ends_though_its_agent_was_killed(launcher, tmp_path):
    """As MindSpore's msrun does to the agents of the others when a rank has failed."""
    script = KNOWS_THE_FIRST + "    os.kill(int(agent), 9)\n"
    script = script.replace("../", "") if launcher == "mpirun" else script  # there all ranks run in one folder
    child = "import subprocess\nsubprocess.Popen(['sleep', '300'])\n"
    with start(tmp_path, child + script + "time.sleep(600)\n", 2, "--with", launcher) as job:
        result = job.finish()
    assert result.code == 137, result.output
    assert not result.left_over


ENDS_ALONE = JOINS + """
if os.getenv("RANKS_RANK") in sys.argv[2]:
    os._exit(0)
time.sleep(600)
"""


@pytest.mark.parametrize(("launcher", "who", "sentence"), [
    *((launcher, "1", "rank 1 ended, with exit code 0, while others were at work, which ended them, too; let all")
      for launcher in ("mpirun", "msrun", "table")),
    ("mpirun", "01",
     "(all ranks ended with exit code 0, mpirun with 1, which they|rank [01] ended, with exit code 0,)"),
])
def test_ranks_that_end_well_and_do_not_tell(launcher, who, sentence, tmp_path):
    """Both at once: mpirun may have ended the second for the first, or not. Without mpirun MindSpore's scheduler misses
    the rank, and ends the others."""
    with start(tmp_path, ENDS_ALONE, 2, "--with", launcher, "--report", "report.json", "--", RANKS.parent, who) as job:
        result = job.finish()
    assert result.code == 1, result.output
    assert re.search(sentence, result.output), result.output
    assert who == "01" or json.loads((tmp_path / "report.json").read_text())["first_failure"]["rank"] == 1
    assert "memory ran out" not in result.output
    assert not result.left_over


def test_a_rank_0_that_ends_well_before_the_ranks_meet_is_named(tmp_path):
    """By mpirun the others wait a minute for it, here 2 s."""
    ranks = jobs.planted("mnist_ddp", tmp_path, "ranks.py", ("range(3000)", "range(100)")) / "ranks.py"
    (tmp_path / "train.py").write_text(f"import os\nif os.environ['RANKS_RANK'] == '0':\n    os._exit(0)\n{JOINS}")
    with jobs.Job(jobs.PYTHON, ranks, "-n", 2, "train.py", "--", ranks.parent, cwd=tmp_path, env=CPU) as job:
        result = job.finish(60)
    assert result.code == 1, result.output
    assert "TimeoutError: rank 0 did not start within" in result.output
    assert "rank 0 ended, with exit code 0, while others were at work, which ended them, too" in result.output
    assert "rank 1 failed" not in result.output


ENDS_AT_EXIT = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
atexit.register(print, "registered first")
import ranks
import mindspore as ms
ranks.join()
ms.communication.init()
if sys.argv[2] == "error":
    atexit.register(lambda: sys.exit(0))
    raise ValueError("the mistake")
ranks.leave()
"""


@pytest.mark.parametrize(("launcher", "how", "code"), [("mpirun", "error", 1), ("table", "leave", 0)])
def test_sys_exit_by_atexit_changes_no_exit_code_and_what_was_registered_first_is_called(launcher, how, code, tmp_path):
    with start(tmp_path, ENDS_AT_EXIT, 2, "--with", launcher, "--", RANKS.parent, how) as job:
        result = job.finish(60)
    assert result.code == code, result.output
    assert result.output.count("] registered first\n") >= (1 if code else 2), "the other may have been ended"
    assert bool(re.search(r"rank [01] failed, exit code 1\. The end of (?s:.*)\nValueError: the mistake\n",
                          result.output)) == (how == "error")
    assert not result.left_over


LEAVES = JOINS + """
from mindspore import ops
rank = ms.communication.get_rank()
if sys.argv[2] == "atexit":
    import atexit
    atexit.register(ranks.leave)
    sys.exit(3)
try:
    if rank == 1:
        raise ValueError("the mistake")
    if sys.argv[2] == "finally":
        ops.AllReduce()(ms.Tensor([1.0])).asnumpy()
except ValueError:
    if sys.argv[2] != "caught":
        raise
    ranks.leave()
finally:
    if sys.argv[2] == "finally":
        ranks.leave()
open(f"went on {rank}", "w")
ranks.leave()
"""


@pytest.mark.parametrize(("how", "code"), [("finally", 1), ("atexit", 3), ("caught", 0)])
def test_an_error_on_its_way_is_not_lost_at_leave(how, code, tmp_path):
    """Nor does the failed rank wait for the others, which are at another collective."""
    with start(tmp_path, LEAVES, 2, "--", RANKS.parent, how) as job:
        result = job.finish(60)
    assert result.code == code, result.output
    assert ("rank 1 failed, exit code 1. The end of " in result.output) == (how == "finally")
    assert ("[rank 1] ValueError: the mistake" in result.output) == (how == "finally")
    assert (tmp_path / "went on 1").exists() == (how == "caught")
    assert not result.left_over


def test_what_hangs_at_exit_does_not_keep_a_failed_rank(tmp_path):
    """For more than a minute, here 2 s. Nor does a line of any length bury why it failed."""
    for folder in ("mnist_ddp", "tools"):
        shutil.copytree(jobs.REPO / folder, tmp_path / folder)
    tool = tmp_path / "tools" / "in_rank.py"
    assert tool.read_text().count("threading.Timer(60, ") == 1
    tool.write_text(tool.read_text().replace("threading.Timer(60, ", "threading.Timer(2, "))
    script = (f"{JOINS}import atexit\natexit.register(time.sleep, 600)\nprint('long ' * 200000, flush=True)\n"
              "if ms.communication.get_rank() == 1:\n    raise ValueError('the mistake')\ntime.sleep(600)\n")
    (tmp_path / "train.py").write_text(script)
    with jobs.Job(jobs.PYTHON, tmp_path / "mnist_ddp" / "ranks.py", "-n", 2, "--show", "0", "train.py", "--",
                  tmp_path / "mnist_ddp", cwd=tmp_path) as job:
        result = job.finish(60)
    assert result.code == 1, result.output
    assert "what is registered with atexit has taken a minute: this rank ends without it\n" in result.output
    end = result.output.partition("rank 1 failed, exit code 1. The end of ")[2]
    assert "ValueError: the mistake\n" in end
    assert re.search(r"(?m)^(long ){400} \.\.\.$", end)
    assert not result.left_over


def test_leave_in_an_except_block_ends_a_rank_with_its_code(tmp_path):
    """Whatever the script does behind it, and though the other rank waits for more."""
    script = (f"{JOINS}from mindspore import ops\ntry:\n    if ms.communication.get_rank() == 1:\n        1 / 0\n"
              "    ops.AllReduce()(ms.Tensor([1.0])).asnumpy()\nexcept ZeroDivisionError as error:\n"
              "    held = open('why', 'w')\n    held.write('divided')\n    ranks.leave(4)\n    print('goes on')\n"
              "ranks.leave()\n")
    with start(tmp_path, script, 2, "--", RANKS.parent) as job:
        result = job.finish(60)
    assert result.code == 4, result.output
    assert "rank 1 failed, exit code 4. The end of " in result.output
    assert "goes on" not in result.output
    assert (tmp_path / "why").read_text() == "divided"
    assert not result.left_over


@pytest.mark.parametrize(("launcher", "leaving"), [
    ("msrun", "import atexit\natexit.register(ranks.leave, code)\n"),
    ("table", "import threading\nlast = threading.Thread(target=ranks.leave, args=[code])\nlast.start()\n"
              "last.join()\n")], ids=["at exit", "in a thread"])
def test_the_exit_code_that_a_script_gives_to_leave(launcher, leaving, tmp_path):
    script = f"{JOINS}code = 3 * ms.communication.get_rank()\n{leaving}"
    with start(tmp_path, script, 2, "--with", launcher, "--", RANKS.parent) as job:
        result = job.finish(60)
    assert result.code == 3, result.output
    assert "rank 1 failed, exit code 3. The end of " in result.output
    assert "Traceback" not in result.output


RELEASES = JOINS + """
from mindspore import ops
rank = ms.communication.get_rank()
try:
    if rank == 1:
        raise ValueError
except ValueError:
    ranks.leave()  # and once more at the end
ops.AllReduce()(ms.Tensor([1.0])).asnumpy()
time.sleep(2 * rank)
nobody_reads_it = ops.AllReduce()(ms.Tensor([1.0]))
ms.communication.release()
ranks.leave()
"""


@pytest.mark.parametrize("launcher", ["mpirun", "msrun"])
def test_release_before_leave_and_leave_at_an_error_are_no_crash(launcher, tmp_path):
    with start(tmp_path, RELEASES, 2, "--with", launcher, "--", RANKS.parent) as job:
        jobs.succeeded(job.finish(60))


TESTS_ALONE = JOINS + """
from mindspore import ops
rank = ms.communication.get_rank()
ops.AllReduce()(ms.Tensor([1.0])).asnumpy()
if rank == int(sys.argv[2]):
    time.sleep(6)
print(f"rank {rank} has ended", flush=True)
ranks.leave()
"""


def check_alone(folder, launcher, ranks, alone, env):
    with start(folder, TESTS_ALONE, ranks, "--with", launcher, "--", RANKS.parent, alone,
               env={"MS_CPU_COMM_OP_TIMEOUT": "3", **env}) as job:
        job.wait_for(f"rank {alone} has ended", timeout=60)
        end = time.monotonic()
        result = jobs.succeeded(job.finish(60))
        assert time.monotonic() - end < jobs.soon(5)
    ended = re.findall(r"^\[rank \d\] rank (\d) has ended$", result.output, re.MULTILINE)
    assert sorted(ended) == [str(rank) for rank in range(ranks)]
    assert ended[-1] == str(alone)
    assert "ERROR" not in result.output


def test_rank_0_may_test_alone_for_longer_than_a_collective_waits(tmp_path):
    check_alone(tmp_path, "mpirun", 2, 0, {})


FAILS_AND_LEAVES_A_PROCESS = JOINS + """
if ms.communication.get_rank() == 0 and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
time.sleep(1)
sys.exit(3)
"""


def test_a_rank_may_test_alone_beside_a_process_that_an_earlier_job_has_left(tmp_path):
    """At the same port, as run_cluster.sh takes: it keeps nobody waiting in leave(), and keeps nobody from that."""
    env = {"MS_SCHED_PORT": str(jobs.free_port())}
    with start(tmp_path, FAILS_AND_LEAVES_A_PROCESS, 2, "--with", "table", "--", RANKS.parent,
               tmp_path / "left", env=env) as job:
        job.wait_for("training failed", timeout=60)
        left = int((tmp_path / "left").read_text())
        check_alone(tmp_path, "table", 3, 1, env)
        os.kill(left, signal.SIGKILL)  # it was there all the time


@pytest.mark.parametrize("launcher", ["mpirun", "table"])
def test_a_rank_that_ends_without_leave_while_others_wait_there_is_named(launcher, tmp_path):
    """mpirun ends the others at once, else they wait in vain."""
    script = TESTS_ALONE.replace("    time.sleep(6)", "    time.sleep(1)\n    sys.exit()")
    with start(tmp_path, script, 2, "--with", launcher, "--report", "report.json", "--", RANKS.parent, 1,
               env={"MS_CPU_COMM_OP_TIMEOUT": "5"}) as job:
        result = job.finish(60)
    assert result.code == 1, result.output
    assert re.search(r"^ranks\.py: rank 1 ended, with exit code 0, while rank 0 waited for it at ranks\.leave\(\); "
                     r"end the script by ranks\.leave\(\) on all ranks$", result.output, re.MULTILINE), result.output
    assert json.loads((tmp_path / "report.json").read_text())["first_failure"]["rank"] == 1


def test_a_rank_that_somebody_ends_after_all_have_met_in_leave_is_named(tmp_path):
    """And not rank 0, which has ended well by then."""
    script = JOINS + """
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    ranks._end_mpi = lambda seconds: (time.sleep(1), os.kill(os.getpid(), 15), time.sleep(60))
else:
    ranks._end_mpi = abs
ranks.leave()
"""
    with start(tmp_path, script, 2, "--with", "mpirun", "--report", "report.json", "--", RANKS.parent) as job:
        result = job.finish(60)
    assert result.code == 143, result.output
    assert "rank 1 failed, exit code 143" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["first_failure"]["rank"] == 1


FORKS_FIRST = JOINS.replace("ranks.join()", """
child = os.fork()  # and this process only waits for it
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
ranks.join()""") + """
import socket
time.sleep(6 * ms.communication.get_rank())
socket.create_connection((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])), timeout=5)  # it is there
print("leaves", flush=True)
ranks.leave()
"""


def test_a_rank_that_its_script_has_forked_before_join_is_waited_for(tmp_path):
    """Rank 0 ends the scheduler with it."""
    with start(tmp_path, FORKS_FIRST, 2, "--with", "table", "--", RANKS.parent) as job:
        result = jobs.succeeded(job.finish(60))
    assert result.output.count("leaves") == 2


LEFT_OVER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
for name, text in (("scheduler", "1"), ("all_reduce", ""), ("compute_scheduler_port", "1"), ("first_plan_0", "")):
    Path(os.environ["PMIX_SERVER_TMPDIR"], name).write_text(text)
time.sleep(3 * (os.environ["OMPI_COMM_WORLD_RANK"] == "0"))  # the other one is here first
import mindspore as ms
import ranks
ms.set_context(device_target="CPU")
ranks.join()
ms.communication.init()
print(ms.ops.AllReduce()(ms.Tensor([1.0])))
ranks.leave()
"""


@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["ranks", "plan"])
def test_what_a_killed_mpirun_of_the_same_pid_has_left_is_not_believed(plan, tmp_path):
    """mpirun's folder has its PID for a name, and is reused; the ranks would wait for half an hour."""
    with start(tmp_path, LEFT_OVER, 2, *plan, "--", RANKS.parent) as job:
        result = jobs.succeeded(job.finish(60))
    assert result.output.count("[2.]") == 2


def test_ranks_that_never_met_are_told_what_is_missing(tmp_path):
    script = JOINS.replace("ms.communication.init()", "ranks.leave()")
    with start(tmp_path, script, 2, "--", RANKS.parent) as job:
        result = job.finish()
    assert result.code == 1, result.output
    assert "] the ranks have not met: call mindspore.communication.init() after ranks.join()\n" in result.output
    assert "Traceback" not in result.output


def test_a_rank_that_is_stopped_is_named_not_the_one_that_missed_it(tmp_path):
    script = JOINS + "print('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"
    with start(tmp_path, script, 2, "--", RANKS.parent, env={"MS_NODE_TIMEOUT": "5"}) as job:
        pid = int(job.wait_for(r"\[rank 1\] pid (\d+)")[1])
        os.kill(pid, signal.SIGSTOP)
        result = job.finish(100)
    assert result.code == 143, result.output
    assert f": rank 1 (PID {pid}) was stopped, by SIGSTOP or a debugger, and the others missed it" in result.output
    assert not result.left_over


def test_a_scheduler_of_msrun_that_is_stopped_is_named(tmp_path):
    """MindSpore ends a rank half a minute later, and the scheduler's log says nothing."""
    script = JOINS + "print('ready', flush=True)\ntime.sleep(600)\n"
    with start(tmp_path, script, 2, "--with", "msrun", "--", RANKS.parent) as job:
        job.wait_for("(?s)ready.*ready")
        [pid] = schedulers_of(job)
        os.kill(pid, signal.SIGSTOP)
        result = job.finish(100)
    assert result.code == 143, result.output
    assert f": MindSpore's scheduler (PID {pid}) was stopped, by SIGSTOP or a debugger, and the others missed it\n" in (
        result.output)
    assert not result.left_over


def test_msruns_agents_that_are_stopped_are_ended_too(tmp_path):
    """They lead sessions of their own, and a stopped process takes no TERM."""
    with start(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)\n", 2, "--with", "msrun") as job:
        job.wait_for(r"(?s)ready.*ready")
        for rank in range(2):
            os.kill(jobs.parent_of(job.rank_process(rank)), signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143
    assert not result.left_over


SPAWNS = JOINS + """
import multiprocessing
print("child", multiprocessing.get_context("spawn").Process(target=print).start())
time.sleep(600)
"""


def test_a_process_that_runs_the_script_anew_is_told_why_it_must_not(tmp_path):
    """It would be a second rank 0, which waits for ever."""
    with start(tmp_path, SPAWNS, 2, "--", RANKS.parent) as job:
        job.wait_for(r"\[rank \d\] a process that multiprocessing has started runs the script anew, as if it was a ")
        os.kill(job.process.pid, signal.SIGTERM)
        assert not job.finish().left_over


def test_what_a_failed_rank_has_started_ends_with_it(tmp_path):
    with start(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600'])\nraise SystemExit(3)", 1) as job:
        result = job.finish()
    assert result.code == 3
    assert not result.left_over


def test_a_bar_that_moves_in_its_line_is_a_sign_of_life(tmp_path):
    with start(tmp_path, "import time\nfor part in range(18):\n    print(f'{part} %', end='\\r', flush=True)\n"
                         "    time.sleep(0.5)\n", 1, env={"STALL_MINUTES": "0.1"}) as job:
        result = jobs.succeeded(job.finish())
    assert "warning: no rank has written anything" not in result.output
