"""--bind: which cores a rank may use; tools/launch.py has each rank's agent call bind() before the script starts.

mpirun is told to bind nothing, and msrun binds nothing by itself, so that one option means the same for all launchers.
"""

import os
import re
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cores_in(text):
    """The numbers of a list as Linux writes it: "0-3,8" is {0, 1, 2, 3, 8}."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {core for low, high in spans for core in range(int(low), int(high or low) + 1)}


def numa_nodes(allowed, folder=NODES):
    """The allowed cores of each NUMA node that has any; one node if Linux does not say."""
    listed = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    nodes = [cores_in(file.read_text()) & allowed for file in listed]
    return [node for node in nodes if node] or [allowed]


def share(how, place, ranks, allowed, folder=NODES):
    """The cores of one of a machine's ranks.

    Args:
        how: "cores": an equal share of all, neighbours together (with more ranks than cores: one core each, shared);
            "numa": all cores of one NUMA node, the ranks spread evenly over the nodes.
        place: 0 to ranks - 1, the rank among those of this machine.
        allowed: the cores that the job may use, a set.
    """
    if how == "numa":
        nodes = numa_nodes(allowed, folder)
        return nodes[place * len(nodes) // ranks]
    cores, each = sorted(allowed), len(allowed) // ranks
    return set(cores[place * each:(place + 1) * each]) if each else {cores[place % len(cores)]}


def bind(env):
    """Tie this process, and what it starts, to its cores, if BIND_RANKS says so; the rank then leaves them as they are.

    mpirun says which of a machine's ranks this is; for the other launchers RANKS_LOCAL does: the first, and how many.
    """
    how, (first, ranks) = env.get("BIND_RANKS"), map(int, env.get("RANKS_LOCAL", "0 1").split())
    if how not in ("cores", "numa"):
        return
    env["BIND_RANKS"] = "no"
    if env.get("MS_ROLE") == "MS_SCHED":
        return
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:
        place, ranks = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    else:
        place = int(env.get("RANK_ID") or env["MS_NODE_ID"]) - first
    os.sched_setaffinity(0, share(how, place, ranks, os.sched_getaffinity(0)))
