"""Data sets that many tests read: made once a worker by the project's own tool."""

import jobs
import pytest


def pytest_collection_modifyitems(items):
    """Begin with the longest, so that no worker is still at it when the others have finished."""
    items.sort(key=lambda item: "test_kills" not in item.name)


def make_dataset(tmp_path_factory, name, *options):
    folder = tmp_path_factory.mktemp("data sets") / name  # a space in the path: it must not matter
    made = jobs.run(jobs.PYTHON, jobs.REPO / "tools/make_datasets.py", name, folder, *options, cwd=folder.parent)
    return folder if jobs.succeeded(made) else None


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """The folder with the four files of 4,000 + 1,000 real digits."""
    return make_dataset(tmp_path_factory, "mnist")


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory):
    """The folder cifar-10-batches-bin of a synthetic set."""
    return make_dataset(tmp_path_factory, "cifar10") / "cifar-10-batches-bin"
