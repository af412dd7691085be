"""What a stranger's shell, disk, data or kill -9 does to the launchers: one sentence, and nothing stays behind."""

import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import zipfile
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import forks
import jobs
import pytest

for lesson in ("tools", "mnist_ddp", "resnet50_ascend", "resnet50_gpu"):
    sys.path.insert(0, str(jobs.REPO / lesson))
import before  # noqa: E402
import check_hosts  # noqa: E402
import cifar10_files  # noqa: E402
import launch  # noqa: E402
import machines  # noqa: E402
import mindspore.dataset as ds  # noqa: E402
import mnist_files  # noqa: E402

MNIST = jobs.REPO / "mnist_ddp"
SLURM_JOB = jobs.REPO / "several_machines" / "slurm_job.sh"
SHORT = ("--", "--epochs", 1, "--steps", 3)
LAUNCHERS = sorted(file for file in jobs.REPO.glob("*/run*.sh") if file.parent.name != "tools")


# ------------------------------------------------------------------------------------------------------ the shell
def test_variables_of_an_earlier_job_are_named_and_not_handed_on(tmp_path):
    stale = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "7", "MS_WORKER_NUM": "9", "MS_SCHED_HOST": "192.0.2.1",
             "MS_SCHED_PORT": "1", "RANK_ID": "5", "RANK_SIZE": "9", "DEVICE_ID": "3", "OMPI_COMM_WORLD_RANK": "4",
             "OMPI_COMM_WORLD_SIZE": "7", "PMIX_RANK": "4", "PMIX_NAMESPACE": "x", "MS_SIMULATION_LEVEL": "0"}
    env = {**stale, "MS_COMPILER_CACHE_ENABLE": "1", "PMIX_MCA_gds": "hash"}
    for launcher in ("mpirun", "msrun"):
        result = jobs.succeeded(jobs.run("bash", jobs.REPO / "allgather_check/run.sh", 2, "--launcher", launcher,
                                         cwd=tmp_path, env=env))
        assert result.output.count("MindSpore's compile cache is off here") == 1
        assert not list(tmp_path.rglob("graph_cache")), "a job of 4 ranks would take the graphs of 2"
        assert result.ranks() == {0: 2, 1: 2}
        said, = re.findall(r"^run\.sh: not handed on to the ranks, of an earlier job or of no use here: (.*)$",
                           result.output, re.MULTILINE)
        assert said.split() == sorted(stale)


@pytest.mark.parametrize(("stale", "sentence", "names"), [
    ({"RANK_SIZE": "8x"}, "RANK_SIZE is '8x', which is no number", "RANK_SIZE"),
    ({"MS_SIMULATION_LEVEL": "0"}, "has MindSpore pretend to be on a card", "MS_SIMULATION_LEVEL"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_SERVER_TMPDIR": "/nowhere"},
     "mpirun started this process, but none runs", "OMPI_COMM_WORLD_SIZE RANK_SIZE"),
    ({"MS_ROLE": "MS_WORKER", "RANK_SIZE": "2"}, "MS_SCHED_PORT or MS_WORKER_NUM is missing", "MS_ROLE RANK_SIZE"),
    ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "PORT"},
     "no scheduler listens on 127.0.0.1:PORT within 0.1 s", "MS_ROLE"),
    ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "no.such.host.", "MS_SCHED_PORT": "811800"},
     "no scheduler listens on no.such.host.:811800 within 0.1 s", "MS_ROLE")])
def test_a_command_typed_in_a_shell_of_an_earlier_job(stale, sentence, names, tmp_path):
    """It would wait for other ranks for ever."""
    port = str(jobs.free_port())
    check = f"import runpy; runpy.run_path({str(jobs.REPO / 'tools/in_rank.py')!r})['check_variables']()"
    stale = {name: value.replace("PORT", port) if value == "PORT" else value for name, value in stale.items()}
    env = {**stale, "MS_TOPO_TIMEOUT": "0.1"}
    if "OMPI_COMM_WORLD_SIZE" in stale:  # MindSpore, loaded then, sets RANK_SIZE
        result = jobs.run(jobs.PYTHON, "-c", check, cwd=tmp_path, env=env)
    else:
        result = forks.run("-c", check, cwd=tmp_path, env=env)
    assert result.code == 1
    assert sentence.replace(":PORT", f":{port}") in result.output
    assert result.output.endswith(f"an earlier job has left its variables here: unset {names}\n")
    assert len(result.output.splitlines()) == 1


def test_on_cards_the_compile_cache_is_the_users(tmp_path):
    look = (f"import mindspore, runpy; look = runpy.run_path({str(jobs.REPO / 'tools/in_rank.py')!r})"
            "['distrust_compile_cache']; look(False); print(mindspore.get_context('enable_compile_cache'))")
    for variables, says in (({"MS_COMPILER_CACHE_ENABLE": "1"}, 1), ({}, 0)):
        result = jobs.succeeded(forks.run("-c", look, cwd=tmp_path, env=variables))
        assert result.output.count("MindSpore's compile cache is on: after a change") == says
        assert result.output.endswith("None\n")


def test_scripts_ask_whether_variables_are_left_over(mnist, tmp_path):
    result = forks.run(MNIST / "train_ddp.py", "--data-path", mnist, cwd=tmp_path, env={"RANK_SIZE": "x"})
    assert result.code == 1
    assert "RANK_SIZE is 'x', which is no number" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("launcher", "variables"), [
    ("mpirun or mpiexec of MPICH or Intel MPI", {"PMI_SIZE": "4", "PMI_RANK": "0"}),
    ("torchrun, or another one of PyTorch's", {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0"}),
    ("srun", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})])
def test_a_launcher_that_mindspore_does_not_know_is_named(launcher, variables, mnist, tmp_path):
    """Each of its processes would train alone, and write over the others' checkpoint."""
    result = forks.run(MNIST / "train_ddp.py", "--data-path", mnist, cwd=tmp_path, env=variables)
    assert result.code == 1
    assert f" say that {launcher} has started this process. MindSpore does not know it, so all 4 " in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
    other = {name: "1" if value == "0" else value for name, value in variables.items()}
    result = forks.run(MNIST / "train_ddp.py", "--data-path", mnist, cwd=tmp_path, env=other)
    assert result.code == 1
    assert "has started 4 of this, and the first one says what to do; if only this one runs: unset " in result.output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launcher_that_srun_starts_several_times_says_so(rank, mnist, tmp_path):
    """Each would start all ranks; of run_msrun.sh --nodes, each machine has one."""
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": rank}
    result = jobs.run("bash", MNIST / "run.sh", mnist, 2, cwd=tmp_path, env=slurm)
    says = ("run.sh: SLURM_STEP_NUM_TASKS=4 and SLURM_PROCID say that srun has started 4 of this launcher, and each "
            "starts all ranks: leave it out; if only this one runs: unset SLURM_STEP_NUM_TASKS SLURM_PROCID\n")
    later = ("run.sh: SLURM_STEP_NUM_TASKS=4 and SLURM_PROCID say that srun has started 4 of this, and the first one "
             "says what to do; if only this one runs: unset SLURM_STEP_NUM_TASKS SLURM_PROCID\n")
    assert (result.code, result.output) == (2, says if rank == "0" else later)
    result = jobs.run("bash", MNIST / "run_msrun.sh", mnist, 2, "--nodes", 2, "--node-rank", 5, "--master-addr",
                      "127.0.0.1", cwd=tmp_path, env=slurm)
    assert result.output == "run_msrun.sh: --node-rank must be 0 to 1, not '5'\n"


def test_a_command_with_line_ends_of_windows_says_so(mnist, tmp_path):
    for arguments, variables in ((("2\r",), {}), ((2, "--", "--epochs", "1\r"), {}), ((), {"DATA_PATH": f"{mnist}\r"})):
        result = jobs.run("bash", MNIST / "run.sh", *[mnist] * (not variables), *arguments, cwd=tmp_path, env=variables)
        assert (result.code, result.output) == (2, (
            "run.sh: a word of this command ends with a carriage return, as lines of Windows do; take them out of the "
            "file that the command is in: sed -i 's/\\r$//' FILE\n"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("launcher", ["run.sh", "run_msrun.sh"])
def test_a_launcher_that_mpirun_starts_says_so(launcher, mnist, tmp_path):
    """Each of the jobs would train alone, in one folder."""
    root = ["--allow-run-as-root"] * (os.geteuid() == 0)
    result = jobs.run("mpirun", *root, "--oversubscribe", "-n", 2, "bash", MNIST / launcher, mnist, 2, cwd=tmp_path)
    assert result.code == 2
    assert f"{launcher}: mpirun has started this launcher, which starts the ranks itself: leave out mpirun" \
        in result.output
    assert "recursive calls" not in result.output
    assert not list(tmp_path.iterdir())


def test_variables_of_one_process_or_of_a_machine_are_no_launcher(mnist, tmp_path):
    one = {"PMI_SIZE": "1", "PMI_RANK": "0", "WORLD_SIZE": "4", "RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    jobs.succeeded(forks.run(MNIST / "train_ddp.py", "--data-path", mnist, "--epochs", 1, "--steps", 1, cwd=tmp_path,
                             env=one))


def test_text_where_a_number_belongs_is_no_program(mnist, tmp_path):
    bad = "a[$(touch PWNED)]"
    for arguments in ((bad,), (2, "--nodes", bad), (2, "--nodes", 2, "--node-rank", bad), (2, "--wait", bad),
                      (2, "--nodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", bad)):
        result = jobs.run("bash", MNIST / "run_msrun.sh", mnist, *arguments, cwd=tmp_path)
        assert result.code == 2
        assert bad in result.output
    result = jobs.run("bash", MNIST / "run_msrun.sh", mnist, 2, "--nodes", 2, "--node-rank", 0, "--master-addr",
                      "localhost", "--master-port", 28118, cwd=tmp_path)
    assert result.code == 2
    assert "--master-addr localhost: 127.0.0.1 is an address by which each machine finds itself; give" in result.output
    slurm = {"SLURM_SUBMIT_DIR": str(MNIST), "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": bad,
             "SLURM_JOB_ID": bad}
    assert jobs.run("bash", SLURM_JOB, mnist, 2, cwd=tmp_path, env=slurm).code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "words"), [
    ((), "give DATA_PATH, the folder of the data, the same on all machines"),
    (("data", "two"), "RANKS_PER_MACHINE 'two' is no number"),
    (("data", 2, "mprun"), "the launcher is 'mprun'; write msrun or mpirun"),
    (("data", 2), "no job of Slurm, or one of another folder; in mnist_ddp, start it with sbatch"),
])
def test_the_slurm_job_says_what_it_lacks(arguments, words, tmp_path):
    result = jobs.run("bash", SLURM_JOB, *arguments, cwd=tmp_path)
    assert (result.code, result.output) == (2, f"slurm_job.sh: {words}\n")


def test_the_slurm_job_without_srun(tmp_path):
    slurm = {"SLURM_SUBMIT_DIR": str(MNIST), "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    result = jobs.run(shutil.which("bash"), SLURM_JOB, "data", 2, cwd=tmp_path, env={**slurm, "PATH": str(tmp_path)})
    assert (result.code, result.output) == (2, "slurm_job.sh: there is no srun or no scontrol on the PATH\n")


def test_cdpath_an_alias_and_a_function_cd_change_nothing_and_links_lead_to_launchers(tmp_path):
    assert len(LAUNCHERS) >= 12
    (aliases := tmp_path / "aliases").write_text("shopt -s expand_aliases\nalias python=python3\n")
    (tmp_path / "links").mkdir()
    for launcher in [*LAUNCHERS, *jobs.REPO.glob("run*.sh")]:
        (link := tmp_path / "links" / launcher.name).unlink(missing_ok=True)
        link.symlink_to(launcher)
        result = jobs.run("bash", f"links/{link.name}", "-h", cwd=tmp_path, env={
            "CDPATH": ".:/tmp:/", "BASH_FUNC_cd%%": "() { echo where; builtin cd /; }", "BASH_ENV": aliases})
        assert result.code == 0, result.output
        assert result.output.startswith(f"usage: bash {launcher.name} ")


@pytest.mark.parametrize(("closed", "env"), [
    (">&-", {}), ("2>&-", {}), ("<&- >&- 2>&-", {}), ("", {"PYTHONSAFEPATH": "1"}),
    ("", {"PYTHONINSPECT": "1"}), (">/dev/full 2>&1", {}), (">/dev/full", {}), ("| true", {})])
def test_closed_outputs_and_an_odd_python(closed, env, tmp_path):
    (tmp_path / "rank.py").write_text("import os\nprint('rank', os.environ['OMPI_COMM_WORLD_RANK'])\n")
    start = f"'{jobs.PYTHON}' '{MNIST}/ranks.py' -n 2 --logs logs rank.py {closed}; echo ${{PIPESTATUS[0]}} >code"
    result = jobs.run("bash", "-c", start, cwd=tmp_path, env=env)
    assert (tmp_path / "code").read_text() == "0\n", result.output
    assert [(tmp_path / f"logs/1/rank.{rank}/stdout").read_text() for rank in range(2)] == ["rank 0\n", "rank 1\n"]
    assert result.output.count("lines are missing: where") == (closed == ">/dev/full")
    assert "Traceback" not in result.output
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["mpirun", "msrun", "table"])
def test_odd_names_and_a_terminal_that_lacks_letters(launcher, tmp_path):
    """Names that are no UTF-8, relative paths in the environment, ranks that print what the terminal cannot show."""
    name = "-50%s of $(touch PWNED) 'x' \"y\" \u00fcn"
    folder = tmp_path / os.fsdecode(name.encode() + b"\xff")
    folder.mkdir()
    script = tmp_path / name / "rank.py"  # MindSpore could not read it in the other folder
    script.parent.mkdir()
    script.write_text("import os\nprint('h\u00e4re 中', os.path.isabs(os.environ['TMPDIR']))\n")
    (folder / "bin").symlink_to(Path(jobs.PYTHON).parent)
    (folder / "tmp").mkdir()
    result = jobs.succeeded(jobs.run(
        jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--launcher", launcher, "--in", "inside", f"../{name}/rank.py",
        cwd=folder, env={"PATH": "bin:/usr/bin:/bin", "TMPDIR": "tmp", "PYTHONIOENCODING": "ascii"}))
    logs = {"mpirun": "log_output/1/rank.*/stdout", "msrun": "log_msrun/worker_?.log", "table": "device?/train.log?"}
    logs = [log.read_text(encoding="utf-8") for log in folder.glob(f"inside/{logs[launcher]}")]
    assert [log.splitlines()[0] for log in logs] == ["häre 中 True"] * 2
    assert re.findall(r"^\[rank \d\] h\\xe4re \\u4e2d True$", result.output, re.MULTILINE)
    assert not list(tmp_path.rglob("PWNED"))
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("named", ["the project", "the data"])
def test_a_folder_with_a_name_in_another_encoding(named, mnist, tmp_path):
    """As a .zip packed on Windows leaves it: MindSpore would end in the middle of a job."""
    folder = tmp_path / os.fsdecode("\N{CJK UNIFIED IDEOGRAPH-4E2D}".encode("gbk"))
    launcher, data = MNIST / "run.sh", folder
    if named == "the project":
        shutil.copytree(jobs.REPO / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(MNIST, folder / "mnist_ddp")
        launcher, data = folder / "mnist_ddp" / "run.sh", mnist
    else:
        folder.symlink_to(mnist)
    result = jobs.run("bash", launcher, data, 2, *SHORT, cwd=tmp_path)
    assert result.code == 2, result.output
    assert re.search(r"^run.sh: MindSpore cannot read the path b'/\S*\\xd6\\xd0\S*', which is not UTF-8; rename",
                     result.output)
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("what", ["data", "option"])
def test_names_in_a_locale_that_is_not_utf_8(what, mnist, tmp_path):
    """MindSpore would look for another file; a mangled folder would be made for checkpoints."""
    (tmp_path / "数据").symlink_to(mnist)
    command = ("数据", 2, *SHORT) if what == "data" else (mnist, 2, *SHORT, "--ckpt-dir", "检查")
    result = jobs.run("bash", MNIST / "run.sh", *command, cwd=tmp_path, env={
        "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
    assert result.code == 2, result.output
    assert re.fullmatch(r"run.sh: MindSpore reads names as UTF-8, the locale of this shell is ascii: b'\S*\\xe6\S*' "
                        r"would be taken for another name; export LC_ALL=C.UTF-8\n", result.output)
    assert [path.name for path in tmp_path.iterdir()] == ["数据"]


def test_what_a_shell_does_not_allow(tmp_path):
    """Limits of ulimit with which mpirun would hang, and folders that would be lost."""
    (tmp_path / "rank.py").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").touch()
    go = '(eval "$1"; shift; exec $under "$@") 2>&1 | cat; exit ${PIPESTATUS[0]}'
    no_net = [("under='unshare --net'", (), "127.0.0.1 cannot be reached (")]  # its loopback is down
    for setting, arguments, sentence in (
            *no_net * (jobs.run("unshare", "--net", "true", cwd=tmp_path).code == 0),
            ("ulimit -f 0", (), "files may have 0 KB at most here (ulimit -f)"),
            ("ulimit -n 40", (), "only 40 files may be open at a time here (ulimit -Hn), and 2 ranks need about 50"),
            ("export TMPDIR=rank.py", (), "TMPDIR is rank.py, which is no folder where you may write"),
            ("export GLOG_logtostderr=0", (), "GLOG_logtostderr=0 has MindSpore write files, and GLOG_log_dir"),
            (f"export GLOG_logtostderr=0 GLOG_log_dir='{tmp_path}/rank.py/logs'", (),
             f"GLOG_log_dir is {tmp_path}/rank.py/logs, where you may not write"),
            ("export GLOG_v=5", (), "GLOG_v is '5'; write 0"),
            ("export MS_NODE_TIMEOUT=0", (), "MS_NODE_TIMEOUT is '0'; write a number of seconds, at least 1"),
            ("export MS_NODE_TIMEOUT=99999999999", (), "MS_NODE_TIMEOUT is '99999999999'; write a number of seconds"),
            (":", ("--logs", "mine"), "--logs mine names a folder that holds other things, which would be moved aside"),
            (":", ("--logs", "rank.py"), "rank.py is there and is no folder")):
        result = jobs.run("bash", "-c", go, "bash", setting, jobs.PYTHON, MNIST / "ranks.py", "-n", 2, *arguments,
                          "rank.py", cwd=tmp_path)
        assert result.code == 2, result.output
        assert result.output.startswith(f"ranks.py: {sentence}")
        assert len(result.output.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "rank.py", "work"]
    for limit, warning in (("-t 600", "a process may compute for 600 s here (ulimit -t)"),
                           ("-v 2000000", "ulimit -v is 2000000 KB here; MindSpore needs 2969600 KB or more,"),
                           ("-d 1200000", "ulimit -d is 1200000 KB here;"), ("-s 256", "ulimit -s is 256 KB here;")):
        limited = jobs.run("bash", "-c", go, "bash", f"ulimit {limit}", jobs.PYTHON, MNIST / "ranks.py", "-n", 1,
                           "rank.py", cwd=tmp_path)
        assert f"ranks.py: warning: {warning}" in jobs.succeeded(limited).output


@pytest.mark.parametrize("files", [
    {"memory.max": 3 << 30, "memory.current": 2 << 30, "memory.stat": "anon 5\ninactive_file 536870912\n"},
    {"memory/memory.limit_in_bytes": 3 << 30, "memory/memory.usage_in_bytes": 2 << 30,
     "memory/memory.stat": "total_inactive_file 536870912\n", "memory/job/memory.limit_in_bytes": 1 << 62,
     "memory/job/memory.usage_in_bytes": 9, "memory/job/memory.stat": "total_inactive_file 0\n"}])
def test_the_memory_that_a_container_leaves(files, tmp_path):
    """Control groups of version 2 and 1."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    (tmp_path / "groups").write_text("9:name=systemd:/\n4:memory:/job\n0::/not/seen/here\n")
    ask = (f"import sys; sys.path.insert(0, {str(jobs.REPO / 'tools')!r}); import limits; "
           "print(limits.left_in_container('groups', '.'), limits.left_in_container('groups', 'none'))")
    assert jobs.run(jobs.PYTHON, "-c", ask, cwd=tmp_path).output == "1536 None\n"


def test_a_second_run_in_the_same_folder_moves_the_logs_of_the_first(tmp_path):
    (tmp_path / "first.py").write_text("import os, time\nprint('begin', flush=True)\n"
                                       "while not os.path.exists('go'):\n    time.sleep(0.05)\nraise SystemExit(3)\n")
    (tmp_path / "second.py").write_text("")
    start = jobs.PYTHON, MNIST / "ranks.py", "-n", 1
    with jobs.Job(*start, "--report", "report.json", "first.py", cwd=tmp_path) as first:
        first.wait_for("begin")
        second = jobs.succeeded(jobs.run(*start, "second.py", cwd=tmp_path))
        moved = re.search(r"the earlier log_output is now (\S+)", second.output)[1]
        (tmp_path / "go").touch()
        result = first.finish()
    assert f"ranks.py: rank 0 failed, exit code 3. The end of {moved}/1/rank.0/stdout:\nbegin\n" in result.output
    log = json.loads((tmp_path / "report.json").read_text())["ranks"][0]["log"]
    assert log == f"{tmp_path}/{moved}/1/rank.0/stdout"


def test_the_folder_of_a_run_is_deleted_meanwhile(tmp_path):
    (tmp_path / "rank.py").write_text("import shutil\nshutil.rmtree('../device')\nraise SystemExit(3)\n")
    result = jobs.run(jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "--in", "device", "--report", "report.json", "rank.py",
                      cwd=tmp_path)
    assert result.code == 3
    assert "ranks.py: rank 0 failed, exit code 3." in result.output
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 3


def test_a_folder_that_has_been_removed(tmp_path):
    (tmp_path / "rank.py").write_text("")
    (tmp_path / "gone").mkdir()
    go = 'cd gone && rmdir ../gone && exec "$@"'
    for command in ((MNIST / "ranks.py", "-n", 1, tmp_path / "rank.py"),
                    (jobs.REPO / "dry_run/dry_run.py", "--rank-size", 1, tmp_path / "rank.py"),
                    (jobs.REPO / "dry_run/compute.py", "-n", 1, tmp_path / "rank.py"),
                    (jobs.REPO / "tools/make_datasets.py", "mnist", "set"),
                    (jobs.REPO / "tools/plot_loss.py", "device"), (jobs.REPO / "tools/doctor.py",)):
        (tmp_path / "gone").mkdir(exist_ok=True)
        result = jobs.run("sh", "-c", go, "sh", jobs.PYTHON, *command, cwd=tmp_path)
        assert result.code == 2
        assert result.output.endswith("this folder has been removed; change to another one\n"), result.output


def test_strangers_on_the_launchers_port(tmp_path):
    """A port scanner says what it likes; the launcher hangs up, and the job goes on."""
    (tmp_path / "rank.py").write_text("""
import os, re, socket
from pathlib import Path
agent = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode()
host, port = re.search(r"RANKS_LAUNCHER=(\\S+) (\\d+)", agent).groups()
for said in (b"GET / HTTP/1.1\\r\\n\\r\\n", b"[1]\\n", b"{}\\n", b"\\xff\\n", b"\\n", b'{"token": "0", "rank": 0}\\n',
             b"[" * 99999 + b"\\n", b"x" * (1 << 22)):
    with socket.create_connection((host, int(port))) as link:
        try:
            link.sendall(said)
            assert link.recv(1) == b""
        except OSError:
            pass  # reset
print("all hung up")
""")
    result = jobs.succeeded(jobs.run(jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "rank.py", cwd=tmp_path))
    assert "[rank 0] all hung up" in result.output


def test_a_user_without_home_and_name(tmp_path):
    """As with docker run --user 12345: Open MPI's mpirun would crash."""
    who = ("unshare", "--user", "--map-user=12345", "env", "-u", "HOME")
    if jobs.run(*who, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users make namespaces of their own")
    (tmp_path / "rank.py").write_text("print('hello')\n")
    result = jobs.succeeded(jobs.run(*who, jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "rank.py", cwd=tmp_path,
                                     env={"TMPDIR": str(tmp_path)}))  # /tmp/ompi.HOST.12345 may be another user's
    assert "[rank 1] hello" in result.output


def test_text_of_others_in_another_encoding(tmp_path, monkeypatch):
    """Of ssh, a hostfile, nvidia-smi and a log: nobody need write UTF-8."""
    (tmp_path / "hosts").write_bytes("# 机器\r\n".encode("gbk") + b"127.0.0.1 slots=2\r\n")
    hosts = check_hosts.read_hosts(hostfile=tmp_path / "hosts")
    options = machines.mpirun_options(SimpleNamespace(machines=hosts, interface=None))
    assert options[:2] == ["-H", "127.0.0.1:2"], "mpirun does not read the file, whose line ends are those of Windows"
    jobs.stand_in(tmp_path / "bin/ssh", r"printf '\377: Permission denied\n' >&2; exit 255")
    monkeypatch.setenv("SSH", str(tmp_path / "bin/ssh"))
    assert "no password-free login: run ssh-copy-id far" in check_hosts.ask("far", {})
    jobs.stand_in(tmp_path / "bin/nvidia-smi", r"printf 'GPU 0: \377 (UUID: GPU-1-a)\n'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    before.nvidia_smi.cache_clear()
    assert before.gpus() == ["GPU-1-a"]
    log = jobs.run("sh", "-c", r"""printf '\377\nexit code 137\n' | exec "$@" """, "sh", jobs.PYTHON,
                   jobs.REPO / "tools/doctor.py", "explain", "-", cwd=tmp_path)
    assert log.code == 0, log.output
    before.nvidia_smi.cache_clear()


@pytest.mark.parametrize(("does", "told"), [
    ("exit 0", "it ran PYTHON, but its answer is '': does its shell, or the command in SSH, print or drop lines?"),
    ("echo hello; exit 0", "it ran PYTHON, but its answer is 'hello': does its shell,"),
    ("kill -9 $$", "SSH was ended by Killed; try it by hand"),
    ("echo sh: timeout: not found >&2; exit 127",
     "the command timeout does not run there (sh: timeout: not found); install coreutils"),
    ("echo timeout: failed to run command x: No such file or directory >&2; exit 127", "PYTHON does not run there ("),
    ("echo timeout: fork system call failed: Resource temporarily unavailable >&2; exit 125",
     "it has no room for more processes (timeout: fork system call failed: Resource temporarily unavailable)"),
    ("exit 3", "its shell ended (exit code 3) before Python ran: what do its start files, such as .bashrc, do?"),
    ('read -r line; for last; do :; done; exec sh -c "$last"',
     "its shell takes lines that are meant for Python (IndentationError: "),
    ('export PYTHONHOME=/nowhere; for last; do :; done; exec sh -c "$last"',
     "PYTHONHOME is set there, with which PYTHON does not run; unset it (.bashrc)"),
    ("exit 137", "PYTHON does not run there (exit code 137); install"),
    ("echo oh >&2; exit 3", "PYTHON does not run there (oh); install the same environment at the same path"),
])
def test_an_ssh_that_gives_no_answer(does, told, tmp_path, monkeypatch):
    jobs.stand_in(tmp_path / "ssh", does)
    monkeypatch.setenv("SSH", str(tmp_path / "ssh"))
    told = re.sub(r"\bPYTHON\b", sys.executable, told).replace("SSH was", f"{tmp_path / 'ssh'} was")
    assert check_hosts.ask("far", {}).startswith(told)


def test_clocks_are_compared_when_a_machine_answers(tmp_path, monkeypatch):
    """And not when the last one has, whose ssh may take many seconds."""
    jobs.stand_in(tmp_path / "ssh", 'for last; do :; done; exec sh -c "$last"')
    monkeypatch.setenv("SSH", str(tmp_path / "ssh"))
    wanted = {"scripts": [], "start_folder": "/", "data": None, "mpirun": "mpirun", "interface": None,
              "address": "127.0.0.1", "ports": [1], "first": False, "writable": True}
    answer = check_hosts.ask("far", wanted)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 500)
    rows, _ = check_hosts.judge([answer], answer, [("far", 1)], wanted)
    assert abs(int(rows[0]["clock"].partition(" s")[0])) < 100


@pytest.mark.parametrize("name", [".venv", "link", "file", ".", "papers"])
def test_the_set_up_empties_no_folder_of_others(name, tmp_path):
    """Neither one that VENV names, nor the one that a link leads to, nor an environment made by hand."""
    (tmp_path / "tools").symlink_to(jobs.REPO / "tools")
    for file in ("requirements.txt", "requirements-dev.txt", "file"):
        (tmp_path / file).write_text("# none\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (tmp_path / "link").symlink_to(".venv")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "complete").touch()
    (tmp_path / "papers" / "thesis").touch()
    there = sorted(tmp_path.rglob("*"))
    result = jobs.run("env", "-u", "VIRTUAL_ENV", f"VENV={name}", "bash", "-c", ". tools/environment.sh; echo ready",
                      cwd=tmp_path, env={"PYTHON": jobs.PYTHON})
    assert (result.code, sorted(tmp_path.rglob("*"))) == (1, there), result.output
    assert re.fullmatch(rf"{re.escape(os.path.normpath(tmp_path / name))} was not made by this set-up, which would "
                        r"empty it: remove it, or name another one \(VENV=FOLDER\); if .*-dev.txt\n", result.output)


def test_an_environment_is_made_once_and_made_again_where_it_is_of_no_use(tmp_path):
    """Where pip has put the packages elsewhere, by two set-ups at once, moved, and for other packages.

    There are none to put; but for the first time it is shown those of the tests in their place.
    """
    tree, moved, about = tmp_path / "tree", tmp_path / "moved", "mindspore-9.9.9.dist-info"
    tree.mkdir()
    (tree / "tools").symlink_to(jobs.REPO / "tools")
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tree / name).write_text("# none\n")
    with zipfile.ZipFile(tmp_path / "mindspore-9.9.9-py3-none-any.whl", "w") as wheel:  # nothing but its name
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: mindspore\nVersion: 9.9.9\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    elsewhere = {"PYTHON": jobs.PYTHON, "PIP_USER": "1"}  # as PIP_TARGET does
    env = {"PYTHON": jobs.PYTHON, "PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1",
           "PIP_FIND_LINKS": str(tmp_path)}

    def set_up(folder, *where, env=env):
        command = ("bash", "-c", ". tools/environment.sh; pip --version")
        return jobs.Job("env", "-u", "VIRTUAL_ENV", "-u", "VENV", *where, *command, cwd=folder, env=env)

    def is_made(folder, *where):
        with set_up(folder, "MINDSPORE=9.9.9", *where) as job:
            result = jobs.succeeded(job.finish())
        assert re.search(r"(?m)^pip \d", result.output), "its programs, such as msrun, name their Python by its path"
        return "Setting up" in result.output

    with set_up(tree, env=elsewhere) as job:
        result = job.finish()
    assert result.code == 1
    assert f"pip has not put the packages into {tree}/.venv; look for target" in result.output
    assert not re.search(r"(?m)^pip \d", result.output)
    with set_up(tree, "MINDSPORE=9.9.9") as first:
        first.wait_for("Setting up", timeout=60)  # that one is not taken for complete
        with set_up(tree, f"VENV={tree}/.venv") as second:  # which keeps its own MindSpore
            results = [jobs.succeeded(job.finish(120)) for job in (first, second)]
    assert ["Setting up" in result.output for result in results] == [True, False]
    assert f"another set-up is at work in {tree}/.venv; waiting for its end ...\n" in results[1].output
    assert all("\npip " in result.output for result in results)
    assert (tree / ".venv" / "complete").read_text().endswith("\n9.9.9\n")
    tree.rename(moved)
    assert [is_made(moved), is_made(moved)] == [True, False]

    # Others are wanted, and it is active: what the user has put into it stays, also if they cannot be had.
    users = next((moved / ".venv/lib").glob("python*/site-packages")) / "users.py"
    users.touch()
    active = (f"PATH={moved / '.venv/bin'}:{os.environ['PATH']}", "PYTHON=python3")
    (moved / "requirements.txt").write_text("no-such-package\n")
    with set_up(moved, "MINDSPORE=9.9.9", *active) as job:
        result = job.finish()
    assert (result.code, result.output.count("pip could not install the packages")) == (1, 1), result.output
    for wanted, changed in (("# none\n", True), ("pip\n", True), ("# others\npip\n", False)):
        (moved / "requirements.txt").write_text(wanted)
        with set_up(moved, "MINDSPORE=9.9.9", *active) as job:
            result = jobs.succeeded(job.finish())
        assert (f"Bringing {moved}/.venv up to date" in result.output) == changed
        assert "Setting up" not in result.output
    assert users.exists()

    moved.rename(tree)  # the one that is made again is active
    active = (f"PATH={tree / '.venv/bin'}:{os.environ['PATH']}", "PYTHON=python3")
    assert [is_made(tree, *active), is_made(tree, *active)] == [True, False]


def test_mpirun_knows_one_address_of_the_loopback_only():
    assert [check_hosts.is_here(host) for host in ("localhost", "127.0.0.1", "127.0.0.2")] == [True, True, False]


def test_nvidia_smi_that_hangs(tmp_path, monkeypatch):
    jobs.stand_in(tmp_path / "bin/nvidia-smi", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(before, "PATIENCE", 0.2)
    before.nvidia_smi.cache_clear()
    with pytest.raises(ValueError, match="nvidia-smi gives no answer within 0.2 s"):
        before.gpus()
    before.nvidia_smi.cache_clear()


def test_runs_upon_runs_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    args = SimpleNamespace(name="run.sh", logs="logs")
    for _ in range(4):
        launch.new_folders(args, ["logs"])
        (tmp_path / "logs" / "mpirun.log").touch()
    assert sorted(os.listdir(tmp_path)) == ["logs", "logs.now", "logs.now.2", "logs.now.3"]


def test_a_folder_of_logs_with_a_slash_in_one_with_a_colon(tmp_path):
    """At which mpirun would cut its path off."""
    folder = tmp_path / "run 8:20"
    folder.mkdir()
    (folder / "rank.py").write_text(
        "print('epoch: 1 step: 1, loss is 0.53.')\nprint('step:', '9' * 5000 + ', loss is 0.53')\n")
    for _ in range(2):
        result = jobs.succeeded(jobs.run(jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "--logs", "mine/", "rank.py",
                                         cwd=folder))
        assert "rank 0: loss 0.53 -> 0.53 (mine/1/rank.0/stdout)" in result.output, "also with a full stop behind it"
        assert "step: 1, loss is 0.53." in (folder / "mine/1/rank.0/stdout").read_text()
    assert re.search(r"^ranks.py: the earlier mine is now mine\.\S+$", result.output, re.MULTILINE)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "2>/dev/full", ">/dev/full", "| true"])
def test_a_launcher_whose_lines_nobody_takes(closed, tmp_path):
    """Where stderr is closed, bash opens its script in its place, which Python cannot write to."""
    table, port = jobs.REPO / "rank_tables/rank_table_2pcs.json", str(jobs.free_port())
    for lesson, name, script, *words in (
            ("allgather_check", "run.sh", "allgather_check.py", 2),
            ("resnet50_ascend", "run_cluster.sh", "resnet50_distributed_training.py", "data", table, 2, 0)):
        (folder := tmp_path / lesson).mkdir()
        launcher = jobs.planted(lesson, folder, script) / name
        if lesson != "allgather_check" or closed != "2>&-":  # one job is MindSpore's
            launcher.with_name(script).write_text("print('at work')\n")
        result = jobs.run("bash", "-c", f'set -o pipefail; "$@" {closed}', "bash", "bash", launcher, *words, cwd=folder,
                          env={"DEVICE_TARGET": "CPU", "PYTHONUNBUFFERED": "1", "MS_SCHED_PORT": port})  # as images do
        assert result.code == 0, result.output
        assert [*folder.glob("log_output/1/rank.1/stdout"), *folder.glob("device_1/train1.log")]


def test_a_folder_of_data_with_two_dashes_in_its_name(cifar10, tmp_path):
    (tmp_path / "da--ta").symlink_to(cifar10)
    table = jobs.REPO / "rank_tables/rank_table_2pcs.json"
    for words in (["run.sh", "da--ta", 2], ["run_cluster.sh", "da--ta", table, 2, 0]):
        result = jobs.run("bash", jobs.REPO / words[0], *words[1:], "--", "--no-such-option", cwd=tmp_path,
                          env={"DEVICE_TARGET": "CPU", "MS_SCHED_PORT": str(jobs.free_port())})
        assert result.code == 2
        assert "unrecognized arguments: --no-such-option" in result.output


def test_a_hostfile_to_which_nobody_writes(mnist, tmp_path):
    os.mkfifo(tmp_path / "hosts")
    result = jobs.run("bash", MNIST / "run_mpirun_2.sh", "hosts", mnist, cwd=tmp_path, timeout=30)
    assert (result.code, "the hostfile hosts is no file; give one with lines of HOST" in result.output) == (2, True)
    piped = jobs.run("bash", "-c", 'bash "$0" <(echo nonsense) "$1"', MNIST / "run_mpirun_2.sh", mnist, cwd=tmp_path)
    assert (piped.code, "line 1 of /dev/fd/" in piped.output) == (2, True), piped.output


def test_data_in_the_folder_of_the_logs_are_not_moved_aside(mnist, cifar10, tmp_path):
    shutil.copytree(mnist, tmp_path / "log_output" / "digits")
    (tmp_path / "device0").symlink_to(cifar10)
    (tmp_path / "device").symlink_to(cifar10.parent)
    there = sorted(tmp_path.rglob("*"))
    for launcher, data, *options in (("mnist_ddp/run.sh", "log_output/digits"), ("run_gpu.sh", "device"),
                                     ("resnet50_ascend/run.sh", "device0", "--no-sink"),
                                     ("mnist_ddp/run.sh", mnist, "--", "--data-path=log_output/digits")):
        result = jobs.run("bash", jobs.REPO / launcher, data, 2, *options, cwd=tmp_path, env={"DEVICE_TARGET": "CPU"})
        folder = next(word for word in ("log_output", "device0", "device") if word in f"{data} {options}")
        assert result.code == 2, result.output
        assert f" is in {folder}, the folder of the logs, which each start moves aside; move it" in result.output
        assert sorted(tmp_path.rglob("*")) == there


def test_two_jobs_do_not_save_in_one_folder(tmp_path):
    """Named, twice, or the script's own."""
    (tmp_path / "rank.py").write_text("import sys, time\nif '--check' in sys.argv:\n    print('saves in ck')\n"
                                      "    sys.exit()\nprint('ready', flush=True)\ntime.sleep(float(sys.argv[1]))\n")
    command = (jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "rank.py")
    with jobs.Job(*command, "--logs", "first", "--", 600, "--ckpt-dir", "x", "--ckpt-dir", "ck", cwd=tmp_path) as first:
        first.wait_for("ready")
        for name in ("ck", "../" + tmp_path.name + "/ck/"):
            other = jobs.run(*command, "--logs", "other", "--", 0, f"--ckpt-dir={name}", cwd=tmp_path)
            assert other.code == 2
            assert other.output == (f"ranks.py: --ckpt-dir {name} is that of a job that runs on this machine; wait for "
                                    "its end, or name another one\n")
        own = jobs.run(*command, "--check", "--logs", "other", "--", 0, cwd=tmp_path)
        assert "--ckpt-dir ck is that of a job that runs on this machine" in own.output
        jobs.succeeded(jobs.run(*command, "--logs", "other", "--", 0, "--ckpt-dir", "x", cwd=tmp_path))
        first.process.kill()
        first.finish()
    jobs.succeeded(jobs.run(*command, "--logs", "other", "--", 0, "--ckpt-dir", "ck", cwd=tmp_path))


def test_two_jobs_do_not_save_in_one_folder_that_has_two_paths(tmp_path):
    """As it has in containers."""
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", 'mount --bind saved mounted && exec "$@"', "sh"]
    for name in ("saved", "mounted"):
        (tmp_path / name).mkdir()
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a folder in a namespace of their own")
    (tmp_path / "rank.py").write_text("import sys, time\nprint('ready', flush=True)\ntime.sleep(float(sys.argv[1]))\n")
    command = (jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "rank.py")
    with jobs.Job(*command, "--logs", "first", "--", 600, "--ckpt-dir", "saved", cwd=tmp_path) as first:
        first.wait_for("ready")
        other = jobs.run(*mount, *command, "--logs", "other", "--", 0, "--ckpt-dir", "mounted", cwd=tmp_path)
        assert (other.code, other.output) == (2, "ranks.py: --ckpt-dir mounted is that of a job that runs on this "
                                              "machine; wait for its end, or name another one\n")
        first.process.kill()
        first.finish()
    jobs.succeeded(jobs.run(*mount, *command, "--logs", "other", "--", 0, "--ckpt-dir", "mounted", cwd=tmp_path))


def test_logs_that_linux_cannot_rename_are_copied_aside(tmp_path):
    """As a container's, whose image has them: a folder of an overlay's lower layer."""
    layers = "lowerdir=image,upperdir=own/up,workdir=own/work,redirect_dir=off"
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", f'mount -t overlay -o {layers} overlay seen && cd seen && exec "$@"',
             "sh"]
    for folder in ("image/log_output/1/rank.0", "own/up", "own/work", "seen"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "image/log_output/mpirun.log").write_text("")
    (tmp_path / "image/log_output/1/rank.0/stdout").write_text("of the image\n")
    (tmp_path / "image/rank.py").write_text("print('new')\n")
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount an overlay in a namespace of their own")
    result = jobs.succeeded(jobs.run(*mount, jobs.PYTHON, MNIST / "ranks.py", "-n", 1, "rank.py", cwd=tmp_path))
    aside = re.search(r"^ranks.py: the earlier log_output is now (log_output\.\S+)$", result.output, re.MULTILINE)[1]
    for folder, line in ((aside, "of the image\n"), ("log_output", "new\n")):
        assert (tmp_path / "own/up" / folder / "1/rank.0/stdout").read_text() == line


def test_files_on_pythonpath_are_the_scripts_alone(tmp_path):
    """Called as modules of Python, which launcher and agents need."""
    for name in ("socket", "select", "json", "subprocess", "binding"):
        (tmp_path / f"{name}.py").write_text(f"print('not the {name} of Python')\n")
    (tmp_path / "rank.py").write_text("import json\n")
    result = jobs.succeeded(jobs.run(jobs.PYTHON, "-I", MNIST / "ranks.py", "-n", 2, "rank.py", cwd=tmp_path,
                                     env={"PYTHONPATH": f"{tmp_path}:"}))
    assert sorted(line for line in result.output.splitlines() if "not the" in line) == [
        f"[rank {rank}] not the json of Python" for rank in range(2)]


def test_where_options_of_the_script_go(mnist, tmp_path):
    result = jobs.run("bash", MNIST / "run.sh", mnist, 2, "--lr", 1, cwd=tmp_path)
    assert result.code == 2
    assert "unrecognized arguments: --lr 1; options of train_ddp.py go after --" in result.output


# ------------------------------------------------------------------------------------------------------- the data
def said_of(check, folder):
    """What a lesson's check says of a folder; "" if it finds nothing wrong."""
    try:
        check(str(folder))
    except ArgumentTypeError as error:
        return str(error)
    return ""


def images(dataset):
    """How many images MindSpore reads; -1 if it fails."""
    try:
        batches = dataset.batch(1000).create_tuple_iterator(num_epochs=1, output_numpy=True)
        return sum(len(labels) for _, labels in batches)
    except RuntimeError:
        return -1


@pytest.mark.parametrize(("name", "read"), [
    ("train-images-idx3-ubyte.gz", True), ("._train-images-idx3-ubyte", True), ("train-labels-idx1-ubyte (copy)", True),
    ("train-images.idx3-ubyte", True), ("backup of train-labels-idx1-ubyte", True), ("notes.txt", False),
    ("train-images.zip", False)])
def test_what_mindspore_reads_beside_the_mnist_files(name, read, mnist, tmp_path):
    folder = shutil.copytree(mnist, tmp_path / "mnist")
    (folder / name).write_bytes(b"\x1f\x8b" * 99)
    said = said_of(mnist_files.mnist_folder, folder)
    assert (images(ds.MnistDataset(str(folder), usage="train")) != 4000) == read, "what the check must know"
    assert ("MindSpore would read" in said and name in said) == read, said


@pytest.mark.parametrize(("name", "kind", "refused"), [
    ("._data_batch_1.bin", "junk", True), ("data_batch_1 (copy).bin", "copy", True),
    ("old_test_batch.bin", "copy", True), ("my.bin", "folder", True), ("gone.bin", "link", True),
    ("data_batch_1.bin.gz", "junk", False), ("data_batch_1.bin.bak", "copy", False), ("other.bin", "junk", False)])
def test_what_mindspore_reads_beside_the_cifar10_files(name, kind, refused, cifar10, tmp_path):
    for file in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / file).symlink_to(cifar10 / file)
    place = tmp_path / name
    {"junk": lambda: place.write_bytes(b"junk"), "copy": lambda: place.symlink_to(cifar10 / "data_batch_1.bin"),
     "folder": place.mkdir, "link": lambda: place.symlink_to("nowhere")}[kind]()
    said = said_of(cifar10_files.cifar10_folder, tmp_path)
    read = [images(ds.Cifar10Dataset(str(tmp_path), usage=usage)) for usage in ("train", "test")]
    assert (read != [10_000, 10_000]) == refused, "what the check must know"
    assert (f"MindSpore would read {place}" in said) == refused, said


def test_a_label_above_9_is_named(mnist, tmp_path):
    folder = shutil.copytree(mnist, tmp_path / "mnist")
    labels = bytearray((folder / "train-labels-idx1-ubyte").read_bytes())
    labels[8 + 1234] = 10
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    assert "train-labels-idx1-ubyte has a label above 9" in said_of(mnist_files.mnist_folder, folder)
    content = bytearray(10_000 * 3073)
    content[4711 * 3073] = 17
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    assert "data_batch_1.bin: record 4711 has the label 17" in said_of(cifar10_files.cifar10_folder, tmp_path)


def test_what_mindspore_cannot_decode_is_no_picture(tmp_path):
    from fruits_files import no_pictures
    from PIL import Image
    folder = tmp_path / "Training" / "apple"
    folder.mkdir(parents=True)
    for name in ("good.jpg", "good.png", "bad.webp", "bad.gif"):
        Image.new("RGB", (20, 20)).save(folder / name)
    (folder / "huge.ppm").write_bytes(b"P6 99999 99999 255\n")  # a torn file may claim any size
    (folder / "sub.jpg").mkdir()
    (folder / "gone.jpg").symlink_to("nowhere")
    assert [file.name for file in no_pictures(tmp_path)] == ["bad.gif", "bad.webp", "gone.jpg", "huge.ppm",
                                                               "sub.jpg"]


def test_data_of_somebody_else(tmp_path):
    """Before the start it is a sentence, whatever the check."""
    (tmp_path / "check.py").write_text("import mindspore, os, sys\nnumber = int(sys.argv[1])\n"
                                       "raise OSError(number, os.strerror(number), '/data/train')\n")
    for number, sentence in ((13, "Permission denied; have its owner make it readable (chmod -R a+rX), or name"),
                             (36, "File name too long; name")):
        result = jobs.run(jobs.PYTHON, jobs.REPO / "tools/quick_check.py", "check.py", number, "--check", cwd=tmp_path)
        assert result.code == 2
        assert result.output == f"check.py: error: /data/train: {sentence} other data\n"


def test_a_pipe_named_like_a_checkpoint_is_not_waited_for(tmp_path):
    from checkpoints import Checkpoints
    saved = Checkpoints(tmp_path, "net", 1)
    os.mkfifo(tmp_path / "net-3_2.ckpt")
    assert saved.files() == {}
    (tmp_path / "net-2_2.ckpt").write_bytes(b"")
    assert saved.newest() == ((0, 0), {})


# ------------------------------------------------------------------------------------------------- disks and links
def test_a_log_folder_that_is_a_dangling_link(tmp_path):
    (tmp_path / "log_output").symlink_to("/nonexistent/folder")
    (tmp_path / "rank.py").write_text("print('hello')\n")
    result = jobs.succeeded(jobs.run(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "rank.py", cwd=tmp_path))
    assert "mkdir" not in result.output
    assert re.search(r"^ranks.py: the earlier log_output is now log_output\.", result.output, re.MULTILINE)
    assert (tmp_path / "log_output/1/rank.1/stdout").read_text() == "hello\n"


def test_a_full_disk_under_the_ranks_folders(cifar10, tmp_path):
    """Rank 0 cannot write its log: it is named, soon; the other, which waits for it, is ended."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs small && cd small && exec "$@"', "sh"]
    (tmp_path / "small").mkdir()
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    result = jobs.run(*mount, "bash", jobs.REPO / "resnet50_ascend/run_cluster.sh", cifar10,
                      jobs.REPO / "rank_tables/rank_table_2pcs.json", 2, 0, cwd=tmp_path,
                      env={"DEVICE_TARGET": "CPU", "MS_SCHED_PORT": str(jobs.free_port())}, timeout=40)
    assert result.code == 1, result.output
    assert re.search(r"(?s)rank ([01]) failed.*the log of rank \1 cannot be written: No space left", result.output)
    assert not result.left_over
    assert "Traceback" not in result.output


def test_a_dry_run_whose_disk_fills(tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8k,nr_inodes=9 tmpfs small && exec "$@"', "sh"]
    (tmp_path / "small").mkdir()
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    (tmp_path / "script.py").write_text("print('x' * 9999)\n")
    result = jobs.run(*mount, jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 2, "--keep", "small/kept",
                      "script.py", cwd=tmp_path)
    assert result.code == 1
    assert "0 of 2 ranks compiled, ranks 0-1 failed" in result.output
    assert "small/kept is full, another one goes with --keep DIR or TMPDIR" in result.output
    assert "Traceback" not in result.output
    assert not result.left_over


@pytest.mark.parametrize(("out", "end"), [("| true", "141"), ("> /dev/full", "dry_run: .* No space left .*\n2")])
def test_a_dry_run_that_nobody_reads_and_python_without_docstrings(out, end, tmp_path):
    (tmp_path / "script.py").write_text("")
    command = f'"$1" "$2" --rank-size 1 script.py {out}; echo ${{PIPESTATUS[0]}}'
    result = jobs.run("bash", "-c", command, "bash", jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", cwd=tmp_path,
                      env={"PYTHONOPTIMIZE": "2"})
    assert re.search(rf"FAILED after \S+ s \(1 of 1\)\n{end}\n$", result.output), result.output
    assert "Traceback" not in result.output


def test_a_computed_plan_whose_output_is_closed(tmp_path):
    (tmp_path / "script.py").write_text("print('to nobody', flush=True)\n")
    result = jobs.run("bash", "-c", '"$@" >&-', "bash", jobs.PYTHON, jobs.REPO / "dry_run/compute.py", "-n", 2,
                      "script.py", cwd=tmp_path)
    assert result.code == 1, result.output
    assert "compute.py: the script never called mindspore.communication.init()" in result.output


@pytest.mark.parametrize(("arguments", "env", "sentence"), [
    ((), {"DRY_RUN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/dev/null"},
     "set DRY_RUN_CACHE to a folder where you may write"),
    (("--keep", "/dev/null"), {}, "--keep /dev/null: must be new or empty"),
    (("--keep", "/dev/null/x"), {}, "must name places with room"),
    (("--json", "/"), {}, "--json /: it is a folder"),
    (("--json", "/dev/full"), {}, "No space left on device; --keep, --json")])
def test_the_dry_run_where_it_cannot_write(arguments, env, sentence, tmp_path):
    (tmp_path / "script.py").touch()
    result = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 1, *arguments, "script.py",
                      cwd=tmp_path, env=env)
    assert result.code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_stand_ins_of_another_user(tmp_path):
    """HOME is often kept by sudo; MindSpore would only say that a library is missing."""
    ask = ("import stand_ins\nstand_ins.folder_of('mindspore', '1').mkdir(parents=True)\n"
           "try:\n    stand_ins.build('mindspore', '1')\nexcept stand_ins.StandInError as error:\n    print(error)\n")
    result = jobs.run(jobs.PYTHON, "-c", ask, cwd=tmp_path, env={"DRY_RUN_CACHE": str(tmp_path / "cache"),
                                                                 "PYTHONPATH": str(jobs.REPO / "dry_run")})
    assert re.fullmatch(r"dry_run: stand-ins for CANN cannot be kept: \S+ cannot be read; set DRY_RUN_CACHE to a "
                        r"folder where you may write\n", result.output), result.output


def test_stand_ins_on_a_disk_from_which_nothing_can_be_loaded(tmp_path):
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o noexec tmpfs . && exec "$@"', "sh"]
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    result = jobs.run(*mount, jobs.PYTHON, jobs.REPO / "dry_run/compute.py", "--check", cwd=tmp_path,
                      env={"DRY_RUN_CACHE": str(tmp_path)})
    assert result.code == 2
    assert re.fullmatch(r"dry_run: stand-ins for CANN cannot be kept: \S+ lies on a disk that lets no library be "
                        r"loaded \(mounted noexec\); set DRY_RUN_CACHE to a folder where you may write\n",
                        result.output)


def test_a_computed_plan_where_it_cannot_write(tmp_path):
    result = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/compute.py", "--check", cwd=tmp_path,
                      env={"DRY_RUN_CACHE": "/dev/null", "PYTHONSAFEPATH": "1"})
    assert result.code == 2
    assert re.fullmatch(r"dry_run: stand-ins for CANN cannot be kept: .*; set DRY_RUN_CACHE to a folder where you may "
                        r"write\n", result.output), result.output


@pytest.mark.parametrize(("name", "value", "sentence"), [
    ("COMPUTE_TIMEOUT", "soon", "COMPUTE_TIMEOUT is 'soon'; write a number of seconds above 0"),
    ("COMPUTE_TIMEOUT", "0.0", "COMPUTE_TIMEOUT is '0.0'; write a number of seconds above 0"),
    ("COMPUTE_KEEP", "no/folder", "COMPUTE_KEEP is 'no/folder', which is no folder where you may write")])
def test_variables_of_a_computed_plan(name, value, sentence, tmp_path):
    result = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/compute.py", "--check", cwd=tmp_path, env={name: value})
    assert result.code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_ctrl_c_upon_ctrl_c_in_a_dry_run(tmp_path):
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)\n")
    with jobs.Job(jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 3, "script.py", cwd=tmp_path) as job:
        job.wait_for("^compiling ranks 0-2")
        while job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        result = job.finish()
    assert job.process.returncode == -signal.SIGINT, "of it, so that a shell's loop around it ends"
    assert "dry_run: ended by SIGINT" in result.output
    assert "Traceback" not in result.output
    assert not result.left_over


def test_ctrl_c_before_anything_runs(tmp_path):
    """While it still reads its options: no traceback."""
    (tmp_path / "slow.py").write_text("import importlib.util, os, signal\n"
                                      "found = importlib.util.module_from_spec\n"
                                      "def interrupted(spec):\n"
                                      "    os.kill(os.getpid(), signal.SIGINT)\n"
                                      "    return found(spec)\n"
                                      "importlib.util.module_from_spec = interrupted\n")
    (tmp_path / "rank.py").write_text("")
    start = (f"import runpy, sys; sys.path.insert(0, {str(jobs.REPO / 'tools')!r}); import slow; "
             f"sys.argv = ['launch.py', '--lesson', {str(MNIST)!r}, '-n', '1', 'rank.py']; "
             "runpy.run_path(sys.path[0] + '/launch.py', run_name='__main__')")
    result = jobs.run(jobs.PYTHON, "-c", start, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert result.code == 130
    assert result.output == ""


# -------------------------------------------------------------------------------------------------------- kill -9
def started(job, program, timeout=60):
    """The process id of a program of a job, such as msrun, which tools/msrun.py may be."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for pid in jobs.marked(job.mark):
            words = jobs.command_of(pid).split(b"\0")
            names = {os.path.basename(word).decode() for word in words[:2]}
            if names & {program, f"{program}.py"} and b"--agent" not in words[:3]:
                return pid
        time.sleep(0.01)
    raise AssertionError(f"no {program} runs:\n{job.output()}")


@pytest.mark.parametrize("whole", [False, True])
def test_msrun_starts_the_ranks_without_all_of_mindspore(whole, tmp_path):
    """But with it where its modules lack something, as those of another version may."""
    shutil.copytree(jobs.REPO / "tools", tmp_path / "tools")
    msrun = (tmp_path / "tools/msrun.py").read_text()
    lacking = msrun.replace("    only_msrun()", "    sys.modules['mindspore'] = None")
    assert lacking != msrun
    (tmp_path / "tools/msrun.py").write_text(lacking if whole else msrun)
    (tmp_path / "rank.py").write_text("import os, time\nif os.environ['MS_ROLE'] == 'MS_WORKER':\n"
                                      "    print('ready', flush=True)\n    while not os.path.exists('seen'):\n"
                                      "        time.sleep(0.01)\n")
    with jobs.Job(jobs.PYTHON, tmp_path / "tools/launch.py", "--lesson", MNIST, "-n", 2, "--with", "msrun", "rank.py",
                  cwd=tmp_path) as job:
        job.wait_for("(?s)ready.*ready")
        loaded = Path(f"/proc/{started(job, 'msrun')}/maps").read_text()
        (tmp_path / "seen").touch()
        jobs.succeeded(job.finish(60))
    assert ("/mindspore/" in loaded) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_mpirun_is_not_said_to_be_a_lack_of_memory(number, tmp_path):
    (tmp_path / "rank.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "rank.py", cwd=tmp_path) as job:
        job.wait_for("(?s)ready.*ready")
        os.kill(started(job, "mpirun"), number)
        result = job.finish(60)
    assert result.code == 143, result.output
    assert "ranks.py: the ranks were ended by TERM, which did not come from this program\n" in result.output
    assert not result.left_over


@pytest.mark.parametrize(("launcher", "number"), [
    ("mpirun", signal.SIGHUP), ("mpirun", signal.SIGINT), ("mpirun", signal.SIGTERM), ("msrun", signal.SIGTERM),
    ("table", signal.SIGINT)])
def test_a_signal_to_an_agent_is_not_said_to_be_a_lack_of_memory(launcher, number, tmp_path):
    """Agents are what pgrep -f finds, too."""
    (tmp_path / "rank.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--with", launcher, "rank.py", cwd=tmp_path) as job:
        job.wait_for("(?s)ready.*ready")
        agent = jobs.parent_of(job.rank_process(1))
        assert b"--agent" in jobs.command_of(agent).split(b"\0")
        os.kill(agent, number)
        result = job.finish(60)
    assert result.code == 128 + number, result.output
    assert (f"ranks.py: the agent of rank 1 was the first that was ended by {number.name[3:]}, which did not come from "
            "this program\n") in result.output
    assert not result.left_over


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_ctrl_c_of_msrun_alone_is_not_said_to_be_a_lack_of_memory(number, tmp_path):
    (tmp_path / "rank.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--with", "msrun", "rank.py", cwd=tmp_path) as job:
        job.wait_for("(?s)ready.*ready")
        os.kill(started(job, "msrun"), number)
        result = job.finish(60)
    assert result.code == 128 + number, result.output
    assert (f"ranks.py: msrun was ended by signal {number}, not by this program; the ranks that it had started"
            in result.output)
    assert not result.left_over


def test_ctrl_c_of_msrun_where_the_shell_ignores_it(tmp_path):
    """As behind & in a script."""
    (tmp_path / "rank.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(3)\nprint('done')")
    with jobs.Job("bash", "-c", 'trap "" INT; exec "$@"', "bash", jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--with",
                  "msrun", "rank.py", cwd=tmp_path) as job:
        job.wait_for("(?s)ready.*ready")
        os.kill(started(job, "msrun"), signal.SIGINT)
        result = job.finish(60)
    assert (result.code, result.output.count("] done\n"), result.left_over) == (0, 2, []), result.output


def test_a_crash_of_msrun_itself_is_shown(tmp_path):
    """Its last words, not a signal: being told of one, one would look for who sent it."""
    (tmp_path / "rank.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--with", "msrun", "rank.py", cwd=tmp_path,
                  env={"PYTHONFAULTHANDLER": "1"}) as job:
        job.wait_for("(?s)ready.*ready")
        os.kill(started(job, "msrun"), signal.SIGSEGV)
        result = job.finish(60)
    assert result.code == 139
    assert not result.left_over
    assert re.search(r"^ranks\.py: the job failed, exit code 139\. The end of log_msrun/msrun\.log:\n(.*\n)*"
                     "Fatal Python error: Segmentation fault$", result.output, re.MULTILINE), result.output
    assert "was ended by signal" not in result.output


def test_no_log_is_at_fault_where_mpirun_is_killed(tmp_path):
    """It reads what ranks print, who print on."""
    script = "import time\nwhile True:\n    print('at work', flush=True)\n    time.sleep(0.001)\n"
    (tmp_path / "rank.py").write_text(script)
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--show", "first", "rank.py", cwd=tmp_path) as job:
        job.wait_for("at work")
        os.kill(started(job, "mpirun"), signal.SIGKILL)
        result = job.finish(60)
    assert result.code == 137
    assert "mpirun was ended by signal 9, not by this program; the ranks that it had started" in result.output
    assert "cannot be written" not in result.output
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["mpirun", "msrun", "table"])
def test_kill_9_of_all_that_is_called_python(launcher, tmp_path):
    """As by pkill -9 python: MindSpore's msrun follows the logs by processes of tail."""
    (tmp_path / "train.py").write_text("import time\nprint('at work', flush=True)\ntime.sleep(600)\n")
    with jobs.Job(jobs.PYTHON, MNIST / "ranks.py", "-n", 2, "--with", launcher, "train.py", cwd=tmp_path,
                  env={"DEVICE_TARGET": "CPU"}) as job:
        job.wait_for("(?s)at work.*at work")
        for pid in jobs.marked(job.mark):
            if b"python" in jobs.command_of(pid).split(b"\0")[0]:
                os.kill(pid, signal.SIGKILL)
        assert not job.finish(60).left_over


@pytest.mark.parametrize(("launcher", "killed", "when"), [
    ("run.sh", "mpirun", ""), ("run.sh", "mpirun", r"\[rank 1\] epoch: 0, step: 20"), ("run.sh", "launch.py", ""),
    ("run_msrun.sh", "msrun", ""), ("run_msrun.sh", "launch.py", r"\[rank 1\] epoch: 0, step: 20")])
def test_kill_9_of_what_starts_the_ranks(launcher, killed, when, mnist, tmp_path):
    with jobs.Job("bash", MNIST / launcher, mnist, 2, "--", "--epochs", 500, cwd=tmp_path) as job:
        segments = "none"
        if when:
            job.wait_for(when)
            if killed == "mpirun":
                [number] = (name[24:] for name in jobs.environment_of(job.rank_process(1))
                            if name.startswith(b"OMPI_MCA_ess_base_jobid="))
                segments = f"vader_segment.*.{int(number):x}.*"
                assert len(list(Path("/dev/shm").glob(segments))) == 2
        os.kill(started(job, killed), signal.SIGKILL)
        result = job.finish(60)
        deadline = time.monotonic() + jobs.soon()
        while jobs.marked(job.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not jobs.marked(job.mark), "nothing stays, soon"
    assert not list(Path("/dev/shm").glob(segments)), "nor the memory that ranks share"
    assert not re.search(r"line \d+:|Killed|Traceback", result.output)
    if killed == "launch.py":
        assert result.code == -signal.SIGKILL
    else:
        ranks = "0 1" if when else r"(none yet|0|1|0 1)"
        assert result.code == 137
        assert re.search(rf"^{launcher}: {killed} was ended by signal 9, not by this program; the ranks that it had "
                         rf"started are ended, too: {ranks}$", result.output, re.MULTILINE)
