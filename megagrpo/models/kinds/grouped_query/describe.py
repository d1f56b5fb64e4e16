"""Grouped-query attention (Ainslie et al., arXiv 2305.13245) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig, Rotary
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.attention import Attention
from megagrpo.models.points import Row
from megagrpo.models.tensors import Cut, HfTensors, Kind, Shard, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.attention import SelfAttention
    from torch import Tensor

    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.fields import Fields, Kernels


@dataclass(frozen=True)
class GroupedQuery(Attention):
    """Holds the numbers of attention whose queries share keys and values by groups."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    norm_over_heads: bool = False  # that one is over all heads of a token together
    output_gate: bool = False  # the output is multiplied by a sigmoid of the token
    output_bias: bool = False
    # each head has a score of no key, which takes its share of the softmax
    sinks: bool = False
    window: int = 0  # tokens, itself included, that a query sees in layers of `windowed`
    windowed: tuple[bool, ...] = ()

    @classmethod
    def read(cls, hf: HfConfig, fraction: float = 1.0) -> GroupedQuery:
        """Reads a config.json; fraction: of a head that turns, if it has none."""
        heads = hf["num_attention_heads"]
        return cls(
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rotary=Rotary.read(hf, fraction),
        )

    @property
    def engine_module(self) -> str:
        return "" if self.output_gate else self.MODULE

    @property
    def v_dim(self) -> int:
        """Returns the width of a head of values."""
        return self.head_dim

    @property
    def most_keys(self) -> float:
        return self.window or super().most_keys

    @property
    def limited_share(self) -> float:
        return sum(self.windowed) / len(self.windowed) if self.windowed else 1.0

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections, biases and norms."""
        dim = self.head_dim
        outputs = {
            "q_proj": self.heads * dim * (2 if self.output_gate else 1),
            "k_proj": self.kv_heads * dim,
            "v_proj": self.kv_heads * dim,
        }
        for name, rows in outputs.items():
            yield TensorSpec(f"{prefix}{name}.weight", (rows, hidden), "matrix")
        yield TensorSpec(f"{prefix}o_proj.weight", (hidden, self.heads * dim), "matrix")
        if self.qkv_bias:
            for name, rows in outputs.items():
                yield TensorSpec(f"{prefix}{name}.bias", (rows,), "bias")
        if self.output_bias:
            yield TensorSpec(f"{prefix}o_proj.bias", (hidden,), "bias")
        if self.sinks:
            yield TensorSpec(f"{prefix}sinks", (self.heads,), "bias")
        if self.qk_norm:
            for name, heads in (("q_norm", self.heads), ("k_norm", self.kv_heads)):
                width = dim * heads if self.norm_over_heads else dim
                yield TensorSpec(f"{prefix}{name}.weight", (width,), norm)

    def load(self, attention: SelfAttention, hf: HfTensors, shard: Shard) -> None:
        """Copies this rank's slices of HF tensors into Megatron's parameters."""
        self.load_qkv(attention.linear_qkv.weight, hf, "weight", shard)
        if self.qkv_bias:
            self.load_qkv(attention.linear_qkv.bias, hf, "bias", shard)
        attention.linear_proj.weight.copy_(shard.columns(hf["o_proj.weight"]))
        if self.output_bias:
            attention.linear_proj.bias.copy_(hf["o_proj.bias"])
        if self.sinks:
            attention.core_attention.softmax_offset.copy_(shard.rows(hf["sinks"]))
        if self.qk_norm:
            attention.q_layernorm.weight.copy_(hf["q_norm.weight"])
            attention.k_layernorm.weight.copy_(hf["k_norm.weight"])

    def load_qkv(self, parameter: Tensor, hf: HfTensors, kind: str, shard: Shard) -> None:
        """Loads Megatron's order: for each key/value head [q of its heads, their gates, k, v].

        In files a head's gate follows its query. Ranks that share a key/value head hold even parts
        of its rows, cut anywhere: Megatron gathers a layer's projections from all ranks, and each
        takes from them the heads that it computes with.
        """
        groups, dim = self.kv_heads, self.head_dim
        heads = self.heads // groups
        q, k, v = (hf[f"{name}_proj.{kind}"] for name in "qkv")
        tail = q.shape[1:]  # (hidden,) for the weight, () for the bias
        query = q.view(groups, heads, 1 + self.output_gate, dim, *tail)
        key = k.view(groups, 1, dim, *tail)
        value = v.view(groups, 1, dim, *tail)
        parts = [*query.unbind(2), key, value]  # [groups, heads, dim, ...]
        if groups >= shard.size:
            rows = parameter.view(groups // shard.size, -1, dim, *tail)
            start = 0
            for part in parts:
                end = start + part.shape[1]
                rows[:, start:end].copy_(shard.rows(part))
                start = end
            return
        first = shard.rank * len(parameter)
        start = 0
        for source in (head for group in range(groups) for part in parts for head in part[group]):
            low = max(first, start)
            high = min(first + len(parameter), start + dim)
            if low < high:
                parameter[low - first : high - first].copy_(source[low - start : high - start])
            start += dim

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what tensor-parallel ranks divide; key/value heads may also be fewer."""
        yield from super().cuts(p)
        if self.kv_heads > p.tp or p.tp % self.kv_heads:
            yield Cut("num_key_value_heads", self.kv_heads, "tp", p.tp)

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's TransformerConfig."""
        fields: Fields = {
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "attention_output_gate": self.output_gate,
        }
        if self.output_bias:
            fields["add_bias_linear"] = True
        if self.sinks:
            fields["softmax_type"] = "learnable"
        if self.window:
            fields["window_size"] = (self.window - 1, 0)  # before and behind the query
            fields["window_attn_skip_freq"] = [int(layer) for layer in self.windowed]
        if (factor := self.rotary.concentration) != 1.0:
            # of queries and of keys, whose cosines and sines files mean to be multiplied by it
            fields["softmax_scale"] = factor**2 * self.head_dim**-0.5
        return fields

    @property
    def pair_flops(self) -> float:
        return 4.0 * self.heads * self.head_dim

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch."""
        p = at.parallel
        dim = self.head_dim
        heads = self.heads / p.tp
        groups = max(self.kv_heads / p.tp, 1)
        gates = self.heads * self.output_gate
        qkv = (self.heads + gates + 2 * self.kv_heads) / p.tp * dim
        # with fewer key/value heads than ranks each gathers the whole projection, and has one of them
        held = qkv * p.tp if self.kv_heads < p.tp else qkv
        # the projection; queries before their norm; queries and keys turned; attention's output and its
        # log-sum-exp; with a gate its sigmoid and their product
        kept = (
            held
            + heads * dim * self.qk_norm
            + (heads + groups) * dim
            + heads * dim * (1 + 2 * self.output_gate)
        ) * at.width + heads * FP32
        if self.norm_over_heads:  # of plain torch: its input in float32, and divided by the root
            kept += (heads + groups) * dim * FP32 * (1 + (at.width < FP32))
        return LayerCost(
            kept=kept * at.whole,
            transient=2 * held * at.whole * at.width + at.gathered,
            flops=2 * at.hidden_size * (qkv + heads * dim) * at.whole,
            pair_flops=4 * heads * dim * (not self.window),
            chosen_flops=4 * heads * dim * bool(self.window),
            sent={
                "tp": at.gathers(2),
                "cp": 2 * groups * dim * at.whole * at.width * (p.cp - 1),
            },
        )

    def cached_values(self, ranks: int) -> int:
        """Counts the values of one token in one rank's cache: heads are divided over the ranks, and
        repeated if there are fewer than ranks."""
        return 2 * max(1, self.kv_heads // ranks) * self.head_dim

    def repeated_weights(self, hidden_size: int, ranks: int) -> int:
        return 2 * hidden_size * self.head_dim * max(ranks - self.kv_heads, 0)

    def inner_points(self) -> list[Row]:
        norms: list[Row] = [
            ("q_norm", "normed queries", "q_norm", "q_layernorm", "heads"),
            ("k_norm", "normed keys", "k_norm", "k_layernorm", "heads"),
        ]
        says = "projection to queries, keys and values"
        qkv: Row = ("qkv", says, "qkv_proj", "linear_qkv", "qkv")
        # with gates among the queries the sides differ in their order, and an engine fuses the norms
        before = [] if self.output_gate else [qkv, *(norms if self.qk_norm else [])]
        core = "core_attention"
        return [
            *before,
            # as attention gets them
            ("q_rotary", "queries with positions", ("attn", "in", 0), (core, "in", 0), "heads"),
            ("k_rotary", "keys with positions", ("attn", "in", 1), (core, "in", 1), "heads"),
            ("core_attention", "attention (scale, mask, softmax)", "attn", core, "heads"),
        ]
