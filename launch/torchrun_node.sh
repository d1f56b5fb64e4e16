#!/usr/bin/env bash
# The trainer ranks of one node: run it on every trainer node. The run folder lies on a file system that all of them see.
# usage: launch/torchrun_node.sh CONFIG.yaml [--set section.key=value ...] [--service URL]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# What is not given comes from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR; addresses are those of trainer nodes.
# USR1, TERM or INT: all nodes save after the present step, status 85; the same command goes on from there. USR2, a second
# TERM or INT: end at once. A rank that dies: all start again from the last checkpoint, actor.max_restarts times.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
for_trainers
exec "${megagrpo[@]}" train "${place[@]}" "$@"
