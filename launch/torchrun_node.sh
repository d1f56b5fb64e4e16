#!/usr/bin/env bash
# Run this on every trainer node. It starts the trainer ranks. All nodes must see the run folder.
# usage: launch/torchrun_node.sh CONFIG.yaml [--set section.key=value ...] [--service URL]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. Addresses are those of trainer nodes.
# USR1, TERM or INT: all nodes save after the current step and end with status 85. The same command resumes. USR2: the
# rollout service has ended; the ranks save the finished steps and end with status 1. A second TERM, INT or USR2, or USR2 before
# the first step: end at once. If a rank dies, all restart from the last checkpoint, at most actor.max_restarts times.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
for_trainers
exec "${megagrpo[@]}" train "${place[@]}" "$@"
