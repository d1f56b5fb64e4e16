"""Compressed attention (DeepSeek-V4, 2.3): each query sees a window of tokens and, behind it, keys
that stand for several tokens each.

All heads share one key, which is the value, too; what it turned the value by is undone in the
output. A key of m tokens is their sum with weights of a softmax over these m, for each number of it.
With m = 4 windows overlap: a key also sums other numbers of the four tokens before, and an indexer
chooses the keys that a query sees. Larger windows do not overlap, and a query sees all of them.

Tensor-parallel ranks have heads of their own, and all compute the one key. Torch computes scores
block by block, and again in the backward.
"""

import math
from collections.abc import Callable

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.config_json import Rotary
from megagrpo.models.kinds.compressed.describe import BLOCK, CUT, INDEXED, CompressedAttention
from megagrpo.models.kinds.grouped_query.layer import PackedSequences, attend_with_sinks, gathered
from megagrpo.models.kinds.recurrent import CutModule, again
from megagrpo.models.layers.whole_linear import whole_parameter


class Turns:
    """Turns pairs of neighbors, the last ones of a head, by their positions (RoFormer)."""

    def __init__(self, rotary: Rotary, dim: int):
        # on the device: a copy from the host would wait for it, at each turn
        places = torch.arange(0, dim, 2, device=torch.cuda.current_device())
        self._frequencies = 1 / rotary.theta ** (places / dim)
        if yarn := rotary.yarn:  # arXiv 2309.00071, 3.2, without a factor of its own
            original = yarn["original_max_position_embeddings"] / (2 * math.pi)
            low, high = (
                dim * math.log(original / yarn[key]) / (2 * math.log(rotary.theta))
                for key in ("beta_fast", "beta_slow")
            )
            low = max(math.floor(low), 0)
            high = min(math.ceil(high), dim - 1)
            kept = 1 - ((places / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
            slow = self._frequencies / yarn["factor"]
            self._frequencies = slow * (1 - kept) + self._frequencies * kept

    def __call__(self, t: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """Returns t [..., d] turned by positions, which broadcast with [...]; back: the other
        way."""
        angles = positions[..., None] * self._frequencies
        turn = torch.polar(torch.ones_like(angles), -angles if back else angles)
        width = 2 * angles.shape[-1]
        pairs = t[..., -width:].float().unflatten(-1, (-1, 2)).contiguous()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
        return torch.cat((t[..., :-width], turned.to(t.dtype)), -1)


class CompressedMixer(CutModule):
    """Takes the place of Megatron's SelfAttention. Its parameters are those of the description."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, sizes: CompressedAttention, **_: object
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self._sizes = sizes
        self._ratio = sizes.ratios[layer_number - 1]
        self._turns = Turns(sizes.far_rotary if self._ratio else sizes.rotary, sizes.rope_dim)
        self._specs = list(sizes.weights(config.hidden_size, layer_number - 1))
        for spec in self._specs:
            dtype = torch.float32 if spec.dtype else config.params_dtype
            shape = list(spec.shape)
            dim = CUT.get(spec.name)
            if dim is not None:
                shape[dim] //= config.tensor_model_parallel_size
            parameter = whole_parameter(config, tuple(shape), dtype)
            if dim is not None:
                parameter.sequence_parallel = False  # type: ignore[attr-defined]  # read by Megatron
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            parameter.requires_grad_(spec.trained)
            self.register_parameter(spec.name.replace(".", "/"), parameter)

    def weight(self, name: str) -> Tensor:
        """Returns a parameter by its name in the description."""
        return self.get_parameter(name.replace(".", "/"))

    def keep_float32(self) -> None:
        """Restores float32 of sinks and of what is added to gates after a cast, as engines have
        them."""
        for spec in self._specs:
            if spec.dtype:
                parameter = self.weight(spec.name)
                parameter.data = parameter.data.float()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Maps [s / tp, b, h] to the same; s, packed T, are this context rank's."""
        group = mpu.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:
            # every rank's heads give a gradient of the whole sequence, which the backward sums
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        count, batch = hidden_states.shape[:2]
        packed = packed_seq_params or _padded(batch, count, hidden_states.device)
        hidden = hidden_states.transpose(0, 1).flatten(0, 1)
        out = self._attend(hidden, packed).unflatten(-2, (-1, self._sizes.heads_of_group))
        grouped = self.weight("wo_a.weight").unflatten(0, (out.shape[1], -1))
        out = torch.einsum("tgw,grw->tgr", out.flatten(2), grouped).flatten(1)
        out = F.linear(out, self.weight("wo_b.weight")).unflatten(0, (batch, count)).transpose(0, 1)
        if self.config.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out, group=group)
        return out, None

    def _projected(self, t: Tensor, name: str) -> Tensor:
        return F.linear(t, self.weight(name + ".weight"))

    def _normed(self, t: Tensor, name: str = "") -> Tensor:
        weight = self.weight(name + ".weight") if name else None
        return F.rms_norm(t, t.shape[-1:], weight, self.config.layernorm_epsilon)

    def _attend(self, hidden: Tensor, packed: PackedSequences) -> Tensor:
        """Returns [T, heads, d] of hidden states [T, h]."""
        grids = packed.grids(len(hidden))
        longest = packed.max_seqlen_q
        position = grids.query_position
        if position is None:
            position = torch.arange(longest, device=hidden.device)[None]
        size = len(packed.cu_seqlens_q) - 1, position.shape[1]

        def of_keys(t: Tensor) -> Tensor:
            """Lays [T, d] of all context ranks out as [k, longest, d]."""
            empty = t.new_zeros(size[0], longest, t.shape[-1])
            return empty.index_put(grids.key_at, gathered(t.contiguous(), packed))

        def of_queries(t: Tensor) -> Tensor:
            """Lays [T, ...] out as [k, places, ...], block by block."""
            return t.new_zeros(*size, *t.shape[1:]).index_put(grids.query_at, t).split(BLOCK, 1)

        latent = self._normed(self._projected(hidden, "wq_a"), "q_norm")
        queries = self._projected(latent, "q_b_proj").unflatten(-1, (-1, self._sizes.head_dim))
        near = of_keys(self._normed(self._projected(hidden, "wkv"), "kv_norm"))
        near = self._turns(near, torch.arange(longest, device=near.device))
        far = index = near[:, :0]
        if self._ratio:
            far = self._compressed(hidden, "compressor.", of_keys)
        asked = hidden[:, :0]
        if self._ratio == INDEXED:
            index = self._compressed(hidden, "indexer.compressor.", of_keys)
            products = (latent, "indexer.wq_b"), (hidden, "indexer.weights_proj")
            asked = torch.cat([self._projected(*product) for product in products], -1)
        blocks = zip(
            of_queries(self._normed(queries)),
            of_queries(asked.detach()),
            position.split(BLOCK, 1),
            strict=True,
        )
        out = [again(self._block, *block, near, far, index.detach()) for block in blocks]
        return torch.cat(out, 1)[grids.query_at]

    def _compressed(
        self, hidden: Tensor, prefix: str, of_keys: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns keys [k, places / ratio, d] of whole windows."""
        ratio = self._ratio
        parts = []
        for name in ("wkv", "wgate"):
            rows = of_keys(self._projected(hidden, prefix + name))
            count = rows.shape[1] // ratio
            parts.append(rows[:, : count * ratio].unflatten(1, (count, ratio)))
        values = parts[0]
        gates = parts[1].float() + self.weight(prefix + "ape")
        if ratio == INDEXED:
            values = _with_window_before(values, 0.0)
            gates = _with_window_before(gates, -torch.inf)
        keys = (values * gates.softmax(2).to(values.dtype)).sum(2)
        places = torch.arange(count, device=keys.device) * ratio
        return self._turns(self._normed(keys, prefix + "norm"), places)

    def _block(
        self,
        queries: Tensor,
        asked: Tensor,
        position: Tensor,
        near: Tensor,
        far: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Returns [k, t, heads, d] of some queries, whose scores of all keys are in memory."""
        sizes = self._sizes
        ahead = position[..., None] - torch.arange(near.shape[1], device=near.device)
        seen = (ahead >= 0) & (ahead < sizes.window)
        if self._ratio:
            behind = torch.arange(far.shape[1], device=far.device)
            behind = behind < (position[..., None] + 1) // self._ratio
            if index.shape[1] > sizes.topk:
                behind = self._chosen(asked, position, index, behind)
            seen = torch.cat((seen.expand(len(behind), -1, -1), behind), -1)
        turned = self._turns(queries, position[..., None]) * sizes.head_dim**-0.5
        keys = torch.cat((near, far), 1)[:, None]
        sinks = self.weight("attn_sink")
        out = attend_with_sinks(turned.transpose(1, 2), keys, keys, seen[:, None], sinks)
        return self._turns(out.transpose(1, 2), position[..., None], back=True)

    @torch.no_grad()
    def _chosen(self, asked: Tensor, position: Tensor, index: Tensor, seen: Tensor) -> Tensor:
        """Returns which keys [k, t, m] of those that queries may see, seen [k or 1, t, m], the
        indexer chooses as that of DeepSeek-V3.2 does, in float32."""
        heads, dim = self._sizes.index_heads, self._sizes.index_dim
        queries = self._turns(asked[..., :-heads].unflatten(-1, (heads, dim)), position[..., None])
        products = torch.relu(queries.float() @ index.float()[:, None].mT)  # [k, t, heads, m]
        weights = asked[..., -heads:, None].float() * (heads * dim) ** -0.5
        scores = (products * weights).sum(2).masked_fill(~seen, -torch.inf)
        best = scores.topk(self._sizes.topk, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


def _with_window_before(t: Tensor, none: float) -> Tensor:
    """Returns the second half of each window's numbers behind the first half of those of the window
    before, [k, windows, 2 ratio, d] of [k, windows, ratio, 2 d]."""
    first, second = t.chunk(2, -1)
    before = F.pad(first, (0, 0, 0, 0, 1, 0), value=none)[:, :-1]
    return torch.cat((before, second), 2)


def _padded(batch: int, count: int, device: torch.device) -> PackedSequences:
    """Describes sequences of one length, of which this context rank has `count` tokens each."""
    cp = mpu.get_context_parallel_world_size()
    borders = torch.arange(batch + 1, dtype=torch.int32, device=device) * count * cp
    return PackedSequences.make(borders, count * cp, cp)
