"""Gated delta net: linear attention whose state is a matrix a head, in place of a layer's attention
(Yang et al., arXiv 2412.06464).

    S(t) = exp(g(t)) S(t-1) (1 - beta(t) k(t) k(t)^T) + beta(t) v(t) k(t)^T,    out(t) = S(t) q(t)

Queries, keys and values pass a short causal convolution first. On a GPU both are the kernels of
flash-linear-attention, as in Megatron's own layer, which computes nothing without them; on a CPU
torch. State and convolution start anew with every sequence. Under context parallelism ranks
exchange tokens for heads, so that each has whole sequences of some heads.
"""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.layer import PackedSequences, zigzag_position
from megagrpo.models.layers.parts import Parts

_CHUNK = 32  # tokens that torch computes at once; more are wasted on short sequences


class GatedDeltaNet(MegatronModule):
    """Takes the place of Megatron's SelfAttention.

    Rows of `in_proj` and `conv1d` stand key head by key head: [query, key, values, and of in_proj
    alone gates, beta, alpha of the value heads that share it]. So every cut between heads is one of
    rows, of tensor- and of context-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj: type,
        out_proj: type,
        **_: object,
    ):
        """in_proj, out_proj: column- and row-parallel linear layers."""
        super().__init__(config)
        self.layer_number = layer_number
        tp = config.tensor_model_parallel_size
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        heads = config.linear_num_key_heads
        self.values = config.linear_num_value_heads // heads  # value heads of a key head
        self.channels = 2 * self.key_dim + self.values * self.value_dim
        self.rows = self.channels + self.values * (self.value_dim + 2)
        linear = {"config": config, "init_method": config.init_method, "bias": False}
        linear |= {"is_expert": False, "skip_bias_add": False}
        width = heads * self.values * self.value_dim
        self.in_proj = build_module(
            in_proj, config.hidden_size, heads * self.rows, gather_output=False, **linear
        )
        self.out_proj = build_module(
            out_proj, width, config.hidden_size, input_is_parallel=True, **linear
        )

        def cut(*shape: int, dtype: torch.dtype = config.params_dtype) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(
                torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            )
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # read by Megatron
            parameter.partition_dim = 0  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
            return parameter

        own = heads // tp
        self.conv1d = cut(own * self.channels, 1, config.linear_conv_kernel_dim)
        self.A_log = cut(own * self.values, dtype=torch.float32)
        self.dt_bias = cut(own * self.values)
        self.norm = torch.nn.Parameter(  # not zero-centered, unlike the model's other norms
            torch.empty(
                self.value_dim, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
        )
        self.norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def keep_float32(self) -> None:
        """Restores float32 of A_log after a cast: it is an exponent's exponent."""
        self.A_log.data = self.A_log.data.float()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Maps [s / tp, b, h] to the same; s, packed T, are this context rank's."""
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.unflatten(-1, (-1, self.rows))  # [s, b, key heads, rows]
        group, borders = mpu.get_context_parallel_group(), None
        if packed_seq_params is not None:
            group, borders = packed_seq_params.group, packed_seq_params.cu_seqlens_q
        cp = group.size()
        if cp > 1:
            place = _places(len(mixed), packed_seq_params)
            by_head = mixed.unflatten(2, (cp, -1)).movedim(2, 0).flatten(0, 1)
            mixed = all_to_all(group, by_head.contiguous())[place.argsort()]
        out = self._mix(mixed.transpose(0, 1), borders, group).transpose(0, 1)
        if cp > 1:
            out = all_to_all(group, out[place]).unflatten(0, (cp, -1)).movedim(0, 2).flatten(2, 3)
        return self.out_proj(out.flatten(2))[0], None

    def _mix(self, mixed: Tensor, borders: Tensor | None, group: ProcessGroup) -> Tensor:
        """Maps whole sequences [b, s, key heads, rows] to [b, s, key heads, value dimensions]."""
        if borders is not None and not mixed.is_cuda:
            lengths = borders.diff().tolist()
            rows = pad_sequence(mixed[0].split(lengths), batch_first=True)
            out = self._mix(rows, None, group)
            return torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)])[None]
        heads = mixed.shape[2]
        values = self.values * self.value_dim
        value_widths = (values, self.values, self.values)
        qkv, gate, beta, alpha = mixed.split((self.channels, *value_widths), -1)
        convolve, rule = (_convolve_fla, _rule_fla) if mixed.is_cuda else (_convolve, _rule)
        # under context parallelism the rows of this rank's heads
        conv1d, a_log, dt_bias = (
            p.chunk(group.size())[group.rank()] for p in (self.conv1d, self.A_log, self.dt_bias)
        )
        qkv = convolve(qkv.flatten(2), conv1d, borders)
        qkv = qkv.unflatten(2, (heads, -1))
        query, key, value = qkv.split((self.key_dim, self.key_dim, values), -1)
        query, key = (t.repeat_interleave(self.values, 2) for t in (query, key))
        value, gate = (t.unflatten(3, (self.values, -1)).flatten(2, 3) for t in (value, gate))
        decay = -a_log.exp() * F.softplus(alpha.flatten(2).float() + dt_bias.float())
        out = rule(query, key, value, decay, beta.flatten(2).float().sigmoid(), borders)
        out = checkpoint(self._gated_norm, out, gate, use_reentrant=False, preserve_rng_state=False)
        return out.flatten(2).unflatten(2, (heads, -1))

    def _gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        """Computes in float32, of which nothing is kept: the backward computes it again."""
        normed = F.rms_norm(out.float(), (self.value_dim,), None, self.config.layernorm_epsilon)
        return (normed * self.norm.float() * F.silu(gate.float())).to(gate.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Returns what a checkpoint holds, any layout's slices of the same tensors."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"conv1d": 0, "A_log": 0, "dt_bias": 0},
            sharded_offsets,
            tp_group=mpu.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata
            )
        return state


def gated_delta_spec(own: GatedDelta, parts: Parts) -> ModuleSpec:
    """Returns the specification of a gated delta net; the configuration has the numbers."""
    linears = {"in_proj": parts.column, "out_proj": parts.row}
    return ModuleSpec(module=GatedDeltaNet, params=linears)


def _places(count: int, packed: PackedSequences | None) -> Tensor:
    """Returns where the `count` tokens of each context rank, rank after rank, lie in the whole
    sequences, or in their row [cp count]."""
    if packed is not None:
        sequence, position = packed.grids(count).key_at
        return packed.cu_seqlens_q[sequence] + position
    cp = mpu.get_context_parallel_world_size()
    place = torch.arange(count, device=torch.cuda.current_device())
    return torch.cat([zigzag_position(place, count, rank, cp) for rank in range(cp)])


def _convolve_fla(x: Tensor, weight: Tensor, borders: Tensor | None) -> Tensor:
    from fla.modules.convolution import causal_conv1d

    return causal_conv1d(
        x=x.contiguous(), weight=weight.squeeze(1), activation="silu", cu_seqlens=borders
    )[0]


def _rule_fla(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor | None
) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value = (t.contiguous() for t in (query, key, value))
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=borders,
    )[0]


def _convolve(x: Tensor, weight: Tensor, borders: Tensor | None) -> Tensor:
    """Convolves each channel of x [b, s, channels] with its weight [channels, 1, kernel]."""
    assert borders is None, "sequences are rows here"
    past = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(past, weight, groups=len(weight))).transpose(1, 2)


def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor | None
) -> Tensor:
    """Computes the rule for query, key [b, s, heads, d], value [b, s, heads, e], decay and beta [b,
    s, heads] in float32: [b, s, heads, e]."""
    assert borders is None, "sequences are rows here"
    length = query.shape[1]
    query, key, value, decay, beta = (_in_chunks(t) for t in (query, key, value, decay, beta))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    total = decay.double().cumsum(-1)  # rounded, it would be a rounded exponent
    new, erased, inside = _inside_chunks(query, key, value, total, beta)
    from_start, to_end = total.exp().float(), (total[..., -1:] - total).exp().float()
    from_state, to_state = query * from_start[..., None], key * to_end[..., None]
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for i in range(query.shape[2]):
        values = new[:, :, i] - erased[:, :, i] @ state
        outputs.append(from_state[:, :, i] @ state + inside[:, :, i] @ values)
        state = state * from_start[:, :, i, -1:, None] + to_state[:, :, i].mT @ values
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)


def _in_chunks(t: Tensor) -> Tensor:
    """Lays [b, s, heads, ...] out as [b, heads, chunks, places, ...] in float32, 0 at the end."""
    t = t.float().transpose(1, 2)
    after = (0, 0) * (t.dim() - 3) + (0, -t.shape[2] % _CHUNK)
    return F.pad(t, after).unflatten(2, (-1, _CHUNK))


def _unit(t: Tensor) -> Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def _inside_chunks(
    query: Tensor, key: Tensor, value: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of each chunk the values that it writes if its first state is 0, the keys at which
    that state is erased, and the weights of its queries on values.

    Its recurrence is one triangular system (Yang et al., arXiv 2406.06484, 3). total: sums of decays
    from the chunk's start.
    """
    past = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf)
    between = between.exp().float()
    written = key * beta[..., None]
    system = (written @ key.mT * between).tril(-1) + torch.eye(_CHUNK)
    right = torch.cat((value * beta[..., None], written * total.exp().float()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, erased = solved.split((value.shape[-1], key.shape[-1]), -1)
    return new, erased, query @ key.mT * between
