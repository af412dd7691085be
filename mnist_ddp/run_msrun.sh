#!/usr/bin/env bash
# Trains on N processes with msrun, MindSpore's own launcher: no Open MPI, no ssh.
#     bash run_msrun.sh [DATA_PATH [N]] [-- options of train_ddp.py]
#     bash run_msrun.sh [DATA_PATH [N]] --nodes K --node-rank R --master-addr ADDRESS \
#         --master-port PORT [--wait SECONDS] [-- options of train_ddp.py]
# DATA_PATH is the folder of the MNIST files (default: the variable DATA_PATH), N the number of all
# processes (4). On K machines start it on each, with R from 0 to K-1; N / K processes run on each.
# ADDRESS is that of the machine with R = 0, PORT a free port there, SECONDS how long the machines
# wait for each other (120). Logs: log_msrun/worker_0.log, ...; of machine R log_msrun_R/.
# Exit code: 0, 2 for bad input, else that of the rank that failed.
# Example: bash run_msrun.sh /path/MNIST_Data 4 -- --epochs 2 --lr 0.1
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run_msrun.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run_msrun.sh [DATA_PATH [N]] [--nodes K --node-rank R --master-addr ADDRESS \
--master-port PORT] [--wait SECONDS] [-- options of train_ddp.py]"
RANK_SIZE=4
if (($# > 0)) && [[ "$1" != -* ]]; then DATA_PATH="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi
export DATA_PATH

# msrun --worker_num=4 --local_worker_num=4 --join=True --log_dir=log_msrun train_ddp.py,
# checked before the start (a rank takes 500 MB on CPU) and watched until all have ended:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --with msrun --logs log_msrun \
    --check --memory 500 --usage "$usage" "$HERE/train_ddp.py" "$@"
