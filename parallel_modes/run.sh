#!/usr/bin/env bash
# Trains in one of the parallel modes on N processes of this machine: N cards, or N CPU processes.
#     bash run.sh MODE N [-- options of parallel_modes.py]
#     bash run.sh MODE N --dry-run [-- options]     compile all ranks' Ascend graphs, without a card
# MODE is data_parallel, hybrid_parallel, semi_auto_parallel or auto_parallel.
# Logs: log_output/1/rank.0/stdout, ... Exit code: 0, 2 for bad input, else that of the failed rank.
# Example: bash run.sh semi_auto_parallel 4 -- --slices 2
set -euo pipefail

HERE="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
PYTHON="$(type -P python || type -P python3)" ||
    { echo "run.sh: there is no python on the PATH; activate the environment" >&2; exit 2; }
usage="bash run.sh MODE N [--dry-run] [-- options of parallel_modes.py]"
mode="" ranks="" options=() # options: of ranks.py; those behind -- are of the script
if (($# > 0)) && [[ "$1" != -* ]]; then mode="$1"; shift; fi
if (($# > 0)) && [[ "$1" != -* ]]; then ranks="$1"; shift; fi
while (($# > 0)) && [[ "$1" != -- ]]; do options+=("$1"); shift; done
(($# == 0)) || shift
[[ -n "$ranks" || " ${options[*]} $* " == *" -h "* || " ${options[*]} $* " == *" --help "* ]] ||
    { echo "run.sh: it takes MODE and N. Usage: $usage" >&2; exit 2; }

# mpirun -n N --output-filename log_output python parallel_modes.py --mode MODE, and watch it:
exec "$PYTHON" -I "$HERE/ranks.py" -n "$ranks" --with mpirun --check --plan --usage "$usage" \
    "$HERE/parallel_modes.py" "${options[@]}" -- --mode "$mode" "$@"
