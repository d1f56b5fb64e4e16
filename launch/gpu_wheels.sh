#!/usr/bin/env bash
# Downloads the wheels (5 MB) that bench/gpu.py and tests/gpu need besides torch and transformers into FOLDER, for a machine with
# Python 3.12 (x86-64) and without a package index. docs/evidence/gpu-kit.md says how to use them. usage: launch/gpu_wheels.sh FOLDER
set -euo pipefail
folder="${1:?usage: launch/gpu_wheels.sh FOLDER}"
platforms=(--platform any)
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d "$folder" megatron-core==0.19.2 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types typing-inspection orjson
ls "$folder"
