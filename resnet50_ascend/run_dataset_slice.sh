#!/usr/bin/env bash
# run.sh for sliced pictures: each card reads a strip of every picture. Used as run.sh is:
#     bash run_dataset_slice.sh DATA_PATH RANK_SIZE [-- options of its script]
#     bash run_dataset_slice.sh --dry-run [DATA_PATH] RANK_SIZE [-- options of its script]
# Example: bash run_dataset_slice.sh --dry-run 8
set -euo pipefail
# shellcheck disable=SC2034  # run.sh uses it
SCRIPT=resnet50_distributed_training_dataset_slice.py
# shellcheck source-path=SCRIPTDIR source=run.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run.sh"
