"""The worked example of the page "Your own model": ten lines make one process many, and the training stays the same."""

import json
import re
import textwrap
from importlib.metadata import version

import forks
import jobs
import pytest

LESSON = jobs.REPO / "own_model"
OLD = version("mindspore")[:4]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The parameters that one process ends with, and the losses that it prints."""
    def make(folder):
        result = jobs.succeeded(forks.run(LESSON / "train_alone.py", "--epochs", 1, cwd=folder))
        (folder / "log").write_text(result.output)

    folder = jobs.made_once(tmp_path_factory, "own model alone", make)
    return jobs.parameters(folder / "ckpt" / "surface-1_64.ckpt"), jobs.losses(folder / "log")


def check_same_training(alone, folder, logs):
    """Both ranks must end with the parameters of one process, and their losses must have its losses as mean."""
    parameters, losses = alone
    for rank in range(2):
        of_rank = jobs.parameters(folder / "ckpt" / f"rank_{rank}" / "surface-1_64.ckpt")
        assert jobs.largest_difference(parameters, of_rank) < 1e-5, "other parameters than one process"
    of_ranks = [jobs.losses(log) for log in logs]
    assert len(losses) == len(of_ranks[0]) == len(of_ranks[1]) > 5
    assert losses[-1] < losses[0] / 3
    for loss, *own in zip(losses, *of_ranks):
        assert abs(loss - sum(own) / 2) < 1e-5


def logs_of_launcher(folder):
    return [folder / f"log_output/1/rank.{rank}/stdout" for rank in range(2)]


def test_run_sh_trains_what_one_process_trains(alone, tmp_path):
    result = jobs.succeeded(jobs.run("bash", LESSON / "run.sh", 2, "--", "--epochs", 1, cwd=tmp_path))
    assert result.ranks() == {0: 2, 1: 2}
    assert re.search(r"^\[rank 0\] epoch: 1 step: 10, loss is 0\.16744$", result.output, re.MULTILINE), "5 digits"
    assert "rank 1: loss 0.21425 -> " in result.output
    assert "warning" not in result.output
    check_same_training(alone, tmp_path, logs_of_launcher(tmp_path))


def test_msrun_trains_what_one_process_trains(alone, tmp_path):
    result = jobs.succeeded(jobs.run("bash", LESSON / "run.sh", 2, "--launcher", "msrun", "--", "--epochs", 1,
                                     cwd=tmp_path))
    assert " other weights " not in result.output
    check_same_training(alone, tmp_path, [tmp_path / "log_output" / f"worker_{rank}.log" for rank in range(2)])


def test_the_device_that_is_wanted_is_the_one_that_trains(tmp_path):
    """A script that chooses no device takes DEVICE_TARGET's; that can be seen only where it is not there."""
    result = jobs.run(jobs.PYTHON, LESSON / "train_distributed.py", cwd=tmp_path, env={"DEVICE_TARGET": "GPU"})
    assert result.code == 1
    assert "Unsupported device target GPU" in result.output
    assert "loss is" not in result.output


@pytest.mark.parametrize(("change", "warnings"), [((", gradients_mean=True)", ")"), 1),
                                                  (("shard_id=rank,", "shard_id=0,"), 0)])
def test_lines_that_are_missing(change, warnings, alone, tmp_path):
    lesson = jobs.planted("own_model", tmp_path, "train_distributed.py", change)
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", 2, "--", "--epochs", 1, cwd=tmp_path))
    assert result.output.count("warning: gradients are summed over 2 ranks, not averaged, which is right") == warnings
    with pytest.raises(AssertionError, match="other parameters than one process"):
        check_same_training(alone, tmp_path, logs_of_launcher(tmp_path))


def test_ranks_that_train_alone_are_told(tmp_path):
    lesson = jobs.planted("own_model", tmp_path, "run.sh", ("/train_distributed.py", "/train_alone.py"))
    with_run_sh = jobs.succeeded(jobs.run("bash", lesson / "run.sh", 2, "--", "--epochs", 1, cwd=tmp_path))
    computed = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/compute.py", "-n", 2, lesson / "train_alone.py", "--epochs",
                        1, cwd=tmp_path)
    assert computed.code == 1
    assert "run.sh: warning: train_alone.py has no init(): " in with_run_sh.output
    assert computed.output.count("compute.py: the script never called mindspore.communication.init()") == 1
    for result in with_run_sh, computed:
        assert "each of the 2 " in result.output
        assert not result.left_over


MEANS = """
import sys
sys.path.insert(0, sys.argv[1])
import ranks
import mindspore as ms
from mindspore import nn
from mindspore.train import Model
ranks.join()
ms.communication.init()


def build(cell=None, **settings):
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, **settings)
    net = cell or nn.Dense(2, 2, "ones", "ones")
    try:
        Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()))
        print(settings, "ok", flush=True)
    except SystemExit as refusal:
        print(refusal, flush=True)


build(device_num=2, global_rank=ms.communication.get_rank())
build(device_num=4)
build(pipeline_stages=2)
weights = nn.Dense(2, 2, "ones", "ones").trainable_params()
ms.reset_auto_parallel_context()
nn.DistributedGradReducer(iter(weights), True, 4)  # of two accumulated batches each
nn.DistributedGradReducer(weights, True, ms.get_auto_parallel_context("device_num"))
ms.set_auto_parallel_context(parallel_mode="hybrid_parallel")
nn.DistributedGradReducer(weights)  # sums there may be what is meant
cell = nn.Dense(2, 2, "ones", "ones")
cell.shard(in_strategy=((2, 1),))
build(cell)
ranks.leave()
"""


def test_means_that_would_be_wrong_are_refused(tmp_path):
    (tmp_path / "means.py").write_text(MEANS)
    result = jobs.succeeded(jobs.run(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "means.py", "--", LESSON, cwd=tmp_path))
    for rank in range(2):
        said = [line for line in result.output.splitlines() if f"[rank {rank}]" in line]
        patterns = [rf"'device_num': 2, 'global_rank': {rank}}} ok$",
                    r"device_num=4 of set_auto_parallel_context is not the number of ranks, 2, by",
                    "pipeline_stages=2 makes gradients wrong in data_parallel; leave it out",
                    r"shard\(\) of a cell switches off the exchange of gradients, here those of 2 parameters \(weight,"]
        if rank == 0:
            patterns.insert(3, "warning: gradients are summed over 2 ranks and divided by 1, the degree given to ")
        assert len(said) == len(patterns), said
        for line, pattern in zip(said, patterns):
            assert re.search(pattern, line)


WIDE = """
import sys
sys.path.insert(0, sys.argv[1])
import ranks
import numpy as np
import mindspore as ms
from mindspore import Tensor, ops
ranks.join()
ms.communication.init()
rank = ms.communication.get_rank()
count = Tensor(np.array([[2 ** 40 + rank, -3]]).repeat(2, 0).T[::-1])
time = Tensor(np.array([1.7e9 + rank + 0.125]))
[counts], [times], [begin] = (ops.Broadcast(1)((one,)) for one in (count, time, Tensor(2 ** 50 + rank)))
for one in ops.AllGather()(count), ops.AllGather()(time), counts, times, begin:
    print(one.dtype, one.asnumpy().tolist(), flush=True)
gather = ops.AllGather()
recorded = ms.jit(lambda x: gather(x + 1), capture_mode="trace")
for number in 0, 100:  # no constant of the first call
    print(recorded(Tensor([number + rank])).asnumpy().tolist(), flush=True)
try:
    ops.AllGather()(Tensor(1.0))
except ValueError as error:
    print(error, flush=True)
ranks.leave()
"""


def test_numbers_of_64_bits_travel_whole(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    result = jobs.succeeded(jobs.run(jobs.PYTHON, LESSON / "ranks.py", "-n", 2, "wide.py", "--", LESSON, cwd=tmp_path))
    counts = [[[-3] * 2, [2 ** 40 + rank] * 2] for rank in range(2)]
    times = [1.7e9 + 0.125, 1.7e9 + 1.125]
    wanted = [f"Int64 {counts[0] + counts[1]}", f"Float64 {times}", f"Int64 {counts[1]}", f"Float64 {times[1:]}",
              f"Int64 {2 ** 50 + 1}", "[1, 2]", "[101, 102]",
              "AllGather joins the ranks' tensors along their first axis, and a single number has none: give it "
              "x.reshape(1)"]
    for rank in range(2):
        assert re.findall(rf"^\[rank {rank}\] (.*)", result.output, re.MULTILINE) == wanted


OWN_LOOP = """step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(
    net.trainable_params(), 0.1 + rank / 1000, 0.9)).set_train()
for point, height in dataset:
    step(point, height)"""


FORGETS = """optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
grad = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)
for point, height in dataset:
    gradients = grad(point, height)
    optimizer(gradients[1])
    print("mean of the loss", ms.ops.AllReduce()(gradients[0]) / 2)
ranks.leave()"""


IN_A_FUNCTION = f"def main():\n{textwrap.indent(FORGETS.replace('ranks.leave()', ''), '    ')}\nmain()\nranks.leave()"


BY_FUNCTIONS = """from mindspore.ops import communication
optimizer = nn.Momentum(net.trainable_params(), 0.1 + rank / 1000, 0.9)
ms.reset_auto_parallel_context()
grad = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)
for point, height in dataset:
    optimizer(grad(point, height)[1])
communication.all_reduce(ms.Tensor(net[0].weight.asnumpy()))  # as if it had averaged the weights before
ranks.leave()"""


IN_GROUPS = """ms.communication.create_group(f"of {rank}", [rank])
optimizer = nn.Momentum(net.trainable_params(), 0.1 + rank / 1000, 0.9)
reduce = nn.DistributedGradReducer(optimizer.parameters, True, 1, group=f"of {rank}")
grad = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)
for point, height in dataset:
    optimizer(reduce(grad(point, height)[1]))
ranks.leave()"""


FINE_TUNED = """ms.load_param_into_net(net, {one.name: one.clone() for one in net.get_parameters()})
idle = ms.Parameter(ms.Tensor([1.0]), name="idle")
idle.set_data(ms.Tensor([2.0]))
model = Model(net, nn.MSELoss(), nn.Momentum([*net.trainable_params(), idle], 0.1 + rank / 1000, 0.9))"""


@pytest.mark.parametrize(("line", "other"), [
    ("model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))", FINE_TUNED),
    ("model.train(args.epochs, dataset, callbacks=[LossMonitor(10), save], dataset_sink_mode=False)", OWN_LOOP),
    ('ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)', "pass"),
    ("model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))", IN_A_FUNCTION),
    ("model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))",
     FORGETS.replace("grad = ms", "ms.reset_auto_parallel_context()\ngrad = ms")),
    pytest.param("model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))", BY_FUNCTIONS,
                 marks=pytest.mark.skipif(OLD in ("2.7.", "2.8."), reason="it has no such functions")),
    pytest.param("model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))", IN_GROUPS,
                 marks=pytest.mark.skipif(OLD == "2.7.", reason="it adds up over all ranks only")),
    ("ranks.leave()", "if rank == 0:  # as if it loaded the best\n    net[0].weight.set_data(-net[0].weight)\n"
                      "ranks.leave()")])
def test_weights_that_differ_in_the_end_are_told(line, other, tmp_path):
    lesson = jobs.planted("own_model", tmp_path, "train_distributed.py", (line, other))
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", 2, "--", "--epochs", 1, cwd=tmp_path))
    assert len(re.findall(r"^\[rank 0\] warning: rank 1 ended with other weights than rank 0", result.output,
                          re.MULTILINE)) == (
        "if rank == 0" not in other and "reset" not in other and other != IN_GROUPS)
    assert ("each has trained alone" in result.output) == (other == "pass")
    assert ("a step by hand lacks gradients = nn.DistributedGradReducer" in result.output) == (
        other == IN_A_FUNCTION)


def test_weights_are_compared_under_msrun_too(tmp_path):
    """Its ranks do not wait for each other at the end: the launcher compares."""
    lesson = jobs.planted("own_model", tmp_path, "train_distributed.py", (
        "nn.Momentum(net.trainable_params(), 0.1", "nn.Momentum(net.trainable_params(), 0.1 + rank / 1000"))
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", 2, "--launcher", "msrun", "--", "--epochs", 1,
                                     cwd=tmp_path))
    assert result.output.count("run.sh: warning: rank 1 ended with other weights than rank 0; in data") == 1
    assert result.output.count(" other weights ") == 1


def test_weights_are_compared_by_ranks_of_a_table_too(tmp_path):
    lesson = jobs.planted("own_model", tmp_path, "train_distributed.py", (
        "nn.Momentum(net.trainable_params(), 0.1", "nn.Momentum(net.trainable_params(), 0.1 + rank / 1000"))
    result = jobs.succeeded(jobs.run(jobs.PYTHON, lesson / "ranks.py", "-n", 2, "--with", "table",
                                     lesson / "train_distributed.py", "--", "--epochs", 1, cwd=tmp_path,
                                     env={"DEVICE_TARGET": "CPU"}))
    assert result.output.count("[rank 0] warning: rank 1 ended with other weights than rank 0; in data") == 1


def test_the_dry_run_compiles_it(tmp_path):
    report = tmp_path / "report.json"
    jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 8, "--ranks", "7", "--json",
                            report, LESSON / "train_distributed.py", cwd=tmp_path, timeout=300,
                            env={"DEVICE_TARGET": "CPU"}))  # left over from a rehearsal: a dry run is of Ascend
    rank = json.loads(report.read_text())["ranks"][0]
    reduced = [call for call in rank["collectives"] if call["op"] == "AllReduce"]
    assert sum(call["bytes"] for call in reduced) == rank["trained_bytes"]


def test_ten_lines_are_marked():
    text = (LESSON / "train_distributed.py").read_text()
    assert [int(number) for number in re.findall(r"# distributed: (\d+)\.", text)] == list(range(1, 11))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["0"], "whole number from 1, not '0'"),
    (["2", "3"], "run.sh: error: unrecognized arguments: 3 (bash run.sh --help explains all)"),
    (["2", "--epochs", "1"], "unrecognized arguments: --epochs 1")])
def test_bad_input(arguments, sentence, tmp_path):
    result = jobs.run("bash", LESSON / "run.sh", *arguments, cwd=tmp_path)
    assert result.code == 2
    assert sentence in result.output
