"""Compressed attention (DeepSeek-V4, 2.3): each query sees a window of tokens and, behind it, keys
that stand for several tokens each.

All heads share one key, which is the value, too; what it turned the value by is undone in the
output. A key of m tokens is their sum with weights of a softmax over these m, for each number of it.
With m = 4 windows overlap: a key also sums other numbers of the four tokens before, and an indexer
chooses the keys that a query sees. Larger windows do not overlap, and a query sees all of them.

Torch computes scores block by block, and again in the backward.
"""

import math
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megagrpo.models.config_json import Rotary
from megagrpo.models.kinds.compressed.cost import BLOCK
from megagrpo.models.kinds.compressed.describe import INDEXED, CompressedAttention
from megagrpo.models.kinds.grouped_query.layer import PackedSequences, gathered, zigzag_position
from megagrpo.models.kinds.recurrent import Groups
from megagrpo.models.layers.parts import Parts
from megagrpo.models.layers.whole_linear import WholeLinear


class Turns:
    """Turns pairs of neighbors, the last ones of a head, by their positions (RoFormer)."""

    def __init__(self, rotary: Rotary, dim: int):
        places = torch.arange(0, dim, 2, dtype=torch.float32)
        frequencies = rotary.theta ** -(places / dim)
        if yarn := rotary.yarn:  # arXiv 2309.00071, 3.2, without a factor of its own
            least, most = yarn["beta_slow"], yarn["beta_fast"]
            low, high = (
                dim
                * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(rotary.theta))
                for turns in (most, least)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            ramp = ((places / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
            frequencies = frequencies * (1 - ramp + ramp / yarn["factor"])
        self._frequencies = frequencies

    def __call__(self, t: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """Returns t [..., d] turned by positions, which broadcast with [...]; back: the other
        way."""
        angles = positions[..., None].float() * self._frequencies.to(t.device)
        cos, sin = angles.cos(), -angles.sin() if back else angles.sin()
        width = 2 * cos.shape[-1]
        first, second = t[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((t[..., :-width], turned.flatten(-2).to(t.dtype)), -1)


class Compressor(torch.nn.Module):
    """Makes one key of `ratio` tokens; held whole by every rank. Parameters have the names of
    checkpoints."""

    def __init__(self, config: TransformerConfig, dim: int, ratio: int, norm: type, turns: Turns):
        super().__init__()
        self.ratio = ratio
        self._turns = turns
        rows = dim * (2 if ratio == INDEXED else 1)
        self.width = 2 * rows
        self.wkv = WholeLinear(config.hidden_size, rows, config=config)
        self.wgate = WholeLinear(config.hidden_size, rows, config=config)
        device = torch.cuda.current_device()
        ape = torch.empty(ratio, rows, dtype=torch.float32, device=device)
        self.ape = torch.nn.Parameter(ape)
        # each tensor-parallel rank has the gradient of its heads: Megatron sums them
        self.ape.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
        self.norm = norm(config=config, hidden_size=dim, eps=config.layernorm_epsilon)

    def rows(self, hidden: Tensor) -> Tensor:
        """Returns what keys are made of, [s / tp, b, width]."""
        return torch.cat((self.wkv(hidden)[0], self.wgate(hidden)[0]), -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns keys [k, places / ratio, d] of whole sequences [k, places, width]; of a last
        window that is not full none."""
        count = rows.shape[1] // self.ratio
        windows = rows[:, : count * self.ratio].unflatten(1, (count, self.ratio))
        values, gates = windows.chunk(2, -1)
        gates = gates.float() + self.ape
        if self.ratio == INDEXED:
            values = _with_window_before(values, 0.0)
            gates = _with_window_before(gates, -torch.inf)
        keys = self.norm((values * gates.softmax(2).to(values.dtype)).sum(2))
        return self._turns(keys, torch.arange(count, device=keys.device) * self.ratio)


def _with_window_before(t: Tensor, none: float) -> Tensor:
    """Returns the second half of each window's numbers behind the first half of those of the window
    before, [k, windows, 2 ratio, d] of [k, windows, ratio, 2 d]."""
    first, second = t.chunk(2, -1)
    before = F.pad(first, (0, 0, 0, 0, 1, 0), value=none)[:, :-1]
    return torch.cat((before, second), 2)


class KeyChoice(torch.nn.Module):
    """Chooses keys behind the window as the indexer of DeepSeek-V3.2 does; frozen, in float32."""

    def __init__(
        self, config: TransformerConfig, sizes: CompressedAttention, norm: type, turns: Turns
    ):
        super().__init__()
        self._sizes = sizes
        self._turns = turns
        heads, dim = sizes.index_heads, sizes.index_dim
        self.compressor = Compressor(config, dim, INDEXED, norm, turns)
        self.wq_b = WholeLinear(sizes.q_lora_rank, heads * dim, config=config)
        self.weights_proj = WholeLinear(config.hidden_size, heads, config=config)
        self.requires_grad_(False)

    def forward(self, asked: Tensor, keys: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """Returns which keys [k or 1, t, m] of those that queries may see they do see.

        asked: products of queries and of hidden states with wq_b and weights_proj, [k, t, ...].
        keys: [k, m, d]; position: of the queries, [k or 1, t]; seen: [k or 1, t, m].
        """
        sizes = self._sizes
        heads, topk = sizes.index_heads, sizes.topk
        if keys.shape[1] <= topk:
            return seen
        queries = asked[..., :-heads].unflatten(-1, (heads, -1))
        queries = self._turns(queries, position[..., None]).float()
        weights = asked[..., -heads:].float() * (heads * sizes.index_dim) ** -0.5
        products = torch.relu(queries @ keys.float()[:, None].mT)  # [k, t, heads, m]
        scores = (products * weights[..., None]).sum(2).masked_fill(~seen, -torch.inf)
        best = scores.topk(topk, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


class GroupedLinear(Groups):
    """Projects each group of heads by itself."""

    def __init__(self, config: TransformerConfig, groups: int, width: int, rank: int):
        """width, rank: inputs and outputs of each."""
        super().__init__(config, groups)
        self.weight = self.cut(rank, width)

    def forward(self, heads: Tensor) -> Tensor:
        """Maps [s, b, heads, d] to [s, b, groups rank]."""
        by_group = heads.flatten(2).unflatten(2, (self.own_groups, -1))
        weight = self.weight.unflatten(0, (self.own_groups, -1))
        return torch.einsum("sbgw,grw->sbgr", by_group, weight).flatten(2)


class _Places(NamedTuple):
    """Says where tokens lie in grids [k, places] of queries and [k, longest] of keys."""

    query_at: tuple[Tensor, Tensor]  # row and place, which broadcast with [s, b]
    key_at: tuple[Tensor, Tensor]  # row and position, of all context ranks' tokens
    position: Tensor  # [k or 1, places], of queries in whole sequences
    rows: int
    longest: int

    @classmethod
    def of_padded(cls, count: int, batch: int, device: torch.device) -> "_Places":
        cp = mpu.get_context_parallel_world_size()
        place = torch.arange(count, device=device)
        by_rank = [zigzag_position(place, count, rank, cp) for rank in range(cp)]
        row = torch.arange(batch, device=device)
        position = by_rank[mpu.get_context_parallel_rank()][None]
        key_at = row, torch.cat(by_rank)[:, None]
        return cls((row, place[:, None]), key_at, position, batch, count * cp)

    @classmethod
    def of_packed(cls, count: int, packed: PackedSequences) -> "_Places":
        grids, longest = packed.grids(count), packed.max_seqlen_q
        position = grids.query_position
        if position is None:
            position = torch.arange(longest, device=grids.query_at[0].device)[None]
        at = [(row[:, None], place[:, None]) for row, place in (grids.query_at, grids.key_at)]
        return cls(at[0], at[1], position, len(packed.cu_seqlens_q) - 1, longest)

    def queries(self, t: Tensor) -> Tensor:
        """Lays [s, b, ...] out as [k, places, ...]."""
        shape = self.rows, self.position.shape[1], *t.shape[2:]
        return t.new_zeros(shape).index_put(self.query_at, t)

    def keys(self, t: Tensor) -> Tensor:
        """Lays [s cp, b, ...] out as [k, longest, ...]."""
        return t.new_zeros(self.rows, self.longest, *t.shape[2:]).index_put(self.key_at, t)


class CompressedMixer(Groups):
    """Takes the place of Megatron's SelfAttention. Parameters have the names of checkpoints, but
    for q_b_proj, which these call wq_b."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: CompressedAttention,
        parts: Parts,
        **_: object,
    ):
        super().__init__(config, sizes.groups)
        self.layer_number = layer_number
        self._sizes = sizes
        dim, rank = sizes.head_dim, sizes.q_lora_rank
        linear = {"config": config, "init_method": config.init_method, "bias": False}
        linear |= {"is_expert": False, "skip_bias_add": False}
        norm = {"config": config, "eps": config.layernorm_epsilon}
        self.wq_a = WholeLinear(config.hidden_size, rank, config=config)
        self.q_norm = parts.norm(hidden_size=rank, **norm)
        self.q_b_proj = build_module(
            parts.column, rank, sizes.heads * dim, gather_output=False, **linear
        )
        self.wkv = WholeLinear(config.hidden_size, dim, config=config)
        self.kv_norm = parts.norm(hidden_size=dim, **norm)
        heads = sizes.heads // sizes.groups
        self.attn_sink = self.cut(heads, dtype=torch.float32)
        self.wo_a = GroupedLinear(config, sizes.groups, heads * dim, sizes.group_rank)
        outputs = sizes.groups * sizes.group_rank
        self.wo_b = build_module(
            parts.row, outputs, config.hidden_size, input_is_parallel=True, **linear
        )
        ratio = sizes.ratios[layer_number - 1]
        self._turns = Turns(sizes.far_rotary if ratio else sizes.rotary, sizes.rope_dim)
        self.compressor: Compressor | None = None
        self.indexer: KeyChoice | None = None
        if ratio:
            self.compressor = Compressor(config, dim, ratio, parts.norm, self._turns)
        if ratio == INDEXED:
            self.indexer = KeyChoice(config, sizes, parts.norm, self._turns)

    def keep_float32(self) -> None:
        """Restores float32 of sinks and of what is added to gates after a cast, as engines have
        them."""
        self.attn_sink.data = self.attn_sink.data.float()
        for module in self.modules():
            if isinstance(module, Compressor):
                module.ape.data = module.ape.data.float()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Maps [s / tp, b, h] to the same; s, packed T, are this context rank's."""
        dim = self._sizes.head_dim
        latent = self.q_norm(self.wq_a(hidden_states)[0])
        queries = self.q_b_proj(latent)[0].unflatten(-1, (-1, dim))
        queries = F.rms_norm(queries, (dim,), None, self.config.layernorm_epsilon)
        keys = [self.kv_norm(self.wkv(hidden_states)[0])]
        if self.compressor is not None:
            keys.append(self.compressor.rows(hidden_states))
        asked = []
        if self.indexer is not None:
            with torch.no_grad():
                keys.append(self.indexer.compressor.rows(hidden_states))
                asked = [
                    self.indexer.wq_b(latent)[0],
                    self.indexer.weights_proj(hidden_states)[0],
                ]
        rows = torch.cat(keys + asked, -1)
        if self.config.sequence_parallel:
            # every rank's heads give a gradient of the whole sequence, which the backward sums
            tensor = mpu.get_tensor_model_parallel_group()
            rows = gather_from_sequence_parallel_region(rows, group=tensor)
        width = sum(part.shape[-1] for part in keys)
        count, batch = rows.shape[:2]
        if packed_seq_params is None:
            places = _Places.of_padded(count, batch, rows.device)
        else:
            places = _Places.of_packed(count, packed_seq_params)
        out = self._attend(
            places.queries(queries),
            places.queries(rows[..., width:]),
            places.keys(gathered(rows[..., :width].contiguous(), packed_seq_params)),
            places.position,
        )
        return self.wo_b(self.wo_a(out[places.query_at]))[0], None

    def _attend(self, queries: Tensor, asked: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        """Returns [k, places, heads, d] of queries [k, places, heads, d] and rows [k, longest,
        width]."""
        dim = self._sizes.head_dim
        longest = rows.shape[1]
        near = self._turns(rows[..., :dim], torch.arange(longest, device=rows.device))
        far = index = near[:, :0]
        if self.compressor is not None:
            far = self.compressor(rows[..., dim : dim + self.compressor.width])
        if self.indexer is not None:
            with torch.no_grad():
                index = self.indexer.compressor(rows[..., dim + self.compressor.width :])
        blocks = []
        for start in range(0, position.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            first, last = 0, longest
            if position.shape[1] == longest:  # one context rank: queries stand in order
                first, last = max(start - self._sizes.window + 1, 0), start + BLOCK
            own = queries[:, part], asked[:, part], near[:, first:last], far, index
            own = *own, position[:, part], first
            blocks.append(
                checkpoint(self._block, *own, use_reentrant=False, preserve_rng_state=False)
            )
        return torch.cat(blocks, 1)

    def _block(
        self,
        queries: Tensor,
        asked: Tensor,
        near: Tensor,
        far: Tensor,
        index: Tensor,
        position: Tensor,
        first: int,
    ) -> Tensor:
        """first: the position of near's first key."""
        sizes = self._sizes
        heads = queries.shape[2]
        ahead = position[..., None] - torch.arange(near.shape[1], device=near.device) - first
        seen = (ahead >= 0) & (ahead < sizes.window)
        if self.compressor is not None:
            whole = (position[..., None] + 1) // self.compressor.ratio
            behind = torch.arange(far.shape[1], device=far.device) < whole
            if self.indexer is not None:
                behind = self.indexer(asked, index, position, behind)
            seen = torch.cat((seen.expand(len(behind), -1, -1), behind), -1)
        keys = torch.cat((near, far), 1)
        turned = self._turns(queries, position[..., None]) * sizes.head_dim**-0.5
        # all heads have the same keys: [k, t heads, d] with [k, d, n]
        scores = (turned.flatten(1, 2) @ keys.mT).unflatten(1, (-1, heads))
        scores = scores.float().masked_fill(~seen[:, :, None], -torch.inf)
        none = self.attn_sink[:, None].expand(*scores.shape[:3], 1)
        shares = torch.cat((scores, none), -1).softmax(-1)[..., :-1].to(keys.dtype)
        out = (shares.flatten(1, 2) @ keys).unflatten(1, (-1, heads))
        return self._turns(out, position[..., None], back=True)


def compressed_spec(own: CompressedAttention, parts: Parts) -> ModuleSpec:
    """Returns the specification of compressed attention."""
    return ModuleSpec(module=CompressedMixer, params={"sizes": own, "parts": parts})
