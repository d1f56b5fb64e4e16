"""The classes that layers are built of: torch's or Transformer Engine's."""

from typing import NamedTuple

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.models.kinds.grouped_query.layer import CausalAttention
from megagrpo.models.layers.whole_linear import WholeLinear


class RmsNorm(torch.nn.RMSNorm):
    """Marks torch's RMSNorm so that Megatron sums its gradient over sequence-parallel ranks; its
    own refuses them."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
        self._centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """As torch's; a zero-centered weight is added to 1, in float32 as engines do."""
        if not self._centered:
            return super().forward(x)
        weight = 1.0 + self.weight.float()
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps)
        return normed.to(x.dtype)


class Parts(NamedTuple):
    """Holds the classes; parameters of both have the same names, except for experts."""

    transformer_engine: bool
    backend: BackendSpecProvider
    norm: type  # a module of its own, also before a linear layer
    core_attention: type
    whole_linear: type

    @property
    def column(self) -> type:
        """Returns the linear layer whose outputs tensor-parallel ranks divide."""
        return self.backend.column_parallel_linear()

    @property
    def row(self) -> type:
        """Returns the linear layer whose inputs tensor-parallel ranks divide."""
        return self.backend.row_parallel_linear()


def parts_of(transformer_engine: bool) -> Parts:
    """Returns Transformer Engine's classes, or torch's."""
    if not transformer_engine:
        return Parts(False, LocalSpecProvider(), RmsNorm, CausalAttention, WholeLinear)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    backend = TESpecProvider()
    norm = backend.layer_norm(rms_norm=True)
    return Parts(True, backend, norm, backend.core_attention(), backend.linear())
