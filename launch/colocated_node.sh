#!/usr/bin/env bash
# One node of a run whose engines share the trainers' GPUs (rollout.colocate): run it on every node. It starts Ray and the
# trainer ranks, and on node 0 the rollout service. The run folder must be on a shared file system.
# usage: launch/colocated_node.sh CONFIG.yaml [--set section.key=value ...]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. Signals and restarts: as in
# torchrun_node.sh. Ports: as in rollout_node.sh, and MASTER_PORT + 99, where the trainers meet.
set -euo pipefail
: "${MASTER_ADDR:=$(hostname -I | cut -d' ' -f1)}" # the first node may leave it out
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
for_trainers
exec "${megagrpo[@]}" run "${place[@]}" "$@"
