"""What many tests read, made once: data sets by the project's own tool, a dry run."""

import json
import os

import jobs
import pytest

WAITING = ("compute", "copied_out", "ends", "find_others", "hostile", "known_errors", "launch_options",
           "mpi_allreduce", "printed", "stalls")  # files whose tests wait half of the time
SHORT = ("copies", "doctor", "house", "plot_loss", "pytorch_page", "quick_check", "rank_table")


def pytest_collection_modifyitems(items):
    """Half of pytest-xdist's workers begin with tests that compute, half with those that wait, so that seldom more
    ranks compute at a time than there are cores, and seldom a core has nothing to do. Each takes, in one piece, its
    part of the items; short ones make all parts as long.
    """
    shares = [[] for _ in range(int(os.getenv("PYTEST_XDIST_WORKER_COUNT", "1")))]
    computing, waiting = shares[:(len(shares) + 1) // 2], shares[len(shares) // 2:]
    items.sort(key=lambda item: ("test_kills" not in item.name, item.path.stem[5:] in SHORT))  # the longest first
    for item in items:
        kind = item.path.stem[5:]
        min(shares if kind in SHORT else waiting if kind in WAITING else computing, key=len).append(item)
    items[:] = sum(shares, [])


def pytest_terminal_summary(terminalreporter):
    """What failed first and passed when it was run once more (make test reruns=0: it is not) is shown all the same."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed, and was run again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


def make_dataset(tmp_path_factory, name):
    """A data set's folder; made once, whatever number of pytest-xdist's workers ask."""
    def make(folder):
        jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "tools/make_datasets.py", name, folder / name, cwd=folder))

    return jobs.made_once(tmp_path_factory, f"data set {name}", make) / name  # spaces in the path: they must not matter


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """The folder with the four files of 4,000 + 1,000 real digits."""
    return make_dataset(tmp_path_factory, "mnist")


@pytest.fixture(scope="session")
def two_stages(tmp_path_factory):
    """A dry run of a pipeline of two stages on four ranks: the report, what was printed, and the drawing."""
    def make(folder):
        done = jobs.succeeded(jobs.run(
            jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 4, "--json", "report.json", "--draw",
            "plan.svg", jobs.REPO / "tests/dry_run_scripts/pipeline.py", cwd=folder, timeout=300))
        (folder / "printed").write_text(done.output)

    folder = jobs.made_once(tmp_path_factory, "two stages", make)
    return (json.loads((folder / "report.json").read_text()), (folder / "printed").read_text(),
            (folder / "plan.svg").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def cifar10_whole(tmp_path_factory):
    """The folder cifar-10-batches-bin of a synthetic set."""
    return make_dataset(tmp_path_factory, "cifar10") / "cifar-10-batches-bin"


@pytest.fixture(scope="session")
def cifar10(cifar10_whole, tmp_path_factory):
    """The same with one of five files to train on, for each rank reads all of them at its start."""
    def make(folder):
        (folder / cifar10_whole.name).mkdir()
        for name in ("data_batch_1.bin", "test_batch.bin"):
            os.link(cifar10_whole / name, folder / cifar10_whole.name / name)

    return jobs.made_once(tmp_path_factory, "data set small cifar10", make) / cifar10_whole.name
