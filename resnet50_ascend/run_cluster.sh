#!/usr/bin/env bash
# Trains on the cards of several machines. Start it on each of them (or, as a rehearsal on a machine
# without cards, in several shells):
#     bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START [-- options of the script]
# or compile the Ascend graphs of that machine's ranks, without a card: with --dry-run in front.
# RANK_SIZE is the number of all ranks, RANK_START the first rank of this machine. The rank table
# says how many follow here, and which card each has. Rank 0 runs in device_0/, with train0.log and
# env0.log there. Variables: DEVICE_TARGET, STALL_MINUTES (30); on CPU and GPU MS_SCHED_HOST and
# MS_SCHED_PORT, the same everywhere: an address of the machine with rank 0 (127.0.0.1) and a free
# port there (28117). Exit code: 0, 2 for bad input, else that of the rank that failed first.
# Example, on the second machine: bash run_cluster.sh /path/dataset /path/rank_table.json 16 8
set -euo pipefail
HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
usage="bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START [-- options]"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run_cluster.sh: no python on the PATH; activate the environment" >&2; exit 2; }

options=(--with table --folder device_ --show first --check --usage "$usage")
[[ "${1:-}" != --dry-run ]] || { options+=(--dry-run) && shift; }
[[ "${1:-} ${2:-}" != @(-h|--help|-- --help)* ]] || set -- "" "" 1 0 "$@"
if (($# < 4)) || [[ " $1 $2 $3 $4" == *" --"* ]]; then
    echo "run_cluster.sh: please run the script as: $usage
For example: bash run_cluster.sh /path/dataset /path/rank_table.json 16 0
The time interval between multiple machines to execute the script should not exceed 120s" >&2
    exit 2
fi
export DATA_PATH="$1" RANK_TABLE_FILE="$2"
RANK_SIZE="$3" RANK_START="$4" && shift 4
# For each rank of this machine, with RANK_SIZE, RANK_ID, DEVICE_ID and RANK_TABLE_FILE:
#     mkdir device_0; cd device_0; python resnet50_distributed_training.py >train0.log 2>&1
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --table "$RANK_TABLE_FILE" \
    --first "$RANK_START" "${options[@]}" "$HERE/resnet50_distributed_training.py" "$@"
