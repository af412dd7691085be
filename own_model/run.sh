#!/usr/bin/env bash
# Trains on N processes of this machine with mpirun: N cards, or N CPU processes where there is no card.
#     bash run.sh [N] [-- options of train_distributed.py]
# N is 2 unless given. Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the rank that
# failed. To start a script of your own: change SCRIPT.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=400 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

SCRIPT="$HERE/train_distributed.py"
usage="usage: bash run.sh [N] [-- options of ${SCRIPT##*/}]"
[[ "${1:-}" != -h && "${1:-}" != --help ]] || { echo "$usage"; exit 0; }
ranks=2
if (($# > 0)) && [[ "$1" != -- ]]; then
    ranks="$1"
    shift
fi
(($# == 0)) || [[ "$1" == -- ]] || die "options of ${SCRIPT##*/} go after --. $usage"
(($# == 0)) || shift # the --
check_ranks "$ranks"
need_python
need_mpirun
run_under_mpirun "$ranks" "$SCRIPT" "$@"
