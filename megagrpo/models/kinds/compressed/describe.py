"""DeepSeek-V4's attention by its numbers: one key that is the value, too, for all heads, a window
with sinks, and behind it keys that stand for several tokens each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megagrpo.models.config_json import Rotary
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.attention import Attention
from megagrpo.models.kinds.indexed.describe import BLOCK
from megagrpo.models.points import Row
from megagrpo.models.tensors import Cut, HfTensors, Kind, Shard, TensorSpec, layer_index

if TYPE_CHECKING:
    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.fields import Fields, Kernels
    from megagrpo.models.kinds.compressed.layer import CompressedMixer

INDEXED = 4  # tokens of a key in layers whose windows overlap, and whose keys an indexer chooses
# parameters of which ranks have parts, and along which dimension
CUT = {"q_b_proj.weight": 0, "attn_sink": 0, "wo_a.weight": 0, "wo_b.weight": 1}
_SCALED = 128  # numbers of an engine's key with one scale


@dataclass(frozen=True)
class CompressedAttention(Attention):
    """Holds its widths, and how many tokens a key stands for in each layer."""

    heads: int
    head_dim: int
    rope_dim: int  # of a head, its last numbers
    q_lora_rank: int
    groups: int  # of heads, with an output projection of their own each
    group_rank: int  # outputs of these
    window: int  # tokens, itself included, that a query sees as they are
    ratios: tuple[int, ...]  # tokens of a key behind the window; 0: a layer has none
    index_heads: int
    index_dim: int
    topk: int  # keys behind the window that a query sees in layers with an indexer
    rotary: Rotary  # of layers with a window alone
    far_rotary: Rotary  # of the others

    @property
    def kv_heads(self) -> int:
        """Counts the heads of keys and values."""
        return 1

    @property
    def v_dim(self) -> int:
        """Returns the width of a head of values."""
        return self.head_dim

    @property
    def heads_of_group(self) -> int:
        """Counts the heads that share an output projection."""
        return self.heads // self.groups

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections, norms and sinks, and what makes and chooses keys."""
        for spec in self.weights(hidden, layer_index(prefix)):
            yield replace(spec, name=prefix + spec.name)

    def weights(self, hidden: int, index: int) -> Iterator[TensorSpec]:
        """Yields the same of layer `index`, counted from 0, by their names in it."""
        dim, rank, ratio = self.head_dim, self.q_lora_rank, self.ratios[index]
        outputs = self.groups * self.group_rank
        shapes: dict[str, tuple[int, ...]] = {
            "attn_sink": (self.heads,),
            "wq_a.weight": (rank, hidden),
            "q_norm.weight": (rank,),
            "q_b_proj.weight": (self.heads * dim, rank),
            "wkv.weight": (dim, hidden),
            "kv_norm.weight": (dim,),
            "wo_a.weight": (outputs, self.heads_of_group * dim),
            "wo_b.weight": (hidden, outputs),
        }
        if ratio == INDEXED:
            shapes["indexer.wq_b.weight"] = (self.index_heads * self.index_dim, rank)
            shapes["indexer.weights_proj.weight"] = (self.index_heads, hidden)
        for prefix, width in self.made(ratio).items():
            rows = width * (1 + (ratio == INDEXED))
            shapes[prefix + "ape"] = (ratio, rows)
            shapes |= {f"{prefix}{name}.weight": (rows, hidden) for name in ("wkv", "wgate")}
            shapes[prefix + "norm.weight"] = (width,)
        for name, shape in shapes.items():
            kind: Kind = "matrix" if len(shape) > 1 else "norm"
            dtype = None if name.endswith(".weight") else "float32"
            trained = not name.startswith("indexer.")
            yield TensorSpec(name, shape, kind, dtype=dtype, trained=trained)

    def made(self, ratio: int) -> dict[str, int]:
        """Returns what makes keys behind the window: begin of names -> width of the keys."""
        widths = {"compressor.": self.head_dim} if ratio else {}
        return widths | ({"indexer.compressor.": self.index_dim} if ratio == INDEXED else {})

    def load(self, attention: CompressedMixer, hf: HfTensors, shard: Shard) -> None:
        """Copies this rank's slices of HF tensors."""
        for spec in self.weights(0, attention.layer_number - 1):
            whole = hf[spec.name]
            own = shard.part(whole, CUT[spec.name]) if spec.name in CUT else whole
            attention.weight(spec.name).copy_(own)

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what tensor-parallel ranks divide: groups, with their heads."""
        yield Cut("o_groups", self.groups, "tp", p.tp)

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's TransformerConfig; the layer gets the sizes. Checkpoints
        would take layers for alike, and refuse to be written where they are not."""
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.heads,
            "kv_channels": self.head_dim,
            "hetereogenous_dist_checkpoint": True,
        }

    @property
    def pair_flops(self) -> float:
        return 4.0 * self.heads * self.head_dim

    @property
    def most_keys(self) -> float:
        return self.window + self.topk

    @property
    def index_flops(self) -> float:
        # the mean over layers, also of keys behind the window that nothing chooses
        index = 2.0 * self.index_heads * self.index_dim
        return self.mean(lambda ratio: (index if ratio == INDEXED else self.pair_flops) / ratio)

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch, the mean over layers, as torch
        computes it, block by block: with all keys behind the window, chosen or not."""
        p = at.parallel
        heads = self.heads / p.tp
        dim, rank = self.head_dim, self.q_lora_rank
        groups = self.groups * self.group_rank / p.tp
        # what keys behind the window, and an indexer's, are made of
        both = dim + self.index_dim
        far = self.mean(lambda ratio: 4 * both if ratio == INDEXED else 2 * dim)
        # every tensor-parallel rank computes the latent and the keys; queries, normed and turned, and
        # the output
        kept = 2 * (rank + dim + far) + 4 * heads * dim + groups + at.hidden_size
        products = at.hidden_size * (rank + dim + far + groups)
        products += heads * dim * (rank + self.group_rank)
        pair = 4 * heads * dim
        index = 2 * self.index_heads * self.index_dim
        near = BLOCK + self.window
        far_keys = at.whole * p.cp / INDEXED
        # scores, shares and their gradients; or an indexer's products, which each rank has
        scores = max(3.1 * heads * (near + far_keys), self.index_heads * far_keys)
        return LayerCost(
            kept=kept * at.whole * at.width,
            transient=min(at.whole, BLOCK) * scores * FP32 + at.gathered,
            flops=2 * products * at.whole,
            pair_flops=self.mean(lambda ratio: (pair + index * (ratio == INDEXED)) / ratio),
            chosen_flops=pair * near / self.most_keys,
            sent={"tp": at.gathers(2), "cp": (dim + far) * at.whole * at.width * (p.cp - 1)},
        )

    def cached_values(self, ranks: int) -> int:
        """Counts the values of one token in one rank's cache, without the window: each rank has all
        heads' one key; the mean over layers."""
        return round(self.mean(lambda ratio: self.head_dim / ratio))

    def index_bytes(self, num_layers: int) -> int:
        key = self.index_dim + self.index_dim // _SCALED * FP32
        return self.ratios.count(INDEXED) * key // INDEXED

    def mean(self, count: Callable[[int], float]) -> float:
        """Returns the mean over layers of a number by the tokens of a key, 0 of those without."""
        return sum(count(ratio) for ratio in self.ratios if ratio) / len(self.ratios)

    def points(self) -> list[Row]:
        says = "output projection of attention"
        return [("attention_out", says, "self_attn.wo_b", "self_attention.wo_b", "whole")]
