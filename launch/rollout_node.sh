#!/usr/bin/env bash
# The rollout service's part of one node: run it on every rollout node. It starts Ray, and on node 0 also the service, which
# writes its URL into the run folder and prints it.
# usage: launch/rollout_node.sh CONFIG.yaml [--set section.key=value ...]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. Addresses are those of rollout nodes.
# INT, TERM or USR2 end it. Ports: Ray's head MASTER_PORT (30000), Ray's nodes the next 90, Ray's workers 10002-19999, engines
# and the service 20000-29999.
set -euo pipefail
: "${MASTER_ADDR:=$(hostname -I | cut -d' ' -f1)}" # the first rollout node may leave it out
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
exec "${megagrpo[@]}" serve "${place[@]}" "$@"
