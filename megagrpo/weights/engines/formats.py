"""Checks that an engine rank's live parameters have the published formats.

After loading, SGLang 0.5.21 changes FP8 in blocks (process_weights_after_loading). On Hopper it
changes nothing. On older GPUs it packs values for Marlin, in another dtype. On Blackwell DeepGEMM
rounds scales to powers of two (`format_ue8m0`), and the values with them. The last two are refused,
because no publish writes these formats.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from megagrpo.weights.blocks import FP8
from megagrpo.weights.copies.recorder import Recording, Specs


def format_problems(
    recording: Recording, live: Mapping[str, Tensor], specs: Specs
) -> Iterator[str]:
    """Yields a line for each parameter of an FP8 model whose format is not the published one."""
    in_fp8 = {name for name, (_, dtype) in specs.items() if dtype == FP8}
    if not in_fp8:
        return
    for name, tensor in live.items():
        if getattr(tensor, "format_ue8m0", False):
            yield (
                f"parameter {name}: scales are rounded to powers of two after loading (DeepGEMM "
                "on Blackwell); set rollout.sglang: {fp8_gemm_runner_backend: triton}"
            )
    for parameter, hf in sorted({(copy.parameter, copy.hf) for copy in recording.copies}):
        if (live[parameter].dtype == FP8) != (hf in in_fp8):
            yield (
                f"parameter {parameter} is in {live[parameter].dtype}, and HF tensor {hf} is "
                f"published in {specs[hf][1]}, as the model's family says (see "
                "SGLANG_FP8_IGNORED_LAYERS)"
            )
    for parameter, computed in sorted(recording.computed.items()):
        if live[parameter].dtype == FP8 and not computed.hf & in_fp8:
            yield (
                f"parameter {parameter} is in FP8, and computed from "
                f"{', '.join(sorted(computed.hf))}, which are not"
            )
