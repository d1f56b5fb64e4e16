#!/usr/bin/env bash
# The trainer ranks of one node: run it on every trainer node. The run folder must be on a shared file system.
# usage: launch/torchrun_node.sh CONFIG.yaml [--set section.key=value ...] [--service URL]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# Defaults come from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR. Addresses are those of trainer nodes.
# USR1, TERM or INT: all nodes save after the current step and exit with status 85; the same command resumes from there. USR2,
# or a second TERM or INT: ends at once. If a rank dies, all restart from the last checkpoint, up to actor.max_restarts times.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
for_trainers
exec "${megagrpo[@]}" train "${place[@]}" "$@"
