"""Experts behind a router by their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.models.costs import LayerCost, Share
from megagrpo.models.kinds.experts import cost
from megagrpo.models.points import Row


@dataclass(frozen=True)
class Experts:
    """Holds the numbers of a layer's router, its routed and its shared experts."""

    count: int
    per_token: int
    ffn_size: int
    norm_topk: bool = True  # the weights of a token's experts are divided by their sum
    sigmoid: bool = False  # scores are sigmoids; else a softmax
    router_bias: bool = False  # a float32 for each expert, added to scores for the choice alone
    groups: int = 1  # equal groups of experts, of which a token's experts come from the best
    top_groups: int = 1
    scale: float = 1.0  # times the output of routed experts
    dense_layers: int = 0  # first layers, which have one MLP and no experts
    shared_ffn_size: int = 0  # of the experts that every token meets, together; 0: none
    shared_gate: bool = False  # times a sigmoid of the token

    @property
    def id_type(self) -> str:
        """Returns the name of the smallest type that holds every expert's number, in numpy and
        torch."""
        return "uint8" if self.count <= 256 else "int16"

    @property
    def share(self) -> float:
        """Returns the part of the routed experts that a token meets."""
        return self.per_token / self.count

    def cost(self, at: Share, imbalance: float) -> LayerCost:
        """Returns the cost of a layer's experts for a micro-batch. imbalance: tokens of the fullest
        rank, over the mean."""
        return cost.layer(self, at, imbalance)

    def points(self, module: str) -> list[Row]:
        """Returns what a router computes. module: the engine's of the experts."""
        topk = f"{module}.topk"
        router = "mlp.router"
        return [
            ("router_logits", "router logits", f"{module}.gate", (router, "gating", 0), "whole"),
            ("experts", "experts chosen", (topk, "out", 1), (router, "out", 1), "map"),
            ("expert_shares", "weights of the experts, as shares,", topk, router, "shares"),
        ]
