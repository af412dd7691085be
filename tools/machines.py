"""What launch.py, beside this file, knows of several machines.

mpirun starts all ranks from one machine (--hosts, --hostfile); msrun is started on each machine
(--nodes). prepare() looks before the start, blame() after a failure.
"""

import argparse
import contextlib
import os
import pwd
import re
import shutil
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_hosts
import linux
from servers import if_only_here

# mpirun hands no variable to other machines by itself.
HANDED_ON = re.compile("(PATH|LD_LIBRARY_PATH|PYTHONPATH|DATA_PATH|DEVICE_TARGET|LAUNCH_DIR|"
                       "BIND_RANKS|ALL_REDUCE|CONVOLUTIONS)$|(MS|GLOG|OMP|ONEDNN|HCCL|ASCEND|NCCL|CUDA)_")

WAITS_FOR_MACHINES = 600  # seconds, before a restart by mpirun


def add_options(parser):
    """The options that several machines need."""
    add = parser.add_argument
    add("--hosts", action=Machines, metavar="HOST:SLOTS,...",
        help="with mpirun: the machines, and the cards or processes of each")
    add("--hostfile", action=Machines, metavar="FILE", help="the same, lines of HOST slots=NUMBER")
    add("--interface", metavar="NAME", help="network that the ranks will use")
    add("--nodes", metavar="K", help="with msrun, typed on each of K machines: K")
    add("--node-rank", metavar="R", default="", help="0 to K-1: this machine")
    add("--master-addr", metavar="ADDRESS", help="of the machine with R = 0")
    add("--master-port", metavar="PORT", default="", help="a free port there")
    add("--wait", metavar="SECONDS", default="120", nargs="?", const="",
        help="how long the machines wait for each other to start (120)")
    parser.set_defaults(machines=[])


class Machines(argparse.Action):
    """Reads --hosts or --hostfile; without a number of ranks (-n "") all slots are used."""

    def __call__(self, parser, args, value, option=None):
        setattr(args, self.dest, value)
        try:
            if value:
                args.machines = check_hosts.read_hosts(args.hosts, args.hostfile)
        except ValueError as error:
            parser.error(str(error))
        args.n = args.n or str(sum(slots for _, slots in args.machines) or 1)


def prepare(args, launch):
    """Check this machine and the others; raises ValueError for what cannot be started."""
    refuse_if(not re.fullmatch(r"[1-9]\d{0,4}", args.wait),
              f"--wait must be a whole number of seconds, not '{args.wait}'")
    own, args.nodes = args.nodes is None, "1" if args.nodes is None else args.nodes
    refuse_if(not re.fullmatch(r"[1-9]\d{0,3}", args.nodes),
              f"--nodes must be a whole number from 1, not '{args.nodes}'")
    refuse_if(args.hosts == "", f"no machines given. usage: {args.usage}")
    refuse_if(args.hostfile == "", f"no hostfile given. usage: {args.usage}")
    refuse_if(args.machines and args.launcher != "mpirun",
              f"--hosts and --hostfile are for mpirun, and {args.launcher} starts these ranks; see --nodes for msrun, "
              "run_cluster.sh for a rank table")
    refuse_if(args.nodes != "1" and args.launcher != "msrun",
              f"--nodes is for msrun, and {args.launcher} starts these ranks; add --launcher msrun, or, with mpirun, "
              "name the machines with --hosts")
    if args.machines:
        prepare_mpirun(args, launch)
    elif args.nodes != "1":
        prepare_msrun(args, launch)
    elif alone := [name for name, given in (
            ("--node-rank", args.node_rank), ("--master-addr", args.master_addr),
            ("--master-port", args.master_port), ("--interface", args.interface)) if own and given]:
        raise ValueError(f"{alone[0]} is for several machines; name them, too: --nodes K with msrun, --hosts or "
                         "--hostfile with mpirun")


def set_aside(args, logs, aside):
    """Move an earlier job's logs aside on the other machines of mpirun, which may have this folder for themselves.

    Where they share it, the first that comes moves them for all.
    """
    far = sorted({host for host in args.machine_of if not check_hosts.is_here(host)} if args.machines else ())
    wanted = {"logs": os.path.abspath(logs), "aside": os.path.abspath(aside)}
    job, end = args.jobs[-1], None
    with ThreadPoolExecutor(16) as pool:
        while far:
            answers = dict(zip(far, pool.map(lambda host: check_hosts.ask(host, wanted), far)))
            for host, answer in answers.items():
                wrong = answer if isinstance(answer, str) else answer["failed"]
                if not wrong and answer["moved"]:
                    yield host
                # At a restart a failure of mpirun is one of several.
                refuse_if(wrong and len(args.jobs) == 1, f"{host}: {wrong}")
            far = [host for host in far if isinstance(answers[host], str)]  # at a restart: it may be starting anew
            if not end:
                end = time.monotonic() + WAITS_FOR_MACHINES
                for host in far:
                    print(f"{args.name}: waiting up to {WAITS_FOR_MACHINES} s for {host}: {answers[host]}",
                          file=sys.stderr, flush=True)
            job.look_at_the_clock()
            if far and (time.monotonic() > end or job.signalled(1)):
                return


def refuse_if(wrong, sentence):
    if wrong:
        raise ValueError(sentence)


def check_script(args, launch):
    """The script's own check, now: what is wrong here need not be looked for elsewhere."""
    if args.check:
        launch.check_script(args)
        launch.end_after_check(args)
        args.check = False


# ---------------------------------------------------------------------------------------- mpirun
def prepare_mpirun(args, launch):
    """Check all machines in one table; fill in how mpirun and the ranks find their way."""
    mpirun, tools = shutil.which("mpirun"), os.path.dirname(launch.__file__)
    folder = os.path.dirname(args.script)
    refuse_if(re.search(r"\s", mpirun + tools + folder),
              "Open MPI starts nothing on other machines from a path with a space "
              f"({mpirun}, {folder}); move it, or use run_msrun.sh --nodes")
    refuse_if(re.search(r"'.*'|\".*\"|\\.", os.getenv("SSH", "")),
              "Open MPI takes no quotes in SSH; put what needs them into ~/.ssh/config")
    refuse_if(":" in os.getcwd(), f"Open MPI cuts the path of the logs, {os.getcwd()}/{args.logs}, at the ':'; start "
                                  "from another folder")
    check_script(args, launch)
    data = "".join(launch.before.values_of(args, "--data-path")[-1:]) or os.getenv("DATA_PATH")
    address, port, shells = check_hosts.check_all(args.machines, args.n, [folder, tools], data,
                                                  args.interface, args.target)
    machine_of = [host for host, slots in args.machines for _ in range(slots)][:args.n]
    args.machine_of, args.place = machine_of, lambda rank: f" on {machine_of[rank]}"
    args.local = range(machine_of.count(machine_of[0]))
    args.address = check_hosts.address_of_interface(args.interface) or linux.own_address(address)
    if args.target == "CPU":
        os.environ.update(MS_SCHED_HOST=address, MS_SCHED_PORT=str(port))
        share = len(os.sched_getaffinity(0)) // max(map(machine_of.count, machine_of))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    if args.interface:
        os.environ.update(NCCL_SOCKET_IFNAME=args.interface, HCCL_SOCKET_IFNAME=args.interface)
    args.command = mpirun_options(args, shells)
    given = [name for name in filter(HANDED_ON.match, os.environ)
             if name in ("MS_SCHED_HOST", "MS_SCHED_PORT") or not launch.OWN_VARIABLES.match(name)]
    os.environ["RANKS_GIVEN"] = " ".join(given)
    for name in ["RANKS_LAUNCHER", "RANKS_GIVEN", *given]:
        args.command += ["-x", name]


def mpirun_options(args, shells=()):
    """The options of mpirun that several machines need; shells: the login shells there, "bash" and so on."""
    # As they were read here: mpirun understands no line ends of Windows.
    options = ["-H", ",".join(f"{host}:{slots}" for host, slots in args.machines)]
    if "@" in options[1]:  # users it takes only in a file; this one ends with this process
        with tempfile.TemporaryFile() as file:
            file.write("".join(f"{host} slots={slots}\n" for host, slots in args.machines).encode())
            file.flush()
            options = ["--hostfile", f"/proc/{os.getpid()}/fd/{os.dup(file.fileno())}"]
    # ssh, and Open MPI's daemon on the other side, shall notice soon that the network failed.
    ssh = (os.getenv("SSH") or "ssh") + " -x -o BatchMode=yes -o ConnectTimeout=8"
    settings = {"plm_rsh_agent": ssh + " -o ServerAliveInterval=3 -o ServerAliveCountMax=2",
                "plm_rsh_no_tree_spawn": 1, "orte_leave_session_attached": 1,
                "oob_tcp_keepalive_time": 5, "oob_tcp_keepalive_intvl": 2,
                "oob_tcp_keepalive_probes": 3}
    prefix = os.path.dirname(os.path.dirname(shutil.which("mpirun")))  # the same on all machines, on no PATH there
    if "fish" in shells:  # to which what --prefix sets is an error, after which it ends with 0
        settings["orte_launch_agent"] = f"env OPAL_PREFIX={prefix} {prefix}/bin/orted"
    else:
        options += ["--prefix", prefix]
    with contextlib.suppress(KeyError):  # a user whom this machine does not know
        if any("csh" in shell for shell in shells) != ("csh" in os.path.basename(pwd.getpwuid(os.getuid()).pw_shell)):
            settings["plm_rsh_assume_same_shell"] = 0  # so that Open MPI asks for it
    if args.interface:
        settings.update(oob_tcp_if_include=args.interface, btl_tcp_if_include=args.interface)
    for name, value in settings.items():
        options += ["-mca", name, str(value)]
    return options


# ----------------------------------------------------------------------------------------- msrun
def prepare_msrun(args, launch):
    """Is this the machine that --node-rank says, and can the ranks meet? Then msrun's options."""
    nodes, rank, address = int(args.nodes), args.node_rank, args.master_addr
    refuse_if(args.n % nodes, f"{args.n} processes cannot be shared equally by {nodes} machines")
    refuse_if(rank not in map(str, range(nodes)),
              f"--node-rank must be 0 to {nodes - 1}, not '{rank}'")
    refuse_if(not address, f"--nodes {nodes} needs --master-addr, the address of machine 0")
    refuse_if(not re.fullmatch(r"[1-9]\d{0,4}", args.master_port) or int(args.master_port) > 65535,
              f"--nodes {nodes} needs --master-port, a free port up to 65535, not '{args.master_port}'")
    refuse_if(args.interface and not check_hosts.address_of_interface(args.interface),
              f"this machine has no network interface {args.interface} with an address")
    check_script(args, launch)
    found = check_hosts.address_of(address)
    refuse_if(not found, f"--master-addr {address} has no IPv4 address; correct the name, or add it to /etc/hosts")
    refuse_if(found.startswith("127."), f"--master-addr {address}: {found} {check_hosts.OWN}")
    here = check_hosts.is_here(address)
    refuse_if(here and rank != "0",
              f"{address} is an address of this machine, so it is --node-rank 0, not {rank}")
    refuse_if(not here and rank == "0", f"{address} is no address of this machine; --node-rank 0 "
              "belongs on the machine that has it")
    if here:
        refuse_if(address == "0.0.0.0", "--master-addr 0.0.0.0 is no machine's address; name that of machine 0")
        try:
            server = socket.create_server((address, int(args.master_port)))
        except (OSError, OverflowError):
            raise ValueError(f"port {args.master_port} of {address} is taken; choose another "
                             "--master-port, the same on all machines") from None
        with server:
            refuse_if(not launch.listens(server.getsockname()),
                      f"--master-addr {address} is no address that others can connect to; name another of this machine")
    first = args.n // nodes * int(rank)
    args.meeting = address, int(args.master_port) + 1, list(range(0, args.n, args.n // nodes))  # with --restarts
    if not here and not args.restarts:
        launch.await_scheduler(args, (address, int(args.master_port)), "--node-rank 0", f"start {args.name} with "
                               f"--node-rank 0 on {address}, and let its firewall pass that port")
    # The machines may share this folder.
    args.local, args.logs = range(first, first + args.n // nodes), f"{args.logs}_{rank}"
    args.inside = args.inside and f"{args.inside}_{rank}"
    args.command = [f"--node_rank={rank}", f"--master_addr={address}",
                    f"--master_port={args.master_port}",
                    f"--cluster_time_out={int(args.wait) + launch.GIVES_UP_SOONER}"]


# -------------------------------------------------------------------------------- after a failure
def blame(args, job, code, _):
    """The sentence that names another machine as the cause of a failure; None if it was none."""
    if args.machines:
        return blame_connection(args, job, code)
    by_scheduler = args.meeting and not (args.launcher == "table" and args.target == "Ascend")
    return blame_others(args, job, code) if by_scheduler else None


def blame_connection(args, job, code):
    """With mpirun: a machine whose ssh, daemon or ranks do not answer any more."""
    log = Path(job.log).read_text(errors="replace")
    unmade = re.search(rf"unable to create the desired directory:\s+Directory: ({re.escape(os.path.abspath(args.logs))}"
                       r".*)\s+Error: +(.+)", log)
    if unmade:
        there = {*re.findall(r"^\[(\S+):\d+\] .*iof_base_setup", log, re.MULTILINE)}  # the daemons that met it
        return (f"the folder {unmade[1]} of the logs cannot be made on {' and '.join(sorted(there)) or 'a machine'} "
                f"({unmade[2]}); make room there, or, where the machines share this folder, let the same user, or one "
                f"who may write in it, start the ranks on all of them. Exit code {code}")
    found = re.search(r"^Timeout, server (\S+) not responding|^Connection to (\S+) closed by remote host|"
                      r"^Read from remote host (\S+): |Remote daemon: .* on node (\S+)", log, re.MULTILINE)
    silent = [rank["rank"] for rank in job.ranks.values() if rank.get("lost")]
    lost = found[found.lastindex] if found else None
    names = [machine.rpartition("@")[2] for machine in args.machine_of]  # without a user's
    if silent and not lost:
        lost = names[silent[0]]
    if lost and lost not in names:  # ssh says what stands behind an alias
        lost = next((name for name in dict.fromkeys(names) if check_hosts.behind(name) == lost), lost)
    if not lost and job.ranks and "unable to reliably start one or more daemons" in log:  # it had started them
        far = " or ".join(host for host, _ in args.machines[1:])
        return f"mpirun's ssh to {far} has ended: was it killed here, or did the network fail? Exit code {code}"
    if not lost:
        return None
    there = [str(rank) for rank, name in enumerate(names) if name == lost]
    return (f"the connection to {lost} was lost" + f", with rank {' '.join(there)}" * bool(there)
            + f"; exit code {code}. Is it on, is its network up?")


def blame_others(args, job, code):
    """With a launcher on each machine: ranks of others that failed, or machines that did not start or fit."""
    said, gone = job.said(), sorted(job.timed_out() - set(args.local))
    host, port, starts = args.meeting
    own = args.local[0]
    well = job.ranks and all(rank["code"] == 0 for rank in job.ranks.values())  # here, and the scheduler awaits all
    if args.launcher == "msrun":
        here, me, first = f"machine {args.node_rank}", f"--node-rank {args.node_rank}", f"machine 0, {host}"
        where, all_of_them = "Machine R is the one with --node-rank R; look at", f"machines 0 to {len(starts) - 1}"
    else:
        here, me, first = "this server", f"RANK_START {own}", f"the server of rank 0, {host}"
        where, all_of_them = "Look at", f"all servers of the table, with RANK_START {' and '.join(map(str, starts))}"

    def machine_of(rank):
        number = sum(start <= rank for start in starts) - 1
        return f"machine {number}" if args.launcher == "msrun" else f"the server of RANK_START {starts[number]}"

    for wrong, reason in (
            ("This node is extra or rank id exceeds" in said,
             f"{first}, has started fewer ranks than {args.n}: all need the same number, and the same rank table"),
            ("Repeated registration node" in said,
             f"{me} was typed twice, or other machines were told another number of ranks, or another job meets at port "
             f"{port - 1}, too: give each job a port of its own"),
            ((code == 143 or well) and gone,  # MindSpore ends ranks by signal 15 when others are gone
             "no answer any more from " + ", ".join(f"rank {each} on {machine_of(each)}" for each in gone)
             + ": it failed or was stopped, or its network failed" + ", or that of this machine" * (len(starts) > 2)),
            (own != 0 and (code == 143 or f"no scheduler listens on {host}:" in said),
             f"no answer any more from {first}: its ranks failed, the network did, or somebody sent TERM here"),
            ("processes in the cluster are not successfully spawned" in said,
             f"not all machines have joined within {args.wait} s (--wait): start {args.name} on {all_of_them}, all "
             f"with N = {args.n}{if_only_here(host)}")):
        if wrong:
            so, ended = ("T", "had ended well before;") if well else ("So t", "were ended,")
            return (f"{reason}. {so}he ranks of {here}, {own} to {args.local[-1]}, {ended} exit code {code}. "
                    f"{where} the logs there")
    return None
