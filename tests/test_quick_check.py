"""The check before the start: without MindSpore, and as the script itself would check."""

import runpy

import forks
import jobs
import pytest

TOOL = jobs.REPO / "tools/quick_check.py"
SCRIPT = """
import sys
import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import init, get_rank


class Net(nn.Cell):
    def construct(self, x, dtype=ms.float32):
        return ds.vision.HWC2CHW()(x)


{}
print("MindSpore is", "here" if hasattr(ms, "__version__") else "not here", sys.argv)
{}
"""


@pytest.mark.parametrize(("use", "end", "needs_it", "code", "last"), [
    ("", "", False, 0, "MindSpore is not here"),
    ("", "sys.exit('bad option')", False, 1, "bad option"),
    ("", "sys.exit(2)", False, 2, "MindSpore is not here"),
    ("if not nn.Cell: sys.exit(5)", "", True, 0, "MindSpore is here"),
    ("", "raise KeyError(3)", True, 1, "KeyError: 3"),
])
def test_a_check_that_makes_use_of_mindspore_gets_it_and_no_other(use, end, needs_it, code, last, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(use, end))
    result = jobs.run(jobs.PYTHON, TOOL, "script.py", "--check", cwd=tmp_path)
    assert result.code == code
    assert result.output.strip().splitlines()[-1].startswith(last)
    assert ("MindSpore is here ['script.py', '--check']" in result.output) == needs_it
    assert result.output.count("MindSpore is") == 1


@pytest.mark.parametrize("use", ["ms.Tensor(7)", "bool(nn.Cell)", "len(nn.Cell)", "list(nn.Cell)", "nn.Cell[0]",
                                 "isinstance(7, ms.Tensor)"])
def test_what_is_more_use_of_mindspore_than_its_names(use):
    check = runpy.run_path(str(TOOL))
    with pytest.raises(check["Used"]):
        eval(use, {"ms": check["stand_in"]("mindspore"), "nn": check["stand_in"]("nn")})


@pytest.mark.parametrize("options", [(), ("--epochs", 0), ("--data-path", "/none"), ("--no-such-option",)])
@pytest.mark.parametrize("script", ["mnist_ddp/train_ddp.py", "resnet50_gpu/resnet50_distributed_training_gpu.py"])
def test_it_says_what_the_lesson_says(script, options, mnist, cifar10, tmp_path):
    env = {"DATA_PATH": str(mnist if "mnist" in script else cifar10), "DEVICE_TARGET": "CPU", "RANK_SIZE": "2"}
    command = (jobs.REPO / script, *options, "--check")
    both = [jobs.run(jobs.PYTHON, TOOL, *command, cwd=tmp_path, env=env), forks.run(*command, cwd=tmp_path, env=env)]
    # What goes to stdout and what to stderr: forks have them in another order.
    assert sorted(both[0].output.splitlines()) == sorted(both[1].output.splitlines())
    assert both[0].code == both[1].code == (2 if options else 0)


@pytest.mark.parametrize(("script", "options"), [
    ("mnist_ddp/train_ddp.py", ()), ("resnet50_gpu/resnet50_distributed_training_gpu.py", ()),
    *((f"resnet50_ascend/resnet50_distributed_training{name}.py", ())
      for name in ("", "_pipeline", "_dataset_slice", "_grad_accumulation")),
    *(("checkpoints/train.py", ("--mode", mode, "--ckpt-dir", "ck")) for mode in (
        "data_parallel", "hybrid_parallel", "semi_auto_parallel")),
    *(("parallel_modes/parallel_modes.py", ("--mode", mode)) for mode in (
        "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"))])
def test_the_lessons_checks_do_without_mindspore(script, options, mnist, cifar10, tmp_path):
    (tmp_path / "mindspore.py").write_text("raise SystemExit('it is loaded')\n")
    env = {"DATA_PATH": str(mnist if "mnist" in script else cifar10), "DEVICE_TARGET": "CPU", "RANK_SIZE": "2",
           "ASCEND_PLAN": "here", "PYTHONPATH": str(tmp_path)}
    result = jobs.run(jobs.PYTHON, TOOL, jobs.REPO / script, *options, "--check", cwd=tmp_path, env=env)
    assert "it is loaded" not in jobs.succeeded(result).output


LATER = """
import sys
import ranks
print([name for name in sys.modules if name.partition(".")[0] in ("scipy", "unittest")])
print([name for name in sys.modules if name.startswith("mindspore") and name.endswith("_pb2")])
import mindspore as ms
import numpy as np
from mindspore.train import HausdorffDistance
metric = HausdorffDistance()  # SciPy's morphology
a, b = np.zeros((2, 8, 8), np.float32)
a[2:4, 2:4] = b[2:4, 2:7] = 1
metric.update(a, b, 1)
print(metric.eval())
import scipy.linalg
print(scipy.linalg.det(np.eye(2)))
import unittest.mock
with unittest.mock.patch("sys.argv", []):
    print(sys.argv)
net, batch = ms.nn.Dense(2, 1), ms.Tensor([[1, 2]], ms.float32)
ms.export(net, batch, file_name="net", file_format="MINDIR")
print(np.allclose(ms.nn.GraphCell(ms.load("net.mindir"))(batch), net(batch)))
print(ms.train.serialization.mindir_model().HasField("graph"), isinstance(batch, ms.train.serialization.mindir_model))
ms.save_checkpoint(net, "net.ckpt")
print(*sorted(ms.load_checkpoint("net.ckpt")))
with ms.SummaryRecord("summary", network=net) as record:
    record.add_value("scalar", "loss", batch[0, 0])
    record.record(1)
"""


def test_what_mindspore_imports_later_is_there_when_it_is_used(tmp_path):
    result = jobs.succeeded(jobs.run(jobs.PYTHON, "-c", LATER, cwd=tmp_path,
                                     env={"PYTHONPATH": str(jobs.REPO / "own_model")}))
    assert result.output.splitlines() == ["[]", "['mindspore.train.anf_ir_pb2']", "3.0", "1.0", "[]", "True",
                                          "False False", "bias weight"]
    assert any("summary" in file.name and file.stat().st_size for file in (tmp_path / "summary").iterdir())
