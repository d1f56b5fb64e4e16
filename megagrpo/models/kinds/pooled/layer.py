"""Qwen's sparse attention (SGLang's layers/attention/qsa): a frozen indexer chooses the blocks of keys
that each query sees.

The indexer's key of a block is the mean of its tokens', normed and turned by the first one's place.
A query sees the best blocks before it, and the tokens behind the last whole block. Torch computes
scores block by block of queries, and again in the backward.
"""

from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.compressed.layer import padded
from megagrpo.models.kinds.grouped_query.layer import (
    CausalAttention,
    grouped_query_spec,
)
from megagrpo.models.kinds.pooled.describe import BLOCK, PooledAttention
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.layers.parts import Parts, RmsNorm
from megagrpo.models.layers.rotary import rotate
from megagrpo.models.layers.whole_linear import WholeLinear


class PooledIndexer(torch.nn.Module):
    """Makes the queries and keys that choose blocks; held whole by every rank, and frozen."""

    def __init__(self, config: TransformerConfig, sizes: PooledAttention):
        super().__init__()
        self._config, self._sizes = config, sizes
        rows = (sizes.index_heads + 1) * sizes.index_dim
        self.index_qk_proj = WholeLinear(config.hidden_size, rows, config=config)
        epsilon = config.layernorm_epsilon
        self.q_layernorm = RmsNorm(config, sizes.index_dim, epsilon)
        self.k_layernorm = RmsNorm(config, sizes.index_dim, epsilon)
        self.requires_grad_(False)
        turning = int(sizes.head_dim * sizes.rotary.fraction)
        places = torch.arange(0, turning, 2, device=torch.cuda.current_device())
        self._frequencies = 1 / sizes.rotary.theta ** (places / turning)

    @torch.no_grad()
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [s / tp, b, h] to what is asked, and the tokens' keys [s, b, (index heads + 1) d]."""
        mixed = self.index_qk_proj(hidden_states)[0]
        if self._config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            mixed = gather_from_sequence_parallel_region(mixed, False, group)
        return mixed

    def turned(self, t: Tensor, norm: RmsNorm, positions: Tensor) -> Tensor:
        """Returns t [s, heads, d], normed and turned by positions [s], in float32."""
        angles = positions[:, None] * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None, None]
        return rotate(norm(t)[:, None], angles).squeeze(1).float()

    @torch.no_grad()
    def pooled(self, keys: Tensor) -> Tensor:
        """Returns the keys of whole blocks [s / ratio, d] of the tokens' [s, d]."""
        ratio = self._sizes.ratio
        blocks = keys[: len(keys) // ratio * ratio].unflatten(0, (-1, ratio))
        means = blocks.float().mean(1, keepdim=True).to(keys.dtype)
        places = torch.arange(len(means), device=keys.device) * ratio
        return self.turned(means, self.k_layernorm, places).squeeze(1)

    @torch.no_grad()
    def chosen(self, asked: Tensor, position: Tensor, keys: Tensor) -> Tensor:
        """Returns which blocks [t, m] queries at these positions see, of those that are whole before
        them."""
        behind = torch.arange(len(keys), device=keys.device)
        seen = behind < (position[:, None] + 1) // self._sizes.ratio
        if len(keys) <= self._sizes.topk:
            return seen
        queries = asked.unflatten(-1, (self._sizes.index_heads, -1))
        products = self.turned(queries, self.q_layernorm, position) @ keys.mT
        scores = products.relu().sum(1).masked_fill(~seen, -torch.inf)
        best = scores.topk(self._sizes.topk, -1).indices
        return torch.zeros_like(seen).scatter(-1, best, True) & seen


class PooledCore(CausalAttention):
    """Attends to the chosen blocks; gets what its indexer made in the place of a mask."""

    def __init__(self, config, *args, sizes: PooledAttention, **options):
        super().__init__(config, *args, **options)
        self._sizes = sizes
        self.indexer = PooledIndexer(config, sizes)

    def forward(self, query, key, value, attention_mask, /, *, packed_seq_params=None, **options):
        """As CausalAttention's. attention_mask: of PooledIndexer.forward. Sequences of few blocks are
        dense."""
        index, packed = attention_mask, packed_seq_params
        flat = [query, key, value, index]
        if packed is None:
            count, batch = query.shape[:2]
            packed = padded(batch, count, query.device)
            flat = [t.transpose(0, 1).flatten(0, 1) for t in flat]
        elif index.dim() > 2:
            flat[3] = index.squeeze(1)
        if packed.max_seqlen_q <= self._sizes.most_keys:
            packing = {"packed_seq_params": packed_seq_params}
            return super().forward(query, key, value, None, **packing, **options)
        width = self._sizes.index_dim
        own = [length // packed.group.size() for length in packed.lengths]
        position = packed.grids(len(flat[0])).position
        asked = flat[3][:, :-width]
        rows = [t.split(own) for t in (flat[0], asked, position)]
        whole = [packed.whole(t) for t in (flat[1], flat[2], flat[3][:, -width:])]
        every = zip(*rows, *(t.split([*packed.lengths]) for t in whole), strict=True)
        out = torch.cat([self._sequence(*each) for each in every])
        if packed_seq_params is None:
            return out.unflatten(0, (batch, count)).transpose(0, 1)
        return out

    def _sequence(
        self,
        query: Tensor,
        asked: Tensor,
        position: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Returns [places, heads d] of one sequence, from all its keys [s, ...]."""
        keys = self.indexer.pooled(index)
        key, value = (t.transpose(0, 1)[None] for t in (key, value))
        blocks = zip(*(t.split(BLOCK) for t in (query, asked, position)), strict=True)
        return torch.cat([again(self._block, *block, key, value, keys) for block in blocks])

    def _block(
        self,
        query: Tensor,
        asked: Tensor,
        position: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """Returns [t, heads d] of some queries, whose scores of all keys are in memory."""
        ratio, count = self._sizes.ratio, key.shape[2]
        chosen = self.indexer.chosen(asked, position, keys).repeat_interleave(ratio, 1)
        places = torch.arange(count, device=key.device)
        behind = places >= (position[:, None] + 1) // ratio * ratio
        seen = (F.pad(chosen, (0, count - chosen.shape[1])) | behind) & self._visible(
            position, places
        )
        out = self._attend(query.transpose(0, 1)[None], key, value, seen[None, None])
        return out[0].transpose(0, 1).flatten(1)


class PooledSelfAttention(SelfAttention):
    """Lets the indexer read what the projections read."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **given):
        """As Megatron's; the core gets the indexer's output in the place of the mask."""
        return super().forward(hidden_states, self.core_attention.indexer(hidden_states), **given)


def pooled_spec(sizes: PooledAttention, parts: Parts) -> ModuleSpec:
    """Returns the specification of attention over chosen blocks."""
    spec = grouped_query_spec(sizes, parts)
    spec.module = PooledSelfAttention
    spec.submodules.core_attention = partial(PooledCore, sizes=sizes)
    return spec
