"""The plot of losses: which logs it finds, what it reads from them, and that a picture comes out."""

import os
import re
import sys

import jobs
import pytest
from PIL import Image

sys.path.insert(0, str(jobs.REPO / "tools"))
import plot_loss


def write(folder, name, text):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("names", [
    [f"log_output/1/rank.{rank}/stdout" for rank in range(3)],
    [f"log_msrun/worker_{rank}.log" for rank in range(12)],
    [f"log_output/worker_{rank}.log" for rank in range(12)],
    [f"log_msrun_{rank // 6}/worker_{rank}.log" for rank in range(12)],
    [f"device{rank}/train.log{rank}" for rank in range(12)],
    [f"device_{rank}/train{rank}.log" for rank in range(8, 12)],
    [f"device/log_output/1/rank.{rank}/stdout" for rank in range(2)],
    ["device/train.log"],
])
def test_a_launchers_logs_are_found_in_the_order_of_the_ranks(names, tmp_path):
    for number, name in enumerate(names):
        write(tmp_path, name, f"epoch: 1 step: 1, loss is {number}.5\naccuracy: 0.25\n")
    ranks, accuracies = plot_loss.read_run(tmp_path)
    assert [points for points in ranks.values()] == [[(1, 1, number + 0.5)] for number in range(len(names))]
    assert accuracies == [(1, 0.25)]
    first = names[0].split("/")[0]
    itself = tmp_path / f"{first}.20250101-000000"  # where a later run has moved it
    (tmp_path / first).rename(itself)
    there = [name for name in names if name.startswith(f"{first}/")]
    assert [len(points) for points in plot_loss.read_run(itself)[0].values()] == [1] * len(there)


def test_of_two_launchers_logs_in_a_folder_the_last_are_drawn(tmp_path):
    names = "log_output/1/rank.0/stdout", "log_msrun/worker_0.log"
    for last in names:
        for name in names:
            write(tmp_path, name, f"epoch: 1 step: 1, loss is {1 + (name == last)}\n")
            os.utime(tmp_path / name, (1000 + (name == last),) * 2)
        assert plot_loss.read_run(tmp_path)[0] == {"all ranks": [(1, 1, 2.0)]}


def test_what_is_read_from_lines(tmp_path):
    write(tmp_path, "train.log", "[rank 1] epoch: 1 step: 1, loss is 2e-1\n[rank 0] epoch: 1 step: 1, loss is 3\n"
          "[1,0]<stdout>:epoch: 1 step: 2, loss is nan\neval result: {'accuracy': 0.75}\n"
          "[rank 2] epoch: 1 step: 1, loss is 0.53.\n"
          "[rank 0] accuracy: 0.5 (1 of 2)\nrank 0: loss 3 -> 1 (stdout)\naccuracy: 0.5 (1 of 2)\n")
    losses, accuracies = plot_loss.read_log(tmp_path / "train.log")
    assert losses[1] == [(1, 1, 0.2)]
    assert losses[2] == [(1, 1, 0.53)]
    assert losses[0][0] == (1, 1, 3.0)
    assert losses[0][1][2] != losses[0][1][2], "nan is kept"
    assert accuracies == [(1, 0.75), (1, 0.5)]
    write(tmp_path, "steps.log", "[rank 1] step: 0, loss is 3\nstep: 1, loss is 2\n")
    assert plot_loss.read_log(tmp_path / "steps.log") == ({1: [(0, 0, 3.0)], None: [(0, 1, 2.0)]}, [])


def test_steps_are_counted_over_epochs():
    assert plot_loss.steps_from_the_start([(1, 1, 9.0), (1, 4, 8.0), (2, 1, 7.0)]) == (
        [1, 4, 5], [9.0, 8.0, 7.0], {1: 4, 2: 5})
    assert plot_loss.steps_from_the_start([(0, 0, 9.0), (0, 10, 8.0), (1, 0, 7.0)])[0] == [1, 11, 12]
    assert plot_loss.smooth([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_the_picture_and_the_error(tmp_path):
    for run in ("one", "two"):
        for rank in range(2):
            write(tmp_path, f"{run} run/log_msrun/worker_{rank}.log", "".join(
                f"epoch: 1 step: {step}, loss is {2 / step + rank}\n" for step in range(1, 9)) + "accuracy: 0.9\n")
    made = jobs.run(jobs.PYTHON, jobs.REPO / "tools/plot_loss.py", "one run", "two run", "--output", "out/a.png",
                    cwd=tmp_path)
    jobs.succeeded(made)
    assert "one run: 2 lines of 16 losses, 1 accuracies" in made.output
    with Image.open(tmp_path / "out" / "a.png") as picture:
        assert picture.size == (1200, 504)
        colours = {colour for _, colour in picture.convert("RGB").quantize(64).convert("RGB").getcolors()}
    assert len(colours) > 8, "two runs, two colours, and text"
    write(tmp_path, "empty/train.log", "nothing\n")
    for path, sentence in (("nowhere", "nowhere does not exist"), ("out", "out holds no logs of a run"),
                           ("empty", "holds no line such as 'epoch: 1 step: 1, loss is 2.3'"),
                           ("/proc/self/mem", "/proc/self/mem cannot be read (Input/output error)")):
        failed = jobs.run(jobs.PYTHON, jobs.REPO / "tools/plot_loss.py", path, cwd=tmp_path)
        assert failed.code == 2
        assert sentence in failed.output
        assert "Traceback" not in failed.output


def test_names_that_mean_something_to_matplotlib(tmp_path):
    write(tmp_path, "_a$x$_b$/train.log", "epoch: 1 step: 1, loss is 2\n")
    made = jobs.run(jobs.PYTHON, jobs.REPO / "tools/plot_loss.py", "_a$x$_b$", "--output", "out",
                    cwd=tmp_path)
    jobs.succeeded(made)
    assert made.output == "_a$x$_b$: 1 lines of 1 losses, 0 accuracies\nout\n"
    with Image.open(tmp_path / "out") as picture:
        assert picture.format == "PNG"


def test_chinese_names_and_logs_from_a_pipe(tmp_path):
    write(tmp_path, "中文/train.log", "epoch: 1 step: 1, loss is 2\n")
    made = jobs.succeeded(jobs.run("bash", "-c", f"'{jobs.PYTHON}' '{jobs.REPO}/tools/plot_loss.py' 中文 "
                                   "<(printf 'epoch: 1 step: 2, loss is 3\n')", cwd=tmp_path))
    boxes = "plot_loss.py: no font here has all characters of the labels"
    assert re.fullmatch(rf"({boxes}.*\n)?中文: 1 lines of 1 losses, .*\n/dev/fd/\d+: 1 lines of 1 .*\nloss.png\n",
                        made.output), made.output


def test_a_log_is_not_drawn_over(tmp_path):
    write(tmp_path, "train.log", "epoch: 1 step: 1, loss is 2\nepoch: " + "1" * 5000 + " step: 2, loss is 1\n")
    for run in ("train.log", "."):
        refused = jobs.run(jobs.PYTHON, jobs.REPO / "tools/plot_loss.py", run, "--output", "train.log", cwd=tmp_path)
        assert refused.code == 2
        assert refused.output == "plot_loss.py: --output train.log is one of the logs; choose another one\n"
    jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "tools/plot_loss.py", ".", cwd=tmp_path))
