"""Jobs that are killed, or find torn or foreign files, and go on as if nothing had happened; slices cut and merged."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import time

import forks
import jobs
import numpy as np
import pytest
from forks import refused

LESSON = jobs.REPO / "checkpoints"
RUN = LESSON / "run.sh"
SLICED = ("weight", "moments.weight")
STEPS = 4  # an epoch
# MindSpore's threads add up the loss in an order of their own: two runs of one command may differ in the last digits.
SAME, PRINTED = 1e-5, 2e-4  # of parameters; of losses, which are printed with 5 digits


# ------------------------------------------------------------------------------------------------------- evidence
def alone(*options, cwd, lesson=LESSON):
    """Train in one process; return the Result."""
    return forks.run(lesson / "train.py", *options, cwd=cwd)


def train(folder, mode, ranks, *options, lesson=LESSON):
    """Train with the real launcher, one process by hand; return the Result."""
    folder.mkdir(exist_ok=True)
    if ranks == 1:
        return jobs.succeeded(alone("--mode", mode, *options, cwd=folder, lesson=lesson))
    return jobs.succeeded(jobs.run("bash", lesson / "run.sh", mode, ranks, "--", *options, cwd=folder, timeout=300))


def losses_of(text):
    """The losses that one rank printed: {(epoch, step): loss}."""
    found = re.findall(r"^epoch: (\d+) step: (\d+), loss is (\S+)$", text, re.MULTILINE)
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}


def losses_of_ranks(result, ranks):
    """The losses that each rank printed."""
    if ranks == 1:
        return [losses_of(result.output)]
    return [losses_of("\n".join(re.findall(rf"^\[rank {rank}\] (.*)$", result.output, re.MULTILINE)))
            for rank in range(ranks)]


def log_of(folder, rank):
    return folder / "log_output" / "1" / f"rank.{rank}" / "stdout"


def attempts(folder, rank):
    """The logs of a rank in all attempts to run a job, in their order."""
    earlier = sorted(folder.glob(f"log_output.*/1/rank.{rank}/stdout"), key=lambda log: log.stat().st_mtime)
    return [*earlier, log_of(folder, rank)]


def beginning(text):
    """Epoch and step with which a rank's attempt began."""
    within = re.search(r"^resumed in epoch (\d+) after step (\d+) from", text, re.MULTILINE)
    if within:
        return int(within[1]), int(within[2]) + 1
    after = re.search(r"^resumed after epoch (\d+) from", text, re.MULTILINE)
    return int(after[1]) + 1 if after else 1, 1


def resumed_after(text):
    """The epoch after which a rank's attempt resumed; 0 if it began at the beginning."""
    return beginning(text)[0] - 1


def checkpoint(folder, rank, epoch):
    return folder / "ck" / f"rank_{rank}" / f"net-{epoch}_4.ckpt"


def read(*folders):
    """Of each folder the newest files of all ranks: lists of {name: array}, in the order of the ranks, bit for bit."""
    ranks = [len(list(folder.glob("rank_*"))) for folder in folders]
    files = [max((folder / f"rank_{rank}").glob("*.ckpt"), key=lambda file: int(re.search(r"-(\d+)_", file.name)[1]))
             for folder, n in zip(folders, ranks) for rank in range(n)]
    loaded = map(jobs.parameters, files)
    return [list(itertools.islice(loaded, n)) for n in ranks]


def gathered(ranks):
    """One set of parameters from those of all ranks: slices side by side; what is not sliced must be equal."""
    whole = {}
    assert all(rank.get("rank", number) == number for number, rank in enumerate(ranks))
    for name, first in ranks[0].items():
        if name == "rank":
            continue
        if name in SLICED and first.shape != (512, 128):
            whole[name] = np.concatenate([rank[name] for rank in ranks], axis=1)
        else:
            for number, rank in enumerate(ranks):
                assert np.array_equal(rank[name], first), f"rank {number} has another {name} than rank 0"
            whole[name] = first
    return whole


def same_bits(first, second):
    """Whether two lists of parameter sets are equal to the last bit."""
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a) for a, b in zip(first, second))


def largest_difference(first, second):
    """The largest difference between two lists of parameter sets."""
    return max(jobs.largest_difference(a, b) for a, b in zip(first, second))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A folder where one process has trained for 4 epochs: ck/, and what it printed, log."""
    def make(folder):
        result = train(folder, "data_parallel", 1, "--epochs", 4, "--ckpt-dir", "ck")
        (folder / "log").write_text(result.output)
        losses = list(losses_of(result.output).values())
        assert len(losses) == 4 * STEPS
        assert np.mean(losses[-STEPS:]) < 0.9 * np.mean(losses[:STEPS]), f"the loss did not fall: {losses}"

    return jobs.made_once(tmp_path_factory, "one process, 4 epochs", make)  # spaces in the path: they must not matter


def copy_of(one, tmp_path):
    return shutil.copytree(one, tmp_path, dirs_exist_ok=True)


# ---------------------------------------------------------------------------------------------------------- kills
KILLS = 5


def start(folder, epochs, *options, restarts=0):
    """A job of two ranks whose loss falls slowly."""
    folder.mkdir(exist_ok=True)
    return jobs.Job("bash", RUN, "data_parallel", 2, "--restarts", restarts, "--", "--epochs", epochs, "--lr", 0.0005,
                    "--ckpt-dir", "ck", *options, cwd=folder)


def wait_for_steps(job, count, steps):
    """Wait until both ranks together have done so many steps in a job's attempt number `count`, from 1."""
    deadline = time.monotonic() + jobs.PATIENCE * 60
    attempt = ""
    while attempt.count(" step: ") < steps:
        assert job.process.poll() is None, job.output()[-9000:]
        assert time.monotonic() < deadline, job.output()[-9000:]
        time.sleep(0.02)
        attempt = job.output().partition(f"restart {count - 1} of ")[2] if count > 1 else job.output()


def kill_a_rank(job, chance, count):
    """Kill one of the two ranks some time after a random step of a job's attempt number `count`."""
    wait_for_steps(job, count, 1)
    victim = job.rank_process(chance.randrange(2))  # looked for now, for that takes time
    wait_for_steps(job, count, chance.randint(1, 60) if count > 1 else chance.randint(10, 60))  # 8: an epoch is saved
    os.kill(victim, signal.SIGKILL)
    job.wait_for(rf"^run.sh: restart {count} of ", timeout=60)


def check_goes_on(log, unbroken):
    """An attempt must begin right after what it resumed, with the losses of the job that was never broken."""
    text = log.read_text(errors="replace")
    losses = losses_of(text)
    assert next(iter(losses), None) in (None, beginning(text)), text
    for step, loss in losses.items():
        assert abs(loss - unbroken[step]) < PRINTED, f"{log}, epoch and step {step}: {loss}, unbroken {unbroken[step]}"


def test_kills_lose_nothing(tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with start(broken, 5000, restarts=KILLS) as job:
        for count in range(1, KILLS + 1):
            kill_a_rank(job, chance, count)
        wait_for_steps(job, KILLS + 1, chance.randint(10, 60))  # both have ended one, and said so
        os.kill(job.process.pid, signal.SIGTERM)
        result = job.finish(60 * (KILLS + 4))
    assert result.code == 143, result.output[-9000:]
    assert not result.left_over
    assert result.output.count("failed, exit code 137. The end of ") == KILLS
    epochs = int(re.search(r"all ranks have saved epoch (\d+), step", result.output)[1]) + 2
    with start(broken, epochs, "--resume") as job:
        jobs.succeeded(job.finish())
    with start(whole, epochs) as job:
        jobs.succeeded(job.finish(200))
    unbroken = [losses_of(log_of(whole, rank).read_text()) for rank in range(2)]
    assert [len(losses) for losses in unbroken] == [STEPS * epochs] * 2
    assert unbroken[0][epochs, STEPS] < 0.9 * unbroken[0][1, STEPS]

    resumed = []
    for rank in range(2):
        logs = attempts(broken, rank)
        assert len(logs) == KILLS + 2, "the logs of all attempts are kept"
        for log in logs:
            check_goes_on(log, unbroken[rank])
        resumed.append([resumed_after(log.read_text(errors="replace")) for log in logs])
        assert len(set(resumed[rank])) > KILLS / 2, f"most attempts got further: {resumed[rank]}"
        assert sorted(resumed[rank]) == resumed[rank]
        assert (epochs, STEPS) in losses_of(log_of(broken, rank).read_text())
    assert largest_difference(*read(whole / "ck", broken / "ck")) < SAME
    kept = {file.name.partition("_")[0] for file in broken.glob("ck/rank_0/*.ckpt")}  # of an epoch also a part
    assert len(kept) == 3, "older ones are cleared away after a restart, too"


# ---------------------------------------------------------------------------------------- torn and foreign files
def tear(file, size):
    """Cut a checkpoint off, as a disk does that loses power."""
    file.chmod(0o600)  # MindSpore lets nobody write
    os.truncate(file, size)


def test_torn_files_are_passed_over(tmp_path):
    first = train(tmp_path, "data_parallel", 2, "--epochs", 4, "--ckpt-dir", "ck")
    unbroken = losses_of_ranks(first, 2)
    assert {int(number) for number in re.findall(r"rank (\d) of 2 on CPU", first.output)} == {0, 1}
    [trained] = read(tmp_path / "ck")
    files = [checkpoint(tmp_path, rank, 4) for rank in range(2)]
    good = files[0].read_bytes()

    # Cut off where an entry ends, before the last one: MindSpore reads that without a word.
    end_of_an_entry = good.rindex(b"\x0a\x09rank_size") - 2
    for file in files:
        tear(file, end_of_an_entry)
    assert len(jobs.parameters(files[0])) == 7
    bug = jobs.planted("checkpoints", tmp_path, "checkpoints.py", (
        'if "rank_size" in parameters:', "if parameters:"))
    result = train(tmp_path, "data_parallel", 2, "--epochs", 4, "--ckpt-dir", "ck", "--resume", lesson=bug)
    assert result.output.count("resumed after epoch 4 from") == 2, "the bug is found"
    # On one rank only: the other must not go on alone.
    files[0].write_bytes(good)
    result = train(tmp_path, "data_parallel", 2, "--epochs", 4, "--ckpt-dir", "ck", "--resume")
    assert result.output.count("resumed after epoch 3 from") == 2
    assert result.output.count("warning: ck/rank_1/net-4_4.ckpt is cut off or damaged; passed over") == 1
    for rank in range(2):
        assert len(losses_of(log_of(tmp_path, rank).read_text())) == STEPS
        check_goes_on(log_of(tmp_path, rank), unbroken[rank])
    assert largest_difference(trained, read(tmp_path / "ck")[0]) < SAME
    aside = list(files[0].parent.glob("net-4_4.ckpt.*.unused"))
    assert aside, "moved aside: it must not mix with what is saved now"
    # Gone on one rank, of all epochs but the second.
    for epoch in (3, 4):
        checkpoint(tmp_path, 0, epoch).unlink()
    result = train(tmp_path, "data_parallel", 2, "--epochs", 4, "--ckpt-dir", "ck", "--resume")
    assert result.output.count("resumed after epoch 2 from") == 2
    assert len(list(files[1].parent.glob("net-4_4.ckpt.*.unused"))) > 1, "what lay aside was written over"
    assert largest_difference(trained, read(tmp_path / "ck")[0]) < SAME
    # All gone on one rank, as on a machine that did not run it before: not from the beginning, without a word.
    shutil.move(files[1].parent, tmp_path / "elsewhere")
    left = sorted(files[0].parent.iterdir())
    result = jobs.run("bash", LESSON / "run.sh", "data_parallel", 2, "--", "--ckpt-dir", "ck", "--resume=if-saved",
                      cwd=tmp_path)
    assert result.code == 2 and "share no whole epoch; start all ranks where they were, or name" in result.output
    assert sorted(files[0].parent.iterdir()) == left
    # Nor where each machine has the files of another's rank.
    of_2 = tmp_path / "ck" / "rank_2"
    shutil.copytree(files[0].parent, of_2)
    files[0].parent.rename(tmp_path / "aside")
    result = jobs.run("bash", LESSON / "run.sh", "data_parallel", 2, "--", "--ckpt-dir", "ck", "--resume=if-saved",
                      cwd=tmp_path)
    assert result.code == 2 and "share no whole epoch; start all ranks where they were, or name" in result.output
    (tmp_path / "aside").rename(files[0].parent)
    shutil.rmtree(of_2)
    # Nor is it refused where the other one has saved only once: it was killed before it had.
    for file in left:
        checkpoint(tmp_path, 0, 1) == file or file.unlink()
    result = train(tmp_path, "data_parallel", 2, "--epochs", 1, "--ckpt-dir", "ck", "--resume=if-saved")
    assert losses_of_ranks(result, 2) == [{key: loss for key, loss in rank.items() if key[0] == 1} for rank in unbroken]


def test_bytes_that_changed_are_noticed(one, tmp_path):
    file = checkpoint(copy_of(one, tmp_path), 0, 4)
    file.chmod(0o600)
    good = file.read_bytes()
    file.write_bytes(good[:70000] + bytes(8) + good[70008:])
    result = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", cwd=tmp_path))
    assert "net-4_4.ckpt is cut off or damaged; passed over" in result.output
    assert resumed_after(result.output) == 3
    check = losses_of((tmp_path / "log").read_text())
    assert {step: loss for step, loss in losses_of(result.output).items() if step[0] == 4} == pytest.approx(
        {step: loss for step, loss in check.items() if step[0] == 4}, abs=PRINTED)


def test_names_that_are_no_checkpoints_and_drafts(one, tmp_path):
    folder = copy_of(one, tmp_path) / "ck" / "rank_0"
    for name in ("epoch_best.ckpt", "net-4_4 (copy).ckpt"):
        (folder / name).touch()
    shutil.copy(folder / "net-4_4.ckpt", folder / "net-4_4.ckpt.backup")
    good = (folder / "net-4_4.ckpt").read_bytes()
    (folder / "net-9_4.ckpt").touch()  # empty
    (folder / "net-7_4.ckpt").write_bytes(good[:random.randrange(len(good))])
    (folder / "net-8_4.ckpt").symlink_to("gone")
    (folder / "net.draft.ckpt").write_text("half")
    result = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", "--epochs", 5, cwd=tmp_path))
    for name in ("epoch_best.ckpt", "net-4_4 (copy).ckpt"):
        assert f"ck/rank_0/{name} passed over: it is not named net-<epoch>_<step>.ckpt" in result.output
    for name in ("net-9_4.ckpt", "net-8_4.ckpt", "net-7_4.ckpt"):
        assert f"warning: ck/rank_0/{name} is cut off or damaged; passed over" in result.output
    assert resumed_after(result.output) == 4
    assert sorted(re.sub(r"[.]\d+[.]", ".<time>.", path.name) for path in folder.iterdir()) == [
        "epoch_best.ckpt", "net-3_4.ckpt", "net-4_4 (copy).ckpt", "net-4_4.ckpt", "net-4_4.ckpt.backup",
        "net-5_4.ckpt", "net-7_4.ckpt.<time>.unused", "net-8_4.ckpt.<time>.unused", "net-9_4.ckpt.<time>.unused"]


def test_no_half_file_is_found_after_a_kill_while_saving(one, tmp_path):
    copy_of(one, tmp_path)
    bug = jobs.planted("checkpoints", tmp_path, "checkpoints.py", (
        "        draft.replace(", "        os.kill(os.getpid(), 9)\n        draft.replace("))
    assert alone("--ckpt-dir", "ck", "--resume", "--epochs", 5, cwd=tmp_path, lesson=bug).code == -signal.SIGKILL
    assert (tmp_path / "ck" / "rank_0" / "net.draft.ckpt").exists()
    result = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", "--epochs", 5, cwd=tmp_path))
    assert resumed_after(result.output) == 4
    assert not (tmp_path / "ck" / "rank_0" / "net.draft.ckpt").exists(), "what a killed run left is removed"


def test_resume_if_saved_and_none_to_resume(tmp_path):
    nothing = alone("--ckpt-dir", "ck", "--resume", cwd=tmp_path)
    assert nothing.code == 2
    assert "nothing to resume: ck/rank_0 and the other ranks' folders share no whole epoch" in nothing.output
    begun = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", "if-saved", "--epochs", 1, cwd=tmp_path))
    assert next(iter(losses_of(begun.output))) == (1, 1)
    goes_on = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume=if-saved", "--epochs", 2, cwd=tmp_path))
    assert list(losses_of(goes_on.output)) == [(2, step) for step in range(1, STEPS + 1)]
    done = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", "--epochs", 2, cwd=tmp_path))
    assert (resumed_after(done.output), losses_of(done.output)) == (2, {})


def test_a_job_that_had_loaded_others_weights_resumes_with_its_own(one, tmp_path):
    """In the middle of its first epoch, with the same command and --resume."""
    given = ("--load", one / "ck", "--ckpt-dir", "ck", "--epochs", 1)
    (tmp_path / "whole").mkdir()
    whole = jobs.succeeded(alone(*given, cwd=tmp_path / "whole"))
    bug = jobs.planted("checkpoints", tmp_path, "train.py", (
        "if saved.is_last(loss) or step == STEPS:", "if step == 2:"), ("\nranks.leave()", "\nos._exit(0)"))
    jobs.succeeded(alone(*given, cwd=tmp_path, lesson=bug))
    resumed = jobs.succeeded(alone(*given, "--resume", cwd=tmp_path))
    expected = losses_of(whole.output)
    assert losses_of(resumed.output) == {key: expected[key] for key in ((1, 3), (1, 4))}


@pytest.mark.parametrize("option", ["--resume", "--load"])
def test_the_learning_rate_is_that_of_the_command_not_of_the_file(option, one, tmp_path):
    folder = tmp_path / "ck"
    if option == "--resume":
        shutil.copytree(one / "ck", folder)
    given = ("--epochs", 5, "--resume") if option == "--resume" else ("--epochs", 1, "--load", one / "ck")
    assert jobs.succeeded(alone(*given, "--lr", 1e-12, "--ckpt-dir", folder, cwd=tmp_path))
    [[before], [after]] = read(one / "ck", folder)
    assert np.allclose(before["weight"], after["weight"], rtol=0, atol=1e-9)
    assert not np.allclose(before["moments.weight"], after["moments.weight"], rtol=0, atol=1e-9)
    assert after["learning_rate"] == np.float32(1e-12)


def test_a_rate_that_training_has_lowered_stays_and_a_weight_called_so_is_a_weight(tmp_path):
    """As ReduceLROnPlateau lowers it, and a network that learns a rate names it."""
    lesson = jobs.planted("checkpoints", tmp_path, "train.py", (
        "        if saved.is_last(loss)",
        "        if (epoch, step) == (2, 3):\n            optimizer.learning_rate.set_data(Tensor(0.001, ms.float32))\n"
        "        if saved.is_last(loss)"), (
        ", optimizer).set_train()\n", ", optimizer).set_train()\nnn.CellList([train_step])\n"))  # which adds "0."
    network = lesson / "network.py"
    text = network.read_text().replace('name="bias"', 'name="inner_learning_rate"')
    network.write_text(text.replace("return x + self.bias", "return x + self.bias * self.batch").replace(
        "        self.matmul,", "        self.batch = Parameter(Tensor([2.0]), name='batch')\n        self.matmul,"))
    jobs.succeeded(alone("--epochs", 3, "--ckpt-dir", "whole", cwd=tmp_path, lesson=lesson))
    for more in (("--epochs", 2), ("--epochs", 3, "--resume"), ("--epochs", 4, "--resume", "--lr", 0.5)):
        jobs.succeeded(alone("--ckpt-dir", "ck", *more, cwd=tmp_path, lesson=lesson))
    [[whole], [raised]] = read(tmp_path / "whole", tmp_path / "ck")
    resumed = jobs.parameters(checkpoint(tmp_path, 0, 3))
    [rate] = (name for name in whole if name.endswith(".learning_rate"))
    assert whole[rate] == resumed[rate] == np.float32(0.001)
    assert raised[rate] == np.float32(0.5)
    assert jobs.largest_difference(whole, resumed) < SAME


def test_foreign_checkpoints_are_refused(one, tmp_path):
    copy_of(one, tmp_path)
    shutil.copytree(tmp_path / "ck" / "rank_0", tmp_path / "ck" / "rank_1")
    result = jobs.run("bash", RUN, "data_parallel", 2, "--", "--ckpt-dir", "ck", "--resume", cwd=tmp_path)
    assert result.code == 2
    assert re.search(r"ck/rank_\d holds checkpoints of 1 ranks, these are 2; resume with 1, or take another",
                     result.output)
    another = "ck/rank_0/net-4_4.ckpt is of another network or rank; resume with the options"
    for old, new, sentence in (("ROWS, COLUMNS = 512, 128", "ROWS, COLUMNS = 512, 64", another),
                               ('name="bias"', 'name="offset"', another),
                               ('name="bias"', 'name="rank_size"',
                                "rename parameter rank_size: checkpoints hold another so called")):
        (tmp_path / new[:9]).mkdir()
        lesson = jobs.planted("checkpoints", tmp_path / new[:9], "network.py", (old, new))
        result = alone("--ckpt-dir", "ck", "--resume", cwd=tmp_path, lesson=lesson)
        assert result.code == 2
        assert sentence in result.output
        assert "Traceback" not in result.output


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/ck", "/proc/ck"):
        result = alone("--ckpt-dir", folder, cwd=tmp_path)
        assert result.code == 2
        assert re.search(rf"{folder}\S* cannot be (made|written)", result.output), result.output
        assert "Traceback" not in result.output
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "rank_1").touch()
    result = jobs.run("bash", RUN, "data_parallel", 2, "--", "--ckpt-dir", "ck", cwd=tmp_path)
    assert result.code == 2
    assert "ck/rank_1 cannot be written to (File exists); use another --ckpt-dir" in result.output
    (tmp_path / "ck" / "rank_1").unlink()
    (tmp_path / "ck" / "rank_1").mkdir(mode=0o555)
    second = jobs.run(*jobs.AS_USER, "bash", RUN, "data_parallel", 2, "--", "--ckpt-dir", "ck", cwd=tmp_path)
    assert second.code == 2
    assert "ck/rank_1 cannot be read or written to; use another --ckpt-dir" in second.output
    assert "[rank 1] Traceback" not in result.output + second.output  # rank 0 may notice in the middle of a step
    (tmp_path / "ck" / "rank_0").chmod(0o333)
    third = jobs.run(*jobs.AS_USER, jobs.PYTHON, LESSON / "train.py", "--ckpt-dir", "ck", "--resume", cwd=tmp_path)
    assert (third.code, third.output.splitlines()[-1]) == (
        2, "train.py: error: ck/rank_0 cannot be read or written to; use another --ckpt-dir")


# As os.sysconf answers where cached files fill the memory: the first `sys.argv[1]` times nothing at all is free.
LOAD_WITH_FULL_MEMORY = """
import os, sys
from pathlib import Path
import mindspore as ms
import numpy as np
from checkpoints import Checkpoints
times, asked, sysconf = int(sys.argv[1]), [], os.sysconf
os.sysconf = lambda name: 1 if name == "SC_AVPHYS_PAGES" and (asked.append(1) or len(asked) <= times) else sysconf(name)
saved = Checkpoints(Path(), "one", 1)
saved.save([{"name": "weight", "data": ms.Tensor(np.arange(9000, dtype=np.float32))}], 3, 1)
print("looks at the memory:", hasattr(ms.train.serialization, "_get_available_memory"))
epoch, loaded = saved.newest()
print("loaded", epoch, list(loaded), float(loaded["weight"].sum()))
"""


def load_with_full_memory(folder, times, lesson=LESSON):
    return forks.run("-c", LOAD_WITH_FULL_MEMORY, times, cwd=folder, env={"PYTHONPATH": str(lesson)})


def test_cached_files_are_no_reason_to_throw_a_checkpoint_away(tmp_path):
    result = load_with_full_memory(tmp_path, 3)
    if "looks at the memory: False" in result.output:
        pytest.skip("this MindSpore does not compare a checkpoint with the free memory")
    assert "loaded (3, 1) ['weight', 'lr crc', 'rank_size'] 40495500.0" in jobs.succeeded(result).output
    result = load_with_full_memory(tmp_path, 10**6)
    assert result.code == 1, "what cannot be read must not pass for damaged"
    assert "exceeds current available memory 4096 bytes" in result.output
    assert "passed over" not in result.output
    bug = jobs.planted("checkpoints", tmp_path, "checkpoints.py", ('if "memory" not in str(error):', "if True:"))
    assert "one-3_1.ckpt is cut off or damaged; passed over" in load_with_full_memory(tmp_path, 10**6, bug).output
    (tmp_path / "2").mkdir()
    bug = jobs.planted("checkpoints", tmp_path / "2", "checkpoints.py", ("range(4)", "range(1)"))
    assert load_with_full_memory(tmp_path, 3, bug).code == 1


OF_ONES_OWN = """
import pathlib, sys
import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim
from mindspore.train import LearningRateScheduler, Model
from checkpoints import Checkpoints
case, epochs, how = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
ms.set_seed(1)
x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
data = ms.dataset.NumpySlicesDataset((x, x.sum(1, keepdims=True)), ["x", "y"], shuffle=False).batch(2)
net, saved = nn.Dense(3, 1), Checkpoints(pathlib.Path(case), "net", 1)

class Says(ms.train.Callback):
    def on_train_epoch_end(self, run_context):
        state = run_context.original_args()
        print(f"epoch {state.cur_epoch_num}: {float(state.optimizer.learning_rate.asnumpy()):.6f}")

class Step(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.net = net
        if case == "two optimizers":
            self.slow, self.fast = nn.SGD([net.weight], 0.1), nn.SGD([net.bias], 0.2)
        elif case == "rates elsewhere":
            self.optimizer = optim.SGD(net.trainable_params(), lr=0.1)
        else:
            self.scaler, self.optimizer = ms.amp.DynamicLossScaler(8, 2, 9), nn.SGD(net.trainable_params(), 0.1)

    def construct(self, x):
        return self.net(x).mean()

if case == "a schedule by steps":
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
    first = saved.resume(model.train_network, how, dataset=data)
    schedule = LearningRateScheduler(lambda rate, step: 0.1 * 0.9**step)
    model.train(epochs, data, callbacks=[schedule, Says(), saved], initial_epoch=first, dataset_sink_mode=False)
else:
    step = Step()
    saved.resume(step, how)
    step(ms.Tensor(x))
    saved.save(step, 1, 1)
"""


CALLED_ONCE_AN_EPOCH = """
import os, pathlib, sys
import mindspore as ms
import numpy as np
from mindspore import nn
from checkpoints import Checkpoints
ms.set_seed(1)
x = np.arange(4, dtype=np.float32).reshape(4, 1)
data = ms.dataset.NumpySlicesDataset((x, x), ["x", "y"], shuffle=True).batch(1)
net, saved = nn.Dense(1, 1), Checkpoints(pathlib.Path("ck"), "net", 1)
model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01))

class Says(ms.train.Callback):
    def on_train_step_end(self, run_context):
        state = run_context.original_args()
        [[sample]] = state.train_dataset_element[0].asnumpy()
        print(f"epoch {state.cur_epoch_num}: {sample:.0f}", flush=True)
        if not sys.argv[1] and state.cur_step_num == 7:
            saved.save(state.train_network, 2, 3, 4)
            os._exit(0)

first = saved.resume(model.train_network, sys.argv[1] or None, dataset=data)
for epoch in range(first, 4):
    model.train(epoch + 1, data, callbacks=[Says(), saved], initial_epoch=epoch, dataset_sink_mode=False)
"""


def of_ones_own(case, epochs, how, folder):
    return forks.run("-c", OF_ONES_OWN, case, epochs, how, cwd=folder, env={"PYTHONPATH": str(LESSON)})


def test_a_schedule_that_goes_by_the_step_goes_on(tmp_path):
    rates = []
    for folder, parts in (("whole", ((4, ""),)), ("resumed", ((2, ""), (4, "always")))):
        (tmp_path / folder).mkdir()
        said = "".join(jobs.succeeded(of_ones_own("a schedule by steps", *part, tmp_path / folder)).output
                       for part in parts)
        rates.append(re.findall(r"^epoch \d: [\d.]+$", said, re.MULTILINE))
    assert rates[0] == rates[1] == [f"epoch {epoch}: {0.1 * 0.9 ** (4 * epoch):.6f}" for epoch in range(1, 5)]


def test_a_step_with_two_optimizers_is_resumed(tmp_path):
    """MindSpore gives parameters of one name others, at the first step."""
    jobs.succeeded(of_ones_own("two optimizers", 1, "", tmp_path))
    assert "resumed after epoch 1 from " in jobs.succeeded(of_ones_own("two optimizers", 1, "always", tmp_path)).output


@pytest.mark.parametrize("case", ["rates elsewhere", "a scale"])
def test_what_checkpoints_cannot_hold_is_told(case, tmp_path):
    jobs.succeeded(of_ones_own(case, 1, "", tmp_path))
    resumed = jobs.succeeded(of_ones_own(case, 1, "always", tmp_path)).output
    told = "net-1_1.ckpt; without rates of mindspore.experimental, DynamicLossScaler's scale: see README.md\n"
    assert told in resumed


def test_each_call_of_model_train_gets_whole_epochs(tmp_path):
    """After --resume in the middle of an epoch, too."""
    (tmp_path / "train.py").write_text(CALLED_ONCE_AN_EPOCH)
    env = {"PYTHONPATH": str(LESSON)}
    jobs.succeeded(forks.run(tmp_path / "train.py", "", cwd=tmp_path, env=env))
    resumed = jobs.succeeded(forks.run(tmp_path / "train.py", "always", cwd=tmp_path, env=env)).output
    seen = {epoch: re.findall(rf"(?m)^epoch {epoch}: (\d+)$", resumed) for epoch in (2, 3, 4)}
    assert [len(each) for each in seen.values()] == [1, 4, 4], resumed
    assert all(set(seen[epoch]) == set("0123") for epoch in (3, 4)), "each sample once"


PIPELINE_OF_SHARDS = """
import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import init
import checkpoints
ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, dataset_strategy="full_batch")
ms.set_auto_parallel_context(enable_parallel_optimizer=True,
                             parallel_optimizer_config={"parallel_optimizer_threshold": 0})
x = np.ones((8, 8), np.float32)
net = nn.SequentialCell(nn.Dense(8, 16), nn.Dense(16, 1))
net[0].pipeline_stage, net[1].pipeline_stage = 0, 1
cell = nn.PipelineCell(nn.WithLossCell(net, nn.MSELoss()), 2)
data = ms.dataset.NumpySlicesDataset((x, x[:, :1]), shuffle=False).batch(8)
ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1)).train(1, data, dataset_sink_mode=False)
"""


def test_slices_of_a_stage_which_cannot_be_resumed_are_told(tmp_path):
    (tmp_path / "train.py").write_text(PIPELINE_OF_SHARDS)
    for imported in (True, False):
        (tmp_path / "checkpoints.py").write_text("class Checkpoints:\n    pass\n" * imported)
        done = jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", 4, "--ranks", 0,
                                       "train.py", cwd=tmp_path))
        assert ("NOTE this pipeline stage cuts 0.bias: each rank saves its slice, which --resume of" in done.output
                ) == imported, done.output


# ------------------------------------------------------------------------------------------------- slices, for real
def tool(script, *arguments, cwd):
    """Run one of the lesson's tools; return its output."""
    return jobs.succeeded(forks.run(LESSON / script, *arguments, cwd=cwd)).output


def strategy_of(folder, ranks):
    """The strategy file that a semi-auto job writes, from a dry run of its rank 0."""
    jobs.succeeded(jobs.run(
        jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", "--rank-size", ranks, "--ranks", 0,
        LESSON / "train.py", "--mode", "semi_auto_parallel", "--ckpt-dir", folder / f"semi_{ranks}",
        cwd=folder, timeout=300))
    return folder / f"semi_{ranks}" / "rank_0" / "strategy.json"


def test_slices_of_four_ranks_go_to_two_and_to_one(one, tmp_path):
    train(tmp_path, "hybrid_parallel", 4, "--epochs", 2, "--ckpt-dir", "four", "--sliced")
    # By hand, and by MindSpore with the strategies of semi-auto jobs, whose slices are the same: the same bits.
    strategies = {ranks: strategy_of(tmp_path, ranks) for ranks in (4, 2)}
    for source, target, *how in (("four", "two", "--ranks", 2), ("two", "whole", "--ranks", 1),
                                 ("four", "ms_two", "--strategy", strategies[4], "--to-strategy", strategies[2]),
                                 ("ms_two", "ms_whole", "--strategy", strategies[2])):
        output = tool("convert_checkpoints.py", source, target, *how, cwd=tmp_path)
        if target == "two":
            assert output == "four: epoch 2, 4 ranks, weight (512, 32)\ntwo: epoch 2, 2 ranks, weight (512, 64)\n"
    # The planted bug: slices merged in another order.
    lesson = jobs.planted("checkpoints", tmp_path, "convert_checkpoints.py", (
        "for rank in saved.ranks], axis=1", "for rank in saved.ranks[::-1]], axis=1"))
    jobs.succeeded(forks.run(lesson / "convert_checkpoints.py", "four", "swapped", "--ranks", 1, cwd=tmp_path))
    four, two, [whole], by_mindspore_two, by_mindspore, swapped = read(*(
        tmp_path / name for name in ("four", "two", "whole", "ms_two", "ms_whole", "swapped")))
    assert [rank["weight"].shape for rank in four] == [(512, 32)] * 4
    assert [rank["weight"].shape for rank in two] == [(512, 64)] * 2
    assert same_bits(two, by_mindspore_two)
    for other in ([gathered(four)], [gathered(two)], by_mindspore):
        assert same_bits([whole], other)
    assert not same_bits([whole], swapped)

    answers = tool("predict.py", "whole", cwd=tmp_path)
    assert len(set(re.findall(r"^sample \d: answer (\d\.\d{5,}), wanted", answers, re.MULTILINE))) == 8
    assert answers == tool("predict.py", "four", "--strategy", strategies[4], cwd=tmp_path)

    # Two ranks go on with their slices, and one process with the whole, as one process that never stopped.
    expected = {step: loss for step, loss in losses_of((one / "log").read_text()).items() if step[0] > 2}
    for mode, ranks, folder in (("hybrid_parallel", 2, "two"), ("data_parallel", 1, "whole")):
        more = ("--sliced",) if folder == "two" else ()
        resumed = train(tmp_path, mode, ranks, "--ckpt-dir", folder, "--resume", "--epochs", 4, *more)
        for losses in losses_of_ranks(resumed, ranks):
            assert losses == pytest.approx(expected, abs=PRINTED)
    two, [whole], [trained] = read(tmp_path / "two", tmp_path / "whole", one / "ck")
    assert jobs.largest_difference(gathered(two), trained) < SAME
    assert jobs.largest_difference(whole, trained) < SAME


def test_slices_of_another_optimizer(tmp_path):
    """Adam holds two slices beside that of the weight, under other names than Momentum; with a rate for each step."""
    lesson = jobs.planted("checkpoints", tmp_path, "train.py", (
        "nn.Momentum(net.trainable_params(), args.lr, 0.9)", "nn.Adam(net.trainable_params(), 8 * [args.lr])"))
    network = (lesson / "network.py").read_text()  # and with a layer that is not cut
    (lesson / "network.py").write_text(network.replace("        self.matmul, self.relu", (
        '        self.norm = Parameter(Tensor(np.ones(4, np.float32)), name="norm.weight")\n'
        "        self.matmul, self.relu")).replace("return x + self.bias", "return self.norm[0] * x + self.bias"))
    train(tmp_path, "hybrid_parallel", 2, "--epochs", 2, "--ckpt-dir", "two", "--sliced", lesson=lesson)
    tool("convert_checkpoints.py", "two", "whole", "--ranks", 1, cwd=tmp_path)
    train(tmp_path, "data_parallel", 1, "--epochs", 2, "--ckpt-dir", "one", lesson=lesson)
    two, [whole], [one] = read(*(tmp_path / name for name in ("two", "whole", "one")))
    assert [rank["moment2.weight"].shape for rank in two] == [(512, 64)] * 2
    assert whole["norm.weight"].shape == (4,)
    assert jobs.largest_difference(whole, one) < 10 * SAME  # Adam makes differences of rounding larger
    # Both go on with the whole files, as 2 ranks and as one process: again with all that Adam holds.
    for folder, mode, ranks in (("cut", "hybrid_parallel", 2), ("uncut", "data_parallel", 1)):
        train(tmp_path, mode, ranks, "--epochs", 1, "--load", "whole", "--ckpt-dir", folder, lesson=lesson)
    cut, [uncut] = read(tmp_path / "cut", tmp_path / "uncut")
    assert jobs.largest_difference(gathered(cut), uncut) < 10 * SAME
    assert np.abs(uncut["moment2.weight"] - whole["moment2.weight"]).max() > 0
    assert uncut["global_step"] == 4, "its rates begin with the first"


CUT_BOTH_WAYS = """
import pathlib, sys
import mindspore as ms
values = ms.load_checkpoint(sys.argv[1])
for rank in range(4):
    folder = pathlib.Path("grid", f"rank_{rank}")
    folder.mkdir(parents=True)
    cut = {name: ms.Tensor(value.asnumpy()[:, :64]) if value.shape == (512, 128) else value
           for name, value in values.items() if name != "rank_size"}
    ms.save_checkpoint([{"name": name, "data": value} for name, value in cut.items()], str(folder / "net-4_4.ckpt"),
                       crc_check=True, append_dict={"rank_size": 4})
"""


OTHER_BIASES = """
import pathlib, sys
import mindspore as ms
values = ms.load_checkpoint(sys.argv[1])
saved_by = int(values.pop("rank_size"))
for folder, bias in (("half", values["bias"].astype(ms.float16)), ("long", ms.ops.zeros(128))):
    file = pathlib.Path(folder, "rank_0", "net-4_4.ckpt")
    file.parent.mkdir(parents=True)
    ms.save_checkpoint([{"name": name, "data": value} for name, value in {**values, "bias": bias}.items()], str(file),
                       crc_check=True, append_dict={"rank_size": saved_by})
"""


def test_files_of_another_network_or_optimizer(one, tmp_path):
    """What the optimizer lacks in them begins as in a new job; what the network lacks is refused."""
    copy_of(one, tmp_path)
    for name in ("adam", "renamed"):
        (tmp_path / name).mkdir()
    adam = jobs.planted("checkpoints", tmp_path / "adam", "train.py", (
        "nn.Momentum(net.trainable_params(), args.lr, 0.9)", "nn.Adam(net.trainable_params(), args.lr)"))
    train(tmp_path, "data_parallel", 1, "--epochs", 1, "--load", "ck", "--ckpt-dir", "a", lesson=adam)
    train(tmp_path, "data_parallel", 1, "--epochs", 1, "--load", "a", "--ckpt-dir", "b")
    [[of_adam], [of_momentum]] = read(tmp_path / "a", tmp_path / "b")
    assert of_adam["beta1_power"] == pytest.approx(0.9 ** 4)
    assert of_momentum["momentum"] == np.float32(0.9)
    lesson = jobs.planted("checkpoints", tmp_path / "renamed", "network.py", ('name="bias"', 'name="offset"'))
    for words in ("train.py", "--load", "ck", "--ckpt-dir", "c"), ("predict.py", "ck"):
        refused = forks.run(lesson / words[0], *words[1:], cwd=tmp_path)
        assert refused.code == 2
        assert re.search(r"error: ck\S+ckpt is of another network: no such offset\n", refused.output)
        assert "Traceback" not in refused.output
    jobs.succeeded(forks.run("-c", OTHER_BIASES, checkpoint(tmp_path, 0, 4), cwd=tmp_path))
    for words in (("predict.py", "half"), ("predict.py", "long"), ("train.py", "--load", "half", "--ckpt-dir", "d"),
                  ("train.py", "--load", "ck/rank_0", "--ckpt-dir", "e")):
        refused = forks.run(LESSON / words[0], *words[1:], cwd=tmp_path)
        assert refused.code == 2, refused.output
        assert re.search(r"error: ((half|long)\S+ckpt is of another network: no such bias\n|there is no "
                         "ck/rank_0/rank_0; )", refused.output)
        assert "Traceback" not in refused.output
    jobs.succeeded(forks.run("-c", CUT_BOTH_WAYS, checkpoint(tmp_path, 0, 4), cwd=tmp_path))
    grid = forks.run(LESSON / "convert_checkpoints.py", "grid", "whole", "--ranks", 1, cwd=tmp_path)
    assert grid.code == 2
    assert "grid has 2 slices in 4 files; if semi-auto parallel cut them so, give --strategy" in grid.output
    assert not (tmp_path / "whole").exists()


def check_resumed(resumed, one, folder):
    """The epochs 3 and 4 of two ranks, and what they save then, must be those of one process that never stopped."""
    expected = {step: loss for step, loss in losses_of((one / "log").read_text()).items() if step[0] > 2}
    first, second = losses_of_ranks(resumed, 2)  # in data parallel each of its own samples
    assert {step: (loss + second[step]) / 2 for step, loss in first.items()} == pytest.approx(expected, abs=PRINTED)
    saved, [trained] = read(folder, one / "ck")
    assert [rank["weight"].shape for rank in saved] == [(512, 128)] * 2
    assert jobs.largest_difference(gathered(saved), trained) < SAME


def test_whole_files_are_saved_and_resumed(one, tmp_path):
    """Hybrid parallel gathers its slices when it saves, and cuts them when it resumes. Data parallel: the torn files'
    above; semi-automatic parallel: below, where a rank is killed.
    """
    train(tmp_path, "hybrid_parallel", 2, "--epochs", 2, "--ckpt-dir", "ck")
    resumed = train(tmp_path, "hybrid_parallel", 2, "--epochs", 4, "--ckpt-dir", "ck", "--resume")
    assert resumed.output.count("weight (512, 64)") == 2
    check_resumed(resumed, one, tmp_path / "ck")


# ------------------------------------------------- semi-automatic parallel: the Ascend plan, computed by ranks on CPU
def kill_and_resume(folder, lesson):
    """Start two computed ranks, one of which is killed in its third epoch; returns what the second attempt did."""
    result = jobs.succeeded(jobs.run("bash", lesson / "run.sh", "semi_auto_parallel", 2, "--restarts", 1, "--",
                                     "--epochs", 4, "--ckpt-dir", "ck", cwd=folder, timeout=200))
    assert "restart 1 of 1" in result.output
    assert result.output.count("its Ascend plan is computed here") == 2
    assert len(re.findall(r"^\[rank \d\] resumed after epoch 2 from", result.output, re.MULTILINE)) == 2
    resumed = result.output.partition("restart 1 of 1")[2]
    assert resumed.count("semi_auto_parallel: weight (512, 128)") == 2, "from whole files"
    return dataclasses.replace(result, output=resumed)


def test_a_killed_semi_auto_job_ends_as_one_process(one, tmp_path):
    """Rank 1 kills itself in the third epoch of the first attempt."""
    lesson = jobs.planted("checkpoints", tmp_path, "train.py", (
        "        loss = train_step(", "        if epoch == 3 and step == 2 and rank == 1 and not first_epoch:\n"
        "            os.kill(os.getpid(), 9)\n        loss = train_step("))
    check_resumed(kill_and_resume(tmp_path, lesson), one, tmp_path / "ck")


def test_slices_of_semi_auto_parallel_are_merged_and_go_on_elsewhere(one, tmp_path):
    train(tmp_path, "semi_auto_parallel", 2, "--epochs", 2, "--ckpt-dir", "semi", "--sliced")
    output = tool("convert_checkpoints.py", "semi", "whole", "--strategy", "semi/rank_0/strategy.json", cwd=tmp_path)
    assert output == "semi: epoch 2, 2 ranks, weight (512, 64)\nwhole: epoch 2, 1 ranks, weight (512, 128)\n"
    two, [whole] = read(tmp_path / "semi", tmp_path / "whole")
    assert same_bits([gathered(two)], [whole])
    expected = {step: loss for step, loss in losses_of((one / "log").read_text()).items() if step[0] > 2}
    resumed = train(tmp_path, "data_parallel", 1, "--ckpt-dir", "whole", "--resume", "--epochs", 4)
    assert losses_of(resumed.output) == pytest.approx(expected, abs=PRINTED)


@pytest.mark.parametrize("bug", [None, "nobody broadcasts"])
def test_rank_0_loads_and_broadcast_gives_the_rest(bug, one, tmp_path):
    changes = {
        None: [],
        "nobody broadcasts": [("[value] = ops.Broadcast(0)((Tensor(value.asnumpy()),))", "pass")],
    }
    lesson = jobs.planted("checkpoints", tmp_path, "train.py", *changes[bug])
    options = ("--load", one / "ck", "--epochs", 1)
    [expected] = losses_of_ranks(train(tmp_path, "data_parallel", 1, *options, "--ckpt-dir", "a"), 1)
    before = losses_of((one / "log").read_text())
    assert expected[1, 1] < before[1, 1], "it goes on with what was loaded"
    # One process has saved: there is no file of rank 1 that rank 1 could read.
    result = train(tmp_path, "hybrid_parallel", 2, *options, "--ckpt-dir", "b", lesson=lesson)
    equal = [losses == pytest.approx(expected, abs=PRINTED) for losses in losses_of_ranks(result, 2)]
    assert equal == [bug is None] * 2, f"expected {expected}:\n{result.output}"


def test_semi_auto_parallel_cuts_what_is_loaded(one, tmp_path):
    ranks, report = 4, tmp_path / "report.json"
    jobs.succeeded(jobs.run(jobs.PYTHON, jobs.REPO / "dry_run" / "dry_run.py", "--rank-size", ranks, "--ranks", 0,
                            "--json", report, LESSON / "train.py", "--mode", "semi_auto_parallel", "--load", one / "ck",
                            "--ckpt-dir", "semi", cwd=tmp_path, timeout=300))
    found = json.loads(report.read_text())
    assert found["faults"] == []
    slices = {p["name"]: tuple(p["slice_shape"]) for p in found["ranks"][0]["parameters"] if p["name"] in SLICED}
    assert slices == dict.fromkeys(SLICED, (512, 128 // ranks))
    assert (tmp_path / "semi" / "rank_0" / "strategy.json").exists()


# ------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(("arguments", "sentence"), [
    (["data_parallel"], "it takes MODE and N"),
    (["data_parallel", "3"], "64 samples and 128 columns cannot be shared equally by 3 ranks"),
    (["semi_auto_parallel", "3"], "64 samples and 128 columns cannot be shared equally by 3 ranks"),
    (["auto_parallel", "2"], "invalid choice: 'auto_parallel'"),
    (["data_parallel", "2", "--", "--load", "nowhere"], "there is no nowhere/rank_0; give the --ckpt-dir of a job"),
    (["data_parallel", "2", "--restarts", "often"], "--restarts: invalid int value: 'often'"),
    (["data_parallel", "2", "--restarts"], "--restarts: expected one argument"),
    (["data_parallel", "2", "--restarts", "1", "--", "--epochs", "3"], "needs -- --ckpt-dir DIR, where the ranks save"),
    *((["data_parallel", "2", "--", *wrong], "--epochs must be at least 1, --lr must be greater than 0, not huge")
      for wrong in (("--epochs", "0"), ("--lr", "nan"))),
    (["data_parallel", "2", "--", "--ckpt-dir", "/dev/null/x"], "/dev/null/x cannot be made or written to"),
    (["data_parallel", "2", "--", "--ckpt-dir", "./log_output/ck"], "is in log_output, the folder of the logs, which"),
    (["data_parallel", "2", "--in", "new", "--", "--ckpt-dir", "new"], "--ckpt-dir new is in new, the folder of the l"),
])
def test_bad_input_of_the_launcher_is_one_sentence(arguments, sentence, tmp_path):
    refused(sentence, "bash", RUN, *arguments, cwd=tmp_path)


def test_without_dry_run_beside_it_semi_auto_parallel_is_refused(tmp_path):
    lesson = shutil.copytree(LESSON, tmp_path / "checkpoints")
    refused(r"MindSpore has no semi_auto_parallel on CPU; run\.sh computes it for 2 or more ranks of "
            r"one machine,\s+with the folders",
            "bash", lesson / "run.sh", "semi_auto_parallel", 2, cwd=tmp_path)


def test_an_earlier_run_is_not_overwritten(one, tmp_path):
    copy_of(one, tmp_path)
    refused("ck holds checkpoints of an earlier run; go on from them with --resume, or choose another",
            "bash", RUN, "data_parallel", 2, "--", "--ckpt-dir", "ck", cwd=tmp_path)


def test_a_parallel_mode_without_a_launcher_names_it(tmp_path):
    result = alone("--mode", "hybrid_parallel", cwd=tmp_path)
    assert result.code == 2
    assert "hybrid_parallel needs a launcher: bash run.sh hybrid_parallel 2" in result.output


def test_restarts_end_with_the_last_failure(tmp_path):
    lesson = jobs.planted("checkpoints", tmp_path, "train.py", (
        "ms.set_context(mode=ms.GRAPH_MODE)\n",
        "print('begins', flush=True)\nraise SystemExit(8 if args.resume == 'if-saved' else 7)\n"))
    result = jobs.run("bash", lesson / "run.sh", "data_parallel", 2, "--restarts", 2, "--", "--ckpt-dir", "ck",
                      cwd=tmp_path)
    assert result.code == 8
    assert not result.left_over
    assert re.findall(r"failed, exit code (\d)", result.output) == ["7", "8", "8"]
    assert re.findall(r"restart (\d) of 2", result.output) == ["1", "2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_just_after_a_rank_has_failed_starts_it_no_more(number, tmp_path):
    with start(tmp_path, 5000, restarts=3) as job:
        job.wait_for(r"\[rank 1\] epoch: 2 step: 1,")
        os.kill(job.rank_process(1), signal.SIGKILL)
        time.sleep(0.3)  # while the launcher hears what the other rank says of it
        os.kill(job.process.pid, number)
        result = job.finish(20)
    assert result.code == 128 + number
    assert not result.left_over


def test_a_resume_that_cannot_be_is_bad_input_said_once_and_starts_nothing_again(tmp_path):
    result = jobs.run("bash", RUN, "data_parallel", 2, "--restarts", 1, "--", "--ckpt-dir", "mistyped", "--resume",
                      cwd=tmp_path)
    assert result.code == 2
    assert "restart 1" not in result.output
    assert len(re.findall(r"(?m)^\[rank \d\].*nothing to resume", result.output)) == 1
    assert "step: 1" not in result.output


def test_a_restart_that_cannot_be_made_ends_as_the_rank_that_failed(tmp_path):
    """The earlier logs cannot be moved aside, for somebody has put a file there; not 2: it was no bad input."""
    with start(tmp_path, 5000, restarts=3) as job:
        job.wait_for(r"\[rank 1\] epoch: 2 step: 1,")
        victim = job.rank_process(1)
        (tmp_path / "log_output").rename(tmp_path / "moved")
        (tmp_path / "log_output").touch()
        os.kill(victim, signal.SIGKILL)
        result = job.finish(60)
    assert result.code == 137
    assert "run.sh: restart 1 of 3\nrun.sh: log_output is there and is no folder; move it" in result.output
    assert not result.left_over


@pytest.fixture(scope="module")
def four_slices(one, tmp_path_factory):
    """A folder with the slices of 4 ranks, made from one process's checkpoint, and a strategy file of 2 ranks."""
    folder = tmp_path_factory.mktemp("slices")
    tool("convert_checkpoints.py", one / "ck", folder / "four", "--ranks", 4, cwd=folder)
    layout = {"dev_matrix": [2], "field": 0, "opt_weight_shard_size": 0, "opt_weight_shard_step": 0,
              "tensor_map": [-1, 0], "tensor_shape": [512, 128]}
    (folder / "two.json").write_text(json.dumps({"parallel_layout_item": {"weight": layout}}))
    return folder


def convert(*arguments):
    return (jobs.PYTHON, LESSON / "convert_checkpoints.py", *arguments)


def test_bad_checkpoints_are_named(four_slices, tmp_path):
    shutil.copytree(four_slices, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "four" / "rank_2" / "net-4_4.ckpt"
    good = file.read_bytes()

    # slices, where whole parameters are needed; of another number of ranks
    refused("four/rank_0/net-4_4.ckpt holds 1 of 4 slices; make them whole: python convert_checkpoints.py",
            jobs.PYTHON, LESSON / "predict.py", "four", cwd=tmp_path)
    for samples in 0, 257:
        refused("--samples is a number from 1 to 256", jobs.PYTHON, LESSON / "predict.py", "four", "--samples", samples,
                cwd=tmp_path)
    refused("four/rank_0/net-4_4.ckpt holds 1 of 4 slices; make them whole: python convert_checkpoints.py",
            "bash", RUN, "hybrid_parallel", 2, "--", "--load", "four", cwd=tmp_path)
    # cut off in the middle, cut off between two parameters, changed, missing
    file.chmod(0o644)
    for content in (good[:70000], good[:good.index(b"moments.bias") - 4], good[:70000] + bytes(8) + good[70008:]):
        file.write_bytes(content)
        refused("(?s)four/rank_2/net-4_4.ckpt is cut off or damaged; passed over.*four/rank_2 has none, copy it from",
                *convert("four", "new", "--ranks", 2), cwd=tmp_path)
    file.unlink()
    refused("four/rank_2 is missing; copy it from where", *convert("four", "new", "--ranks", 2), cwd=tmp_path)
    file.write_bytes(good)
    shutil.copytree(tmp_path / "four", tmp_path / "copied")
    shutil.copy(file, tmp_path / "copied" / "rank_1" / file.name)
    refused("copied/rank_1/net-4_4.ckpt was saved by rank 2; put it back into its folder",
            *convert("copied", "new", "--ranks", 2), cwd=tmp_path)
    (tmp_path / "four" / "rank_4").mkdir()  # of a job of 5 ranks that was refused: no harm
    tool("convert_checkpoints.py", "four", "two", "--ranks", 2, cwd=tmp_path)
    shutil.rmtree(tmp_path / "four" / "rank_3")
    refused("net-4_4.ckpt is of 4 ranks, but four has the folders of 3", *convert("four", "new", "--ranks", 2),
            cwd=tmp_path)
    refused("four is not empty", *convert("four", "four", "--ranks", 2), cwd=tmp_path)
    refused("two.json is not empty", *convert(four_slices / "four", "two.json", "--ranks", 2), cwd=tmp_path)
    refused("Not a directory: 'two.json/x'", *convert(four_slices / "four", "two.json/x", "--ranks", 2), cwd=tmp_path)


def test_ranks_do_not_resume_from_each_others_slices(four_slices, tmp_path):
    tool("convert_checkpoints.py", four_slices / "four", "two", "--ranks", 2, cwd=tmp_path)
    command = ("bash", RUN, "hybrid_parallel", 2, "--", "--sliced", "--ckpt-dir", "two", "--resume", "--epochs")
    jobs.succeeded(jobs.run(*command, 5, cwd=tmp_path))
    for name, new in (("rank_0", "aside"), ("rank_1", "rank_0"), ("aside", "rank_1")):
        (tmp_path / "two" / name).rename(tmp_path / "two" / new)
    result = jobs.run(*command, 6, cwd=tmp_path)
    assert result.code == 2, "so that no --restarts repeats it"
    assert re.search(r"rank (\d) finds the slices of rank (?!\1)\d in its own folder", result.output)
    assert "Traceback" not in result.output


def test_a_folder_without_the_right_to_write_is_read(one, tmp_path):
    copy_of(one, tmp_path)
    (tmp_path / "ck" / "rank_0").chmod(0o555)
    jobs.succeeded(jobs.run(*jobs.AS_USER, jobs.PYTHON, LESSON / "predict.py", "ck", cwd=tmp_path))
    (tmp_path / "ck" / "rank_0").chmod(0o755)


def test_nothing_is_left_to_train(one, tmp_path):
    copy_of(one, tmp_path)
    result = jobs.succeeded(alone("--ckpt-dir", "ck", "--resume", "--epochs", 3, cwd=tmp_path))
    assert "nothing left to train: 4 of --epochs 3 are saved\n" in result.output
    assert "loss is" not in result.output


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_a_damaged_one(one, tmp_path):
    """The one before it would be taken in silence."""
    file = copy_of(one, tmp_path) / "ck" / "rank_0" / "net-4_4.ckpt"
    file.chmod(0)
    for words in ("train.py", "--ckpt-dir", "ck", "--resume"), ("predict.py", "ck"):
        result = jobs.run(*jobs.AS_USER, jobs.PYTHON, LESSON / words[0], *words[1:], cwd=tmp_path)
        assert result.code == 2
        assert f"{words[0]}: error: ck/rank_0/net-4_4.ckpt may not be read; chmod or chown it\n" in result.output
        assert "damaged" not in result.output
        assert "serialization.py" not in result.output, "MindSpore's own words are many"
        assert "Traceback" not in result.output


def test_bad_strategies_are_named(four_slices, tmp_path):
    shutil.copytree(four_slices, tmp_path, dirs_exist_ok=True)
    refused("two.json is for 2 ranks and 2 slices, not for 4 and 4", *convert("four", "new", "--strategy", "two.json"),
            cwd=tmp_path)
    refused("rank_0/net-4_4.ckpt is no strategy file of this network",
            *convert("four", "new", "--strategy", "four/rank_0/net-4_4.ckpt"), cwd=tmp_path)
    refused("give either --ranks .* or --strategy", *convert("four", "new"), cwd=tmp_path)
    refused("cannot be cut into 3 equal slices", *convert("four", "new", "--ranks", 3), cwd=tmp_path)


def test_a_job_that_diverges_ends_before_it_saves_that(tmp_path):
    command = ("bash", LESSON / "run.sh", "data_parallel", 2, "--", "--ckpt-dir", "ck", "--epochs")
    jobs.succeeded(jobs.run(*command, 3, cwd=tmp_path))
    result = jobs.run(*command, 9, "--lr", 1e6, "--resume", cwd=tmp_path)
    assert result.code == 1, result.output
    assert re.search(r"the loss is (nan|inf): training has diverged, and nothing more is saved; take", result.output)
    assert sorted(file.name for file in tmp_path.glob("ck/rank_1/*.ckpt"))[:3] == [f"net-{n}_4.ckpt" for n in (1, 2, 3)]
    for file in tmp_path.glob("ck/rank_1/*.ckpt"):
        assert np.isfinite(jobs.parameters(file)["weight"]).all(), file.name


def test_slices_of_two_saves_are_refused(four_slices, one, tmp_path):
    shutil.copytree(four_slices, tmp_path, dirs_exist_ok=True)
    jobs.succeeded(alone("--load", one / "ck", "--epochs", 4, "--ckpt-dir", "later", cwd=tmp_path))
    tool("convert_checkpoints.py", "later", "later_four", "--ranks", 4, cwd=tmp_path)
    shutil.rmtree(tmp_path / "four" / "rank_1")
    shutil.move(tmp_path / "later_four" / "rank_1", tmp_path / "four" / "rank_1")
    refused("in four/rank_1/net-4_4.ckpt is not as in four/rank_0/net-4_4.ckpt: .* not of one save",
            *convert("four", "new", "--ranks", 2), cwd=tmp_path)
