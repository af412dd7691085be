#!/usr/bin/env bash
# Trains on several machines with mpirun, named on the command line. Run it on one of them, which
# gets rank 0. Needs the folder tools/ beside this one; several_machines/ has a page on it.
#     bash run_mpirun_1.sh -H HOST1:SLOTS,HOST2:SLOTS [DATA_PATH [N]] [--interface NAME]
#         [-- options of train_ddp.py]
# SLOTS is the number of cards of a machine (or of processes, on CPU), DATA_PATH the folder of the
# MNIST files, the same on all machines (default: the variable DATA_PATH), N the number of processes
# (all slots), NAME the network interface to use. SSH is the ssh command, with its options (ssh).
# Logs: log_output/1/rank.0/stdout, ..., each on the machine of the rank.
# Exit code: 0, 2 for bad input, else that of the rank that failed.
# Example: bash run_mpirun_1.sh -H 10.0.0.1:8,10.0.0.2:8 /path/MNIST_Data
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run_mpirun_1.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run_mpirun_1.sh -H HOST1:SLOTS,HOST2:SLOTS [DATA_PATH [N]] [--interface NAME] \
[-- options of train_ddp.py]"
RANK_SIZE="" HOSTS=""
if [[ "${1:-}" == -H ]]; then HOSTS="${2:-}"; shift "$(($# < 2 ? $# : 2))"; fi
if (($# > 0)) && [[ "$1" != -* ]]; then DATA_PATH="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi
export DATA_PATH

# mpirun -n 16 -H HOST1:8,HOST2:8 --output-filename log_output --merge-stderr-to-stdout \
#     python train_ddp.py, all machines checked before the start and watched until the end:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with mpirun --hosts "$HOSTS" \
    --logs log_output --check --usage "$usage" "$HERE/train_ddp.py" "$@"
