"""Files that hold the experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig
from megagrpo.models.family import Family
from megagrpo.models.tensors import TensorSpec, layer_prefix

if TYPE_CHECKING:
    from torch import Tensor


class FusedExperts(Family):
    """Reads experts from gate_up_proj [experts, 2 width, hidden] and down_proj [experts, hidden,
    width]."""

    TRANSPOSED: ClassVar[bool] = False  # each expert's matrices are

    @property
    def fuses_experts(self) -> bool:
        """Tells whether the files are such."""
        return True

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf)
        if self.fuses_experts and hf.get("quantization_config"):
            problems.append(
                "quantization_config: fused experts in FP8, and published FP8 files, which have the "
                "experts apart, are not read; name the bfloat16 release of the model"
            )
        return problems

    def stored(self, hf: Mapping[str, Tensor], name: str) -> Tensor:
        layer, found, expert = name.partition(".experts.")
        if not (found and self.fuses_experts):
            return super().stored(hf, name)
        number, projection, _ = expert.split(".")
        down = projection == "down_proj"
        kind = projection if down else "gate_up_proj"
        matrix = hf[f"{self.stored_name(layer)}.experts.{kind}"][int(number)]
        matrix = matrix.t() if self.TRANSPOSED else matrix
        if down:
            return matrix
        gate, up = matrix.chunk(2)
        return gate if projection == "gate_proj" else up

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        specs = super().layer_tensors(arch, index)
        if not self.fuses_experts:
            yield from specs
            return
        yield from (spec for spec in specs if not spec.expert)
        hidden = arch.hidden_size
        width = arch.routed.ffn_size
        prefix = layer_prefix(index) + "mlp.experts."
        for name, matrix in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width))):
            matrix = matrix[::-1] if self.TRANSPOSED else matrix
            yield TensorSpec(prefix + name, (arch.routed.count, *matrix), "matrix", True)
