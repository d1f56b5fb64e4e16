"""The tensors of a Hugging Face checkpoint: names, shapes and kinds in the order of random
initialization, and how ranks slice them into Megatron's modules: slices and copies only, which the
recorder can trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from megagrpo.models.stored.quantization import FP8_EXEMPT

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.models.family import Family

# a router, what latent attention projects down, a draft's projection, an indexer, and projections
# into and out of the space of latent experts, and KDA's into a narrow one
_WHOLE = (
    "gate",
    "router",
    "shared_expert_gate",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "eh_proj",
    "wq_b",
    "wk",
    "weights_proj",
    "k_norm",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "indexer",
    *("wq_a", "wkv", "wgate", "compressor"),  # of compressed attention
    *("hc_attn", "hc_ffn", "hc_head"),  # mixings of residual streams
    *("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"),  # likewise
    *("index_qk_proj", "key_proj", "value_proj"),  # of pooled attention, of embeddings of n-grams
    "f_a_proj",
    "g_a_proj",
)


# begins random, 1, 0 (multiplies by 1 + itself), 0, small, and as different numbers in each row
Kind: TypeAlias = Literal["matrix", "norm", "centered norm", "bias", "convolution", "choice"]


@dataclass(frozen=True)
class TensorSpec:
    """Describes one tensor of an HF checkpoint."""

    name: str
    shape: tuple[int, ...]  # a matrix: (outputs, inputs)
    kind: Kind
    expert: bool = False  # one of a layer's routed experts, of which a token sees some
    dtype: str | None = None  # that it keeps whatever the model's is
    trained: bool = True  # it has a gradient
    below: int = 0  # of a choice: its numbers are less

    @property
    def size(self) -> int:
        """Counts the elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Tells whether every tensor-parallel rank, of trainers and of engines, holds all of it."""
        part = self.name.split(".")[-2]
        return part in _WHOLE or (self.kind.endswith("norm") and part != "gated_norm")

    @property
    def is_adapter(self) -> bool:
        """Tells whether it is half of a LoRA adapter."""
        return self.name.split(".")[-2] in ("lora_A", "lora_B")

    @property
    def in_fp8(self) -> bool:
        """Tells whether engines with FP8 weights keep it in FP8: matrices of layers but routers, as
        DeepSeek-V3, gates of shared experts, and what FP8_EXEMPT names."""
        layer = self.kind == "matrix" and ".layers." in self.name
        plain = ("gate", "eh_proj", "shared_expert_gate", *FP8_EXEMPT)
        return layer and self.name.split(".")[-2] not in plain


class GatedNames(NamedTuple):
    """Names of the projections of an MLP: three of a gated one, two and "" of a plain one."""

    gate: str
    up: str
    down: str


GATED_NAMES = GatedNames("gate_proj", "up_proj", "down_proj")
PLAIN_NAMES = GatedNames("", "up_proj", "down_proj")


def layer_prefix(index: int) -> str:
    """Returns what the names of a layer's tensors begin with; layers count from 0."""
    return f"model.layers.{index}."


def layer_index(prefix: str) -> int:
    """Returns the layer, counted from 0, of the names that begin so."""
    return int(prefix.split(".")[2])


def adapter_tensors(
    tensors: Iterable[TensorSpec], targets: Iterable[str], rank: int
) -> Iterator[TensorSpec]:
    """Yields lora_A [rank, inputs] and lora_B [outputs, rank] of every projection among `tensors`
    that is a target.

    targets: names without layer, such as q_proj. An adapter is named after its projection, as PEFT
    does.
    """
    wanted = set(targets)
    for spec in tensors:
        *prefix, name, kind = spec.name.split(".")
        if kind == "weight" and name in wanted:
            outputs, inputs = spec.shape
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                adapter = ".".join([*prefix, name, f"lora_{letter}", "weight"])
                yield TensorSpec(adapter, shape, "matrix", spec.expert)


def mlp_tensors(
    hidden: int, width: int, prefix: str, expert: bool = False, names: GatedNames = GATED_NAMES
) -> Iterator[TensorSpec]:
    """Yields the projections of an MLP of `width` between `hidden` inputs and outputs."""
    if names.gate:
        yield TensorSpec(f"{prefix}{names.gate}.weight", (width, hidden), "matrix", expert)
    yield TensorSpec(f"{prefix}{names.up}.weight", (width, hidden), "matrix", expert)
    yield TensorSpec(f"{prefix}{names.down}.weight", (hidden, width), "matrix", expert)


class Cut(NamedTuple):
    """Says which number of a model a number of ranks must divide."""

    key: str  # of config.json
    number: int
    by: str  # of actor.parallel
    ranks: int


@dataclass(frozen=True)
class Shard:
    """Names one of `size` equal parts; `rank` counts from 0."""

    rank: int
    size: int

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns this part of a tensor, cut along a dimension."""
        return tensor.chunk(self.size, dim)[self.rank]

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns this part of [rows, ...]."""
        return self.part(tensor, 0)

    def columns(self, tensor: Tensor) -> Tensor:
        """Returns this part of [rows, columns]."""
        return self.part(tensor, 1)


@dataclass(frozen=True)
class RankPlace:
    """Says which part of each sharded tensor this rank holds."""

    tensor: Shard  # of dense layers, among the tensor-parallel ranks
    expert: Shard  # of one expert, among the expert-tensor-parallel ranks


def load_vocabulary(weight: Tensor, hf: Tensor, shard: Shard) -> None:
    """Loads this rank's rows [padded vocab / tp, hidden] of a vocabulary [vocab, hidden].

    It is padded to a multiple of tp; the rows beyond the real ones are 0 and never sampled.
    """
    start = shard.rank * weight.shape[0]
    real = hf[start : start + weight.shape[0]]
    weight[: len(real)].copy_(real)
    if len(real) < len(weight):
        weight[len(real) :].zero_()


def load_groups(target: Tensor, parts: Iterable[Tensor], groups: int, shard: Shard) -> None:
    """Loads this rank's groups of rows: the target's stand group by group, and in each part by
    part; those of a part, whose groups follow each other, are in `groups` equal pieces."""
    target = target.view(groups // shard.size, -1, *target.shape[1:])
    start = 0
    for whole in parts:
        part = whole.view(groups, len(whole) // groups, *whole.shape[1:])
        end = start + part.shape[1]
        target[:, start:end].copy_(shard.rows(part))
        start = end


@dataclass(frozen=True)
class HfTensors:
    """The tensors of a Hugging Face model whose names begin with `begin`, by the rest of their
    names: those, and shapes, that loaders know, whatever the family stores."""

    family: Family
    stored: Mapping[str, Tensor]
    begin: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.family.stored(self.stored, self.begin + name)

    def __contains__(self, name: str) -> bool:
        return self.family.stored_name(self.begin + name) in self.stored

    def under(self, begin: str) -> HfTensors:
        """Returns those whose names go on with `begin`."""
        return replace(self, begin=self.begin + begin)


def load_mlp(
    fc1: Tensor,
    fc2: Tensor,
    hf: HfTensors,
    shard: Shard,
    names: GatedNames = GATED_NAMES,
) -> None:
    """Loads an MLP: fc1 [2 width / tp, hidden], gate above up, or [width / tp, hidden] without
    gate, and fc2 [hidden, width / tp]."""
    inputs = [name for name in (names.gate, names.up) if name]
    for target, name in zip(fc1.chunk(len(inputs)), inputs, strict=True):
        target.copy_(shard.rows(hf[name + ".weight"]))
    fc2.copy_(shard.columns(hf[names.down + ".weight"]))


def mlp_weights(
    layer, expert: int | None = None, kind: Literal["weight", "bias"] = "weight"
) -> tuple[Tensor, Tensor]:
    """Returns linear_fc1's and linear_fc2's weights, or biases, of an MLP, or of the local expert
    of this number.

    An expert is a module of its own, or one of the numbered weights of Transformer Engine's grouped
    layers.
    """
    if expert is not None and hasattr(layer, "local_experts"):
        layer = layer.local_experts[expert]
        expert = None
    name = kind if expert is None else f"{kind}{expert}"
    return getattr(layer.linear_fc1, name), getattr(layer.linear_fc2, name)
