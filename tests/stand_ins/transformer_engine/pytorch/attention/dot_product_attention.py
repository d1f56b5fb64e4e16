"""Causal attention of padded and packed batches, cut over context-parallel ranks in two chunks of each sequence."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    """Computes softmax(q k^T scale) v with a causal mask; key/value heads are grouped, values may be narrower."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group=None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group=None,
        cp_global_ranks: list[int] | None = None,
        cp_stream=None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        if attention_dropout or softmax_type != "vanilla" or return_max_logit or attention_type != "self":
            raise NotImplementedError("the stand-in for Transformer Engine has plain self-attention without dropout")
        if window_size not in (None, (-1, 0), (-1, -1)):
            raise NotImplementedError("the stand-in for Transformer Engine has no sliding window")
        self._take_parallel(tp_group, tp_size, None, sequence_parallel)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.num_attention_heads, self.layer_number = num_attention_heads, layer_number
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        assert num_attention_heads % self.num_gqa_groups == 0, (
            "The number of attention heads must be divisible by the number of GQA groups!"
        )
        self.softmax_scale = widths[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p") -> None:
        """Takes the group of the context-parallel ranks and how they exchange keys and values."""
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask=None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params=None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        """Maps sbhd [s, b, heads, d] to [s, b, heads e], thd [T, heads, d] to [T, heads e]; s and T of this rank."""
        layout = qkv_format or self.qkv_format
        mask = attn_mask_type or self.attn_mask_type
        if core_attention_bias is not None or alibi_slopes is not None or inference_params is not None:
            raise NotImplementedError("the stand-in for Transformer Engine adds no biases and keeps no cache")
        self._check(query_layer, key_layer, value_layer)
        cp = self.cp_group.size() if self.cp_group is not None else 1
        if layout == "sbhd":
            assert mask == "causal", f"mask {mask} is not one of padded batches here"
            length = len(query_layer) * cp
            keys, values = (_whole(t, [length], self.cp_group) for t in (key_layer, value_layer))
            return self._attend(query_layer, keys, values, length).flatten(2)
        assert layout == "thd" and mask == "padding_causal", f"{layout} with mask {mask} is not here"
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None, "thd needs cu_seqlens"
        if cp > 1:
            assert cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None, (
                "cu_seqlens_padded can not be None for context parallelism and qkv_format = 'thd'!"
            )
            assert self.cp_comm_type in ("p2p", "a2a"), "all_gather supports no padding mask, and so no thd"
        return self._packed(query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_q_padded, cp)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        assert query.dtype == key.dtype == value.dtype, "Queries, keys and values must have the same data type!"
        assert key.shape[:-1] == value.shape[:-1], "Keys and values must have the same number of places and heads!"
        assert query.shape[-1] == key.shape[-1] == self.hidden_size_per_attention_head_k, "head_dim of keys"
        assert value.shape[-1] == self.hidden_size_per_attention_head_v, "head_dim of values"
        assert key.shape[-2] == self.num_gqa_groups_per_partition, "Keys and values must have num_gqa_group heads!"
        if self.cp_group is not None and self.cp_group.size() > 1:
            assert key.shape[-1] == value.shape[-1] or self.cp_comm_type in ("p2p", "a2a+p2p"), (
                "Context parallelism does not support MLA with all_gather!"
            )

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, padded: Tensor | None, cp: int) -> Tensor:
        """Attends within each sequence: cu [k + 1] counts tokens, `padded` places, in 2 cp chunks."""
        ends = (cu if padded is None else padded).tolist()
        places = [end - start for start, end in pairwise(ends)]
        lengths = (cu[1:] - cu[:-1]).tolist()
        assert cp == 1 or all(size % (2 * cp) == 0 for size in places), "sequences must be multiples of 2 cp chunks"
        query, key, value = (t[: ends[-1] // cp, None] for t in (query, key, value))
        key, value = (_whole(t, places, self.cp_group) for t in (key, value))
        queries = query.split([size // cp for size in places])
        parts = zip(queries, key.split(places), value.split(places), lengths, strict=True)
        out = torch.cat([self._attend(*part) for part in parts])
        return out.flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Attends from query [s / cp, b, heads, d] to key [s, b, groups, d]; returns [s / cp, b, heads, e].

        What comes after `length` places is padding, of which the output is 0.
        """
        position = torch.arange(len(key))
        if len(query) < len(key):
            cp, rank = self.cp_group.size(), self.cp_group.rank()
            chunks = position.chunk(2 * cp)
            position = torch.cat((chunks[rank], chunks[-1 - rank]))
        mask = None
        if len(position) < len(key) or length < len(key):
            mask = (position[:, None] >= torch.arange(len(key))) & (torch.arange(len(key)) < length)
        repeat = query.shape[2] // key.shape[2]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        if length == 0:
            return query.new_zeros(*query.shape[:-1], value.shape[-1]).permute(2, 0, 1, 3)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3) * (position < length)[:, None, None, None]


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks along the first dimension; each rank's gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, part: Tensor, group) -> Tensor:
        ctx.group = group
        whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor):
        part = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None


def _whole(part: Tensor, places: list[int], group) -> Tensor:
    """Returns of a rank's part [T / cp, ...] all [T, ...], each sequence of `places` in its own order."""
    cp = 1 if group is None else group.size()
    if cp == 1:
        return part
    by_rank = [held.split([size // cp for size in places]) for held in _Gather.apply(part, group).chunk(cp)]
    chunks = []
    for number in range(len(places)):
        halves = [by_rank[rank][number].chunk(2) for rank in range(cp)]
        chunks += [early for early, _ in halves] + [late for _, late in reversed(halves)]
    return torch.cat(chunks)
