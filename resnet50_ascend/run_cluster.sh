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

# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
SCRIPT="$HERE/resnet50_distributed_training.py"

usage="Please run the script as:
bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START [-- options of ${SCRIPT##*/}]
bash run_cluster.sh --dry-run DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START, to compile these Ascend graphs here
For example: bash run_cluster.sh /path/dataset /path/rank_table.json 16 0
It is better to use the absolute path.
The time interval between multiple machines to execute the script should not exceed 120s"
arguments=()
dry_run=""
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --dry-run) dry_run=yes ;;
        -*) die "unknown option $1; options of ${SCRIPT##*/} go after --
$usage" ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
(($# == 0)) || shift # the --
((${#arguments[@]} == 4)) || die "it takes DATA_PATH, RANK_TABLE_FILE, RANK_SIZE and RANK_START, not \
${#arguments[@]} arguments
$usage"
table="${arguments[1]}" ranks="${arguments[2]}" first="${arguments[3]}"

# ---------------------------------------------------------------------- check everything before the start
check_size "$ranks"
need_python

device_of=() server_of=()
read_table "$table" "$ranks"
starts=() mine=()
for rank in "${!server_of[@]}"; do
    ((rank > 0)) && [[ "${server_of[rank]}" == "${server_of[rank - 1]}" ]] || starts+=("$rank")
done
[[ " ${starts[*]} " == *" $first "* ]] ||
    die "RANK_START is '$first', but the servers of $table start with rank ${starts[*]}; give the one of this machine"
for rank in "${!server_of[@]}"; do
    [[ "${server_of[rank]}" != "${server_of[first]}" ]] || mine+=("$rank")
done
[[ -z "$dry_run" ]] || dry_run "$ranks" "${mine[0]}-${mine[-1]}" "${arguments[0]}" "$SCRIPT" "$@"
read_settings
[[ "$DEVICE_TARGET" != Ascend ]] || server_is_here "${server_of[first]}" ||
    die "the ranks from $first on belong to server ${server_of[first]}, which is no address of this machine; start them there"
[[ "$DEVICE_TARGET" == Ascend ]] || ((first > 0)) || choose_port 28117
check_data "${arguments[0]}" "$SCRIPT" "$@"
MB_PER_RANK="$(mb_per_rank "$@")" prepare_target "${mine[@]}"

# ------------------------------------------------------------------------------------------ start and watch
folders=()
for rank in "${mine[@]}"; do
    folders+=("device_$rank")
done
move_aside "${folders[@]}"
if [[ "$DEVICE_TARGET" != Ascend ]]; then
    if ((first == 0)); then
        start_scheduler "$ranks" device_0
    else
        export MS_SCHED_HOST="${MS_SCHED_HOST:-127.0.0.1}" MS_SCHED_PORT="${MS_SCHED_PORT:-28117}"
        await_scheduler 120
    fi
fi
for rank in "${mine[@]}"; do
    start_rank "$rank" "$ranks" "device_$rank" "train$rank.log" "$PYTHON" "$SCRIPT" "$@"
done
show_first_rank
watch
finish
