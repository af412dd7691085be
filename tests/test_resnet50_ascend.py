"""The ResNet-50 lesson for Ascend, rehearsed: its real launchers start several real CPU processes, in data parallel.

Its other modes, computed on CPU: test_resnet50_variants.py.

What needs a card cannot be tested here. The checks that its launchers make on a card machine are, with stand-ins for
npu-smi and hccn_tool on the PATH.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import forks
import jobs
import numpy as np
import pytest
from test_house import blocks_of

LESSON = jobs.REPO / "resnet50_ascend"
RUN, CLUSTER = jobs.REPO / "run.sh", jobs.REPO / "run_cluster.sh"
CPU = {"DEVICE_TARGET": "CPU"}
DATA_PARALLEL = ("--parallel-mode", "data_parallel")
SMALL = ("--image-size", 32, "--batch-size", 4, *jobs.SHALLOW, *DATA_PARALLEL)
TENSORS = 9  # of the 6 layers and the norm of jobs.SHALLOW
# MindSpore's convolutions are several times slower with AVX-512; ranks.py sees to it, other scripts must.
FAST = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}


def ranks_of(logs):
    """What the ranks said in their logs: {rank: world size}."""
    found = re.findall(r"^rank (\d+) of (\d+) on CPU, data_parallel$", "".join(log.read_text() for log in logs),
                       re.MULTILINE)
    return {int(rank): int(size) for rank, size in found}


def is_trained(name):
    """Is it a weight or a momentum, not a statistic of batch norm, which sees its own rank's images only?"""
    return not name.endswith((".moving_mean", ".moving_variance"))


def check_equal_parameters(files):
    """All ranks must have the same weights and momenta, to the bit; returns the first rank's parameters."""
    first, *others = [jobs.parameters(file) for file in files]
    assert sum(is_trained(name) for name in first) >= 2 * TENSORS
    for rank, other in enumerate(others, start=1):
        assert first.keys() == other.keys()
        for name in filter(is_trained, first):
            assert np.array_equal(first[name], other[name]), f"{name} of rank {rank} differs from rank 0's"
    return first


def newest(folder, rank, epoch):
    return max(folder.glob(f"ckpt_{rank}/auto_parallel*-{epoch}_*.ckpt"), key=lambda file: file.stat().st_mtime)


def python(code, *arguments, cwd):
    """Run a script that imports from the lesson; returns its output."""
    return jobs.succeeded(forks.run("-c", code, *arguments, cwd=cwd, env={**FAST, "PYTHONPATH": str(LESSON)})).output


NO_TEST = """
import sys
from types import SimpleNamespace
from accuracy import print_accuracy
for images in None, 4, 0:
    print_accuracy(None, SimpleNamespace(data_path=sys.argv[1], batch_size=2, test_images=images), None, 0, 1)
"""


def test_data_without_a_test_set_are_not_passed_over_in_silence(cifar10, tmp_path):
    (tmp_path / "data").mkdir()
    for file in cifar10.glob("data_batch_*.bin"):
        (tmp_path / "data" / file.name).symlink_to(file)
    said = python(NO_TEST, tmp_path / "data", cwd=tmp_path)
    assert said == 2 * "no accuracy: the data have no test_batch.bin\n", "and nothing where no test was asked for"


# --------------------------------------------------------------------------------------- two ranks that train
COUNT_RIGHT = """
import sys
from pathlib import Path
import mindspore as ms
import mindspore.dataset as ds
from checkpoints import load
from resnet import resnet50
from resnet50_distributed_training import to_network_input
data, *files = sys.argv[1:]
loaded = [load(Path(file)) for file in files]
net = resnet50(10, [int(f"layer{stage}.0.conv1.weight" in loaded[0]) for stage in (1, 2, 3, 4)])
for parameter in net.get_parameters():  # of batch norm's statistics the mean, of the others all are equal
    parameter.set_data(ms.Tensor(sum(one[parameter.name].asnumpy() for one in loaded) / len(loaded)))
net.set_train(False)
images = ds.Cifar10Dataset(data, usage="test", shuffle=False, num_samples=101).map(to_network_input(32), "image")
print(sum(int((net(image).asnumpy().argmax(axis=1) == label.asnumpy()).sum()) for image, label in images.batch(101)))
"""


def check_training(folder, cifar10, output):
    """The evidence that two ranks trained one network."""
    logs = [folder / "device0" / "train.log0", folder / "device1" / "train.log1"]
    assert ranks_of(logs) == {0: 2, 1: 2}
    losses = np.array([jobs.losses(log) for log in logs])
    assert losses.shape == (2, 6), "a line a step on CPU, 3 steps, 2 epochs"
    assert losses[:, -2:].mean() < losses[:, :2].mean() - 0.1, f"the loss did not fall: {losses}"
    assert not np.array_equal(losses[0], losses[1]), "both ranks saw the same images"
    assert re.findall(r"^epoch: (\d) step: (\d),", logs[1].read_text(), re.MULTILINE) == [
        (str(epoch), str(step)) for epoch in (1, 2) for step in (1, 2, 3)]

    files = [newest(folder / "ck pt", rank, 2) for rank in (0, 1)]
    parameters = check_equal_parameters(files)
    right = int(python(COUNT_RIGHT, cifar10, *files, cwd=folder))
    assert f"[rank 0] accuracy: {right / 101:.4f} ({right} of 101 test images)" in output
    return parameters


def check_words_and_files(folder, output):
    """What the launcher prints and writes, as in the tutorial."""
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("start training")] == [
        "start training for device 0", "start training for device 1"]
    assert "rank_table_2pcs.json: ok, 2 ranks on 1 server" in output, "checked on CPU, too"
    assert re.search(r"^rank 1: loss \S+ -> \S+ \(device1/train.log1\)$", output, re.MULTILINE)
    assert lines[-1] == "training success"
    assert "dispatch success" not in output
    for rank in range(2):
        environment = (folder / f"device{rank}" / f"env{rank}.log").read_text().splitlines()
        for line in (f"RANK_ID={rank}", f"DEVICE_ID={rank}", "RANK_SIZE=2", "DEVICE_TARGET=CPU"):
            assert line in environment
        assert any(re.fullmatch(r"RANK_TABLE_FILE=/.*/rank_table_2pcs\.json", line) for line in environment)
        assert "do not log me" not in "".join(environment)


def test_two_ranks_train_one_network_and_resume(cifar10, tmp_path):
    options = ("--", "--epochs", 2, "--steps", 3, "--image-size", 32, "--batch-size", 16, "--test-images", 101,
               "--ckpt-dir", "ck pt", *DATA_PARALLEL, *jobs.SHALLOW)
    result = jobs.succeeded(jobs.run("bash", RUN, cifar10, 2, *options, cwd=tmp_path, timeout=300,
                                     env={**CPU, "MY_PASSWORD": "do not log me"}))
    once = check_training(tmp_path, cifar10, result.output)
    check_words_and_files(tmp_path, result.output)

    # As after a job that was killed when only rank 0 had saved its last epoch: both go back to the one before.
    newest(tmp_path / "ck pt", 1, 2).unlink()
    resumed = jobs.succeeded(jobs.run("bash", RUN, cifar10, 2, *options, "--resume", "--test-images", 0, cwd=tmp_path,
                                      env=CPU, timeout=300))
    earlier, = tmp_path.glob("device0.*")
    assert "epoch: 1 step: 1" in (earlier / "device0" / "train.log0").read_text(), "the first run's, moved aside"
    assert "epoch: 1 step" not in resumed.output
    assert resumed.output.count("resumed after epoch 1 from") == 1, "rank 0's is shown"
    again = check_equal_parameters([newest(tmp_path / "ck pt", rank, 2) for rank in (0, 1)])
    assert jobs.largest_difference(again, once) == 0, "statistics of batch norm included"

    other = jobs.run("bash", RUN, cifar10, 2, *options, "--blocks", 1, 2, 1, 1, "--resume", cwd=tmp_path, env=CPU)
    assert other.code == 2
    assert re.search(
        r"-2_3\.ckpt is of another network or rank; resume with .*--blocks.* of the job that saved it", other.output)
    alone = jobs.run("bash", RUN, cifar10, 1, *options, "--resume", cwd=tmp_path, env=CPU)
    assert alone.code == 2
    assert "ck pt/ckpt_0 holds checkpoints of 2 ranks, these are 1; resume with 2, or take another" in alone.output


ONE_STEP_A_SHARD = """
import sys
import mindspore as ms
from mindspore import nn
from mindspore.train import LossMonitor, Model
import resnet50_distributed_training as lesson
from resnet import resnet50
for shard in (0, 1):
    dataset = lesson.create_dataset(sys.argv[1], 4, rank_id=shard, rank_size=2, image_size=32).take(1)
    ms.set_seed(1)
    net = resnet50(10, (0, 0, 0, 0))
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    model = Model(net, nn.CrossEntropyLoss(), optimizer)
    model.train(1, dataset, callbacks=[LossMonitor()], dataset_sink_mode=False)
    ms.save_checkpoint(model.train_network, f"shard_{shard}.ckpt")
"""


def check_one_step(lesson, launch, cifar10, folder, losses, shards):
    """A step of two ranks of 4 images must be the mean of a step on each shard; returns what the launcher printed.

    From equal weights, w - lr * mean(g0, g1) is the mean of w - lr * g0 and w - lr * g1. Batch norm sees 4 images in
    all of them, so this holds to rounding, which "2 ranks of 4 images equal 1 rank of 8" does not.
    """
    shutil.rmtree(folder / "ck", ignore_errors=True)
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", cifar10, 2, *launch, "--", *SMALL, "--epochs", 1,
                                     "--steps", 1, "--test-images", 0, "--ckpt-dir", "ck", cwd=folder, env=CPU,
                                     timeout=300))
    trained = check_equal_parameters([newest(folder / "ck", rank, 1) for rank in (0, 1)])
    weights = [name for name in trained if is_trained(name) and "." in name and not name.startswith("moments")]
    assert len(weights) == TENSORS
    moved = max(np.abs(shards[0][name] - shards[1][name]).max() for name in weights)
    assert moved > 1e-3, "the two shards' steps must differ, or this test tests nothing"
    of_ranks = [jobs.losses(folder / f"device{rank}" / f"train.log{rank}")[0] for rank in range(2)]
    assert np.allclose(of_ranks, losses, rtol=1e-4), "the ranks' shards are not the two shards"
    difference = max(np.abs(trained[name] - (shards[0][name] + shards[1][name]) / 2).max() for name in weights)
    assert difference < 1e-5, f"the gradients are not averaged: off by {difference}"
    return result.output


def test_one_step_of_two_ranks_is_the_mean_of_one_step_on_each_shard(cifar10, tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss is (\S+)", python(ONE_STEP_A_SHARD, cifar10, cwd=tmp_path))]
    shards = [jobs.parameters(tmp_path / f"shard_{shard}.ckpt") for shard in (0, 1)]
    bug = jobs.planted("resnet50_ascend", tmp_path, "resnet50_distributed_training.py",
                       ("gradients_mean=mean", "gradients_mean=False"))
    with pytest.raises(AssertionError, match="the gradients are not averaged"):
        check_one_step(bug, (), cifar10, tmp_path, losses, shards)

    output = check_one_step(LESSON, ("--no-sink",), cifar10, tmp_path, losses, shards)
    assert "training success" in output
    assert (tmp_path / "device0" / "mpirun.log").exists()
    environment = (tmp_path / "device1" / "env1.log").read_text()
    assert {"GRAPH_OP_RUN=1", "HCCL_WHITELIST_DISABLE=1"} <= set(environment.splitlines())
    assert "RANK_TABLE_FILE" not in environment


# ----------------------------------------------------------------------------------------- several servers
def write_table(path, servers):
    """Write a rank table of [(server_id, device ids)]; returns its path."""
    rank, server_list = 0, []
    for number, (server, devices) in enumerate(servers):
        server_list.append({"server_id": server, "device": []})
        for device in devices:
            server_list[-1]["device"].append({"device_id": str(device), "device_ip": f"192.168.{number}.{device + 1}",
                                              "rank_id": str(rank)})
            rank += 1
    table = {"version": "1.0", "server_count": str(len(servers)), "server_list": server_list, "status": "completed"}
    path.write_text(json.dumps(table))
    return path


# On one machine here, in tests/test_several_machines.py on two. A rank with more cores rounds in another way, and
# batches of 2 enlarge that: so ranks are not bound to cores.
CLUSTER_OPTIONS = ("--", "--image-size", 32, *jobs.SHALLOW, *DATA_PARALLEL, "--batch-size", 2, "--epochs", 1,
                   "--steps", 2, "--test-images", 0, "--ckpt-dir", "ck")
CLUSTER_ENVIRONMENT = {**CPU, "BIND_RANKS": "no", "OMP_NUM_THREADS": "1"}


def train_in_two_shells(tmp_path_factory, cifar10):
    """Where run_cluster.sh has trained, once, in a shell with two ranks and one with one: first.log, second.log, ck."""
    def make(folder):
        table = write_table(folder / "rank table.json", [("10.0.0.1", (4, 5)), ("10.0.0.2", (0,))])
        cluster = ("bash", CLUSTER, cifar10, table, 3)
        environment = {**CLUSTER_ENVIRONMENT, "MS_SCHED_PORT": str(jobs.free_port())}
        with jobs.Job(*cluster, 2, *CLUSTER_OPTIONS, cwd=folder, env=environment) as second:
            second.wait_for("waiting for the scheduler at 127.0.0.1:")  # the order does not matter
            first = jobs.run(*cluster, 0, *CLUSTER_OPTIONS, cwd=folder, env=environment, timeout=300)
            (folder / "second.log").write_text(jobs.succeeded(second.finish(300)).output)
        (folder / "first.log").write_text(jobs.succeeded(first).output)

    return jobs.made_once(tmp_path_factory, "two shells", make)


def test_run_cluster_in_two_shells(cifar10, tmp_path_factory):
    folder = train_in_two_shells(tmp_path_factory, cifar10)
    logs = [folder / f"device_{rank}" / f"train{rank}.log" for rank in range(3)]
    assert ranks_of(logs) == dict.fromkeys(range(3), 3)
    assert all(len(jobs.losses(log)) == 2 for log in logs)
    check_equal_parameters([newest(folder / "ck", rank, 1) for rank in (0, 2)])
    devices = [re.search(r"^DEVICE_ID=(\d)$", (folder / f"device_{rank}" / f"env{rank}.log").read_text(),
                         re.MULTILINE).group(1) for rank in range(3)]
    assert devices == ["4", "5", "0"]
    first, second = ((folder / f"{shell}.log").read_text() for shell in ("first", "second"))
    assert "run_cluster.sh: these ranks wait for those from 2 on, on other servers: start run_cluster.sh there" in first
    assert "start training for device 4" in first
    assert "rank 0: loss" in first
    assert "rank 2: loss" in second
    assert "accuracy" not in second

THREE_SERVERS = [("10.0.0.1", (4,)), ("10.0.0.2", (0,)), ("10.0.0.3", (0,))]


@pytest.mark.parametrize(("servers", "starts", "sentences"), [
    (2, [(2, 0)], ["not all machines have joined within 20 s (--wait): start run_cluster.sh on all servers of the "
                   "table, with RANK_START 0 and 1, all with N = 2; 127.0.0.1 is an address of each machine itself: if "
                   "the servers are several machines, set MS_SCHED_HOST on all to the address of the first. So the "
                   "ranks of this server, 0 to 0, were ended, exit code 1. Look at the logs there"]),
    (2, [(2, 0), (3, 2)], ["not all machines have joined within 20 s (--wait)",
                           "the server of rank 0, 127.0.0.1, has started fewer ranks than 3: all need the same "]),
    (3, [(3, 0), (3, 1), (3, 1)], ["not all machines have joined within 20 s (--wait)", "", ""]),
], ids=["one is missing", "another table", "RANK_START twice"])
def test_servers_that_do_not_come_together(servers, starts, sentences, cifar10, tmp_path):
    """The server of rank 0 waits no longer than --wait, and each says why."""
    environment, running = {**CLUSTER_ENVIRONMENT, "MS_SCHED_PORT": str(jobs.free_port())}, []
    with contextlib.ExitStack() as stack:
        for number, (size, start) in enumerate(starts):
            (folder := tmp_path / str(number)).mkdir()
            table = write_table(folder / "table.json", THREE_SERVERS[:size])
            running.append(stack.enter_context(jobs.Job("bash", CLUSTER, cifar10, table, size, start, "--wait", 20,
                                                        *CLUSTER_OPTIONS, cwd=folder, env=environment)))
        results = [job.finish(90) for job in running]
    for result, sentence in zip(results, sentences):
        assert result.code == 1
        assert sentence in result.output
        assert not result.left_over
    assert "start run_cluster.sh there within 20 s, with the same options" in results[0].output
    if len(starts) == 3:
        twice = [result for result in results if "run_cluster.sh: RANK_START 1 was typed twice, or other machines were "
                 "told another number of ranks, or another job meets at port "
                 f"{environment['MS_SCHED_PORT']}, too" in result.output]
        assert len(twice) == 1


@pytest.mark.parametrize(("start", "restarts"), [(1, 0), (0, 1), (1, 1)])
def test_a_time_limit_ends_a_server_that_waits_for_others(start, restarts, cifar10, tmp_path):
    result = jobs.run("bash", CLUSTER, cifar10, write_table(tmp_path / "table.json", THREE_SERVERS[:2]), 2, start,
                      "--restarts", restarts, "--time-limit", "4s", *CLUSTER_OPTIONS, cwd=tmp_path, timeout=60,
                      env={**CLUSTER_ENVIRONMENT, "MS_SCHED_PORT": str(jobs.free_port())})
    assert result.code == 124
    assert re.search(r"ended after \d+ s, the --time-limit; exit code 124", result.output)
    assert "start training" not in result.output


def test_at_term_no_server_speaks_for_the_ranks_of_others(cifar10, tmp_path):
    environment = {**CLUSTER_ENVIRONMENT, "MS_SCHED_PORT": str(jobs.free_port())}
    command = ("bash", CLUSTER, cifar10, write_table(tmp_path / "table.json", THREE_SERVERS[:2]), 2)
    with jobs.Job(*command, 0, *ENDLESS, "--ckpt-dir", "ck", cwd=tmp_path, env=environment) as first, \
            jobs.Job(*command, 1, *ENDLESS, "--ckpt-dir", "ck", cwd=tmp_path, env=environment) as second:
        first.wait_for(r"\[rank 0\] epoch: 1 step: 3", timeout=200)
        os.kill(first.process.pid, signal.SIGTERM)
        results = [first.finish(60), second.finish(60)]
    assert [result.code for result in results] == [143, 143]
    assert "all ranks have saved" not in results[0].output + results[1].output
    assert "the ranks end their step and save" not in results[0].output
    assert not any(result.left_over for result in results)


def test_a_server_whose_rank_was_killed_is_named_by_the_other(cifar10, tmp_path):
    """That of rank 0; that of another one: by run_msrun.sh, in test_several_machines.py."""
    environment = {**CLUSTER_ENVIRONMENT, "MS_SCHED_PORT": str(jobs.free_port())}
    command = ("bash", CLUSTER, cifar10, write_table(tmp_path / "table.json", THREE_SERVERS[:2]), 2)
    with jobs.Job(*command, 0, *ENDLESS, cwd=tmp_path, env=environment) as first, \
            jobs.Job(*command, 1, *ENDLESS, cwd=tmp_path, env=environment) as second:
        first.wait_for(r"\[rank 0\] epoch: 1 step: 3", timeout=200)
        os.kill(first.rank_process(0), signal.SIGKILL)
        results = [first.finish(60), second.finish(60)]
    assert "rank 0 failed, exit code 137" in results[0].output
    assert "no answer any more from the server of rank 0, 127.0.0.1: its ranks failed, the network did, or somebody " \
        "sent TERM here. So the ranks of this server, 1 to 1, were ended, exit code 143. Look at the logs there" in \
        results[1].output
    assert not any(result.left_over for result in results)


# ----------------------------------------------------------------------------------------------------- faults
ENDLESS = ("--", *SMALL, "--epochs", 500, "--steps", 50)


def check_failure(result, seconds, code, rank):
    """A job in which a rank failed: soon over, with its code and its name, and nothing left."""
    assert result.code == code, result.output
    assert f"rank {rank} failed, exit code {code}. The end of device{rank}/train.log{rank}:" in result.output
    assert result.output.rstrip().endswith("training failed")
    assert not result.left_over
    assert seconds < jobs.soon(), f"it took {seconds} s"


def test_a_stopped_rank_is_warned_of_and_a_killed_one_ends_the_job(cifar10, tmp_path):
    with jobs.Job("bash", RUN, cifar10, 2, *ENDLESS, cwd=tmp_path, env={**CPU, "STALL_MINUTES": "0.05"}) as job:
        job.wait_for(r"\[rank 0\] epoch: 1 step: 3", timeout=200)
        pid = job.rank_process(1)
        os.kill(pid, signal.SIGSTOP)
        # Rank 0 waits for the stopped rank 1: which of them wrote last is a matter of milliseconds.
        job.wait_for(r"^run.sh: warning: no rank has written anything for \d+ s; quiet longest: rank ([01]), "
                     r"since [0-9:]+; the last line of device\1/train.log\1: epoch: 1 ", timeout=60)
        job.wait_for(rf"^run.sh: rank 1 is stopped \(SIGSTOP\): kill -CONT {pid} lets it go on$")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        result = job.finish(300)
        check_failure(result, time.monotonic() - killed, 137, 1)
    assert "hint: it was killed (signal 9)" in result.output


def test_a_rank_that_cannot_write_its_checkpoints(cifar10, tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "ckpt_1").write_text("a file where rank 1 needs a folder")
    with jobs.Job("bash", RUN, cifar10, 2, *ENDLESS, "--ckpt-dir", "ck", cwd=tmp_path, env=CPU) as job:
        log = tmp_path / "device1" / "train.log1"
        while not (log.exists() and "cannot be written to" in log.read_text()):
            assert job.process.poll() is None, job.output()
            time.sleep(0.05)
        raised = time.monotonic()
        result = job.finish(200)
        check_failure(result, time.monotonic() - raised, 2, 1)
    assert "ckpt_1 cannot be written to (File exists); use another --ckpt-dir" in result.output.partition("1 failed")[2]


def test_a_data_set_that_goes_after_the_check(cifar10, tmp_path):
    (tmp_path / "data").symlink_to(cifar10)
    with jobs.Job("bash", RUN, "data", 2, *ENDLESS, cwd=tmp_path, env=CPU) as job:
        job.wait_for("start training for device 0", timeout=120)
        (tmp_path / "data").unlink()
        result = job.finish(120)
    rank = int(re.search(r"rank (\d) failed", result.output).group(1))
    check_failure(result, 0, 2, rank)
    assert f"the data folder {tmp_path}/data does not exist" in result.output


@pytest.mark.parametrize(("sign", "code", "when"), [
    (signal.SIGINT, 130, r"\[rank 0\] epoch: 1 step: 2"), (signal.SIGTERM, 143, "start training for device 1")])
def test_signals_end_everything(sign, code, when, cifar10, tmp_path):
    with jobs.Job("bash", RUN, cifar10, 2, "--restarts", 2, *ENDLESS, "--ckpt-dir", "ck", cwd=tmp_path, env=CPU) as job:
        job.wait_for(when, timeout=200)
        deadline = time.monotonic() + 20  # a rank is announced just before its process is there
        while len(jobs.marked(job.mark)) < 5:
            assert time.monotonic() < deadline, "launcher, two ranks, each with its agent"
            time.sleep(0.02)
        os.kill(job.process.pid, sign)
        sent = time.monotonic()
        result = job.finish(300)
        assert time.monotonic() - sent < jobs.soon()
    assert result.code == code
    assert not result.left_over
    assert "restart" not in result.output, "who ends a job does not want it again"


# -------------------------------------------------------------------------------------------------- bad input
def refused(*command, cwd, env=None):
    """The one sentence with which a launcher refuses to start, or all faults of a table."""
    result = jobs.run("bash", *command, cwd=cwd, env=env, timeout=60)
    assert result.code == 2, f"exit code {result.code}:\n{result.output}"
    assert not result.left_over
    assert "start training" not in result.output
    assert not [path for path in cwd.iterdir() if path.name.startswith(("device", "scheduler"))]
    return result.output


def test_wrong_arguments(tmp_path):
    for arguments in ((), ("data",), ("data", "--no-sink")):
        output = refused(RUN, *arguments, cwd=tmp_path)
        assert "please run the script as: bash run.sh DATA_PATH RANK_SIZE" in output
        assert "such as: bash run.sh /path/dataset 8" in output
    output = refused(CLUSTER, "data", "table", 16, cwd=tmp_path)
    assert "bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START" in output
    for launcher in (RUN, CLUSTER):
        for option in ("-h", "--help"):
            result = jobs.run("bash", launcher, option, cwd=tmp_path)
            assert result.code == 0
            assert f"usage: bash {launcher.name} DATA_PATH RANK" in result.output
    assert "must be a whole number from 1, not 'eight'" in refused(RUN, "data", "eight", cwd=tmp_path)
    for wrong in (3, "--fast"):
        output = refused(RUN, "data", 2, wrong, cwd=tmp_path)
        assert f"run.sh: error: unrecognized arguments: {wrong}" in output
        assert "bash run.sh --help explains all" in output
    assert "the rank table has an empty name" in refused(CLUSTER, "data", "", 4, 2, cwd=tmp_path, env=CPU)
    assert "this machine has no Ascend card; DEVICE_TARGET=CPU rehearses" in refused(
        jobs.REPO / "own_model" / "run.sh", 2, cwd=tmp_path, env={"DEVICE_TARGET": "Ascend"})
    assert "DEVICE_TARGET is 'NPU'" in refused(RUN, "data", 2, cwd=tmp_path, env={"DEVICE_TARGET": "NPU"})
    for name in ("STALL_MINUTES", "MS_CPU_COMM_OP_TIMEOUT"):
        for text in ("soon", "", "0"):
            assert f"{name} is '{text}'" in refused(RUN, "data", 2, cwd=tmp_path, env={name: text})


def test_bad_data_options_and_memory(cifar10, tmp_path):
    assert "the data folder nowhere does not exist" in refused(RUN, "nowhere", 2, cwd=tmp_path, env=CPU)
    for option, least in (("--batch-size", 1), ("--epochs", 1), ("--image-size", 32), ("--test-images", 0)):
        output = refused(RUN, cifar10, 2, "--", f"{option}={least - 1}", cwd=tmp_path, env=CPU)
        assert f"argument {option}: must be at least {least}, below 2**31, not {least - 1}" in output
    assert "cannot be made" in refused(RUN, cifar10, 2, "--", "--ckpt-dir", "/dev/null/x", cwd=tmp_path, env=CPU)
    (tmp_path / "ck" / "ckpt_0").mkdir(parents=True)
    (tmp_path / "ck" / "ckpt_0" / "auto_parallel-1_4.ckpt").touch()
    assert "holds checkpoints of an earlier run" in refused(RUN, cifar10, 2, "--", "--ckpt-dir", "ck", cwd=tmp_path,
                                                            env=CPU)
    output = refused(RUN, cifar10, 999, "--", "--batch-size", 8, "--image-size=112", cwd=tmp_path, env=CPU)
    assert "999 ranks need about 1408590 MB of memory (1410 MB each), " in output, "more with larger pictures"
    assert "999 ranks need about 4566429 MB" in refused(RUN, cifar10, 999, cwd=tmp_path, env=CPU)


def test_bad_tables(cifar10, tmp_path):
    table = write_table(tmp_path / "table.json", [("10.0.0.1", (0, 1)), ("10.0.0.2", (0, 1))])
    for start in (1, 4, "x"):
        assert "start with rank 0 2" in refused(CLUSTER, cifar10, table, 4, start, cwd=tmp_path, env=CPU)
    assert "does not exist" in refused(CLUSTER, cifar10, "nothing.json", 4, 0, cwd=tmp_path, env=CPU)
    assert "run_cluster.sh" in refused(RUN, cifar10, 4, cwd=tmp_path, env={**CPU, "RANK_TABLE_FILE": str(table)})
    table.write_text(table.read_text().replace('"rank_id": "3"', '"rank_id": 3').replace("completed", "initializing"))
    output = refused(CLUSTER, cifar10, table, 4, 0, cwd=tmp_path, env=CPU)
    assert "server_list[1].device[1].rank_id" in output
    assert "status" in output
    assert output.count("fault:") == 2, "all faults at once"


def test_a_port_in_use(cifar10, tmp_path):
    table = write_table(tmp_path / "table.json", [("10.0.0.1", (0, 1)), ("10.0.0.2", (0, 1))])
    holder = ("import socket, time; server = socket.create_server(('127.0.0.1', 0)); "
              "print(server.getsockname()[1], flush=True); time.sleep(60)")
    with jobs.Job(jobs.PYTHON, "-c", holder, cwd=tmp_path) as other:
        port = other.wait_for(r"^\d+$").group()
        environment = {**CPU, "MS_SCHED_PORT": port}
        for command in ((CLUSTER, cifar10, table, 4, 0), (RUN, cifar10, 2)):
            output = refused(*command, cwd=tmp_path, env=environment)
            assert f"no scheduler can listen on 127.0.0.1:{port}: Address already in use" in output
    for host in ("", "no.such.host.", "::1"):
        for first in (0, 2):
            output = refused(CLUSTER, cifar10, table, 4, first, cwd=tmp_path, env={**CPU, "MS_SCHED_HOST": host})
            assert f"MS_SCHED_HOST is '{host}', which has no IPv4 address; set it to rank 0's machine" in output
    for host in ("192.0.2.1", "255.255.255.255"):
        output = refused(RUN, cifar10, 2, cwd=tmp_path, env={**CPU, "MS_SCHED_HOST": host})
        assert f"no scheduler can listen on {host}:" in output
        assert "an address of this machine" in output
    output = refused(CLUSTER, cifar10, table, 4, 0, cwd=tmp_path, env={**CPU, "MS_SCHED_HOST": "192.0.2.1"})
    assert ("MS_SCHED_HOST, 192.0.2.1, is no address of this machine; RANK_START 0 belongs on the server that has it\n"
            ) in output


# ------------------------------------------------------------------- Ascend: what is checked before the start
NPU_SMI = r"""#!/bin/bash
[[ -z "${FAKE_ANSWER:-}" ]] || { echo "$FAKE_ANSWER"; exit 1; }
cat <<'END'
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 92.4        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3370 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 90.1        36                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3370 / 65536         |
+===========================+===============+====================================================+
| 4     910B3               | OK            | 91.0        36                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3370 / 65536         |
+===========================+===============+====================================================+
| 5     910B3               | OK            | 93.0        38                0    / 0             |
| 0                         | 0000:02:00.0  | 0           0    / 0          31370/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
| No running processes found in NPU 4                                                            |
+===========================+===============+====================================================+
| 5       0                 | 4711          | python3                  | 28050                   |
+===========================+===============+====================================================+
END
"""
HCCN_TOOL = """#!/bin/bash
[[ "$1 $3 $4" == "-i -ip -g" ]] || exit 1
echo "ipaddr:192.168.0.$(($2 + ${FAKE_SHIFT:-1}))"
echo "netmask:255.255.255.0"
"""


@pytest.fixture
def ascend(tmp_path):
    """The environment of a machine with the cards 0, 1, 4 and 5, of which 5 is in use."""
    for name, text in (("npu-smi", NPU_SMI), ("hccn_tool", HCCN_TOOL)):
        tool = tmp_path / "fakes" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
    path = f"{tmp_path / 'fakes'}:{os.path.dirname(jobs.PYTHON)}:{os.environ['PATH']}"
    return {"DEVICE_TARGET": "Ascend", "PATH": path}


def test_ascend_checks(cifar10, tmp_path, ascend):
    def table(devices, server="10.0.0.1"):
        return {**ascend, "RANK_TABLE_FILE": str(write_table(tmp_path / "table.json", [(server, devices)]))}

    def run(environment):
        return refused(RUN, cifar10, 2, cwd=tmp_path, env=environment)

    assert "rank 1 needs card 2, which npu-smi does not list; it lists: 0 1 4 5" in run(table((0, 2)))
    assert "card 5, of rank 1, is in use by process 4711 (python3)" in run(table((4, 5)))
    assert "rank table gives card 0 the device_ip 192.168.0.1, but hccn_tool says 192.168.0.7" in run(
        {**table((0, 1)), "FAKE_SHIFT": "7"})
    said = "dcmi model initialized failed, because the device is used. ret is -8020"
    assert "another container (-8020): give each container cards of its own" in run(
        {**table((0, 1)), "FAKE_ANSWER": said})
    assert "10.0.0.1, the server_id of" in run(table((0, 2))), "a warning: the address is not needed on one server"
    assert "there is no rank table for 5 ranks" in refused(RUN, cifar10, 5, cwd=tmp_path, env=ascend)
    (tmp_path / "fakes" / "npu-smi").unlink()
    assert "this machine has no Ascend card; DEVICE_TARGET=CPU rehearses" in run(table((0, 1)))


def test_ascend_refuses_another_servers_ranks(cifar10, tmp_path, ascend):
    here = jobs.run("hostname", "-I", cwd=tmp_path).output.split()
    assert here, "this machine has no address"
    table = write_table(tmp_path / "table.json", sorted([("192.0.2.99", (0, 1)), (here[0], (0, 2))]))
    start = json.loads(table.read_text())["server_list"][0]["server_id"] == here[0] and 2 or 0
    output = refused(CLUSTER, cifar10, table, 4, start, cwd=tmp_path, env=ascend)
    assert f"the ranks from {start} on belong to server 192.0.2.99, which is no address of this machine" in output
    output = refused(CLUSTER, cifar10, table, 4, 2 - start, cwd=tmp_path, env=ascend)
    assert f"rank {3 - start} needs card 2" in output, "this server's own ranks pass that check and come to the next"


def test_ascend_ranks_start_with_the_table_and_fail_here_with_a_hint(cifar10, tmp_path, ascend):
    """Without CANN MindSpore refuses: the rank is named, with a hint. That they train needs a card."""
    table = write_table(tmp_path / "table.json", [("10.0.0.1", (0, 4))])
    result = jobs.run("bash", RUN, cifar10, 2, cwd=tmp_path, env={**ascend, "RANK_TABLE_FILE": str(table)})
    environment = (tmp_path / "device1" / "env1.log").read_text()
    assert {"RANK_ID=1", "RANK_SIZE=2", f"RANK_TABLE_FILE={table}", "DEVICE_ID=4"} <= set(environment.splitlines())
    assert "MS_ROLE" not in environment
    rank = int(re.search(r"rank (\d) failed", result.output).group(1))
    check_failure(result, 0, 1, rank)
    assert "hint: MindSpore cannot load CANN's libraries: source CANN's set_env.sh" in result.output


# ------------------------------------------------------------------------------------------------- one process
def test_one_process_and_the_tutorials_pytest(cifar10, tmp_path):
    alone = jobs.succeeded(jobs.run("bash", RUN, cifar10, 1, "--", *SMALL, "--epochs", 1, "--steps", 2, "--test-images",
                                    5, cwd=tmp_path, env=CPU, timeout=200))
    assert "One process. To start 8: bash run.sh DATA_PATH 8" in alone.output
    assert len(jobs.losses(tmp_path / "device0" / "train.log0")) == 2
    assert re.search(r"accuracy: \d\.\d{4} \(\d of 5 test images\)", alone.output)

    # pytest's own options are not taken for the script's; the data set's name comes from DATA_PATH.
    tutorial = jobs.run(jobs.PYTHON, "-m", "pytest", "-s", "-v", "-p", "no:cacheprovider",
                        LESSON / "resnet50_distributed_training.py", cwd=tmp_path, env={"DATA_PATH": "/nowhere"})
    assert tutorial.code == 2
    assert "::test_train_cifar" in tutorial.output
    assert "argument --data-path: the data folder /nowhere does not exist" in tutorial.output
    assert "Traceback" not in tutorial.output


def test_distributed_lines_are_marked():
    for name, least in (("resnet50_distributed_training.py", 7), ("accuracy.py", 4)):
        code = (LESSON / name).read_text().split('"""', 2)[2].splitlines()
        blocks = blocks_of(code)
        marked = {*blocks, *(number for covered in blocks.values() for number in covered)}
        unmarked = [line for number, line in enumerate(code) if number not in marked and re.search(
            r"\binit\(|get_(rank|group_size)\(|ops\.assign|auto_parallel_context|shard_id=|ranks\.(join|leave)", line)]
        assert unmarked == []
        assert len(blocks) >= least
