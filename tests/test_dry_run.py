"""The dry run: real commands over the small scripts of dry_run_scripts, good ones and faulty ones."""
import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jobs
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "dry_run_scripts"
COMMAND = [sys.executable, str(ROOT / "dry_run" / "dry_run.py")]
sys.path.insert(0, str(ROOT / "dry_run"))

import dry_run as command  # noqa: E402
import graph_ir  # noqa: E402
import report as reporting  # noqa: E402


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A folder for the stand-ins that this test session alone uses."""
    return jobs.made_once(tmp_path_factory, "stand_ins", lambda folder: None)  # who needs them first builds them


@pytest.fixture
def dry_run(cache, tmp_path):
    """Run the real command; returns (exit code, stdout, stderr, the JSON report or None)."""

    def run(rank_size, ranks, script, *args, options=(), **environment):
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        done = subprocess.run(
            [*COMMAND, "--rank-size", str(rank_size), "--ranks", ranks, "--json", str(file), *options,
             str(SCRIPTS / script), *args], check=False, capture_output=True, text=True, timeout=300,
            env={**os.environ, "DRY_RUN_CACHE": str(cache), **environment})
        found = json.loads(file.read_text()) if file.exists() else None
        return done.returncode, done.stdout, done.stderr, found

    return run


def line_of(script, text):
    """The number of the only line of a script that holds some text."""
    lines = [i for i, line in enumerate((SCRIPTS / script).read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1
    return lines[0]


def parameter(rank, name):
    """One parameter of a rank's report."""
    return next(p for p in rank["parameters"] if p["name"] == name)


def total(rank, op):
    """Bytes a step of one kind of collective."""
    return sum(c["bytes"] for c in rank["collectives"] if c["op"] == op)


def alive(pid):
    """Whether a process still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_script_that_refuses_its_options_and_its_temporary_files(dry_run, tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text("import argparse, tempfile\nprint(tempfile.mkdtemp(), flush=True)\n"
                                       "argparse.ArgumentParser('mine').error('three are too many')\n")
    code, out, _, _ = dry_run(1, "0", tmp_path / "train.py", options=("--keep", tmp_path / "kept"),
                              TMPDIR=str(tmp_path / "tmp"))
    assert code == 1
    assert "SystemExit: the script ended itself with 2\n    mine: error: three are too many\n" in out
    assert f"{tmp_path}/tmp/dry_run_" in (tmp_path / "kept/rank_0/log.txt").read_text()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_rank_that_ends_in_another_way(dry_run, tmp_path):
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK_ID'] == '0':\n    raise KeyboardInterrupt\n"
                                       "os.abort()\n")
    code, out, _, found = dry_run(2, "0-1", tmp_path / "train.py")
    assert code == 1
    assert f"    KeyboardInterrupt\n    {tmp_path}/train.py:3: raise KeyboardInterrupt\n" in out
    assert found["ranks"][1]["error"]["message"].startswith("ended by SIGABRT (")
    assert "last line" not in out


def test_data_parallel_reduces_every_trained_parameter_once(dry_run, tmp_path):
    code, out, err, found = dry_run(8, "0,7", "data_parallel.py",
                                    options=("--keep", str(tmp_path / "kept"), "--data", "mnist"))
    assert code == 0, out + err
    assert [rank["rank"] for rank in found["ranks"]] == [0, 7]
    expected = 4 * (16 * 64 + 64 + 64 * 10 + 10)
    for rank in found["ranks"]:
        assert rank["compiled"] and rank["seconds"] > 0 and rank["peak_bytes"] > 100 << 20
        assert rank["trained_bytes"] == expected
        assert {c["op"] for c in rank["collectives"]} == {"AllReduce"}
        assert total(rank, "AllReduce") == expected
        assert all(c["ranks"] == list(range(8)) for c in rank["collectives"])
        # the momenta are as large again; learning rate, momentum and step counter have 4 bytes each
        assert rank["parameter_bytes"] == 2 * expected + 12
    assert "rank 0 compiled" in err and "rank 7 compiled" in err
    assert "all gradients: 6,952 B, 4 to be fused into 1" in out
    assert out.count("AllReduce") == 1  # ranks that are alike are told once
    log = (tmp_path / "kept" / "rank_7" / "log.txt").read_text()
    assert "step: 1," in log and "step: 2," not in log and "not reached" not in log


def test_semi_auto_slices_are_those_of_arithmetic(dry_run):
    ranks = 16
    code, out, err, found = dry_run(ranks, f"0,{ranks - 1}", "semi_auto.py", "1", str(ranks), "16")
    assert code == 0, out + err
    for rank in found["ranks"]:
        for name in ("weight", "moments.weight"):
            weight = parameter(rank, name)
            assert weight["shape"] == [512, 128]
            assert weight["slice_shape"] == [512, 128 // ranks]
            assert weight["bytes"] == 4 * 512 * 128 // ranks
            assert weight["over_ranks"] == list(range(ranks))
        whole = parameter(rank, "fc.weight")
        assert whole["shape"] == whole["slice_shape"] == [10, 128] and whole["over_ranks"] == [rank["rank"]]
        # only the gradients of what is not sliced are reduced, and the loss
        assert total(rank, "AllReduce") == 4 * (10 * 128 + 10) + 4
    assert f"(512, {128 // ranks})" in out


def test_auto_parallel_slices_add_up(dry_run):
    code, out, err, found = dry_run(4, "0,3", "auto_parallel.py")
    assert code == 0, out + err
    for rank in found["ranks"]:
        sliced = [p for p in rank["parameters"] if p["slice_shape"] != p["shape"]]
        assert {"fc1.weight", "fc2.weight"} <= {p["name"] for p in sliced}
        for p in sliced:
            assert rank["rank"] in p["over_ranks"]
            assert graph_ir.size(p["dtype"], p["shape"]) == p["bytes"] * len(p["over_ranks"])


def test_pipeline_stages(two_stages):
    found, out, _ = two_stages
    for rank in found["ranks"]:
        assert rank["stage"] == rank["rank"] // 2
        trained = {p["name"] for p in rank["parameters"] if p["trained"]}
        assert trained == ({"fc1.weight", "fc1.bias"} if rank["rank"] < 2 else {"fc2.weight", "fc2.bias"})
        # 4 micro batches of 4 pictures, half of them on each of the stage's ranks, forth and back
        assert total(rank, "Send") == total(rank, "Receive") == 4 * (2 * 64 * 4)
    assert found["faults"] == []
    assert "Ranks 0-1, pipeline stage 0" in out and "Ranks 2-3, pipeline stage 1" in out
    assert "0 to 2; 1 to 3" in out


@pytest.mark.parametrize("plant, kinds, ranks", [
    ("lose a Receive", {"Send"}, {0, 2}),
    ("lose a Send", {"Receive"}, {0, 2}),
    ("lose an AllReduce", {"sequence"}, {2, 3}),
    ("another group", {"group"}, {3}),
])
def test_planted_disagreements_are_found(two_stages, plant, kinds, ranks):
    ranks_of = copy.deepcopy(two_stages[0]["ranks"])
    assert list(reporting.faults(ranks_of)) == []
    calls = ranks_of[2 if "e a " in plant else 3]["collectives"]
    at = {"lose a Receive": "Receive", "lose a Send": "Send"}.get(plant, "AllReduce")
    one = next(c for c in calls if c["op"] == at)
    if plant == "another group":
        one["ranks"] = [1, 2, 3]
    else:
        calls.remove(one)
    found = list(reporting.faults(ranks_of))
    assert {fault["kind"] for fault in found} == kinds
    assert set(found[0]["ranks"]) == ranks


def test_steps_of_several_graphs(dry_run, tmp_path):
    code, out, err, found = dry_run(8, "3", "jit_steps.py", options=("--keep", str(tmp_path / "kept")))
    assert code == 0, out + err
    rank, = found["ranks"]
    assert total(rank, "AllReduce") == rank["trained_bytes"] == 4 * (16 * 10 + 10)
    assert len(json.loads((tmp_path / "kept" / "rank_3" / "facts.json").read_text())["graphs"]) == 3
    log = (tmp_path / "kept" / "rank_3" / "log.txt").read_text()
    assert "step 0" in log and "step 1" not in log


def test_a_strategy_that_does_not_fit(dry_run):
    code, out, err, found = dry_run(8, "0,5", "semi_auto.py", "1", "3", "16")
    reason = "shape value 128 at dim index 1 cannot be divisible by strategy value 3"
    assert code == 1
    for rank in found["ranks"]:
        assert not rank["compiled"]
        assert rank["error"]["line"] == line_of("semi_auto.py", "x = self.matmul(x, self.weight)")
        assert any(reason in text for text in rank["error"]["reasons"])
    line = f"semi_auto.py:{rank['error']['line']}: x = self.matmul(x, self.weight)"
    assert "Ranks 0,5 FAILED" in out and reason in out and line in out
    assert "rank 0 FAILED" in err and "rank 5 FAILED" in err


@pytest.mark.parametrize(("ranks", "arguments", "operator", "told"), [
    (2, ["faults.py", "uncut"], "Addcmul", "if the step runs in one process, these may be shapes of slices"),
    pytest.param(4, ["tied.py", "pipeline", ".", "sharded"], "AddN", "a weight that several stages of a pipeline use "
                 "cannot be cut by enable_parallel_optimizer: set its parallel_optimizer = False)\n",
                 marks=pytest.mark.skipif(version("mindspore").startswith("2.7."), reason="MindSpore 2.7 cuts it")),
])
def test_shapes_that_the_plan_has_made_are_explained(ranks, arguments, operator, told, tmp_path):
    done = jobs.run(jobs.PYTHON, jobs.REPO / "dry_run/dry_run.py", "--rank-size", ranks, "--ranks", 0,
                    jobs.REPO / "tests/compute_scripts" / arguments[0], *arguments[1:], cwd=tmp_path)
    assert done.code == 1
    assert f"'{operator}'" in done.output and f"\n    ({told}" in done.output


def test_send_without_receive(dry_run):
    code, out, _, found = dry_run(4, "0-2", "send_only.py")
    assert code == 1
    assert all(rank["compiled"] for rank in found["ranks"])
    fault, = found["faults"]
    assert fault["kind"] == "Send" and fault["ranks"] == [0, 1]
    assert fault["source"].endswith(f"send_only.py:{line_of('send_only.py', 'self.send(x)')}")
    assert "FAULT rank 0: Send to rank 1" in out and "has no Receive on rank 1" in out


@pytest.mark.parametrize(("rank", "named"), [("5", "rank 5"), ("-1", "no rank")])
def test_a_message_to_a_rank_that_is_not(rank, named, dry_run):
    code, out, err, found = dry_run(2, "0-1", "send_only.py", rank)
    assert code == 1, err
    assert [(fault["kind"], fault["ranks"]) for fault in found["faults"]] == [("Send", [0])]
    assert re.search("^ +Send +0 to a rank outside of its group +1 ", out, re.MULTILINE), out
    assert f"FAULT rank 0: Send names {named} of group 'hccl_world_group', which has 2 members" in out


@pytest.mark.parametrize("fault", ["none", "members", "order"])
def test_groups_made_by_hand(dry_run, fault):
    code, out, err, found = dry_run(3, "0,1", "own_groups.py", fault)
    assert code == (fault != "none"), out + err
    kinds = {"none": [], "members": ["group"], "order": ["sequence"]}[fault]
    assert [item["kind"] for item in found["faults"]] == kinds
    if fault == "members":
        assert "group 'pair' is ranks 0-2 for rank 1, but ranks 0-1 for rank 0" in out
    if fault == "order":
        assert "as number 1 rank 1 runs AllReduce sum" in out and "but rank 0 runs AllGather" in out
        assert f"own_groups.py:{line_of('own_groups.py', 'self.gather(self.reduce(x))')}" in out


def test_ranks_that_build_other_networks(dry_run):
    code, out, err, found = dry_run(2, "0-1", SCRIPTS.parent / "compute_scripts/other_sizes.py")
    assert code == 1, err
    assert [(fault["kind"], fault["ranks"]) for fault in found["faults"]] == [("shape", [0, 1])] * 2
    assert "FAULT parameter 'second', which the plan cuts, is (64, 4) on rank 0 and (72, 4) on rank 1; build one" in out


OPTIMIZERS = """for optimizer in (
        lambda weights: nn.LARS(nn.Momentum(weights, 0.1, 0.9)), lambda weights: nn.Lamb(weights, 0.1),
        lambda weights: nn.AdaFactor(weights, 0.1, scale_parameter=False, relative_step=False),
        lambda weights: nn.SGD([{"params": weights, "grad_centralization": True}], 0.1), nn.AdamWeightDecay):
    net = Net()
    model = ms.Model(net, nn.MSELoss(), optimizer(net.trainable_params()))
    one = NumpySlicesDataset(tuple(part[:batch] for part in samples), ["x", "y"]).batch(batch)
    model.train(1, one, dataset_sink_mode=False)  # a step: a dry run ends where a graph is to run again
"""


def test_optimizers_that_take_norms_of_slices(dry_run, tmp_path):
    lines, script = (SCRIPTS / "semi_auto.py").read_text(), tmp_path / "optimizers.py"
    assert lines.count("\nnet = Net()\n") == 1
    script.write_text(lines.partition("net = Net()\n")[0] + OPTIMIZERS)
    for columns in 1, 2:  # in one, nothing is cut
        code, out, err, _ = dry_run(2, "0", script, "1", str(columns), "16")
        assert code == 0, err
        told = re.findall("^NOTE in this plan (.+) takes norms or means of each rank's own slices", out, re.MULTILINE)
        assert sorted(told) == ["grad_centralization", "nn.AdaFactor", "nn.LARS", "nn.Lamb"] * (columns == 2), out


def test_import_errors_and_a_missing_init(dry_run):
    code, out, _, found = dry_run(2, "0-1", "import_error.py")
    assert code == 1
    first, second = found["ranks"]
    assert "never called mindspore.communication.init()" in first["error"]["message"]
    assert second["error"]["type"] == "ModuleNotFoundError"
    assert second["error"]["file"].endswith("import_error.py")
    assert second["error"]["line"] == line_of("import_error.py", "    import a_module_that_is_not_there")
    assert "Rank 0 FAILED" in out and "Rank 1 FAILED" in out


def test_a_script_that_chooses_the_cpu(dry_run):
    code, out, *_ = dry_run(2, "1", "on_cpu.py")
    assert code == 1
    assert "the script chose device CPU itself" in out
    assert f"on_cpu.py:{line_of('on_cpu.py', 'init()')}" in out


def test_a_rank_that_hangs_is_ended(dry_run, tmp_path):
    code, out, *_ = dry_run(2, "1", "never_ends.py", str(tmp_path / "pid"), options=("--timeout", "8"))
    assert code == 1
    assert "not done after 8 s (--timeout); its last line: now waiting" in out
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_stopped_dry_run_leaves_no_process(cache, tmp_path):
    pid = tmp_path / "pid"
    process = subprocess.Popen(
        [*COMMAND, "--rank-size", "1", str(SCRIPTS / "never_ends.py"), str(pid)],
        env={**os.environ, "DRY_RUN_CACHE": str(cache), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert not alive(int(pid.read_text()))
        assert not list(tmp_path.glob("dry_run_*"))
    finally:
        process.kill()
        if pid.exists() and alive(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("victim", ["dry_run.py", "fork_ranks.py"])
def test_kill_9_leaves_no_process(cache, tmp_path, victim):
    with jobs.Job(*COMMAND, "--rank-size", 1, SCRIPTS / "never_ends.py", tmp_path / "pid", cwd=tmp_path,
                  env={"DRY_RUN_CACHE": str(cache), "TMPDIR": str(tmp_path)}) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(next(pid for pid in jobs.marked(job.mark) if victim.encode() in jobs.command_of(pid)
                     and jobs.parent_of(pid) in (os.getpid(), job.process.pid)), signal.SIGKILL)
        result = job.finish()
    assert not result.left_over
    assert "Traceback" not in result.output
    if victim == "fork_ranks.py":
        assert result.code == 1
        assert "Rank 0 FAILED" in result.output and "ended by SIGKILL" in result.output


def test_data_of_a_sink_is_not_read_ahead(dry_run, tmp_path):
    """Only one batch, for its shapes and types; the queue that nobody empties stays empty, and no thread spins."""
    code, out, err, found = dry_run(2, "1", "sink.py", options=("--keep", str(tmp_path / "kept")))
    assert code == 0, out + err
    assert total(found["ranks"][0], "AllReduce") == found["ranks"][0]["trained_bytes"] == 4 * (16 * 10 + 10)
    log = (tmp_path / "kept" / "rank_1" / "log.txt").read_text()
    samples, seconds = re.search(r"read (\d+) samples, worked ([\d.]+) s of 1", log).groups()
    assert 4 <= int(samples) <= 16 and float(seconds) < 0.2
    assert "queue 0" in log and "epoch: 1 step: 64, loss is 0.0" in log


def test_how_long_it_will_take(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    progress = command.Progress(list(range(8)), 8, 2)
    now[0] = 120
    progress.wait()
    progress.tell({"rank": 1, "compiled": True, "seconds": 20.0})  # the first of four rounds
    now[0] = 140
    for rank in range(7):
        progress.tell({"rank": rank, "compiled": rank != 5, "seconds": 20.0})
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("compiling ranks 0-7 of 8, 2 at a time; a rank of a small network takes 1 to 3 s")
    assert said[1] == "20 s, 0 of 8 ranks done ..."
    assert said[2] == "rank 1 compiled after 20.0 s (1 of 8, about 60 s left)"
    assert said[-2] == "rank 5 FAILED after 20.0 s (7 of 8, about 40 s left)"
    assert said[-1] == "rank 6 compiled after 20.0 s (8 of 8)"


def test_a_terminal_has_a_line_that_moves(tmp_path):
    (tmp_path / "script.py").write_text("import time\ntime.sleep(2)\n")
    if not shutil.which("script"):
        pytest.skip("no program `script`, which gives a command a terminal")
    command = shlex.join([*COMMAND, "--rank-size", "1", "script.py"])
    done = jobs.run("script", "-qec", command, "/dev/null", cwd=tmp_path)
    assert re.search(r"\s\x1b\[K\d+ s, 0 of 1 ranks done \.\.\.\s\x1b\[K", done.output)


def test_an_installed_cann_is_used(dry_run, cache):
    code, *_ = dry_run(2, "0", "data_parallel.py")  # builds what plays CANN here
    assert code == 0
    cann = next(cache.glob("mindspore-*"))
    home = str(cann / "latest")
    code, out, err, _ = dry_run(
        2, "0", "data_parallel.py", ASCEND_HOME_PATH=home, ASCEND_OPP_PATH=str(cann / "opp"),
        LD_LIBRARY_PATH=f"{home}/lib64", PYTHONPATH=str(cann / "python"),
        DRY_RUN_CACHE=str(cann / "not_here"))
    assert code == 0, out + err
    assert f"the installed CANN ({home})" in out and not (cann / "not_here").exists()
    code, out, *_ = dry_run(2, "0", "data_parallel.py", ASCEND_HOME_PATH=home, LD_LIBRARY_PATH="")
    assert code == 1 and "plugin did not load" in out and "set_env.sh" in out


def test_builds_side_by_side(tmp_path):
    build = ("import sys; sys.path.insert(0, sys.argv[1]); import stand_ins; "
             "print(stand_ins.build(sys.argv[2], 'x')[0])")
    package = Path(command.importlib.util.find_spec("mindspore").origin).parent
    environment = {**os.environ, "DRY_RUN_CACHE": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", build, str(ROOT / "dry_run"), str(package)],
                                  env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    folder, = folders
    assert [str(path) for path in tmp_path.iterdir()] == [folder]
    assert (Path(folder) / "latest" / "lib64" / "libge_runner.so").exists()


@pytest.mark.parametrize("environment, words", [
    ({"PATH": "/nowhere"}, ["no C compiler", "pip install ziglang"]),
    ({"CC": "no-such-compiler"}, ["CC=no-such-compiler"]),
    ({"CC": "false"}, ["false -shared", "failed"]),
])
def test_without_a_compiler(dry_run, tmp_path, environment, words):
    if "PATH" in environment and command.importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is installed here, so there is a compiler")
    environment = {"DRY_RUN_CACHE": str(tmp_path / "cache"), **environment}
    code, out, err, _ = dry_run(2, "0", "data_parallel.py", **environment)
    assert code == 2 and out == ""
    assert all(word in err for word in words)
    assert not list(tmp_path.rglob("*.c"))


@pytest.mark.parametrize("arguments, words", [
    (["--rank-size", "2", "no_such_script.py"], "no such script"),
    (["--rank-size", "0", "SCRIPT"], "at least 1 rank"),
    (["--rank-size", "2", "--ranks", "2", "SCRIPT"], "ranks 0 to 1"),
    (["--rank-size", "2", "--ranks", "a", "SCRIPT"], "as 0,8-15"),
    (["--rank-size", "2", "--ranks", "", "SCRIPT"], "--ranks '': write ranks as 0,8-15"),
    (["--rank-size", "2", "--jobs", "0", "SCRIPT"], "must be above 0"),
    (["--rank-size", "2", "--timeout", "nan", "SCRIPT"], "must be above 0"),
    (["--rank-size", "99999999999999999999", "SCRIPT"], "no whole number below 100000"),
    (["--rank-size", "\uff12", "SCRIPT"], "no whole number"),
    (["--rank-size", "2", "--ranks", "0-99999999999", "SCRIPT"], "as 0,8-15"),
    (["--rank-size", "2", "--json", "/no/such/folder/x.json", "SCRIPT"], "its folder does not exist"),
    (["--rank-size", "2", "--json", "SCRIPT", "SCRIPT"], "is there, and holds something else; name a new one"),
    (["--rank-size", "2", "--keep", str(SCRIPTS), "SCRIPT"], "must be new or empty"),
    (["--rank-size", "2", "--json", "", "SCRIPT"], "--json is empty; name a file or folder"),
    (["SCRIPT"], "--rank-size"),
])
def test_bad_arguments(monkeypatch, capsys, arguments, words):
    script = str(SCRIPTS / "data_parallel.py")
    monkeypatch.setattr(sys, "argv", ["dry_run.py", *(script if a == "SCRIPT" else a for a in arguments)])
    with pytest.raises(SystemExit) as stop:
        command.arguments()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_stand_in_data_is_valid(tmp_path):
    for kind in ("cifar10", "mnist"):
        command.stand_in_data(kind, tmp_path / kind)
    count = ("import sys, mindspore.dataset as ds; print("
             "ds.Cifar10Dataset(sys.argv[1], usage='train', num_shards=16, shard_id=15).get_dataset_size(), "
             "ds.Cifar10Dataset(sys.argv[1], usage='test').get_dataset_size(), "
             "ds.MnistDataset(sys.argv[2], usage='train').get_dataset_size(), "
             "next(ds.MnistDataset(sys.argv[2], usage='test').create_tuple_iterator())[0].shape)")
    done = subprocess.run([sys.executable, "-c", count, str(tmp_path / "cifar10"), str(tmp_path / "mnist")],
                          check=True, capture_output=True, text=True)
    assert done.stdout.split(maxsplit=3) == ["625", "10000", "8192", "(28, 28, 1)\n"]


GRAPH = """# IR entry: @main_1
# Total subgraphs: 2
%para1_x: <Tensor[Float16], (4, 8)> : [4, 8]
%para2_fc.weight: <Ref[Tensor[BFloat16]], (8, 2), ref_key=fc.weight, is_parameter>  :  has_default

subgraph @micro_2(%para3_x) {
  %0(dx) = ReduceScatter(%para3_x) primitive_attrs: {group: "two", fusion: I64(0), op: "sum", \
rank_list: (2, 3)} cnode_attrs: {fusion: I64(9)}
      : (<Tensor[Float16], (4, 8)>) -> (<Tensor[Float16], (2, 8)>)
      # In file /lib/site-packages/mindspore/nn/cell.py:1, 2~3/        x = f(x)/
      # In file /home/me/train.py:7~9, 4~10/    def construct(self, x):/
      # In file /home/me/train.py:8, 12~20/        x = g(x)/
      # In file /lib/site-packages/mindspore/ops.py:5, 2~3/        return h(x)/
  Return(%0)
      : (<Tensor[Float16], (2, 8)>)
}

subgraph @main_1() {
  %0(a) = call @micro_2(%para1_x) {instance name: x}
      : (<Tensor[Float16], (4, 8)>) -> (<Tensor[Float16], (2, 8)>)
  %1(b) = AllGather(%0) {instance name: ag} primitive_attrs: {group: "hccl_world_group", fusion: I64(3)}
      : (<Tensor[Float16], (2, 8)>) -> (<Tensor[Float16], (8, 8)>)
  %2(c) = %1[@Partial(@micro_2)](%1)
      : (<Tensor[Float16], (4, 8)>) -> (<Tensor[Float16], (2, 8)>)
  %3(d) = Receive(%2) primitive_attrs: {src_rank: I64(1), group: "two", sr_tag: I64(5), rank_list: (2, 3)}
      : (<Tensor[Float16], (4, 8)>) -> (<Tensor[Int32], (3)>)
  Return(%3)
      : (<Tuple[Tensor[Float32],Tuple[Tensor[Int32]*2],Bool], TupleShape((), TupleShape((3), (2, 1)), \
NoShape)>)
}
"""


def test_parsing_a_graph():
    graph = graph_ir.parse(GRAPH)
    assert graph.parameters == {"fc.weight": ("BFloat16", (8, 2))}
    assert [c.op for c in graph.collectives] == ["ReduceScatter", "AllGather", "ReduceScatter", "Receive"]
    scatter, gather, _, receive = graph.collectives
    assert scatter == ("ReduceScatter", "two", (2, 3), "Float16", (4, 8), 64, "sum", 0, None, None,
                       "/home/me/train.py:8")
    assert (gather.ranks, gather.shape, gather.bytes, gather.fusion) == ((), (8, 8), 128, 3)
    assert (receive.peer, receive.tag, receive.shape, receive.bytes) == (1, 5, (3,), 12)
    assert graph.output == (("Float32", ()), (("Int32", (3,)), ("Int32", (2, 1))), ("Bool", ()))


def test_collectives_under_a_condition_count_too(dry_run):
    code, out, err, found = dry_run(2, "0-1", "condition.py")
    assert code == 0, out + err
    for rank in found["ranks"]:
        assert sorted(each["op"] for each in rank["collectives"]) == ["AllGather", "AllReduce", "AllReduce"]


LAZY = """
import mindspore as ms
from mindspore import nn, ops
ms.set_context(mode=ms.GRAPH_MODE)
ms.communication.init()
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="data_parallel")
class Net(nn.Cell):
    @ms.lazy_inline
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(8, 4)
    def construct(self, x):
        return ops.reduce_sum(self.fc(x))
net = Net()
step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9)).set_train()
step(ms.ops.ones((4, 8), ms.float32))
"""


def test_gradients_of_a_cell_with_lazy_inline_are_counted(dry_run, tmp_path):
    """Its backward pass is a graph that another graph returns."""
    (tmp_path / "lazy.py").write_text(LAZY)
    code, out, err, found = dry_run(4, "0", tmp_path / "lazy.py")
    assert code == 0, out + err
    rank, = found["ranks"]
    assert total(rank, "AllReduce") == rank["trained_bytes"] + 4 == 4 * (8 * 4 + 4) + 4, "and the loss"


@pytest.mark.parametrize(("how", "notes"), [("twice", 1), ("nothing_cut", 0)])  # added, at_once: test_compute.py
def test_a_norm_of_each_ranks_own_slices_has_a_note(how, notes, dry_run):
    code, out, err, found = dry_run(2, "0", SCRIPTS.parent / "compute_scripts" / "norms.py", how)
    assert code == 0, out + err
    assert out.count("NOTE in this plan ops.clip_by_global_norm takes the norm of each rank's own slices") == notes
    assert len(found["ranks"][0]["notes"]) == notes


SAVES = """
import os
import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import init
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint
os.chdir(os.path.dirname(os.path.abspath(__file__)))
ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
net = nn.Dense(8, 4)
x = np.ones((8, 8), np.float32)
data = ms.dataset.NumpySlicesDataset((x, x[:, :4]), ["x", "y"]).batch(8)
model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()))
model.train(1, data, [ModelCheckpoint("net", "saved", CheckpointConfig(keep_checkpoint_max=1))],
            dataset_sink_mode=False)
ms.save_checkpoint(net, "best.ckpt")
"""


def test_a_script_that_saves_overwrites_nothing(dry_run, tmp_path):
    """Its weights are untrained; ModelCheckpoint would also delete the oldest."""
    (tmp_path / "saved").mkdir()
    files = [tmp_path / name for name in ("best.ckpt", "saved/net-1_1.ckpt", "saved/net-2_1.ckpt")]
    for file in files:
        file.write_text(f"trained {file.name}")
    (tmp_path / "saves.py").write_text(SAVES)
    code, out, err, _ = dry_run(2, "0", tmp_path / "saves.py")
    assert code == 0, out + err
    assert sorted(tmp_path.rglob("*.ckpt")) == sorted(files)
    assert all(file.read_text() == f"trained {file.name}" for file in files)


def test_what_is_computed_on_slices_alone_has_a_note(dry_run):
    # 2.7 and 2.8 add up an index, and then refuse it.
    index = [] if version("mindspore").startswith(("2.7.", "2.8.")) else ["index"]
    code, out, err, _ = dry_run(2, "0", SCRIPTS.parent / "compute_scripts" / "on_slices.py", "median", "value", *index)
    assert code == 0, out + err
    assert re.findall(r"(?m)^NOTE (.*?) \(\S*on_slices.py:(\d+)\)", out) == [
        ("MindSpore has no rule for cutting Median", "35"), *(("the index of ops.max", "39") for _ in index)]


def test_a_weight_of_two_stages_is_trained_in_the_first(dry_run, tmp_path):
    script = SCRIPTS.parent / "compute_scripts" / "tied.py"
    code, out, err, found = dry_run(4, "0,2", script, "pipeline", tmp_path, "clip")
    assert code == 0, out + err
    assert [[p["name"] for p in rank["parameters"] if p["trained"]] for rank in found["ranks"]] == [
        ["decoder.table"], ["decoder.middle.weight", "decoder.middle.bias"]]
    assert out.count("ops.clip_by_global_norm counts the gradient of decoder.table once for each pipeline stage") == 1


EARLY_ENDS = """
# IR entry: @main_1
subgraph @main_1(%para1_x) {
  %0(a) = Switch(%para1_x, @yes_2, @no_3)
      : (<Tensor[Bool], ()>, <Func, NoShape>, <Func, NoShape>) -> (<Func, NoShape>)
  %1(b) = %0[@FuncUnion(@yes_2, @no_3)]()
      : () -> (<Tensor[Float32], (2)>)
  Return(%1)
      : (<Tensor[Float32], (2)>)
}

subgraph @yes_2() {
  %0(c) = AllReduce(%para1_x) primitive_attrs: {group: "hccl_world_group", fusion: I64(0), op: "sum"}
      : (<Tensor[Float32], (2)>) -> (<Tensor[Float32], (2)>)
  %1(d) = call @after_4(%0)
      : (<Tensor[Float32], (2)>) -> (<Tensor[Float32], (2)>)
  %2(e) = call @after_4(%1)
      : (<Tensor[Float32], (2)>) -> (<Tensor[Float32], (2)>)
  Return(%2)
      : (<Tensor[Float32], (2)>)
}

subgraph @no_3() {
  %0(f) = call @after_4(%para1_x)
      : (<Tensor[Float32], (2)>) -> (<Tensor[Float32], (2)>)
  Return(%0)
      : (<Tensor[Float32], (2)>)
}

subgraph @after_4(%para2_y) {
  %0(g) = AllGather(%para2_y) primitive_attrs: {group: "hccl_world_group", fusion: I64(0)}
      : (<Tensor[Float32], (2)>) -> (<Tensor[Float32], (4)>)
  Return(%0)
      : (<Tensor[Float32], (4)>)
}
"""


def test_what_both_sides_of_a_condition_call_counts_as_on_one_of_them():
    found = graph_ir.parse(EARLY_ENDS.lstrip()).collectives
    assert [one.op for one in found] == ["AllReduce", "AllGather", "AllGather"]


CAUGHT = """
import os
import mindspore as ms
from mindspore import ops
ms.set_context(mode=ms.GRAPH_MODE, enable_compile_cache=True, compile_cache_path=os.path.dirname(__file__))
ms.communication.init()
@ms.jit
def bad(x):
    return ops.MatMul()(x, x)
@ms.jit
def good(x):
    return x + 1
good(ms.Tensor([1.0]))
try:
    bad(ms.Tensor([[1.0, 2.0]]))
except Exception:
    print("caught")
"""
JUDGES = """
import mindspore as ms
from mindspore import ops
ms.set_context(mode=ms.GRAPH_MODE)
ms.communication.init()
reduce = ops.AllReduce()
@ms.jit
def good(x):
    return reduce(x)
mean = 1 / float(good(ms.Tensor([1.0, 2.0])).asnumpy()[0])
"""


def test_a_compilation_that_fails_where_the_script_catches_it(dry_run, tmp_path):
    (tmp_path / "caught.py").write_text(CAUGHT)
    code, out, err, _ = dry_run(2, "0", tmp_path / "caught.py")
    assert code == 1, out + err
    assert "Rank 0 FAILED" in out and "caught.py:9: return ops.MatMul()(x, x)\n" in out
    assert not list(tmp_path.rglob("graph_cache")), "the next run would see no graph"


def test_an_evaluation_before_the_training_is_no_step(dry_run, tmp_path):
    text = (SCRIPTS / "data_parallel.py").read_text().replace(
        "self.fc2 = nn.Dense(64, 10)", "self.fc2, self.gather = nn.Dense(64, 10), ops.AllGather()").replace(
        "self.fc2(ops.relu(self.fc1(x)))", "self.gather(self.fc2(ops.relu(self.fc1(x))))[:4]")
    (tmp_path / "trains.py").write_text(text)
    (tmp_path / "evaluates.py").write_text(text.replace(
        "0.1, 0.9))\nmodel.train(", "0.1, 0.9), metrics={'accuracy'})\nfor sink in (False, True):\n"
        "    print('eval', model.eval(data, dataset_sink_mode=sink), flush=True)\nmodel.train("))
    collectives = []
    for name in ("trains", "evaluates"):
        code, out, err, found = dry_run(2, "0", tmp_path / f"{name}.py", options=("--keep", str(tmp_path / name)))
        assert code == 0, out + err
        collectives.append([(each["op"], each["bytes"]) for each in found["ranks"][0]["collectives"]])
    assert {op for op, _ in collectives[0]} == {"AllGather", "AllReduce", "ReduceScatter"}
    assert collectives[0] == collectives[1], "those of the evaluation are none of a step"
    log = (tmp_path / "evaluates" / "rank_0" / "log.txt").read_text()
    assert log.count("eval {'accuracy': ") == 2 and "step: 1," in log


def test_errors_of_numbers_that_are_not_computed(dry_run, tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    code, out, err, found = dry_run(2, "0", tmp_path / "judges.py")
    assert code == 0, out + err
    assert found["ranks"][0]["collectives"][0]["op"] == "AllReduce"


PYNATIVE = """
import mindspore as ms
import numpy as np
from mindspore import nn, ops
ms.communication.init()
ms.set_auto_parallel_context(parallel_mode=MODE)
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ms.Tensor(np.ones((4, 4), np.float32)), name="weight")
        self.matmul = ops.MatMul()
    def construct(self, x):
        return self.matmul(x, self.weight)
net = Net()
step = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, net.trainable_params())
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
for _ in range(3):
    x = ms.Tensor(np.ones((4, 4), np.float32))
    optimizer(step(x, x)[1])
"""


@pytest.mark.parametrize(("mode", "told"), [
    ("data_parallel", "the script compiled no graph but that of its optimizer; a dry run sees graphs only"),
    ("auto_parallel", "in auto_parallel a network must be compiled, together with its optimizer, and only the opt")])
def test_an_optimizer_without_its_network_is_no_training(mode, told, dry_run, tmp_path):
    (tmp_path / "train.py").write_text(PYNATIVE.replace("MODE", repr(mode)))
    code, out, *_ = dry_run(2, "0", tmp_path / "train.py")
    assert code == 1
    assert told in out or "in PyNative mode operators run one by one, which needs CANN" in out, "2.7 comes so far only"


@pytest.mark.parametrize(("fault", "told"), [
    ("another_rank", "global_rank=1 of set_auto_parallel_context: rank 0 would compute what is another rank's"),
    ("early_stopping", "EarlyStopping has the ranks add up its metric in a graph that MindSpore refuses in ")])
def test_what_only_a_later_graph_or_other_ranks_would_show_is_refused(fault, told, dry_run):
    code, out, *_ = dry_run(2, "0", Path(__file__).parent / "compute_scripts/faults.py", fault)
    assert code == 1 and told in out, out


def test_over_which_ranks_a_parameter_is_sliced():
    # ranks 4 to 7 as a 2 x 2 matrix; dimension 0 is cut by its last axis, dimension 1 by none
    layout = [[2, 2], [0, -1], [4, 8], 0, True, "", [8, 8]]
    assert reporting.sliced_over(6, layout, (4, 8), {}) == [6, 7]
    layout = [[2, 2], [1, -1], [4, 8], 0, True, "", [8, 8]]
    assert reporting.sliced_over(6, layout, (4, 8), {}) == [4, 6]
    # and the optimizer cuts what is left over the pair 6, 7
    layout[5] = "pair"
    assert reporting.sliced_over(6, layout, (2, 8), {"pair": [6, 7]}) == [4, 5, 6, 7]
    assert reporting.short([0, 1, 2, 3, 7]) == "0-3,7"
