#!/usr/bin/env bash
# run.sh for a pipeline: the layers are cut into stages, each on some cards. Used as run.sh is:
#     bash run_pipeline.sh DATA_PATH RANK_SIZE [-- options of its script]
#     bash run_pipeline.sh --dry-run [DATA_PATH] RANK_SIZE [-- options of its script]
# Example: bash run_pipeline.sh --dry-run 8
set -euo pipefail
# shellcheck disable=SC2034  # run.sh uses it
SCRIPT=resnet50_distributed_training_pipeline.py
# shellcheck source-path=SCRIPTDIR source=run.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run.sh"
