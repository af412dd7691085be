#!/usr/bin/env bash
# Checks that N processes of this machine can communicate: N cards, or N CPU processes where there is no card.
#     bash run.sh [N]
# N is 4 unless given. Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, 1 for a wrong result.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=400 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

usage="usage: bash run.sh [N]"
[[ "${1:-}" != -h && "${1:-}" != --help ]] || { echo "$usage"; exit 0; }
(($# <= 1)) || die "too many arguments. $usage"
ranks="${1:-4}"
check_ranks "$ranks"
need_python
need_mpirun
run_under_mpirun "$ranks" "$HERE/allgather_check.py"
