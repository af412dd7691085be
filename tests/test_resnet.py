"""The lesson's ResNet-50 against the paper's table 1, and its loss against MindSpore's fused one."""

import os
import sys

import jobs
import numpy as np
import pytest

before = dict(os.environ)
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # MindSpore's convolutions are several times slower with AVX-512
sys.path.insert(0, str(jobs.REPO / "resnet50_ascend"))

import cifar10_files  # noqa: E402
import mindspore as ms  # noqa: E402
from loss import SoftmaxCrossEntropyExpand  # noqa: E402
from resnet import resnet50  # noqa: E402
from resnet50_distributed_training import to_network_input  # noqa: E402

# Importing MindSpore sets variables (LD_LIBRARY_PATH, HCCL_CONNECT_TIMEOUT), which other tests' jobs must not inherit.
os.environ.clear()
os.environ.update(before)


def number_of_parameters(net):
    return sum(int(np.prod(parameter.shape)) for parameter in net.trainable_params())


def test_number_of_parameters():
    assert number_of_parameters(resnet50(1000)) == 25_557_032
    assert number_of_parameters(resnet50(10)) == 25_557_032 - 990 * (2048 + 1)


def test_shapes_of_table_1():
    net = resnet50(1000)
    x = ms.Tensor(np.zeros((1, 3, 224, 224), np.float32))
    shapes = []
    x = net.conv1(x)
    shapes.append(x.shape)
    x = net.max_pool(net.relu(net.bn1(x)))
    shapes.append(x.shape)
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        x = stage(x)
        shapes.append(x.shape)
    assert shapes == [(1, 64, 112, 112), (1, 64, 56, 56), (1, 256, 56, 56), (1, 512, 28, 28), (1, 1024, 14, 14),
                      (1, 2048, 7, 7)]
    assert net.fc(net.mean(x, (2, 3))).shape == (1, 1000)
    assert [len(stage) for stage in (net.layer1, net.layer2, net.layer3, net.layer4)] == [3, 4, 6, 3]
    kernels = [cell.kernel_size for _, cell in net.layer2[0].cells_and_names() if isinstance(cell, ms.nn.Conv2d)]
    assert kernels == [(1, 1), (3, 3), (1, 1), (1, 1)]
    assert net.layer2[0].conv2.stride == (2, 2), "v1.5: the 3x3 convolution halves the picture"


def test_weights_start_as_documented():
    ms.set_seed(3)
    net = resnet50(10)
    for convolution, variance in ((net.conv1, 2 / (7 * 7 * 64)), (net.layer4[1].conv2, 2 / (3 * 3 * 512))):
        weight = convolution.weight.asnumpy()
        assert weight.var() == pytest.approx(variance, rel=0.05)
        assert weight.mean() == pytest.approx(0, abs=0.001)
    image = ms.Tensor(np.random.default_rng(0).normal(size=(1, 256, 8, 8)).astype(np.float32))
    assert np.array_equal(net.layer1[1](image).asnumpy(), np.maximum(image.asnumpy(), 0)), "blocks start as identity"


@pytest.mark.parametrize("sparse", [True, False])
def test_expanded_loss_equals_the_fused_one(sparse):
    rng = np.random.default_rng(5)
    logits = ms.Tensor(rng.normal(scale=4, size=(6, 10)).astype(np.float32))
    classes = rng.integers(0, 10, 6)
    labels = ms.Tensor(classes.astype(np.int32)) if sparse else ms.Tensor(np.eye(10, dtype=np.float32)[classes])
    expanded, fused = (ms.value_and_grad(loss)(logits, labels) for loss in (
        SoftmaxCrossEntropyExpand(sparse=sparse),
        ms.nn.SoftmaxCrossEntropyWithLogits(sparse=sparse, reduction="mean")))
    assert expanded[0].shape == ()
    np.testing.assert_allclose(expanded[0].asnumpy(), fused[0].asnumpy(), rtol=1e-5)
    np.testing.assert_allclose(expanded[1].asnumpy(), fused[1].asnumpy(), atol=1e-6)
    exact = logits.asnumpy().astype(np.float64)
    exact = np.log(np.exp(exact).sum(axis=1)) - exact[np.arange(6), classes]
    np.testing.assert_allclose(expanded[0].asnumpy(), exact.mean(), rtol=1e-5)


def test_expanded_loss_of_huge_logits_is_finite():
    logits, labels = ms.Tensor([[1000.0, 0.0], [-1000.0, 1000.0]]), ms.Tensor([0, 0], ms.int32)
    loss, gradient = ms.value_and_grad(SoftmaxCrossEntropyExpand(sparse=True))(logits, labels)
    assert float(loss) == pytest.approx(-np.log(1e-24) / 2, rel=1e-5)
    assert np.isfinite(gradient.asnumpy()).all()


def test_normalisation_is_in_the_order_of_the_channels(tmp_path):
    red = np.zeros((10_000, 3073), np.uint8)
    red[:, 1:1025] = 255  # a record: label, then 1,024 bytes of red, of green, of blue
    red.tofile(tmp_path / "data_batch_1.bin")
    dataset = ms.dataset.Cifar10Dataset(str(tmp_path), usage="train", num_samples=1)
    (image, _), = dataset.map(to_network_input(32), "image").create_tuple_iterator(num_epochs=1, output_numpy=True)
    assert image.shape == (3, 32, 32)
    # Mean and deviation of red, green, blue: https://github.com/kuangliu/pytorch-cifar and many others.
    for channel, (value, mean, deviation) in enumerate(((1, 0.4914, 0.2023), (0, 0.4822, 0.1994), (0, 0.4465, 0.2010))):
        np.testing.assert_allclose(image[channel], (value - mean) / deviation, atol=1e-5)


def make_batch(file, label=0, records=10_000):
    batch = np.zeros((records, 3073), np.uint8)
    batch[:, 0] = label
    batch.tofile(file)


@pytest.mark.parametrize(("files", "says"), [
    ({}, "has no data_batch_*.bin, so it is not the binary version"),
    ({"data_batch_1": 0}, "holds the Python version"),
    ({"data_batch_1.bin": 0, "data_batch_2.bin": 10}, "data_batch_2.bin: record 0 has the label 10"),
])
def test_a_bad_data_folder_is_named(files, says, tmp_path):
    for name, label in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_batch(tmp_path / name, label)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below
        cifar10_files.check_cifar10_folder(tmp_path)
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_the_folder_above_will_do_and_rank_0_says_so(rank, tmp_path, monkeypatch, capsys):
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    make_batch(inner / "data_batch_1.bin")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setenv("RANK_ID", rank) if rank else monkeypatch.delenv("RANK_ID", raising=False)
    assert cifar10_files.cifar10_folder(str(tmp_path)) == str(inner)
    some = "" if rank == "1" else f"data: {inner}, 10,000 of CIFAR-10's 50,000 training images\n"
    assert capsys.readouterr().out == some
    for number in range(2, 6):
        assert cifar10_files.cifar10_folder(str(inner)) == str(inner)
        assert capsys.readouterr().out == some.replace("10,", f"{number - 1}0,", 1)
        make_batch(inner / f"data_batch_{number}.bin")
    assert cifar10_files.cifar10_folder(str(inner)) == str(inner)
    assert capsys.readouterr().out == ""


def test_a_cut_off_file_is_named(tmp_path):
    make_batch(tmp_path / "data_batch_1.bin")
    assert cifar10_files.check_cifar10_folder(tmp_path) == (10_000, 0)
    make_batch(tmp_path / "test_batch.bin", records=9_999)
    with pytest.raises(ValueError, match="test_batch.bin has 30726927 bytes"):
        cifar10_files.check_cifar10_folder(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        cifar10_files.check_cifar10_folder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="set DATA_PATH"):
        cifar10_files.check_cifar10_folder(None)
