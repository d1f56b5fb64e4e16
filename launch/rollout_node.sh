#!/usr/bin/env bash
# Run this on every rollout node. It starts Ray, and on node 0 also the rollout service, which prints its URL and writes it
# into the run folder.
# usage: launch/rollout_node.sh CONFIG.yaml [--set section.key=value ...]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. Addresses are those of rollout nodes.
# INT, TERM or USR2 end it. Ports: MASTER_PORT (30000) for Ray's head, the next 90 for Ray's nodes, 10002-19999 for Ray's
# workers, 20000-29999 for engines and control.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
first_names_itself "$@"
exec "${megagrpo[@]}" serve "${place[@]}" "$@"
