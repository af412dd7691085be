#!/usr/bin/env bash
# The tutorial's command; the lesson's own launcher does the work.
set -euo pipefail
exec bash "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/resnet50_gpu/run_gpu.sh" "$@"
