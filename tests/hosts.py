"""Two hosts on one machine, for tests: namespaces with addresses, names, processes and an ssh server of their own.

A host lives in namespaces of its own (network, mounts, host name, processes), joined to the other by a veth pair
named eth0 on both sides. Its first process waits for the end of a pipe that the test holds: however the test ends,
kill -9 included, that process ends too, and with it Linux ends every other process of the host and its network.
Both hosts see the same files, except where a test mounts something else on one of them. The keys and the settings
of ssh are made for the occasion; the user's are never read.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import asyncssh
import jobs

NODES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
NAMESPACES = ("--net", "--mount", "--uts", "--pid")
FIRST_PROCESS = """
hostname "$1" && ip link set lo up && mount --bind "$2/hosts" /etc/hosts || exit
"$3" "$4" "$2" "$1" >"$2/$1/sshd.log" 2>&1 </dev/null &
read -r _ || true
"""


def missing():
    """Why hosts cannot be made here; "" if they can."""
    for tool in ("ip", "ssh", "unshare", "nsenter"):
        if not shutil.which(tool):
            return f"two hosts need the program {tool}"
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link", "set", "lo", "up"], check=False,
                           capture_output=True, text=True)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One of the two hosts."""

    def __init__(self, folder, name):
        self.folder, self.name, self.address = folder, name, NODES[name]
        (folder / name).mkdir()
        self.process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", FIRST_PROCESS, "host",
             name, folder, sys.executable, Path(__file__).with_name("sshd.py")], stdin=subprocess.PIPE)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.pid = int(wait_for(lambda: children.read_text().split() or None)[0])

    def command(self, *command, cwd="/"):
        """The words of a command that runs on this host."""
        return ("nsenter", "--target", self.pid, *NAMESPACES, "--", "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh",
                cwd, *command)

    def run(self, *command):
        """Run a short command, such as ip or mount, which must succeed; returns what it printed."""
        return subprocess.run([str(word) for word in self.command(*command)], check=True, capture_output=True,
                              text=True, timeout=20).stdout

    def job(self, *command, cwd, env=None):
        """Start a command on this host as a jobs.Job."""
        return jobs.Job(*self.command(*command, cwd=cwd), cwd=cwd, env={
            "SSH": f"ssh -F {self.folder / 'ssh_config'}", "TMPDIR": str(self.folder / self.name),
            "HOME": str(self.folder / self.name), **(env or {})})

    @contextlib.contextmanager
    def instead(self, path, other):
        """On this host only, have another file or folder at a path."""
        self.run("mount", "--bind", other, path)
        try:
            yield
        finally:
            self.run("umount", "--lazy", path)

    @contextlib.contextmanager
    def own_network(self, name, address):
        """A network of this host alone: a card with an address, and no cable to the other host."""
        self.run("ip", "link", "add", name, "type", "veth", "peer", "name", "inside")
        try:
            self.run("ip", "addr", "add", address, "dev", name)
            for link in (name, "inside"):
                self.run("ip", "link", "set", link, "up")
            yield
        finally:
            self.run("ip", "link", "del", name)

    @contextlib.contextmanager
    def link_down(self):
        """Cut this host's network."""
        self.run("ip", "link", "set", "eth0", "down")
        try:
            yield
        finally:
            self.run("ip", "link", "set", "eth0", "up")

    def processes(self):
        """Command lines of what runs on this host, besides its first process and its ssh server."""
        listing = self.run("ps", "-ww", "-eo", "pid=,stat=,args=").splitlines()
        return [line for line in listing if line.split()[0] != "1" and not line.split()[1].startswith("Z")
                and "sshd.py" not in line and " ps -ww" not in line]

    def end(self):
        self.process.stdin.close()
        self.process.wait(20)


def wait_for(answer, seconds=20, failure="a host did not come up"):
    """Wait until a function returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            value = answer()
            if value:
                return value
        time.sleep(0.02)
    raise AssertionError(f"{failure} within {seconds} s")


def write_ssh_files(folder):
    """Throw-away keys of the user and of both hosts, and the settings that use them and nothing else."""
    for name in ("user", *NODES):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / f"{name}_key"))
        key.write_public_key(str(folder / f"{name}_key.pub"))
        (folder / f"{name}_key").chmod(0o600)
    (folder / "known_hosts").write_text("".join(
        f"{name},{address} {(folder / f'{name}_key.pub').read_text()}" for name, address in NODES.items()))
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder / 'user_key'}\nIdentitiesOnly yes\nUserKnownHostsFile {folder / 'known_hosts'}\n"
        f"GlobalKnownHostsFile /dev/null\nSendEnv {jobs.MARK}\nHost worker\n"
        f"HostName {NODES['node2']}\n")  # a name that ssh alone knows
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n" for name, address in NODES.items()))


@contextlib.contextmanager
def two_hosts(folder):
    """Make both hosts, with their files in a folder; yields [node1, node2] and takes them down again."""
    write_ssh_files(folder)
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in NODES:
            hosts.append(Host(folder, name))
            stack.callback(hosts[-1].end)
        for host in hosts:
            wait_for(lambda host=host: host.run("hostname").strip() == host.name)
        first, second = hosts
        subprocess.run(["ip", "link", "add", "eth0", "netns", str(first.pid), "type", "veth", "peer", "name", "eth0",
                        "netns", str(second.pid)], check=True)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        for host in hosts:
            wait_for(lambda host=host: "listening" in (folder / host.name / "sshd.log").read_text())
        yield hosts
