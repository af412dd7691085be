#!/usr/bin/env bash
# mpirun's ssh: if the connection breaks, both sides notice within 12 seconds, and the ranks there end.
#     watched_ssh.sh [-l USER] HOST COMMAND...
# ssh asks the other machine every 5 seconds whether it is alive. The other way round, a line goes there every second,
# and what ends COMMAND is their absence. Without it the ranks there, and mpirun's daemon, would run on for 15 minutes:
# so long Linux waits for an answer to what they have sent. The variable SSH is the ssh command with its options (ssh).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck disable=SC2016  # the variables of the other side
there='exec 3<&0
export PATH="$PATH:$2" # the daemon looks for this file, too
setsid bash -c "$1" </dev/null & session=$!
end() { kill "-$1" $(ps -o pid= -s "$session"); }
(while read -r -t 12 -u 3 _; do :; done; end TERM; sleep 3; end KILL) 2>/dev/null & watcher=$!
wait "$session" && code=0 || code=$?
kill "$watcher" 2>/dev/null
end KILL 2>/dev/null
exit "$code"'
where=("$1") # as with ssh, all words behind it are one command line
[[ "$1" != -l ]] || where=("${@:1:3}")
command="${*:${#where[@]}+1}"
# shellcheck disable=SC2086  # SSH holds options
exec ${SSH:-ssh} -x -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=5 -o ServerAliveCountMax=2 \
    "${where[@]}" "bash -c ${there@Q} watched ${command@Q} ${HERE@Q}" < <(while sleep 1; do echo || exit; done 2>/dev/null)
