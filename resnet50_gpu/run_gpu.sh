#!/usr/bin/env bash
# Trains on N NVIDIA cards of this machine, or rehearses with N CPU processes where there is none.
#     bash run_gpu.sh [DATA_PATH [N]] [--launcher msrun] [--background] [-- options of the script]
# DATA_PATH is the folder cifar-10-batches-bin (or the variable DATA_PATH); N the number of
# processes (the visible cards, 2 without a card). The script, resnet50_distributed_training_gpu.py,
# runs in the folder device/: train.log has the lines of all ranks, log_output/1/rank.N/stdout
# (mpirun) or log_msrun/worker_N.log (msrun) those of each. --background returns at once; to end it:
# kill "$(cat device/train.pid)". Variables: CUDA_VISIBLE_DEVICES, DEVICE_TARGET (GPU, CPU).
# Exit code: 0, 2 for bad input, else that of the rank that failed first.
# Example: bash run_gpu.sh /path/dataset 2 -- --sync-bn
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run_gpu.sh: no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run_gpu.sh [DATA_PATH [N]] [--launcher mpirun|msrun] [--background] \
[-- options of resnet50_distributed_training_gpu.py]"
RANK_SIZE=""
if (($# > 0)) && [[ "$1" != -* ]]; then DATA_PATH="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then RANK_SIZE="$1"; shift; fi
cards="$("$PYTHON" "$HERE/gpu_libraries.py" --ranks "$RANK_SIZE")" || exit 2
read -r cards DEVICE_TARGET <<<"${cards##*$'\n'}"
export DATA_PATH DEVICE_TARGET
if [[ -z "$RANK_SIZE" ]]; then RANK_SIZE="$((cards > 0 ? cards : 2))"; fi

# mpirun -n 8 --output-filename log_output --merge-stderr-to-stdout python SCRIPT, in the new folder
# device/, checked before and watched:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$RANK_SIZE" --in device --check --usage "$usage" \
    "$HERE/resnet50_distributed_training_gpu.py" "$@"
