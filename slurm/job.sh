# Sourced by the *.sbatch: starts the nodes of one job, hands signals on, ends with the trainers' exit code, and puts the job back into the queue when it was stopped before its last step.

say() { echo "[$(date +%H:%M:%S) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1))] $*"; }

# What an interactive shell leaves in the environment of sbatch would bind the steps: to its cores, to one core, to its memory,
# to the job's number of tasks instead of one for each node, to all the job's GPUs on some of its nodes.
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_GPUS
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_CPU_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU

export SLURM_EXPORT_ENV=ALL # else after `sbatch --export=NONE` steps would not get the functions and secrets below

# The first node of a list. Read to its end: what ends a pipe early ends a list of thousands of nodes with SIGPIPE.
first_node() {
    local nodes
    mapfile -t nodes < <(scontrol show hostnames "$1")
    echo "${nodes[0]}"
}

# The address of a node for others. Node names need not resolve; this is what Slurm itself connects to, an address or a name.
# Many hosts files give a machine's own name to its loopback: then that of its route to another node of the job.
address_of() {
    local named found others
    # inside an image of pyxis there is no scontrol: the node's name then
    named="$(scontrol show node "$1" 2>/dev/null | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')" || true
    named="${named:-$1}"
    found="$(first_address "$named")"
    if [[ "$found" == 127.* && "$found" != "$named" ]]; then
        others="$SLURM_JOB_NODELIST${SLURM_JOB_NODELIST_HET_GROUP_1:+,$SLURM_JOB_NODELIST_HET_GROUP_1}"
        others="$(first_address "$(scontrol show hostnames "$others" | grep -vxm1 "$1")")" || true
        found="$(ip -4 route get "${others:-none}" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p')" || true
    fi
    echo "${found:-$named}"
}
first_address() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }' || true; }
export -f address_of first_address

# What is told to every node of a step. It becomes the launcher itself: signals to the step reach it.
on_node='NODE_ADDR=$(address_of "$SLURMD_NODENAME") NODE_RANK=$SLURM_PROCID NNODES=$SLURM_NTASKS exec bash "$@"'

# Further options of srun for every node's step, from `megagrpo submit --srun OPTION`: words as a shell reads them.
eval "srun_options=(${MEGAGRPO_SRUN:-})"

# start SCRIPT FIRST_NODE PORT SRUN_OPTION... -- EXPERIMENT...      leaves the process id of srun in $started
start() {
    local script="$1" first port="$3" options=(--ntasks-per-node=1 --unbuffered --kill-on-bad-exit=0 --cpu-bind=none)
    first="$(address_of "$2")"
    shift 3
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    MASTER_ADDR="$first" MASTER_PORT="$port" srun "${options[@]}" "${srun_options[@]}" bash -c "$on_node" on_node "$MEGAGRPO_ROOT/launch/$script" "${@:2}" &
    started=$!
}

secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# The trainers' step may only be starting: said until it ends.
ask_to_stop() {
    say "asked to stop: the trainers save after this step"
    while kill -USR1 "$1" 2>/dev/null; do sleep 2; done &
}

running() { kill -0 "$1" 2>/dev/null; }

# The exit status of a child. A trapped signal ends bash's own `wait` early; the status is kept until it is asked for.
status_of() {
    while running "$1"; do wait "$1" || true; done
    wait "$1"
}

# Leaves the first port of the job in $port.
secrets_and_port() {
    # Nodes may be shared with other jobs, whose ports should be others: below the kernel's own choices, above the engines'.
    port=$((30000 + SLURM_JOB_ID % 25 * 100))
    RAY_AUTH_TOKEN="$(secret)" MEGAGRPO_API_KEY="$(secret)" # to join the job's Ray; to talk to its engines and service
    export RAY_AUTH_TOKEN MEGAGRPO_API_KEY
}

# run_job FIRST_TRAINER FIRST_ROLLOUT EXPERIMENT...     with the srun options in the arrays on_trainers and on_rollout
run_job() {
    local status=0
    secrets_and_port
    start rollout_node.sh "$2" "$port" "${on_rollout[@]}" -- "${@:3}"
    rollout=$started
    start torchrun_node.sh "$1" "$((port + 99))" "${on_trainers[@]}" -- "${@:3}"
    trainers=$started
    say "trainers on ${on_trainers[*]} from $1, rollout on ${on_rollout[*]} from $2"
    trap 'ask_to_stop "$trainers"' USR1
    trap 'say "told to end"; kill -USR2 "$trainers" "$rollout" 2>/dev/null || true' TERM
    while running "$trainers" && running "$rollout"; do wait -n "$trainers" "$rollout" || true; done
    if running "$trainers"; then
        say "the rollout service has ended before the trainers"
        kill -USR2 "$trainers" || true
    fi
    status_of "$trainers" || status=$?
    say "the trainers ended with status $status"
    kill -USR2 "$rollout" 2>/dev/null || true
    status_of "$rollout" || true
    end_job "$status"
}

# run_alone PID      a job whose trainers and engines are one step
run_alone() {
    local status=0
    everything="$1"
    trap 'ask_to_stop "$everything"' USR1
    trap 'say "told to end"; kill -USR2 "$everything" 2>/dev/null || true' TERM
    status_of "$everything" || status=$?
    say "it ended with status $status"
    end_job "$status"
}

# end_job STATUS      85: saved before the last step; 86: the same for `megagrpo stop`, which ends the job (megagrpo/system/stop_request.py)
end_job() {
    if [ "$1" = 85 ]; then
        say "back into the queue, to go on from the checkpoint"
        trap 'exit 85' TERM # Slurm ends this script now; a requeue waits until it has
        scontrol requeue "$SLURM_JOB_ID" && for _ in {1..60}; do sleep 1; done
    fi
    exit "$1"
}
