#!/usr/bin/env bash
# Can the cards of this server reach those of the next server of a rank table?
#
#     bash check_network.sh RANK_TABLE_FILE SERVER_ID
#     bash check_network.sh rank_table_16pcs.json 10.155.111.140
#
# Run it as root on the server SERVER_ID, then likewise on every other server of the table. The servers form a
# ring in rank order: each card is given the address of the card with the same device_id on the next server
# (hccn_tool -netdetect; the driver keeps that address), then its link is read (hccn_tool -net_health).
#
# Prints one line a card. Exit code: 0 every card says Success, 1 any other answer, 2 bad input.
# NET_HEALTH_SECONDS (default 10): how long to wait for cards that have not finished detecting.
set -euo pipefail

fail() {
    echo "check_network.sh: $1" >&2
    exit 2
}

[[ $# -eq 2 ]] || fail "usage: bash check_network.sh RANK_TABLE_FILE SERVER_ID"
table=$1
server=$2
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
seconds=${NET_HEALTH_SECONDS:-10}

[[ $seconds =~ ^[0-9]{1,4}$ ]] || fail "NET_HEALTH_SECONDS is '$seconds'; give whole seconds"
command -v "$python" >/dev/null || fail "$python is not installed; set PYTHON to a Python 3.7 or later"
tool=$(command -v hccn_tool || true)
[[ -n $tool ]] || tool=/usr/local/Ascend/driver/tools/hccn_tool
[[ -x $tool ]] || fail "hccn_tool is not on PATH nor in /usr/local/Ascend/driver/tools; \
run this on an Ascend server with its driver installed"

# One line a card: DEVICE_ID PEER_IP PEER_DEVICE_ID PEER_SERVER_ID
peers=$("$python" "$folder/rank_table.py" peers "$table" "$server") || exit 2

declare -A said=()

while read -r device peer_ip _ _; do
    if ! answer=$("$tool" -i "$device" -netdetect -s address "$peer_ip" </dev/null 2>&1); then
        said[$device]="cannot set the address to detect: ${answer//$'\n'/ }"
    fi
done <<<"$peers"

# Reads a card's status into said[]; waits, all cards together until $deadline, while it is still detecting.
read_health() {
    local device=$1 answer
    while true; do
        answer=$("$tool" -i "$device" -net_health -g </dev/null 2>&1) || true
        said[$device]=${answer##*net health status: }
        said[$device]=${said[$device]//$'\n'/ }
        case ${said[$device]} in
            Init | "Detect ip set") ((SECONDS < deadline)) || return 0 ;;
            *) return 0 ;;
        esac
        sleep 1
    done
}

deadline=$((SECONDS + seconds))
bad=0
while read -r device peer_ip peer_device peer_server; do
    [[ -n ${said[$device]:-} ]] || read_health "$device"
    echo "device $device -> $peer_ip (device $peer_device of $peer_server): ${said[$device]:-no answer}"
    [[ ${said[$device]} == Success ]] || bad=$((bad + 1))
done <<<"$peers"

if ((bad > 0)); then
    echo "check_network.sh: $bad of this server's cards did not reach their partner;" \
        "check cables, switch, and netmask and gateway (hccn_tool -i DEVICE_ID -ip -g, -gateway -g)" >&2
    exit 1
fi
