#!/usr/bin/env bash
# Runs a command inside a root file system: an image that lies unpacked in a folder (`docker export CONTAINER | tar x -C ROOTFS`).
# For MEGAGRPO_NODE_PREFIX, where neither Apptainer nor pyxis is installed:
#   MEGAGRPO_NODE_PREFIX="launch/container/enter_rootfs.sh /shared/rootfs /shared /scratch --" megagrpo submit CONFIG
# usage: enter_rootfs.sh ROOTFS [FOLDER OF THE HOST ...] -- COMMAND...
# The command keeps its process id, so that signals reach it, its folder and its environment.
set -euo pipefail
rootfs="$(realpath "$1")"
shift
folders=(/proc /sys /dev)
while [ "$1" != -- ]; do
    folders+=("$1")
    shift
done
shift
as_root=()
[ "$EUID" = 0 ] || as_root=(--user --map-root-user)
export MEGAGRPO_ROOTFS="$rootfs"
inside='
    rootfs="$1" folder="$2" number="$3"
    for bound in "${@:4:number}"; do mkdir -p "$rootfs$bound" && mount --rbind "$bound" "$rootfs$bound"; done
    exec chroot "$rootfs" /bin/sh -c '"'"'cd "$0" && exec "$@"'"'"' "$folder" "${@:4 + number}"'
exec unshare --mount "${as_root[@]}" bash -euc "$inside" enter "$rootfs" "$PWD" "${#folders[@]}" "${folders[@]}" "$@"
