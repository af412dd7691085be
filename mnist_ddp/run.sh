#!/usr/bin/env bash
# Trains on N processes of this machine with mpirun: N cards, or CPU processes if there is none.
#     bash run.sh [DATA_PATH [N]] [-- options of train_ddp.py]
# DATA_PATH is the folder of the MNIST files (default: the variable DATA_PATH), N the number of
# processes (4). Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of
# the rank that failed. Example: bash run.sh /path/MNIST_Data 4 -- --epochs 2 --lr 0.1
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run.sh [DATA_PATH [N]] [-- options of train_ddp.py]"
RANK_SIZE=4
if (($# > 0)) && [[ "$1" != -* ]]; then DATA_PATH="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi
export DATA_PATH

# mpirun -n 4 --output-filename log_output --merge-stderr-to-stdout python train_ddp.py,
# checked before the start (a rank takes 500 MB on CPU) and watched until all have ended:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with mpirun --logs log_output \
    --check --memory 500 --usage "$usage" "$HERE/train_ddp.py" "$@"
