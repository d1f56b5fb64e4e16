"""Compressed attention (DeepSeek-V4, 2.3): each query sees a window of tokens and, behind it, keys
that stand for several tokens each.

All heads share one key, which is the value, too; what it turned the value by is undone in the
output. A key of m tokens is their sum with weights of a softmax over these m, for each number of it.
With m = 4 windows overlap: a key also sums other numbers of the four tokens before, and an indexer
chooses the keys that a query sees. Larger windows do not overlap, and a query sees all of them.

Tensor-parallel ranks have heads of their own, and all compute the one key. Torch computes scores
block by block, and again in the backward.
"""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range as yarn_range,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_linear_ramp_mask as yarn_ramp,
)
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.config_json import Rotary
from megagrpo.models.kinds.compressed.describe import CUT, INDEXED, CompressedAttention
from megagrpo.models.kinds.grouped_query.layer import (
    PackedSequences,
    attend_with_sinks,
    padded_sequences,
    whole_sequences,
)
from megagrpo.models.kinds.indexed.describe import BLOCK
from megagrpo.models.kinds.indexed.layer import best_keys
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.layers.cut_module import CutModule
from megagrpo.models.layers.whole_linear import whole_parameter


class Turns:
    """Turns pairs of neighbors, the last ones of a head, by their positions (RoFormer)."""

    def __init__(self, rotary: Rotary, dim: int):
        # on the device: a copy from the host would wait for it, at each turn
        places = torch.arange(0, dim, 2, device=torch.cuda.current_device())
        self._frequencies = 1 / rotary.theta ** (places / dim)
        if yarn := rotary.yarn:  # arXiv 2309.00071, 3.2, without a factor of its own
            bounds = yarn_range(
                yarn["beta_fast"],
                yarn["beta_slow"],
                dim,
                rotary.theta,
                yarn["original_max_position_embeddings"],
            )
            kept = 1 - yarn_ramp(*bounds, dim // 2, places.device)
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
        self._made = sizes.made(self._ratio)
        for spec in sizes.weights(config.hidden_size, layer_number - 1):
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
        packed = packed_seq_params or padded_sequences(batch, count, hidden_states.device)
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
        """Returns [T, heads, d] of hidden states [T, h]: sequence by sequence, since a layout of all
        would be as wide as the longest."""
        latent = self._normed(self._projected(hidden, "wq_a"), "q_norm")
        queries = self._projected(latent, "q_b_proj").unflatten(-1, (-1, self._sizes.head_dim))
        asked = hidden[:, :0]
        if self._ratio == INDEXED:
            products = (latent, "indexer.wq_b"), (hidden, "indexer.weights_proj")
            asked = torch.cat([self._projected(*product) for product in products], -1)
        keys = [self._normed(self._projected(hidden, "wkv"), "kv_norm")]
        for prefix in self._made:
            keys += [self._projected(hidden, prefix + name) for name in ("wkv", "wgate")]
        own = self._normed(queries), asked.detach()
        every = whole_sequences(packed, own, [torch.cat(keys, -1)])
        return torch.cat([self._sequence(*each) for each in every])

    def _sequence(self, queries: Tensor, asked: Tensor, position: Tensor, keys: Tensor) -> Tensor:
        """Returns [places, heads, d] of one sequence, from what keys [s, ...] are made of."""
        widths = [2 * self.weight(prefix + "ape").shape[1] for prefix in self._made]
        near, *made = keys.split([self._sizes.head_dim, *widths], -1)
        near = self._turns(near, torch.arange(len(near), device=near.device))
        made[1:] = [each.detach() for each in made[1:]]  # nothing trains an indexer
        far = [self._compressed(*each) for each in zip(made, self._made, strict=True)]
        # blocks of neighbors: ranks that share a sequence have two parts of it
        parts = 1 + (len(keys) > len(queries))
        blocks = (
            [block for part in t.chunk(parts) for block in part.split(BLOCK)]
            for t in (queries, asked, position)
        )
        every = zip(*blocks, strict=True)
        return torch.cat([again(self._block, *block, near, *far) for block in every])

    def _compressed(self, made: Tensor, prefix: str) -> Tensor:
        """Returns keys [s / ratio, d] of whole windows, from values and gates [s, 2 d or 4 d]."""
        count = len(made) // self._ratio
        windows = made[: count * self._ratio].unflatten(0, (count, self._ratio))
        values, gates = windows.chunk(2, -1)
        gates = gates.float() + self.weight(prefix + "ape")
        if self._ratio == INDEXED:
            values = _with_window_before(values, 0.0)
            gates = _with_window_before(gates, -torch.inf)
        keys = (values * gates.softmax(1).to(values.dtype)).sum(1)
        places = torch.arange(count, device=keys.device) * self._ratio
        return self._turns(self._normed(keys, prefix + "norm"), places)

    def _block(
        self, queries: Tensor, asked: Tensor, position: Tensor, near: Tensor, *far: Tensor
    ) -> Tensor:
        """Returns [t, heads, d] of neighbors, whose scores of keys that some of them see, and of all
        behind the window, are in memory. far: keys behind the window, and the indexer's."""
        sizes = self._sizes
        places = torch.arange(1 - sizes.window, len(queries), device=near.device) + position[0]
        near = near[places.clamp(min=0)]
        ahead = position[:, None] - places
        seen = (ahead >= 0) & (ahead < sizes.window) & (places >= 0)
        if far:
            behind = torch.arange(len(far[0]), device=near.device)
            behind = behind < (position[:, None] + 1) // self._ratio
            if far[1:] and len(far[1]) > sizes.topk:
                behind = self._chosen(asked, position, far[1], behind)
            seen = torch.cat((seen, behind), -1)
        turned = self._turns(queries, position[:, None]) * sizes.head_dim**-0.5
        keys = torch.cat((near, *far[:1]))
        sinks = self.weight("attn_sink")
        out = attend_with_sinks(turned.transpose(0, 1), keys, keys, seen, sinks)
        return self._turns(out.transpose(0, 1), position[:, None], back=True)

    @torch.no_grad()
    def _chosen(self, asked: Tensor, position: Tensor, index: Tensor, seen: Tensor) -> Tensor:
        """Returns which keys of those that queries may see [t, m] the indexer chooses as that of
        DeepSeek-V3.2 does, in float32."""
        heads, dim = self._sizes.index_heads, self._sizes.index_dim
        queries = self._turns(asked[:, :-heads].unflatten(-1, (heads, dim)), position[:, None])
        products = queries.float() @ index.float().mT  # [t, heads, m]
        weights = asked[:, -heads:, None].float() * (heads * dim) ** -0.5
        return best_keys(products, weights, seen, self._sizes.topk)


def _with_window_before(t: Tensor, none: float) -> Tensor:
    """Returns the second half of each window's numbers behind the first half of those of the window
    before, [windows, 2 ratio, d] of [windows, ratio, 2 d]."""
    first, second = t.chunk(2, -1)
    before = F.pad(first, (0, 0, 0, 0, 1, 0), value=none)[:-1]
    return torch.cat((before, second), 1)
