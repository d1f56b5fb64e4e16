"""A layer whose state goes from token to token in place of attention: what gated delta nets,
Kimi Delta Attention and Mamba-2 share.

Rows of its first projection stand group by group, so every cut between groups is one of rows, of
tensor- and of context-parallel ranks. State and convolution start anew with every sequence. Under
context parallelism ranks exchange tokens for groups, so that each has whole sequences of some.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megagrpo.models.kinds.grouped_query.layer import PackedSequences, padded_sequences
from megagrpo.models.layers.cut_module import CutModule
from megagrpo.models.layers.parts import Parts
from megagrpo.models.layers.whole_linear import linear_options

# computes a function, and for the backward once more: nothing of its float32 is kept
again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class RecurrentMixer(CutModule):
    """Takes the place of Megatron's SelfAttention; a subclass mixes the tokens of whole
    sequences."""

    norm: Tensor
    _context: ProcessGroup  # of the forward under way
    _opening: Callable[[Tensor], Tensor] = torch.sigmoid  # of gates

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        parts: Parts,
        groups: int,
        rows: int,
        width: int,
    ):
        """groups: of the whole model; rows, width: inputs and outputs of the mixing, of each."""
        super().__init__(config)
        self.layer_number = layer_number
        self.rows = rows
        self._groups = groups // config.tensor_model_parallel_size
        linear = linear_options(config)
        self.in_proj = build_module(
            parts.column, config.hidden_size, groups * rows, gather_output=False, **linear
        )
        self.out_proj = build_module(
            parts.row, groups * width, config.hidden_size, input_is_parallel=True, **linear
        )

    def cut(self, rows: int, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Returns a parameter of which this rank has its groups' rows, `rows` of each; float32 stays,
        as of A_log, an exponent's exponent."""
        dtype = dtype or self.config.params_dtype
        device = torch.cuda.current_device()
        parameter = torch.nn.Parameter(
            torch.empty(self._groups * rows, *shape, dtype=dtype, device=device)
        )
        parameter.stays_float32 = dtype == torch.float32  # type: ignore[attr-defined]  # see build.py
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def set_for_recompute_input_layernorm(self) -> None:
        """Lets the first projections in FP8 keep their input themselves, which Megatron frees and
        computes again, as its attention does."""
        from megatron.core.extensions.transformer_engine import set_save_original_input

        for module in self.first_projections:
            set_save_original_input(module)

    @property
    def first_projections(self) -> list[MegatronModule]:
        """Returns what reads the normed hidden states."""
        return [self.in_proj]

    def own_heads(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows of this rank's groups, of those that share the sequences under way."""
        context = self._context
        return tuple(p.chunk(context.size())[context.rank()] for p in parameters)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Maps [s / tp, b, h] to the same; s, packed T, are this context rank's."""
        mixed = self.project(hidden_states)
        self._context, borders = mpu.get_context_parallel_group(), None
        if packed_seq_params is not None:
            self._context, borders = packed_seq_params.group, packed_seq_params.cu_seqlens_q
        group, cp = self._context, self._context.size()
        if cp > 1:
            count = len(mixed)
            place = _places(count, packed_seq_params or padded_sequences(1, count, mixed.device))
            by_group = mixed.unflatten(2, (cp, -1)).movedim(2, 0).flatten(0, 1)
            mixed = all_to_all(group, by_group.contiguous())[place.argsort()]
        out = self.mix(mixed.transpose(0, 1), borders).transpose(0, 1)
        if cp > 1:
            out = all_to_all(group, out[place]).unflatten(0, (cp, -1)).movedim(0, 2).flatten(2, 3)
        return self.out_proj(out.flatten(2))[0], None

    def project(self, hidden_states: Tensor) -> Tensor:
        """Maps [s / tp, b, h] to what is mixed of this rank's groups [s, b, groups, rows]."""
        return self.in_proj(hidden_states)[0].unflatten(-1, (-1, self.rows))

    def mix(self, mixed: Tensor, borders: Tensor | None) -> Tensor:
        """Maps whole sequences [b, s, groups, rows] to [b, s, groups, width]. borders: of packed
        ones."""
        raise NotImplementedError

    def _gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(out.float(), out.shape[-1:], None, self.config.layernorm_epsilon)
        return (normed * self.norm.float() * self._opening(gate.float())).to(gate.dtype)


def _places(count: int, packed: PackedSequences) -> Tensor:
    """Returns where the `count` tokens of each context rank, rank after rank, lie in the whole
    sequences."""
    sequence, position = packed.grids(count).key_at
    return packed.cu_seqlens_q[sequence] + position


def kernel(at: Tensor, module: str, name: str) -> Callable:
    """Returns a kernel of GPUs for a tensor there, or what stands in for it on a CPU."""
    return getattr(import_module(module if at.is_cuda else "megagrpo.cpu.recurrences"), name)
