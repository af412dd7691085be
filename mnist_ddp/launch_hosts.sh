# What run_mpirun_1.sh and run_mpirun_2.sh share. Sourced after launch_common.sh, not run.
# shellcheck shell=bash

# untag [FILE]: mpirun begins each line with its rank, [1,3]<stdout>:, and now and then repeats that at the end of a
# line, or goes on with another rank's line there.
untag() {
    sed -uE -e '/Event base dispatch success/d' -e 's/\[1,[0-9]+\]<[a-z]+>: ?$//' \
        -e 's/(.)\[1,([0-9]+)\]<[a-z]+>: ?/\1\n[rank \2] /g' -e 's/^\[1,([0-9]+)\]<[a-z]+>: ?/[rank \1] /' "$@"
}

# run_on_hosts -H LIST|--hostfile FILE [DATA_PATH [N]] [--interface NAME] [-- OPTION...]: check all machines, run
# train_ddp.py on them to the end and exit with its code.
run_on_hosts() {
    local usage="${usage:?}" where=("$1" "$2") interface="" arguments=() data_path ranks checked
    shift 2
    while (($# > 0)) && [[ "$1" != -- ]]; do
        case "$1" in
            --interface) interface="${2:-}"; [[ -n "$interface" ]] || die "--interface needs a name. $usage"; shift ;;
            -*) die "unknown option $1; options of train_ddp.py go after --. $usage" ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
    (($# == 0)) || shift # the --
    ((${#arguments[@]} <= 2)) || die "too many arguments. $usage"
    data_path="${arguments[0]:-${DATA_PATH:-}}"
    ranks="${arguments[1]:-}"
    [[ -n "$data_path" ]] || die "no data set: give its folder or set DATA_PATH. $usage"
    [[ ! -d "$data_path" ]] || data_path="$(cd "$data_path" && pwd)"
    [[ "$ranks" =~ ^([1-9][0-9]{0,4})?$ ]] || die "the number of processes must be a whole number from 1, not '$ranks'"
    need_python
    need_mpirun
    "$PYTHON" "$HERE/train_ddp.py" --data-path "$data_path" --check "$@"
    MPIRUN="$(command -v mpirun)" # by its whole path: then mpirun starts its own kind on the other machines
    checked="$(DEVICE_TARGET="$(device_target)" "$PYTHON" "$HERE/check_hosts.py" "${where[@]}" ${ranks:+--ranks "$ranks"} \
        --data-path "$data_path" --mpirun "$MPIRUN" ${interface:+--interface "$interface"})" || exit 2
    read -r scheduler_host scheduler_port ranks hosts <<<"$checked"
    [[ "$MPIRUN$HERE" != *[[:space:]]* ]] || die "Open MPI starts nothing on other machines from a path with a space \
($MPIRUN, $HERE); move the environment or this folder, or use run_msrun.sh --nodes"
    start_on_hosts "$ranks" "$interface" "${where[@]}" "$HERE/train_ddp.py" --data-path "$data_path" "$@"
    finish_on_hosts "$ranks"
}

# start_on_hosts N INTERFACE WHERE WHAT SCRIPT ARGUMENT...: start the ranks, each with this shell's environment.
start_on_hosts() {
    local ranks="$1" interface="$2" options variable
    options=(-n "$1" "$3" "$4"
        --output-filename log_output # a file a rank, log_output/1/rank.0/stdout, on its machine; and copied to mpirun.log
        --merge-stderr-to-stdout
        --tag-output                        # each line says whose it is: [1,3]<stdout> is rank 3
        -mca orte_abort_on_non_zero_status 1 # a rank that fails ends the others; with 0 they would wait for it
        -bind-to none                       # a rank may use all cores; by default two ranks share one
        # A dead connection ends both sides; for that all daemons start from here and stay attached to their ssh.
        -mca plm_rsh_agent watched_ssh.sh -mca plm_rsh_no_tree_spawn 1 -mca orte_leave_session_attached 1)
    ((EUID != 0)) || options+=(--allow-run-as-root)
    if [[ -n "$interface" ]]; then
        options+=(-mca oob_tcp_if_include "$interface" -mca btl_tcp_if_include "$interface")
        export NCCL_SOCKET_IFNAME="$interface" HCCL_SOCKET_IFNAME="$interface" # on GPU and on Ascend
    fi
    if [[ "$(device_target)" == CPU ]]; then
        export MS_SCHED_HOST="$scheduler_host" MS_SCHED_PORT="$scheduler_port" # see mpirun_on_cpu.py
        options+=(--oversubscribe)
        share_cores "$(tr ' ' '\n' <<<"$hosts" | sed 's/.*://' | sort -n | tail -n 1)"
    fi
    for variable in $(compgen -e); do # mpirun forwards no variable by itself
        [[ ! "$variable" =~ ^(PATH|LD_LIBRARY_PATH|PYTHONPATH|DATA_PATH|DEVICE_TARGET)$ &&
            ! "$variable" =~ ^(MS_|GLOG_|OMP_|ONEDNN_|HCCL_|ASCEND_|NCCL_|CUDA_) ]] || options+=(-x "$variable")
    done
    new_folder log_output
    LAUNCHER_LOG=log_output/mpirun.log
    PATH="$PATH:$HERE" start "$MPIRUN" "${options[@]}" "$PYTHON" "${@:5}"
    tail --pid="$launcher_pid" --sleep-interval=0.2 -n +1 -F "$LAUNCHER_LOG" 2>/dev/null |
        untag | sed -nu '/^\[rank /p' &
    followers+=($!)
}

# host_of RANK: the machine that mpirun gave the rank to; it fills one after the other.
host_of() {
    local host before=0
    for host in $hosts; do
        before=$((before + ${host##*:}))
        ((before <= $1)) || break
    done
    echo "${host%:*}"
}

# finish_on_hosts N: wait for the end of the job, show what came of it, and exit with its code.
finish_on_hosts() {
    local ranks="$1" rank code=0 failed lost=""
    while kill -0 "$launcher_pid" 2>/dev/null; do
        # What ssh says; mpirun itself would wait for an answer of the machine that is gone.
        lost="$(sed -nE 's/^Timeout, server ([^ ]+) not responding.*/\1/p' "$LAUNCHER_LOG" | head -n 1)" || true
        [[ -z "$lost" ]] || break
        sleep 0.3
    done
    if [[ -n "$lost" ]]; then
        end_launcher
        code=1
    else
        wait "$launcher_pid" || code=$?
    fi
    launcher_pid=""
    wait "${followers[@]}" || true
    if ((code == 0)); then
        for ((rank = 0; rank < ranks; rank++)); do
            untag "$LAUNCHER_LOG" | sed -n "s/^\[rank $rank\] .*loss is //p" |
                awk -v name="rank $rank on $(host_of "$rank")" 'NR == 1 { first = $1 } { last = $1 }
                    END { if (NR) print name ": loss " first " -> " last }'
        done
        untag "$LAUNCHER_LOG" | sed -nE 's/^\[rank 0\] (accuracy:)/\1/p' | tail -n 1
        exit 0
    fi
    failed="$(first_failed_rank)"
    [[ -n "$lost" ]] || lost="$(sed -nE 's/.*Remote daemon: .* on node ([^ ]+).*/\1/p' "$LAUNCHER_LOG" | head -n 1)"
    {
        if [[ -n "$failed" && -z "$lost" ]]; then
            echo "$SELF: rank $failed on $(host_of "$failed") failed, exit code $code. The end of its lines in $LAUNCHER_LOG:"
            untag "$LAUNCHER_LOG" | sed -n "s/^\[rank $failed\] //p" | tail -n 30
        elif [[ -n "$lost" ]]; then
            failed=""
            for ((rank = 0; rank < ranks; rank++)); do
                [[ "$(host_of "$rank")" != "$lost" ]] || failed+=" $rank"
            done
            echo "$SELF: the connection to $lost was lost${failed:+, with rank$failed}; exit code $code. Is it on, is its network up?"
        else
            echo "$SELF: the job failed, exit code $code. The end of $LAUNCHER_LOG:"
            tail -n 30 "$LAUNCHER_LOG"
        fi
        [[ -n "$lost" ]] || hint "$LAUNCHER_LOG" "$code"
    } >&2
    exit "$code"
}
