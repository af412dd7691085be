#!/usr/bin/env bash
# Trains on N processes with msrun, MindSpore's own launcher: no Open MPI, no ssh. N cards, or N CPU processes.
#     bash run_msrun.sh [DATA_PATH [N]] [-- options of train_ddp.py]
#     bash run_msrun.sh [DATA_PATH [N]] --nodes K --node-rank R --master-addr ADDRESS --master-port PORT [--wait SECONDS]
# DATA_PATH is the folder of the MNIST files (default: the variable DATA_PATH), N the number of all processes (4).
# On K machines start it on each, with R from 0 to K-1; N / K processes run on each. ADDRESS is that of the machine with
# R = 0, and PORT a free port there. SECONDS is how long the machines wait for each other to start (120).
# Logs: log_msrun/worker_0.log, ... and scheduler.log; of machine R log_msrun_R/. Exit code: 0, 2 for bad input, else
# that of the rank that failed.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MB_PER_RANK=500 # what one rank of this lesson takes on CPU
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$HERE/launch_common.sh"

usage="usage: bash run_msrun.sh [DATA_PATH [N]] [--nodes K --node-rank R --master-addr ADDRESS --master-port PORT] \
[--wait SECONDS] [-- options of train_ddp.py]"
arguments=()
nodes=1 node_rank="" master_addr="" master_port="" wait_seconds=120
while (($# > 0)) && [[ "$1" != -- ]]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --nodes) nodes="${2:-}"; shift ;;
        --node-rank) node_rank="${2:-}"; shift ;;
        --master-addr) master_addr="${2:-}"; shift ;;
        --master-port) master_port="${2:-}"; shift ;;
        --wait) wait_seconds="${2:-}"; shift ;;
        -*) die "unknown option $1; options of train_ddp.py go after --. $usage" ;;
        *) arguments+=("$1") ;;
    esac
    (($# == 0)) || shift
done
(($# == 0)) || shift # the --
((${#arguments[@]} <= 2)) || die "too many arguments. $usage"
data_path="${arguments[0]:-${DATA_PATH:-}}"
ranks="${arguments[1]:-4}"

# check_place: is this the machine that --node-rank says it is, and can the ranks meet here?
check_place() {
    local here
    if ! [[ "$node_rank" =~ ^(0|[1-9][0-9]{0,3})$ ]] || ((node_rank >= nodes)); then
        die "--node-rank must be 0 to $((nodes - 1)), not '$node_rank'"
    fi
    [[ -n "$master_addr" ]] || die "--nodes $nodes needs --master-addr, the address of the machine with --node-rank 0"
    [[ "$master_port" =~ ^[1-9][0-9]{0,4}$ ]] || die "--nodes $nodes needs --master-port, a free port, not '$master_port'"
    here="$("$PYTHON" -c 'import socket, sys
with socket.socket() as server:
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((sys.argv[1], 0))
        server.close()
        socket.create_server((sys.argv[1], int(sys.argv[2]))).close()
        print("free")
    except socket.gaierror:
        print("unknown")
    except OSError:
        print("taken" if server.fileno() < 0 else "elsewhere")' "$master_addr" "$master_port")"
    case "$node_rank $here" in
        *unknown) die "--master-addr $master_addr has no address; correct the name, or add it to /etc/hosts" ;;
        "0 elsewhere") die "$master_addr is no address of this machine; --node-rank 0 belongs on the machine that has it" ;;
        "0 taken") die "port $master_port of $master_addr is taken; choose another --master-port, the same on all machines" ;;
        0*) ;;
        *elsewhere) ;;
        *) die "$master_addr is an address of this machine, so it is --node-rank 0, not $node_rank" ;;
    esac
}

# await_master: the other machines start their ranks once the scheduler of the first one listens.
await_master() {
    local deadline=$((SECONDS + wait_seconds))
    until (exec 3<>"/dev/tcp/$master_addr/$master_port") 2>/dev/null; do
        ((SECONDS < deadline)) || {
            echo "$SELF: no scheduler at $master_addr:$master_port after $wait_seconds s; start run_msrun.sh with \
--node-rank 0 on $master_addr, and let its firewall pass that port" >&2
            exit 1
        }
        sleep 0.5
    done
}

# blame_others: where the ranks here failed because of another machine, say so and exit.
blame_others() {
    local gone reason=""
    wait "${followers[@]}" || true
    gone="$(sed -nE 's/.*The node: ([0-9]+) is timed out.*/\1/p' "$log_dir/scheduler.log" 2>/dev/null | sort -un)" || true
    if ((code == 143)) && [[ -n "$gone" ]]; then # MindSpore ends ranks by signal 15 when others are gone
        reason="no answer any more from$(awk -v n="$local_ranks" '{ printf "%s rank %d on machine %d", sep, $1, $1 / n
            sep = "," }' <<<"$gone"): it failed, or its network did"
    elif ((code == 143)); then
        reason="no answer any more from machine 0, $master_addr: its ranks failed, or the network did"
    elif grep -q 'processes in the cluster are not successfully spawned' "${logs[@]}" 2>/dev/null; then
        reason="not all machines have joined within $wait_seconds s (--wait): start run_msrun.sh on machines 0 to $((nodes - 1))"
    fi
    [[ -n "$reason" ]] || return 0
    echo "$SELF: $reason. So the ranks of machine $node_rank, $FIRST_RANK to $((FIRST_RANK + local_ranks - 1)), were ended, \
exit code $code. Machine R is the one with --node-rank R; look at the logs there" >&2
    exit "$code"
}

[[ -n "$data_path" ]] || die "no data set: give its folder or set DATA_PATH. $usage"
check_ranks "$ranks"
[[ "$nodes" =~ ^[1-9][0-9]{0,3}$ ]] || die "--nodes must be a whole number from 1, not '$nodes'"
((ranks % nodes == 0)) || die "$ranks processes cannot be shared equally by $nodes machines"
[[ "$wait_seconds" =~ ^[1-9][0-9]{0,4}$ ]] || die "--wait must be a whole number of seconds, not '$wait_seconds'"
local_ranks=$((ranks / nodes))
need_python
need_command msrun "it comes with MindSpore: activate the environment (. .venv/bin/activate)"
"$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" --check "$@"
log_dir=log_msrun
if ((nodes > 1)); then
    check_place
    log_dir="log_msrun_$node_rank"
    # How soon a machine that is gone is noticed; MindSpore's own 30 s would make it twice as long.
    export MS_NODE_TIMEOUT="${MS_NODE_TIMEOUT:-10}" MS_HEARTBEAT_RETRY_TIMEOUT="${MS_HEARTBEAT_RETRY_TIMEOUT:-5}"
    export MS_RECEIVE_MSG_TIMEOUT="${MS_RECEIVE_MSG_TIMEOUT:-5}"
    export MS_CPU_COMM_OP_TIMEOUT="${MS_CPU_COMM_OP_TIMEOUT:-300}" # a collective waits for ranks that still compile
    ((node_rank == 0)) || await_master
fi
new_folder "$log_dir"
[[ "$(device_target)" != CPU ]] || share_cores "$local_ranks"

LAUNCHER_LOG="$log_dir/msrun.log"
# --local_worker_num is 8 unless given, --master_port 8118 (often taken); without --join msrun would not wait.
start msrun --worker_num="$ranks" --local_worker_num="$local_ranks" --node_rank="${node_rank:-0}" \
    --master_addr="${master_addr:-127.0.0.1}" --master_port="${master_port:-$(free_port)}" --join=True \
    --cluster_time_out="$wait_seconds" --log_dir="$log_dir" --tail_worker_log=-1 \
    "$HERE/train_ddp.py" --data-path "$data_path" "$@"
FIRST_RANK=$((${node_rank:-0} * local_ranks)) # on this machine
for ((rank = FIRST_RANK; rank < FIRST_RANK + local_ranks; rank++)); do
    logs[rank]="$log_dir/worker_$rank.log"
    follow "$rank" "${logs[rank]}"
done

# msrun names a failed worker by its process id, and ends late: it waits for its scheduler. So note which process
# is which rank, and end the job as soon as msrun has seen a failure.
code=0
failed=""
declare -A rank_of
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
[[ -n "$failed" ]] || wait "$launcher_pid" || code=$?
((nodes == 1 || code == 0)) || blame_others
finish "$code" "$failed" "${logs[@]}"
