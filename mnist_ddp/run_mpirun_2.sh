#!/usr/bin/env bash
# Trains on several machines with mpirun, listed in a file. Run it on one of them: it gets rank 0.
#     bash run_mpirun_2.sh HOSTFILE [DATA_PATH [N]] [--interface NAME] [-- options of train_ddp.py]
# A line of HOSTFILE is HOST slots=NUMBER; # begins a comment. The rest is as in run_mpirun_1.sh.
# Example: bash run_mpirun_2.sh hostfile /path/MNIST_Data
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run_mpirun_2.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run_mpirun_2.sh HOSTFILE [DATA_PATH [N]] [--interface NAME] \
[-- options of train_ddp.py]"
RANK_SIZE="" HOSTFILE=""
if (($# > 0)) && [[ "$1" != -* ]]; then HOSTFILE="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then DATA_PATH="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi
export DATA_PATH

# mpirun -n 16 --hostfile HOSTFILE --output-filename log_output --merge-stderr-to-stdout \
#     python train_ddp.py, all machines checked before the start and watched until the end:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with mpirun --hostfile "$HOSTFILE" \
    --logs log_output --check --usage "$usage" "$HERE/train_ddp.py" "$@"
