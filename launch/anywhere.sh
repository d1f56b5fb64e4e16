#!/usr/bin/env bash
# Run this on every node of a cluster that is not Slurm's: in a pod of Kubernetes, under SkyPilot, or by hand. It reads the node's
# number from the environment and starts the node's part of the run. `megagrpo submit --to kubernetes|skypilot` prints files
# that call it. usage: launch/anywhere.sh CONFIG.yaml [--set section.key=value ...]
# The first of these that is set counts:
#   this node's number, from 0   NODE_RANK, JOB_COMPLETION_INDEX, SKYPILOT_NODE_RANK, PET_NODE_RANK, RANK
#   number of nodes, default 1   NNODES, NUM_NODES, SKYPILOT_NUM_NODES, PET_NNODES, WORLD_SIZE
#   address of node 0            the first of SKYPILOT_NODE_IPS, MASTER_ADDR, PET_MASTER_ADDR
# MEGAGRPO_ROLE: trainers or engines, if each have a job of their own; all: `megagrpo run` (the default). With TRAINER_NODES of
# the nodes in SKYPILOT_NODE_IPS, the first ones train and the others sample.
# MEGAGRPO_RUN_FOLDER: engines end after the trainers, which say it there. Leave it out if the cluster ends the engines.
# TERM: trainers save after the current step and end with status 85. docs/operate.md has the other ways to stop.
set -euo pipefail
unset CDPATH # with it, cd prints the folder
launch="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

first_set() {
    local name
    for name in "$@"; do
        [ -z "${!name:-}" ] || { echo "${!name}" && return; }
    done
}

rank="$(first_set NODE_RANK JOB_COMPLETION_INDEX SKYPILOT_NODE_RANK PET_NODE_RANK RANK)"
nodes="$(first_set NNODES NUM_NODES SKYPILOT_NUM_NODES PET_NNODES WORLD_SIZE)"
mapfile -t addresses <<<"${SKYPILOT_NODE_IPS:-$(first_set MASTER_ADDR PET_MASTER_ADDR)}"
first="${addresses[0]}" rank="${rank:-0}" nodes="${nodes:-1}" role="${MEGAGRPO_ROLE:-all}"
if [ -n "${TRAINER_NODES:-}" ] && [ -z "${MEGAGRPO_ROLE:-}" ]; then
    if [ "$rank" -lt "$TRAINER_NODES" ]; then
        role=trainers nodes="$TRAINER_NODES"
    else
        role=engines rank=$((rank - TRAINER_NODES)) nodes=$((nodes - TRAINER_NODES))
        first="${addresses[TRAINER_NODES]:-}"
        [ -n "$first" ] || { echo "anywhere.sh: SKYPILOT_NODE_IPS has no address $TRAINER_NODES: use MEGAGRPO_ROLE" >&2 && exit 2; }
    fi
fi
# Kubeflow's first pod: others cannot reach it under that name
[ "$rank" != 0 ] || [ "$first" != localhost ] || first="$(hostname -I | cut -d' ' -f1)"
export NODE_RANK="$rank" NNODES="$nodes" MASTER_ADDR="$first"
[ -n "$first" ] || unset MASTER_ADDR
# Those of a pod, which torchrun and engines would take for their own. Kubeflow's port is one of the engines'.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_PORT "${!PET_@}"
# A restarted launcher waits until the file server lets go of a dead node's lock, as in a requeued job of Slurm.
export SLURM_RESTART_COUNT="${SLURM_RESTART_COUNT:-${JOBSET_RESTART_ATTEMPT:-0}}"

# supervise SIGNAL COMMAND...     runs a command as $child, which gets this script's signals, and SIGNAL for a TERM: USR1 again and
# again, because a launcher that only starts ignores it, and a TERM would end it as if the run were over. It has a process group
# of its own (set -m): a terminal sends Ctrl-C to all of one, and with the trap's the child would get a second one, which ends it.
supervise() {
    local name term="$1"
    shift
    set -m
    "$@" &
    child=$!
    set +m
    for name in HUP INT USR1 USR2; do trap "kill -$name $child 2>/dev/null || true" "$name"; done
    trap "kill -$term $child 2>/dev/null || true" TERM
    [ "$term" != USR1 ] || trap 'while kill -USR1 "$child" 2>/dev/null; do sleep 2; done &' TERM
}
running() { kill -0 "$child" 2>/dev/null; }
# A trapped signal ends bash's `wait` early, but bash keeps the child's status until the next `wait`.
status_of_child() {
    while running; do wait "$child" || true; done
    wait "$child"
}
one_node() {
    source "$launch/node.sh"
    for_trainers
    exec "${megagrpo[@]}" run "$@"
}

ended="${MEGAGRPO_RUN_FOLDER:+$MEGAGRPO_RUN_FOLDER/logs/trainers_ended}"
last_end() { stat -c %y "$ended" 2>/dev/null || true; }
status=0
case "$role" in
    all)
        if [ "$nodes" = 1 ]; then
            supervise USR1 one_node "$@" # `megagrpo run` on one node ends at a TERM, but a pod gets no other signal
        else
            supervise USR1 bash "$launch/colocated_node.sh" "$@"
        fi
        status_of_child || status=$?
        ;;
    trainers)
        supervise USR1 bash "$launch/torchrun_node.sh" "$@"
        status_of_child || status=$?
        if [ -n "$ended" ] && [ "$rank" = 0 ]; then
            mkdir -p "${ended%/*}"
            [ "$status" = 0 ] || SKYPILOT_TASK_ID="" # a task may start again under its name, but not after 0
            echo "${SKYPILOT_TASK_ID:-}" >"$ended"
        fi
        ;;
    engines)
        before="$(last_end)" # of an earlier start, if it does not name this task
        [ "$(cat "$ended" 2>/dev/null)" != "${SKYPILOT_TASK_ID:-none}" ] || before=""
        supervise TERM bash "$launch/rollout_node.sh" "$@"
        while running && [ "$(last_end)" = "$before" ]; do
            sleep 2 &
            wait $! || true
        done
        if running; then
            kill -USR2 "$child" || true
            status_of_child || true
        else
            status_of_child || status=$?
        fi
        ;;
    *)
        echo "anywhere.sh: MEGAGRPO_ROLE=$role: it may be trainers, engines or all" >&2
        exit 2
        ;;
esac
exit "$status"
