#!/usr/bin/env bash
# Trains on N NVIDIA cards of this machine, or rehearses with N CPU processes where there is no card.
#     bash run_gpu.sh DATA_PATH [N] [--launcher mpirun|msrun] [--background] [-- options of resnet50_distributed_training_gpu.py]
# DATA_PATH is the folder cifar-10-batches-bin; N the number of processes (default: the cards that are visible, 2 on a
# machine without cards). All happens in the folder device/: train.log has the lines of all ranks, log_output/1/rank.N/
# (mpirun) or log_msrun/ (msrun) those of each. --background returns at once; device/train.pid is the PID to end it.
# Variables: CUDA_VISIBLE_DEVICES, DEVICE_TARGET (GPU, CPU). Exit code: 0, 2 for bad input, else that of the failed rank.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SCRIPT="$HERE/resnet50_distributed_training_gpu.py"
export MB_PER_RANK=1200 # what one rank takes at least
export LAUNCH_DIR="$PWD" # ranks run in device/; a relative --ckpt-dir means this folder
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"
# shellcheck source-path=SCRIPTDIR source=memory.sh
source "$HERE/memory.sh"

usage="usage: bash run_gpu.sh DATA_PATH [N] [--launcher mpirun|msrun] [--background] [-- options of ${SCRIPT##*/}]"
arguments=() launcher=mpirun background=""
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --background) background=yes ;;
        --launcher) launcher="${2:-}"; (($# == 1)) || shift ;;
        --launcher=*) launcher="${1#*=}" ;;
        -*) die "unknown option $1; options of ${SCRIPT##*/} go after --. $usage" ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
(($# == 0)) || shift # the --

# choose_cards: what the ranks will run on, DEVICE_TARGET, and which cards are visible to them.
choose_cards() {
    local listing cards entry seen=" "
    listing="$(nvidia-smi -L 2>/dev/null | grep '^GPU' || true)"
    cards="$(grep -c . <<<"$listing" || true)"
    [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]] || CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((cards - 1)))"
    if [[ "$CUDA_VISIBLE_DEVICES" =~ ^(-1)?$ ]]; then # none, or the usual ways to hide all cards
        cards=0
    elif [[ "$CUDA_VISIBLE_DEVICES" =~ ^([0-9]+|GPU-[0-9a-f-]+)(,([0-9]+|GPU-[0-9a-f-]+))*$ ]]; then
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    else
        die "CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES'; write numbers of cards with commas between them, such as 2,3"
    fi
    for entry in "${visible[@]}"; do
        [[ "$seen" != *" $entry "* ]] || die "CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES' and names $entry twice"
        seen+="$entry "
        ((cards == 0)) || grep -qE "^GPU $entry:|UUID: $entry" <<<"$listing" ||
            die "CUDA_VISIBLE_DEVICES names card $entry, which nvidia-smi -L does not list; it lists $cards, numbered from 0"
    done
    if [[ -z "${DEVICE_TARGET:-}" ]]; then
        ((cards > 0)) && DEVICE_TARGET=GPU || DEVICE_TARGET=CPU
    fi
    [[ "$DEVICE_TARGET" =~ ^(GPU|CPU)$ ]] || die "DEVICE_TARGET is '$DEVICE_TARGET'; write GPU or CPU"
    export DEVICE_TARGET
}

# train OPTION...: run the ranks in device/ to the end and exit with their code.
train() {
    if [[ "$launcher" == mpirun ]]; then
        run_under_mpirun "$ranks" "$SCRIPT" "$@"
    else
        run_under_msrun "$@"
    fi
}

# run_under_msrun OPTION...: as run_under_mpirun does it.
run_under_msrun() {
    local rank pid code=0 failed="" logs=()
    local -A rank_of=()
    new_folder log_msrun
    [[ "$DEVICE_TARGET" != CPU ]] || share_cores "$ranks"
    LAUNCHER_LOG=log_msrun/msrun.log
    start msrun --worker_num="$ranks" --local_worker_num="$ranks" --master_port="$(free_port)" --join=True \
        --log_dir=log_msrun --tail_worker_log=0 "$SCRIPT" "$@"
    for ((rank = 0; rank < ranks; rank++)); do
        logs[rank]="log_msrun/worker_$rank.log"
        follow "$rank" "${logs[rank]}"
    done
    # msrun names a failed worker by its process id and ends late: note which process is which rank, end the job here.
    while kill -0 "$launcher_pid" 2>/dev/null; do
        for pid in $(ps -o pid= --ppid "$launcher_pid" || true); do
            [[ -n "${rank_of[$pid]:-}" ]] ||
                rank_of[$pid]="$(tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | sed -n 's/^MS_NODE_ID=//p' || true)"
        done
        read -r pid code < <(sed -nE 's/.*Worker process ([0-9]+) exit with exception. Error code: (-?[0-9]+).*/\1 \2/p' \
            "$LAUNCHER_LOG") || true
        if [[ -n "$pid" ]]; then
            failed="${rank_of[$pid]:-}"
            ((code > 0)) || code=$((128 - code)) # ended by a signal: 137 for kill -9, as in a shell
            end_launcher
            break
        fi
        sleep 0.3
    done
    ((code != 0)) || wait "$launcher_pid" || code=$?
    finish "$code" "$failed" "${logs[@]}"
}

# ---------------------------------------------------------------------- check everything before the start
((${#arguments[@]} == 1 || ${#arguments[@]} == 2)) || die "it takes DATA_PATH and N. $usage"
[[ "$launcher" =~ ^(mpirun|msrun)$ ]] || die "--launcher is '$launcher'; write mpirun or msrun"
visible=()
choose_cards
ranks="${arguments[1]:-}"
if [[ -z "$ranks" ]]; then
    ranks=$((${#visible[@]} > 0 ? ${#visible[@]} : 2))
fi
check_ranks "$ranks"
need_python
if [[ "$launcher" == mpirun ]]; then
    need_mpirun
else
    need_command msrun "it comes with MindSpore: activate the environment (. .venv/bin/activate)"
fi
DATA_PATH="${arguments[0]}"
[[ ! -d "$DATA_PATH" ]] || DATA_PATH="$(cd "$DATA_PATH" && pwd)"
export DATA_PATH
if [[ "$DEVICE_TARGET" == GPU ]]; then
    ((${#visible[@]} >= ranks)) || die "$ranks ranks need $ranks cards, ${#visible[@]} are visible (CUDA_VISIBLE_DEVICES, nvidia-smi -L); \
start fewer, or rehearse on the CPU with DEVICE_TARGET=CPU"
    why="$("$PYTHON" "$HERE/gpu_libraries.py" 2>&1)" ||
        die "MindSpore cannot use the cards; $(tail -n 1 <<<"$why"). DEVICE_TARGET=CPU rehearses without"
    export CUDA_VISIBLE_DEVICES
elif [[ -z "${ONEDNN_MAX_CPU_ISA:-}" ]] && grep -qm1 avx512f /proc/cpuinfo; then
    export ONEDNN_MAX_CPU_ISA=AVX2 # with AVX-512 MindSpore's convolutions are several times slower
fi
"$PYTHON" "$SCRIPT" "$@" --check || exit 2
[[ "$DEVICE_TARGET" == GPU ]] || MB_PER_RANK="$(mb_per_rank "$@")" check_ranks "$ranks"

# ------------------------------------------------------------------------------------------ start and watch
new_folder device
cd device
if [[ -n "$background" ]]; then
    ( # as nohup does it: a closed terminal does not end it
        trap '' HUP
        trap end_launcher EXIT
        trap 'exit 143' TERM
        echo "$BASHPID" >train.pid
        train "$@"
    ) </dev/null >train.log 2>&1 &
    echo "start training on $DEVICE_TARGET, $ranks ranks, in the background, PID $!"
    echo "follow it: tail -f device/train.log    end it: kill $!    (the PID is also in device/train.pid)"
    exit 0
fi
exec > >(exec tee -i train.log) 2>&1
writer=$!
trap 'end_launcher; exec >&- 2>&-; wait "$writer" || true' EXIT # the last lines are written before this script ends
echo "start training on $DEVICE_TARGET, $ranks ranks"
train "$@"
