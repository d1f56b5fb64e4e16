"""SGLang on the device: packages of kernels that it imports where there is CUDA, and torch in the place of those that
a float32 engine without graphs calls. site/sitecustomize.py calls `install` before the first import of sglang.

Triton and sgl_kernel are the stand-ins of an engine on a CPU. Whatever else is called raises.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

import torch
from torch import Tensor

from megagrpo.cpu.engine import sitecustomize as on_a_cpu
from megagrpo.cpu.engine_settings import FOLDER

ABSENT = ("flashinfer.", "sgl_kernel.", "deep_gemm.", "triton_kernels.")
# kernels of FlashInfer and DeepGEMM are not chosen; versions of what is stood in are not compared
VARIABLES = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}


class _Absent(types.ModuleType):
    """A package of kernels, or a name in it, which raises when it is called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Absent(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is not on the pretended device")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(ABSENT) and name != "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def copies_one_by_one(module) -> None:
    """A batch goes to its buffers by torch's copies, as SGLang does for tensors that its kernel refuses."""
    module.try_small_copy = lambda *_: False


def sums_of_rows(module) -> None:
    """The normalizer of a prompt's log-probabilities, by SGLang's formula for other devices."""

    def row_logsumexp(x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.float().amax(-1)
        return largest, (x.float() - largest[:, None]).logsumexp(-1)

    module.row_logsumexp = row_logsumexp


def cache_after_rotation(module) -> None:
    """In bfloat16 a kernel rotates keys and writes them; torch's rotation refuses to."""
    module.enable_fused_set_kv_buffer = lambda *_: False


def embedding_by_mask(module) -> None:
    """A vocabulary in parts is read by masked indices, as SGLang does for dtypes that its kernel refuses."""
    module.VocabParallelEmbedding._use_triton_embedding = lambda *_: False


def ordered_start(module) -> None:
    """What an engine makes at its start in the default stream, its scheduler uses in another and nothing orders them:
    on a GPU seconds lie between. The list of free slots is made there too, and freed while its last reader may run."""
    loop = module.dispatch_event_loop

    def dispatch_event_loop(scheduler) -> None:
        torch.cuda.synchronize()
        scheduler.token_to_kv_pool_allocator.clear()
        loop(scheduler)

    module.dispatch_event_loop = dispatch_event_loop


REPAIRS = {
    "torchvision.extension": on_a_cpu.torchvision_operators,
    "sglang.kernels.ops.memory.small_copy": copies_one_by_one,
    "sglang.srt.layers.logsumexp": sums_of_rows,
    "sglang.srt.models.utils": cache_after_rotation,
    "sglang.srt.layers.vocab_parallel_embedding": embedding_by_mask,
    "sglang.srt.managers.scheduler": ordered_start,
}


def install() -> None:
    """Gives this process, and those that it starts, the stand-ins."""
    os.environ.update(VARIABLES)
    sys.path.insert(0, str(FOLDER))
    sys.meta_path.append(_Finder())
    on_a_cpu.REPAIRS.clear()
    on_a_cpu.REPAIRS.update(REPAIRS)  # its finder makes them
