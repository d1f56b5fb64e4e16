# Sourced by the other *_node.sh: this node's place as options in the array `place`, and the Python of the project.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
place=()
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NODE_ADDR; do
    option="--${name,,}"
    [ -z "${!name:-}" ] || place+=("${option//_/-}" "${!name}")
done
# MEGAGRPO_NODE_PREFIX: a command before it, words as a shell reads them: `apptainer exec --nv image.sif`, or a program of yours
# that loads modules and ends with `exec "$@"`. Signals must reach what it starts.
eval "prefix=(${MEGAGRPO_NODE_PREFIX:-})"
megagrpo=("${prefix[@]}" "${MEGAGRPO_VENV:-$root/.venv}/bin/python" -W ignore -m megagrpo.cli)

# Before a command that starts trainers: torchrun numbers the ranks, not a launcher around it; USR1 waits until it can be obeyed.
for_trainers() {
    unset RANK LOCAL_RANK WORLD_SIZE
    trap '' USR1
}
