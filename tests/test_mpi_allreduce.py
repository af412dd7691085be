"""The all-reduce by MPI: right sums, all else as MCCL does it, and MCCL wherever it cannot be used."""

import os
import re
import shutil
import sys

import jobs
import pytest

TOOL = jobs.REPO / "tools/mpi_allreduce.py"
MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0), "-n")
BUILD = "import sys; sys.path.insert(0, {!r}); import mpi_allreduce; print(mpi_allreduce.build())"


def copied(folder, *change):
    """A lesson's ranks.py beside a copy of the tool, with a change of its C code (old, new); returns the lesson."""
    for name in ("tools", "lesson"):
        (folder / name).mkdir()
    shutil.copy(jobs.REPO / "mnist_ddp/ranks.py", folder / "lesson")
    for name in ("in_rank.py", "ending.py", "linux.py", "loss_lines.py", "binding.py", "convolutions.py", "native.py",
                 "linker_table.h", "find_others.py", "find_others.c", "reducers.py", "alike.py", "wide_numbers.py",
                 TOOL.name):
        shutil.copy(jobs.REPO / "tools" / name, folder / "tools")
    text = TOOL.with_suffix(".c").read_text()
    if change:
        assert text.count(change[0]) == 1
        text = text.replace(*change)
    (folder / "tools" / TOOL.with_suffix(".c").name).write_text(text)
    return folder / "lesson"


def all_reduces(lesson, *options, ranks=3, env=None):
    return jobs.run(*MPIRUN, ranks, jobs.PYTHON, jobs.REPO / "tests/all_reduces.py", lesson, *options,
                    cwd=lesson.parent, env={"MS_CPU_COMM_OP_TIMEOUT": "60", **(env or {})})


def sums(result):
    """What each rank said of the sums by MPI."""
    return re.findall(r"sums by MPI: (none|-?\d+)", result.output)  # mpirun may mix lines


def test_all_kinds_are_right_and_the_sums_of_float32_are_mpis(tmp_path):
    result = jobs.succeeded(all_reduces(copied(tmp_path), "--no-leave"))
    assert "WRONG" not in result.output
    assert result.output.count("right") == 26 + 26 + 25  # rank 2 is not in one of the groups
    assert len(sums(result)) == 3
    assert min(map(int, sums(result))) >= 5
    assert "improperly" not in result.output


def test_a_planted_bug_is_found(tmp_path):
    lesson = copied(tmp_path, "(count, patience)", "(count + rank % 2, patience)")
    alone = {"MS_CPU_COMM_OP_TIMEOUT": "10"}  # so long a rank waits for one that went another way
    assert "all-reduce (MPI) of 1 numbers, another rank in one of 2" in all_reduces(lesson, env=alone).output


def test_mccl_goes_on_where_the_first_sum_differs(tmp_path):
    result = jobs.succeeded(all_reduces(copied(tmp_path, "MPI_FLOAT, MPI_SUM", "MPI_FLOAT, MPI_MAX"), ranks=2))
    assert "WRONG" not in result.output
    assert sums(result) == ["-1", "-1"]
    for rank in range(2):
        assert f"the first sum of rank {rank} by MindSpore and that by MPI differ: one" in result.output


def test_mccl_goes_on_without_a_compiler(tmp_path):
    result = jobs.succeeded(all_reduces(copied(tmp_path), ranks=2, env={"OMPI_CC": "/no/compiler"}))
    assert "WRONG" not in result.output
    assert sums(result) == ["none", "none"]


SET_UP = """
import os, sys
sys.path.insert(0, sys.argv[1])
import mpi_allreduce
if "on two hosts" in sys.argv:
    os.environ.update(OMPI_COMM_WORLD_LOCAL_SIZE="1", MS_SCHED_HOST="127.0.0.1")
mpi_allreduce.set_up()
print("loaded", "/mpi_allreduce" in open("/proc/self/maps").read(), os.getenv("OMPI_MCA_btl_tcp_if_include"))
"""


@pytest.mark.parametrize("wanted", ["MCCL", "MPI"])
def test_mccl_goes_on_where_it_is_wanted(wanted, tmp_path):
    result = jobs.succeeded(jobs.run(*MPIRUN, 2, jobs.PYTHON, "-c", SET_UP, copied(tmp_path).parent / "tools",
                                     cwd=tmp_path, env={"ALL_REDUCE": wanted}))
    assert result.output.count(f"loaded {wanted == 'MPI'} None") == 2, result.output


def test_ranks_that_build_at_once_get_one_whole_library(tmp_path):
    tools = copied(tmp_path).parent / "tools"
    result = jobs.succeeded(jobs.run(*MPIRUN, 6, jobs.PYTHON, "-c", BUILD.format(str(tools)), cwd=tmp_path))
    told = set(re.findall(rf"{re.escape(str(tools))}/__pycache__/\w+-\w+\.so", result.output))  # mpirun may mix lines
    assert told == {str(file) for file in (tools / "__pycache__").iterdir() if file.suffix != ".pyc"}
    assert result.output.count(".so") == 6


def test_no_library_where_it_cannot_be_written_or_no_mpirun_started_the_process(tmp_path):
    tools = copied(tmp_path).parent / "tools"
    (tools / "__pycache__").write_text("a file, no folder")
    result = jobs.succeeded(jobs.run(*MPIRUN, 1, jobs.PYTHON, "-B", "-c", BUILD.format(str(tools)), cwd=tmp_path))
    assert result.output.strip() == "None"
    (tools / "__pycache__").unlink()
    result = jobs.succeeded(jobs.run(sys.executable, "-B", "-c", BUILD.format(str(tools)), cwd=tmp_path))
    assert result.output.strip() == "None"
    assert not (tools / "__pycache__").exists()


ON_TWO_HOSTS = """
import os, sys
os.environ.update(OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_MCA_btl="self,tcp", MS_SCHED_HOST="127.0.0.1")
sys.path.insert(0, sys.argv[1])
import mindspore as ms
import ranks
ranks.join()
ms.communication.init()
print("sum", ms.ops.AllReduce()(ms.Tensor([1.0])).asnumpy(), os.getenv("OMPI_MCA_btl_tcp_if_include"), flush=True)
ranks.leave()
"""


def test_the_network_of_mpi_between_hosts_is_the_schedulers(tmp_path):
    result = jobs.succeeded(jobs.run(*MPIRUN, 2, jobs.PYTHON, "-c", ON_TWO_HOSTS, copied(tmp_path), cwd=tmp_path, env={
        "ALL_REDUCE": "MPI", "HOME": str(tmp_path), "MS_SCHED_PORT": str(jobs.free_port())}))
    assert result.output.count("sum [2.] 127.0.0.1/31") == 2, result.output


@pytest.mark.parametrize(("chosen", "taken"), [("nowhere", "127.0.0.1/31"), ("file", None), ("environment", None)])
def test_the_network_of_mpi_between_hosts_is_the_one_that_is_chosen(chosen, taken, tmp_path):
    """Open MPI takes either networks to use or networks to leave out, not both."""
    (tmp_path / "home/.openmpi").mkdir(parents=True)
    if chosen == "file":
        (tmp_path / "home/.openmpi/mca-params.conf").write_text("btl_tcp_if_exclude = 172.17.0.0/16\n")
    env = {"OMPI_MCA_btl_tcp_if_exclude": "172.17.0.0/16"} if chosen == "environment" else {}
    result = jobs.succeeded(jobs.run(*MPIRUN, 2, jobs.PYTHON, "-c", SET_UP, copied(tmp_path).parent / "tools",
                                     "on two hosts", cwd=tmp_path,
                                     env={"ALL_REDUCE": "MPI", "HOME": str(tmp_path / "home"), **env}))
    assert result.output.count(f"loaded True {taken}") == 2, result.output


def test_hosts_that_cannot_build_say_so_if_mpi_is_demanded(tmp_path):
    code = "import sys; sys.path.insert(0, {!r}); import mpi_allreduce; mpi_allreduce.set_up()".format(
        str(copied(tmp_path).parent / "tools"))
    result = jobs.run(*MPIRUN, 2, "sh", "-c", 'OMPI_COMM_WORLD_LOCAL_SIZE=1 exec "$@"', "sh", jobs.PYTHON, "-c", code,
                      cwd=tmp_path, env={"ALL_REDUCE": "MPI", "OMPI_CC": "/no/compiler"})
    assert result.code == 1
    assert "ALL_REDUCE=MPI needs Open MPI's mpicc, a C compiler" in result.output
