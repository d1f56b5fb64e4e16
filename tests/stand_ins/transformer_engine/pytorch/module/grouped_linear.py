"""Linear layers of several experts, each of its own part of the rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import ParallelProduct, TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    """Computes x_i W_i^T for parts x_i of the inputs; weights are parameters weight0, weight1, ..."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert not ub_overlap_rs and not ub_overlap_ag, "GroupedLinear doesn't support Userbuffer overlap."
        if bias or delay_wgrad_compute or single_grouped_weight or single_grouped_bias:
            raise NotImplementedError(
                "the stand-in for Transformer Engine has experts without biases, none delayed or joined"
            )
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._take_parallel(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.num_gemms = num_gemms
        self._take_features(in_features, out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = (bias, return_bias, bias and not return_bias)
        self.ub_name, self.save_original_input, self.name = ub_name, save_original_input, name
        for number in range(num_gemms):
            self._new_weight(f"weight{number}", self.out_features, self.in_features, dtype, device, init_method)
            self._new_bias(f"bias{number}", self.out_features, False, dtype, device)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        """Maps [rows, in], of which m_splits[i] rows belong to expert i, to [rows, out]."""
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        parts = inp.view(-1, inp.shape[-1]).split([int(rows) for rows in m_splits])
        fused = self.fuse_wgrad_accumulation
        outs = [
            ParallelProduct.apply(part, getattr(self, f"weight{number}"), None, None, None, False, fused)
            for number, part in enumerate(parts)
        ]
        return torch.cat(outs).view(*inp.shape[:-1], self.out_features)
