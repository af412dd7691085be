#!/usr/bin/env bash
# Trains on the cards of several machines: start it on each of them, or in several shells of a machine without cards
# as a rehearsal with CPU processes.
#     bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START [-- options of resnet50_distributed_training.py]
#     bash run_cluster.sh --dry-run DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START    compiles their Ascend graphs here
# RANK_SIZE is the number of all ranks, RANK_START the first rank of this machine. The rank table says how many ranks
# follow it here and which card each of them has. Each runs in device_N/, with envN.log and trainN.log there.
# Variables: DEVICE_TARGET (Ascend, GPU, CPU), STALL_MINUTES (30); on CPU and GPU MS_SCHED_HOST and MS_SCHED_PORT, the
# same on all machines: an address of the machine with rank 0 (127.0.0.1) and a free port there (28117).
# Exit code: 0, 2 for bad input, else that of the rank that failed first.
set -euo pipefail

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"
PYTHON="$(command -v python || command -v python3)" ||
    { echo "run_cluster.sh: no python on the PATH; activate the environment" >&2; exit 2; }
SCRIPT="$HERE/resnet50_distributed_training.py"
usage="bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START [--dry-run] [-- options of ${SCRIPT##*/}]"

options=()
while (($# > 0)) && [[ "$1" == --* && "$1" != -- ]]; do
    options+=("$1")
    shift
done
if (($# < 4)) || [[ "$1 $2 $3 $4" == *--* ]]; then
    [[ "${options[*]:-}" == *--help* ]] || {
        echo "run_cluster.sh: it takes DATA_PATH, RANK_TABLE_FILE, RANK_SIZE and RANK_START. Please run the script as:
$usage
For example: bash run_cluster.sh /path/dataset /path/rank_table.json 16 0
The time interval between multiple machines to execute the script should not exceed 120s" >&2
        exit 2
    }
    exec "$PYTHON" "$HERE/ranks.py" -n 0 --usage "$usage" --help
fi
export DATA_PATH="$1"
RANK_TABLE_FILE="$2" RANK_SIZE="$3" RANK_START="$4"
# Each rank of this machine with RANK_ID, RANK_SIZE, DEVICE_ID and RANK_TABLE_FILE, in its folder:
#     cd device_0; python resnet50_distributed_training.py >train0.log 2>&1
exec "$PYTHON" "$HERE/ranks.py" -n "$RANK_SIZE" --with table --table "$RANK_TABLE_FILE" --first "$RANK_START" \
    --folder device_ --show first --check --usage "$usage" "${options[@]}" "$SCRIPT" "${@:5}"
