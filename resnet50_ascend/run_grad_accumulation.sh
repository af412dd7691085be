#!/usr/bin/env bash
# run.sh for gradient accumulation: large batches in small pieces. All as in run.sh.
#     bash run_grad_accumulation.sh DATA_PATH RANK_SIZE [-- options of resnet50_distributed_training_grad_accumulation.py]
#     bash run_grad_accumulation.sh --dry-run [DATA_PATH] RANK_SIZE [-- options]
set -euo pipefail
# shellcheck disable=SC2034  # run.sh uses it
SCRIPT=resnet50_distributed_training_grad_accumulation.py
# shellcheck source-path=SCRIPTDIR source=run.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/run.sh"
