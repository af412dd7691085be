"""Each lesson, copied alone into an empty folder, runs: its own launcher, at least two real ranks."""

import shutil

import jobs
import pytest

SMALL = ("--epochs", 1, "--steps", 1, "--image-size", 32, "--batch-size", 4, "--test-images", 0, *jobs.SHALLOW)


@pytest.mark.parametrize(("lesson", "neighbours", "command", "logs"), [
    ("allgather_check", [], ("run.sh", 2, "--launcher=msrun"), "log_msrun/worker_{}.log"),
    ("own_model", [], ("run.sh", 2, "--", "--epochs", 1), "log_output/1/rank.{}/stdout"),
    ("mnist_ddp", [], ("run.sh", "{mnist}", 2, "--", "--epochs", 1, "--steps", 11), "log_output/1/rank.{}/stdout"),
    ("parallel_modes", [], ("run.sh", "hybrid_parallel", 2), "log_output/1/rank.{}/stdout"),
    ("checkpoints", [], ("run.sh", "data_parallel", 2, "--", "--ckpt-dir", "ckpt"), "log_output/1/rank.{}/stdout"),
    ("resnet50_gpu", [], ("run_gpu.sh", "{cifar10}", 2, "--", *SMALL), "log_output/1/rank.{}/stdout"),
    ("resnet50_ascend", ["rank_tables"], ("run.sh", "{cifar10}", 2, "--", *SMALL), "log_output/1/rank.{}/stdout"),
])
def test_a_lesson_runs_alone(lesson, neighbours, command, logs, mnist, cifar10, tmp_path):
    for folder in (lesson, *neighbours):
        shutil.copytree(jobs.REPO / folder, tmp_path / "copy" / folder)
    work = tmp_path / "work"
    work.mkdir()
    launcher, *arguments = (str(word).format(mnist=mnist, cifar10=cifar10) for word in command)
    result = jobs.succeeded(jobs.run("bash", tmp_path / "copy" / lesson / launcher, *arguments, cwd=work))
    assert "the folder tools/, copied beside" in result.output
    for rank in range(2):
        log = (work / logs.format(rank)).read_text()
        assert f"rank {rank} of 2 on" in log or f"rank size: 2, rank id: {rank}" in log
        said_by_rank_0 = lesson == "allgather_check" or (lesson == "parallel_modes" and rank > 0)
        assert said_by_rank_0 or jobs.losses(work / logs.format(rank))
    if lesson == "resnet50_ascend":  # what computes automatic parallel on CPU is not beside it
        assert "beside this folder): going on in data parallel." in (work / logs.format(0)).read_text()


def test_what_needs_tools_says_so_and_bad_data_is_one_sentence(tmp_path):
    shutil.copytree(jobs.REPO / "mnist_ddp", tmp_path / "mnist_ddp")
    result = jobs.run("bash", tmp_path / "mnist_ddp" / "run_msrun.sh", "nowhere", 2, "--nodes", 2, cwd=tmp_path)
    assert result.code == 2
    assert "--nodes needs the folder tools/ beside mnist_ddp/; copy it there" in result.output
    result = jobs.run(jobs.PYTHON, tmp_path / "mnist_ddp" / "ranks.py", "-n", 2, "--time-limit", "3s", "--report", "r",
                      tmp_path / "mnist_ddp" / "train_ddp.py", cwd=tmp_path)
    assert (result.code, result.output) == (
        2, "--time-limit needs the folder tools/ beside mnist_ddp/; copy it there\n")
    result = jobs.run("bash", tmp_path / "mnist_ddp" / "run.sh", "nowhere", 2, "--launcher=table", cwd=tmp_path)
    assert (result.code, result.output) == (
        2, "--launcher=table needs the folder tools/ beside mnist_ddp/; copy it there\n")
    for size in ("0", "２"):
        result = jobs.run("bash", tmp_path / "mnist_ddp" / "run.sh", "nowhere", size, cwd=tmp_path)
        assert result.code == 2
        assert result.output == f"the number of ranks must be a number from 1, not '{size}'\n"
    result = jobs.run("bash", tmp_path / "mnist_ddp" / "run.sh", "nowhere", 2, cwd=tmp_path)
    assert result.code == 2
    assert result.output.count("the data folder nowhere does not exist") == 1


def test_logs_that_cannot_be_written(tmp_path):
    """mpirun would stay for ever."""
    shutil.copytree(jobs.REPO / "own_model", tmp_path / "own_model")
    (tmp_path / "log_output").touch()
    result = jobs.run("bash", tmp_path / "own_model" / "run.sh", 2, cwd=tmp_path, timeout=30)
    assert result.code == 2, result.output
    assert "mkdir: cannot create directory" in result.output
    assert not result.left_over


def test_without_dry_run_the_launcher_checks_all_the_same(tmp_path):
    for folder in ("resnet50_ascend", "rank_tables", "tools"):
        shutil.copytree(jobs.REPO / folder, tmp_path / folder)
    result = jobs.run("bash", tmp_path / "resnet50_ascend" / "run.sh", "nowhere", 2, cwd=tmp_path,
                      env={"DEVICE_TARGET": "CPU"})
    assert result.code == 2
    assert result.output.count("the data folder nowhere does not exist") == 1
    assert "Traceback" not in result.output


def test_alone_the_first_rank_that_fails_ends_the_others(cifar10, tmp_path):
    for folder in ("resnet50_ascend", "rank_tables"):
        shutil.copytree(jobs.REPO / folder, tmp_path / folder)
    script = tmp_path / "resnet50_ascend" / "resnet50_distributed_training.py"
    text = script.read_text()
    assert text.count("\nfrom resnet import resnet50\n") == 1
    fault = "if os.getenv('OMPI_COMM_WORLD_RANK') == '1': sys.exit(7)\n"
    script.write_text(text.replace("\nfrom resnet import", f"\n{fault}from resnet import"))
    result = jobs.run("bash", tmp_path / "resnet50_ascend" / "run.sh", cifar10, 2, "--", *SMALL, cwd=tmp_path)
    assert result.code == 7, result.output
    assert not result.left_over
