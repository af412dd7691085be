"""The lessons' Ascend graphs, compiled for every kind of rank without a card."""

import json

import shutil

import jobs

DRY_RUN = jobs.REPO / "dry_run" / "dry_run.py"


def dry_run(tmp_path, rank_size, *arguments, timeout=600):
    """Run the dry run; return (Result, the JSON report)."""
    report = tmp_path / "report.json"
    result = jobs.run(jobs.PYTHON, DRY_RUN, "--rank-size", rank_size, "--json", report, *arguments, cwd=tmp_path,
                      timeout=timeout)
    assert report.is_file(), result.output
    return jobs.succeeded(result), json.loads(report.read_text())


def test_allgather_check_runs_its_three_collectives_over_all_ranks(tmp_path):
    result, _ = dry_run(tmp_path, 4, jobs.REPO / "allgather_check" / "allgather_check.py")
    assert "4 of 4 ranks compiled; no faults between ranks." in result.output
    for collective in ("AllGather", "AllReduce sum", "Broadcast"):
        assert f"{collective} " in result.output


def test_mnist_reduces_exactly_its_gradients(tmp_path):
    _, report = dry_run(tmp_path, 8, "--ranks", "0,7", "--data", "mnist", jobs.REPO / "mnist_ddp" / "train_ddp.py")
    weights = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    assert [rank["rank"] for rank in report["ranks"]] == [0, 7]
    for rank in report["ranks"]:
        reduced = [call for call in rank["collectives"] if call["op"] == "AllReduce"]
        assert sum(call["bytes"] for call in reduced) == rank["trained_bytes"] == 4 * weights
        assert all(call["ranks"] == list(range(8)) for call in reduced)


def test_a_forgotten_gradient_reduction_is_seen(tmp_path):
    lesson = jobs.planted("mnist_ddp", tmp_path, "train_ddp.py", (
        "gradients = self.reduce_gradients(gradients)", "gradients = gradients"))
    _, report = dry_run(tmp_path, 8, "--ranks", "0", "--data", "mnist", lesson / "train_ddp.py")
    assert report["ranks"][0]["collectives"] == []


def dry_run_launcher(tmp_path, launcher, *arguments):
    """Start a launcher of the Ascend lesson with --dry-run; return its Result."""
    return jobs.succeeded(jobs.run("bash", jobs.REPO / launcher, "--dry-run", *arguments, cwd=tmp_path, timeout=900))


def test_the_whole_resnet50_is_compiled_in_automatic_parallel(tmp_path):
    """By run.sh and for all ranks: below, with fewer layers."""
    result, _ = dry_run(tmp_path, 2, "--ranks", 0, "--data", "cifar10",
                        jobs.REPO / "resnet50_ascend/resnet50_distributed_training.py")
    # 25.6 million parameters less the 1,000-class head, with 10 classes: 23,528,522, of 4 bytes each.
    assert "89.7 MiB of it trained" in result.output
    assert "AllReduce sum" in result.output
    assert "NOTE" not in result.output, "its gradients are divided by the number of ranks"


def test_run_sh_compiles_both_ranks_and_touches_no_checkpoint(tmp_path):
    """It trains nothing: what it saved would be taken for trained, and earlier files would make room for that."""
    files = {}
    for rank in range(2):
        (tmp_path / f"ck/ckpt_{rank}").mkdir(parents=True)
        files |= {tmp_path / f"ck/ckpt_{rank}/auto_parallel-{epoch}_1.ckpt": str(epoch) for epoch in (1, 2, 3)}
    for file, text in files.items():
        file.write_text(text)
    output = dry_run_launcher(tmp_path, "run.sh", 2, "--", *jobs.SHALLOW, "--image-size", 32, "--batch-size", 4,
                              "--steps", 1, "--no-sink", "--epochs", 9, "--ckpt-dir", "ck", "--resume").output
    assert "2 of 2 ranks compiled; no faults between ranks." in output
    assert "AllReduce sum" in output
    assert "NOTE" not in output
    assert {file: file.read_text() for file in tmp_path.glob("ck/*/*.ckpt*")} == files


def test_run_cluster_sh_compiles_the_second_server_of_the_16_card_table(tmp_path):
    table = jobs.REPO / "rank_tables" / "rank_table_16pcs.json"
    output = dry_run_launcher(tmp_path, "run_cluster.sh", "", table, 16, 8, "--", "--parallel-mode", "data_parallel",
                              "--no-sink", *jobs.SHALLOW).output
    assert "8 of 8 ranks compiled; no faults between ranks." in output
    assert "Ranks 8-15: compiled" in output
    assert "0-15" in output.split("AllReduce sum")[1].split()[0], "the gradients are averaged over all 16 ranks"


def test_the_launcher_says_what_is_missing_for_a_dry_run(tmp_path):
    for folder in ("resnet50_ascend", "tools"):
        shutil.copytree(jobs.REPO / folder, tmp_path / folder)
    result = jobs.run("bash", tmp_path / "resnet50_ascend" / "run.sh", "--dry-run", 2, cwd=tmp_path)
    assert result.code == 2
    assert "--dry-run needs the folder dry_run/ beside resnet50_ascend/" in result.output
