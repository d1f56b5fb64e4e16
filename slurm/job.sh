# Sourced by the *.sbatch. Starts the nodes of a job, forwards signals and ends with the trainers' exit code. Requeues the job if
# it was stopped before its last step.

say() { echo "[$(date +%H:%M:%S) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1))] $*"; }

# Variables that sbatch inherits from an interactive shell would limit the steps to the shell's cores, one core, the shell's
# memory, the job's number of tasks instead of one per node, or all GPUs of the job on some of its nodes. Tasks by GPU exclude
# one per node. sbatch --mem=0 sets no memory per node.
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_{NODE,GPU,TRES} SLURM_GPUS SLURM_GPUS_PER_TASK
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_CPU_BIND SLURM_MEM_PER_{CPU,GPU,NODE}

export SLURM_EXPORT_ENV=ALL # so that steps get the functions and secrets below, even after `sbatch --export=NONE`

export MEGAGRPO_FOLDER="$PWD" # relative paths start here on every node, also inside an image, which has its own working directory

# Prints the first node in a list. It reads the list to its end, because an early end sends SIGPIPE to a list of thousands of nodes.
first_node() {
    local nodes
    mapfile -t nodes < <(scontrol show hostnames "$1")
    echo "${nodes[0]}"
}

# Prints the address at which other nodes reach a node. Node names need not resolve, so this is the address or name that Slurm
# connects to. If a hosts file maps the node's name to loopback, it is the address on the route to another node of the job.
# Without scontrol, as in pyxis images, it prints nothing: the first node then has MASTER_ADDR, which the batch script found,
# and each other one its address towards that.
address_of() {
    local named found others
    named="$(scontrol show node "$1" 2>/dev/null | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')" || true
    [ -n "$named" ] || return 0
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

# The command for every node of a step. `exec` replaces it by the launcher, so signals to the step reach the launcher.
on_node='NODE_ADDR=$(address_of "$SLURMD_NODENAME") NODE_RANK=$SLURM_PROCID NNODES=$SLURM_NTASKS exec bash "$@"'

# More srun options for each node's step, from `megagrpo submit --srun OPTION`, quoted as in a shell.
eval "srun_options=(${MEGAGRPO_SRUN:-})"

# start SCRIPT FIRST_NODE PORT SRUN_OPTION... -- EXPERIMENT...      sets $started to srun's process id
start() {
    local script="$1" first port="$3" options=(--ntasks-per-node=1 --unbuffered --kill-on-bad-exit=0 --cpu-bind=none)
    first="$(address_of "$2")"
    first="${first:-$2}"
    shift 3
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    MASTER_ADDR="$first" MASTER_PORT="$port" srun "${options[@]}" "${srun_options[@]}" bash -c "$on_node" on_node "$MEGAGRPO_ROOT/launch/$script" "${@:2}" &
    started=$!
}

secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# Repeats the signal until the step ends, because the trainers may still be starting.
ask_to_stop() {
    asked=yes
    say "asked to stop: the trainers save after this step"
    while kill -USR1 "$1" 2>/dev/null; do sleep 2; done &
}

# A single USR2 tells trainers that the rollout service has ended. A pre-emption first tells the steps only, so this is scancel,
# or a time limit that comes after USR1.
end_at_once() {
    [ "${asked:-}" = yes ] || cancelled=yes
    say "told to end"
    kill -USR2 "$@" 2>/dev/null || true
    sleep 1
    kill -USR2 "$@" 2>/dev/null || true
}

running() { kill -0 "$1" 2>/dev/null; }

# Returns a child's exit status. A trapped signal ends bash's `wait` early, but bash keeps the status until the next `wait`.
status_of() {
    while running "$1"; do wait "$1" || true; done
    wait "$1"
}

# Sets $port to the first port of the job.
secrets_and_port() {
    # Jobs that share nodes need different ports. These are above the engines' and below those that the kernel chooses.
    port=$((30000 + SLURM_JOB_ID % 25 * 100))
    RAY_AUTH_TOKEN="$(secret)" MEGAGRPO_API_KEY="$(secret)" # for the job's Ray, and for engines and service
    export RAY_AUTH_TOKEN MEGAGRPO_API_KEY
}

# run_job FIRST_TRAINER FIRST_ROLLOUT EXPERIMENT...     reads srun options from the arrays on_trainers and on_rollout
run_job() {
    local status=0
    secrets_and_port
    start rollout_node.sh "$2" "$port" "${on_rollout[@]}" -- "${@:3}"
    rollout=$started
    start torchrun_node.sh "$1" "$((port + 99))" "${on_trainers[@]}" -- "${@:3}"
    trainers=$started
    say "trainers on ${on_trainers[*]} from $1, rollout on ${on_rollout[*]} from $2"
    trap 'ask_to_stop "$trainers"' USR1
    trap 'end_at_once "$trainers" "$rollout"' TERM
    while running "$trainers" && running "$rollout"; do wait -n "$trainers" "$rollout" || true; done
    if running "$trainers"; then
        say "the rollout service has ended before the trainers, which save the steps that are finished"
        kill -USR2 "$trainers" || true
    fi
    status_of "$trainers" || status=$?
    say "the trainers ended with status $status"
    kill -USR2 "$rollout" 2>/dev/null || true
    status_of "$rollout" || true
    end_job "$status"
}

# run_alone PID      for a job with trainers and engines in one step
run_alone() {
    local status=0
    everything="$1"
    trap 'ask_to_stop "$everything"' USR1
    trap 'end_at_once "$everything"' TERM
    status_of "$everything" || status=$?
    say "it ended with status $status"
    end_job "$status"
}

# end_job STATUS      85: saved before the last step. 86: the same after `megagrpo stop`, which ends the job
end_job() {
    if [ "$1" = 85 ] && [ "${cancelled:-}" != yes ]; then # else Slurm would start a cancelled job again
        say "back into the queue, to go on from the checkpoint"
        trap 'exit 85' TERM # a requeue waits until Slurm has ended this script
        scontrol requeue "$SLURM_JOB_ID" && for _ in {1..60}; do sleep 1; done
    fi
    exit "$1"
}
