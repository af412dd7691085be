"""Has a launcher that MindSpore does not know started this process, and others like it? For in_rank.py, launch.py."""

import os

LAUNCHERS = {  # what they tell each process: how many there are, and which it is
    "mpirun or mpiexec of MPICH or Intel MPI": ("PMI_SIZE", "PMI_RANK"),
    "torchrun, or another one of PyTorch's": ("WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


def several():
    """None, or ("SIZE=4 and RANK say that NAME", "4", "SIZE RANK", True for the first of the 4)."""
    for launcher, (size, rank) in LAUNCHERS.items():
        count = os.getenv(size, "1")
        if rank in os.environ and count not in ("0", "1"):
            return f"{size}={count} and {rank} say that {launcher}", count, f"{size} {rank}", os.environ[rank] == "0"
    return None


def refuse_launchers(all_here):
    """ValueError if several launchers were started that start all ranks each; one on each of several machines may be.

    Only the first has words for it.
    """
    if all_here and (found := several()):
        says, count, names, is_first = found
        raise ValueError(f"{says} has started {count} of this launcher, and each starts all ranks: leave it out; if "
                         f"only this one runs: unset {names}" if is_first else "")
