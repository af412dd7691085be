"""The Ascend plan, computed on CPU: every parallel mode equals one process, and what is wrong is told."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import PYTHON, REPO, run, succeeded

SCRIPTS = Path(__file__).resolve().parent / "compute_scripts"
COMPUTE = REPO / "dry_run" / "compute.py"
SMALL, RESNET, FAULTS = (SCRIPTS / name for name in ("small.py", "resnet.py", "faults.py"))
sys.path.insert(0, str(REPO / "dry_run"))

import meeting  # noqa: E402

SAME = {"rtol": 2e-5, "atol": 2e-5}  # float32, added up in another order
LINE = re.compile(r"rank (\d+) step: (\d+), loss is ([-+.\de]+)")


def losses(output, rank=0):
    """The losses that a rank printed, in the order of the steps."""
    found = {int(step): float(loss) for who, step, loss in LINE.findall(output) if int(who) == rank}
    return [found[step] for step in sorted(found)]


def held(folder, rank=0):
    """The parameters that a rank held after the last step."""
    with np.load(folder / f"held_{rank}.npz") as found:
        return dict(found)


def whole(folder, rank=0):
    """The checkpoint that a rank saved, its slices put together by MindSpore."""
    code = ("import mindspore as ms, numpy, sys; "
            "numpy.savez(sys.argv[2], **{k: v.asnumpy() for k, v in ms.load_checkpoint(sys.argv[1]).items()})")
    target = folder / f"whole_{rank}.npz"
    subprocess.run([PYTHON, "-c", code, str(folder / f"whole_{rank}.ckpt"), str(target)], check=True,
                   capture_output=True)
    with np.load(target) as found:
        return dict(found)


def assert_same(found, expected, names=None):
    """The same parameters with the same values."""
    names = names or expected.keys()
    assert names
    for name in names:
        assert found[name].shape == expected[name].shape
        np.testing.assert_allclose(found[name], expected[name], err_msg=name, **SAME)


def compute(ranks, script, *args, cwd, **env):
    """Run a script as computed ranks; returns the Result."""
    return run(PYTHON, COMPUTE, "-n", ranks, script, *args, cwd=cwd, env=env)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What one process computes: alone(script, *options) is (losses, folder); each is run once."""
    known = {}

    def answer(script, *options):
        key = (script, options)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            done = succeeded(run(PYTHON, script, "stand_alone", folder, *options, cwd=folder,
                                 env={"ONEDNN_MAX_CPU_ISA": "AVX2"}))
            known[key] = losses(done.output), folder
            assert len(known[key][0]) > 2
        return known[key]

    return answer


def trained(parameters):
    """Names of what the optimizer changes, its own states included; a scalar of it is no evidence."""
    return [name for name, value in parameters.items() if value.size > 1]


@pytest.mark.parametrize(("ranks", "mode", "options"), [
    (2, "semi_auto_parallel", ()),
    (4, "semi_auto_parallel", ("--slices", 2, 2)),
    (2, "semi_auto_parallel", ("--jit",)),
    (2, "auto_parallel", ("--search-mode", "recursive_programming")),
    (2, "auto_parallel", ("--search-mode", "sharding_propagation")),
    (2, "auto_parallel", ("--search-mode", "dynamic_programming")),
    (2, "optimizer_shard", ("--optimizer", "Adam")),
])
def test_equals_one_process(ranks, mode, options, alone, tmp_path):
    expected, folder = alone(SMALL, *(options if "Adam" in options else ()))
    done = succeeded(compute(ranks, SMALL, mode, tmp_path, *options, cwd=tmp_path))
    assert "its Ascend plan is computed here" in done.output
    for rank in range(ranks):
        np.testing.assert_allclose(losses(done.output, rank), expected, **SAME)
    parameters = held(folder)
    assert_same(whole(tmp_path), parameters)
    sliced = [name for name in trained(parameters) if held(tmp_path)[name].shape != parameters[name].shape]
    if mode in ("semi_auto_parallel", "optimizer_shard"):
        assert {"first.weight", "second.weight"} <= set(sliced)  # something was cut, or nothing is shown
        assert any(name.startswith("moment") for name in sliced)


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipeline_equals_one_process(ranks, alone, tmp_path):
    expected, folder = alone(SMALL)
    done = succeeded(compute(ranks, SMALL, "pipeline", tmp_path, "--predict", cwd=tmp_path))
    for rank in range(ranks // 2, ranks):
        np.testing.assert_allclose(losses(done.output, rank), expected, **SAME)
    parameters = held(folder)
    assert_same(held(tmp_path, 0), parameters, ["first.weight", "moments.first.weight"])
    assert_same(held(tmp_path, ranks - 1), parameters, ["second.weight", "bias",
                                                              "moments.second.weight"])
    assert np.abs(held(tmp_path, 0)["second.weight"] - parameters["second.weight"]).max() > 1e-3  # not its stage


@pytest.mark.parametrize(("dtype", "near"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_half_precision_is_computed_and_said(dtype, near, alone, tmp_path):
    expected, _ = alone(SMALL)
    done = succeeded(compute(2, SMALL, "semi_auto_parallel", tmp_path, "--dtype", dtype, cwd=tmp_path))
    np.testing.assert_allclose(losses(done.output), expected, rtol=near)
    assert losses(done.output) != pytest.approx(expected, rel=1e-6)
    assert f"computed on CPU: {dtype}: rounded otherwise than on a card" in done.output.replace("BF", "bf").replace(
        "F", "f")


def test_slices_of_a_computed_run_go_on_in_another_mode(alone, tmp_path):
    """Two steps in semi-automatic parallel, the slices merged by MindSpore, the rest in other modes."""
    expected, _ = alone(SMALL)
    first = succeeded(compute(2, SMALL, "semi_auto_parallel", tmp_path / "cut", "--steps", 2, "--sliced", cwd=tmp_path))
    np.testing.assert_allclose(losses(first.output), expected[:2], **SAME)
    for rank in range(2):  # MindSpore wants nothing but slices there
        (tmp_path / "slices" / f"rank_{rank}").mkdir(parents=True)
        (tmp_path / "cut" / f"rank_{rank}" / "slices.ckpt").rename(tmp_path / "slices" / f"rank_{rank}" / "s.ckpt")
    code = "import sys, mindspore as ms; ms.transform_checkpoints(sys.argv[1], sys.argv[2], 'whole', sys.argv[3], None)"
    subprocess.run([PYTHON, "-c", code, str(tmp_path / "slices"), str(tmp_path / "merged"),
                    str(tmp_path / "cut" / "rank_0" / "strategy.ckpt")], check=True, capture_output=True)
    merged, = (tmp_path / "merged").rglob("*.ckpt")
    for mode in ("stand_alone", "auto_parallel"):
        options = [mode, tmp_path / mode, "--first", 2, "--load", merged]
        rest = succeeded(run(PYTHON, SMALL, *options, cwd=tmp_path) if mode == "stand_alone" else
                         compute(2, SMALL, *options, cwd=tmp_path))
        np.testing.assert_allclose(losses(rest.output), expected[2:], **SAME)


@pytest.mark.parametrize(("mode", "options", "like"), [
    ("auto_parallel", ("--evaluate",), ("--parts", 2)),
    ("strips", (), ("--parts", 2)),
    ("pipeline", ("--micro-batches", 2, "--sink"), ("--micro-batches", 2)),
])
def test_resnet_equals_one_process(mode, options, like, alone, tmp_path):
    """Batch norm included: one process whose batch norm looks at the same parts of the batch."""
    expected, folder = alone(RESNET, *like)
    done = succeeded(compute(2, RESNET, mode, tmp_path, *options, cwd=tmp_path))
    np.testing.assert_allclose(losses(done.output, 1), expected, rtol=1e-4)
    parameters = held(folder)
    assert sum("moving_" in name for name in parameters) == 34
    if mode == "pipeline":
        assert "dataset_sink_mode=True, without sink" in done.output
        stages = [("conv1", "bn1", "layer1", "layer2"), ("layer3", "layer4", "fc")]
        found = {name: held(tmp_path, rank)[name] for rank, stage in enumerate(stages) for name in parameters
                 if name.startswith(stage)}
    else:
        found = whole(tmp_path)
        if mode == "auto_parallel":
            assert held(tmp_path)["fc.weight"].shape == (10, 1024)  # something was cut
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    if "--evaluate" in options:
        answers = [np.load(tmp_path / f"answer_{rank}.npy") for rank in range(2)]
        assert np.isfinite(answers[0]).all() and answers[0].std() > 0


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "pipeline"])
def test_the_plan_is_that_of_the_dry_run(mode, tmp_path):
    """What is planned in a CPU process has the collectives that a dry run for Ascend reports."""
    report, kept = tmp_path / "report.json", tmp_path / "plans"
    kept.mkdir()
    succeeded(run(PYTHON, REPO / "dry_run" / "dry_run.py", "--rank-size", 2, "--json", report, SMALL, mode,
                  tmp_path / "dry", cwd=tmp_path))
    succeeded(compute(2, SMALL, mode, tmp_path / "out", cwd=tmp_path, COMPUTE_KEEP=str(kept)))
    code = ("import json, sys; sys.path.insert(0, sys.argv[1]); import plan, meeting; "
            "found = plan.read(open(sys.argv[2], 'rb').read(), '', {}); "
            "print('PLAN', json.dumps([[n.op, list(n.attributes['group_rank_ids'])] for n in found.nodes "
            "if meeting.is_collective(n.op)]))")
    for rank in range(2):
        done = subprocess.run([PYTHON, "-c", code, str(REPO / "dry_run"), str(kept / f"rank_{rank}_graph_0.mindir")],
                              check=True, capture_output=True, text=True)
        planned = sorted(json.loads(done.stdout.partition("PLAN ")[2]))
        of_dry_run = sorted([found["op"], found["ranks"]]
                            for found in json.loads(report.read_text())["ranks"][rank]["collectives"])
        assert len(planned) >= 4
        assert planned == of_dry_run


# ------------------------------------------------------------------------------------------------- planted bugs
def planted(bug, mode, cwd, *options):
    """Run small.py as two ranks whose plan has a bug."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = run(Path(PYTHON).parent / "mpirun", *root, "--oversubscribe", "-n", 2, PYTHON, SCRIPTS / "planted.py", bug,
               SMALL, mode, cwd / "out", *options, cwd=cwd, timeout=60)
    assert done.code != 0, done.output
    assert not done.left_over
    return done.output


def test_a_cut_gradient_is_found(alone, tmp_path):
    expected, _ = alone(SMALL)
    output = planted("cut_gradient", "semi_auto_parallel", tmp_path, "--slices", 2, 1)
    assert losses(output)[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses(output)[2] != pytest.approx(expected[2], rel=1e-3)
    assert re.search(r"after the last step the ranks 0, 1 hold different values of '\S+'", output)


@pytest.mark.parametrize(("bug", "mode", "told"), [
    ("cut_on_one_rank", "semi_auto_parallel", "ranks meet at unlike collectives"),
    ("wrong_group", "semi_auto_parallel", "would hang"),
    ("wrong_sum", "semi_auto_parallel", "max Float32"),
    ("lost_send", "pipeline", "rank 1 waits to receive from rank 0 (tag 0)"),
    ("swapped_sends", "pipeline", "the ranks wait for each other"),
])
def test_ranks_that_would_wait_for_each_other_are_told(bug, mode, told, tmp_path):
    output = planted(bug, mode, tmp_path)
    assert told in output
    assert not LINE.search(output)  # before a step was computed
    report = output[output.index("this plan would hang"):]
    for rank in range(2):
        line = next(line for line in report.splitlines() if line.strip().startswith(f"rank {rank} "))
        assert re.search(r"small\.py:\d+", line), line


def test_a_kernel_that_makes_another_shape_is_told(tmp_path):
    output = planted("other_shape", "semi_auto_parallel", tmp_path)
    assert re.search(r"MatMul \(\S+small\.py:\d+, .*made Float32 \(16, 32\) where the plan has Float32 \(16, 33\)",
                     output)


# ---------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("fault", "told"), [
    ("control_flow", r"faults\.py:\d+: control flow that is decided while the graph runs \(\w+\)"),
    ("no_kernel", r"the CPU cannot compute NPUAllocFloatStatus \(\S+faults\.py:\d+"),
    ("one_leaves", r"rank 0 has waited 5 s at AllReduce \(near \S+faults\.py:\d+"),
])
def test_what_cannot_be_computed_is_told_in_one_sentence(fault, told, tmp_path):
    done = compute(2, FAULTS, fault, cwd=tmp_path, COMPUTE_TIMEOUT="5")
    assert done.code == 1
    assert re.search(told, done.output), done.output
    assert "Traceback" not in done.output
    assert not done.left_over


@pytest.mark.parametrize(("args", "told"), [
    (("-n", "0", SMALL), "a job has at least 1 rank"),
    (("-n", "2", "none.py"), "none.py: no such script"),
    ((SMALL,), "one of the arguments -n --rank --check is required"),
])
def test_bad_arguments(args, told, tmp_path):
    done = run(PYTHON, COMPUTE, *args, cwd=tmp_path)
    assert done.code == 2
    assert told in done.output


def test_check_says_that_all_is_there(tmp_path):
    assert succeeded(run(PYTHON, COMPUTE, "--check", cwd=tmp_path)).output == ""


# ---------------------------------------------------------------------------------- the parts, without MindSpore
def test_every_collective_gives_numpys_numbers(tmp_path):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = succeeded(run(Path(PYTHON).parent / "mpirun", *root, "--oversubscribe", "-n", 3, PYTHON,
                         SCRIPTS / "exchanges.py", cwd=tmp_path))
    found = {int(rank): int(count) for rank, count in re.findall(r"rank (\d): (\d+) checks passed", done.output)}
    assert found == {0: 141, 1: 75, 2: 141}


def call(op, group=(0, 1), detail="", peer=-1, tag=0):
    """A Call without a line."""
    return meeting.Call(op, group, detail, peer, tag, "", op)


@pytest.mark.parametrize(("calls", "told"), [
    ([[call("AllReduce")], [call("AllReduce")]], None),
    ([[call("AllReduce")], []], "rank 1 is at its end"),
    ([[call("AllReduce"), call("AllGather")], [call("AllGather"), call("AllReduce")]], "unlike collectives"),
    ([[call("AllReduce", (0, 1)), call("AllReduce", (0, 2))], [call("AllReduce", (1, 2)), call("AllReduce", (0, 1))],
      [call("AllReduce", (0, 2)), call("AllReduce", (1, 2))]], "the ranks wait for each other"),
    ([[call("AllReduce", (0,))], [call("AllReduce", (1,))]], None),
    ([[call("AllReduce", (1,))], []], "a group that it is not in"),
    ([[call("Send", peer=1)], [call("Receive", peer=0)]], None),
    ([[call("Send", peer=1)], []], "nobody receives it"),
    ([[], [call("Receive", peer=0)]], "rank 1 waits to receive from rank 0"),
    ([[call("Send", peer=1, tag=1)], [call("Receive", peer=0, tag=2)]], "rank 1 waits to receive"),
    ([[call("Send", detail="Float32 (2,)", peer=1)], [call("Receive", detail="Float32 (3,)", peer=0)]], "differ"),
    ([[call("Receive", peer=1), call("Send", peer=1)], [call("Receive", peer=0), call("Send", peer=0)]],
     "the ranks wait for each other"),
    ([[call("Send", peer=1), call("Receive", peer=1)], [call("Send", peer=0), call("Receive", peer=0)]], None),
])
def test_who_meets_and_who_waits(calls, told):
    found = meeting.stuck(calls)
    assert (found is None) if told is None else told in found, found
