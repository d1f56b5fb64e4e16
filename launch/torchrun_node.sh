#!/usr/bin/env bash
# The trainer ranks of one node: run it on every trainer node. The run folder lies on a file system that all of them see.
# usage: launch/torchrun_node.sh CONFIG.yaml [--set section.key=value ...] [--service URL]
#            [--nnodes N --node-rank I --master-addr ADDRESS --master-port PORT --node-addr ADDRESS]
# What is not given comes from NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NODE_ADDR; addresses are those of trainer nodes.
# USR1 or TERM: all nodes save after the present step, status 85; the same command goes on from there. INT, USR2, a second
# TERM: end at once. A rank that dies: all start again from the last checkpoint, actor.max_restarts times.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
place=()
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NODE_ADDR; do
    option="--${name,,}"
    [ -z "${!name:-}" ] || place+=("${option//_/-}" "${!name}")
done
unset RANK LOCAL_RANK WORLD_SIZE # of a launcher around this one: torchrun numbers the ranks
trap '' USR1 # ignored until it can be obeyed
exec "${MEGAGRPO_VENV:-$root/.venv}/bin/python" -W ignore -m megagrpo.cli train "${place[@]}" "$@"
