"""The parallel modes side by side: real ranks on CPU, their Ascend plans computed there, and compiled for Ascend."""

import json
import re
import shutil

import forks
import jobs
import numpy as np
import pytest
from forks import refused

LESSON = jobs.REPO / "parallel_modes"
STEPS = 8
SLICED = ("weight", "moments.weight")


# ------------------------------------------------------------------------------------------- evidence
def train(folder, mode, ranks, *options, lesson=LESSON):
    """Train with the real launcher, one process by hand; return the Result."""
    folder.mkdir(exist_ok=True)
    if ranks == 1:
        return jobs.succeeded(forks.run(lesson / "parallel_modes.py", "--mode", mode, *options, cwd=folder))
    return jobs.succeeded(jobs.run("bash", lesson / "run.sh", mode, ranks, "--", *options, cwd=folder, timeout=300))


def losses_of(result, ranks):
    """The losses that each rank printed, in order."""
    if ranks == 1:
        return [[float(value) for value in re.findall(r"^step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]]
    return [[float(value) for value in
             re.findall(rf"^\[rank {rank}\] step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]
            for rank in range(ranks)]


def read(*folders):
    """Of each folder the checkpoints of all ranks: lists of {name: array}, in the order of the ranks, bit for bit."""
    return [[jobs.parameters(next((folder / f"rank_{rank}").glob("*.ckpt")))
             for rank in range(len(list(folder.glob("rank_*"))))] for folder in folders]


def gathered(ranks):
    """One set of parameters from those of all ranks: slices side by side; what several ranks hold must be equal.

    With 2 slices on 4 ranks, rank 1 holds what rank 0 holds, and rank 3 what rank 2 holds.
    """
    whole = {}
    for name, first in ranks[0].items():
        slices = 128 // first.shape[1] if name in SLICED else 1
        copies = len(ranks) // slices
        for number, rank in enumerate(ranks):
            other = number - number % copies
            assert np.array_equal(rank[name], ranks[other][name]), f"rank {number} has another {name} than rank {other}"
        whole[name] = np.concatenate([rank[name] for rank in ranks[::copies]], axis=1) if slices > 1 else first
    return whole


def check_equal_to_one(result, folder, ranks, shape, one):
    """The evidence that ranks trained the network of one process: good runs have it, planted bugs do not."""
    assert result.ranks() == dict.fromkeys(range(ranks), ranks)
    assert result.output.count(f": weight {shape}, bias (1,),") == ranks
    first, *others = losses_of(result, ranks)
    assert len(first) == STEPS
    assert not any(others), "what all ranks know is said by one"
    difference = np.abs(np.array(first) / one.losses - 1).max()  # 5 digits are printed
    assert difference < 2e-4, f"the losses of rank 0 differ from those of one process by up to {difference}"
    [saved] = read(folder)
    whole = gathered(saved)
    assert whole.keys() == one.parameters.keys()
    for name, value in whole.items():
        difference = np.abs(value - one.parameters[name]).max()
        assert difference < 1e-5, f"{name} differs from that of one process by up to {difference}"
    return saved


class One:
    """One process: the losses of STEPS steps, and the parameters after them."""

    def __init__(self, folder):
        self.losses = np.array([float(value) for value in (folder / "losses").read_text().split()])
        [[self.parameters]] = read(folder / "one")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    def make(folder):
        result = train(folder, "stand_alone", 1, "--steps", STEPS, "--ckpt-dir", folder / "one")
        (folder / "losses").write_text(" ".join(map(str, losses_of(result, 1)[0])))

    # a space in the path: it must not matter
    trained = One(jobs.made_once(tmp_path_factory, "one process", make))
    means = trained.losses.reshape(-1, 4).mean(axis=1)  # 4 batches: all samples once
    assert means[-1] < 0.9 * means[0], f"the loss did not fall: {trained.losses}"
    assert trained.parameters["global_step"] == STEPS
    return trained


# ------------------------------------------------------------------------------ the same network, for real
BUGS = {
    "wrong scale of the gradients": ([  # the first loss is right
        ("((self.net(x) - y) ** 2).mean() / self.ranks", "((self.net(x) - y) ** 2).mean()"),
        ("return self.add_up(loss)", "return self.add_up(loss / self.ranks)")], "differ"),
    "slices swapped": ([("weight[:, columns_of(rank, rank_size)]",  # all losses are right
                         "weight[:, columns_of(rank_size - 1 - rank, rank_size)]")], "weight differs"),
}


def test_two_ranks_of_hybrid_parallel_train_the_network_of_one_process(one, tmp_path):
    result = train(tmp_path, "hybrid_parallel", 2, "--steps", STEPS, "--ckpt-dir", "ckpt")
    saved = check_equal_to_one(result, tmp_path / "ckpt", 2, "(512, 64)", one)
    assert [str(rank["weight"].shape) for rank in saved] == ["(512, 64)"] * 2


@pytest.mark.parametrize("bug", BUGS)
def test_the_evidence_catches_planted_bugs(bug, one, tmp_path):
    changes, caught_as = BUGS[bug]
    lesson = jobs.planted("parallel_modes", tmp_path, "networks.py", *changes)
    result = train(tmp_path, "hybrid_parallel", 2, "--steps", STEPS, "--ckpt-dir", "ckpt", lesson=lesson)
    with pytest.raises(AssertionError, match=caught_as):
        check_equal_to_one(result, tmp_path / "ckpt", 2, "(512, 64)", one)


def test_two_ranks_of_data_parallel_train_the_network_of_one_process(one, tmp_path):
    result = train(tmp_path, "data_parallel", 2, "--steps", STEPS, "--ckpt-dir", "ckpt")
    saved = check_equal_to_one(result, tmp_path / "ckpt", 2, "(512, 128)", one)
    assert [str(rank["weight"].shape) for rank in saved] == ["(512, 128)"] * 2
    assert [int(first) for first in re.findall(r"samples (\d+)-\d+ of 64", result.output)] != [0] * 2


# ------------------------------------------------------------------- the Ascend plan, computed by real ranks on CPU
def compute(folder, one, mode, ranks, *options, shape):
    """Train in a mode that MindSpore's Ascend compiler plans, and compare with one process."""
    result = train(folder, mode, ranks, "--steps", STEPS, "--ckpt-dir", "ckpt", *options)
    assert result.output.count(f"MindSpore has no {mode} on CPU: its Ascend plan is computed here") == 1
    assert "too large" not in result.output, "gradients are divided"
    saved = check_equal_to_one(result, folder / "ckpt", ranks, shape, one)
    assert [str(rank[name].shape) for rank in saved for name in SLICED] == [shape] * 2 * ranks


def test_semi_auto_parallel_trains_the_network_of_one_process(one, tmp_path, monkeypatch):
    """Two slices on four ranks: compiled, below."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    compute(tmp_path, one, "semi_auto_parallel", 2, shape="(512, 64)")
    assert not list((tmp_path / "tmp").rglob("*plan*")), "the plans are left there"


@pytest.mark.parametrize(("search_mode", "shape"), [  # all three: in test_compute.py
    ("dynamic_programming", "(512, 128)"), ("sharding_propagation", "(512, 64)")])
def test_auto_parallel_trains_the_network_of_one_process(search_mode, shape, one, tmp_path):
    compute(tmp_path, one, "auto_parallel", 2, "--search-mode", search_mode, shape=shape)


# ------------------------------------------------------------------------------------ compiled for Ascend
def dry_run(folder, ranks, mode, *options, only="0", lesson=LESSON):
    """Compile ranks for Ascend by the lesson's launcher; return what the report says of each."""
    report = folder / f"{mode}.json"
    jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", "--rank-size", ranks, "--ranks", only,
                            "--json", report, lesson / "parallel_modes.py", "--mode", mode, *options,
                            cwd=folder, timeout=300))
    found = json.loads(report.read_text())
    assert found["faults"] == []
    assert all(rank["compiled"] for rank in found["ranks"])
    return found["ranks"]


def slices_of(rank):
    """{name: (slice shape, ranks that hold the parameter once)} of the two largest parameters."""
    return {p["name"]: (tuple(p["slice_shape"]), p["over_ranks"]) for p in rank["parameters"] if p["name"] in SLICED}


def collectives_of(rank):
    """What a rank runs a step, in no order: (collective, bytes, ranks)."""
    return sorted((c["op"], c["bytes"], tuple(c["ranks"])) for c in rank["collectives"])


@pytest.mark.parametrize(("ranks", "slices"), [(4, None), (4, 2)])
def test_semi_auto_slices_are_those_of_arithmetic(ranks, slices, tmp_path):
    options = ("--slices", slices) if slices else ()
    compiled = dry_run(tmp_path, ranks, "semi_auto_parallel", *options, only=f"0-{ranks - 1}")
    width = 128 // (slices or ranks)
    for rank in compiled:
        together = list(range(ranks)) if slices is None else [rank["rank"] % 2, rank["rank"] % 2 + 2]
        assert slices_of(rank) == dict.fromkeys(SLICED, ((512, width), together))
        assert rank["trained_bytes"] == 4 * (512 * width + 1)
    if slices is None:  # what semi-auto parallel inserts is what hybrid parallel has written by hand
        everyone = tuple(range(ranks))  # the sums over columns, forth and back; the loss; the gradient of the bias
        by_hand = [("AllReduce", 4 * 64, everyone)] * 2 + [("AllReduce", 4, everyone)] * 2
        other = jobs.planted("parallel_modes", tmp_path, "networks.py", ('name="bias"', 'name="no.weight"'))
        [hybrid] = dry_run(tmp_path, ranks, "hybrid_parallel", lesson=other)
        assert collectives_of(compiled[0]) == collectives_of(hybrid) == sorted(by_hand)
        own = {p["name"]: p["slice_shape"] for p in hybrid["parameters"] if p["own"]}
        assert own.keys() == set(SLICED), "the momentum of a slice by hand is a slice"
        assert own["weight"] == [512, width]


def test_a_strategy_for_matmul_alone_costs_a_redistribution(tmp_path):
    lesson = jobs.planted("parallel_modes", tmp_path, "networks.py", ("        self.relu.shard(", "        print("),
                          ("        self.reduce_sum.shard(", "        print("))
    [rank] = dry_run(tmp_path, 2, "semi_auto_parallel", lesson=lesson)
    assert slices_of(rank) == dict.fromkeys(SLICED, ((512, 64), [0, 1]))
    matrix = 4 * 64 * 128
    assert collectives_of(rank) == [("AllGather", matrix, (0, 1)), ("AllReduce", 4, (0, 1)), ("AllReduce", 4, (0, 1)),
                                    ("ReduceScatter", matrix, (0, 1))]


@pytest.mark.parametrize("search_mode", ["recursive_programming", "sharding_propagation"])  # the third trains, above
def test_auto_parallel_compiles_with_every_search_mode(search_mode, tmp_path):
    [rank] = dry_run(tmp_path, 2, "auto_parallel", "--search-mode", search_mode)
    (shape, together) = slices_of(rank)["weight"]
    assert slices_of(rank)["moments.weight"] == (shape, together)
    assert shape[0] * shape[1] * len(together) == 512 * 128
    # Whole weights need the sum of their gradients, sliced ones do not.
    assert (("AllReduce", 4 * 512 * 128, (0, 1)) in collectives_of(rank)) == (shape == (512, 128))


def test_data_parallel_reduces_what_is_trained(tmp_path):
    [rank] = dry_run(tmp_path, 4, "data_parallel")
    everyone = tuple(range(4))
    assert slices_of(rank) == dict.fromkeys(SLICED, ((512, 128), [0]))
    assert collectives_of(rank) == [("AllReduce", 4, everyone), ("AllReduce", 4, everyone),
                                    ("AllReduce", 4 * 512 * 128, everyone)]


# -------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("arguments", "sentence"), [
    (["data_parallel"], "it takes MODE and N"),
    (["data_parallel", "two"], "must be a whole number from 1, not 'two'"),
    (["data_parallel", "2", "--lr", "1"], "unrecognized arguments: --lr"),
    (["data_parallel", "3"], "the batch of 64 samples cannot be shared equally by 3 ranks"),
    (["hybrid_parallel", "3"], "the weight's 128 columns cannot be cut into 3 equal slices, one a rank"),
    (["hybrid_parallel", "2", "--", "--slices", "2"], "--slices is for semi_auto_parallel"),
    (["auto_parallel", "3"], r"MindSpore has auto_parallel for 1, 2, 4, 8, 16, \.\.\. ranks, not for 3"),
    (["semi_auto_parallel", "6", "--", "--slices", "2"], r"MindSpore has semi_auto_parallel for 1, 2, 4, .* not for 6"),
    (["stand_alone", "2"], "stand_alone is one process, not 2"),
    (["semi_auto_parallel", "4", "--", "--slices", "3"], r"the strategy \(\(1, 1\), \(1, 3\)\) does not fit"),
    (["semi_auto_parallel", "4", "--dry-run", "--", "--slices", "3"],
     r"the strategy \(\(1, 1\), \(1, 3\)\) does not fit"),
])
def test_bad_input_of_the_launcher_is_one_sentence(arguments, sentence, tmp_path):
    refused(sentence, "bash", LESSON / "run.sh", *arguments, cwd=tmp_path)


def test_a_parallel_mode_without_a_launcher_names_it(tmp_path):
    refused("hybrid_parallel needs a launcher: bash run.sh hybrid_parallel 2",
            jobs.PYTHON, LESSON / "parallel_modes.py", "--mode", "hybrid_parallel", cwd=tmp_path)


@pytest.mark.parametrize(("given", "sentence"), [
    (("semi_auto_parallel", 2, "--launcher", "msrun"), "a plan is computed on CPU under mpirun only; leave out"),
    (("data_parallel", 2, "--dry-run", "--time-limit", 9), "--time-limit is for ranks that train, and --dry-run only"),
])
def test_what_a_launcher_cannot_do_together(given, sentence, tmp_path):
    refused(sentence, "bash", LESSON / "run.sh", *given, cwd=tmp_path)


@pytest.mark.parametrize(("mode", "tools"), [("semi_auto_parallel", True), ("auto_parallel", False)])
def test_without_dry_run_beside_it_a_planned_mode_is_refused(mode, tools, tmp_path):
    lesson = shutil.copytree(LESSON, tmp_path / "parallel_modes")
    if tools:
        shutil.copytree(jobs.REPO / "tools", tmp_path / "tools")
    refused(rf"MindSpore has no {mode} on CPU; run\.sh computes it for 2 or more ranks of "
            r"one machine,\s+with the folders\s+dry_run/",
            "bash", lesson / "run.sh", mode, 2, cwd=tmp_path)
