"""Formats of an engine rank's live parameters: which are in FP8, and whether each has the published one.

What SGLang 0.5.21 does with FP8 in blocks after loading (process_weights_after_loading): on Hopper nothing; before, it
packs values for Marlin (another dtype); on Blackwell DeepGEMM rounds scales to powers of two (`format_ue8m0`), values
with them. The last two are refused here: no publish writes what they leave.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megagrpo.families.quantization import FP8_BLOCK
from megagrpo.weights.copies.record import Copy, Recording, Specs

_FP8 = torch.float8_e4m3fn


def fp8_sources(recording: Recording, live: Mapping[str, Tensor]) -> list[str]:
    """Returns the HF tensors that the rank's FP8 parameters are filled from."""
    found = {copy.hf for copy in recording.copies if live[copy.parameter].dtype == _FP8}
    return sorted(found.union(*(of.hf for name, of in recording.computed.items() if live[name].dtype == _FP8)))


def format_problems(copies: Sequence[Copy], live: Mapping[str, Tensor], specs: Specs) -> Iterator[str]:
    """Yields a line for each parameter of a model in FP8 whose format is not that of the tensor published to it."""
    if not any(dtype == _FP8 for _, dtype in specs.values()):
        return
    for name, tensor in live.items():
        if getattr(tensor, "format_ue8m0", False):
            yield (
                f"parameter {name}: scales are rounded to powers of two after loading (DeepGEMM on Blackwell); set "
                "rollout.sglang: {fp8_gemm_runner_backend: triton}"
            )
    for parameter, hf in sorted({(copy.parameter, copy.hf) for copy in copies}):
        held, published = live[parameter].dtype, specs[hf][1]
        if (held == _FP8) != (published == _FP8):
            yield f"parameter {parameter} is in {held}, and HF tensor {hf} is published in {published}"


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    """Returns bfloat16(value * scale of its block) of a matrix, as SGLang's block_quant_dequant."""
    grid = scales.repeat_interleave(FP8_BLOCK[0], 0)[: weight.shape[0]].repeat_interleave(FP8_BLOCK[1], 1)
    return (weight.float() * grid[:, : weight.shape[1]]).bfloat16()
