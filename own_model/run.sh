#!/usr/bin/env bash
# Trains on N processes of this machine with mpirun: N cards, or CPU processes if there is none.
#     bash run.sh [N] [-- options of train_distributed.py]
# N is 2 unless given. Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else
# that of the rank that failed. To start a script of your own: change SCRIPT.
# Example: bash run.sh 4 --show first
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run.sh: no python on the PATH; activate the environment" >&2; exit 2; }
SCRIPT="$HERE/train_distributed.py"
usage="bash run.sh [N] [-- options of ${SCRIPT##*/}]"
RANK_SIZE=2
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi

# mpirun -n 2 --output-filename log_output --merge-stderr-to-stdout python train_distributed.py,
# checked before the start (a rank takes 400 MB on CPU) and watched until all have ended:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with mpirun --logs log_output \
    --memory 400 --usage "$usage" "$SCRIPT" "$@"
