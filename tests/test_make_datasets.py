"""The data sets: exact layouts, real or learnable content, written whole or not at all."""

import hashlib
import re
import signal
import time

import jobs
import numpy as np
import pytest
from PIL import Image

TOOL = jobs.REPO / "tools" / "make_datasets.py"


def make(folder, name, *options, **kwargs):
    return jobs.run(jobs.PYTHON, TOOL, name, folder, *options, cwd=folder.parent, **kwargs)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    result = jobs.run(jobs.PYTHON, TOOL, "mnist", "/proc/set", cwd=tmp_path)
    assert result.code == 2
    assert "make_datasets.py: cannot write /proc/set" in result.output
    assert result.output.endswith("; name another folder, or make room\n")


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def nearest_mean_accuracy(train, train_labels, test, test_labels):
    """How well the class means alone tell the classes apart: learnable means far better than chance."""
    means = np.stack([train[train_labels == label].mean(axis=0) for label in np.unique(train_labels)])
    distances = ((test[:, None, :] - means[None]) ** 2).sum(axis=2)
    return float(np.mean(np.unique(train_labels)[distances.argmin(axis=1)] == test_labels))


def test_mnist_holds_real_digits_stratified(mnist):
    sizes = {}
    for part, count in (("train", 4000), ("t10k", 1000)):
        images = (mnist / f"{part}-images-idx3-ubyte").read_bytes()
        labels = (mnist / f"{part}-labels-idx1-ubyte").read_bytes()
        assert np.frombuffer(images[:16], ">i4").tolist() == [2051, count, 28, 28]
        assert np.frombuffer(labels[:8], ">i4").tolist() == [2049, count]
        sizes[part] = (np.frombuffer(images[16:], np.uint8).reshape(count, 784) / 255.0,
                       np.frombuffer(labels[8:], np.uint8))
        assert np.bincount(sizes[part][1]).tolist() == [count // 10] * 10
    assert nearest_mean_accuracy(*sizes["train"], *sizes["t10k"]) > 0.75
    together = np.concatenate([sizes["train"][0], sizes["t10k"][0]])
    assert len(np.unique(together, axis=0)) > 4990, "train and test overlap"


def test_cifar10_has_the_binary_layout_and_can_be_learnt(cifar10_whole):
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    records = {}
    for name in names:
        assert (cifar10_whole / name).stat().st_size == 10_000 * 3073
        records[name] = np.fromfile(cifar10_whole / name, np.uint8).reshape(10_000, 3073)
        assert np.bincount(records[name][:, 0]).tolist() == [1000] * 10
    train, test = records[names[0]][:2000], records["test_batch.bin"][:1000]
    assert nearest_mean_accuracy(train[:, 1:] / 255.0, train[:, 0], test[:, 1:] / 255.0, test[:, 0]) > 0.5


def test_fruits_is_an_image_folder_tree(tmp_path):
    jobs.succeeded(make(tmp_path / "fruits", "fruits", "--classes", 3, "--train-images", 4, "--test-images", 2))
    for part, count in (("Training", 4), ("Test", 2)):
        folders = sorted((tmp_path / "fruits" / part).iterdir())
        assert len(folders) == 3
        for folder in folders:
            pictures = list(folder.glob("*.jpg"))
            assert len(pictures) == count
            assert Image.open(pictures[0]).size == (100, 100)


@pytest.mark.parametrize(("name", "options"), [("mnist", ()), ("fruits", ("--classes", 2, "--train-images", 3))])
def test_the_seed_decides_the_files(name, options, tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        jobs.succeeded(make(tmp_path / folder, name, *options, "--seed", seed))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


def test_a_folder_in_use_is_left_alone_and_force_replaces_the_set_only(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "data.partial").mkdir()
    (folder / "diary.txt").write_text("mine")
    refused = make(folder, "mnist")
    assert refused.code == 2
    assert "is not empty; choose another folder, or replace it with --force" in refused.output
    assert [path.name for path in folder.iterdir()] == ["diary.txt"]
    jobs.succeeded(make(folder, "mnist", "--force"))
    jobs.succeeded(make(folder, "mnist", "--force"))
    assert (folder / "diary.txt").read_text() == "mine"
    assert len(list(folder.iterdir())) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.partial"], "only its own draft is gone"


def test_a_set_on_another_disk_is_replaced_whole_or_not_at_all(tmp_path):
    """Such as a container's volume: nothing is renamed from disk to disk, and a mount point itself cannot be."""
    small = ("--classes", 2, "--train-images", 2, "--test-images", 1)
    for name, mount in (("whole", "whole"), ("part", "part/Test")):
        (tmp_path / mount).mkdir(parents=True)
        both = (f"mount -t tmpfs tmpfs {mount} || exit 77\n"
                'for seed in 1 2; do "$@" --seed $seed --force || echo "code $?"; done\n'
                f"cp -r {name}/. {name}.copy; rm -rf {mount}/*")
        result = jobs.run(*jobs.UNSHARE, "--mount", "sh", "-c", both, "sh", jobs.PYTHON, TOOL, "fruits", name, *small,
                          cwd=tmp_path)
        if result.code == 77:
            pytest.skip("this machine does not let its users mount a tmpfs in a namespace of their own")
        if name == "whole":
            jobs.succeeded(make(tmp_path / "second", "fruits", *small, "--seed", 2))
            assert digest(tmp_path / "whole.copy") == digest(tmp_path / "second"), result.output
        else:
            refused = f"make_datasets.py: {tmp_path}/part/Test is a mount point, which cannot be replaced; "
            assert result.output.count(refused) == result.output.count("code 2\n") == 2
            assert [path.name for path in (tmp_path / "part.copy").rglob("*")] == ["Test"]


@pytest.mark.parametrize(("name", "options", "others"), [
    ("mnist", (), ("--seed", 2)), ("mnist", (), ("--download",)),
    ("fruits", ("--classes", 2, "--train-images", 3), ("--classes", 2, "--train-images", 4))])
def test_a_set_that_is_there_is_not_made_again(name, options, others, tmp_path):
    folder = tmp_path / "set"
    first = jobs.succeeded(make(folder, name, *options))
    assert first.output.splitlines()[-1] == f"{name}: {folder}"
    before = digest(folder)
    assert jobs.succeeded(make(folder, name, *options)).output.strip() == f"{name}: {folder} is there already"
    refused = make(folder, name, *others)
    assert refused.code == 2
    assert "is not empty" in refused.output
    file = next(path for path in folder.rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes() + b"x") if name == "mnist" else file.unlink()
    assert make(folder, name, *options).code == 2, "a damaged set is not there"
    jobs.succeeded(make(folder, name, *options, "--force"))
    assert digest(folder) == before


def test_a_link_and_the_folder_where_the_shell_stands_are_filled(mnist, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    made = jobs.succeeded(make(tmp_path / "link", "mnist"))
    assert made.output.splitlines()[-1] == f"mnist: {tmp_path / 'link'}"
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    there = jobs.succeeded(jobs.run("bash", "-c", f"'{jobs.PYTHON}' '{TOOL}' mnist . >&2; ls", cwd=tmp_path / "here"))
    assert len(re.findall("ubyte$", there.output, re.MULTILINE)) == 4
    assert digest(tmp_path / "disk") == digest(tmp_path / "here") == digest(mnist)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "here", "link"]


def test_cifar10_names_the_folder_that_launchers_take_and_accepts_it(cifar10_whole, tmp_path):
    inner = tmp_path / "data" / "cifar-10-batches-bin"
    inner.parent.mkdir()
    (inner.parent / "mnist").mkdir()
    made = jobs.succeeded(make(inner, "cifar10"))
    assert made.output.splitlines()[-1] == f"cifar10: {inner}"
    assert digest(inner) == digest(cifar10_whole)
    assert sorted(path.name for path in inner.parent.iterdir()) == ["cifar-10-batches-bin", "mnist"]
    for folder in (inner, inner.parent):
        again = jobs.succeeded(make(folder, "cifar10"))
        assert again.output.strip() == f"cifar10: {inner} is there already"
    (inner / "test_batch.bin").write_bytes(b"cut off")
    assert make(inner, "cifar10").code == 2
    assert make(inner.parent, "cifar10", "--download").code == 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_set_does_not_look_whole(sent, tmp_path):
    folder = tmp_path / "cifar"
    with jobs.Job(jobs.PYTHON, TOOL, "cifar10", folder, cwd=tmp_path) as job:
        while not list(tmp_path.glob("cifar.*.partial/set")):
            time.sleep(0.01)
        time.sleep(0.5)
        job.process.send_signal(sent)
        job.finish()
    assert job.process.returncode == -sent, "of SIGINT, too, so that a shell's loop around it ends"
    assert not folder.exists()
    jobs.succeeded(make(folder, "fruits", "--classes", 2, "--train-images", 1))  # and does not stand in the way


def test_two_at_once_do_not_touch_each_other(tmp_path):
    commands = [jobs.Job(jobs.PYTHON, TOOL, "mnist", tmp_path / "set", cwd=tmp_path) for _ in range(2)]
    with commands[0] as first, commands[1] as second:
        ended = [job.finish() for job in (first, second)]
    assert [result.code for result in ended] == [0, 0]
    assert "is there already" in "".join(result.output for result in ended)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert "is there already" in make(tmp_path / "set", "mnist").output


@pytest.mark.parametrize("options", [(), ("--seed", 1)])
def test_a_set_that_comes_in_the_last_moment_is_left_as_it_is(options, tmp_path):
    copy = jobs.planted("tools", tmp_path, "make_datasets.py", (
        "            partial.rename(folder)\n",
        "            shutil.copytree(partial, folder)  # as another run does\n            partial.rename(folder)\n"))
    result = jobs.run(jobs.PYTHON, copy / "make_datasets.py", "mnist", tmp_path / "set", *options, cwd=tmp_path)
    assert result.code == (2 if options else 0)
    assert ("set/t10k-images-idx3-ubyte has come meanwhile, perhaps of another run" if options else
            "set is there already") in result.output
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("name", "proxy"), [
    ("mnist", "http://127.0.0.1:9"), ("cifar10", "http://127.0.0.1:9"), ("mnist", "http://127.0.0.1:port")])
def test_download_without_network_says_so(name, proxy, tmp_path):
    nowhere = {"https_proxy": proxy, "http_proxy": proxy}
    result = make(tmp_path / "set", name, "--download", env=nowhere)
    assert result.code == 2
    assert "cannot download https://" in result.output
    assert "are you offline?" in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_last_line_that_nobody_can_read_is_no_error(tmp_path):
    data_set = ("fruits", "--classes", 2, "--train-images", 1, "--test-images", 1, "set")
    for _ in "made", "there already":
        result = jobs.run("bash", "-c", '"$@" > /dev/full', "bash", jobs.PYTHON, TOOL, *data_set, cwd=tmp_path)
        assert not jobs.succeeded(result).output
    assert (tmp_path / "set/Training").is_dir()


@pytest.mark.parametrize("arguments", [("imagenet", "x"), ("mnist",), ("fruits", "x", "--classes", "0"),
                                       ("mnist", "x", "--seed=-1"), ("mnist", "", "--force")])
def test_bad_arguments(arguments, tmp_path):
    result = jobs.run(jobs.PYTHON, TOOL, *arguments, cwd=tmp_path)
    assert result.code == 2
    assert "usage:" in result.output
