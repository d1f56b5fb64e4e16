#!/usr/bin/env bash
# Run this on every node if engines share the trainers' GPUs (rollout.colocate). It starts Ray and the trainer ranks, and on
# node 0 the rollout service too. All nodes must see the run folder.
# usage: launch/colocated_node.sh CONFIG.yaml [--set section.key=value ...]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. See torchrun_node.sh for signals
# and restarts, and rollout_node.sh for ports. The trainers meet at MASTER_PORT + 99.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
first_names_itself "$@"
for_trainers
exec "${megagrpo[@]}" run "${place[@]}" "$@"
