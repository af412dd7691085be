#!/usr/bin/env bash
# Trains on N cards of this machine, or rehearses with N CPU processes where there is no card:
#     bash run.sh DATA_PATH RANK_SIZE [--no-sink] [--restarts N] [-- options of the script]
# or compiles all ranks' Ascend graphs, without a card:
#     bash run.sh --dry-run [DATA_PATH] RANK_SIZE [-- options of the script]
# DATA_PATH is the folder cifar-10-batches-bin. Rank 0 runs in device0/, with train.log0 and
# env0.log there. Variables: DEVICE_TARGET (Ascend, GPU, CPU), RANK_TABLE_FILE, STALL_MINUTES (30).
# Exit code: 0, 2 for bad input, else the failed rank's. Example: bash run.sh /path/dataset 8
set -euo pipefail
HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
[[ "${BASH_SOURCE[0]}" != "$0" ]] || SCRIPT=resnet50_distributed_training.py # run_*.sh have others
usage="bash ${0##*/} DATA_PATH RANK_SIZE [--no-sink] [--restarts N] [-- options of $SCRIPT]"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "${0##*/}: no python on the PATH; activate the environment" >&2; exit 2; }

options=(--with table --folder device --show first --check --usage "$usage")
[[ "$SCRIPT" == *accumulation* ]] || options+=(--plan) # on CPU: its modes, computed from a plan
if [[ "${1:-}" == --dry-run ]]; then
    options+=(--dry-run) && shift
    [[ "${2:-}" == [0-9]* ]] || set -- "" "$@" # no DATA_PATH: a stand-in
fi
[[ "${1:-} ${2:-}" != @(-h|--help|-- --help)* ]] || set -- "" 1 "$@"
(($# > 1)) && [[ " $1 $2" != *" --"* ]] ||
    { echo "please run the script as: $usage, such as: bash ${0##*/} /path/dataset 8" >&2; exit 2; }
export DATA_PATH="$1"
RANK_SIZE="$2" && shift 2
if [[ "${1:-}" == --no-sink ]]; then # operators one by one; mpirun instead of a rank table
    export GRAPH_OP_RUN=1 HCCL_WHITELIST_DISABLE=1
    unset RANK_TABLE_FILE && shift
    [[ " $* " == *" -- "* ]] || set -- "$@" --
    options+=(--with mpirun) && set -- "$@" --no-sink
fi
# For each rank, with RANK_SIZE, RANK_ID, DEVICE_ID and RANK_TABLE_FILE:
#     mkdir device0; cd device0; python resnet50_distributed_training.py >train.log0 2>&1
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" "${options[@]}" "$HERE/$SCRIPT" "$@"
