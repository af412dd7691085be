"""What launchers know of rank tables; tools/launch.py loads this file from here.

A job on Ascend cards is described by a rank table: which server and card each rank has. On CPU and GPU no table is
needed, but run_cluster.sh takes from it which ranks run on this machine.
"""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import cards  # noqa: E402  # beside this file


def add_options(parser):
    """The options of --with table."""
    parser.add_argument("--table", metavar="FILE", help="the rank table (RANK_TABLE_FILE, or the one here for N ranks)")
    parser.add_argument("--first", metavar="RANK", help="start only the ranks of the server whose first rank this is")


def prepare(args, launch):
    """Check the table, and this machine against it; fills args.local and args.devices.

    Raises:
        ValueError: what does not fit, and what to do; empty if a tool has said so already.
    """
    if args.table == "":
        raise ValueError("the rank table has an empty name; give its path (is a variable not set?)")
    if args.launcher != "table":
        if args.table or args.first is not None:
            raise ValueError(f"--table and --first are for --with table, not for {args.launcher}; leave them out")
        if os.environ.pop("RANK_TABLE_FILE", None):  # mpirun and a rank table exclude each other
            launch.say(f"{args.name}: RANK_TABLE_FILE is not handed on: {args.launcher} tells the ranks of each other")
        return
    own = HERE / f"rank_table_{args.n}pcs.json"
    table = args.table or os.getenv("RANK_TABLE_FILE") or (own if own.is_file() and not args.dry_run else "")
    if args.first is not None and not table and not args.dry_run:
        raise ValueError("RANK_START needs the rank table, which says which ranks are this machine's; give its path")
    if table:
        servers = read(args, table, launch.say)
        if not args.dry_run:
            check_server(args, servers[args.local[0]], launch.say)
    elif args.target == "Ascend" and args.n > 1 and not args.dry_run:
        raise ValueError(f"there is no rank table for {args.n} ranks; make one (python rank_tables/rank_table.py make "
                         "--help) and name it in RANK_TABLE_FILE")
    if args.dry_run:
        return
    if args.target == "Ascend":
        cards.check_cards([int(args.devices[rank]) for rank in args.local], args.local[0])
        if table:
            cards.check_addresses(table, servers[args.local[0]])
    else:
        choose_port(args, launch)


def run(tool, *arguments):
    """What a program of this folder prints; if it ends with an error, it has said why."""
    done = subprocess.run([sys.executable, HERE / tool, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError
    return done.stdout


def read(args, table, say):
    """Check a table; fills args.local, args.devices and RANK_TABLE_FILE; returns the server of each rank."""
    if not Path(table).is_file():
        raise ValueError(f"the rank table {table} {'is no file' if os.path.exists(table) else 'does not exist'}; give "
                         f"its path, or make one: python {os.path.relpath(HERE)}/rank_table.py make --help")
    os.environ["RANK_TABLE_FILE"] = table = os.path.abspath(table)
    say(run("rank_table.py", "check", table, "--size", str(args.n)).rstrip("\n"))
    _, args.devices, servers = zip(*map(str.split, run("rank_table.py", "ranks", table).splitlines()))
    starts = [str(rank) for rank in range(args.n) if rank == 0 or servers[rank] != servers[rank - 1]]
    if args.first is None:
        if len(starts) > 1:
            raise ValueError(f"{table} has ranks on several servers; start it on each of them with run_cluster.sh")
    elif args.first not in starts:
        raise ValueError(f"RANK_START is '{args.first}', but the servers of {table} start with rank "
                         f"{' '.join(starts)}; give the one of this machine")
    server = servers[int(args.first or 0)]
    args.local = [rank for rank in range(args.n) if servers[rank] == server]
    if args.first is not None and len(starts) > 1:  # with --restarts their launchers meet here
        host = servers[0] if args.target == "Ascend" else os.getenv("MS_SCHED_HOST", "127.0.0.1")
        port = os.getenv("MS_SCHED_PORT", "28117")
        args.meeting = host, int(port) + 1 if port.isdigit() else 0, [int(start) for start in starts]
    return servers


def check_server(args, server, say):
    """On Ascend, is this the machine that the table means?"""
    if args.target != "Ascend":
        return
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET) as probe:
        try:
            probe.bind((server, 0))
            return
        except OSError:
            pass
    if args.first is not None:
        raise ValueError(f"the ranks from {args.first} on belong to server {server}, which is no address of this "
                         "machine; start them there")
    say(f"{args.name}: warning: {server}, the server_id of {os.environ['RANK_TABLE_FILE']}, is no address of this "
        "machine; is it the right table?", sys.stderr)


def choose_port(args, launch):
    """Where the ranks' scheduler listens: MS_SCHED_HOST and MS_SCHED_PORT, else a free port here.

    run_cluster.sh takes 28117, so that all machines mean the same one, and waits for the machine with rank 0.
    """
    host, port = os.getenv("MS_SCHED_HOST", "127.0.0.1"), os.getenv("MS_SCHED_PORT")
    try:  # MindSpore takes no names, and of addresses only these
        host = os.environ["MS_SCHED_HOST"] = socket.gethostbyname(host or "no name")
    except (OSError, UnicodeError):
        raise ValueError(f"MS_SCHED_HOST is '{host}', which has no IPv4 address; set it to rank 0's machine") from None
    if args.first is not None:
        port = os.environ.setdefault("MS_SCHED_PORT", "28117")
        args.wait = os.getenv("MS_TOPO_TIMEOUT", args.wait)
    if port is not None and (not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535):
        raise ValueError(f"MS_SCHED_PORT is '{port}'; set it to a free port")
    if args.local[0] == 0:
        try:
            with socket.create_server((host, int(port or 0))) as server:  # none: launch.py takes a free one
                socket.create_connection(server.getsockname(), timeout=2).close()  # not to a broadcast address
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and args.first is not None:
                raise ValueError(f"MS_SCHED_HOST, {host}, is no address of this machine; RANK_START 0 belongs on the "
                                 "server that has it") from None
            at, why = f"{host}:{port}" if port else host, os.strerror(error.errno) if error.errno else error
            raise ValueError(f"no scheduler can listen on {at}: {why}; set MS_SCHED_HOST and MS_SCHED_PORT to an "
                             "address of this machine and a free port") from None
        return
    args.scheduler = host, int(port)


def await_others(args, launch):
    """Wait for the scheduler of the machine with rank 0; ends this program if it does not come."""
    if args.scheduler:
        starter = "run_cluster.sh with RANK_START 0"
        launch.await_scheduler(args, args.scheduler, starter, f"start {starter} on the first server, with the same "
                               "MS_SCHED_HOST and MS_SCHED_PORT")
