"""The GPU lesson, rehearsed on CPU: the real scripts, started by mpirun, msrun and run_gpu.sh, several processes."""

import os
import re
import shutil
import statistics
import time
from pathlib import Path

import forks
import jobs
import pytest
from PIL import Image
from test_convolutions import VERSION_3, has_quick_convolutions

LESSON = jobs.REPO / "resnet50_gpu"
CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
SMALL = ("--epochs", 1, "--image-size", 32, *jobs.SHALLOW)


@pytest.fixture(scope="session")
def fruits(tmp_path_factory):
    """The folder with Training and Test of a synthetic set: 4 classes of 40 and 5 pictures."""
    return jobs.made_once(tmp_path_factory, "data set fruits", lambda folder: jobs.succeeded(jobs.run(
        jobs.PYTHON, jobs.REPO / "tools/make_datasets.py", "fruits", folder, "--classes", 4, "--train-images", 40,
        "--test-images", 5, cwd=folder.parent)))


def by_mpirun(ranks, script, *options, cwd, env=None):
    """Run ranks of a script as the tutorial does, each with a log of its own in log/1/."""
    return jobs.run("mpirun", "-n", ranks, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none",
                    "--output-filename", "log", "--merge-stderr-to-stdout", jobs.PYTHON, script,
                    *options, cwd=cwd, env={**CPU, **(env or {})}, timeout=400)


def losses_of(output):
    """The loss of each step, mean over the ranks that printed one."""
    of_step = {}
    for step, loss in re.findall(r"step: (\d+), loss is ([\d.e+-]+)$", output, re.MULTILINE):
        of_step.setdefault(int(step), []).append(float(loss))
    return [statistics.mean(of_step[step]) for step in sorted(of_step)]


def accuracy_of(output):
    found = re.findall(r"eval result: \{'accuracy': ([\d.]+)\}", output)
    assert len(found) == 1, output
    return float(found[0])


STEPS = 5


# A small learning rate: with 0.01 ReLUs flip after a few steps whatever the rounding, and runs drift apart.
def same_samples(ranks):
    """Options with which a number of ranks trains on the same 12 pictures a step as any other."""
    return (*SMALL, "--steps", STEPS, "--no-augment", "--lr", 0.001, "--batch-size", 12 // ranks)


@pytest.fixture(scope="module")
def one_rank_of_12(fruits, tmp_path_factory):
    """Output, parameters and folder of one process with MindSpore's own batch norm over the whole batch."""
    def make(folder):
        result = jobs.succeeded(forks.run(LESSON / "gpu_distributed_train.py", "--data-path", fruits,
                                          *same_samples(1), "--sync-bn", cwd=folder, env=CPU, timeout=300))
        assert (losses := losses_of(result.output))[-1] < losses[0] - 0.1
        (folder / "log").write_text(result.output)

    folder = jobs.made_once(tmp_path_factory, "one rank of 12", make)
    return (folder / "log").read_text(), jobs.parameters(folder / "ckpt" / f"fruit_360_renet50_0-1_{STEPS}.ckpt")


def test_ranks_with_synchronised_batch_norm_equal_one_rank(fruits, tmp_path, one_rank_of_12):
    ranks = 2
    result = by_mpirun(ranks, LESSON / "gpu_distributed_train.py", "--data-path", fruits, *same_samples(ranks),
                       "--sync-bn", cwd=tmp_path, env={"ONEDNN_VERBOSE": "1"})
    jobs.succeeded(result)
    logs = [(tmp_path / "log" / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(ranks)]
    assert list(map(has_quick_convolutions, logs)) == [VERSION_3] * ranks
    logs = "".join(logs)
    output, parameters = one_rank_of_12
    of_ranks = [jobs.parameters(tmp_path / "ckpt" / f"fruit_360_renet50_{rank}-1_{STEPS}.ckpt")
                for rank in range(ranks)]
    difference = max(jobs.largest_difference(parameters, of_rank) for of_rank in of_ranks)
    traces = losses_of(output), losses_of(logs)
    assert [len(trace) for trace in traces] == [STEPS, STEPS]
    of_losses = max(abs(one - other) for one, other in zip(*traces))
    assert difference < 1e-4 and of_losses < 1e-4, f"parameters {difference}, losses {of_losses}"
    for rank in range(ranks):
        assert f"rank size: {ranks}, rank id: {rank}" in logs
    assert accuracy_of(logs) == accuracy_of(output), "each test image counts once"
    trained = [{name: value for name, value in of_rank.items() if "moving" not in name} for of_rank in of_ranks]
    assert all(jobs.largest_difference(trained[0], other) == 0 for other in trained[1:]), "ranks hold unequal weights"


BATCH_NORMS = """import sys
import numpy as np, mindspore as ms, ranks
from mindspore import Tensor, nn
from mindspore.communication import init, get_group_size, get_rank
from sync_batch_norm import synchronise_batch_norm
ms.set_context(mode=ms.GRAPH_MODE)
rank, size = 0, 1
if ranks.join():
    init()
    rank, size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
random = np.random.default_rng(1)
x, y = (random.uniform(-1, 1, shape).astype(np.float32) for shape in ((16, 1, 4, 4), (16, 2)))
weight = Tensor(random.uniform(-0.1, 0.1, (2, 64)).astype(np.float32))
for kind in (False, True):
    relu, norm = nn.ReLU(), nn.BatchNorm2d(4, use_batch_statistics=kind)
    net = nn.SequentialCell(relu, nn.Conv2d(1, 4, 3, weight_init="ones"), relu, norm, relu, norm,
                            nn.Flatten(), nn.Dense(64, 2, weight, "zeros"))
    if size > 1:
        synchronise_batch_norm(net, size)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    step.set_train()
    for _ in range(3):
        step(Tensor(x[rank::size]), Tensor(y[rank::size]))
    net.set_train(False)
    test = net(Tensor(x)).asnumpy()  # all ranks have the same here
    if rank == 0:
        print(kind, *(float(f"{abs(value).sum():.4g}") for value in (net[7].weight.asnumpy(),
              net[3].moving_mean.asnumpy(), net[5].moving_variance.asnumpy(), test)))
many = (3 + random.uniform(-1, 1, (4, 1, 256, 256))).astype(np.float16)
net = nn.SequentialCell(nn.BatchNorm2d(1))
if size > 1:
    synchronise_batch_norm(net, size)
normal = net.to_float(ms.float16).set_train()(Tensor(many[rank::size]))
if rank == 0:
    print(normal.dtype, *(float(f"{value:.4g}") for value in (net[0].moving_mean.asnumpy()[0],
          net[0].moving_variance.asnumpy()[0], abs(normal.asnumpy()[0, 0, 0]).astype(float).sum())))
ranks.leave()
"""


def test_a_batch_norm_with_a_construct_of_its_own_is_refused(tmp_path):
    code = ("from mindspore import nn\nfrom sync_batch_norm import synchronise_batch_norm\n"
            "class Own(nn.BatchNorm2d):\n    def __init__(self, channels):\n"
            "        super().__init__(channels, eps=0.1)\n"
            "class Twice(Own):\n    def construct(self, x):\n        return 2 * super().construct(x)\n"
            "for kind in (Own, Twice):\n    print(synchronise_batch_norm(nn.SequentialCell(kind(4)), 2))\n")
    result = forks.run("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(LESSON)})
    assert result.code == 1
    assert result.output.count("None\n") == 1, "only a construct() is lost"
    assert ("TypeError: Twice has a construct() of its own, which a synchronised batch norm lacks: move it into a cell "
            "around it\n") in result.output


def test_batch_norm_of_fixed_statistics_stays_so_when_synchronised(tmp_path):
    """use_batch_statistics: False freezes a batch norm, with True it takes those of the batch in a test, too.

    The network holds cells twice, which changes the numbers of those behind them. And with more values a channel than
    float16 can count.
    """
    lesson = jobs.planted("resnet50_gpu", tmp_path, "sync_batch_norm.py")
    (lesson / "norms.py").write_text(BATCH_NORMS)
    one = jobs.succeeded(forks.run(lesson / "norms.py", cwd=tmp_path, env=CPU)).output
    two = jobs.succeeded(by_mpirun(2, lesson / "norms.py", cwd=tmp_path)).output
    assert one.count("\n") == 3 and one.count("0.0 4.0") == 1  # of the frozen one
    assert [float(word) for word in re.sub("False|True|Float16", "", two).split()] == pytest.approx(
        [float(word) for word in re.sub("False|True|Float16", "", one).split()], rel=2e-3)


def test_each_rank_crops_in_its_own_way(fruits, tmp_path):
    """Told by the pixels of the first batch, just before the training; both ranks are given the same pictures."""
    same_pictures = ("ds.DistributedSampler(rank_size, rank,", "ds.DistributedSampler(1, 0,")
    show = ("if first_epoch < args.epochs:\n", (
        "print('pixels', next(train_dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))[0].std())\n"
        "ranks.leave()\nif first_epoch < args.epochs:\n"))
    line = "ds.config.set_seed(rank)  # distributed: other crops and flips on each rank\n"
    for name, changes in (("right", []), ("planted bug", [(line, "")])):
        (tmp_path / name).mkdir()
        lesson = jobs.planted("resnet50_gpu", tmp_path / name, "gpu_distributed_train.py", same_pictures, *changes,
                              show)
        jobs.succeeded(by_mpirun(2, lesson / "gpu_distributed_train.py", "--data-path", fruits, *SMALL, "--steps", 1,
                                 "--batch-size", 4, cwd=tmp_path / name))
        logs = [tmp_path / name / "log" / "1" / f"rank.{rank}" / "stdout" for rank in range(2)]
        first, second = (float(re.search("^pixels (.*)", log.read_text(), re.MULTILINE).group(1)) for log in logs)
        assert first > 0.1
        assert (abs(first - second) > 1e-4) == (name == "right")


def test_msrun_trains_resumes_and_names_checkpoints_as_the_tutorial(fruits, tmp_path):
    command = (LESSON / "gpu_distributed_train.py", "--data-path", fruits, *SMALL, "--steps", 2, "--batch-size", 4)
    jobs.succeeded(jobs.run("msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={jobs.free_port()}",
                            "--join=True", "--log_dir=logs", *command, cwd=tmp_path, env=CPU, timeout=400))
    first = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(first):
        assert f"rank size: 2, rank id: {rank}" in log
        assert ("train dataset batch num: 2\ntest dataset batch num: 3\n" in log) == (rank == 0)
        assert len(losses_of(log)) == 2
    assert accuracy_of("".join(first)) * 20 == pytest.approx(round(accuracy_of("".join(first)) * 20))
    saved = [tmp_path / "ckpt" / f"fruit_360_renet50_{rank}-1_2.ckpt" for rank in range(2)]
    weights = [{name: value for name, value in jobs.parameters(file).items() if "moving" not in name} for file in saved]
    assert jobs.largest_difference(*weights) == 0

    again = jobs.succeeded(jobs.run(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "--check", command[0], "--",
                                    *command[1:], "--resume", "--epochs", 2, cwd=tmp_path, env=CPU, timeout=400))
    for rank in range(2):
        assert f"[rank {rank}] resumed after epoch 1 from ckpt/{saved[rank].name}" in again.output
        assert f"[rank {rank}] epoch: 2 step: 2, loss is " in again.output
    assert "epoch: 1 step" not in again.output
    assert sorted(file.name for file in (tmp_path / "ckpt").iterdir()) == [
        f"fruit_360_renet50_{rank}-{epoch}_2.ckpt" for rank in range(2) for epoch in (1, 2)]


def test_the_single_card_script(fruits, tmp_path):
    folder = tmp_path / "fruits"
    shutil.copytree(fruits, folder)
    bad = folder / "Training" / "fruit_001" / "0_0.jpg"
    bad.write_text("no picture")
    command = (LESSON / "gpu_single_train.py", "--data-path", folder, *SMALL, "--steps", 4, "--batch-size", 16)
    refused = jobs.run(jobs.PYTHON, *command, cwd=tmp_path, env=CPU)
    assert refused.code == 2
    assert f"{bad} is no picture that can be read" in refused.output
    assert not (tmp_path / "ckpt").exists()
    listed = jobs.succeeded(jobs.run(jobs.PYTHON, LESSON / "fruits_files.py", folder, cwd=tmp_path)).output
    assert listed == f"{bad}\n"
    elsewhere = jobs.run(jobs.PYTHON, LESSON / "fruits_files.py", tmp_path, cwd=tmp_path)
    assert (elsewhere.code, "which holds Training/ and Test/" in elsewhere.output) == (1, True)
    bad.unlink()
    earlier = []
    for _ in range(3):  # a command may be repeated: files of an earlier run are set aside
        result = jobs.succeeded(forks.run(*command, cwd=tmp_path, env=CPU, timeout=200))
        assert re.search(r"^train dataset batch num: 4\ntest dataset batch num: 2\nepoch: 1 step: 1, loss is 1\.\d+$",
                         result.output, re.MULTILINE)
        assert 0 <= accuracy_of(result.output) <= 1
        saved = tmp_path / "ckpt" / "fruit_360_renet50-1_4.ckpt"
        assert saved.exists()
        earlier.append(saved.read_bytes())
        os.utime(saved, (1, 1))  # as where an archive or a disk gives all files one time
        aside = sorted((tmp_path / "ckpt").glob(f"{saved.name}.*.unused"))
        assert [file.read_bytes() for file in aside] == earlier[:-1], "nothing is overwritten"
    deeper = forks.run(*command, "--resume", "--blocks", 1, 2, 1, 1, cwd=tmp_path, env=CPU)
    for part in ("Training", "Test"):
        shutil.rmtree(folder / part / "fruit_003")
    fewer_classes = forks.run(*command, "--resume", cwd=tmp_path, env=CPU)
    for other in (deeper, fewer_classes):
        assert other.code == 2
        assert f"{saved.relative_to(tmp_path)} is of another network or rank; resume with the options" in other.output


# ---------------------------------------------------------------------------------------------- run_gpu.sh
OPTIONS = ("--epochs", 1, "--steps", 4, "--image-size", 32, "--test-images", 64)


def check_run(folder, ranks):
    """The evidence of a run of run_gpu.sh in its train.log."""
    log = (folder / "device" / "train.log").read_text()
    for rank in range(ranks):
        assert f"[rank {rank}] rank {rank} of {ranks} on CPU, data_parallel" in log
        trace = [float(loss) for loss in
                 re.findall(rf"^\[rank {rank}\] epoch: 1 step: \d, loss is ([\d.]+)", log, re.M)]
        assert len(trace) == 4
        assert trace[-1] < trace[0]
    assert re.search(r"^accuracy: 0\.\d{4} \(\d+ of 64 test images\)$", log, re.M)


def test_what_python_prints_at_its_start_is_no_device(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('site hello')\n")
    result = jobs.run("bash", jobs.REPO / "run_gpu.sh", "nowhere", 2, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert result.code == 2
    assert "the data folder nowhere does not exist" in result.output


def test_run_gpu_sh_in_the_background_with_msrun_and_sync_bn_and_a_failing_rank(cifar10, tmp_path):
    """With mpirun in the foreground: on the lesson's page."""
    with jobs.Job("bash", jobs.REPO / "run_gpu.sh", cifar10, 2, "--background", "--launcher", "msrun", "--", *OPTIONS,
                  "--sync-bn", "--blocks", 1, 0, 0, 0, cwd=tmp_path, env={"ONEDNN_VERBOSE": "1"}) as job:
        job.wait_for("start training on CPU, 2 ranks, in the background, PID")
        assert job.process.wait(10) == 0
        pid = int((tmp_path / "device" / "train.pid").read_text())
        assert f"PID {pid}" in job.output()
        deadline = time.monotonic() + 300
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(0.5)
        assert not jobs.marked(job.mark)
    check_run(tmp_path, 2)
    assert (tmp_path / "device" / "log_msrun" / "worker_1.log").is_file()
    for rank in range(2):
        printed = (tmp_path / "device" / "log_msrun" / f"worker_{rank}.log").read_text()
        assert has_quick_convolutions(printed) == VERSION_3
    lesson = jobs.planted("resnet50_gpu", tmp_path, "resnet50_distributed_training_gpu.py", (
        "    net = resnet50(",
        "    if rank == 1:\n        raise ValueError('the planted error')\n    net = resnet50("))
    failed = jobs.run("bash", lesson / "run_gpu.sh", cifar10, 2, "--", *OPTIONS, cwd=tmp_path, timeout=200)
    assert failed.code == 1
    assert "rank 1 failed, exit code 1. The end of" in failed.output
    assert "ValueError: the planted error" in failed.output.split("rank 1 failed")[1]
    assert not failed.left_over
    assert "the earlier device is now device." in failed.output


@pytest.fixture
def two_cards(tmp_path):
    """A PATH with an nvidia-smi that lists two cards; toolkit/bin/nvcc is of CUDA 12."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    jobs.stand_in(nvcc, "echo 'Cuda compilation tools, release 12.4, V12.4.99'")
    return jobs.path_with_gpus(tmp_path / "bin", 2)


@pytest.mark.parametrize(("ranks", "env", "sentence"), [
    ("2", {"CUDA_VISIBLE_DEVICES": "abc"}, "CUDA_VISIBLE_DEVICES is 'abc'; write numbers of cards"),
    ("2", {"CUDA_VISIBLE_DEVICES": "1,1"}, "names 1 twice"),
    ("2", {"CUDA_VISIBLE_DEVICES": "2,3"}, "names card 2, which nvidia-smi -L does not list; it lists 2"),
    ("2", {"CUDA_VISIBLE_DEVICES": "1"}, "2 ranks need 2 cards, 1 are visible"),
    ("2", {"CUDA_VISIBLE_DEVICES": "GPU-11111111-aaaa"}, "2 ranks need 2 cards, 1 are visible"),
    ("3", {}, "3 ranks need 3 cards, 2 are visible"),
    ("2", {}, "MindSpore cannot use the cards; CUDA_HOME is not set"),
    ("2", {"CUDA_HOME": "/nowhere"}, "/nowhere/bin/nvcc is no program that may be run"),
    ("2", {"CUDA_HOME": "{tmp}/toolkit"}, "nvcc is of CUDA 12.4, the plugin is for 11.6"),
    ("2", {"DEVICE_TARGET": "TPU"}, "DEVICE_TARGET is 'TPU'"),
    ("x", {}, "the number of ranks must be a whole number from 1, not 'x'"),
])
def test_cards_are_checked_before_the_start(ranks, env, sentence, cifar10, tmp_path, two_cards):
    env = {name: value.format(tmp=tmp_path) for name, value in env.items()}
    before = set(tmp_path.iterdir())
    result = jobs.run("bash", LESSON / "run_gpu.sh", cifar10, ranks, cwd=tmp_path,
                      env={"PATH": two_cards, "CUDA_HOME": "", **env})
    assert result.code == 2, result.output
    assert sentence in result.output
    assert set(tmp_path.iterdir()) == before


def test_bad_arguments_of_run_gpu_sh(cifar10, tmp_path):
    for arguments, sentence in ((["nowhere", 2], "the data folder nowhere does not exist"),
                                ([cifar10 / "test_batch.bin", 2], "test_batch.bin is a file (looked from "),
                                ([cifar10, 2, "--launcher"], "--launcher: expected one argument"),
                                ([cifar10, 2, "--launcher", "ssh"], "invalid choice: 'ssh' (choose from"),
                                ([cifar10, 2, "--lr", 1], "unrecognized arguments: --lr 1"),
                                ([cifar10, 2, "--lr", 1], "options of resnet50_distributed_training_gpu.py go after"),
                                ([cifar10, 1, "--", "--image-size", 9999], "(6719856 MB each)"),
                                ([], "no data set given: set DATA_PATH to the folder")):
        result = jobs.run("bash", LESSON / "run_gpu.sh", *arguments, cwd=tmp_path)
        assert result.code == 2, result.output
        assert sentence in result.output
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ the image folder
def cut_png(file):
    """Without its last 12 bytes Pillow reads it, MindSpore does not."""
    Image.new("RGB", (40, 40)).save(file)
    file.write_bytes(file.read_bytes()[:-12])


def empty_test_part(folder):
    shutil.rmtree(folder / "Test")
    (folder / "Test").mkdir()


def all_but_one_class(folder):
    for part in ("Training", "Test"):
        for other in sorted((folder / part).iterdir())[1:]:
            shutil.rmtree(other)


@pytest.mark.parametrize(("change", "sentence"), [
    (all_but_one_class, "Training has 1 class folder"),
    (lambda folder: shutil.rmtree(folder / "Training"), "has no folder Training"),
    (lambda folder: (shutil.rmtree(folder), folder.touch()), "fruits is a file (looked from "),
    (empty_test_part, "Test has no class folder"),
    (lambda folder: (folder / "Test" / "pear").mkdir(), "the class "),
    (lambda folder: shutil.copytree(folder / "Test" / "fruit_000", folder / "Test" / "pear"),
     "Test has the class pear, "),
    (lambda folder: (folder / "Test" / "fruit_000" / "9.jpg").write_bytes(
        (folder / "Test" / "fruit_000" / "0_100.jpg").read_bytes()[:900]), "9.jpg is no picture that can be read"),
    (lambda folder: os.mkfifo(folder / "Test" / "fruit_000" / "9.jpg"), "9.jpg is no picture that can be read"),
    (lambda folder: Image.new("RGB", (1, 40)).save(folder / "Test" / "fruit_000" / "9.png"),
     "9.png is no picture that can be read"),
    (lambda folder: cut_png(folder / "Test" / "fruit_000" / "9.png"), "9.png is no picture that can be read"),
])
def test_a_bad_image_folder_is_named(change, sentence, fruits, tmp_path):
    folder = tmp_path / "fruits"
    shutil.copytree(fruits, folder)
    change(folder)
    result = forks.run(LESSON / "gpu_single_train.py", "--data-path", folder, cwd=tmp_path)
    assert result.code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("option", "value", "sentence"), [
    ("--lr", "nan", "must be at least 1e-09, below 2**31, not nan"), ("--lr", 0, "must be at least 1e-09, below"),
    ("--steps", 10**20, "must be at least 1, below 2**31, not 100000000000000000000")])
def test_a_number_that_cannot_be_is_refused(option, value, sentence, fruits, tmp_path):
    result = forks.run(LESSON / "gpu_single_train.py", "--data-path", fruits, option, value, cwd=tmp_path)
    assert result.code == 2, result.output
    assert f"argument {option}: {sentence}" in result.output


def test_by_default_the_ranks_share_32_pictures(fruits, tmp_path):
    """What each would train on, counted just before the training."""
    lesson = jobs.planted("resnet50_gpu", tmp_path, "gpu_distributed_train.py", ("if first_epoch < args.epochs:\n", (
        "print('batches', [len(label) for _, label in train_dataset.create_tuple_iterator(num_epochs=1)])\n"
        "ranks.leave()\nif first_epoch < args.epochs:\n")))
    jobs.succeeded(by_mpirun(3, lesson / "gpu_distributed_train.py", "--data-path", fruits, *SMALL, "--steps", 99,
                             cwd=tmp_path))
    logs = [(tmp_path / "log" / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(3)]
    # 160 training pictures: 53 or 54 for each, in batches of 32 // 3; 20 to test
    assert "train dataset batch num: 5\ntest dataset batch num: 1\n" in logs[0]
    assert all("batches [10, 10, 10, 10, 10]\n" in log for log in logs)
