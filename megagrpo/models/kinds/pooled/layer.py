"""Qwen's sparse attention (SGLang's layers/attention/qsa): a frozen indexer chooses the blocks of keys
that each query sees, beside the keys behind the last whole block.

The indexer's key of a block is the mean of its tokens', normed and turned by the first one's place;
its heads count alike. The rest is GLM-5.3-Flash's attention to pools.
"""

from functools import partial

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.models.kinds.grouped_query.layer import (
    PackedSequences,
    grouped_query_spec,
    padded_sequences,
)
from megagrpo.models.kinds.indexed.layer import SparseAttention
from megagrpo.models.kinds.pooled.describe import PooledQuery
from megagrpo.models.layers.parts import Parts, RmsNorm
from megagrpo.models.layers.rotary import rotate
from megagrpo.models.layers.whole_linear import WholeLinear


class MeanIndexer(torch.nn.Module):
    """Makes the queries and keys that choose blocks, in float32; held whole by every rank, and
    frozen."""

    def __init__(self, config: TransformerConfig, sizes: PooledQuery):
        super().__init__()
        self._sizes = sizes
        rows = (sizes.index_heads + 1) * sizes.index_dim
        self.index_qk_proj = WholeLinear(config.hidden_size, rows, config=config)
        for name in ("q_layernorm", "k_layernorm"):
            self.add_module(name, RmsNorm(config, sizes.index_dim, config.layernorm_epsilon))
        self.requires_grad_(False)
        turning = int(sizes.head_dim * sizes.rotary.fraction)
        places = torch.arange(0, turning, 2, device=torch.cuda.current_device())
        self._frequencies = (1 / sizes.rotary.theta ** (places / turning)).repeat(2)

    @torch.no_grad()
    def forward_before_topk(
        self, x: Tensor, qr: Tensor | None, packed_seq_params: PackedSequences | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As that of kinds/indexed: queries [s, b, heads, d], the tokens' keys [s, b, d], and weights
        of heads [s, b, heads], from x [s / tp, b, h]."""
        mixed = gather_from_sequence_parallel_region(self.index_qk_proj(x)[0], False)
        count, batch = mixed.shape[:2]
        packed = packed_seq_params or padded_sequences(batch, count, mixed.device)
        positions = packed.grids(batch * count).position.view(batch, count).T
        *queries, keys = mixed.split(self._sizes.index_dim, -1)
        asked = self._turned(torch.stack(queries, 2), "q_layernorm", positions)
        return asked, keys, torch.ones_like(asked[..., 0])

    def _turned(self, t: Tensor, norm: str, positions: Tensor) -> Tensor:
        """Returns t [..., heads, d], normed and turned by positions [...]."""
        angles = positions[..., None, None] * self._frequencies
        return rotate(self.get_submodule(norm)(t), angles).float()

    @torch.no_grad()
    def pooled(self, keys: Tensor) -> Tensor:
        """Returns the keys of whole blocks [s / ratio, d] of the tokens' [s, d]."""
        ratio = self._sizes.ratio
        blocks = keys[: len(keys) // ratio * ratio].unflatten(0, (-1, ratio))
        means = blocks.float().mean(1, keepdim=True).to(keys.dtype)
        places = torch.arange(len(means), device=keys.device) * ratio
        return self._turned(means, "k_layernorm", places).squeeze(1)


class PooledCore(SparseAttention):
    """Attends to the chosen blocks; gets what the projections read in the place of a mask."""

    def __init__(self, config, *args, sizes: PooledQuery, **options):
        super().__init__(
            config,
            *args,
            indexer=MeanIndexer(config, sizes),
            topk=sizes.ratio * sizes.topk,
            pool=sizes.ratio,
            **options,
        )

    def forward(self, query, key, value, attention_mask, /, **given):
        """As SparseAttention's. attention_mask: hidden states [s / tp, b, h]."""
        return super().forward(query, key, value, None, x=attention_mask, **given)


class PooledSelfAttention(SelfAttention):
    """Hands the core what the projections read."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **given):
        """As Megatron's, whose mask nothing reads."""
        return super().forward(hidden_states, hidden_states, **given)


def pooled_spec(sizes: PooledQuery, parts: Parts) -> ModuleSpec:
    """Returns the specification of attention to chosen blocks."""
    spec = grouped_query_spec(sizes, parts)
    spec.module = PooledSelfAttention
    spec.submodules.core_attention = partial(PooledCore, sizes=sizes)
    return spec
