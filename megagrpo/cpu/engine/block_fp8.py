"""Stands in for SGLang's FP8 kernels on a CPU: blocks of 128 x 128, activations quantized per token
and 128 columns.

The published arithmetic (DeepSeek-V3, section 3.3): both factors in E4M3 with float32 scales,
products summed in float32. Here the factors are multiplied by their scales before the product,
which differs in float32's last bits.
"""

import torch
from torch import Tensor

# of E4M3; of a group, as SGLang's per_token_group_quant_fp8 has it
_LARGEST = 448.0
_SMALLEST = 1e-10


def dequantized(weight: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """Returns weight [n, k] * the scale of its block, float32; scales [ceil(n / rows), ceil(k /
    columns)]."""
    grid = scales.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
    return weight.float() * grid[:, : weight.shape[1]]


def rounded(x: Tensor, group: int) -> Tensor:
    """Returns activations [m, k] rounded to E4M3 in groups of columns with a scale each,
    float32."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(
        -1, (-1, group)
    )
    scales = padded.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST) / _LARGEST
    return ((padded / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[
        :, : x.shape[-1]
    ]


def linear(x: Tensor, weight: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """Returns x [m, k] times the transpose of weight [n, k], float32 [m, n]."""
    return rounded(x, block[1]) @ dequantized(weight, scales, block).t()


def experts(
    layer: torch.nn.Module, x: Tensor, weights: Tensor, ids: Tensor, block: list[int]
) -> Tensor:
    """Returns the weighted sum of each token's experts [m, k]. weights, ids [m, experts]; -1: on
    another rank."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(
            x[token], layer.w13_weight[expert], layer.w13_weight_scale_inv[expert], block
        ).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        outer = linear(inner, layer.w2_weight[expert], layer.w2_weight_scale_inv[expert], block)
        out.index_add_(0, token, outer * weights[token, slot, None].float())
    return out.to(x.dtype)


def install(module) -> None:
    """Patches sglang.srt.layers.quantization.fp8, whose CPU branches need AMX, for FP8 in
    blocks."""

    def product(input, weight, block_size, weight_scale, input_scale=None, bias=None):
        out = linear(input.reshape(-1, input.shape[-1]), weight, weight_scale, block_size)
        out = out if bias is None else out + bias
        return out.to(input.dtype).view(*input.shape[:-1], weight.shape[0])

    def apply(self, layer, dispatch_output):
        # which imports the patched module
        from sglang.srt.layers.moe.token_dispatcher import (
            StandardCombineInput,
        )

        settings = self.moe_runner_config
        if settings.activation != "silu" or settings.apply_router_weight_on_input:
            raise NotImplementedError(f"FP8 experts on a CPU with {settings}")
        weights, ids, _ = dispatch_output.topk_output
        x = dispatch_output.hidden_states
        return StandardCombineInput(
            hidden_states=experts(layer, x, weights, ids, self.weight_block_size)
        )

    def as_loaded(self, layer) -> None:
        """Changes nothing, as on a Hopper."""

    module.dispatch_w8a8_block_fp8_linear = lambda *args, **kwargs: product
    module.Fp8LinearMethod.process_weights_after_loading_block_quant = as_loaded
    module.Fp8MoEMethod.process_weights_after_loading_block_quant = as_loaded
    module.Fp8MoEMethod.apply = apply
    dtypes = [
        *module.Fp8Config.get_supported_act_dtypes(),
        torch.float32,
    ]  # rounding by FP8 alone can be measured
    module.Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: dtypes)
