"""Runs bench/gpu.py with only the packages that docs/evidence/gpu.md lists. usage: bare_machine.py
[its arguments]

Other installed packages are hidden. Also imports tests/gpu, which must be collected there.
"""

import runpy
import sys
import warnings
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

warnings.simplefilter("ignore")
from megagrpo.cpu.torchvision_ops import define_torchvision_operators  # noqa: E402

define_torchvision_operators()
import_module("transformers.models.qwen3.modeling_qwen3")  # has requirements of its own

ROOT = Path(__file__).parents[3]
ABSENT = {"ray", "sglang", "sgl_kernel", "math_verify", "transformer_engine", "apex", "flash_attn"}
ABSENT |= {"liger_kernel", "cut_cross_entropy", "tensorboard", "matplotlib", "wandb", "aiohttp"}
ABSENT |= {"hypothesis", "pytest_timeout", "peft", "torchvision"}
found = PathFinder.find_spec


@staticmethod
def present(name, *place):
    """Finds a module unless it is absent."""
    return None if name.partition(".")[0] in ABSENT else found(name, *place)


PathFinder.find_spec = present
for name in list(sys.modules):
    if name.partition(".")[0] in ABSENT:
        del sys.modules[name]
for name in ("tests.conftest", "tests.gpu.conftest", "tests.gpu.test_kit", "tests.gpu.test_kernels_cuda"):
    import_module(name)
for name in ("megagrpo.tools.certify.command", "megagrpo.actor.saving", "megagrpo.weights.expected_digests"):
    import_module(name)
runpy.run_path(str(ROOT / "bench" / "gpu.py"), run_name="__main__")
