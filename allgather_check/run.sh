#!/usr/bin/env bash
# Checks that N processes of this machine can communicate: N cards, or CPU processes if it has none.
#     bash run.sh [N]
# N is 4 unless given. Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, 1 for a
# wrong result. Example: bash run.sh 2
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run.sh [N]"
RANK_SIZE=4
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi

# mpirun -n 4 --output-filename log_output --merge-stderr-to-stdout python allgather_check.py,
# checked before the start (a rank takes 400 MB on CPU) and watched until all have ended:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with mpirun --logs log_output \
    --memory 400 --usage "$usage" "$HERE/allgather_check.py" "$@"
