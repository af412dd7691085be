"""Where ranks stand: the stacks of their scripts, taken from outside, and which rank is the odd one out.

    python tools/stacks.py PID          what the agent of a rank asks, on the machine of the rank; prints JSON

py-spy reads Python's stack, and MindSpore's C++ below it, from the memory of a process: the script need not help, may
hang anywhere, and goes on afterwards. Where py-spy is missing or may not look, what /proc tells is all there is.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import linux

BUSY = 0.5  # cores: who waits in a collective on CPU keeps 0.04 busy
INTERVAL = 2  # seconds in which a rank that works has used CPU
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^[<?]|\.so(\.|$)|/tools/launch\.py$")
COLLECTIVE = re.compile(r"(?i)(All_?Reduce|AllGatherV?|ReduceScatter|AlltoAllV?|Broadcast|Barrier|Scatter|Gather|Recv"
                        r"|Receive|Send)(?:\b|_|<|V|I)")
HAVE_COLLECTIVES = r"/(libmindspore_(cluster|backend_common)|mpi_allreduce[^/]*)\.so$"  # the second: of MindSpore 2.7
STARTS_SCHEDULER = ("_start_scheduler", "start_scheduler")


# ------------------------------------------------------------------------------------ on the machine of the rank
def look(pid):
    """All that can be seen of a process: its state, the cores that its session keeps busy, and its stacks."""
    state, before = state_of(pid), seconds_of(pid)
    time.sleep(INTERVAL)
    threads = [] if state in "Tt" else threads_of(pid)
    problem = threads if isinstance(threads, str) else ""
    runs = (state, state_of(pid)) == ("R", "R")  # if only it got a core
    return {"pid": pid, "state": state, "runs": runs, "cores": (seconds_of(pid) - before) / INTERVAL,
            "problem": problem, "threads": [] if problem else threads,
            "collective": "" if problem or state in "Tt" else collective_of(pid)}


def state_of(pid):
    return (linux.stat_of(pid) or "?")[0]


def seconds_of(session):
    """The CPU seconds that the processes of a session have used."""
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in linux.stats_of(session).values())
    return ticks / os.sysconf("SC_CLK_TCK")


def threads_of(pid):
    """The stacks of all Python threads of a process and its children, or why there are none (str).

    A thread is [is it the main thread of the rank?, [[function, file, line], ...]], the innermost call first.
    """
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.getenv('PATH')}")
    if not tool:
        return "py-spy is not installed (pip install py-spy)"
    for options in (["--native"], []):  # not all processors have the first
        try:
            done = subprocess.run([tool, "dump", "--json", "--subprocesses", *options, "--pid", str(pid)], check=False,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20,
                                  preexec_fn=linux.die_with_parent)  # noqa: PLW1509  # safe: there is one thread
            return [[thread["os_thread_id"] == pid, [[frame["name"], frame["filename"], frame["line"]]
                                                     for frame in thread["frames"]]]
                    for thread in json.loads(done.stdout)]
        except (ValueError, TypeError, subprocess.TimeoutExpired):
            pass
    said = done.stderr.strip().splitlines()
    return f"py-spy: {said[-1].strip() if said else 'no answer'}"


def collective_of(pid):
    """The collective on CPU, MindSpore's own or by MPI, that any thread of a process waits in; "" if none.

    It often runs in a thread that has no Python stack. What a blocked thread has on its C stack are, among other
    numbers, the addresses to return to: the first that lies in a collective of MindSpore's library is it.
    """
    try:
        maps = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        places = [(int(line[0].split("-")[0], 16), line[5]) for line in maps if len(line) == 6
                  and re.search(HAVE_COLLECTIVES, line[5]) and line[2] == "00000000"]
        symbols = [(name, base + start, size) for base, file in places for name, start, size in collectives_in(file)]
        if not symbols:
            return ""
        low, high = min(start for _, start, _ in symbols), max(start + size for _, start, size in symbols)
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for task in list(Path(f"/proc/{pid}/task").iterdir()) * 9:  # a thread that runs may be blocked soon
                call = (task / "syscall").read_text().split()
                if len(call) < 3:
                    time.sleep(0.01)
                    continue
                memory.seek(int(call[-2], 16))
                stack = memory.read(4096)
                for word, in struct.iter_unpack("=Q", stack[:len(stack) // 8 * 8]):
                    for name, start, size in symbols if low < word < high else ():
                        if start < word < start + size:
                            return name
    except (OSError, ValueError, struct.error):
        pass
    return ""


def collectives_in(library):
    """The functions of a library that carry out a collective: (name, address, length). It is an ELF file."""
    data = Path(library).read_bytes()
    offset, entry, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + number * entry) for number in range(count)]
    found = set()
    for table in [section for section in sections if section[1] in (2, 11)]:  # .symtab, .dynsym
        names = sections[table[6]][4]
        for name, _, _, _, start, size in struct.iter_unpack("<IBBHQQ", data[table[4]:table[4] + table[5]]):
            text = data[names + name:names + name + 90] if size else b""
            kind = re.search(rb"^(all_reduce)\0|"
                             rb"CollectiveOpsImpl\d+(?:Run|Ring|ReduceBroadcast)*(All[RG][a-z]+|[A-Z][a-z]+)I", text)
            if kind:
                found.add(((kind[1] or kind[2]).decode(), start, size))
    return found


# ------------------------------------------------------------------------------------------------ in the launcher
def describe(seen):
    """Tell where ranks stand.

    Args:
        seen: {rank: what look() gave, or None if nothing came}.

    Returns:
        (lines for the user, does any rank work?).
    """
    groups = {}
    for rank, one in sorted(seen.items()):
        groups.setdefault(standing(one), []).append(rank)
    lines = []
    for (doing, path), ranks in groups.items():
        several = len(ranks) > 1
        verb = re.sub(r"^(wait|i|work|stand|doe)s\b", lambda word: {"is": "are", "does": "do"}.get(word[0], word[1]),
                      doing) if several else doing
        lines.append(f"rank{'s' * several} {', '.join(map(str, ranks))} {verb}" + (f":  {path}" if path else ""))
    # Who waits in a collective waits for others; of those who do not, the fewest are the odd ones.
    blamed = ("is stopped", "does not answer", "waits for data", "", "waits in ")
    oddness = sorted((next(place for place, start in enumerate(blamed) if start and doing.startswith(start)
                           or not start and not doing.startswith(blamed[4])), len(ranks), ranks)
                     for (doing, _), ranks in groups.items())
    if len(groups) > 1 and oddness[0][:2] < oddness[1][:2]:
        ranks = oddness[0][2]
        lines.append(f"odd one{'s' * (len(ranks) > 1)} out: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; "
                     f"the others wait for {'them' if len(ranks) > 1 else 'it'}")
    return lines, any(works(one) for one in seen.values())


def works(one):
    """Does a rank get on? Waiting in a collective may keep a core busy, too; a long calculation need not move."""
    if one is None or one["state"] in "Tt" or standing(one)[0].startswith("waits"):
        return False
    return works_hard(one)


def in_collective(one):
    """Does a rank wait for others?"""
    return standing(one)[0].startswith("waits in ")


def works_hard(one):
    return one["cores"] > BUSY or one["runs"]


def stopped(process, place=""):
    """What a stopped process does, and how it goes on; place: on which machine, in words."""
    return f"is stopped (SIGSTOP): kill -CONT {process}{place} lets it go on"


def standing(one):
    """(what a rank does, its calls from the script on), the same for ranks that stand at the same place."""
    main, path = main_thread(one), ""
    collective = (one or {}).get("collective") or next((found[1] for name, file, _ in main if LIBRARY.search(file)
                                                        and (found := COLLECTIVE.search(name))), "")
    if one is None:
        doing = "does not answer"
    elif one["state"] in "Tt":
        doing = stopped(one["pid"], one.get("place", ""))
    elif not main:
        doing = f"is in state {one['state']} ({one['problem']})"
    else:
        path = " > ".join(path_of(main))
        if collective:
            doing = f"waits in {collective.replace('all_reduce', 'AllReduce')}"
        elif any(name == "wait" and file.endswith("/dry_run/collectives.py") for name, file, _ in main):
            doing = "waits in a collective of its plan"
        elif any("mindspore/dataset/engine/iterators.py" in file for _, file, _ in main):
            doing, path = "waits for data", path + data_of(one)
        else:
            doing = f"works ({one['cores']:.1f} cores)" if works_hard(one) else f"is in {innermost(main)}"
    return doing, path


def main_thread(one):
    """The frames of the rank's main thread, the innermost first."""
    threads = (one or {}).get("threads", ())
    return next((frames for is_main, frames in threads if is_main), threads[0][1] if threads else [])


def data_of(one):
    """Where the other threads and processes of a rank stand that run functions of the script."""
    paths = {" > ".join(path_of(frames)) for is_main, frames in one["threads"] if not is_main
             and not any(name in STARTS_SCHEDULER for name, *_ in frames)}
    return "".join(f"; the data: {path}" for path in sorted(paths - {""}))


def path_of(frames):
    """The script's calls, outermost first, and what the last of them has called."""
    own = [number for number, (_, file, _) in enumerate(frames) if not LIBRARY.search(file)]
    calls = [f"{os.path.basename(frames[number][1])}:{frames[number][2]}"
             + (f" {frames[number][0]}" if frames[number][0] != "<module>" else "") for number in reversed(own)]
    if own and own[0] > 0 and not frames[own[0] - 1][0].startswith("0x"):
        name = frames[own[0] - 1][0]  # clock_nanosleep: of a Python without its symbols, such as Debian's
        calls.append("time.sleep" if name in ("time_sleep", "clock_nanosleep") else name)
    return calls if len(calls) < 6 else [*calls[:2], "...", *calls[-3:]]


def innermost(frames):
    """The script's line that is executed: line 41 of data.py."""
    return next((f"line {line} of {os.path.basename(file)}" for _, file, line in frames if not LIBRARY.search(file)),
                "a library")


if __name__ == "__main__":
    print(json.dumps(look(int(sys.argv[1]))))
