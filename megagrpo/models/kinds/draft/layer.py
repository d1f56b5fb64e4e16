"""The draft: a layer that proposes the token after next (multi-token prediction; DeepSeek-V3, arXiv
2412.19437, 2.2).

At position t it sees the model's hidden state h(t) and token t + 1, and predicts token t + 2 with
the model's own output layer. It is trained towards the model's own distribution at t + 1, on
detached inputs: its loss has no gradient in the model. Only last pipeline stages have one.
"""

from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megagrpo.models.layers.context import context_group
from megagrpo.models.layers.parts import Parts
from megagrpo.models.layers.whole_linear import WHOLE, linear_options
from megagrpo.types import MicroBatch

OF_DRAFT = "of_draft"  # attribute of its parameters, by which the optimizer groups them


class DraftLayer(MegatronModule):
    """Maps hidden states and embedded next tokens, both [s / tp, b, h], to the hidden states of the
    draft's head."""

    def __init__(
        self, config: TransformerConfig, layer: ModuleSpec, parts: Parts, vp_stage: int | None
    ):
        super().__init__(config=config)
        hidden = config.hidden_size

        def norm() -> torch.nn.Module:
            return parts.norm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon)

        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        linear = linear_options(config) | WHOLE
        self.eh_proj = build_module(parts.whole_linear, 2 * hidden, hidden, **linear)
        # it follows the last layer
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.layer = build_module(layer, config=config, vp_stage=vp_stage, layer_number=number)
        self.embedding: Tensor | None = None  # a copy [vocab / tp, h] of the first pipeline stage's

    def forward(self, hidden: Tensor, embedded: Tensor, **attention: object) -> Tensor:
        """attention: masks, packed sequences and angles, as the model's layers get them."""
        mixed, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.norm(self.layer(hidden_states=mixed, **attention)[0])


def mark_parameters(draft: DraftLayer, trained: bool) -> None:
    """Lets the optimizer tell a draft's parameters from the model's, whose gradient norm they are
    no part of."""
    for parameter in draft.parameters():
        setattr(parameter, OF_DRAFT, True)
        parameter.shared = True  # Megatron leaves such parameters out of the norm
        parameter.requires_grad_(trained)


class Following(NamedTuple):
    """Holds, for each of this rank's n = b s / cp positions, what the sample has behind it."""

    tokens: Tensor  # [b, s / cp] int64, 0 behind the last one
    # [n] int64: where the next position lies among those of all context-parallel ranks, rank after
    # rank
    places: Tensor
    sampled: Tensor  # [n] bool: the policy has sampled the token behind the next one


def following(micro: MicroBatch) -> Following:
    """Collective over context-parallel ranks, which hold parts of every sample. Waits for no
    device."""
    rows, columns = micro.rows.flatten(), micro.columns.flatten()
    # the position behind a sample's end is none of the next sample's
    stride = max(micro.sizes) + 1
    keys = torch.where(rows >= 0, rows * stride + columns, -2)
    sampled = torch.zeros_like(keys).index_fill(0, micro.targets.flat, 1)
    every = gather_context(torch.stack((keys, micro.tokens.flatten(), sampled), 1), micro.context)
    ordered, order = every[:, 0].sort(stable=True)
    at = torch.searchsorted(ordered, keys + 1).clamp(max=len(ordered) - 1)
    found = ordered[at] == keys + 1
    places = order[at]
    tokens = torch.where(found, every[places, 1], 0)
    return Following(tokens.view_as(micro.tokens), places, found & every[places, 2].bool())


@torch.no_grad()
def gather_context(part: Tensor, size: int) -> Tensor:
    """Collective over the `size` ranks that share sequences with this one. Returns their parts
    [n, ...] behind each other, rank after rank."""
    return gather_from_sequence_parallel_region(part, group=context_group(size))


@torch.no_grad()
def embed(weight: Tensor, tokens: Tensor) -> Tensor:
    """Collective over tensor-parallel ranks. Returns embeddings [s / tp, b, h] of tokens [b, s].

    weight: this rank's rows [vocab / tp, h].
    """
    local = tokens - mpu.get_tensor_model_parallel_rank() * len(weight)
    elsewhere = (local < 0) | (local >= len(weight))
    found = torch.nn.functional.embedding(local.masked_fill(elsewhere, 0), weight)
    found = found.masked_fill(elsewhere[..., None], 0.0).transpose(0, 1).contiguous()
    return reduce_scatter_to_sequence_parallel_region(found)
