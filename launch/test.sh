#!/usr/bin/env bash
# Installs what is missing and runs the tests: unit, dist (several ranks), e2e (real engine), cluster (real Slurm), hostcuda
# (pretended CUDA device), gpu.
# usage: launch/test.sh [--full] [--changed] [--record] [pytest arguments]
# --full: also slow tests. --changed: the unit tests that belong to the files that differ from main, nearest first. --record:
# write the seconds into bench/results/test_seconds.md, only with all tests. With paths, one pytest runs only those, and
# only tests of cluster/ install Slurm and only those of e2e/ a pretrained model. Without paths, tests/run_parts.py runs all
# folders, two parts at a time.
set -euo pipefail
unset CDPATH # with it, cd may go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${MEGAGRPO_VENV:-.venv}/bin/python"
selection=(-m "not slow")
changed=no
while :; do
    case "${1:-}" in
        --full) selection=() ;;
        --changed) changed=yes ;;
        -h | --help) sed -n '2,/^set /s/^# //p' launch/test.sh && exit ;;
        *) break ;;
    esac
    shift
done
if [ $changed = yes ]; then
    bash launch/install.sh
    listed="$("$python" tests/changed.py)"
    [ -n "$listed" ] || { echo "[test] no test belongs to a file that differs from main" && exit; }
    mapfile -t unit < <(grep '^tests/unit/' <<<"$listed" || true)
    echo "[test] not run, but also theirs:" $(grep -v '^tests/unit/' <<<"$listed" || true)
    [ ${#unit[@]} -gt 0 ] || exit 0
    set -- "${unit[@]}" "$@"
fi
paths=()
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || paths+=("$(realpath "${argument%%::*}")/")
done

# Whether tests of a folder run.
runs() {
    local path
    [ ${#paths[@]} -gt 0 ] || return 0
    for path in "${paths[@]}"; do
        case "$path" in "$PWD/tests/$1/"* | "$PWD/tests/" | "$PWD/") return 0 ;; esac
    done
    return 1
}

# Installs Debian packages; without starting their services, nor asking.
debian() {
    local command="apt-get install -y --no-install-recommends $*"
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive sh -c "$command || { apt-get update && $command; }" >/dev/null 2>&1 ||
        echo "[test] $* could not be installed: tests that need them will be skipped"
}

# The cluster tests need Debian's Slurm and network namespaces, one of the unit tests its Prometheus. Without root or apt-get
# they are skipped with the reason. The package manager works while pip does and the linters do.
if runs cluster && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    {
        { command -v slurmctld && command -v munged && command -v ip; } >/dev/null || debian slurm-wlm munge iproute2
        command -v prometheus >/dev/null || debian prometheus
    } &
fi
if runs e2e; then
    bash launch/install.sh --with smollm2 || bash launch/install.sh # if this fails, the test with a pretrained model is skipped
else
    bash launch/install.sh
fi
if [ ${#paths[@]} = 0 ]; then # all tests: linters first, because they find mistakes in seconds
    # On another core the pretended device is compiled. If it cannot be, its tests say why.
    compile='import torch; from tests.hostcuda.build import library; torch.version.cuda or library()'
    PYTHONPATH="$PWD" "$python" -c "$compile" >/dev/null 2>&1 &
    bash launch/lint.sh
fi
wait # for the package manager and the compiler

export OMP_NUM_THREADS=1 # several ranks share few cores
# Engines and ranks import half of torch, and SGLang or Megatron. That takes 15 s, or 8 s with bytecode. launch/install.sh
# makes no bytecode, and some environments forbid to write it, so it goes into .venv here.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$(realpath "${MEGAGRPO_VENV:-.venv}")/bytecode"
[ ${#paths[@]} = 0 ] || exec "$python" -m pytest --durations=25 "${selection[@]}" "$@"
exec "$python" tests/run_parts.py "${selection[@]}" "$@"
