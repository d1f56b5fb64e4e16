"""Core attention for padded, packed and context-parallel batches, instead of Megatron's.

Megatron's own local attention refuses packed sequences and context parallelism; Transformer
Engine's does not exist on a CPU. This one is torch's scaled_dot_product_attention on a CPU and
torch's variable-length kernel on a GPU. Under context parallelism a rank holds two chunks of every
sequence (zigzag) and gathers the keys and values of all ranks.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.grouped_query.norm_over_heads import NormOverHeads
from megagrpo.models.layers.context import changing_group
from megagrpo.models.layers.cut_module import CutModule

if TYPE_CHECKING:
    from megagrpo.models.layers.parts import Parts


@dataclass(frozen=True)
class _PaddedGrids:
    """Says where tokens lie in padded [sequence, place] grids of queries and of keys."""

    query_at: tuple[Tensor, Tensor]  # sequence and place [T / cp] of this rank's tokens
    key_at: tuple[Tensor, Tensor]  # sequence and position [T] of all ranks' tokens, rank after rank
    position: Tensor  # [T / cp] of this rank's tokens in the whole sequences


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed description, which the padded path adds its grids to when it first needs
    them."""

    lengths: Sequence[int] = ()  # tokens of each sequence, known without asking the device
    _grids: _PaddedGrids | None = None
    # what layers have chosen keys by, by layer, for those that share a choice
    chosen: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @staticmethod
    def make(cu_seqlens: Tensor, lengths: Sequence[int], cp_size: int) -> "PackedSequences":
        """Describes k sequences by cu_seqlens [k + 1] int32, from 0 to T, which cp_size ranks share;
        a dummy tail is one too. lengths: the same numbers' differences."""
        return PackedSequences(
            cp_group=changing_group(cp_size),
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            # Transformer Engine's under context parallelism: its padding is counted as part of the
            # sequences here. The same tensor, which it compares with the other in every layer
            # without asking the device for the values.
            cu_seqlens_q_padded=cu_seqlens if cp_size > 1 else None,
            cu_seqlens_kv_padded=cu_seqlens if cp_size > 1 else None,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
        )

    @property
    def group(self) -> ProcessGroup:
        """Returns the ranks that share the sequences."""
        return self.cp_group or mpu.get_context_parallel_group()

    def grids(self, num_tokens: int) -> _PaddedGrids:
        """Returns the grids of `num_tokens` tokens of this rank, made once a micro-batch for all
        layers."""
        if self._grids is None:
            cp_size = self.group.size()
            local, sequence, place = local_places(self.cu_seqlens_q, num_tokens, cp_size)
            by_rank = [
                zigzag_position(place, local[sequence], rank, cp_size) for rank in range(cp_size)
            ]
            self._grids = _PaddedGrids(
                query_at=(sequence, place),
                key_at=(sequence.repeat(cp_size), torch.cat(by_rank)),
                position=by_rank[self.group.rank()],
            )
        return self._grids

    def whole(self, t: Tensor) -> Tensor:
        """Returns what all ranks have of the sequences [T, ...], in their order, of t [T / cp,
        ...]."""
        if self.group.size() == 1:
            return t
        by_rank = gathered(t, self)
        sequence, place = self.grids(len(t)).key_at
        places = self.cu_seqlens_q[sequence] + place
        return by_rank.new_empty(by_rank.shape).index_copy(0, places, by_rank)


def local_places(cu_seqlens: Tensor, count: int, cp_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a context rank's part of k sequences: their tokens [k], and of each token [count]
    sequence and place."""
    local = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp_size
    # without a size it waits for the device
    sequence = torch.repeat_interleave(local, output_size=count)
    return (
        local,
        sequence,
        torch.arange(count, device=local.device) - (local.cumsum(0) - local)[sequence],
    )


def zigzag_position(place: Tensor, local_length: Tensor | int, rank: int, cp_size: int) -> Tensor:
    """Returns the position in the whole sequence of the place-th token that context rank `rank`
    holds of it.

    Of 2 cp equal chunks it holds number `rank` and number 2 cp - 1 - rank, so that all ranks attend
    to as many keys.
    """
    chunk = local_length // 2 if cp_size > 1 else local_length
    late = place >= chunk
    return torch.where(late, (2 * cp_size - 1 - rank) * chunk + place - chunk, rank * chunk + place)


def gathered(keys: Tensor, packed: PackedSequences | None) -> Tensor:
    """Returns the keys, or what goes with them, of all ranks that share the sequences, rank after
    rank."""
    group = mpu.get_context_parallel_group() if packed is None else packed.group
    if group.size() == 1:
        return keys
    return gather_from_sequence_parallel_region(keys, group=group)


def whole_sequences(
    packed: PackedSequences, own: Sequence[Tensor], keys: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yields of each sequence this rank's rows of `own` [T, ...], their positions, and the keys of
    all ranks, in order, from this rank's `keys` [T, ...]."""
    grids = packed.grids(len(keys[0]))
    whole = [packed.whole(t) for t in keys]
    lengths = [length // packed.group.size() for length in packed.lengths]
    rows = [t.split(lengths) for t in (*own, grids.position)]
    yield from zip(*rows, *(t.split([*packed.lengths]) for t in whole), strict=True)


def padded_sequences(batch: int, count: int, device: torch.device) -> PackedSequences:
    """Describes sequences of one length, of which this context rank has `count` tokens each."""
    cp = mpu.get_context_parallel_world_size()
    borders = torch.arange(batch + 1, dtype=torch.int32, device=device) * count * cp
    return PackedSequences.make(borders, [count * cp] * batch, cp)


@cache
def _takes_grouped_heads(varlen_attn: Callable) -> bool:
    """Tells whether torch's kernel promises to take fewer key and value heads than queries; that of
    2.11 does not."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class CausalAttention(CutModule):
    """Computes softmax(q k^T scale) v with a causal mask inside each sequence; key/value heads are
    grouped."""

    def __init__(self, config, layer_number, *_, softmax_scale=None, **options):
        super().__init__(config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        # positions before its own that a query sees; None: all
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window, _ = config.window_size
        # [heads / tp], as Megatron names sinks
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            sinks = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = torch.nn.Parameter(sinks)

    def forward(self, query, key, value, attention_mask, /, *, packed_seq_params=None, **_):
        """Maps q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, e] to [s, b, heads e];
        packed: without b.

        e is d except in latent attention. s, packed T, are this context rank's. Padding is at the
        right, so the causal mask alone keeps it away from real tokens.
        """
        key, value = gathered(key, packed_seq_params), gathered(value, packed_seq_params)
        if packed_seq_params is None:
            return self._padded(query, key, value)
        has_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        alone = packed_seq_params.group.size() == 1
        if has_kernel and alone and self.softmax_offset is None:
            return self._varlen(query, key, value, packed_seq_params)
        return self._packed(query, key, value, packed_seq_params)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attends from query [b, heads, places, d] to key [b, groups, places, d] and value [b,
        groups, places, e].

        mask: [b, 1, queries, keys], True where a query sees a key; None: a plain causal one.
        """
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:  # written out: the grouped form has no fused kernel on every device
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        if self.softmax_offset is not None:
            return attend_with_sinks(query * self.scale, key, value, mask, self.softmax_offset)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns which keys [k] queries [..., q] see, [..., q, k], by their positions."""
        ahead = queries[..., None] - keys
        seen = ahead >= 0
        return seen if self.window is None else seen & (ahead <= self.window)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Lays out the arguments of `_attend`."""
        mask = None
        count = len(query)
        if len(key) > count or self.window is not None:
            grids = padded_sequences(1, count, query.device).grids(count)
            mask = self._visible(grids.position, grids.key_at[1])[None, None]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = self._attend(query, key, value, mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        sequences = len(packed.cu_seqlens_q) - 1
        longest = packed.max_seqlen_q
        grids = packed.grids(len(query))

        def grid(flat: Tensor, places: int, where: tuple[Tensor, Tensor]) -> Tensor:
            """Lays [T, heads, d] out as [k, heads, places, d]."""
            return (
                flat.new_zeros(sequences, places, *flat.shape[1:])
                .index_put(where, flat)
                .transpose(1, 2)
            )

        mask = None
        positions = torch.arange(longest, device=query.device)
        places = longest // packed.group.size()
        if packed.group.size() > 1:
            own = positions.new_zeros(sequences, places).index_put(grids.query_at, grids.position)
            mask = self._visible(own, positions)[:, None]
        elif self.window is not None:
            mask = self._visible(positions, positions)[None, None]
        queries = grid(query, places, grids.query_at)
        keys, values = (grid(t, longest, grids.key_at) for t in (key, value))
        out = self._attend(queries, keys, values, mask).transpose(1, 2)
        return out[grids.query_at].flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu = packed.cu_seqlens_q
        longest = packed.max_seqlen_q
        # of the past all, or a window; nothing of the future
        causal = (-1 if self.window is None else self.window, 0)
        width = value.shape[-1]
        if width < query.shape[-1]:  # the kernel wants heads of one width
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        attend: Callable[..., object] = varlen_attn
        repeat = query.shape[1] // key.shape[1]
        if _takes_grouped_heads(varlen_attn):
            attend = partial(varlen_attn, enable_gqa=True)
        elif repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        lengths = (cu, cu, longest, longest)
        out = attend(query, key, value, *lengths, scale=self.scale, window_size=causal)
        assert isinstance(out, Tensor), "no log-sum-exp was asked for"
        return out[..., :width].flatten(1)


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """Returns [b, heads, queries, e] of scaled queries; a softmax's denominator has one more score,
    of no key, which each head of sinks [heads] gives.

    mask: [b, 1, queries, keys]; None: a plain causal one. Scores are of the queries' type, their
    softmax in float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.mT).to(wide)
    if mask is None:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    none = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, none), -1).softmax(-1)[..., :-1]
    return shares.to(value.dtype) @ value


def grouped_query_spec(sizes: GroupedQuery, parts: "Parts") -> ModuleSpec:
    """Returns the specification of grouped-query attention."""
    norms: tuple = (parts.norm if sizes.qk_norm else IdentityOp,) * 2
    if sizes.norm_over_heads:
        norms = tuple(partial(NormOverHeads, heads=n) for n in (sizes.heads, sizes.kv_heads))
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.column,
            core_attention=parts.core_attention,
            linear_proj=parts.row,
            q_layernorm=norms[0],
            k_layernorm=norms[1],
        ),
    )
