#!/usr/bin/env bash
# Trains in one of the parallel modes on N processes of this machine: N cards, or N CPU processes where there is none.
#     bash run.sh MODE N [-- options of parallel_modes.py]
#     bash run.sh MODE N --dry-run [-- options of parallel_modes.py]     compile all ranks' Ascend graphs, without a card
# MODE is data_parallel, hybrid_parallel, or, not on CPU, semi_auto_parallel or auto_parallel.
# Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the rank that failed.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=500 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

usage="usage: bash run.sh MODE N [--dry-run] [-- options of parallel_modes.py]"
arguments=()
dry_run=""
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --dry-run) dry_run=yes ;;
        -*) die "unknown option $1; options of parallel_modes.py go after --. $usage" ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
(($# == 0)) || shift # the --
((${#arguments[@]} == 2)) || die "it takes MODE and N, not ${#arguments[@]} arguments. $usage"
ranks="${arguments[1]}"
script=("$HERE/parallel_modes.py" --mode "${arguments[0]}" "$@")

check_ranks "$ranks"
need_python
if [[ -n "$dry_run" ]]; then
    tool="$HERE/../dry_run/dry_run.py"
    [[ -f "$tool" ]] || die "--dry-run needs the folder dry_run/ beside ${HERE##*/}/; copy it there"
    MS_SIMULATION_LEVEL=0 "$PYTHON" "${script[@]}" --check "$ranks"
    exec "$PYTHON" "$tool" --rank-size "$ranks" "${script[@]}"
fi
need_mpirun
"$PYTHON" "${script[@]}" --check "$ranks"
run_under_mpirun "$ranks" "${script[@]}"
