"""The lessons' Ascend graphs, compiled for every kind of rank without a card."""

import json

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
