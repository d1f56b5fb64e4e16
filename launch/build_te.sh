#!/usr/bin/env bash
# Builds Transformer Engine's extension for torch against the CUDA wheels of VENV's torch, installs it there and imports it.
# It is only C++: it needs no GPU and no driver, and nvcc only for the version. launch/install.sh calls it on a GPU machine; you
# can call it on any machine whose VENV has torch for CUDA. usage: launch/build_te.sh VENV [VERSION] [WHEEL FOLDER]
# MAX_JOBS: parallel compilers, by default one per core. With exit status 1 it prints which header or tool is missing.
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

# Setup takes headers from CUDA_HOME only, which has no cuDNN and NCCL; its variable for wheels came with 2.13. CPATH
# serves every version.
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
# with its requirements: it imports onnx and onnxscript, which nothing else brings
"$python" -m pip install --no-compile "$wheels"/transformer_engine_torch-"$version"-*.whl
"$python" -c 'import torch, transformer_engine.pytorch' || { say "it is built, but its import fails (above: why)" >&2; exit 1; }
say "built in $((SECONDS - started)) s: $(du -h "$wheels"/transformer_engine_torch-"$version"-*.whl | tr '\t' ' ')"
