"""The parallel modes side by side: real ranks on CPU, compiled ranks for Ascend, and their checkpoints."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jobs
import numpy as np
import pytest

LESSON = jobs.REPO / "parallel_modes"
STEPS = 8
SLICED = ("weight", "moments.weight")


# ------------------------------------------------------------------------------------------- evidence
def train(folder, mode, ranks, *options, lesson=LESSON):
    """Train with the real launcher, one process by hand; return the Result."""
    folder.mkdir(exist_ok=True)
    command = ("bash", lesson / "run.sh", mode, ranks, "--") if ranks > 1 else (
        jobs.PYTHON, lesson / "parallel_modes.py", "--mode", mode)
    return jobs.succeeded(jobs.run(*command, *options, cwd=folder))


def losses_of(result, ranks):
    """The losses that each rank printed, in order."""
    if ranks == 1:
        return [[float(value) for value in re.findall(r"^step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]]
    return [[float(value) for value in
             re.findall(rf"^\[rank {rank}\] step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]
            for rank in range(ranks)]


def read(folder):
    """The checkpoints of all ranks in a folder: a list of {name: array}, in the order of the ranks, bit for bit."""
    code = ("import os, sys; os.environ['GLOG_v'] = '4'\n"
            "import mindspore, numpy\n"
            "for number, name in enumerate(sys.argv[2:]):\n"
            "    loaded = mindspore.load_checkpoint(name)\n"
            "    numpy.savez(f'{sys.argv[1]}/{number}.npz', **{k: v.asnumpy() for k, v in loaded.items()})\n")
    ranks = len(list(folder.glob("rank_*")))
    files = [next((folder / f"rank_{rank}").glob("*.ckpt")) for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as arrays:
        subprocess.run([jobs.PYTHON, "-c", code, arrays, *map(str, files)], check=True, capture_output=True)
        return [dict(np.load(f"{arrays}/{number}.npz")) for number in range(ranks)]


def gathered(ranks):
    """One set of parameters from those of all ranks: slices side by side; what is not sliced must be equal."""
    whole = {}
    for name, first in ranks[0].items():
        if name in SLICED and first.shape != (512, 128):
            whole[name] = np.concatenate([rank[name] for rank in ranks], axis=1)
        else:
            for number, rank in enumerate(ranks):
                assert np.array_equal(rank[name], first), f"rank {number} has another {name} than rank 0"
            whole[name] = first
    return whole


def check_equal_to_one(result, folder, ranks, shape, one):
    """The evidence that ranks trained the network of one process: for good runs, and for planted bugs, where it fails."""
    assert result.ranks() == dict.fromkeys(range(ranks), ranks)
    assert result.output.count(f": weight {shape}, bias (1,),") == ranks
    for rank, trace in enumerate(losses_of(result, ranks)):
        assert len(trace) == STEPS
        difference = np.abs(np.array(trace) - one.losses).max()
        assert difference < 1e-5, f"the losses of rank {rank} differ from those of one process by up to {difference}"
    saved = read(folder)
    whole = gathered(saved)
    assert whole.keys() == one.parameters.keys()
    for name, value in whole.items():
        difference = np.abs(value - one.parameters[name]).max()
        assert difference < 1e-5, f"{name} differs from that of one process by up to {difference}"
    return saved


class One:
    """One process: its folder, the losses of STEPS steps, and the parameters after them."""

    def __init__(self, folder):
        self.folder = folder / "one"
        result = train(folder, "stand_alone", 1, "--steps", STEPS, "--ckpt-dir", self.folder)
        self.losses = np.array(losses_of(result, 1)[0])
        [self.parameters] = read(self.folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    trained = One(tmp_path_factory.mktemp("one process"))  # a space in the path: it must not matter
    means = trained.losses.reshape(-1, 4).mean(axis=1)  # 4 batches: all samples once
    assert means[-1] < 0.9 * means[0], f"the loss did not fall: {trained.losses}"
    assert trained.parameters["global_step"] == STEPS
    return trained


def tool(script, *arguments, cwd):
    """Run one of the lesson's tools; return its output."""
    return jobs.succeeded(jobs.run(jobs.PYTHON, LESSON / script, *arguments, cwd=cwd)).output


def strategy_of(folder, ranks):
    """The strategy file that a semi-auto job writes, from a dry run of its rank 0."""
    report = folder / f"report_{ranks}.json"
    jobs.succeeded(jobs.run(
        jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", "--rank-size", ranks, "--ranks", 0, "--json", report,
        LESSON / "parallel_modes.py", "--mode", "semi_auto_parallel", "--ckpt-dir", folder / f"semi_{ranks}",
        cwd=folder, timeout=300))
    return folder / f"semi_{ranks}" / "rank_0" / "strategy.json"


# ------------------------------------------------------------------------------ the same network, for real
BUGS = {
    "data: gradients not reduced": ("data_parallel", "parallel_modes.py", [
        ("gradients = self.reduce_gradients(gradients)", "gradients = gradients")], "differ|has another"),
    "hybrid: wrong scale of the gradients": ("hybrid_parallel", "parallel_modes.py", [  # the first loss is right
        ("((self.net(x) - y) ** 2).mean() / self.parts", "((self.net(x) - y) ** 2).mean()"),
        ("return self.add_up(loss)", "return self.add_up(loss / self.parts)")], "differ"),
    "hybrid: no AllReduce": ("hybrid_parallel", "networks.py", [
        ("return self.all_reduce(x) + self.bias", "return x + self.bias")], "differ"),
    "hybrid: slices swapped": ("hybrid_parallel", "networks.py", [  # all losses are right
        ("weight[:, columns_of(rank, rank_size)]", "weight[:, columns_of(rank_size - 1 - rank, rank_size)]")],
        "weight differs"),
}


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
def test_two_ranks_train_the_network_of_one_process(mode, one, tmp_path):
    result = train(tmp_path, mode, 2, "--steps", STEPS, "--ckpt-dir", "ckpt")  # whole files: hybrid gathers
    shape = "(512, 128)" if mode == "data_parallel" else "(512, 64)"
    saved = check_equal_to_one(result, tmp_path / "ckpt", 2, shape, one)
    assert [rank["weight"].shape for rank in saved] == [(512, 128)] * 2


@pytest.mark.parametrize("bug", BUGS)
def test_the_evidence_catches_planted_bugs(bug, one, tmp_path):
    mode, script, changes, caught_as = BUGS[bug]
    lesson = jobs.planted("parallel_modes", tmp_path, script, *changes)
    result = train(tmp_path, mode, 2, "--steps", STEPS, "--ckpt-dir", "ckpt", "--sliced", lesson=lesson)
    with pytest.raises(AssertionError, match=caught_as):
        check_equal_to_one(result, tmp_path / "ckpt", 2, "(512, 128)" if mode == "data_parallel" else "(512, 64)", one)


# -------------------------------------------------------------------------------- checkpoints, for real
def same_bits(first, second):
    """Whether two lists of parameter sets are equal to the last bit."""
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a) for a, b in zip(first, second))


def test_slices_of_four_ranks_go_to_two_and_to_one(one, tmp_path):
    result = train(tmp_path, "hybrid_parallel", 4, "--steps", STEPS, "--ckpt-dir", "four", "--sliced")
    four = check_equal_to_one(result, tmp_path / "four", 4, "(512, 32)", one)
    assert [rank["weight"].shape for rank in four] == [(512, 32)] * 4

    # By hand, and by MindSpore with the strategies of semi-auto jobs whose slices are the same: the same bits.
    outputs = [tool("convert_checkpoints.py", source, target, "--ranks", ranks, cwd=tmp_path)
               for source, target, ranks in (("four", "two", 2), ("two", "whole", 1), ("whole", "again", 4))]
    assert outputs[0] == "four: 4 ranks, weight (512, 32)\ntwo: 2 ranks, weight (512, 64)\n"
    strategies = {ranks: strategy_of(tmp_path, ranks) for ranks in (4, 2)}
    tool("convert_checkpoints.py", "four", "by_mindspore_2", "--strategy", strategies[4], "--to-strategy", strategies[2],
         cwd=tmp_path)
    tool("convert_checkpoints.py", "by_mindspore_2", "by_mindspore", "--strategy", strategies[2], cwd=tmp_path)
    assert same_bits(read(tmp_path / "again"), four)
    assert same_bits(read(tmp_path / "by_mindspore_2"), read(tmp_path / "two"))
    [whole] = read(tmp_path / "whole")
    assert same_bits(read(tmp_path / "by_mindspore"), [whole])
    assert same_bits([gathered(four)], [whole])

    answers = tool("predict.py", "whole", cwd=tmp_path)
    assert len(re.findall(r"^sample \d: answer \d\.\d{5,}, wanted", answers, re.MULTILINE)) == 8
    assert answers == tool("predict.py", "four", "--strategy", strategies[4], cwd=tmp_path)
    assert answers != tool("predict.py", one.folder, "--seed", 3, cwd=tmp_path), "the answers depend on nothing"

    # Two ranks go on with their slices, as one process does with the whole.
    expected = losses_of(train(tmp_path, "stand_alone", 1, "--load", "whole", "--steps", 4), 1)[0]
    resumed = losses_of(train(tmp_path, "hybrid_parallel", 2, "--load", "two", "--steps", 4), 2)
    assert np.abs(np.array(resumed) - expected).max() < 1e-5

    # The planted bug: slices merged in another order give other answers.
    lesson = jobs.planted("parallel_modes", tmp_path, "convert_checkpoints.py", ("for rank in ranks], axis=1", "for rank in ranks[::-1]], axis=1"))
    jobs.succeeded(jobs.run(jobs.PYTHON, lesson / "convert_checkpoints.py", "four", "swapped", "--ranks", 1, cwd=tmp_path))
    assert not same_bits(read(tmp_path / "swapped"), [whole])
