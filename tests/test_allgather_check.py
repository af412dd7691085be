"""The AllGather check: right matrices on every rank, and an honest end when something is wrong."""

import os
import re
import signal
import sys

import forks
import jobs
import pytest

LESSON = jobs.REPO / "allgather_check"
MATRIX_4 = "[[0.]\n [1.]\n [2.]\n [3.]]\n"


def test_the_tutorials_command_gives_every_rank_the_matrix_and_rank_0_prints_it(tmp_path):
    result = jobs.succeeded(jobs.run("mpirun", "-n", 4, "--oversubscribe", "--allow-run-as-root", "--output-filename",
                                     "logs:nocopy", "python", LESSON / "allgather_check.py", cwd=tmp_path))
    assert result.seconds > 0
    for rank in range(4):
        output = (tmp_path / f"logs/1/rank.{rank}/stdout").read_text()
        assert output.startswith(MATRIX_4) == (rank == 0)
        assert re.search(rf"^rank {rank} of 4 on \S+, CPU \d+: AllGather ok, AllReduce ok, Broadcast ok$", output,
                         re.MULTILINE)


ON_A_CARD = f"""
import ctypes, sys
from mindspore._c_expression import RuntimeConf
sys.path.insert(0, {str(LESSON)!r})
import ranks
import mindspore as ms
asked = ms.get_context
ms.get_context = lambda name: "GPU" if name == "device_target" else asked(name)  # no more of a card is needed
waits = RuntimeConf.get_instance().is_launch_blocking
print("waits:", waits(), "joined", ranks.join(), "waits:", waits(), flush=True)
if "alone" in sys.argv:
    sys.exit()
ctypes.CDLL(ms.__path__[0] + "/lib/libmpi_collective.so")  # which init() loads there
mpi = ctypes.CDLL("libmpi.so.40")
mpi.MPI_Init(None, None)
size, world = ctypes.c_int(), ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")
mpi.MPI_Comm_size(ctypes.byref(world), ctypes.byref(size))
print("ranks of MPI:", size.value)
print("loaded:", *set(line.split()[-1] for line in open("/proc/self/maps") if "libmpi.so" in line), flush=True)
mpi.MPI_Finalize()
"""


def test_on_a_card_init_finds_the_open_mpi_of_pip_and_operators_wait_for_sums(tmp_path):
    """Without launch_blocking(), an operator behind an all-reduce reads numbers that are not there yet: on an H100, 2
    ranks of mnist_ddp, ResNet-50, own_model, and one of checkpoints gave wrong numbers; with it those of a CPU."""
    (tmp_path / "card.py").write_text(ON_A_CARD)
    result = jobs.succeeded(jobs.run("mpirun", "-n", 2, "--oversubscribe", "--allow-run-as-root", "--output-filename",
                                     "logs:nocopy", "python", "card.py", cwd=tmp_path))
    assert result.seconds > 0
    for rank in range(2):
        output = (tmp_path / f"logs/1/rank.{rank}/stdout").read_text()
        assert ("waits: False joined True waits: True\nranks of MPI: 2\n"
                f"loaded: {sys.prefix}/lib/libmpi.so.40\n") in output
    alone = jobs.succeeded(forks.run("card.py", "alone", cwd=tmp_path))  # no ranks, no sums
    assert alone.output == "waits: False joined False waits: False\n"
    (tmp_path / "cpu.py").write_text(ON_A_CARD.replace('"GPU" if', '"CPU" if'))
    on_cpu = jobs.succeeded(jobs.run("mpirun", "-n", 1, "--oversubscribe", "--allow-run-as-root", "python", "cpu.py",
                                     "alone", cwd=tmp_path))
    assert "waits: False joined True waits: False\n" in on_cpu.output


def test_msrun_starts_it_as_its_docstring_says(tmp_path):
    port = 20000 + os.getpid() % 10000
    result = jobs.succeeded(jobs.run("msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={port}",
                                     "--join=True", "--log_dir=logs", LESSON / "allgather_check.py", cwd=tmp_path,
                                     env={"GLOG_v": "3"}))
    assert result.ranks() == {0: 2, 1: 2}


def test_without_a_launcher_it_says_what_would_start_it(tmp_path):
    result = jobs.run(jobs.PYTHON, LESSON / "allgather_check.py", cwd=tmp_path)
    assert result.code == 2
    assert "mpirun -n 4 python allgather_check.py" in result.output


def test_wrong_results_end_with_exit_1_and_a_sentence(tmp_path):
    lesson = jobs.planted("allgather_check", tmp_path, "allgather_check.py", ("[[rank]]", "[[rank // 2]]"),
                          ("ops.Broadcast(0)", "ops.Broadcast(1)"))
    result = jobs.run("bash", lesson / "run.sh", 2, cwd=tmp_path)
    assert result.code == 1
    assert "AllGather WRONG, AllReduce ok, Broadcast WRONG" in result.output
    assert "A collective gave a wrong result" in result.output
    assert not result.left_over


def test_a_rank_that_never_comes_is_missed(tmp_path):
    environment = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(jobs.free_port()),
                   "GLOG_v": "3"}
    command = (jobs.PYTHON, LESSON / "allgather_check.py", "--timeout", 10)
    with jobs.Job(*command, cwd=tmp_path, env={**environment, "MS_ROLE": "MS_SCHED"}):
        result = jobs.run(*command, cwd=tmp_path, env={**environment, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0"})
    assert result.code == 1
    assert "The ranks could not talk to each other" in result.output
    assert "Look for the one that ended or never started" in result.output


def test_a_rank_killed_before_it_joins_ends_the_job(tmp_path):
    lesson = jobs.planted("allgather_check", tmp_path, "allgather_check.py", (
        "    init()\n", "    __import__('time').sleep(600 * int(os.environ['OMPI_COMM_WORLD_RANK']))\n    init()\n"))
    with jobs.Job("bash", lesson / "run.sh", 2, cwd=tmp_path) as job:
        os.kill(job.rank_process(1), signal.SIGKILL)
        result = job.finish(timeout=30)
    assert result.code == 137
    assert "rank 1 failed" in result.output
    assert not result.left_over


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["0"], "whole number from 1, not '0'"), (["x"], "not 'x'"), (["2", "3"], "unrecognized arguments: 3")])
def test_bad_input(arguments, sentence, tmp_path):
    result = jobs.run("bash", LESSON / "run.sh", *arguments, cwd=tmp_path)
    assert result.code == 2
    assert sentence in result.output
