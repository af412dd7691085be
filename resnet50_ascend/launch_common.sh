# What the launchers of this lesson share: checks before the start, starting ranks, and the one piece that watches
# over them until the end. Sourced, not run.
# shellcheck shell=bash

SELF="${0##*/}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=memory.sh
source "$HERE/memory.sh"
export LAUNCH_DIR="$PWD"      # ranks run in folders of their own; a relative --ckpt-dir means this one
export GLOG_v="${GLOG_v:-3}"  # MindSpore's own log: errors only; 2 adds warnings, 1 information

# However a launcher ends, nothing it started runs on. Ctrl-C gives 130, TERM 143, a closed terminal 129.
sessions=() # every process that was started leads a session: its id finds all that came of it
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# ------------------------------------------------------------------------------------------- bad input
# die MESSAGE: bad input, said in one sentence before any rank starts.
die() {
    echo "$SELF: $1" >&2
    exit 2
}

warn() {
    echo "$SELF: warning: $1" >&2
}

# need_python: the first Python on the PATH that has MindSpore.
need_python() {
    PYTHON="$(command -v python || command -v python3)" || die "no python on the PATH; activate the environment"
    "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mindspore") is None)' ||
        die "$PYTHON has no MindSpore; activate the environment (. .venv/bin/activate) or pip install -r requirements.txt"
}

# read_settings: DEVICE_TARGET, what the ranks will run on (what is there, unless set), and STALL_MINUTES.
read_settings() {
    if [[ -z "${DEVICE_TARGET:-}" ]]; then
        if [[ -e /dev/davinci_manager ]]; then
            DEVICE_TARGET=Ascend
        elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
            DEVICE_TARGET=GPU
        else
            DEVICE_TARGET=CPU
        fi
    fi
    [[ "$DEVICE_TARGET" =~ ^(Ascend|GPU|CPU)$ ]] || die "DEVICE_TARGET is '$DEVICE_TARGET'; write Ascend, GPU or CPU"
    export DEVICE_TARGET
    [[ "${STALL_MINUTES:=30}" =~ ^[0-9]*\.?[0-9]+$ ]] || die "STALL_MINUTES is '$STALL_MINUTES'; write a number of minutes"
    stall_seconds="$(awk -v minutes="$STALL_MINUTES" 'BEGIN { print int(60 * minutes) }')"
}

# check_size N: N must be a number of ranks.
check_size() {
    [[ "$1" =~ ^[1-9][0-9]{0,4}$ ]] || die "RANK_SIZE must be a whole number from 1, not '$1'"
}

# check_data FOLDER SCRIPT [OPTION...]: the data set and the script's options, checked by the script itself.
check_data() {
    [[ -d "$1" ]] && DATA_PATH="$(cd "$1" && pwd)" || DATA_PATH="$1"
    export DATA_PATH
    "$PYTHON" "$2" "${@:3}" --check || exit 2
}

# dry_run SIZE RANKS DATA_PATH SCRIPT [OPTION...]: instead of starting ranks, compile the Ascend graphs of RANKS (such as
# 0-7) of SIZE on this machine, which needs neither card nor CANN, and end with the report. DATA_PATH "": a stand-in.
dry_run() {
    local size="$1" ranks="$2" data_path="$3" tool="$HERE/../dry_run/dry_run.py" options stand_in code=0
    shift 3
    [[ -f "$tool" ]] || die "--dry-run needs the folder dry_run/ beside ${HERE##*/}/; copy it there"
    options=(--rank-size "$size" --ranks "$ranks")
    if [[ -n "$data_path" ]]; then
        DEVICE_TARGET=Ascend RANK_SIZE="$size" check_data "$data_path" "$@"
    else
        stand_in="$(mktemp -d)" # zeros, which take no room on the disk
        truncate -s 30730000 "$stand_in/data_batch_1.bin" "$stand_in/test_batch.bin"
        (DEVICE_TARGET=Ascend RANK_SIZE="$size" check_data "$stand_in" "$@") || code=$?
        rm -r -- "$stand_in"
        ((code == 0)) || exit "$code"
        options+=(--data cifar10)
    fi
    unset DEVICE_TARGET # Ascend, whatever this machine has
    exec "$PYTHON" "$tool" "${options[@]}" "$@"
}

# find_table SIZE: print the path of the rank table for so many ranks, or nothing if there is none.
find_table() {
    local folder
    if [[ -n "${RANK_TABLE_FILE:-}" ]]; then
        echo "$RANK_TABLE_FILE"
        return
    fi
    for folder in "$HERE/../rank_tables" "$HERE/rank_tables" "$HERE"; do
        [[ ! -f "$folder/rank_table_${1}pcs.json" ]] || { echo "$folder/rank_table_${1}pcs.json"; return; }
    done
}

# read_table FILE SIZE: check a rank table; fills device_of[rank] and server_of[rank], exports RANK_TABLE_FILE.
read_table() {
    local folder tool="" rank device server listing
    for folder in "$HERE/../rank_tables" "$HERE/rank_tables" "$HERE"; do
        [[ ! -f "$folder/rank_table.py" ]] || { tool="$folder/rank_table.py"; break; }
    done
    [[ -n "$tool" ]] || die "rank_table.py, which checks rank tables, is missing; copy the folder rank_tables/ to $HERE/"
    [[ -f "$1" ]] || die "the rank table $1 does not exist; give its path, or make one: python $tool make --help"
    RANK_TABLE_FILE="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
    export RANK_TABLE_FILE
    "$PYTHON" "$tool" check "$RANK_TABLE_FILE" --size "$2" || exit 2
    listing="$("$PYTHON" "$tool" ranks "$RANK_TABLE_FILE")" || exit 2
    while read -r rank device server; do
        device_of[rank]="$device"
        server_of[rank]="$server"
    done <<<"$listing"
}

# server_is_here SERVER_ID: is it an address of this machine? Where addresses cannot be read, say yes and warn.
server_is_here() {
    local addresses
    addresses="$(hostname -I 2>/dev/null || ip -o addr 2>/dev/null | awk '{ sub("/.*", "", $4); print $4 }')" || true
    if [[ -z "$addresses" ]]; then
        warn "cannot read this machine's addresses; whether it is server $1 of the table was not checked"
        return 0
    fi
    grep -qxF -- "$1" <<<"$(tr -s ' ' '\n' <<<"$addresses")"
}

# check_cards RANK...: on Ascend, do the cards of these ranks exist, are they free, and have the table's addresses?
check_cards() {
    local listing rank device ip actual tool pid name
    if ! command -v npu-smi >/dev/null; then
        compgen -G '/dev/davinci[0-9]*' >/dev/null ||
            die "there is neither npu-smi nor a /dev/davinci*: this machine has no Ascend card; DEVICE_TARGET=CPU rehearses"
        warn "npu-smi is not on the PATH; whether the cards are free was not checked"
        return
    fi
    listing="$(npu-smi info 2>&1)" || true
    [[ "$listing" != *-8020* ]] ||
        die "npu-smi says that a card is in use by another container (-8020): give each container cards of its own, stop \
the other one, or start both with --privileged"
    # Two rows a card: '| NPU Name | Health |', then '| Chip [Phy-ID] | Bus-Id |'; last '| NPU Chip | pid | name |'.
    listing="$(awk -F'|' '
        /Process id/ { processes = 1 }
        /Phy-ID/ { phy_id = 1 }
        { split($2, left, " ") }
        !processes && left[1] ~ /^[0-9]+$/ && $3 !~ /:/ { npu = left[1] }
        !processes && left[1] ~ /^[0-9]+$/ && $3 ~ /:/ {
            card = phy_id ? left[2] : npu
            card_of[npu " " left[1]] = card
            print "card", card
        }
        processes && left[1] ~ /^[0-9]+$/ && $3 ~ /[0-9]/ {
            gsub(" ", "", $3); gsub(" ", "", $4)
            print "busy", card_of[left[1] " " left[2]], $3, $4
        }' <<<"$listing")"
    for rank in "$@"; do
        device="${device_of[rank]}"
        grep -qx "card $device" <<<"$listing" ||
            die "rank $rank needs card $device, which npu-smi does not list; it lists:$(sed -n 's/^card//p' <<<"$listing" |
                tr -d '\n')"
        read -r _ _ pid name < <(grep "^busy $device " <<<"$listing") || continue
        die "card $device, of rank $rank, is in use by process $pid ($name); end it or choose other cards"
    done
    tool="$(command -v hccn_tool || echo /usr/local/Ascend/driver/tools/hccn_tool)"
    [[ -n "${RANK_TABLE_FILE:-}" && -x "$tool" ]] || return 0
    while read -r device ip; do
        actual="$("$tool" -i "$device" -ip -g 2>/dev/null | sed -n 's/^ipaddr: *//p')" || true
        [[ -z "$actual" || -z "$ip" || "$actual" == "$ip" ]] ||
            die "the rank table gives card $device the device_ip $ip, but hccn_tool says $actual; write that into $RANK_TABLE_FILE"
    done < <("$PYTHON" -c 'import json, sys
for server in json.load(open(sys.argv[1]))["server_list"]:
    for device in server["device"] if server["server_id"] == sys.argv[2] else []:
        print(device["device_id"], device.get("device_ip", ""))' "$RANK_TABLE_FILE" "${server_of[$1]}")
}

# prepare_target RANK...: what the ranks of this machine need on their kind of device, before any of them starts.
prepare_target() {
    local cards available_mb needed_mb=$(($# * MB_PER_RANK)) cores
    case "$DEVICE_TARGET" in
        Ascend) check_cards "$@" ;;
        GPU)
            cards="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" || true
            ((cards >= $#)) || die "$# ranks need $# GPUs, nvidia-smi lists ${cards:-0}; start fewer"
            ;;
        CPU)
            available_mb="$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)"
            ((needed_mb <= available_mb)) || die "$# ranks need about $needed_mb MB of memory ($MB_PER_RANK MB each), \
$available_mb MB are free; start fewer, or take less with -- --image-size 32"
            cores="$(nproc)"
            # Without it each rank starts a thread a core, and they wait for each other.
            export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > $# ? cores / $# : 1))}"
            if [[ -z "${ONEDNN_MAX_CPU_ISA:-}" ]] && grep -qm1 avx512f /proc/cpuinfo; then
                export ONEDNN_MAX_CPU_ISA=AVX2
                echo "$SELF: ONEDNN_MAX_CPU_ISA=AVX2, because with AVX-512 MindSpore's convolutions are several times slower"
            fi
            ;;
    esac
}

# move_aside FOLDER...: what an earlier run left there goes to one folder with the time in its name; nothing is deleted.
move_aside() {
    local name aside=""
    for name in "$@"; do
        [[ -e "$name" ]] || continue
        if [[ -z "$aside" ]]; then
            aside="$name.$(date +%Y%m%d-%H%M%S)"
            [[ ! -e "$aside" ]] || aside="$aside.$$"
            mkdir -- "$aside" || die "cannot make the folder $aside in $PWD; start in a folder where you may write"
        fi
        mv -- "$name" "$aside/"
    done
    [[ -z "$aside" ]] || echo "$SELF: the results of the run before are now in $aside/"
}

# ------------------------------------------------------------------------------------------- scheduler
# On CPU and GPU the ranks find each other through one more process, the scheduler (MindSpore's dynamic cluster);
# on Ascend through the rank table.

# choose_port [PORT]: set MS_SCHED_HOST and MS_SCHED_PORT for a scheduler here: the user's, or PORT, or a free one.
choose_port() {
    export MS_SCHED_HOST="${MS_SCHED_HOST:-127.0.0.1}"
    # 20000-29999: below the ports that the system gives out, away from 8118 + 256 * rank, where ranks may listen.
    MS_SCHED_PORT="$("$PYTHON" -c 'import random, socket, sys
host, wanted = sys.argv[1:]
for port in [int(wanted)] if wanted else random.sample(range(20000, 30000), 50):
    try:
        with socket.create_server((host, port)):
            print(port)
            break
    except OSError as error:
        reason = error.strerror
else:
    sys.exit(f"{host}:{wanted}: {reason}")' "$MS_SCHED_HOST" "${MS_SCHED_PORT:-${1:-}}" 2>&1)" ||
        die "no scheduler can listen on $(tail -n 1 <<<"$MS_SCHED_PORT"); set MS_SCHED_HOST and MS_SCHED_PORT to an \
address of this machine and a free port"
    export MS_SCHED_PORT
}

scheduler_listens() {
    (exec 3<>"/dev/tcp/$MS_SCHED_HOST/$MS_SCHED_PORT") 2>/dev/null
}

# start_scheduler RANK_SIZE FOLDER: start it, log in FOLDER/scheduler.log; returns once it listens.
start_scheduler() {
    mkdir -p "$2"
    watch_over scheduler "$2" scheduler.log env MS_ROLE=MS_SCHED MS_WORKER_NUM="$1" \
        "$PYTHON" -c 'from mindspore.communication import init; init()'
    # A rank that asks before the scheduler listens waits longer and longer between its attempts, up to 90 s.
    until scheduler_listens; do
        running "${pids[0]}" || return 0 # watch() will see it and say why
        sleep 0.1
    done
}

# await_scheduler SECONDS: wait for the scheduler that the first server starts.
await_scheduler() {
    local deadline=$((SECONDS + $1))
    scheduler_listens ||
        echo "$SELF: waiting for the scheduler at $MS_SCHED_HOST:$MS_SCHED_PORT; run_cluster.sh with RANK_START 0 starts it"
    until scheduler_listens; do
        ((SECONDS < deadline)) || {
            echo "$SELF: no scheduler at $MS_SCHED_HOST:$MS_SCHED_PORT after $1 s; start run_cluster.sh with RANK_START 0 \
on the first server, with the same MS_SCHED_HOST and MS_SCHED_PORT" >&2
            exit 1
        }
        sleep 0.5
    done
}

# --------------------------------------------------------------------------------------- start and watch
names=() pids=() logs=() # of all that was started, in this order

running() {
    kill -0 "$1" 2>/dev/null
}

# watch_over NAME FOLDER LOG COMMAND...: start a command in a folder, output to FOLDER/LOG, to be watched by watch().
watch_over() {
    (
        cd -- "$2" || exit
        exec setsid "${@:4}" >"$3" 2>&1 </dev/null
    ) &
    sessions+=($!)
    pids+=($!)
    names+=("$1")
    logs+=("$2/$3")
}

# prepare_rank RANK RANK_SIZE FOLDER: export a rank's variables and make its folder, with what matters in envN.log.
prepare_rank() {
    local rank="$1" variable
    export RANK_ID="$rank" RANK_SIZE="$2" DEVICE_ID="${device_of[rank]}" PYTHONUNBUFFERED=1
    [[ "$DEVICE_TARGET" == Ascend ]] || ((RANK_SIZE == 1)) || export MS_ROLE=MS_WORKER MS_NODE_ID="$rank" MS_WORKER_NUM="$2"
    mkdir -p -- "$3" || die "cannot make the folder $3 in $PWD; start in a folder where you may write"
    echo "start training for device $DEVICE_ID"
    for variable in $(compgen -e); do # not all of them: the environment may hold secrets
        [[ ! "$variable" =~ ^(RANK_|DEVICE_|MS_|HCCL_|ASCEND_|GLOG_|GRAPH_OP_|OMP_|ONEDNN_|CUDA_|NCCL_) &&
            ! "$variable" =~ ^(DATA_PATH|PATH|PYTHONPATH|LD_LIBRARY_PATH|LAUNCH_DIR)$ ]] || echo "$variable=${!variable}"
    done >"$3/env$rank.log"
}

# start_rank RANK RANK_SIZE FOLDER LOG COMMAND...: start a rank in its folder.
start_rank() {
    prepare_rank "$1" "$2" "$3"
    watch_over "rank $1" "$3" "$4" "${@:5}"
}

# show_first_rank: show the log of the first rank of this machine as it grows.
show_first_rank() {
    local number=0
    [[ "${names[0]}" != scheduler ]] || number=1
    tail --pid="${pids[number]}" --sleep-interval=0.2 -n +1 -F "${logs[number]}" 2>/dev/null |
        sed -u -e '/Event base dispatch success/d' -e "s/^/[${names[number]}] /" &
    follower=$!
}

# watch: until all ranks have ended. The first that fails ends the others: failed is then its number and code its
# exit code; else failed is empty and code is 0.
watch() {
    local number left pid next_look=0 last_end=0
    local -A status_of=() # of each process; under mpirun all ranks have one
    code=0 failed=""
    while true; do
        left=0
        for number in "${!pids[@]}"; do
            if running "${pids[number]}"; then
                [[ "${names[number]}" == scheduler ]] || left=$((left + 1))
                continue
            fi
            pid="${pids[number]}"
            unset "pids[number]"
            if [[ -z "${status_of[$pid]:-}" ]]; then
                status_of[$pid]=0
                wait "$pid" || status_of[$pid]=$?
            fi
            # A rank that fails may take the scheduler with it: then the rank is the one to name.
            if ((status_of[$pid] != 0)) && [[ -z "$failed" || "${names[${failed:-0}]}" == scheduler ]]; then
                failed="$number" code="${status_of[$pid]}"
            fi
        done
        [[ -z "$failed" ]] || break
        if ((left == 0)); then # the scheduler ends by itself, when the ranks of all machines have left
            ((${#pids[@]} > 0 && SECONDS < (last_end = last_end ? last_end : SECONDS + 15))) || break
        fi
        if ((SECONDS >= next_look)); then
            next_look=$((SECONDS + 1))
            warn_of_stall 2>&4
        fi
        sleep 0.2
    done
    end_all
} 4>&2 2>/dev/null # without bash's own "line 7: 1234 Killed"

# warn_of_stall: say so when no log has grown for STALL_MINUTES, and name the rank that has been quiet longest, or
# one that is stopped (state T), which makes all others wait.
warned=0
warn_of_stall() {
    local number now changed state newest=0 oldest="" quietest="" quiet_state=""
    now="$(date +%s)"
    for number in "${!pids[@]}"; do
        [[ "${names[number]}" != scheduler ]] || continue
        changed="$(stat -c %Y "${logs[number]}" 2>/dev/null)" || changed="$now"
        ((changed <= newest)) || newest="$changed"
        state="$(ps -o state= -p "${pids[number]}")" || true
        if [[ -z "$oldest" || ("$state" == T && "$quiet_state" != T) ]] ||
            [[ "$changed" -lt "$oldest" && "$quiet_state" != T ]]; then
            oldest="$changed" quietest="$number" quiet_state="$state"
        fi
    done
    [[ -n "$quietest" ]] && ((now - newest >= stall_seconds && now - warned >= stall_seconds)) || return 0
    warned="$now"
    warn "no rank has written anything for $((now - newest)) s; quiet longest: ${names[quietest]}, since \
$(date -d "@$oldest" +%T), process ${pids[quietest]} in state $quiet_state; the last line of ${logs[quietest]}: \
$(tail -n 1 "${logs[quietest]}")"
}

# end_all: end every process that came of this launcher's starts, by session, first politely. At most 3 seconds.
end_all() {
    local round members started
    started="${sessions[*]} ${!:-}" # a process that was started this very moment is not yet in the list
    started="$(tr -s ' ' ',' <<<"${started# }")"
    [[ -n "${started//,/}" ]] || return 0
    for round in {0..30}; do
        members="$(ps -o pid=,state= -s "${started%,}" -p "${started%,}" | awk '$2 != "Z" { print $1 }')" || true
        [[ -n "$members" ]] || break
        # shellcheck disable=SC2086  # one word a process
        case "$round" in
            0) kill -TERM $members 2>/dev/null || true ;;
            20) kill -KILL $members 2>/dev/null || true ;;
        esac
        sleep 0.1
    done
    sessions=()
}

# ------------------------------------------------------------------------------------------------ the end
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

# show_failure: after watch(): which rank failed, the end of its log, and what may help.
show_failure() {
    local log="${logs[failed]}"
    wait "$follower" || true
    {
        echo "$SELF: ${names[failed]} failed, exit code $code. The end of $log:"
        grep -v 'Event base dispatch success' "$log" | tail -n 30 || true
        hint "$log" "$code"
    } >&2
}

# forget_ranks: after a failure, when all have ended: ready to start them again.
forget_ranks() {
    names=() pids=() logs=() sessions=()
    unset RANK_ID RANK_SIZE DEVICE_ID MS_ROLE MS_NODE_ID MS_WORKER_NUM # of the rank that started last
    [[ "$DEVICE_TARGET" != Ascend ]] || sleep 10 # the cards need some time after ranks that failed (EJ0001)
}

# finish: after watch(): say what came of the job and exit with its code.
finish() {
    local number
    if ((code != 0)); then
        show_failure
        echo "training failed" >&2
        exit "$code"
    fi
    wait "$follower" || true
    for number in "${!logs[@]}"; do
        awk -v name="${names[number]}" -v log_file="${logs[number]}" '
            /loss is/ { last = $NF; if (first == "") first = last }
            END { if (first != "") print name ": loss " first " -> " last " (" log_file ")" }' "${logs[number]}"
    done
    echo "training success"
}
