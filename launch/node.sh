# The other *_node.sh source this file. It sets the array `place`, options for this node, and the command `megagrpo`.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
place=()
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NODE_ADDR; do
    option="--${name,,}"
    [ -z "${!name:-}" ] || place+=("${option//_/-}" "${!name}")
done
# MEGAGRPO_NODE_PREFIX: a command before it, in shell words: `apptainer exec --nv image.sif`, or your own program that loads
# modules and ends with `exec "$@"`. It must pass signals on.
eval "prefix=(${MEGAGRPO_NODE_PREFIX:-})"
megagrpo=("${prefix[@]}" "${MEGAGRPO_VENV:-$root/.venv}/bin/python" -W ignore -m megagrpo.cli)

# Call it before a command that starts trainers. torchrun numbers the ranks, not an outer launcher; USR1 is ignored until the
# command can handle it.
for_trainers() {
    unset RANK LOCAL_RANK WORLD_SIZE
    trap '' USR1
}
