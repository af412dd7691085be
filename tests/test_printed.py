"""What scripts print, however they are started: nothing of MindSpore's when all is well, short losses, how long it will
take, and one sentence for bad input."""

import os
import re

import forks
import jobs
import pytest

MPIRUN = ("mpirun", "-n", "2", "--oversubscribe", *["--allow-run-as-root"] * (os.geteuid() == 0))
# Each step takes 40 s, by a clock of its own.
STEPS = """
import runpy, sys, time, types
import mindspore as ms
from mindspore.train import LossMonitor
runpy.run_path(sys.argv[1])
time.monotonic = lambda now=iter(range(0, 9000, 40)): next(now)

class Parameters(dict):
    __getattr__ = dict.__getitem__

def train(every, epochs, loss, done=0):
    print("===", flush=True)
    printing = LossMonitor(every)
    for step in range(1, 5):
        about = Parameters(cur_step_num=100 * done + step, cur_epoch_num=done + 1, epoch_num=epochs, batch_num=100,
                           net_outputs=ms.Tensor(loss * step, ms.float32), dataset_sink_mode=False)
        printing.step_end(types.SimpleNamespace(original_args=lambda: about))

train(1, 10, 1.2345678)
train(1, 10, 1.2345678, done=5)
train(2, 10, 1e-9)
train(1, 0.1, 1)
train(1, 10, float("nan"))
"""
TO_GO = "about 11.1 h to go, at 40.0 s a step; options of a small run (with a launcher, after --): " \
        "--epochs 1 --steps 4 --image-size 32"
BAD_INPUT = "import ranks, argparse\ndef test_it():\n    argparse.ArgumentParser(prog='x').error('no such data')\n"


def test_losses_have_5_digits_and_rank_0_says_how_long_it_will_take(tmp_path):
    for rank, option, sentence in (("0", "# --image-size", [TO_GO]), ("0", "", [TO_GO.split(";")[0]]), ("1", "", [])):
        (tmp_path / "steps.py").write_text(STEPS + option)
        result = forks.run("steps.py", jobs.REPO / "tools" / "loss_lines.py", cwd=tmp_path, env={"RANK_ID": rank})
        first, resumed, second, short, nan = (part.splitlines() for part in result.output.split("===\n")[1:])
        assert first == ["epoch: 1 step: 1, loss is 1.2346", "epoch: 1 step: 2, loss is 2.4691", *sentence,
                         "epoch: 1 step: 3, loss is 3.7037", "epoch: 1 step: 4, loss is 4.9383"]
        assert resumed == [line.replace("epoch: 1", "epoch: 6") for line in first], "it has 10 more to go"
        assert second == ["epoch: 1 step: 2, loss is 2e-09", "epoch: 1 step: 4, loss is 4e-09",
                          *(line.replace("11.1", "5.5").replace("40.0", "20.0") for line in sentence)]
        assert len(short) == 4, "less than 10 minutes are left"
        assert nan[-1].startswith("ValueError: In epoch: 1 step: 1, loss is NAN or INF")


@pytest.mark.parametrize("start", ["mpirun", "msrun", "pytest"])
def test_nothing_of_mindspore_is_printed_when_all_is_well(start, tmp_path):
    """Also where MindSpore is imported first, and tools/ lies beside the script's folder."""
    imports = ["import ranks", "import time\nimport mindspore as ms"]
    text = "\n".join([*(imports[::-1] if start == "msrun" else imports),
                      "from mindspore.communication import get_rank, init",
                      "def test_it():",
                      "    ms.set_context(device_target='CPU')  # MindSpore 2.10 warns: deprecated",
                      "    ranks.join()", "    init()", "    print('rank', get_rank(), flush=True)",
                      "    time.sleep(1)  # right after init(), MindSpore's own end hangs now and then",
                      "    ranks.leave()", "if __name__ == '__main__':", "    test_it()", ""])
    folder = tmp_path / "lesson"
    folder.mkdir()
    if start == "msrun":
        (tmp_path / "tools").symlink_to(jobs.REPO / "tools")
    (folder / "script.py").write_text(text)
    (folder / "ranks.py").write_bytes((jobs.REPO / "mnist_ddp" / "ranks.py").read_bytes())
    command = {"mpirun": [*MPIRUN, "python", "script.py"],
               "pytest": [*MPIRUN, "python", "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "script.py"],
               "msrun": ["msrun", "--worker_num=2", "--local_worker_num=2", "--join=True", "--log_dir=log",
                         f"--master_port={jobs.free_port()}", "script.py"]}[start]
    result = jobs.succeeded(jobs.run(*command, cwd=folder))
    assert sorted(re.findall(r"^rank \d$", result.output, re.MULTILINE)) == ["rank 0", "rank 1"]
    assert not re.search(r"\[(INFO|WARNING)\] (?!ME\(\d+:\d+,MainProcess\).*_api\.py)", result.output)  # msrun's own
    assert "deprecated" not in result.output


def test_bad_input_is_one_sentence_of_the_whole_job(tmp_path):
    lesson = tmp_path / "lesson"
    lesson.mkdir()
    (tmp_path / "tools").symlink_to(jobs.REPO / "tools")
    (lesson / "test_it.py").write_text(BAD_INPUT + "if __name__ == '__main__':\n    test_it()\n")
    (lesson / "ranks.py").write_bytes((jobs.REPO / "mnist_ddp" / "ranks.py").read_bytes())
    job = jobs.run(*MPIRUN, "python", "test_it.py", cwd=lesson)
    assert job.code == 2
    assert job.output.startswith("x: error: no such data\n---")
    assert job.output.count("no such data") == 1, "the other rank says it, too"
    in_pytest = jobs.run(jobs.PYTHON, "-m", "pytest", "-s", "test_it.py", cwd=lesson)
    assert in_pytest.code == 2
    assert "Exit: no such data" in in_pytest.output
    assert "def error" not in in_pytest.output, "a traceback"
    alone = forks.run("-c", "import time; time.sleep = lambda *what: print(*what, flush=True); import test_it; "
                            "test_it.test_it()", cwd=lesson, env={"RANK_ID": "1"})  # rank 1 alone: waits, then says it
    assert (alone.code, alone.output) == (2, "9\nx: error: no such data\n")


@pytest.mark.parametrize(("lesson", "module", "check"), [
    ("mnist_ddp", "mnist_files", "mnist_folder"), ("resnet50_gpu", "cifar10_files", "cifar10_folder"),
    ("resnet50_gpu", "fruits_files", "fruits_folder")])
def test_advice_names_a_program_that_is_there(lesson, module, check, tmp_path):
    copy = tmp_path / lesson
    copy.mkdir()
    for file in (jobs.REPO / lesson).glob("*_files.py"):
        (copy / file.name).write_bytes(file.read_bytes())
    code = f"import sys, {module}\ntry: {module}.{check}('/no/such')\nexcept Exception as error: print(error)"
    alone = jobs.run(jobs.PYTHON, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(copy)}).output
    assert "does not exist" in alone
    assert "tools/" not in alone
    (tmp_path / "tools").symlink_to(jobs.REPO / "tools")
    beside = jobs.run(jobs.PYTHON, "-c", code, cwd=copy).output
    assert (copy / re.search(r"python (\S+make_datasets\.py) ", beside)[1]).is_file()
