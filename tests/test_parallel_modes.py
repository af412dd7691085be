"""The parallel modes side by side: real ranks on CPU, compiled ranks for Ascend, and their checkpoints."""

import itertools
import json
import re
import shutil
import subprocess
import tempfile

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
    return jobs.succeeded(jobs.run(*command, *options, cwd=folder, timeout=300))


def losses_of(result, ranks):
    """The losses that each rank printed, in order."""
    if ranks == 1:
        return [[float(value) for value in re.findall(r"^step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]]
    return [[float(value) for value in
             re.findall(rf"^\[rank {rank}\] step: \d+, loss is (\S+)$", result.output, re.MULTILINE)]
            for rank in range(ranks)]


def read(*folders):
    """Of each folder the checkpoints of all ranks: lists of {name: array}, in the order of the ranks, bit for bit."""
    code = ("import os, sys; os.environ['GLOG_v'] = '4'\n"
            "import mindspore, numpy\n"
            "for number, name in enumerate(sys.argv[2:]):\n"
            "    loaded = mindspore.load_checkpoint(name)\n"
            "    numpy.savez(f'{sys.argv[1]}/{number}.npz', **{k: v.asnumpy() for k, v in loaded.items()})\n")
    ranks = [len(list(folder.glob("rank_*"))) for folder in folders]
    files = [next((folder / f"rank_{rank}").glob("*.ckpt")) for folder, n in zip(folders, ranks) for rank in range(n)]
    with tempfile.TemporaryDirectory() as arrays:
        subprocess.run([jobs.PYTHON, "-c", code, arrays, *map(str, files)], check=True, capture_output=True)
        loaded = iter([dict(np.load(f"{arrays}/{number}.npz")) for number in range(len(files))])
    return [list(itertools.islice(loaded, n)) for n in ranks]


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
    """The evidence that ranks trained the network of one process: good runs have it, planted bugs do not."""
    assert result.ranks() == dict.fromkeys(range(ranks), ranks)
    assert result.output.count(f": weight {shape}, bias (1,),") == ranks
    for rank, trace in enumerate(losses_of(result, ranks)):
        assert len(trace) == STEPS
        difference = np.abs(np.array(trace) - one.losses).max()
        assert difference < 1e-5, f"the losses of rank {rank} differ from those of one process by up to {difference}"
    [saved] = read(folder)
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
        [[self.parameters]] = read(self.folder)


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

    # By hand, and by MindSpore with the strategies of semi-auto jobs, whose slices are the same: the same bits.
    strategies = {ranks: strategy_of(tmp_path, ranks) for ranks in (4, 2)}
    for source, target, *how in (("four", "two", "--ranks", 2), ("two", "whole", "--ranks", 1),
                                 ("four", "ms_two", "--strategy", strategies[4], "--to-strategy", strategies[2]),
                                 ("ms_two", "ms_whole", "--strategy", strategies[2])):
        output = tool("convert_checkpoints.py", source, target, *how, cwd=tmp_path)
        if target == "two":
            assert output == "four: 4 ranks, weight (512, 32)\ntwo: 2 ranks, weight (512, 64)\n"
    # The planted bug: slices merged in another order.
    lesson = jobs.planted("parallel_modes", tmp_path, "convert_checkpoints.py", (
        "for rank in ranks], axis=1", "for rank in ranks[::-1]], axis=1"))
    jobs.succeeded(jobs.run(jobs.PYTHON, lesson / "convert_checkpoints.py", "four", "swapped", "--ranks", 1,
                            cwd=tmp_path))
    two, [whole], by_mindspore_two, by_mindspore, swapped = read(*(
        tmp_path / name for name in ("two", "whole", "ms_two", "ms_whole", "swapped")))
    assert [rank["weight"].shape for rank in two] == [(512, 64)] * 2
    assert same_bits(two, by_mindspore_two)
    for other in ([gathered(four)], [gathered(two)], by_mindspore):
        assert same_bits([whole], other)
    assert not same_bits([whole], swapped)

    answers = tool("predict.py", "whole", cwd=tmp_path)
    assert len(set(re.findall(r"^sample \d: answer (\d\.\d{5,}), wanted", answers, re.MULTILINE))) == 8
    assert answers == tool("predict.py", "four", "--strategy", strategies[4], cwd=tmp_path)

    # Two ranks go on with their slices, as one process does with the whole.
    expected = losses_of(train(tmp_path, "stand_alone", 1, "--load", "whole", "--steps", 4), 1)[0]
    resumed = losses_of(train(tmp_path, "hybrid_parallel", 2, "--load", "two", "--steps", 4), 2)
    assert np.abs(np.array(resumed) - expected).max() < 1e-5


@pytest.mark.parametrize("bug", [None, "nobody broadcasts"])
def test_rank_0_loads_and_broadcast_gives_the_rest(bug, one, tmp_path):
    changes = {
        None: [],
        "nobody broadcasts": [("received += self.broadcast((tensor,))", "received += (tensor,)")],
    }
    lesson = jobs.planted("parallel_modes", tmp_path, "checkpoint_files.py", *changes[bug])
    expected = losses_of(train(tmp_path, "stand_alone", 1, "--load", one.folder, "--steps", 3), 1)[0]
    assert expected[0] < one.losses[0], "it goes on with what was loaded"
    # One process has saved: there is no file of rank 1 that rank 1 could read.
    loaded = losses_of(train(tmp_path, "hybrid_parallel", 2, "--load", one.folder, "--steps", 3, lesson=lesson), 2)
    assert (np.abs(np.array(loaded) - expected).max() < 1e-5) == (bug is None)


def test_four_ranks_of_data_parallel_train_the_network_of_one_process(one, tmp_path):
    result = train(tmp_path, "data_parallel", 4, "--steps", STEPS, "--ckpt-dir", "ckpt", "--sliced")
    check_equal_to_one(result, tmp_path / "ckpt", 4, "(512, 128)", one)
    assert [int(first) for first in re.findall(r"samples (\d+)-\d+ of 64", result.output)] != [0] * 4


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


@pytest.mark.parametrize(("ranks", "slices"), [(2, None), (4, None), (4, 2)])
def test_semi_auto_slices_are_those_of_arithmetic(ranks, slices, one, tmp_path):
    options = ("--slices", slices) if slices else ("--load", one.folder)
    compiled = dry_run(tmp_path, ranks, "semi_auto_parallel", *options, only=f"0-{ranks - 1}")
    width = 128 // (slices or ranks)
    for rank in compiled:
        together = list(range(ranks)) if slices is None else [rank["rank"] % 2, rank["rank"] % 2 + 2]
        assert slices_of(rank) == dict.fromkeys(SLICED, ((512, width), together))
        assert rank["trained_bytes"] == 4 * (512 * width + 1)
    if slices is None:  # what semi-auto parallel inserts is what hybrid parallel has written by hand
        everyone = tuple(range(ranks))  # the sums over columns, forth and back; the loss; the gradient of the bias
        by_hand = [("AllReduce", 4 * 64, everyone)] * 2 + [("AllReduce", 4, everyone)] * 2
        [hybrid] = dry_run(tmp_path, ranks, "hybrid_parallel")
        assert collectives_of(compiled[0]) == collectives_of(hybrid) == sorted(by_hand)
        own = [p for p in hybrid["parameters"] if p["own"]]
        assert [p["slice_shape"] for p in own if p["name"] == "weight"] == [[512, width]]


def test_a_strategy_for_matmul_alone_costs_a_redistribution(tmp_path):
    lesson = jobs.planted("parallel_modes", tmp_path, "networks.py", ("        self.relu.shard(", "        print("),
                          ("        self.reduce_sum.shard(", "        print("))
    [rank] = dry_run(tmp_path, 2, "semi_auto_parallel", lesson=lesson)
    assert slices_of(rank) == dict.fromkeys(SLICED, ((512, 64), [0, 1]))
    matrix = 4 * 64 * 128
    assert collectives_of(rank) == [("AllGather", matrix, (0, 1)), ("AllReduce", 4, (0, 1)), ("AllReduce", 4, (0, 1)),
                                    ("ReduceScatter", matrix, (0, 1))]


@pytest.mark.parametrize("search_mode", ["recursive_programming", "sharding_propagation", "dynamic_programming"])
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
def refused(sentence, *command, cwd):
    """Assert that a command ends with exit code 2 and a sentence, and writes nothing."""
    before = sorted(path for path in cwd.rglob("*"))
    result = jobs.run(*command, cwd=cwd)
    assert result.code == 2, result.output
    assert re.search(sentence, result.output), result.output
    assert "Traceback" not in result.output
    assert sorted(path for path in cwd.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["data_parallel"], "it takes MODE and N, not 1 arguments"),
    (["data_parallel", "two"], "must be a whole number from 1, not 'two'"),
    (["data_parallel", "2", "--lr", "1"], "options of parallel_modes.py go after --"),
    (["data_parallel", "3"], "the batch of 64 samples cannot be shared equally by 3 ranks"),
    (["hybrid_parallel", "3"], "the weight's 128 columns cannot be cut into 3 equal slices, one a rank"),
    (["hybrid_parallel", "2", "--", "--slices", "2"], "--slices is for semi_auto_parallel"),
    (["stand_alone", "2"], "stand_alone is one process, not 2"),
    (["semi_auto_parallel", "2"], "bash run.sh semi_auto_parallel 2 --dry-run"),
    (["semi_auto_parallel", "4", "--dry-run", "--", "--slices", "3"],
     r"the strategy \(\(1, 1\), \(1, 3\)\) does not fit"),
    (["data_parallel", "2", "--", "--load", "nowhere"], "the folder nowhere does not exist"),
])
def test_bad_input_of_the_launcher_is_one_sentence(arguments, sentence, tmp_path):
    refused(sentence, "bash", LESSON / "run.sh", *arguments, cwd=tmp_path)


def test_a_parallel_mode_without_a_launcher_names_it(tmp_path):
    refused("hybrid_parallel needs a launcher: bash run.sh hybrid_parallel 2",
            jobs.PYTHON, LESSON / "parallel_modes.py", "--mode", "hybrid_parallel", cwd=tmp_path)


@pytest.fixture(scope="module")
def four_slices(one, tmp_path_factory):
    """A folder with the slices of 4 ranks, made from one process's checkpoint, and a strategy file of 2 ranks."""
    folder = tmp_path_factory.mktemp("slices")
    tool("convert_checkpoints.py", one.folder, folder / "four", "--ranks", 4, cwd=folder)
    layout = {"dev_matrix": [2], "field": 0, "opt_weight_shard_size": 0, "opt_weight_shard_step": 0,
              "tensor_map": [-1, 0], "tensor_shape": [512, 128]}
    (folder / "two.json").write_text(json.dumps({"parallel_layout_item": {"weight": layout}}))
    return folder


def test_bad_checkpoints_are_named(four_slices, one, tmp_path):
    shutil.copytree(four_slices, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "four" / "rank_2" / "parallel_modes.ckpt"
    good = file.read_bytes()

    def convert(*arguments):
        return (jobs.PYTHON, LESSON / "convert_checkpoints.py", *arguments)

    # of another world size, given to plain loading
    refused("four holds the slices of 4 ranks, which a process that needs whole parameters cannot load; convert them: "
            "python convert_checkpoints.py four NEW_FOLDER --ranks 1",
            jobs.PYTHON, LESSON / "predict.py", "four", cwd=tmp_path)
    refused("four holds the slices of 4 ranks, which 2 ranks cannot load; .* --ranks 2",
            "bash", LESSON / "run.sh", "hybrid_parallel", 2, "--", "--load", "four", cwd=tmp_path)
    # cut off in the middle, cut off between two parameters, changed, of another step, missing
    file.chmod(0o644)
    for content, sentence in ((good[:70000], "rank_2/parallel_modes.ckpt is damaged or was cut off .70000 bytes"),
                              (good[:good.index(b"moments.bias") - 4], "rank_2/parallel_modes.ckpt lacks .*moments.b"),
                              (good[:70000] + bytes(8) + good[70008:], "rank_2/parallel_modes.ckpt is damaged")):
        file.write_bytes(content)
        refused(sentence, *convert("four", "new", "--ranks", 2), cwd=tmp_path)
    file.unlink()
    refused("four/rank_2 must hold one .ckpt file, not 0", *convert("four", "new", "--ranks", 2), cwd=tmp_path)
    file.write_bytes(good)
    (tmp_path / "four" / "rank_3" / "parallel_modes.ckpt").unlink()
    (tmp_path / "four" / "rank_3").rmdir()
    refused("holds 1 of 4 slices, but four has 3 ranks: rank_3 is missing", *convert("four", "new", "--ranks", 2),
            cwd=tmp_path)
    # strategies
    refused("two.json is for 2 ranks, but four has 3", *convert("four", "new", "--strategy", "two.json"), cwd=tmp_path)
    refused("rank_0/parallel_modes.ckpt is no strategy file of this network",
            *convert("four", "new", "--strategy", "four/rank_0/parallel_modes.ckpt"), cwd=tmp_path)
    refused("four is not empty", *convert("four", "four", "--ranks", 2), cwd=tmp_path)


def test_slices_of_two_saves_are_refused(four_slices, one, tmp_path):
    shutil.copytree(four_slices, tmp_path, dirs_exist_ok=True)
    train(tmp_path, "stand_alone", 1, "--steps", 1, "--ckpt-dir", "later", "--load", one.folder)
    tool("convert_checkpoints.py", "later", "later_four", "--ranks", 4, cwd=tmp_path)
    shutil.rmtree(tmp_path / "four" / "rank_1")
    shutil.move(tmp_path / "later_four" / "rank_1", tmp_path / "four" / "rank_1")
    refused("in four/rank_1/parallel_modes.ckpt is not as in four/rank_0/parallel_modes.ckpt: .* not of one save",
            jobs.PYTHON, LESSON / "convert_checkpoints.py", "four", "new", "--ranks", 2, cwd=tmp_path)
