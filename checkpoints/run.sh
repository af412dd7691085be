#!/usr/bin/env bash
# Trains on N processes of this machine, cards or CPU processes, and starts again after failures.
#     bash run.sh MODE N [--restarts R] -- --ckpt-dir DIR [more options of train.py]
#     bash run.sh MODE N --dry-run [-- options]     compile all ranks' Ascend graphs, without a card
# MODE is data_parallel, hybrid_parallel or semi_auto_parallel. Up to R times all ranks start again
# with --resume if-saved: from what all of them have saved, or from the beginning.
# Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the failed rank.
# Example: bash run.sh data_parallel 2 --restarts 3 -- --ckpt-dir ckpt
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run.sh: there is no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run.sh MODE N [--restarts R] [--dry-run] [-- options of train.py]"
mode="" ranks="" options=() # options: of ranks.py; those behind -- are of the script
if (($# > 0)) && [[ "$1" != -* ]]; then mode="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then ranks="$1"; shift; fi
while (($# > 0)) && [[ "$1" != -- ]]; do options+=("$1"); shift; done
(($# == 0)) || shift
[[ -n "$ranks" || " ${options[*]} $* " == *" -h "* || " ${options[*]} $* " == *" --help "* ]] ||
    { echo "run.sh: it takes MODE and N. Usage: $usage" >&2; exit 2; }

# mpirun -n N --output-filename log_output python train.py --mode MODE ..., checked and watched:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$ranks" --with mpirun --check --plan --usage "$usage" \
    "$HERE/train.py" "${options[@]}" -- --mode "$mode" "$@"
