# Sourced by the other *_node.sh. Sets `place`, the options for this node, and `megagrpo`, the command.
unset CDPATH # with it, cd prints the folder
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -n "${MEGAGRPO_FOLDER:-}" ] && ! cd "$MEGAGRPO_FOLDER"; then
    echo "megagrpo: relative paths start in $PWD: this node or image has no $MEGAGRPO_FOLDER; mount it" >&2
fi
place=()
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NODE_ADDR; do
    option="--${name,,}"
    [ -z "${!name:-}" ] || place+=("${option//_/-}" "${!name}")
done
# MEGAGRPO_NODE_PREFIX: words before the command, quoted as in a shell: `apptainer exec --nv image.sif`, or your own program that
# loads modules and ends with `exec "$@"`. Signals must reach the command.
eval "prefix=(${MEGAGRPO_NODE_PREFIX:-})"
megagrpo=("${prefix[@]}" "${MEGAGRPO_VENV:-$root/.venv}/bin/python" -P -W ignore -m megagrpo.cli)

# Call this before a command that starts trainers. torchrun numbers the ranks, and USR1 is ignored until a handler is set.
for_trainers() {
    unset RANK LOCAL_RANK WORLD_SIZE
    trap '' USR1
}

# first_names_itself "$@"     adds the first node's own address, unless one is named. Any other node needs that of the first,
# and the command refuses to start without it: with its own address it would wait for itself.
first_names_itself() {
    local rank="${NODE_RANK:-0}" words=" $* "
    [[ ! "$words" =~ " --node-rank"[\ =]([0-9]+) ]] || rank="${BASH_REMATCH[1]}"
    [ "$rank" != 0 ] || [ -n "${MASTER_ADDR:-}" ] || place+=(--master-addr "$(hostname -I | cut -d' ' -f1)")
}
