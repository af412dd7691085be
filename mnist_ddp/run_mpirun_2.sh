#!/usr/bin/env bash
# Trains on several machines with mpirun, listed in a file; run it on one of them, which gets rank 0.
#     bash run_mpirun_2.sh HOSTFILE [DATA_PATH [N]] [--interface NAME] [-- options of train_ddp.py]
# A line of HOSTFILE is HOST slots=NUMBER; # begins a comment. The rest is as in run_mpirun_1.sh.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"
# shellcheck source-path=SCRIPTDIR source=launch_hosts.sh
source "$HERE/launch_hosts.sh"

usage="usage: bash run_mpirun_2.sh HOSTFILE [DATA_PATH [N]] [--interface NAME] [-- options of train_ddp.py]"
[[ "${1:-}" != -h && "${1:-}" != --help ]] || { echo "$usage"; exit 0; }
[[ -n "${1:-}" && "${1:-}" != -* ]] || die "no hostfile given. $usage"
run_on_hosts --hostfile "$1" "${@:2}"
