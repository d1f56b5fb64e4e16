"""Experts behind a router by their numbers."""

from __future__ import annotations

from dataclasses import dataclass


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
