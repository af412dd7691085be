"""The options of every launcher, and what it looks at before the start: real mpirun and msrun, small scripts."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import before
import binding
import job_report
import launch as launcher
import options
import progress

LAUNCHERS = [jobs.REPO / name for name in jobs.run(
    "git", "ls-files", "*run*.sh", ":!tests", cwd=jobs.REPO).output.split() if not name.startswith(".ci")]
ENTRY = jobs.REPO / "own_model" / "ranks.py"
CPU = {"DEVICE_TARGET": "CPU"}
HIDDEN = ("--lesson", "--usage", "--plan", "--folder", "--in ")
# A rank without MindSpore: it says who it is, prints losses, and does what its first argument says.
RANK = '''
import os, sys, time
rank = os.getenv("RANKS_RANK")
if rank is None:
    sys.exit()  # msrun's scheduler
open("started", "w").close()
print(f"rank {rank} on cores {sorted(os.sched_getaffinity(0))}", flush=True)
for epoch in range(2):
    for step in range(0, 20, 10):
        print(f"epoch: {epoch}, step: {step}, loss is {2 - epoch - step / 100 + int(rank) / 1000}", flush=True)
        time.sleep(float(os.getenv("PAUSE", "0")))
if "fail" in sys.argv and rank == "1":
    print("ValueError: planted", flush=True)
    sys.exit(7)
if "sleep" in sys.argv or "fail" in sys.argv:
    print("sleeping", flush=True)
    time.sleep(300)
if "--resume=if-saved" not in sys.argv and "fail-once" in sys.argv:
    sys.exit(5)
'''


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return file


def command(script, *given, ranks=2, how="mpirun", then=()):
    return (jobs.PYTHON, ENTRY, "-n", ranks, "--with", how, script, *given, *(("--", *then) if then else ()))


def launch(script, *given, env=None, **others):
    return jobs.run(*command(script, *given, **others), cwd=script.parent, env={**CPU, **(env or {})}, timeout=60)


# ------------------------------------------------------------------------------------------------------------ --help
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda file: str(file.relative_to(jobs.REPO)))
def test_help_explains(launcher, tmp_path):
    assert len(LAUNCHERS) >= 17
    result = jobs.run("bash", launcher, "--help", cwd=tmp_path)
    assert result.code == 0, result.output
    text = result.output
    parts = [text.index(part) for part in (f"usage: bash {launcher.name} ", "Example", "\noptions:\n", "--report",
                                           "\nvariables:\n  DATA_PATH", "\nexit codes:\n  0 ")]
    assert parts == sorted(parts)
    assert re.search(rf"Example.*: bash {launcher.name} ", text)
    assert not [word for word in HIDDEN if re.search(rf"(?<![\w-]){word}", text)]
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("launcher", ["mnist_ddp/run_msrun.sh", "resnet50_ascend/run.sh", "parallel_modes/run.sh"])
def test_help_of_a_lesson_that_was_copied_out(launcher, tmp_path):
    """Without tools/ the comment at the head of the launcher is what there is."""
    lesson = (jobs.REPO / launcher).parent
    shutil.copytree(lesson, tmp_path / lesson.name)
    for given in (("--help",), ("--", "--help")):
        result = jobs.run("bash", tmp_path / launcher, *given, cwd=tmp_path)
        assert result.code == 0, result.output
        assert result.output.startswith("Trains ")
        assert re.search(rf"Example: bash {Path(launcher).name} [^\n]+\n\Z", result.output)


@pytest.mark.parametrize(("launcher", "option"), [
    ("parallel_modes/run.sh", "--search-mode"), ("resnet50_ascend/run_cluster.sh", "--no-sink")])
def test_the_scripts_own_options(launcher, option, tmp_path):
    result = jobs.run("bash", jobs.REPO / launcher, "--", "--help", cwd=tmp_path)
    assert result.code == 0, result.output
    assert option in result.output
    assert "--time-limit" not in result.output


@pytest.mark.parametrize(("given", "sentence"), [
    (("--restart", 3, "--ranks", 2), "unrecognized arguments: --ranks 2"),
    (("--rstarts", 3), "unrecognized arguments: --rstarts 3; did you mean --restarts?"),
    (("--lr", 1), "unrecognized arguments: --lr 1; options of rank.py go after --"),
    (("--time-limit", "soon"), "'soon' is no time; write minutes, such as 90, or 1h30m"),
    (("--time-limit", "0"), "'0' is no time"),
    (("--show", "x"), "'x' names no ranks; write all, first, or ranks such as 0,3"),
    (("--show", "0,2"), "--show names rank 2, but there are ranks 0 to 1"),
    (("--show", "5-3"), "'5-3' ends before it begins; write the lower rank first"),
    (("--memory", "-5"), "--memory takes a number of MB from 1, not -5"),
    (("--background",), "--background needs a launcher that makes a folder for the run; here write nohup"),
    (("--report", "log_output"), "log_output cannot be written: there will be the logs"),
    (("--bind", "core"), "invalid choice: 'core'"),
    (("--restarts", 1), "--restarts takes a whole number, and needs -- --ckpt-dir DIR"),
    (("--grace", "-1"), "--grace takes a number of seconds from 0, not -1.0"),
    (("--grace", "nan"), "--grace takes a number of seconds from 0, not nan"),
    (("--report", "/"), "--report / cannot be written: it is no ordinary file"),
    (("--logs", "a:b"), "--logs a:b: mpirun takes no : in its name; name another folder"),
    (("--", ":"), "mpirun ends a command at an option that is only ':'"),
    (("--report", "."), "it is no ordinary file"),
    (("--report", "/dev/stdout"), "it is no ordinary file"),
    (("--report", "rank.py"), "rank.py cannot be written: it is there, and holds other things than a report; name"),
    (("--logs", "."), "--logs . names the folder that you are in, or one above it, which would be moved"),
    (("--logs", "/proc/self/cwd"), "--logs /proc/self/cwd names the folder that you are in"),
    (("--table", "none.json"), "--table and --first are for --with table, not for mpirun; leave them out"),
    (("--report", ""), "--report: is empty; name a file or folder, or leave it out"),
    (("--logs=",), "--logs: is empty; name a file or folder, or leave it out"),
    (("--", "--ckpt-dir", ""), "--ckpt-dir is empty; name a folder, or leave it out (is a variable not set?)"),
    (("--", "--ckpt-dir="), "--ckpt-dir is empty; name a folder, or leave it out (is a variable not set?)"),
    (("--report", "nowhere/report.json"), "nowhere/report.json cannot be written: No such file or directory; name"),
])
def test_bad_options_are_one_line_before_the_start(given, sentence, script):
    result = launch(script, *given)
    assert result.code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1, result.output
    assert [file.name for file in script.parent.iterdir()] == ["rank.py"]


def test_logs_of_a_job_that_another_machine_has_started_are_moved_aside(script):
    """Only there lies mpirun's own log."""
    (script.parent / "mine" / "1" / "rank.1").mkdir(parents=True)
    done = jobs.succeeded(launch(script, "--logs", "mine"))
    aside, = script.parent.glob("mine.*")
    assert (aside / "1" / "rank.1").is_dir()
    assert f"the earlier mine is now {aside.name}" in done.output


def test_a_home_behind_an_equals_sign_is_the_home(script):
    """In -- ~/x bash itself writes the home, in --name=~/x it does not."""
    (script.parent / "home").mkdir()
    expected = [f"--ckpt-dir={script.parent}/home/ck", "a=~/b"]
    script.write_text(f"import sys\nprint(sys.argv[1:] == {expected})\n")
    result = jobs.succeeded(jobs.run(*command(script, "--report=~/report.json", then=("--ckpt-dir=~/ck", "a=~/b")),
                                     cwd=script.parent, env={**CPU, "HOME": str(script.parent / "home")}))
    assert result.output.count("True") == 2
    assert (script.parent / "home" / "report.json").is_file()
    assert not (script.parent / "~").exists()


def test_a_second_start_leaves_a_job_in_the_background_alone(script):
    log, inside = script.parent / "device" / "train.log", ("--in", "device")
    with jobs.Job(*command(script, *inside, "--background", then=("sleep",)), cwd=script.parent, env=CPU) as job:
        deadline = time.monotonic() + 30 * jobs.PATIENCE
        while not log.is_file() or log.read_text().count("sleeping") < 2:
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.1)
        second = launch(script, *inside)
        assert (second.code, second.output) == (2, "ranks.py: device is the folder of a job that runs on this machine; "
                                                   "wait for its end, or start in another folder\n")
        assert (script.parent / "device" / "train.pid").is_file()
    jobs.succeeded(launch(script, *inside))


def test_the_script_must_be_named(tmp_path):
    result = jobs.run(jobs.PYTHON, ENTRY, "-n", 2, cwd=tmp_path)
    assert result.code == 2
    assert result.output == "ranks.py: name the script of the ranks: python ranks.py -n 2 train.py\n"


def test_an_error_of_the_scripts_check_comes_without_its_usage(script):
    script.write_text("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--check')\n"
                      "parser.add_argument('--epochs', type=int)\nparser.parse_args()\n")
    result = launch(script, "--check", then=("--epochs", "x"))
    assert result.code == 2
    assert result.output == "rank.py: error: argument --epochs: invalid int value: 'x'\n"


@pytest.mark.parametrize(("text", "seconds"), [
    ("90", 5400), ("1.5", 90), ("1h30m", 5400), ("45s", 45), ("2d", 172800), ("1m30s", 90)])
def test_times(text, seconds):
    assert options.duration(text) == seconds


# ----------------------------------------------------------------------------------- how long, what is shown, a report
def report_of(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("how", ["mpirun", "msrun", "table"])
def test_time_limit_timestamps_shown_ranks_own_cores_and_the_report(how, script):
    result = launch(script, "--time-limit", "12s" if how == "msrun" else "6s", "--timestamps", "--show", "1", "--bind",
                    "cores", "--report", "report.json", how=how, then=("sleep",))
    assert result.code == 124, result.output
    assert re.search(r"^ranks.py: ended after \d+ s, the --time-limit; exit code 124$", result.output, re.MULTILINE)
    assert not result.left_over
    shown = re.findall(r"^\d\d:\d\d:\d\d \[rank (\d)\] rank (\d) on cores \[([\d, ]*)\]$", result.output, re.MULTILINE)
    cores = sorted(os.sched_getaffinity(0))
    share = cores[len(cores) // 2:len(cores) // 2 * 2] if len(cores) > 1 else cores
    assert shown == [("1", "1", ", ".join(map(str, share)))]
    assert "[rank 0]" not in result.output
    report = report_of(script.parent)
    assert (report["exit_code"], report["ended_by"], report["restarts"]) == (124, "time limit", 0)
    assert (report["launcher"], report["target"], report["world_size"]) == (how, "CPU", 2)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert [(rank["first_loss"], rank["last_loss"], rank["lines"]) for rank in report["ranks"]] == [
        (2.0, 0.9, 6), (2.001, 0.901, 6)]
    assert "sleeping" in Path(report["ranks"][0]["log"]).read_text()
    assert 5 < report["seconds"] < 12 + jobs.soon()


def test_the_report_of_a_success_and_of_a_failure(script):
    result = jobs.succeeded(launch(script, "--report", "report.json"))
    report = report_of(script.parent)
    assert (report["exit_code"], report["ended_by"], report["first_failure"]) == (0, None, None)
    assert report["last_loss"] == 0.9
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 0]
    assert report["versions"]["mindspore"].startswith("2.")
    assert report["versions"]["mpirun"].startswith("4.")
    assert "ranks.py: " not in result.output
    again = jobs.run(*report["command"], cwd=report["folder"], env=CPU)
    assert again.code == 0, "its command does the same again"
    result = launch(script, "--report", "report.json", then=("fail",))
    report = report_of(script.parent)
    assert result.code == report["exit_code"] == 7
    assert {**report["first_failure"], "host": "?"} == {"rank": 1, "host": "?", "exit_code": 7, "why": None}
    assert {rank["rank"]: rank["exit_code"] for rank in report["ranks"]}[1] == 7


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM")])
def test_the_report_of_a_job_that_a_signal_ended(number, code, name, script):
    with jobs.Job(*command(script, "--report", "report.json", then=("sleep",)), cwd=script.parent, env=CPU) as job:
        job.wait_for(r"\[rank 1\] sleeping")
        os.kill(job.process.pid, number)
        result = job.finish()
    assert result.code == code, result.output
    assert not result.left_over
    assert (report_of(script.parent)["exit_code"], report_of(script.parent)["ended_by"]) == (code, name)


def test_a_signal_before_the_ranks_is_in_the_report(script):
    script.write_text("import time\nopen('checking', 'w').close()\ntime.sleep(300)\n")
    with jobs.Job(*command(script, "--check", "--report", "report.json"), cwd=script.parent, env=CPU) as job:
        deadline = time.monotonic() + 60
        while not (script.parent / "checking").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 143, result.output
    assert not result.left_over
    assert report_of(script.parent)["ended_by"] == "SIGTERM"
    assert report_of(script.parent)["ranks"] == []


def test_a_report_is_whole_or_not_there(script):
    (script.parent / "report.json").write_text('{\n "exit_code": 0,\n "of": "an earlier job"\n}\n')
    with jobs.Job(*command(script, "--report", "report.json", then=("sleep",)), cwd=script.parent, env=CPU) as job:
        job.wait_for(r"\[rank 1\] sleeping")
        os.kill(job.process.pid, signal.SIGKILL)
    assert not (script.parent / "report.json").exists(), "nobody takes that of an earlier job for this one's"
    assert not list(script.parent.glob(".report*"))


def test_a_report_never_takes_the_place_of_what_is_no_file(script):
    fifo = script.parent / "fifo"
    os.mkfifo(fifo)
    (script.parent / "link").symlink_to(fifo)
    for name in ("fifo", "link"):
        result = launch(script, "--report", name)
        assert result.code == 2
        assert result.output.endswith(f"/{name} cannot be written: it is no ordinary file; name a file in a folder "
                                      "where you may write\n")
    args = options.parse(["--lesson", str(script.parent), "-n", "2", "--report", str(fifo), str(script)])
    args.began, said = 0, []
    assert job_report.finish(args, 3, lambda line, to: said.append(line)) == 3
    assert said == [f"ranks.py: the report {fifo} could not be written: it is no ordinary file"]
    assert fifo.is_fifo()


def test_a_report_that_has_no_room_leaves_nothing(script, monkeypatch):
    args = options.parse(["--lesson", str(script.parent), "-n", "2", "--report", str(script.parent / "r"), str(script)])
    args.began, args.started, said = 0, 0, []

    def no_room(_):
        assert list(script.parent.glob(".r.*"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", no_room)
    assert job_report.finish(args, 3, lambda line, to: said.append(line)) == 3
    assert said == [f"ranks.py: the report {args.report} could not be written: No space left on device"]
    assert not list(script.parent.glob("*r.*[0-9]"))


def test_a_clock_that_is_set_meanwhile_changes_no_duration(script, monkeypatch):
    args, now, said = options.parse(["--lesson", str(script.parent), "-n", "2", str(script)]), time.time(), []
    job_report.prepare(args)
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    args.timed_out = True
    assert job_report.finish(args, 3, lambda line, to: said.append(line)) == 124
    assert said == ["ranks.py: ended after 0 s, the --time-limit; exit code 124"]


def test_restarts_are_counted(script):
    result = launch(script, "--restarts", 2, "--report", "report.json", then=("fail-once", "--ckpt-dir", "ckpt"))
    assert result.code == 0, result.output
    report = report_of(script.parent)
    assert report["restarts"] == 1
    assert [failure["exit_code"] for failure in report["failures"]] == [5]
    assert report["first_failure"] == report["failures"][0]


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage(script):
    script.write_text("import os\nprint('epoch: 1 step: 1, loss is', 2.5 * int(os.environ['RANKS_RANK']))\n")
    jobs.succeeded(launch(script, "--report", "report.json"))
    report = report_of(script.parent)
    assert [rank["last_loss"] for rank in report["ranks"]] == [0.0, 2.5]
    assert report["last_loss"] == 2.5


def test_the_first_failure_of_several_is_called_so(script):
    script.write_text("import os, sys\ncode = len(os.listdir('.'))\nopen(str(code), 'w')\nsys.exit(code)\n")
    result = launch(script, "--restarts", 1, "--report", "report.json", ranks=1, then=("--ckpt-dir", "ckpt"))
    report = report_of(script.parent)
    first, last = (failure["exit_code"] for failure in report["failures"])
    assert first < last == result.code == report["exit_code"]
    assert report["first_failure"]["exit_code"] == first


# ------------------------------------------------------------------------------------------------------------- --bind
def test_shares_of_cores_and_numa_nodes(tmp_path):
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    every, low, high = set(range(16)), {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert [binding.share("numa", place, 4, every, tmp_path) for place in range(4)] == [low, low, high, high]
    assert [binding.share("numa", place, 1, every, tmp_path) for place in range(1)] == [low]
    assert [binding.share("numa", place, 2, {4, 5}, tmp_path) for place in range(2)] == [{4, 5}, {4, 5}]
    assert binding.share("numa", 1, 2, {4, 5}, tmp_path / "none") == {4, 5}
    assert [binding.share("cores", place, 3, every) for place in range(3)] == [
        set(range(5)), set(range(5, 10)), set(range(10, 15))]
    assert [binding.share("cores", place, 3, {2, 7}) for place in range(3)] == [{2}, {7}, {2}]


@pytest.mark.parametrize("how", ["numa", "no"])
def test_ranks_that_share_their_cores(how, script):
    result = jobs.succeeded(launch(script, "--bind", how))
    allowed = os.sched_getaffinity(0)
    wanted = {place: sorted(binding.share("numa", place, 2, allowed) if how == "numa" else allowed) for place in (0, 1)}
    assert {int(rank): json.loads(cores) for rank, cores in re.findall(
        r"^\[rank (\d)\] rank \d on cores (\[.*\])$", result.output, re.MULTILINE)} == wanted


# ----------------------------------------------------------------------------------------------------- the moving line
TERMINAL = '''
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(TERM="xterm", COLUMNS="100")
    os.execv(sys.argv[1], sys.argv[1:])
try:
    while data := os.read(terminal, 65536):
        os.write(1, data)
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
'''


def test_a_moving_line_on_a_terminal_and_nothing_of_it_elsewhere(script):
    result = jobs.run(jobs.PYTHON, "-c", TERMINAL, *command(script, then=("--epochs", 2, "--batch-size", 8)),
                      cwd=script.parent, env={**CPU, "PAUSE": "0.6"})
    assert result.code == 0, result.output
    lines = [line.rsplit("\x1b[2K", 1)[-1] for line in result.output.splitlines()]  # what ends in \r is a line, too
    assert re.fullmatch(r"2 ranks: no loss yet, \d s", lines[1])
    assert any(re.fullmatch(r"epoch 1 of 2, step 11, loss 1.9 1.901, [\d.]+ samples/s", line) for line in lines)
    assert any(re.fullmatch(r"epoch 2 of 2, step 11 of about 16, loss 0.9 0.901, [\d.]+ samples/s, \d s left", line)
               for line in lines), lines
    assert "[rank 1] epoch: 1, step: 10, loss is 0.901" in lines, "the ranks' lines stay as they are"
    assert lines[-1].startswith("rank 1: loss 2.001 -> 0.901"), "it is gone at the end"
    result = jobs.succeeded(launch(script, then=("--epochs", 2)))
    assert "\x1b" not in result.output
    assert "no loss yet" not in result.output


def test_progress_of_loss_monitor_and_of_steps_alone(tmp_path):
    line = progress.Progress()
    line.ranks, line.epochs, line.batch = 2, 3, 32
    for epoch in (1, 2):
        for step in (1, 2, 3, 4):
            line.read(0, f"epoch: {epoch} step: {step}, loss is 2.1234567", epoch * 4 + step)
    assert line.text(12) == "epoch 2 of 3, step 4 of 4, loss 2.123, 64 samples/s, 4 s left"
    line = progress.Progress()
    line.ranks, line.epochs, line.steps = 2, 3, 25
    for epoch in range(2):
        for step in (0, 10, 20):
            line.read(0, f"epoch: {epoch}, step: {step}, loss is 2", 1 + epoch * 25 + step)
    assert line.text(46) == "epoch 2 of 3, step 21 of 25, loss 2, 1 steps/s, 29 s left"
    line = progress.Progress()
    line.ranks, line.steps = 8, 20
    for rank in range(8):
        for step in (0, 1):
            line.read(rank, f"step: {step}, loss is {'nan' if rank == 7 else rank}", 1 + step)
    assert line.text(2) == "step 2 of 20, loss 0 ... nan, 1 steps/s, 18 s left"
    script = 'add("--epochs", type=at_least(1), default=10)\nadd("--steps", type=int)\nadd("--ep")'
    assert [progress.option(name, ["--lr", "1"], script) for name in ("--epochs", "--steps")] == [10, None]
    for given, epochs in ((["--epochs=4"], 4), (["--epoch", "2"], 2), (["--epochs", "2", "--epoch=3"], 3),
                          (["--ep", "2"], 10), (["--epochs", "x"], None), (["--", "2"], 10), (["--st", "2"], 10)):
        assert progress.option("--epochs", given, script) == epochs, given
    assert progress.option("--batch-size", ["--batch", "2"], script) is None, "the script has no such option"


@pytest.mark.parametrize(("text", "speed"), [
    ("# losses are accumulated", "samples/s"), ("# pipeline_stages=2", "steps/s"),
    ("# TrainWithAccumulation(network)", "steps/s")])
def test_a_speed_that_is_not_known_is_not_shown(text, speed, script):
    """Ranks of a pipeline share a batch; where gradients are accumulated, a step that is printed takes a part of it."""
    script.write_text(script.read_text() + text)
    result = jobs.run(jobs.PYTHON, "-c", TERMINAL, *command(script, then=("--epochs", 2, "--batch-size", 8, "--steps",
                                                                          16)),
                      cwd=script.parent, env={**CPU, "PAUSE": "0.6"})
    assert result.code == 0, result.output
    known = speed == "samples/s" or "pipeline" in text
    assert re.search(rf"epoch 1 of 2, step 11{' of 16' * known}, loss 1.9 1.901, [\d.]+ {speed}", result.output), (
        result.output)


# ----------------------------------------------------------------------------------------------------- before the start
def test_gpus_in_use_are_named_and_nvidia_smi_is_asked_once(script):
    path = jobs.path_with_gpus(script.parent / "bin", 3)
    smi = script.parent / "bin" / "nvidia-smi"
    smi.write_text(smi.read_text().replace("#!/bin/sh\n", (
        "#!/bin/sh\necho \"$*\" >>calls\ncase $1 in --query*) echo 'GPU-22222222-aaaa, 4711, /bin/python3, 30000 MiB'"
        "\necho 'GPU-00000000-aaaa, 12, blender, 5 MiB'; exit;; esac\n")))
    env = {"PATH": path, "DEVICE_TARGET": "", "CUDA_VISIBLE_DEVICES": "1,2"}  # no target: it is found out
    result = launch(script, env=env)
    assert result.code == 0, result.output
    assert "ranks.py: warning: in use already: card 1 by process 4711 (python3, 30000 MB); end it" in result.output
    assert "blender" not in result.output
    calls = (script.parent / "calls").read_text().splitlines()
    assert sorted(call.split("=")[0] for call in calls) == ["--query-compute-apps", "-L"]
    result = launch(script, env=env, ranks=3)
    assert result.code == 2
    assert result.output == ("ranks.py: 3 ranks need 3 GPUs, 2 are visible (nvidia-smi -L, CUDA_VISIBLE_DEVICES); "
                             "start fewer\n")


def in_small(size, place, *words):
    """A command in a mount namespace of its own, where a place is a tmpfs of so much."""
    start = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c",
             f'mount -t tmpfs -o size={size} tmpfs {place} && cd . && exec "$@"', "sh"]
    return [*start, *words]


def test_little_room_in_dev_shm_and_on_a_disk_is_said(script):
    if jobs.run(*in_small("1m", "/dev/shm", "true"), cwd=script.parent).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    path = jobs.path_with_gpus(script.parent / "bin", 2)
    result = jobs.run(*in_small("1m", "/dev/shm", *command(script)), cwd=script.parent,
                      env={"PATH": path, "DEVICE_TARGET": "GPU"})
    assert result.code == 0, result.output
    assert "warning: /dev/shm has 1 MB free, 2 ranks need about 10 MB there; docker run --shm-size=1g" in result.output
    result = jobs.run(*in_small("1m", "/dev/shm", *command(script)), cwd=script.parent, env=CPU)
    assert "warning" not in result.output, "on CPU, ranks need no room there"
    small = script.parent / "small"
    small.mkdir()
    result = jobs.run(*in_small("9m", small, *command(script, then=("--ckpt-dir", small / "ckpt"))), cwd=script.parent,
                      env=CPU)
    assert f"warning: the disk of {small} has 9 MB free, and checkpoints go there" in result.output
    assert "logs go there" not in result.output
    full = f'cd {small} && {{ cat /dev/zero >fill 2>/dev/null; exec "$@"; }}'
    result = jobs.run(*in_small("64k", small, "sh", "-c", full, "sh", *command(script)), cwd=script.parent, env=CPU)
    assert result.code == 2, result.output
    assert f"ranks.py: the disk of {small} is full, and the ranks' logs go there; free some (df -h" in result.output
    for size in ("64k", "6m", "11m,nr_inodes=8"):  # mpirun would hang
        result = jobs.run(*in_small(size, small, "sh", "-c", f"cat /dev/zero >{small}/fill 2>/dev/null; exec \"$@\"" if
                                    size == "64k" else 'exec "$@"', "sh", *command(script)), cwd=script.parent,
                          env={**CPU, "TMPDIR": str(small)})
        assert result.code == 2, result.output
        assert re.search(f"the disk of {small} (is full|has 6 MB free|takes no more files), and mpirun's own files go "
                         r"there \(10 MB\); free some .*, or set TMPDIR to another folder$", result.output, re.M)


def test_logs_that_mpirun_could_not_write_whole_are_named(script):
    """It goes on without a word; the disk fills up while the job runs."""
    if jobs.run(*in_small("1m", "/dev/shm", "true"), cwd=script.parent).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    script.write_text(RANK + "for _ in range(6000):\n    print('y' * 1000)\n")
    small = script.parent / "small"
    small.mkdir()
    told = r"^ranks\.py: lines are missing in .*rank\.0/stdout and 1 more: the disk is full$"
    for output, whole in (("/dev/null", False), ("small/out", False), ("small/out", True)):
        if whole:
            script.write_text(RANK)
        logs = "logs" if whole else "small/logs"
        start = ("sh", "-c", 'exec "$@" >' + output, "sh", *command(script, "--logs", logs))
        result = jobs.run(*in_small("5m", small, *start), cwd=script.parent, env=CPU)
        assert result.code == 0, result.output
        assert bool(re.search(told, result.output, re.MULTILINE)) != whole, result.output
        assert "logs are whole" not in result.output


def test_a_log_that_the_end_of_the_job_cuts_off_is_no_matter_of_the_disk(script):
    """mpirun is ended when one rank has failed, and may not have written yet what another one's last words were."""
    script.write_text("import os, time\nbegan = time.time()\n"
                      "time.sleep(2 - began % 2 + 0.1 * int(os.environ['RANKS_RANK']))\n"
                      "print('y' * 300)\nraise ValueError('x' * 200)\n")
    result = launch(script)
    assert result.code == 1
    assert "quota" not in result.output
    missing = re.findall(r"lines are missing in .*stdout: (.*)", result.output)
    assert missing in ([], ["mpirun was ended before it had written them"])


def test_losses_in_one_line_and_as_numpy_and_torch_write_them(script):
    script.write_text("for step in range(5):\n"
                      "    print(f'\\repoch: 1 step: {step + 1}, loss is {2.5 - step / 2}', end='')\nprint()\n")
    assert "rank 0: loss 2.5 -> 0.5 (" in launch(script, ranks=1).output
    for last, shown in (("NaN", "nan"), ("1.e-05", "1.e-05")):
        script.write_text(f"for loss in ('1.5', '{last}'):\n    print('step: 1, loss is', loss)\n")
        result = launch(script, ranks=1)
        assert f"rank 0: loss 1.5 -> {shown} (" in result.output, result.output


def test_a_log_that_ulimit_cuts_off_is_named(script):
    script.write_text("import os\nif os.environ['RANKS_RANK'] == '0':\n    for _ in range(1024 * 11):\n"
                      "        print('y' * 1023)\n")
    for megabytes in (10, 12):
        limited = ("bash", "-c", f'ulimit -f {1024 * megabytes} && exec "$@"', "bash")
        result = jobs.run(*limited, *command(script, "--show", 1), cwd=script.parent, env=CPU)
        assert result.code == 0, result.output[-2000:]
        told = re.findall(r"^ranks\.py: lines are missing in .*rank\.0/stdout: mpirun could not write them; was the "
                          r"disk full for a while, or is there a quota or ulimit -f\?$", result.output, re.MULTILINE)
        assert len(told) == (megabytes < 11)


@pytest.mark.parametrize("line", [False, True])
def test_a_restart_of_ranks_that_have_done_nothing_is_no_resume(line, script):
    """A script that sets aside what an earlier job saved has not come to that, and would go on with it."""
    script.write_text(f"import os, sys\nif not os.path.exists('tried'):\n    open('tried', 'w').close()\n"
                      f"    sys.exit(print('begins') or 5 if {line} else 5)\nprint('options', sys.argv[1:])\n")
    result = launch(script, "--restarts", 1, ranks=1, then=("--ckpt-dir", "ck"), env=CPU)
    assert result.code == 0, result.output
    assert ("--resume=if-saved" in result.output) == line


def test_a_check_that_was_asked_for_starts_nothing(script):
    script.write_text("import sys\nif '--check' in sys.argv:\n    sys.exit()\n" + RANK)
    result = launch(script, "--check", then=("--check",), env=CPU)
    assert (result.code, result.output) == (
        0, "ranks.py: the options and the data can be used; nothing was started (--check)\n")
    assert not (script.parent / "log_output").exists()


@pytest.mark.parametrize(("name", "code", "told"), [
    ("", 2, "ranks.py: this machine has no host name, and ranks without one wait for each other for ever; give it one"),
    ("my_host", 0, "loss 2.0 -> 0.9"), ("\N{CJK UNIFIED IDEOGRAPH-540D}", 0, "loss 2.0 -> 0.9")])
def test_host_names_that_mpirun_cannot_read(name, code, told, script):
    rename = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"
    named = (*jobs.UNSHARE, "--uts", jobs.PYTHON, "-c", rename, name)
    if jobs.run(*named, "true", cwd=script.parent).code:
        pytest.skip("this machine does not let its users make a namespace of their own")
    result = jobs.run(*named, *command(script), cwd=script.parent, env=CPU)
    assert result.code == code, result.output
    assert told in result.output
    assert result.seconds < 20 * jobs.PATIENCE


def test_logs_are_not_put_into_a_mount_point(script):
    """As with docker run -v DIR:/work/log_output: it cannot be moved aside."""
    logs = script.parent / "log_output"
    logs.mkdir()
    if jobs.run(*in_small("1m", logs, "true"), cwd=script.parent).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    result = jobs.run(*in_small("1m", logs, *command(script)), cwd=script.parent, env=CPU)
    assert result.code == 2, result.output
    assert "ranks.py: log_output is a mount point, which cannot be moved aside for new logs; mount" in result.output


def test_in_an_allocation_of_slurm_a_job_stays_on_its_machine(script):
    slurm = {"SLURM_JOBID": "5", "SLURM_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"}
    done = jobs.succeeded(jobs.run(*command(script), cwd=script.parent, env={**CPU, **slurm}))
    assert "An internal error has occurred" not in done.output


def test_data_sets_with_worker_processes_need_dev_shm(tmp_path):
    script, said = tmp_path / "script.py", []
    script.write_text("data.map(f, num_parallel_workers=4, python_multiprocessing=True)\n")
    args = options.parse(["--lesson", str(tmp_path), "-n", "2", str(script)])
    args.target = "CPU"
    with pytest.raises(ValueError, match="and the ranks share memory there; mount it"):
        before.look_at_shm(args, 2, said.append, place=str(tmp_path / "none"))
    before.look_at_shm(args, 10 ** 6, said.append, place=str(tmp_path))
    assert re.match(r".* free, 1000000 ranks need about 40000000 MB there; docker run", said[0])


def test_a_port_that_was_chosen_is_not_chosen_again(monkeypatch):
    """Seconds pass until somebody listens there, for MindSpore is imported first."""
    first = launcher.free_port()
    monkeypatch.setattr(launcher.random, "sample", lambda *_: [first])
    with pytest.raises(OSError, match="no port"):
        launcher.free_port()
    again = f"import launch; launch.random.sample = lambda *_: [{first}, {first}]; print(launch.free_port())"
    assert "no port" in jobs.run(jobs.PYTHON, "-c", again, cwd=jobs.REPO / "tools").output
