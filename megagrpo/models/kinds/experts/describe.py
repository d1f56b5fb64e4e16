"""Experts behind a router by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share, mlp_cost
from megagrpo.models.points import Row
from megagrpo.models.tensors import (
    GATED_NAMES,
    Cut,
    GatedNames,
    HfTensors,
    RankPlace,
    TensorSpec,
    load_mlp,
    mlp_tensors,
    mlp_weights,
)

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.fields import Fields, Kernels


class ExpertNames(NamedTuple):
    """What files call the parts of such a layer, and config.json their sizes."""

    module: str = "mlp"  # router and experts, in a layer
    shared: str = "shared_experts"  # those that every token meets, together
    bias: str = "gate.e_score_correction_bias"
    projections: GatedNames = GATED_NAMES  # of a routed expert
    shared_projections: GatedNames = GATED_NAMES
    size: str = "moe_intermediate_size"  # of config.json
    shared_size: str = "n_shared_experts x moe_intermediate_size"  # likewise


NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames(
    module="block_sparse_moe",
    bias="e_score_correction_bias",
    projections=GatedNames(gate="w1", up="w3", down="w2"),
    size="intermediate_size",
)


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
    latent_size: int = 0  # width in which routed experts work, between two projections; 0: hidden
    limit: float = 0.0  # bound of gates and of linear halves, of MLPs' too; 0: none
    # no numbers: two models do not differ by these
    bias_dtype: str | None = field(default="float32", compare=False)  # engines'; None: the model's
    names: ExpertNames = field(default=NAMES, compare=False)
    # why experts that engines chose cannot be replayed
    unreported: str = field(default="", compare=False)

    @classmethod
    def read(cls, hf: HfConfig, count: str, names: ExpertNames = NAMES, **numbers: Any) -> Self:
        """Reads a config.json; count: its key of the number of experts. numbers: those that are no
        common keys."""
        each = hf["num_experts_per_tok"]
        return cls(hf[count], each, hf[names.size], names=names, **numbers)

    @property
    def id_type(self) -> str:
        """Returns the name of the smallest type that holds every expert's number, in numpy and
        torch."""
        return "uint8" if self.count <= 256 else "int16"

    @property
    def gated(self) -> bool:
        """Tells whether an expert is a gated MLP."""
        return bool(self.names.projections.gate)

    @property
    def takes_adapters(self) -> bool:
        """Tells whether models/layers/lora.py knows them."""
        others = self.sigmoid or self.shared_ffn_size or self.dense_layers
        return type(self) is Experts and self.names.module == "mlp" and not others

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields router, shared and routed experts; prefix: of the layer."""
        names = self.names
        prefix += names.module + "."
        yield TensorSpec(prefix + "gate.weight", (self.count, hidden), "matrix")
        if self.router_bias:
            bias = prefix + names.bias
            yield TensorSpec(bias, (self.count,), "bias", dtype=self.bias_dtype, trained=False)
        if self.shared_ffn_size:
            shared = f"{prefix}{names.shared}."
            yield from mlp_tensors(
                hidden, self.shared_ffn_size, shared, names=names.shared_projections
            )
        if self.shared_gate:
            yield TensorSpec(prefix + "shared_expert_gate.weight", (1, hidden), "matrix")
        if latent := self.latent_size:
            yield TensorSpec(prefix + "fc1_latent_proj.weight", (latent, hidden), "matrix")
            yield TensorSpec(prefix + "fc2_latent_proj.weight", (hidden, latent), "matrix")
        for number in range(self.count):
            expert = f"{prefix}experts.{number}."
            size = latent or hidden
            yield from mlp_tensors(size, self.ffn_size, expert, True, names.projections)

    def load(self, mlp: MoELayer, hf: HfTensors, place: RankPlace) -> None:
        """Copies this rank's slices of a layer's HF tensors into Megatron's parameters."""
        names = self.names
        hf = hf.under(names.module + ".")
        mlp.router.weight.copy_(hf["gate.weight"])
        if self.router_bias:
            mlp.router.expert_bias.copy_(hf[names.bias])
        if self.shared_ffn_size:
            shared = mlp_weights(mlp.shared_experts)
            inside = hf.under(names.shared + ".")
            load_mlp(*shared, inside, place.tensor, names.shared_projections)
        if self.shared_gate:
            mlp.shared_experts.gate_weight.copy_(hf["shared_expert_gate.weight"])
        if self.latent_size:
            for name in ("fc1_latent_proj", "fc2_latent_proj"):
                getattr(mlp, name).weight.copy_(hf[name + ".weight"])
        for local, number in enumerate(mlp.local_expert_indices):
            expert = hf.under(f"experts.{number}.")
            load_mlp(*mlp_weights(mlp.experts, local), expert, place.expert, names.projections)

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what expert- and tensor-parallel ranks divide."""
        yield Cut("num_experts", self.count, "ep", p.ep)
        yield Cut(self.names.size, self.ffn_size, "etp", p.etp)
        yield Cut(self.names.shared_size, self.shared_ffn_size, "tp", p.tp)

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's TransformerConfig."""
        fields: Fields = {
            "num_moe_experts": self.count,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.ffn_size,
            "moe_grouped_gemm": kernels.transformer_engine,
            # under plain sums Megatron's would count every token of the batch
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": not self.norm_topk,
            "moe_router_dtype": "fp32" if actor.dtype != "float32" else None,
            "moe_shared_expert_intermediate_size": self.shared_ffn_size or None,
            "moe_shared_expert_gate": self.shared_gate,
            "moe_latent_size": self.latent_size or None,
        }
        if self.sigmoid:
            fields |= {
                "moe_router_score_function": "sigmoid",
                "moe_router_topk_scaling_factor": self.scale,
                "moe_router_enable_expert_bias": self.router_bias,
                # Megatron would move it after every step, though no optimizer holds it
                "moe_router_bias_update_rate": 0.0,
            }
        if self.limit:  # fused kernels do not know it
            fields |= {"activation_func_clamp_value": self.limit, "bias_activation_fusion": False}
        if self.groups > 1:
            fields["moe_router_num_groups"] = self.groups
            fields["moe_router_group_topk"] = self.top_groups
        return fields

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        """Returns Megatron's names of what is cheap to compute again; one by one experts have no
        activation of their own."""
        shared = engine and bool(self.shared_ffn_size)
        return ["moe_act"] * scaled + ["shared_experts"] * shared + ["moe"] * (not engine)

    @property
    def share(self) -> float:
        """Returns the part of the routed experts that a token meets."""
        return self.per_token / self.count

    def cost(self, at: Share, imbalance: float) -> LayerCost:
        """Returns the cost for a micro-batch. imbalance: tokens of the fullest rank, over the mean."""
        p = at.parallel
        hidden = at.hidden_size
        copies = at.part * self.per_token  # tokens that a rank sends to experts
        most = min(imbalance, p.ep, self.count / self.per_token)  # all tokens at most
        received = copies * p.etp * most
        inside = self.ffn_size / p.etp * received
        shared = mlp_cost(at, self.shared_ffn_size, self.gated)
        sent_size = self.latent_size or hidden
        latent = 2 * hidden * self.latent_size * at.part  # multiply-adds of both projections
        scores = 6 * self.count * at.part * FP32
        # experts' input; gate and up, silu(gate), up + 0, their product, and that times the router's
        # weight; without gates up, relu(up), its square, and that times the weight
        kept = (sent_size * received + (6 if self.gated else 4) * inside) * at.width + scores
        kept += 2 * self.latent_size * at.part * at.width  # what is sent, and what comes back
        # before and after both exchanges, sorted by expert and not
        transient = 2 * sent_size * (copies + received) * at.width + at.gathered
        sent = {
            "ep": 2 * copies * sent_size * at.width * (p.ep - 1) / p.ep,
            "tp": 2 * copies * sent_size * at.width * (p.etp - 1)
            + shared.sent["tp"] * bool(self.shared_ffn_size),
        }
        flops = (6 if self.gated else 4) * sent_size * inside + 2 * latent
        flops += 2 * hidden * self.count * at.part
        return LayerCost(kept + shared.kept, transient, flops + shared.flops, sent)

    def points(self) -> list[Row]:
        """Returns what a router computes."""
        module = self.names.module
        topk = f"{module}.topk"
        router = "mlp.router"
        return [
            ("router_logits", "router logits", f"{module}.gate", (router, "gating", 0), "whole"),
            ("experts", "experts chosen", (topk, "out", 1), (router, "out", 1), "map"),
            ("expert_shares", "weights of the experts, as shares,", topk, router, "shares"),
        ]
