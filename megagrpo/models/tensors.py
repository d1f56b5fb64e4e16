"""The tensors of a Hugging Face checkpoint: names, shapes and kinds, in the order of random
initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.stored.quantization import FP8_EXEMPT

if TYPE_CHECKING:
    from megagrpo.models.architecture import Architecture

# a router, what latent attention projects down, a draft's projection, and an indexer
_WHOLE = (
    "gate",
    "shared_expert_gate",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "eh_proj",
    "wq_b",
    "wk",
    "weights_proj",
    "k_norm",
)


@dataclass(frozen=True)
class TensorSpec:
    """Describes one tensor of an HF checkpoint."""

    name: str
    shape: tuple[int, ...]  # a matrix: (outputs, inputs)
    # begins random, 1, 0 (multiplies by 1 + itself), 0 and small
    kind: Literal["matrix", "norm", "centered norm", "bias", "convolution"]
    expert: bool = False  # one of a layer's routed experts, of which a token sees some
    dtype: str | None = None  # that it keeps whatever the model's is
    trained: bool = True  # it has a gradient

    @property
    def size(self) -> int:
        """Counts the elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Tells whether every tensor-parallel rank, of trainers and of engines, holds all of it."""
        return self.kind.endswith("norm") or self.name.split(".")[-2] in _WHOLE

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
    """A family's names of the three projections of a gated MLP."""

    gate: str
    up: str
    down: str


GATED_NAMES = GatedNames("gate_proj", "up_proj", "down_proj")


def layer_prefix(index: int) -> str:
    """Returns what the names of a layer's tensors begin with; layers count from 0."""
    return f"model.layers.{index}."


def draft_norms(arch: Architecture) -> Iterator[TensorSpec]:
    """Yields what a draft has besides its layer: the norms of both inputs, their projection, and
    the last norm."""
    prefix = layer_prefix(arch.num_layers)
    hidden = arch.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield TensorSpec(f"{prefix}{name}.weight", (hidden,), "norm")
    yield TensorSpec(prefix + "eh_proj.weight", (hidden, 2 * hidden), "matrix")


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


def attention_tensors(arch: Architecture, attention: str) -> Iterator[TensorSpec]:
    """Yields projections, biases and norms of grouped-query attention; `attention` begins their
    names."""
    own = arch.attention
    assert isinstance(own, GroupedQuery)
    hidden = arch.hidden_size
    dim = own.head_dim
    outputs = {
        "q_proj": own.heads * dim * (2 if own.output_gate else 1),
        "k_proj": own.kv_heads * dim,
        "v_proj": own.kv_heads * dim,
    }
    for name, rows in outputs.items():
        yield TensorSpec(f"{attention}{name}.weight", (rows, hidden), "matrix")
    yield TensorSpec(f"{attention}o_proj.weight", (hidden, own.heads * dim), "matrix")
    if own.qkv_bias:
        for name, rows in outputs.items():
            yield TensorSpec(f"{attention}{name}.bias", (rows,), "bias")
    if own.qk_norm:
        for name, heads in (("q_norm", own.heads), ("k_norm", own.kv_heads)):
            width = dim * heads if own.norm_over_heads else dim
            yield norm_tensor(arch, f"{attention}{name}.weight", width)


def norm_tensor(arch: Architecture, name: str, size: int) -> TensorSpec:
    """Returns the weight of one of the model's norms."""
    return TensorSpec(name, (size,), "centered norm" if arch.centered_norms else "norm")


def mlp_tensors(
    hidden: int, width: int, prefix: str, expert: bool = False, names: GatedNames = GATED_NAMES
) -> Iterator[TensorSpec]:
    """Yields the three projections of a gated MLP of `width` between `hidden` inputs and
    outputs."""
    yield TensorSpec(f"{prefix}{names.gate}.weight", (width, hidden), "matrix", expert)
    yield TensorSpec(f"{prefix}{names.up}.weight", (width, hidden), "matrix", expert)
    yield TensorSpec(f"{prefix}{names.down}.weight", (hidden, width), "matrix", expert)
