"""What every layer has: process groups, fp8's (empty) state, and a product whose communication is inside it."""

import torch
import torch.distributed as dist
from torch import Tensor


def get_dummy_wgrad(shape: list, dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Returns a gradient of `shape` that nobody reads: the real one is in main_grad."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)


class TransformerEngineBaseModule(torch.nn.Module):
    """Keeps the tensor-parallel group, and says that nothing is fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.primary_weights_in_fp8 = False
        self.fp8_meta: dict = {"fp8_checkpoint": False}
        self.tp_group = None
        self.tp_size = 1
        self.sequence_parallel = False

    def set_tensor_parallel_group(self, tp_group) -> None:
        """Takes the group of the tensor-parallel ranks."""
        self.tp_group = tp_group

    def get_extra_state(self) -> Tensor:
        """Returns an empty tensor: there are no scales."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes what `get_extra_state` returns."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing."""

    def backward_dw(self) -> None:
        """Raises NotImplementedError: weight gradients are never put off here."""
        raise NotImplementedError("the stand-in for Transformer Engine delays no weight gradients")

    def _take_parallel(self, tp_group, tp_size: int, parallel_mode: str | None, sequence_parallel: bool) -> None:
        assert parallel_mode in (None, "column", "row"), f"parallel_mode {parallel_mode} not supported"
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _new_weight(self, name: str, rows: int, columns: int, dtype, device, init_method) -> None:
        """Registers a weight marked as the released layers mark theirs, whether or not it is one of several shards."""
        weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
        if str(device) != "meta":
            with torch.no_grad():
                torch.nn.init.normal_(weight, std=0.023) if init_method is None else init_method(weight)
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]  # read by Megatron
            weight.partition_dim = 1 if self.parallel_mode == "row" else 0  # type: ignore[attr-defined]  # the same
            weight.partition_stride = 1  # type: ignore[attr-defined]  # the same
        self.register_parameter(name, weight)

    def _take_features(self, in_features: int, out_features: int) -> None:
        """Takes the sizes of the whole layer; this rank's are what is left after the cut."""
        self.in_features, self.out_features = in_features, out_features
        if self.parallel_mode == "column":
            self.out_features = out_features // self.tp_size
        elif self.parallel_mode == "row":
            self.in_features = in_features // self.tp_size

    def _product(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the product of a layer with one weight, and the bias beside it where it is to be returned."""
        bias = self.bias if self.apply_bias else None
        layout = self.parallel_mode, self.tp_group, self.sequence_parallel
        out = ParallelProduct.apply(inputs, self.weight, bias, *layout, self.fuse_wgrad_accumulation)
        return (out, self.bias) if self.return_bias else out

    def _new_bias(self, name: str, size: int, use: bool, dtype, device) -> None:
        if not use:
            setattr(self, name, torch.empty(0, dtype=dtype, device=device))
            return
        bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
        elif self.parallel_mode == "column":
            bias.tensor_model_parallel, bias.partition_dim = True, 0  # type: ignore[attr-defined]  # the same
            bias.partition_stride = 1  # type: ignore[attr-defined]  # the same
        self.register_parameter(name, bias)


def weight_gradient(weight: Tensor, gradient: Tensor, inputs: Tensor, fused: bool) -> Tensor | None:
    """Returns the gradient [rows, columns] of a weight, or adds it to main_grad and returns what nobody reads."""
    if not fused:
        return gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
    product = gradient.flatten(0, -2).t().float() @ inputs.flatten(0, -2).float()
    if getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(product)  # type: ignore[attr-defined]  # DistributedDataParallel's
    else:
        weight.main_grad.add_(product)  # type: ignore[attr-defined]  # the same
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype, getattr(weight, "zero_out_wgrad", False))


class ParallelProduct(torch.autograd.Function):
    """Computes x W^T of a column- or row-parallel weight with its collectives, as one operation."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor | None, mode: str | None, group, sequence, fused):
        """Maps [s / tp, ..., columns] (column with sequence parallelism) to [s, ..., rows], or the other way (row)."""
        ctx.weight, ctx.mode, ctx.fused, ctx.has_bias = weight, mode, fused, bias is not None
        ctx.group, ctx.sequence = (group, sequence) if group is not None and group.size() > 1 else (None, False)
        ctx.save_for_backward(inputs)
        whole = _gathered(inputs, ctx.group) if mode == "column" and ctx.sequence else inputs
        out = torch.nn.functional.linear(whole, weight, bias if mode != "row" else None)
        if mode == "row" and ctx.group is not None:
            out = _scattered(out, ctx.group) if ctx.sequence else _summed(out, ctx.group)
        return out + bias if mode == "row" and bias is not None else out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """Returns the gradients of inputs, weight and bias."""
        (inputs,) = ctx.saved_tensors
        bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        if ctx.mode == "row" and ctx.sequence:
            gradient = _gathered(gradient, ctx.group)
        whole = _gathered(inputs, ctx.group) if ctx.mode == "column" and ctx.sequence else inputs
        to_inputs = gradient @ ctx.weight
        if ctx.mode == "column" and ctx.group is not None:
            to_inputs = _scattered(to_inputs, ctx.group) if ctx.sequence else _summed(to_inputs, ctx.group)
        to_weight = None
        if ctx.weight.requires_grad:
            to_weight = weight_gradient(ctx.weight, gradient, whole, ctx.fused)
        return to_inputs, to_weight, bias, None, None, None, None


def _gathered(part: Tensor, group) -> Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _scattered(whole: Tensor, group) -> Tensor:
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


def _summed(values: Tensor, group) -> Tensor:
    values = values.contiguous()
    dist.all_reduce(values, group=group)
    return values
