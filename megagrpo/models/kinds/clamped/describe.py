"""Experts with biases whose gate is clamped, by their numbers (gpt-oss; arXiv 2508.10925).

In files a layer's experts are together, their matrices transposed, a row of the gate before each of
up. Trainers and engines keep that order, so that loading copies whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.kinds.experts.describe import ExpertNames, Experts
from megagrpo.models.points import Row
from megagrpo.models.tensors import Cut, HfTensors, RankPlace, TensorSpec, mlp_weights

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.fields import Fields, Kernels

CLAMPED_NAMES = ExpertNames(size="intermediate_size")


@dataclass(frozen=True)
class ClampedExperts(Experts):
    """Adds the bound of the gate and of the linear half: (up + 1) gate sigmoid(1.702 gate)."""

    limit: float = 7.0

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        prefix += "mlp."
        yield TensorSpec(prefix + "router.weight", (self.count, hidden), "matrix")
        yield TensorSpec(prefix + "router.bias", (self.count,), "bias")
        for name, inputs, outputs in self._matrices(hidden):
            matrix = (self.count, inputs, outputs)
            yield TensorSpec(f"{prefix}experts.{name}", matrix, "matrix", True)
            yield TensorSpec(f"{prefix}experts.{name}_bias", (self.count, outputs), "bias", True)

    def _matrices(self, hidden: int) -> tuple[tuple[str, int, int], ...]:
        width = self.ffn_size
        return ("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)

    def load(self, mlp: MoELayer, hf: HfTensors, place: RankPlace) -> None:
        hf = hf.under("mlp.")
        mlp.router.weight.copy_(hf["router.weight"])
        mlp.router.bias.copy_(hf["router.bias"])
        for local, number in enumerate(mlp.local_expert_indices):
            weights, biases = (mlp_weights(mlp.experts, local, kind) for kind in ("weight", "bias"))
            for (name, *_), weight, bias in zip(self._matrices(0), weights, biases, strict=True):
                weight.copy_(hf[f"experts.{name}"][number].t())
                bias.copy_(hf[f"experts.{name}_bias"][number])

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """An expert is whole: Megatron would add its last bias once for each rank."""
        yield Cut("num_local_experts", self.count, "ep", p.ep)
        yield Cut("parts of an expert with biases", 1, "etp", p.etp)

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Fused kernels know neither this activation nor biases of grouped experts; the activation
        takes the place of Transformer Engine's."""
        return super().fields(actor, kernels) | {
            "add_bias_linear": True,
            "use_te_activation_func": True,
            "bias_dropout_fusion": False,
        }

    def points(self) -> list[Row]:
        logits, *others = super().points()
        return [(*logits[:2], "mlp.router", *logits[3:]), *others]
