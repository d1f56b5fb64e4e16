"""Causal attention for padded and packed batches, in the place of Megatron's core attention.

Megatron's own local attention refuses packed sequences; Transformer Engine's does not exist on a CPU. This one is torch's
scaled_dot_product_attention on a CPU and torch's variable-length kernel on a GPU.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed description plus where each token lies in a padded [sequence, position] grid."""

    sequence: Tensor | None = None  # [T] int64
    position: Tensor | None = None  # [T] int64

    @staticmethod
    def make(cu_seqlens: Tensor, max_seqlen: int) -> "PackedSequences":
        """cu_seqlens [k + 1] int32, from 0 to T; every position belongs to a sequence (a dummy tail is one too)."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        position = torch.arange(len(sequence), device=lengths.device) - cu_seqlens[:-1].long()[sequence]
        return PackedSequences(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen, sequence=sequence, position=position,
        )  # fmt: skip


class CausalAttention(torch.nn.Module):
    """softmax(q k^T scale) v with a causal mask inside each sequence; grouped key/value heads."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, cp_comm_type=None, softmax_scale=None, pg_collection=None):
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask, /, *, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        """Padded: q [s, b, heads, d], k and v [s, b, groups, d] -> [s, b, heads d]. Packed: no b -> [T, heads d].

        Padding is at the right, so the causal mask alone keeps it away from real tokens.
        """
        if packed_seq_params is None:
            out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))  # [b, heads, s, d]
            return out.permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query, key, value, packed_seq_params)
        return self._packed(query, key, value, packed_seq_params)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:  # written out: the grouped form has no fused kernel on every device
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        shape = (len(packed.cu_seqlens_q) - 1, packed.max_seqlen_q)
        where = (packed.sequence, packed.position)

        def grid(flat: Tensor) -> Tensor:  # [T, heads, d] -> [k, heads, longest, d]
            return flat.new_zeros(*shape, *flat.shape[1:]).index_put(where, flat).transpose(1, 2)

        out = self._attend(grid(query), grid(key), grid(value)).transpose(1, 2)
        return out[where].flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        causal = (-1, 0)  # all of the past, nothing of the future
        out = varlen_attn(query, key, value, cu, cu, longest, longest, scale=self.scale, window_size=causal, enable_gqa=True)
        return out.flatten(1)
