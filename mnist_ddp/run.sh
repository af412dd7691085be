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
need_mpirun
"$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" --check "$@"
run_under_mpirun "$ranks" "$HERE/train_ddp.py" --data-path "$data_path" "$@"
