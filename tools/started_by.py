"""Has a launcher that MindSpore does not know started this process, and others like it? For in_rank.py, launch.py."""

import os

LAUNCHERS = {  # what they tell each process: how many there are, and which it is
    "mpirun or mpiexec of MPICH or Intel MPI": ("PMI_SIZE", "PMI_RANK"),
    "torchrun, or another one of PyTorch's": ("WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


def several():
    """None, or ("SIZE=4 and RANK say that NAME", "4", "SIZE RANK", what those after the first of the 4 say, or "")."""
    for launcher, (size, rank) in LAUNCHERS.items():
        count = os.getenv(size, "1")
        if rank in os.environ and count not in ("0", "1"):
            says, first = f"{size}={count} and {rank} say that {launcher}", os.environ[rank] == "0"
            later = "" if first else (f"{says} has started {count} of this, and the first one says what to do; if only "
                                      f"this one runs: unset {size} {rank}")
            return says, count, f"{size} {rank}", later
    return None


def refuse_launchers(all_here):
    """ValueError if several launchers were started that start all ranks each; one on each machine may be."""
    if all_here and (found := several()):
        says, count, names, later = found
        raise ValueError(later or f"{says} has started {count} of this launcher, and each starts all ranks: leave it "
                         f"out; if only this one runs: unset {names}")
