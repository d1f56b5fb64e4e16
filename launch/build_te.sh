#!/usr/bin/env bash
# Builds Transformer Engine's torch extension against the CUDA wheels that torch installed, installs it into VENV and imports
# it. It is C++ only, so you need no GPU and no driver, and nvcc only for its version. launch/install.sh calls it on a GPU
# machine. You can run it on any machine whose VENV has torch for CUDA. usage: launch/build_te.sh VENV [VERSION] [WHEEL FOLDER]
# MAX_JOBS: concurrent compilers, by default one per core. Exit status 1: a header or tool is missing, named in the message.
set -euo pipefail
venv="${1:?usage: launch/build_te.sh VENV [VERSION] [WHEEL FOLDER]}"
version="${2:-2.14.1}"
folder="${3:-}"
python="$venv/bin/python"
started=$SECONDS
say() { printf '[build_te] %s\n' "$*"; }

cuda="$("$python" -c 'import torch; print(torch.version.cuda or "")')"
[ -n "$cuda" ] || { say "torch in $venv is built without CUDA: Transformer Engine needs the one for CUDA" >&2; exit 1; }
[ "${cuda%%.*}" = 13 ] || { say "torch in $venv is for CUDA $cuda; this script builds for CUDA 13" >&2; exit 1; }
command -v g++ >/dev/null || { say "no C++ compiler: install g++" >&2; exit 1; }

"$python" -m pip install --no-compile 'setuptools>=77' wheel ninja pybind11 packaging \
    "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-nvvm==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
"$python" -m pip install --no-compile "transformer_engine_cu13==$version" "transformer_engine==$version"

# Setup reads headers only from CUDA_HOME, which has no cuDNN and NCCL. A variable for wheels exists from 2.13 on, but CPATH
# works for every version.
nvidia="$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')"
includes=()
for include in "$nvidia"/*/include; do includes+=("$include"); done
for header in cuda_runtime.h cudnn.h nccl.h cublas_v2.h cusolverDn.h cusparse.h nvtx3/nvToolsExt.h; do
    found=no
    for include in "${includes[@]}"; do [ ! -e "$include/$header" ] || found=yes; done
    [ $found = yes ] || { say "$header is in none of $nvidia/*/include" >&2; exit 1; }
done
[ -x "$nvidia/cu13/bin/nvcc" ] || { say "$nvidia/cu13/bin/nvcc is missing: package nvidia-cuda-nvcc" >&2; exit 1; }

export CUDA_HOME="$nvidia/cu13" NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
CPATH="$(IFS=:; printf '%s' "${includes[*]}")${CPATH:+:$CPATH}"
MAX_JOBS="${MAX_JOBS:-$(nproc)}"
export CPATH MAX_JOBS
wheels="${folder:-$(mktemp -d)}"
[ -n "$folder" ] || trap 'rm -r "$wheels"' EXIT
say "compiling transformer_engine_torch $version for torch $("$python" -c 'import torch; print(torch.__version__)')"
"$python" -m pip wheel --no-deps --no-build-isolation --no-binary transformer_engine_torch \
    --wheel-dir "$wheels" "transformer_engine_torch==$version"
# with its requirements, because it imports onnx and onnxscript, which nothing else installs
"$python" -m pip install --no-compile "$wheels"/transformer_engine_torch-"$version"-*.whl
"$python" -c 'import torch, transformer_engine.pytorch' || { say "it is built, but its import fails (above: why)" >&2; exit 1; }
say "built in $((SECONDS - started)) s: $(du -h "$wheels"/transformer_engine_torch-"$version"-*.whl | tr '\t' ' ')"
