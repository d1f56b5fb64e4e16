#!/usr/bin/env bash
# Installs missing packages and runs the tests: unit, dist (several ranks), e2e (real engine), cluster (real Slurm), gpu.
# usage: launch/test.sh [--full] [--record] [pytest arguments]     --full: also the slow tests; --record: writes the seconds
# into bench/results/test_seconds.md, only with all tests. With paths, one pytest runs only these; without paths,
# tests/run_parts.py runs all folders, two parts at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
selection=(-m "not slow")
if [[ "${1:-}" == --full ]]; then
    selection=()
    shift
fi
bash launch/install.sh --with smollm2 || bash launch/install.sh # without it the test of a pretrained model skips
[ $# -gt 0 ] || bash launch/lint.sh # all tests: first the linters, which take seconds

# The cluster tests want Debian's Slurm and network namespaces; without root or apt-get they skip and say why.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v munged && command -v ip; } >/dev/null; then
    echo "[test] installing slurm-wlm, munge and iproute2 for the cluster tests"
    packages="apt-get install -y --no-install-recommends slurm-wlm munge iproute2"
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive sh -c "$packages || { apt-get update && $packages; }" >/dev/null 2>&1 ||
        echo "[test] they could not be installed: the cluster tests will be skipped"
fi

export OMP_NUM_THREADS=1 # several ranks share few cores
# An engine, and every rank, imports half of torch, and SGLang or Megatron: 15 s of compiling and importing, 8 s where the
# bytecode is at hand. launch/install.sh makes none, and some environments forbid to write it: it goes into .venv here.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$(realpath "${MEGAGRPO_VENV:-.venv}")/bytecode"
python="${MEGAGRPO_VENV:-.venv}/bin/python"
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || exec "$python" -m pytest --durations=25 "${selection[@]}" "$@"
done
exec "$python" tests/run_parts.py "${selection[@]}" "$@"
