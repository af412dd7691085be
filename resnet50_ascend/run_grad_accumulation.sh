#!/usr/bin/env bash
# run.sh for gradient accumulation: large batches in small pieces. Used as run.sh is:
#     bash run_grad_accumulation.sh DATA_PATH RANK_SIZE [-- options of its script]
#     bash run_grad_accumulation.sh --dry-run [DATA_PATH] RANK_SIZE [-- options of its script]
# Example: bash run_grad_accumulation.sh --dry-run 8
set -euo pipefail
# shellcheck disable=SC2034  # run.sh uses it
SCRIPT=resnet50_distributed_training_grad_accumulation.py
# shellcheck source-path=SCRIPTDIR source=run.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run.sh"
