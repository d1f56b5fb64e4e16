"""DeepSeek-V4's experts by their numbers: clamped, scored by the square root of a softplus; in the
first layers a table of the vocabulary chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.tensors import HfTensors, RankPlace, TensorSpec, layer_index

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megagrpo.config.actor import ActorConfig
    from megagrpo.models.fields import Fields, Kernels

_TABLE = "gate.tid2eid"  # of files: the experts of each token of the vocabulary


@dataclass(frozen=True)
class HashedExperts(Experts):
    """Adds the number of layers with a table of the vocabulary."""

    hashed: int = 0
    limit: float = 10.0
    vocabulary: int = field(default=0, compare=False)

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        bias = f"{prefix}{self.names.module}.{self.names.bias}"
        hashed = layer_index(prefix) < self.hashed
        for spec in super().tensors(hidden, prefix):
            if hashed and spec.name == bias:
                name = f"{prefix}{self.names.module}.{_TABLE}"
                shape = (self.vocabulary, self.per_token)
                yield TensorSpec(
                    name, shape, "choice", dtype="int64", trained=False, below=self.count
                )
            else:
                yield spec

    def load(self, mlp: MoELayer, hf: HfTensors, place: RankPlace) -> None:
        own = self
        if layer_index(hf.begin) < self.hashed:
            mlp.router.table.copy_(hf[f"{self.names.module}.{_TABLE}"])
            mlp.router.expert_bias.zero_()  # Megatron's routers have it all the same
            own = replace(self, router_bias=False)
        super(HashedExperts, own).load(mlp, hf, place)

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """A sigmoid router's but for the function; the fused kernel does not know a table."""
        return super().fields(actor, kernels) | {
            "moe_router_score_function": "sqrtsoftplus",
            "moe_router_fusion": False,
        }

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        """Returns Megatron's names without "moe": a router that is computed again inside its layer
        would see another micro-batch's tokens."""
        return [name for name in super().recomputed(engine, scaled) if name != "moe"]
