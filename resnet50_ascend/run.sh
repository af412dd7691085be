#!/usr/bin/env bash
# Trains on N cards of this machine, or rehearses with N CPU processes where there is no card.
#     bash run.sh DATA_PATH RANK_SIZE [--no-sink] [--restarts N] [-- options of resnet50_distributed_training.py]
#     bash run.sh --dry-run [DATA_PATH] RANK_SIZE [-- options], to compile all ranks' Ascend graphs here, without a card
# DATA_PATH is the folder cifar-10-batches-bin. Each rank runs in deviceN/, with envN.log and train.logN there.
# --no-sink hands the data over step by step and starts the ranks with mpirun, without a rank table.
# --restarts N: after a failure all ranks start again, up to N times, from what they saved in --ckpt-dir.
# Variables: DEVICE_TARGET (Ascend, GPU, CPU), RANK_TABLE_FILE (else rank_tables/rank_table_<N>pcs.json),
# STALL_MINUTES (30). Exit code: 0, 2 for bad input, else that of the rank that failed first.
set -euo pipefail

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"
PYTHON="$(command -v python || command -v python3)" ||
    { echo "${0##*/}: no python on the PATH; activate the environment" >&2; exit 2; }
[[ "${BASH_SOURCE[0]}" != "$0" ]] || SCRIPT=resnet50_distributed_training.py # run_pipeline.sh has another
usage="bash ${0##*/} DATA_PATH RANK_SIZE [--no-sink] [--restarts N] [--dry-run] [-- options of $SCRIPT]"

arguments=() options=(--with table) no_sink=()
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        --no-sink) # operators one by one; mpirun instead of a list of known servers
            export GRAPH_OP_RUN=1 HCCL_WHITELIST_DISABLE=1
            unset RANK_TABLE_FILE
            no_sink=(--no-sink) options+=(--with mpirun) ;;
        --restarts) options+=("$1" "${2:-}"); shift ;;
        -*) options+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift || true
done
[[ "${options[*]}" != *--dry-run* ]] || ((${#arguments[@]} != 1)) || arguments=("" "${arguments[0]}")
((${#arguments[@]} == 2)) || [[ "${options[*]}" == *-h* ]] || {
    echo "${0##*/}: it takes DATA_PATH and RANK_SIZE, not ${#arguments[@]} arguments. Please run the script as:
$usage
For example: bash ${0##*/} /path/dataset 8" >&2
    exit 2
}
export DATA_PATH="${arguments[0]:-}"
RANK_SIZE="${arguments[1]:-}"
# Each rank with RANK_ID, RANK_SIZE, DEVICE_ID and RANK_TABLE_FILE, in its folder:
#     cd device0; python resnet50_distributed_training.py >train.log0 2>&1
exec "$PYTHON" "$HERE/ranks.py" -n "$RANK_SIZE" --folder device --show first --check --usage "$usage" \
    "${options[@]}" "$HERE/$SCRIPT" -- "${no_sink[@]}" "${@:2}"
