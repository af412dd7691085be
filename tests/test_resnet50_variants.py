"""ResNet-50 as a pipeline and with sliced pictures, compiled for Ascend, and that computed on CPU; accumulation."""

import re
import shutil

import forks
import jobs
import numpy as np
import pytest
from test_dry_run_lessons import dry_run
from test_resnet50_ascend import TENSORS as SHALLOW_TENSORS
from test_resnet50_ascend import COUNT_RIGHT, FAST, check_equal_parameters, is_trained, newest, python, refused

LESSON = jobs.REPO / "resnet50_ascend"
CPU = {"DEVICE_TARGET": "CPU"}
SECOND_EPOCH = jobs.REPO / "tests" / "second_epoch.py"
TWO_BLOCKS = ("--blocks", 1, 0, 0, 1)  # a convolution in place of the others; each of two stages has a block and one
PARAMETERS, TENSORS = 6_799_946, 31  # of its 10 layers and 2 short cuts, with 10 classes


# --------------------------------------------------------------------------------------------------- pipeline
def trained(rank):
    """The trained parameters of a rank of a report: {name: bytes}."""
    return {parameter["name"]: parameter["bytes"] for parameter in rank["parameters"] if parameter["trained"]}


def calls(rank, op):
    return [call for call in rank["collectives"] if call["op"] == op]


def test_a_pipelines_stages_are_together_the_network(tmp_path):
    _, report = dry_run(tmp_path, 8, "--ranks", "0,4", "--data", "cifar10",
                        LESSON / "resnet50_distributed_training_pipeline.py", "--image-size", 32, "--no-sink",
                        "--batch-size", 8, "--micro-batches", 2, *TWO_BLOCKS)
    assert report["faults"] == []
    first, last = report["ranks"]
    assert [first["stage"], last["stage"]] == [0, 1]
    names = [trained(first), trained(last)]
    assert names[0].keys().isdisjoint(names[1]), "no layer in both"
    assert len(names[0]) + len(names[1]) == TENSORS
    assert sum(names[0].values()) + sum(names[1].values()) == 4 * PARAMETERS
    blocks = [{name.rsplit(".", 2)[0] for name in of if name.startswith("layer") and "downsample" not in name}
              for of in names]
    assert [len(of) for of in blocks] == [2, 2]
    assert "conv1.weight" in names[0]
    assert "fc.weight" in names[1]
    # Each micro batch goes forward, (images a rank, channels, height, width), and its gradient comes back.
    for op, rank, far in (("Send", first, 4), ("Receive", first, 4), ("Send", last, 0), ("Receive", last, 0)):
        messages = calls(rank, op)
        assert [call["ranks"][call["peer"]] for call in messages] == [far, far], f"{op} of rank {rank['rank']}"
        assert all(call["shape"] == [4, 512, 4, 4] for call in messages)
    for rank, members in ((first, [0, 1, 2, 3]), (last, [4, 5, 6, 7])):
        gradients = [call for call in calls(rank, "AllReduce") if call["fusion"] > 0]
        assert sum(call["bytes"] for call in gradients) >= 0.9 * rank["trained_bytes"]
        assert all(call["ranks"] == members for call in calls(rank, "AllReduce"))


# ------------------------------------------------------------------------------------------------------ slices
def test_each_ranks_graph_takes_strips(tmp_path):
    _, report = dry_run(tmp_path, 8, "--ranks", "1", "--data", "cifar10", "--keep", tmp_path / "kept",
                        LESSON / "resnet50_distributed_training_dataset_slice.py", "--image-size", 32, "--no-sink",
                        "--batch-size", 2, *TWO_BLOCKS)  # of a rank: 16 in all
    graph, = (path.read_text() for path in tmp_path.glob("kept/rank_1/graphs/**/*_validate_*.ir"))
    inputs = re.findall(r"^%para\d+_inputs\d: <Tensor\[(\w+)\], \(([\d, ]+)\)", graph, re.MULTILINE)
    assert inputs == [("Float32", "16, 3, 32, 4"), ("Int32", "16")], "all 16 images, 4 of 32 columns; all labels"
    rank, = report["ranks"]
    columns, = calls(rank, "NeighborExchangeV2")  # from the strips beside, for the first convolution
    assert columns["shape"] == [16, 3, 32, 4]
    assert columns["ranks"] == list(range(8))
    whole, = calls(rank, "AllGather")
    assert whole["bytes"] == 4 * 16 * 64 * 16 * 16, "the first convolution's results, put together"
    assert len([call for call in calls(rank, "AllReduce") if call["fusion"] > 0]) == TENSORS


STRIPS = """
import sys
import numpy as np
import resnet50_distributed_training_dataset_slice as slices
whole = slices.create_dataset(sys.argv[1], 8, image_size=48, steps=3)
strips = [slices.create_dataset(sys.argv[1], 2, rank, 4, image_size=48, steps=3) for rank in range(4)]
read = [dataset.create_tuple_iterator(num_epochs=1, output_numpy=True) for dataset in [whole, *strips]]
for number, batches in enumerate(zip(*read)):
    (images, labels), *parts = batches
    assert all(part.shape == (8, 3, 48, 12) for part, _ in parts)
    assert np.array_equal(np.concatenate([part for part, _ in parts], axis=3), images)
    assert all(np.array_equal(part_labels, labels) for _, part_labels in parts)
    print("batch", number)
"""


def test_strips_of_all_ranks_are_the_pictures(cifar10, tmp_path):
    assert python(STRIPS, cifar10, cwd=tmp_path).count("batch") == 3


# ------------------------------------------------------------------------- the Ascend plan, computed by two ranks
# launcher: its options; whose batches make up the 8 pictures of a step; logs to read. With so few run.sh's plan cuts
# the last layer's weights, and its test's graph must want them cut so, too.
COMPUTED = {
    "run.sh": (("--batch-size", 4, "--test-images", 101), 2, (0, 1)),
    "run_dataset_slice.sh": (("--batch-size", 4), 1, (0, 1)),
    "run_pipeline.sh": (("--batch-size", 8, "--micro-batches", 2), 1, (1,)),  # only the last stage has the loss
}
ROUNDED = {**CPU, "CONVOLUTIONS": "plain", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # as in the one process


def train_computed(launcher, cifar10, folder):
    """Two epochs of two ranks; returns the output."""
    result = jobs.succeeded(jobs.run(
        "bash", LESSON / launcher, cifar10, 2, "--", "--epochs", 2, "--steps", 2, "--image-size", 32, *TWO_BLOCKS,
        "--ckpt-dir", "ck", *COMPUTED[launcher][0], cwd=folder, timeout=300,
        env=ROUNDED))
    mode = "auto_parallel" if launcher == "run.sh" else "semi_auto_parallel"
    assert result.output.count(f"MindSpore has no {mode} on CPU: its Ascend plan is computed here") == 1
    assert "too large" not in result.output, "gradients are divided"
    for rank in range(2):
        assert f"rank {rank} of 2 on CPU, {mode}" in (folder / f"device{rank}" / f"train.log{rank}").read_text()
    return result.output


@pytest.fixture(scope="module")
def pipeline(cifar10, tmp_path_factory):
    """The folder in which the pipeline was trained; its file log has the output."""
    return jobs.made_once(tmp_path_factory, "computed pipeline", lambda folder: (folder / "log").write_text(
        train_computed("run_pipeline.sh", cifar10, folder)))


def check_computed(launcher, folder, expected, one):
    """The second epoch of two ranks must be that of one process: its losses and parameters; returns the ranks'."""
    for rank in COMPUTED[launcher][2]:
        losses = jobs.losses(folder / f"device{rank}" / f"train.log{rank}")
        assert len(losses) == 4
        assert np.allclose(losses[2:], expected, rtol=1e-4), f"the losses differ: {losses[2:]}, one process {expected}"
    saved = [jobs.parameters(newest(folder / "ck", rank, 2)) for rank in range(2)]
    names = [name for name in one if not name.endswith("_1")]
    assert len(names) >= 2 * TENSORS + 2 * 9, "weights, momenta, and statistics"
    for name in names:
        holding = [(one.get(f"{name}_{rank}", one[name]), values[name])
                   for rank, values in enumerate(saved) if name in values]
        assert holding, f"nobody has saved {name}"
        for right, value in holding:
            assert value.shape == right.shape
            assert np.allclose(value, right, rtol=1e-3, atol=1e-4), f"{name} differs from that of one process"
    return saved


def test_computed_ranks_train_the_network_of_one_process(cifar10, pipeline, tmp_path):
    """And they count what it gets right; ranks with other pictures, or a mean of gradients taken twice, are told."""
    (tmp_path / "run_pipeline.sh").symlink_to(pipeline)
    for launcher in COMPUTED.keys() - {"run_pipeline.sh"}:
        (tmp_path / launcher).mkdir()
        train_computed(launcher, cifar10, tmp_path / launcher)
    runs = {launcher: (launcher, COMPUTED[launcher][1], 1) for launcher in COMPUTED}  # launcher, shards, momenta times
    runs.update({"pipeline, other pictures": ("run_pipeline.sh", 2, 1), "halved": ("run.sh", 2, 0.5)})
    of_one = [":".join(map(str, (name, shards, momenta, *(
        newest(tmp_path / launcher / "ck", rank, 1) for rank in range(2)))))
        for name, (launcher, shards, momenta) in runs.items()]
    again = jobs.succeeded(forks.run(SECOND_EPOCH, cifar10, *of_one, cwd=tmp_path, timeout=300,
                                     env={**FAST, "PYTHONPATH": str(LESSON)}))
    saved = {}
    for name, (launcher, _, _) in runs.items():
        expected = [float(loss) for loss in re.findall(rf"^{name}: loss is (\S+)", again.output, re.MULTILINE)]
        assert len(expected) == 2
        with np.load(tmp_path / f"{name}.npz") as one:
            if name == launcher:
                saved[name] = check_computed(launcher, tmp_path / launcher, expected, dict(one))
                continue
            with pytest.raises(AssertionError, match="the losses differ"):
                check_computed(launcher, tmp_path / launcher, expected, dict(one))

    first, second = saved["run.sh"]
    assert not np.array_equal(first["bn1.moving_mean"], second["bn1.moving_mean"]), "of other pictures"
    right = int(python(COUNT_RIGHT, cifar10, *(newest(tmp_path / "run.sh" / "ck", rank, 2) for rank in range(2)),
                       cwd=tmp_path))
    told = re.findall(r"^accuracy: .*$", (tmp_path / "run.sh/device0/train.log0").read_text(), re.MULTILINE)
    assert told == [f"accuracy: {right / 101:.4f} ({right} of 101 test images)"]

    # Each stage has saved its layers, and no other; gradients came back to the first.
    assert "stage 0 of 2" in (pipeline / "log").read_text()
    stages = saved["run_pipeline.sh"]
    first, last = ({name.split(".")[0] for name in values if name.count(".")} for values in stages)
    assert {"conv1", "layer1", "layer2"} <= first
    assert {"layer3", "layer4", "fc"} <= last
    assert not {"layer3", "layer4", "fc"} & first and not {"conv1", "layer1", "layer2"} & last
    before = jobs.parameters(newest(tmp_path / "run_pipeline.sh" / "ck", 0, 1))
    assert np.abs(stages[0]["conv1.weight"] - before["conv1.weight"]).max() > 1e-4


def test_a_pipeline_resumes_as_if_it_had_not_ended(cifar10, pipeline, tmp_path):
    """Each rank has saved its own stage's layers, no others; the other ranks' files must have the rest."""
    def resume():
        return jobs.run("bash", LESSON / "run_pipeline.sh", cifar10, 2, "--", "--epochs", 2, "--steps", 2,
                        "--image-size", 32, *TWO_BLOCKS, "--ckpt-dir", "ck", "--resume",
                        *COMPUTED["run_pipeline.sh"][0], cwd=tmp_path / "job", timeout=300, env=ROUNDED)

    shutil.copytree(pipeline, tmp_path / "job")
    losses = jobs.losses(tmp_path / "job/device1/train.log1")
    files = [newest(tmp_path / "job/ck", rank, 2) for rank in range(2)]
    saved = [jobs.parameters(file) for file in files]
    for file in files:
        file.unlink()
    first, second, aside = (tmp_path / "job" / name for name in ("ck/ckpt_0", "ck/ckpt_1", "aside"))

    def swap():
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    swap()
    other = resume()
    assert other.code == 2
    assert re.search(r"is of another network or rank; resume with the options \(such as --blocks\) of the job that "
                     "saved it", other.output)
    assert "Traceback" not in other.output
    swap()
    jobs.succeeded(resume())
    assert jobs.losses(tmp_path / "job/device1/train.log1") == losses[2:]
    for file, parameters in zip(files, saved):
        again = jobs.parameters(file)
        assert again.keys() == parameters.keys()
        assert all(np.allclose(again[name], parameters[name], atol=1e-6) for name in parameters)


# ------------------------------------------------------------------------------------------------ accumulation
def accumulate(cifar10, folder, micro_batches, *launch, test_images=0):
    """Two steps of two ranks with batches of 8; returns the parameters and all ranks' losses."""
    folder.mkdir()
    jobs.succeeded(jobs.run("bash", LESSON / "run_grad_accumulation.sh", cifar10, 2, *launch, "--", "--image-size",
                            32, *jobs.SHALLOW, "--batch-size", 8, "--micro-batches", micro_batches, "--freeze-bn",
                            "--epochs", 1, "--steps", 2, "--test-images", test_images, "--ckpt-dir", "ck", cwd=folder,
                            env=CPU, timeout=300))
    losses = [jobs.losses(folder / f"device{rank}" / f"train.log{rank}") for rank in range(2)]
    return check_equal_parameters([newest(folder / "ck", rank, 1) for rank in range(2)]), np.array(losses)


def check_same_step(accumulated, at_once):
    (ours, our_losses), (theirs, their_losses) = accumulated, at_once
    assert our_losses.shape == (2, 2), "a line a batch, on each rank"
    weights = [name for name in theirs if is_trained(name) and not name.startswith(("sum", "micro_batch"))]
    assert len(weights) >= 2 * SHALLOW_TENSORS, "weights and momenta"
    difference = max(np.abs(ours[name] - theirs[name]).max() for name in weights)
    assert difference < 1e-5, f"the weights differ by {difference}"
    assert np.allclose(our_losses, their_losses, rtol=1e-4)  # 5 digits are printed
    for state in (ours, theirs):
        sums = [values for name, values in state.items() if name.startswith("sum")]
        assert len(sums) == SHALLOW_TENSORS
        assert not any(values.any() for values in sums), "gradients are left over"


def test_four_micro_batches_are_one_batch(cifar10, tmp_path):
    at_once = accumulate(cifar10, tmp_path / "at once", 1, "--no-sink")
    check_same_step(accumulate(cifar10, tmp_path / "accumulated", 4, test_images=3), at_once)
    assert np.abs(at_once[0]["moments.fc.weight"]).max() > 1e-3, "no gradient, no proof"
    other = jobs.run("bash", LESSON / "run_grad_accumulation.sh", cifar10, 2, "--", "--image-size", 32, *jobs.SHALLOW,
                     "--batch-size", 8, "--micro-batches", 2, "--ckpt-dir", "ck", "--resume", cwd=tmp_path / "at once",
                     env=CPU)
    assert other.code == 2
    assert "is of another network or rank" in other.output, "its micro batches are counted to another number"


# ---------------------------------------------------------------------------------------------------- bad input
def test_variants_refuse_what_does_not_fit(cifar10, tmp_path):
    for name, dry_run_data, options, sentence in (
            ("pipeline", cifar10, ("--stages", 3), "--stages 3 must divide the number of ranks, 8"),
            ("pipeline", None, ("--micro-batches", 5), "--micro-batches 5 must divide --batch-size, 32"),
            ("pipeline", cifar10, ("--stages", 4, "--micro-batches", 2), "be at least --stages, 4"),
            ("dataset_slice", None, ("--image-size", 48), "--image-size 48 must be a multiple of 32")):
        command = [LESSON / f"run_{name}.sh", "--dry-run", *([dry_run_data] if dry_run_data else []), 8, "--", *options]
        assert sentence in refused(*command, cwd=tmp_path)
    output = refused(LESSON / "run_grad_accumulation.sh", cifar10, 2, "--", "--micro-batches", 5, cwd=tmp_path, env=CPU)
    assert "--micro-batches 5 must divide --batch-size 32" in output
    assert "bash run_pipeline.sh DATA_PATH RANK_SIZE" in refused(LESSON / "run_pipeline.sh", cwd=tmp_path)


@pytest.mark.parametrize("name", ["pipeline", "dataset_slice"])
def test_without_dry_run_beside_it_a_variant_is_refused(name, cifar10, tmp_path):
    for folder in ("resnet50_ascend", "rank_tables"):
        shutil.copytree(jobs.REPO / folder, tmp_path / folder)
    output = refused(tmp_path / "resnet50_ascend" / f"run_{name}.sh", cifar10, 2, cwd=tmp_path, env=CPU)
    assert re.search(rf"MindSpore has no .* on CPU; run_{name}\.sh\s+computes it for 2 or\s+more ranks\s+"
                     r"of one machine, with", output)
    assert re.search(r"dry_run/ and tools/\s+beside this one", output)
