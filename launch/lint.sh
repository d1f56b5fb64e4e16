#!/usr/bin/env bash
# Lints, checks the format and checks the types, with the settings in pyproject.toml.
# usage: launch/lint.sh [--fix]     --fix: also fixes and formats
set -euo pipefail
unset CDPATH # with it, cd may go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin="${MEGAGRPO_VENV:-.venv}/bin"
if [ "${1:-}" = --fix ]; then
    "$bin/ruff" check --fix
    "$bin/ruff" format
else
    "$bin/ruff" check
    "$bin/ruff" format --check
fi
"$bin/mypy"
