"""DeepSeek sparse attention: a frozen indexer chooses the keys that each query sees (DeepSeek-V3.2,
arXiv 2512.02556, 2.1).

Torch's layers attend under masks of the chosen keys, as Transformer Engine's do if these are in
pools (GLM-5.3-Flash). Else those get Megatron's own core, absorbed, whose kernels read the chosen keys
only. Both have the same indexer and parameter names.
"""

from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    apply_rotary_pos_emb,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    DSAttentionSubmodules,
    source_dsa_compute_layer,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.config_json import YARN_KEYS
from megagrpo.models.kinds.grouped_query.layer import (
    CausalAttention,
    padded_sequences,
    whole_sequences,
)
from megagrpo.models.kinds.indexed.describe import BLOCK
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.layers.whole_linear import WholeLinear, whole_parameter

if TYPE_CHECKING:
    from megagrpo.models.kinds.pooled.layer import MeanIndexer

_YARN = YARN_KEYS[1:]  # which Megatron names alike; the factor has another name
_NORM_EPSILON = 1e-6  # of the published code and of engines, whatever the model's norms have


class Indexer(torch.nn.Module):
    """Scores every key for every query: sum over heads of weight relu(query key), in float32.

    Held whole by every rank and frozen. Parameters have the names of checkpoints. Engines compute
    the same in FP8 behind a Hadamard rotation, which changes no product: keys at the border of the
    choice may differ.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        pool: int = 1,
    ):
        """pool: keys that are chosen together."""
        super().__init__()
        heads, dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        assert heads and dim and config.dsa_indexer_topk and config.q_lora_rank
        self._heads = heads
        self._pool = pool
        self._config = config
        self.wq_b = WholeLinear(config.q_lora_rank, heads * dim, config=config)
        self.wk = WholeLinear(config.hidden_size, dim, config=config)
        self.weights_proj = WholeLinear(config.hidden_size, heads, config=config)
        device = torch.cuda.current_device()
        self.k_norm = torch.nn.LayerNorm(dim, _NORM_EPSILON, device=device, dtype=torch.float32)
        for parameter in self.k_norm.parameters():  # as engines compute it
            parameter.stays_float32 = True  # type: ignore[attr-defined]  # read by build.py
        if pool > 1:
            gate = whole_parameter(config, (dim, config.hidden_size), config.params_dtype)
            self.index_kpool_compress_gate = gate
            self.index_kpool_compress_ape = whole_parameter(config, (pool, dim))
        self.requires_grad_(False)
        rotary, scaling = RotaryEmbedding, {}
        if config.rope_type != "rope":
            rotary = YarnRotaryEmbedding
            scaling = {key: getattr(config, key) for key in _YARN}
            scaling["scaling_factor"] = config.rotary_scaling_factor
        self._rotary = rotary(
            config.qk_pos_emb_head_dim,
            rotary_percent=1.0,
            rotary_base=config.rotary_base,
            cp_group=mpu.get_context_parallel_group(),
            **scaling,
        )

    @torch.no_grad()
    def forward_before_topk(
        self, x: Tensor, qr: Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [s, b, heads, d], keys [s, b, d], with gates behind them if they are chosen
        in pools [s, b, 2 d], and scaled weights of heads [s, b, heads], float32; s is this context
        rank's.

        x: normed hidden states [s / tp, b, h]; qr: queries' normed latent [s / tp, b, rank]. Packed
        sequences have b 1, which qr may lack. Megatron's core calls it by this name, too.
        """
        config = self._config
        keys = self.k_norm(self.wk(x)[0].float()).to(x.dtype)
        dim = keys.shape[-1]
        if self._pool > 1:
            keys = torch.cat((keys, F.linear(x, self.index_kpool_compress_gate)), -1)
        parts = self.wq_b(qr.view(*x.shape[:2], -1))[0], keys, self.weights_proj(x)[0]
        mixed = torch.cat(parts, -1)
        if config.sequence_parallel:
            mixed = gather_from_sequence_parallel_region(
                mixed,
                tensor_parallel_output_grad=False,
                group=mpu.get_tensor_model_parallel_group(),
            )
        queries, keys, weights = mixed.split([part.shape[-1] for part in parts], -1)
        queries = queries.unflatten(-1, (self._heads, dim))
        weights = weights.float() * (self._heads * dim) ** -0.5
        if not config.qk_pos_emb_head_dim:
            return queries, keys, weights
        length = self._rotary.get_rotary_seq_len(None, None, x, config, packed_seq_params)
        angles = self._rotary(length, packed_seq=packed_seq_params is not None)
        angles, mscale = angles if isinstance(angles, tuple) else (angles, 1.0)
        if packed_seq_params is None or config.context_parallel_size == 1:
            angles = angles[: len(mixed)]

        def turned(t: Tensor) -> Tensor:
            packed = packed_seq_params is not None
            out = apply_rotary_pos_emb(
                t.squeeze(1) if packed else t,
                angles,
                config=config,
                cu_seqlens=packed_seq_params.cu_seqlens_q if packed_seq_params else None,
                mscale=mscale,
                cp_group=mpu.get_context_parallel_group(),
                mla_rotary_interleaved=config.dsa_indexer_rope_interleaved,
            )
            return out.unsqueeze(1) if packed else out

        return turned(queries), turned(keys.unsqueeze(2)).squeeze(2), weights

    @torch.no_grad()
    def pooled(self, keys: Tensor) -> Tensor:
        """Returns the keys of whole pools [s / pool, d], float32, of keys with gates [s, 2 d]: sums by
        a softmax of gates and places, for each number of a key."""
        count = len(keys) // self._pool
        pools = keys[: count * self._pool].float().unflatten(0, (count, self._pool))
        values, gates = pools.chunk(2, -1)
        return (values * (gates + self.index_kpool_compress_ape).softmax(1)).sum(1)


class SparseAttention(CausalAttention):
    """Attends to the chosen keys, sequence by sequence, under masks of a block of queries, which the
    backward makes again. A query also sees the keys behind the last whole pool before it."""

    requires_dsa_inputs = True  # latent attention then passes x and qr

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args,
        indexer: "Indexer | MeanIndexer | None",
        topk: int,
        pool: int,
        source: int = 0,
        **kwargs,
    ):
        """topk: the most keys that a query sees; pool: those that are chosen together; source: the
        layer whose indexer chooses for this one, from 1, or 0 if no layers share a choice."""
        super().__init__(config, layer_number, *args, **kwargs)
        self._topk = topk
        self._pool = pool
        self._number = layer_number
        self._source = source
        self.indexer = indexer

    def forward(
        self, query, key, value, attention_mask, /, *, packed_seq_params=None, x=None, qr=None, **_
    ):
        """As CausalAttention's; x, qr: what the indexer reads. Sequences of at most topk tokens are
        dense."""
        given = packed_seq_params
        assert given is not None or not self._source, "check/rules/trainer_layout.py refuses it"
        batch = query.shape[1] if given is None else 1
        packed = given or padded_sequences(batch, len(query), query.device)
        if packed.max_seqlen_q <= self._topk:
            return super().forward(query, key, value, attention_mask, packed_seq_params=given)
        if self.indexer is None:
            asked, index, weights = packed.chosen[self._source]
        else:
            asked, index, weights = self.indexer.forward_before_topk(x, qr, given)
        if self._source:
            packed.chosen[self._number] = asked, index, weights
        attended = (
            (query, key, value) if given is None else (t[:, None] for t in (query, key, value))
        )
        every = (*attended, asked, index, weights)
        query, key, value, asked, index, weights = (t.transpose(0, 1).flatten(0, 1) for t in every)
        rows = whole_sequences(packed, (query, asked, weights), (key, value, index))
        out = torch.cat([self._sequence(*each) for each in rows]).unflatten(0, (batch, -1))
        return out.transpose(0, 1) if given is None else out[0]

    def _sequence(self, *rows: Tensor) -> Tensor:
        """Returns [places, heads e] of one sequence, from rows as `_block` gets them, and the indexer's
        keys [s, d], with gates if they are in pools."""
        *own, key, value, index = rows
        keys = index.float()
        if self._pool > 1:
            assert self.indexer is not None, "layers that pool keys share no choice"
            keys = self.indexer.pooled(index)
        blocks = zip(*(t.split(BLOCK) for t in own), strict=True)
        return torch.cat([again(self._block, *block, key, value, keys) for block in blocks])

    def _block(
        self,
        query: Tensor,
        asked: Tensor,
        weights: Tensor,
        position: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Returns [t, heads e] of some queries."""
        seen = torch.arange(len(key), device=key.device) <= position[:, None]
        if len(key) > self._topk:
            seen = self._chosen(asked, weights[..., None], position[:, None], index, seen)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        return self._attend(query, key, value, seen)[0].transpose(0, 1).flatten(1)

    @torch.no_grad()
    def _chosen(
        self, asked: Tensor, weights: Tensor, position: Tensor, index: Tensor, seen: Tensor
    ) -> Tensor:
        """Returns the keys of those before each query [t, s] that the best pools have, or that are
        behind the last whole pool."""
        whole = (position + 1) // self._pool
        behind = torch.arange(len(index), device=index.device) < whole
        products = asked.float() @ index.mT  # [t, index heads, pools]
        best = best_keys(products, weights, behind, self._topk // self._pool)
        best = best.repeat_interleave(self._pool, -1)
        best = F.pad(best, (0, seen.shape[1] - best.shape[1]))
        return seen & (
            best | (torch.arange(seen.shape[1], device=seen.device) >= whole * self._pool)
        )


class IndexedCore(SparseAttention):
    """Attends to the keys that the indexer of this layer chooses, or of one before."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, *args, pool: int = 1, **kwargs
    ):
        """pool: keys that are chosen together."""
        assert config.dsa_indexer_topk
        shares = config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
        source = source_dsa_compute_layer(layer_number, *shares)
        super().__init__(
            config,
            layer_number,
            *args,
            indexer=Indexer(config, pool=pool) if source == layer_number else None,
            topk=config.dsa_indexer_topk,
            pool=pool,
            source=source if config.dsa_indexer_topk_freq > 1 else 0,
            **kwargs,
        )


def best_keys(products: Tensor, weights: Tensor, seen: Tensor, topk: int) -> Tensor:
    """Returns which of the keys that each query sees [t, m] have the best sums of their products
    [t, heads, m] with it, by weights [t, heads, 1]. Overwrites the products: gigabytes, of which
    plans count one copy."""
    scores = products.relu_().mul_(weights).sum(1).masked_fill(~seen, -torch.inf)
    best = scores.topk(topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


def sparse_attention(transformer_engine: bool) -> tuple[type, type | ModuleSpec]:
    """Returns the class of latent attention and its core, by whose layers the model is built of."""
    if not transformer_engine:
        return MLASelfAttention, IndexedCore
    return AbsorbedMLASelfAttention, ModuleSpec(
        module=DSAttention, submodules=DSAttentionSubmodules(indexer=Indexer)
    )
