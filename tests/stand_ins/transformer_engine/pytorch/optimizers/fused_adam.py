"""Adam that may keep, of master weights, only the bits that bfloat16 leaves out."""

from collections.abc import Iterable

import torch
from torch import Tensor

_FULL = torch.float32
_STATES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    """Computes in float32 what torch's AdamW does. States of fewer bits, which megagrpo refuses, are left out."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none: bool | None = None,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or not adam_w_mode:
            raise NotImplementedError("the stand-in for Transformer Engine has decoupled decay and no CUDA graphs")
        if {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} != {_FULL}:
            raise NotImplementedError("the stand-in for Transformer Engine keeps states in float32")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.adam_w_mode, self.capturable, self.master_weights = 1, capturable, master_weights
        self.master_weight_dtype, self.use_decoupled_grad = master_weight_dtype, use_decoupled_grad
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.name_to_dtype_map = dict.fromkeys(_STATES, _FULL)
        self.store_param_remainders = store_param_remainders and master_weights

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients, which may be decoupled_grad, or sets them to 0."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none is None or set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none is None or set_to_none:
                    p.decoupled_grad = None
                else:
                    p.decoupled_grad.zero_()

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """Returns a state: float32, or int16 remainders of master weights."""
        return self.state[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Takes a state."""
        if state_name not in self.state[param]:
            remainders = state_name == "master_param" and self._keeps_remainders(param)
            self._initialize_state(param, state_name, False, remainders)
        self.state[param][state_name].copy_(unscaled_state)

    def _initialize_state(self, param, state_name, zero_buffer: bool, store_param_remainders: bool = False) -> None:
        dtype = torch.int16 if store_param_remainders else _FULL
        self.state[param][state_name] = torch.zeros(param.shape, dtype=dtype, device=param.device)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Makes the states of a parameter."""
        self._initialize_state(param, "exp_avg", zero_buffer=True)
        self._initialize_state(param, "exp_avg_sq", zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.detach().float())

    def state_dict(self) -> dict:
        """Returns torch's, with states in float32."""
        found = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for number, state in found["state"].items():
            found["state"][number] = {name: self.get_unscaled_state(params[number], name) for name in state}
        return found

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes what `state_dict` returned."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[params[number]] = {}
            for name, values in state.items():
                if values is not None:
                    values = values if values.dtype == torch.int16 else values.float()
                    self.set_scaled_state(params[number], name, values)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Moves every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p, self._keeps_remainders(p))
                gradient = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if gradient is not None:
                    self._move(p, gradient.float(), group)
        return loss

    def _keeps_remainders(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _move(self, p: Tensor, gradient: Tensor, group: dict) -> None:
        beta1, beta2 = group["betas"]
        mean, square = (self.get_unscaled_state(p, name) for name in _STATES[:2])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        has_master = self.master_weights and p.dtype != _FULL
        if has_master and self._keeps_remainders(p):
            master = _joined(p, self.state[p]["master_param"])
        elif has_master:
            master = self.get_unscaled_state(p, "master_param")
        else:
            master = p if p.dtype == _FULL else p.float()
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.addcdiv_(mean, (square / correction2).sqrt_().add_(group["eps"]), value=-group["lr"] / correction1)
        for name, values in zip(_STATES, (mean, square), strict=False):
            self.set_scaled_state(p, name, values)
        if has_master and self._keeps_remainders(p):
            high, low = _parted(master)
            p.copy_(high)
            self.state[p]["master_param"].copy_(low)
            return
        if has_master:
            self.set_scaled_state(p, "master_param", master)
        p.copy_(master)


def _joined(high: Tensor, low: Tensor) -> Tensor:
    """Returns float32 values of which `high` is bfloat16, rounded to nearest, and `low` int16 holds the other bits."""
    upper = high.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((upper << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _parted(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values as bfloat16, rounded to nearest, and int16 with the other bits."""
    bits = values.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    low = torch.where(low >= 0x8000, low - 0x10000, low)
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
