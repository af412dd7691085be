"""PYTORCH.md: its left column is train_ddp.py, its right one a program that gives the same losses."""

import re

import jobs
import numpy as np
import pytest

PAGES = [jobs.REPO / "PYTORCH.md", jobs.REPO / "PYTORCH_CN.md"]


def column(page, which):
    """The code in a column (0 or 1) of the tables that set the two programs side by side, lines."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside = line.startswith("|") and (inside or "train_ddp.py` | PyTorch |" in line)
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if inside and len(cells) == 2 and cells[which].startswith("`") and "train_ddp.py`" not in cells[0]:
            lines += re.findall(r"`([^`]+)`", cells[which])
    return lines


def lesson():
    """The lines of train_ddp.py without docstrings, comments and options."""
    text = (jobs.REPO / "mnist_ddp" / "train_ddp.py").read_text(encoding="utf-8")
    text = re.sub(r'r?"""(.|\n)*?"""', "", text)
    text = re.sub(r"(?m)^parser = (.|\n)*?^(?=folders, test_images)", "", text)
    code = [re.sub(r"\s+# .*", "", line).rstrip() for line in text.splitlines()]
    return [line for line in code if line and not line.lstrip().startswith("#")
            and line not in ("import argparse", "import os", "import sys", "from pathlib import Path")]


def torch_program(options, weights):
    """The right column as a program, its options set, which begins with these weights."""
    program = "\n".join(column(PAGES[0], 1))
    load = (f"\nfor layer, number in zip(net[1::2], (1, 3, 5)):\n"
            f"    with torch.no_grad(), np.load({weights!r}) as saved:\n"
            "        layer.weight.copy_(torch.from_numpy(saved[f'{number}.weight']))\n"
            "        layer.bias.copy_(torch.from_numpy(saved[f'{number}.bias']))\noptimizer =")
    assert program.count("\noptimizer =") == 1
    return ("import sys\nfrom types import SimpleNamespace\nimport numpy as np\n"
            f"args = SimpleNamespace(**{options!r})\n" + program.replace("\noptimizer =", load) + "\n")


def test_the_left_column_is_the_lesson():
    assert column(PAGES[0], 0) == lesson()


def test_the_right_column_is_a_program_and_both_pages_have_it():
    compile("\n".join(column(PAGES[0], 1)), "PYTORCH.md", "exec")
    for which in (0, 1):
        assert column(PAGES[0], which) == column(PAGES[1], which)
        assert len(column(PAGES[0], which)) > 50


def test_both_programs_give_the_same_losses(mnist, tmp_path):
    """A batch is all images, so that their order does not matter, and both begin with the same weights."""
    if jobs.run(jobs.PYTHON, "-c", "import torch, torchvision", cwd=tmp_path).code:
        pytest.skip("needs PyTorch and torchvision")
    script = jobs.REPO / "mnist_ddp" / "train_ddp.py"
    jobs.succeeded(jobs.run(jobs.PYTHON, script, "--data-path", mnist, "--epochs", 1, "--steps", 1, "--lr", "1e-30",
                            "--ckpt-dir", tmp_path, cwd=tmp_path))
    save = ("import sys, mindspore, numpy; numpy.savez(sys.argv[2], **{name: value.asnumpy() for name, value in "
            "mindspore.load_checkpoint(sys.argv[1]).items()})")
    jobs.succeeded(jobs.run(jobs.PYTHON, "-c", save, tmp_path / "rank_0.ckpt", tmp_path / "weights.npz", cwd=tmp_path))
    run_sh = jobs.REPO / "mnist_ddp" / "run.sh"
    ours = jobs.succeeded(jobs.run("bash", run_sh, mnist, 2, "--", "--batch-size", 2000, "--epochs", 4, "--lr", 0.1,
                                   cwd=tmp_path))
    (tmp_path / "data" / "MNIST").mkdir(parents=True)
    (tmp_path / "data" / "MNIST" / "raw").symlink_to(mnist)
    options = {"data_path": str(tmp_path / "data"), "epochs": 4, "steps": 9, "batch_size": 2000, "lr": 0.1,
               "ckpt_dir": None}
    (tmp_path / "train.py").write_text(torch_program(options, str(tmp_path / "weights.npz")), encoding="utf-8")
    theirs = jobs.succeeded(jobs.run(jobs.PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2,
                                     "train.py", cwd=tmp_path))

    def losses(output):
        found = [re.findall(rf"epoch: {epoch}, step: 0, loss is ([\d.]+)", output) for epoch in range(4)]
        assert all(len(of_ranks) == 2 for of_ranks in found), output
        return np.array(found, float).mean(axis=1)

    np.testing.assert_allclose(losses(theirs.output), losses(ours.output), rtol=2e-4)
    assert losses(ours.output)[-1] < losses(ours.output)[0]
