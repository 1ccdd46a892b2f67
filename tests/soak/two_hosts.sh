#!/usr/bin/env bash
# Two ranks on two network namespaces of one machine, joined by a virtual cable, train under torchrun as two nodes;
# then the run goes on as two nodes from its checkpoint. Needs root, for the namespaces.
#
#   sudo tests/soak/two_hosts.sh [result.json]
set -euo pipefail
cd "$(dirname "$0")/../.."
result=${1:-}
bin=$PWD/.venv/bin
work=$(mktemp -d)
one=shardwise-a-$$ two=shardwise-b-$$
cleanup() { ip netns del "$one" 2>/dev/null || true; ip netns del "$two" 2>/dev/null || true; rm -rf "$work"; }
trap cleanup EXIT

ip netns add "$one"
ip netns add "$two"
ip link add "swa$$" type veth peer name "swb$$"
ip link set "swa$$" netns "$one"
ip link set "swb$$" netns "$two"
ip -n "$one" addr add 10.77.0.1/24 dev "swa$$"
ip -n "$two" addr add 10.77.0.2/24 dev "swb$$"
for space in "$one" "$two"; do ip -n "$space" link set lo up; done
ip -n "$one" link set "swa$$" up
ip -n "$two" link set "swb$$" up

node() { # namespace, interface, number, arguments of the command
    local space=$1 interface=$2 number=$3
    shift 3
    GLOO_SOCKET_IFNAME=$interface PYTHONPATH=$PWD ip netns exec "$space" "$bin/torchrun" --nnodes 2 --node-rank "$number" \
        --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29511 -m shardwise "$@"
}
both() {
    node "$two" "swb$$" 1 "$@" >"$work/two.log" 2>&1 &
    local second=$!
    node "$one" "swa$$" 0 "$@" >"$work/one.log" 2>&1 || { cat "$work/one.log" "$work/two.log"; exit 1; }
    wait "$second" || { cat "$work/two.log"; exit 1; }
}

small=(--set model.layers=2 --set model.width=32 --set model.hidden=48 --set model.context=32 --set train.batch_size=4)
both train tiny "${small[@]}" --set sharding.mode=hybrid --set train.steps=12 --stop-after 6 --out "$work/run" --device cpu
both train --resume "$work/run" --device cpu
grep -q "resumed step-00000006" "$work/one.log"
grep -q "2 CPU ranks" "$work/one.log"
"$bin/python" - "$work/run" "$result" <<'PYTHON'
import json
import sys
from pathlib import Path

run, result = Path(sys.argv[1]), sys.argv[2]
losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
assert len(losses) == 12, losses
assert losses[-1] < losses[0], losses
found = {"nodes": 2, "ranks": 2, "mode": "hybrid", "steps": 12, "resumed_at": 6, "first_loss": losses[0], "last_loss": losses[-1]}
print(json.dumps(found))
if result:
    Path(result).write_text(json.dumps(found, indent=2) + "\n")
PYTHON
