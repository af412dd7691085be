"""What ranks.py does on several machines: mpirun's --hosts and --hostfile, msrun's --nodes.

Not needed to understand a lesson: skip it. ranks.py loads it from here when it is asked for several
machines; the functions take ranks.py's options and raise ValueError for what cannot be started.
"""

import os
import re
import shutil
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_hosts  # noqa: E402  # beside this file

# mpirun hands no variable to other machines by itself.
HANDED_ON = re.compile("(PATH|LD_LIBRARY_PATH|PYTHONPATH|DATA_PATH|DEVICE_TARGET|LAUNCH_DIR)$|"
                       "(RANKS|MS|GLOG|OMP|ONEDNN|HCCL|ASCEND|NCCL|CUDA)_")


# ---------------------------------------------------------------------------------------- mpirun
def check_machines(args):
    """Check all machines before mpirun starts; fills args.n and args.machines, one name a rank.

    Returns:
        The address of this machine, by which the ranks' agents reach ranks.py.
    """
    hosts = check_hosts.read_hosts(args.hosts, args.hostfile)
    hosts.sort(key=lambda host: not check_hosts.is_here(host[0]))  # mpirun begins with its own
    args.n = args.n or sum(slots for _, slots in hosts)
    mpirun, folder = shutil.which("mpirun"), os.path.dirname(os.path.abspath(args.script))
    if re.search(r"\s", f"{mpirun}{folder}"):
        raise ValueError("Open MPI starts nothing on other machines from a path with a space "
                         f"({mpirun}, {folder}); move the environment or this folder, or use "
                         "run_msrun.sh --nodes")
    given = dict(zip(args.options, args.options[1:]))
    data = given.get("--data-path") or os.getenv("DATA_PATH")
    address, port = check_hosts.check_all(hosts, args.n, folder, data, mpirun, args.interface)
    args.machines = [host for host, slots in hosts for _ in range(slots)][:args.n]
    if args.target == "CPU":
        os.environ.update(MS_SCHED_HOST=address, MS_SCHED_PORT=str(port))
        most = max(args.machines.count(host) for host in args.machines)
        share = max(1, len(os.sched_getaffinity(0)) // most)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    if args.interface:
        os.environ.update(NCCL_SOCKET_IFNAME=args.interface, HCCL_SOCKET_IFNAME=args.interface)
    return own_address(address, args.interface)


def own_address(other, interface):
    """The address of this machine by which another one reaches it."""
    if interface and check_hosts.address_of_interface(interface):
        return check_hosts.address_of_interface(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing: it only asks for the route
        return probe.getsockname()[0]


def mpirun_options(args):
    """The options of mpirun that several machines need."""
    options = ["-H", args.hosts] if args.hosts else ["--hostfile", args.hostfile]
    # If the network fails, ssh notices on this side, and Open MPI's daemon on the other; else both
    # would wait for minutes, and the ranks there would run on.
    ssh = os.getenv("SSH", "ssh") + " -x -o BatchMode=yes -o ConnectTimeout=8"
    settings = {"plm_rsh_agent": ssh + " -o ServerAliveInterval=3 -o ServerAliveCountMax=2",
                "plm_rsh_no_tree_spawn": 1, "orte_leave_session_attached": 1,
                "oob_tcp_keepalive_time": 5, "oob_tcp_keepalive_intvl": 2,
                "oob_tcp_keepalive_probes": 3}
    if args.interface:
        settings.update(oob_tcp_if_include=args.interface, btl_tcp_if_include=args.interface)
    for name, value in settings.items():
        options += ["-mca", name, str(value)]
    for name in os.environ:
        options += ["-x", name] if HANDED_ON.match(name) else []
    return options


# ----------------------------------------------------------------------------------------- msrun
def check_place(args):
    """Is this the machine that --node-rank says it is, and can the ranks meet? Fills args.local."""
    if not re.fullmatch(r"[1-9]\d{0,3}", args.nodes):
        raise ValueError(f"--nodes must be a whole number from 1, not '{args.nodes}'")
    nodes = int(args.nodes)
    if args.n % nodes:
        raise ValueError(f"{args.n} processes cannot be shared equally by {nodes} machines")
    if not re.fullmatch(r"[1-9]\d{0,4}", args.wait):
        raise ValueError(f"--wait must be a whole number of seconds, not '{args.wait}'")
    if not re.fullmatch(r"0|[1-9]\d{0,3}", args.node_rank) or int(args.node_rank) >= nodes:
        raise ValueError(f"--node-rank must be 0 to {nodes - 1}, not '{args.node_rank}'")
    if not args.master_addr:
        raise ValueError(f"--nodes {nodes} needs --master-addr, the address of the machine with "
                         "--node-rank 0")
    if not re.fullmatch(r"[1-9]\d{0,4}", args.master_port):
        raise ValueError(f"--nodes {nodes} needs --master-port, a free port, not "
                         f"'{args.master_port}'")
    if not check_hosts.address_of(args.master_addr):
        raise ValueError(f"--master-addr {args.master_addr} has no address; correct the name, or "
                         "add it to /etc/hosts")
    here = check_hosts.is_here(args.master_addr)
    if here and args.node_rank != "0":
        raise ValueError(f"{args.master_addr} is an address of this machine, so it is --node-rank "
                         f"0, not {args.node_rank}")
    if not here and args.node_rank == "0":
        raise ValueError(f"{args.master_addr} is no address of this machine; --node-rank 0 belongs "
                         "on the machine that has it")
    if here:
        try:
            socket.create_server((args.master_addr, int(args.master_port))).close()
        except OSError as error:
            raise ValueError(f"port {args.master_port} of {args.master_addr} is taken; choose "
                             "another --master-port, the same on all machines") from error
    here = args.n // nodes
    first = int(args.node_rank) * here
    args.local = list(range(first, first + here))
    # How soon a machine that is gone is noticed; MindSpore's own 30 s would make it twice as long.
    for name, seconds in (("MS_NODE_TIMEOUT", 10), ("MS_HEARTBEAT_RETRY_TIMEOUT", 5),
                          ("MS_RECEIVE_MSG_TIMEOUT", 5), ("MS_CPU_COMM_OP_TIMEOUT", 300)):
        os.environ.setdefault(name, str(seconds))


def await_master(args):
    """Wait for the scheduler of the first machine; returns "", or why the ranks cannot start."""
    deadline = time.monotonic() + int(args.wait)
    while True:
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((args.master_addr, int(args.master_port))) == 0:
                return ""
        if time.monotonic() > deadline:
            return (f"no scheduler at {args.master_addr}:{args.master_port} after {args.wait} s; "
                    f"start run_msrun.sh with --node-rank 0 on {args.master_addr}, and let its "
                    "firewall pass that port")
        time.sleep(0.5)


def blame_others(args, code, scheduler_log, lines):
    """Where the ranks here failed because of another machine, the sentence that says so, else "".

    Args:
        code: exit code of the first rank that failed here.
        scheduler_log: msrun's, on the first machine.
        lines: what the ranks here printed last.
    """
    reason, local = "", len(args.local)
    log = scheduler_log.read_text(errors="replace") if scheduler_log.exists() else ""
    gone = sorted({int(rank) for rank in re.findall(r"The node: (\d+) is timed out", log)})
    if code == 143 and gone:  # MindSpore ends ranks by signal 15 when others are gone
        names = ", ".join(f"rank {rank} on machine {rank // local}" for rank in gone)
        reason = f"no answer any more from {names}: it failed, or its network did"
    elif code == 143:
        reason = (f"no answer any more from machine 0, {args.master_addr}: its ranks failed, or "
                  "the network did")
    elif "processes in the cluster are not successfully spawned" in "\n".join(lines):
        reason = (f"not all machines have joined within {args.wait} s (--wait): start run_msrun.sh "
                  f"on machines 0 to {int(args.nodes) - 1}")
    if reason:
        reason += (f". So the ranks of machine {args.node_rank}, {args.local[0]} to "
                   f"{args.local[-1]}, were ended, exit code {code}. Machine R is the one with "
                   "--node-rank R; look at the logs there")
    return reason
