"""The known errors: each that a machine without cards can bring about is brought about, and its entry must fit.

The message is what the real program printed, the hint what the real launcher printed under it.
"""

import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import forks
import jobs
import pytest

sys.path.insert(0, str(jobs.REPO / "tools"))
import known_errors

ENTRIES = known_errors.read()
AS_ROOT = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
MPIRUN = ("mpirun", "--allow-run-as-root")
ONE_PROCESS = '''
import os, sys, traceback
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.communication import init
from mindspore.train import LossMonitor, Model

def diverge():
    net = nn.Dense(2, 1)
    data = ds.NumpySlicesDataset((np.full((4, 2), 1e30, np.float32), np.zeros((4, 1), np.float32)), ["x", "y"])
    Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 1e30)).train(
        3, data.batch(2), callbacks=[LossMonitor()], dataset_sink_mode=False)

def load_with_full_caches():
    ms.save_checkpoint([{"name": "weight", "data": ms.Tensor(np.zeros(9000, np.float32))}], "one.ckpt")
    sysconf, os.sysconf = os.sysconf, lambda name: 1
    try:
        ms.load_checkpoint("one.ckpt")
    finally:
        os.sysconf = sysconf

def go_on_after_the_end():
    data = ds.NumpySlicesDataset([1, 2])
    data.set_init_step(5)
    for _ in data.create_tuple_iterator(num_epochs=2):
        pass

def train_longer_than_its_rates():
    net = nn.Dense(2, 1)
    data = ds.NumpySlicesDataset((np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)), ["x", "y"])
    Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), [0.1, 0.1])).train(
        2, data.batch(2), dataset_sink_mode=False)

open("data_batch_1.bin", "wb").write(bytes(100))
for name, provoke in {
    "no-ascend": lambda: ms.set_context(device_target="Ascend"),
    "no-gpu": lambda: ms.set_context(device_target="GPU"),
    "role-name": init,
    "module-missing": lambda: __import__("no_such_module"),
    "module-hidden": lambda: os.no_such_function(),
    "steps-resumed": go_on_after_the_end,
    "old-transforms": lambda: __import__("mindspore.dataset.vision.c_transforms"),
    "data-folder": lambda: list(ds.Cifar10Dataset("data/cifar")),
    "data-files": lambda: list(ds.Cifar10Dataset(".")),
    "checkpoint-memory": load_with_full_caches,
    "out-of-memory": lambda: ms.Tensor(np.zeros(1 << 50)),
    "loss-nan": diverge,
    "index-outside": train_longer_than_its_rates,
    "cpu-operator": lambda: ms.ops.NPUClearFloatStatus()(ms.Tensor([0.0] * 8)),
}.items():
    print("=== " + name, flush=True)
    try:
        provoke()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
'''
TWO_WORKERS = '''
import traceback
import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import init
init()
for name, mode, parallel_mode, net in (
        ("sync-batch-norm-on-cpu", ms.PYNATIVE_MODE, "data_parallel", lambda: nn.SyncBatchNorm(2)),
        ("cpu-collective", ms.GRAPH_MODE, "stand_alone", lambda: ms.ops.AllReduce("max")),
        ("parallel-on-cpu", ms.GRAPH_MODE, "semi_auto_parallel", lambda: nn.Dense(2, 2))):
    ms.set_context(mode=mode)
    ms.set_auto_parallel_context(parallel_mode=parallel_mode)
    print("=== " + name, flush=True)
    try:
        net()(ms.Tensor(np.zeros((1, 2), np.float32)))
    except Exception:
        traceback.print_exc()
'''
DYING_WORKER = """
import os
import mindspore.dataset as ds
data = ds.GeneratorDataset(range(64), "x", num_parallel_workers=2, python_multiprocessing=True)
print(len(list(data.map(lambda x: os.kill(os.getpid(), 9), num_parallel_workers=2, python_multiprocessing=True))))
"""
TWO_JOBS_ON_ONE_PORT = '''
import os, time, traceback
from mindspore.communication import init
for role in ("MS_SCHED", "MS_WORKER"):
    if os.fork() == 0:
        os.environ["MS_ROLE"] = role
        break
try:
    init()  # two processes are worker 0
    time.sleep(12)  # until the slower one is there
except RuntimeError:
    traceback.print_exc()
'''
# Ends of rank 1 in the MNIST lesson: a line of its script that is changed. The launcher must print the entry's hint.
END_RANK_1 = "import os\nif os.getenv('OMPI_COMM_WORLD_RANK') == '1':\n    os.kill(os.getpid(), {})\nimport argparse\n"
PLANTED = {
    **{name: ("import argparse\n", END_RANK_1.format(number))
       for name, number in {"divided": 8, "killed": 9, "crashed": 11, "terminated": 15}.items()},
    "rank-gone": ("if step == args.steps:", "if step == args.steps - 2 * rank:"),
}
IN_ONE_PROCESS = set(re.findall(r'^    "([\w-]+)":', ONE_PROCESS, re.MULTILINE))
IN_TWO_WORKERS = set(re.findall(r'\("([\w-]+)", ms', TWO_WORKERS))
BY_COMMAND = {"mpirun-as-root", "mpirun-daemons", "mpi-on-cpu", "module-not-found", "local-worker-number",
              "data-worker"}
BY_A_TEST = {"host-name", "mpirun-slots", "mpi-unreachable", "disk-full", "shared-memory", "port-in-use", "port-shared",
             "no-ssh", "ranks-missing", "runs-anew", "mpirun-room", "number-of-ranks", "recursion", "dump-config",
             "keyboard", "cut-in-two-ways", "gradient-of-a-gradient"}
PROVOKED = IN_ONE_PROCESS | IN_TWO_WORKERS | BY_COMMAND | BY_A_TEST | set(PLANTED)


def entry(name):
    return next(one for one in ENTRIES if one["name"] == name)


def check_shown_first(name, output):
    """The entry must be the first that fits what was printed."""
    found = known_errors.find(output.splitlines(), ENTRIES)
    assert found, f"no entry fits; {name} should:\n{output}"
    assert found[0][0]["name"] == name, f"{found[0][0]['name']} is shown instead of {name} for:\n{output}"


def check_hint(name, output):
    assert f"hint: {entry(name)['means']}: {entry(name)['do']}\n" in output, output


# ------------------------------------------------------------------------------------------- the file and the pages
def test_entries_are_whole_and_messages_fit_their_own_pattern():
    assert len(ENTRIES) > 30
    assert len({one["name"] for one in ENTRIES}) == len(ENTRIES)
    for one in ENTRIES:
        assert one["verified"] in known_errors.VERIFIED[""], one["name"]
        for field in ("message", "means", "do", "means_cn", "do_cn") + (() if "pattern" in one else ("message_cn",)):
            assert one[field] == one[field].strip().rstrip(".") or field == "message", f"{field} of {one['name']}"
            assert field == "message" or bool(re.search("[\u4e00-\u9fff]", one[field])) == field.endswith("_cn")
        if "pattern" in one:
            check_shown_first(one["name"], one["message"])


def test_what_is_called_tested_is_provoked_here():
    assert {one["name"] for one in ENTRIES if one["verified"] == "test"} == PROVOKED


@pytest.mark.parametrize("language", known_errors.PAGES)
def test_the_troubleshooting_pages_are_fresh(language):
    page = known_errors.PAGES[language].read_text(encoding="utf-8")
    assert page == known_errors.page(language), "run: python tools/doctor.py troubleshooting"
    assert page.count("\n| ") == len(ENTRIES) + 2


def hint(*arguments, text=None):
    """What the program prints."""
    done = subprocess.run([sys.executable, known_errors.__file__, "hint", *map(str, arguments)], capture_output=True,
                          text=True, input=text, check=True)
    assert done.stderr == ""
    return done.stdout


def test_the_program_prints_the_first_entry_that_fits_the_end_of_a_log(tmp_path):
    slots, killed = (f"{entry(name)['means']}: {entry(name)['do']}\n" for name in ("mpirun-slots", "killed"))
    log = tmp_path / "a log"
    log.write_bytes(b"\xff\nThere are NOT ENOUGH SLOTS AVAILABLE\n" + 198 * b"line\n")
    assert hint(log, 137) == slots, "upper and lower case alike, and before what the exit code says"
    assert hint("-", 1, text=log.read_text(errors="replace")) == slots
    log.write_bytes(b"not enough slots available\n" + 200 * b"line\n")
    assert hint(log, 137) == killed, "only the last 200 lines count"
    assert hint(log, 1) == ""
    assert hint(tmp_path / "no log", 137) == killed
    assert jobs.run(jobs.PYTHON, known_errors.__file__, "hint", log, cwd=tmp_path).code == 2


EARLIER = "skipped: No module named 'curves'\n"
MINDSPORES = "/usr/lib/python3/site-packages/mindspore/nn.py"
TRACE = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in <module>\n    step()\n'

BLOCKED = "BlockingIOError: [Errno 11] Resource temporarily unavailable"


@pytest.mark.parametrize(("lines", "name"), [
    ("No module named 'curves'; none are drawn\nValueError: 4 words, 5 wanted", None),
    ("MemoryError: handled\nKeyError: 'rates'", None),
    ("ConnectionRefusedError: [Errno 111] Connection refused\n"
     "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", None),
    ("urllib.error.URLError: <urlopen error [Errno 101] Network is unreachable>", None),
    ("OSError: [Errno 98] Address already in use", None),
    ("OSError: [Errno 98] Address already in use (while attempting to bind on address ('127.0.0.1', 8080))", None),
    ("[ERROR] Failed to call bind: Address already in use\nRuntimeError: Failed to init", "port-in-use"),
    ("KeyError: 'rates'\nConnectionRefusedError: [Errno 111] Connection refused", "rank-gone"),
    ("ModuleNotFoundError: No module named 'curves'", "module-missing"),
    (f'{TRACE}  File "/usr/lib/python3.11/socket.py", line 9, in connect\nConnectionRefusedError: [Errno 111] '
     "Connection refused", None),
    (f'{TRACE}  File "/home/me/ranks.py", line 9, in leave\nConnectionResetError: [Errno 104] Connection reset by peer',
     "rank-gone"),
    (f"{EARLIER}{TRACE}StopIteration", None),
    (f"{EARLIER}{TRACE}lesson.Stop: 3 epochs\nin all\n\nand closed", None),
    (f"{EARLIER}{TRACE}RuntimeError: of MindSpore?", "module-missing"),
    (f"{EARLIER}{TRACE.replace('/home/me/train.py', MINDSPORES)}ValueError: of\nMindSpore", "module-missing"),
    (f"{EARLIER}{TRACE}MemoryError\n\nThe above exception was the direct cause of the following exception:\n\n"
     f"{TRACE}StepError: it failed", "module-missing"),
    (f"{EARLIER}{TRACE}AssertionError\nprocess rank 1 exited on signal 9 (Killed).", "killed"),
    (f"{EARLIER}{TRACE}AssertionError\n\nDuring handling of the above exception, another exception occurred:\n\n"
     f"{TRACE}Stop", "module-missing"),
    (f"{EARLIER}{TRACE.replace('/home/me/train.py', MINDSPORES)}  File \"/usr/lib/python3.11/inspect.py\", line 9\n"
     "TypeError: a\nb", "module-missing"),
    (f"{EARLIER}RuntimeError: why\nException ignored in atexit callback: <function f>\n{TRACE}KeyError: 1",
     "module-missing"),
    (TRACE.replace("step()", "fcntl.flock(file, 6)") + BLOCKED, None), (TRACE.replace("step()", "os.fork()") + BLOCKED,
                                                                        "processes"),
    ("exit code 137 of my child", None),
    ("node1.cluster: ssh: connect to host node2 port 22: No route to host", "network-unreachable"),
    ("train.py: [ERROR] Connection refused", "rank-gone"),
    ("TypeError: Trainer.prepare() takes 1 positional argument but 2 were given", None),
    ("redis.exceptions.ConnectionError: Error 111 connecting to db:6379. Connection refused.", None),
    ("requests.exceptions.ConnectTimeout: Network is unreachable", None),
    ("ValueError: not enough slots in the replay buffer", None)])
def test_an_error_of_the_scripts_own_gets_no_hint_about_what_came_before(lines, name):
    assert hint("-", 1, text=lines + "\n") == (f"{entry(name)['means']}: {entry(name)['do']}\n" if name else "")


# ---------------------------------------------------------------------------------------------------- for real
def test_errors_of_one_process(tmp_path):
    output = forks.run("-c", ONE_PROCESS, cwd=tmp_path).output
    parts = dict(re.findall(r"^=== ([\w-]+)\n(.*?)(?=^===|\Z)", output, re.MULTILINE | re.DOTALL))
    assert parts.keys() == IN_ONE_PROCESS
    for name in ("old-transforms", "checkpoint-memory"):  # MindSpore 2.7 still has them, and does not look at memory
        if not parts[name]:
            del parts[name]
    for name, printed in parts.items():
        check_shown_first(name, printed)


def test_errors_of_two_workers(tmp_path):
    (tmp_path / "script.py").write_text(TWO_WORKERS)
    jobs.run("msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={jobs.free_port()}", "--join=True",
             "--log_dir=logs", "script.py", cwd=tmp_path, env={"GLOG_v": "3"})
    log = (tmp_path / "logs" / "worker_1.log").read_text()
    parts = dict(re.findall(r"^=== ([\w-]+)\n(.*?)(?=^===|\Z)", log, re.MULTILINE | re.DOTALL))
    assert parts.keys() == IN_TWO_WORKERS, log
    for name, printed in parts.items():
        check_shown_first(name, printed)


@pytest.mark.parametrize(("name", "command"), [
    ("mpirun-as-root", [*AS_ROOT, "mpirun", "-n", "1", "true"]),
    ("mpirun-daemons", [*MPIRUN, "--mca", "plm_rsh_agent", "false", "-H", "host.invalid", "-n", "1", "true"]),
    ("mpi-on-cpu", [*MPIRUN, "-n", "1", "python", "-c", "import mindspore as ms; ms.set_context(device_target='CPU'); "
                    "ms.communication.init()"]),
    ("module-not-found", [*MPIRUN, "-n", "1", "python", "-S", "-c", "import mindspore"]),
    ("data-worker", ["python", "-c", DYING_WORKER]),
    ("local-worker-number", ["msrun", "--worker_num=2", "--master_port={port}", "--join=True", "script.py"]),
])
def test_errors_of_commands(name, command, tmp_path):
    if name == "mpi-on-cpu" and not jobs.run(jobs.PYTHON, "-c", "import ctypes; ctypes.CDLL('libmpi.so.40')",
                                             cwd=tmp_path).code:
        pytest.skip("every program of this machine finds libmpi.so.40, so MindSpore does, too")
    command = [word.format(port=jobs.free_port()) for word in command]
    result = jobs.run(*command, cwd=tmp_path, timeout=60)
    assert result.code != 0
    check_shown_first(name, result.output)


def test_a_scheduler_whose_port_is_taken_and_one_whose_ranks_do_not_come(tmp_path):
    scheduler = ("-c", "from mindspore.communication import init; init()")
    environment = {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_TOPO_TIMEOUT": "3"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = {**environment, "MS_SCHED_PORT": str(server.getsockname()[1])}
        check_shown_first("port-in-use", forks.run(*scheduler, cwd=tmp_path, env=taken).output)
    waiting = {**environment, "MS_SCHED_PORT": str(jobs.free_port())}
    check_shown_first("ranks-missing", forks.run(*scheduler, cwd=tmp_path, env=waiting).output)


def test_two_jobs_with_one_port(tmp_path):
    result = jobs.run(jobs.PYTHON, "-c", TWO_JOBS_ON_ONE_PORT, cwd=tmp_path, env={
        "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0", "MS_WORKER_NUM": "1", "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(jobs.free_port()), "MS_TOPO_TIMEOUT": "15", "GLOG_v": "3"})
    check_shown_first("port-shared", result.output)


@pytest.mark.parametrize("name", PLANTED)
def test_the_launcher_says_why_rank_1_ended(name, mnist, tmp_path):
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", PLANTED[name])
    result = jobs.run("bash", lesson / "run.sh", mnist, 2, "--", "--epochs", 1, "--steps", 6, cwd=tmp_path,
                      env={"MS_CPU_COMM_OP_TIMEOUT": "3"})
    assert result.code not in (0, 2), result.output
    assert not result.left_over
    check_hint(name, result.output)


@pytest.mark.skipif(version("mindspore")[:4] in ("2.7.", "2.8.", "2.9."), reason=(
    "MindSpore up to 2.9 does not read MS_CPU_COMM_OP_TIMEOUT"))
def test_a_rank_that_comes_too_late_to_a_collective(tmp_path):
    lesson = jobs.planted("allgather_check", tmp_path, "allgather_check.py", (
        "outputs = ", "__import__('time').sleep(9 * rank)\n    outputs = "))
    result = jobs.run("bash", lesson / "run.sh", 2, cwd=tmp_path, env={"MS_CPU_COMM_OP_TIMEOUT": "3"})
    assert result.code not in (0, 2), result.output
    assert "CollectiveWait" in result.output
    check_hint("rank-gone", result.output)


def test_a_lesson_that_was_copied_out_says_where_hints_come_from(mnist, tmp_path):
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", PLANTED["killed"])
    (tmp_path / "tools").unlink()
    result = jobs.run("bash", lesson / "run.sh", mnist, 2, cwd=tmp_path)
    assert result.code == 137, result.output
    assert re.search("^starting 2 ranks plainly: the folder tools/.* explain why$", result.output, re.MULTILINE)
    assert "hint:" not in result.output


def test_the_launcher_says_that_slots_are_missing(mnist, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one'; echo 'GPU 1: two'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    result = jobs.run("bash", jobs.REPO / "mnist_ddp" / "run.sh", mnist, 2, cwd=tmp_path, env={
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hosts"), "DEVICE_TARGET": "GPU",
        "PATH": f"{tmp_path}:{os.path.dirname(jobs.PYTHON)}:{os.environ['PATH']}"})
    assert result.code == 1
    check_shown_first("mpirun-slots", result.output)
    slots = entry("mpirun-slots")
    assert (f"hint: {slots['means']}: {slots['do']}; or: no rank was started, and variables here change what mpirun "
            "does: unset OMPI_MCA_orte_default_hostfile\n") in result.output


@pytest.mark.parametrize(("name", "variable"), [
    ("recursion", {"MS_JIT": "0"}), ("dump-config", {"MINDSPORE_DUMP_CONFIG": "/nowhere/dump.json"})])
def test_a_variable_of_the_shell_with_which_mindspore_fails(name, variable, mnist, tmp_path):
    result = jobs.run("bash", jobs.REPO / "mnist_ddp" / "run.sh", mnist, 2, cwd=tmp_path, env=variable)
    assert result.code == 1, result.output
    check_hint(name, result.output)


SHARED = '''
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
'''


@pytest.mark.parametrize(("value", "words"), [("tcp", "MPI_INIT has failed"), ("nonsense", "Component: nonsense")])
@pytest.mark.parametrize("first", ["", "print('begins', flush=True)"])
def test_a_setting_of_open_mpi_with_which_no_rank_says_why(first, value, words, tmp_path):
    pytest.importorskip("mpi4py", exc_type=ImportError)
    (tmp_path / "script.py").write_text(first + SHARED)
    for _ in range(20):
        result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 2, "script.py", cwd=tmp_path,
                          env={"OMPI_MCA_btl": value, "DEVICE_TARGET": "CPU"})
        assert result.code == 1, result.output
        if words in result.output:  # Open MPI now and then loses it, or is late with it
            break
    assert re.search(r"rank \d failed, exit code 1. The end of log_output/mpirun.log:\n", result.output)
    check_shown_first("mpi-unreachable", result.output)
    check_hint("mpi-unreachable", result.output)


def test_a_setting_of_open_mpi_that_only_warns_does_not_hide_why_a_rank_failed(tmp_path):
    pytest.importorskip("mpi4py", exc_type=ImportError)
    (tmp_path / "script.py").write_text(SHARED + "raise ValueError('my own fault')\n")
    for _ in range(20):
        result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 2, "script.py", cwd=tmp_path,
                          env={"OMPI_MCA_mtl": "nonsense", "DEVICE_TARGET": "CPU"})
        log = (tmp_path / "log_output/mpirun.log").read_text()
        if "Framework: mtl" in log and "show_help.c" not in log:  # now and then Open MPI's own message harms it
            break
    assert result.code == 1, result.output
    assert "Framework: mtl" in log
    assert "ValueError: my own fault" in result.output
    assert "log_output/mpirun.log" not in result.output


def test_a_way_to_send_that_this_open_mpi_has_not(tmp_path):
    pytest.importorskip("mpi4py", exc_type=ImportError)
    (tmp_path / "script.py").write_text(SHARED)
    result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 2, "script.py", cwd=tmp_path,
                      env={"OMPI_MCA_pml": "ucx", "DEVICE_TARGET": "CPU"})
    assert result.code == 1
    check_hint("mpi-unreachable", result.output)


def test_a_file_beside_the_script_that_hides_a_package(tmp_path):
    (tmp_path / "logging.py").write_text("")
    (tmp_path / "script.py").write_text("import logging.handlers\n")
    result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 1, "--with", "table", "script.py",
                      cwd=tmp_path, env={"DEVICE_TARGET": "CPU"})
    check_hint("module-hidden", result.output)


@pytest.mark.parametrize("name", ["selectors", "struct", "types"])  # ranks.py needs them itself
def test_a_file_beside_the_script_that_hides_a_module_of_python(name, mnist, tmp_path):
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py")
    (lesson / f"{name}.py").write_text("")
    result = jobs.run("bash", lesson / "run.sh", mnist, 2, cwd=tmp_path)
    assert result.code == 2 - (name == "types"), result.output  # the check of the options may fail already
    check_hint("module-hidden", result.output)


def test_a_folder_on_the_path_that_hides_mindspore(tmp_path):
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text("")
    (tmp_path / "script.py").write_text("import mindspore.dataset\n")
    result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 1, "script.py", cwd=tmp_path,
                      env={"DEVICE_TARGET": "CPU", "PYTHONPATH": str(tmp_path)})
    check_hint("module-hidden", result.output)


@pytest.mark.parametrize("name", ["OMPI_MCA_orte_default_hostfile", "OMPI_MCA_rmaps_base_mapping_policy",
                                  "OMPI_MCA_plm", "PMIX_MCA_psec", "PMIX_MCA_ptl"])
def test_a_setting_of_open_mpi_with_which_no_rank_is_started(name, tmp_path):
    (tmp_path / "script.py").write_text("import ranks\nranks.join()\n")
    value = str(tmp_path) if "file" in name else "usock" if "ptl" in name else "ppr:1:node"
    result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 2, "script.py", cwd=tmp_path, env={
        name: value, "DEVICE_TARGET": "CPU", "PYTHONPATH": str(jobs.REPO / "own_model")})
    assert result.code, result.output
    what = "MPI was not" if "ptl" in name else "no rank was"
    assert f"hint: {what} started, and variables here change what mpirun does: unset {name}\n" in result.output


def test_a_number_of_ranks_for_which_mindspore_has_no_plan(cifar10, tmp_path):
    result = jobs.run("bash", jobs.REPO / "run.sh", cifar10, 3, "--", "--steps", 2, "--image-size", 32, "--test-images",
                      0, *jobs.SHALLOW, cwd=tmp_path, env={"DEVICE_TARGET": "CPU"})
    assert result.code == 1
    check_shown_first("number-of-ranks", result.output)
    check_hint("number-of-ranks", result.output)


UNPLANNED = """import sys
import numpy as np, mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
ms.set_context(mode=ms.GRAPH_MODE)
ms.communication.init()
in_two_ways = sys.argv[1] == "cut-in-two-ways"
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel" if in_two_ways else "auto_parallel",
                             dataset_strategy="full_batch")
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w, self.matmul = Parameter(np.ones((4, 4), np.float32), name="w"), ops.MatMul().shard(((1, 1), (1, 2)))
    def construct(self, x):
        return self.matmul(x, self.w).sum()
net = Net()
gradient = ms.grad(net)
def loss(x):
    return net(x) + (net.w * net.w).sum() if in_two_ways else (gradient(x) ** 2).sum()
optimizer = nn.SGD(net.trainable_params(), 0.1)
differentiated = ms.value_and_grad(loss, None, optimizer.parameters)
@ms.jit
def step(x):
    value, gradients = differentiated(x)
    return ops.depend(value, optimizer(gradients))
step(Tensor(np.ones((8, 4), np.float32)))
"""


@pytest.mark.parametrize("name", ["cut-in-two-ways", "gradient-of-a-gradient"])
def test_what_mindspore_cannot_plan(name, tmp_path):
    (tmp_path / "unplanned.py").write_text(UNPLANNED)
    result = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", "--rank-size", 2, "unplanned.py", name,
                      cwd=tmp_path)
    assert result.code == 1
    check_shown_first(name, result.output)


def test_the_launcher_says_that_the_disk_is_full(mnist, tmp_path):
    mount = [*jobs.UNSHARE, "--mount"]
    (tmp_path / "small").mkdir()
    small = 'mount -t tmpfs -o size=64k tmpfs small && exec "$@"'
    if jobs.run(*mount, "sh", "-c", small, "sh", "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    result = jobs.run(*mount, "sh", "-c", small, "sh", "bash", jobs.REPO / "mnist_ddp" / "run.sh", mnist, 2, "--",
                      "--epochs", 1, "--steps", 2, "--ckpt-dir", tmp_path / "small", cwd=tmp_path)
    assert result.code == 1, result.output
    check_hint("disk-full", result.output)
    assert "No space left on device: line " in result.output
    assert "Traceback" not in result.output


def test_what_a_full_disk_has_cut_from_a_log_is_looked_at_all_the_same(tmp_path):
    (tmp_path / "log").write_text("epoch: 1\n")
    assert known_errors.hint(tmp_path / "log", 1, ["OSError: [Errno 28] No space left on device"]) == (
        f"{entry('disk-full')['means']}: {entry('disk-full')['do']}")


@pytest.mark.parametrize("line", ["input('learning rate? ')", "breakpoint()"])
def test_a_rank_that_asks_at_the_keyboard(line, tmp_path):
    (tmp_path / "rank.py").write_text(f"{line}\nprint('on')\n")
    result = jobs.run(jobs.PYTHON, jobs.REPO / "mnist_ddp" / "ranks.py", "-n", 2, "rank.py", cwd=tmp_path)
    assert result.code == 1
    check_shown_first("keyboard", result.output)
    check_hint("keyboard", result.output)


def test_open_mpi_on_a_host_whose_name_it_cannot_read(tmp_path):
    """By hand: the launchers set a variable for it."""
    rename = "import os, socket, sys; socket.sethostname('my_host'); os.execvp(sys.argv[1], sys.argv[1:])"
    named = (*jobs.UNSHARE, "--uts", jobs.PYTHON, "-c", rename)
    if jobs.run(*named, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users make a namespace of their own")
    check_shown_first("host-name", jobs.run(*named, *MPIRUN, "-n", 1, "true", cwd=tmp_path).output)
    naive = jobs.run(*named, *MPIRUN, "-n", 1, "true", cwd=tmp_path, env={"OMPI_MCA_regx": "naive"})
    assert naive.code == 0, naive.output


def without_ssh(folder):
    """A PATH with all programs but ssh and rsh; those of this Python stay where they are."""
    (folder / "bin").mkdir()
    programs = {program.name: program for place in reversed(os.get_exec_path()) for program in Path(place).glob("*")}
    for name in programs.keys() - {"ssh", "rsh"}:
        (folder / "bin" / name).symlink_to(programs[name])
    return f"{Path(jobs.PYTHON).parent}:{folder / 'bin'}"


def test_open_mpi_where_there_is_no_ssh(tmp_path):
    """By hand: the launchers set a variable for it."""
    path = without_ssh(tmp_path)
    check_shown_first("no-ssh", jobs.run(*MPIRUN, "-n", 1, "true", cwd=tmp_path, env={"PATH": path}).output)
    alone = jobs.run(*MPIRUN, "-n", 1, "true", cwd=tmp_path, env={"PATH": path, "OMPI_MCA_plm": "isolated"})
    assert alone.code == 0, alone.output
    (tmp_path / "rank.py").write_text("print('ready')")
    for start in ((jobs.PYTHON, jobs.REPO / "mnist_ddp/ranks.py"), (jobs.PYTHON, jobs.REPO / "dry_run/compute.py")):
        result = jobs.run(*start, "-n", 2, "rank.py", cwd=tmp_path, env={"PATH": path})
        assert result.output.count("ready\n") == 2, result.output
    looked = jobs.run(jobs.PYTHON, jobs.REPO / "tools/doctor.py", cwd=tmp_path, env={"PATH": path})
    assert "Open MPI wants ssh, on one machine, too, and there is none" in looked.output


def test_open_mpi_without_room_in_dev_shm(tmp_path):
    pytest.importorskip("mpi4py", exc_type=ImportError)
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"']
    if jobs.run(*mount, "sh", "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    for _ in range(20):
        result = jobs.run(*mount, "sh", *MPIRUN, "--oversubscribe", "-n", 2, "python", "-c", SHARED, cwd=tmp_path)
        if "not enough space for" in result.output:  # now and then Open MPI loses its own message
            break
    check_shown_first("shared-memory", result.output)


def test_open_mpi_without_room_for_its_own_files(tmp_path):
    """By hand: the launchers look before they start."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    mount = [*jobs.UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs small && exec "$@"', "sh"]
    (tmp_path / "small").mkdir()
    if jobs.run(*mount, "true", cwd=tmp_path).code:
        pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
    result = jobs.run(*mount, *MPIRUN, "-n", 1, "python", "-c", "from mpi4py import MPI", cwd=tmp_path,
                      env={"TMPDIR": str(tmp_path / "small")})
    assert result.code, result.output
    check_shown_first("mpirun-room", result.output)


def test_a_large_log_is_looked_through_at_both_ends_only(tmp_path):
    """Looked through whole, one of 100 MB takes a minute."""
    log, step = tmp_path / "log", "loss is 1.25\n"
    log.write_text("attempt to run as root\n" + 20_000 * step + "not enough slots available\n" + 20_000 * step +
                   "Address already in use\n")
    found = jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "tools/doctor.py", "explain", log, cwd=tmp_path))
    assert re.findall(r"^\S+:(\d+): (.+)$", found.output, re.MULTILINE) == [
        ("1", "attempt to run as root"), ("40003", "Address already in use")]
    log.write_text(20_000 * step + "not enough slots available\n" + 20_000 * step)
    found = jobs.run(jobs.PYTHON, jobs.REPO / "tools/doctor.py", "explain", log, cwd=tmp_path)
    assert found.code == 1
    assert "no message that is known here, in the first and last 10000 of 40001 lines" in found.output


MUCH = '''
import resource
import numpy as np
import mindspore as ms
from mindspore import nn, ops

class Net(nn.Cell):
    def construct(self, x):
        return ops.tile(x, (64, 1)) * 2.0

ms.set_context(mode=ms.GRAPH_MODE)
x = ms.Tensor(np.ones((8, 1 << 20), np.float32))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1500 << 20),) * 2)
print(Net()(x).asnumpy().sum())
'''


def test_memory_that_runs_out_is_answered_with_what_was_asked_for(tmp_path):
    """A graph that needs 2 GB, where 1.5 may be had: MindSpore's own message, with the launcher's hint under it."""
    (tmp_path / "script.py").write_text(MUCH)
    result = jobs.run(jobs.PYTHON, jobs.REPO / "own_model/ranks.py", "-n", 1, tmp_path / "script.py", cwd=tmp_path,
                      env={"DEVICE_TARGET": "CPU"})
    assert result.code == 1, result.output
    assert "Memory isn't enough and alloc failed, kernel name: " in result.output
    assert ("ranks.py: hint: memory ran out, when 2.15 GB more were asked for: a smaller --batch-size or --image-size"
            in result.output)


@pytest.mark.parametrize(("name", "line", "asked"), [
    ("card-out-of-memory", "Device(id:3) memory isn't enough and alloc failed, kernel name: X, alloc size: 301990400B",
     "302 MB"),
    ("card-out-of-memory", "Framework Error Message: Out of Memory!!! Request memory size: 32212254720B", "32.2 GB"),
    ("card-out-of-memory", "Memory not enough: Current free memory size[5] is smaller than required size[1073741824].",
     "1.07 GB"),
    ("card-out-of-memory", "TotalUsed : 5 and plus alloc size : 100555779072 is more than total mem size : 6107955.",
     "101 GB"),
    ("card-out-of-memory", "cudaMalloc failed, ret[2], out of memory", ""),
    ("out-of-memory", "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.00 PiB for an array", "9.01 PB"),
    ("out-of-memory", "terminate called after throwing an instance of 'std::bad_alloc'", ""),
    ("out-of-memory", "OSError: [Errno 12] Cannot allocate memory", ""),
])
def test_memory_messages_in_any_case_of_letters(name, line, asked, tmp_path):
    for text in (line, line.upper(), line.lower()):
        check_shown_first(name, text)
        said = known_errors.hint(tmp_path / "none", 1, [text])
        how_much = f", when {asked} more were asked for: " if asked else ": "
        assert said.startswith(entry(name)["means"] + how_much), said


# ------------------------------------------------------------------------------------------------- planted bugs
def test_a_pattern_that_does_not_fit_and_a_page_that_is_stale_are_found(tmp_path, monkeypatch):
    file = tmp_path / "known_errors.txt"
    file.write_text(known_errors.FILE.read_text(encoding="utf-8").replace("attempt to run as root\n", "never\n", 1))
    monkeypatch.setattr(sys.modules[__name__], "ENTRIES", known_errors.read(file))
    with pytest.raises(AssertionError, match="no entry fits"):
        check_shown_first("mpirun-as-root", "mpirun has detected an attempt to run as root.")
