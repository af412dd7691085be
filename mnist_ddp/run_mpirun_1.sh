#!/usr/bin/env bash
# Trains on several machines with mpirun, named on the command line; run it on one of them, which gets rank 0.
#     bash run_mpirun_1.sh -H HOST1:SLOTS,HOST2:SLOTS [DATA_PATH [N]] [--interface NAME] [-- options of train_ddp.py]
# SLOTS is the number of cards of a machine (or of processes, on CPU), DATA_PATH the folder of the MNIST files, the same
# on all machines (default: the variable DATA_PATH), N the number of processes (all slots), NAME the network interface
# to use. SSH is the ssh command, with its options (ssh). Logs: log_output/mpirun.log of all ranks, and, on the machine
# of the rank, log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the rank that failed.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"
# shellcheck source-path=SCRIPTDIR source=launch_hosts.sh
source "$HERE/launch_hosts.sh"

usage="usage: bash run_mpirun_1.sh -H HOST1:SLOTS,HOST2:SLOTS [DATA_PATH [N]] [--interface NAME] [-- options of train_ddp.py]"
[[ "${1:-}" != -h && "${1:-}" != --help ]] || { echo "$usage"; exit 0; }
[[ "${1:-}" == -H && -n "${2:-}" ]] || die "no machines given. $usage"
run_on_hosts -H "$2" "${@:3}"
