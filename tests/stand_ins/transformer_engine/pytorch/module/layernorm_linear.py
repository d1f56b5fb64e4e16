"""A norm and the linear layer after it, as one module."""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import TransformerEngineBaseModule
from .norms import rms_norm


class LayerNormLinear(TransformerEngineBaseModule):
    """Computes norm(x) W^T + b."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split=None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert normalization == "RMSNorm", "the stand-in for Transformer Engine has this norm alone"
        refused = (parameters_split, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        if any(refused) or delay_wgrad_compute or symmetric_ar_type is not None:
            raise NotImplementedError("the stand-in for Transformer Engine overlaps, delays and splits nothing")
        if return_layernorm_output or return_layernorm_output_gathered or zero_centered_gamma:
            raise NotImplementedError("the stand-in for Transformer Engine returns the product alone")
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._take_parallel(tp_group, tp_size, parallel_mode, sequence_parallel)
        self._take_features(in_features, out_features)
        self.eps, self.normalization, self.zero_centered_gamma = (eps, normalization, zero_centered_gamma)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = (bias, return_bias, bias and not return_bias)
        self.ub_name, self.name = ub_name, name
        self.layer_norm_bias = None
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, dtype=dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # Megatron's
        self._new_weight("weight", self.out_features, self.in_features, dtype, device, init_method)
        self._new_bias("bias", self.out_features, bias, dtype, device)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Maps [s / tp or s, ..., in] to [s or s / tp, ..., out], and the bias beside it where it is to be returned."""
        return self._product(rms_norm(inp, self.layer_norm_weight, self.eps))
