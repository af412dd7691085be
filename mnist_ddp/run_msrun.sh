#!/usr/bin/env bash
# Trains on N processes of this machine with msrun, MindSpore's own launcher: no Open MPI needed. N cards, or N CPU processes where there is no card.
#     bash run_msrun.sh [DATA_PATH [N]] [-- options of train_ddp.py]
# DATA_PATH is the folder of the MNIST files (default: the variable DATA_PATH), N the number of processes (4).
# Logs: log_msrun/worker_0.log, ... and scheduler.log. Exit code: 0, 2 for bad input, else that of the rank that failed.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=500 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

usage="usage: bash run_msrun.sh [DATA_PATH [N]] [-- options of train_ddp.py]"
arguments=()
while (($# > 0)) && [[ "$1" != -- ]]; do
    [[ "$1" != -h && "$1" != --help ]] || { echo "$usage"; exit 0; }
    [[ "$1" != -* ]] || die "unknown option $1; options of train_ddp.py go after --. $usage"
    arguments+=("$1")
    shift
done
(($# == 0)) || shift # the --
((${#arguments[@]} <= 2)) || die "too many arguments. $usage"
data_path="${arguments[0]:-${DATA_PATH:-}}"
ranks="${arguments[1]:-4}"

[[ -n "$data_path" ]] || die "no data set: give its folder or set DATA_PATH. $usage"
check_ranks "$ranks"
need_python
need_command msrun "it comes with MindSpore: activate the environment (. .venv/bin/activate)"
"$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" --check "$@"
new_folder log_msrun
[[ "$(device_target)" != CPU ]] || share_cores "$ranks"

LAUNCHER_LOG=log_msrun/msrun.log
# --local_worker_num is 8 unless given, --master_port 8118 (often taken); without --join msrun would not wait.
start msrun --worker_num="$ranks" --local_worker_num="$ranks" --master_port="$(free_port)" --join=True \
    --log_dir=log_msrun --tail_worker_log=0 "$HERE/train_ddp.py" --data-path "$data_path" "$@"
for ((rank = 0; rank < ranks; rank++)); do
    logs[rank]="log_msrun/worker_$rank.log"
    follow "$rank" "${logs[rank]}"
done

# msrun names a failed worker by its process id, and ends late: it waits for its scheduler. So note which process
# is which rank, and end the job as soon as msrun has seen a failure.
code=0
failed=""
declare -A rank_of
while kill -0 "$launcher_pid" 2>/dev/null; do
    for pid in $(ps -o pid= --ppid "$launcher_pid" || true); do
        [[ -n "${rank_of[$pid]:-}" ]] ||
            rank_of[$pid]="$(tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | sed -n 's/^MS_NODE_ID=//p' || true)"
    done
    read -r pid code < <(sed -nE 's/.*Worker process ([0-9]+) exit with exception. Error code: (-?[0-9]+).*/\1 \2/p' \
        "$LAUNCHER_LOG") || true
    if [[ -n "$pid" ]]; then
        failed="${rank_of[$pid]:-}"
        ((code > 0)) || code=$((128 - code)) # ended by a signal: 137 for kill -9, as in a shell
        end_launcher
        break
    fi
    sleep 0.3
done
[[ -n "$failed" ]] || wait "$launcher_pid" || code=$?
finish "$code" "$failed" "${logs[@]}"
