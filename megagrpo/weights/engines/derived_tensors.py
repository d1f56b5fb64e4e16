"""The other tensors of an engine's model: buffers, and matrices derived from weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megagrpo.weights.blocks import FP8, dequantize
from megagrpo.weights.copies.recorder import Fill, Recording

# what a forward of Qwen3.8-Flash-Next leaves in its modules: a copy of `kept_copies`, and a buffer
_LEFT = "_mix_up_weight_padded", "_eager_prefetch_buffer"


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the live parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def random_buffers(model: torch.nn.Module, recording: Recording) -> list[str]:
    """Returns a line for each buffer with random values: a dummy start fills it, and no HF tensor
    does."""
    # SGLang's initialize_dummy_weights fills the state dict, which leaves out non-persistent
    # buffers.
    persistent = model.state_dict()
    filled = {copy.parameter for copy in recording.copies} | {
        fill.parameter for fill in recording.fills
    }
    return [
        f"buffer {name} {tuple(buffer.shape)}: random since the start; set "
        "rollout.load_format: model"
        for name, buffer in model.named_buffers()
        if name in persistent and buffer.is_floating_point() and name not in filled
    ]


def cache_scales(model: torch.nn.Module) -> Iterator[Fill]:
    """Yields the scales of cached keys and values in an FP8 model's attention, as constants of 1.

    Some of SGLang's models have these parameters. No published tensor fills them, and the cache
    stays in bfloat16.
    """
    for path, module in model.named_modules():
        for name in ("k_scale", "v_scale"):
            if isinstance(getattr(module, name, None), torch.nn.Parameter):
                yield Fill(f"{path}.{name}", 0, (), (), 1.0)


def random_cache_scales(model: torch.nn.Module) -> list[str]:
    """Returns a line for each of `cache_scales` that is not 1 in attention.

    A dummy start draws them, and SGLang replaces negative draws by 1. Captured CUDA graphs may
    contain the number.
    """
    return [
        f"{path}.{name} = {value}: drawn at random at the start, and a publish does not reach it"
        for path, module in model.named_modules()
        for name in ("k_scale_float", "v_scale_float")
        if (value := getattr(module, name, None)) not in (None, 1.0)
    ]


def derived_tensors(model: torch.nn.Module) -> list[str]:
    """Returns the matrices besides parameters and buffers. They may be computed from weights, and no
    digest covers them."""
    return [
        f"{path}.{name} {tuple(value.shape)}"
        for path, _, name, value in _derived(model)
        if value.dim() >= 2
    ]


def _derived(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, Tensor]]:
    storages = {t.untyped_storage()._cdata for t in live_tensors(model).values()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            numbers = isinstance(value, Tensor) and value.is_floating_point() and name not in _LEFT
            if numbers and value.untyped_storage()._cdata not in storages:
                yield path, module, name, value


def compute_in_place(model: torch.nn.Module, **always: bool) -> None:
    """Lets tensors that post_load_weights computes anew stay where they lie, which CUDA graphs
    read. SGLang's Kimi-Linear would leave the old ones to the graphs, and free them."""
    compute = getattr(model, "post_load_weights", None)
    if compute is None:
        return

    # looked for once: transport broadcast computes them after each of thousands of buckets
    places = list(_derived(model))

    def computed(*args: object, **options: object) -> None:
        compute(*args, **always | options)
        for _, module, name, old in places:
            new = getattr(module, name)
            if (new.shape, new.dtype) == (old.shape, old.dtype):
                setattr(module, name, old.copy_(new))

    model.post_load_weights = computed  # type: ignore[assignment]  # torch takes it for a Tensor or a Module


def absorbed_matrices(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields name, live values and expected values of the matrices that replace kv_b_proj in latent
    attention: w_kc [heads, nope, rank] and w_vc [heads, rank, v].

    SGLang copies them from kv_b_proj.weight [heads * (nope + v), rank] at the end of load_weights
    and in post_load_weights. It multiplies FP8 weights by their scales, in bfloat16
    (block_quant_dequant). Matrices that it computes in another way are left out.
    """
    for path, module in model.named_modules():
        keys, values, projection = (
            getattr(module, name, None) for name in ("w_kc", "w_vc", "kv_b_proj")
        )
        weight = getattr(projection, "weight", None)
        if keys is None or values is None or weight is None:
            continue
        if weight.dtype == FP8:
            scales = projection.weight_scale_inv  # type: ignore[union-attr]  # beside every FP8 weight
            weight = dequantize(weight, (0, 0), scales).bfloat16().to(keys.dtype)
        if not keys.dtype == values.dtype == weight.dtype:
            continue
        heads = weight.detach().unflatten(0, (len(keys), -1))  # [heads, nope + v, rank]
        nope = keys.shape[1]
        v = values.shape[2]
        if heads.shape[1] == nope + v:
            yield f"{path}.w_kc", keys, heads[:, :nope]
            yield f"{path}.w_vc", values, heads[:, nope:].transpose(1, 2)


def kept_copies(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields name, live values and expected values of the buffers that hold a norm's weight plus 1,
    for norms whose weights are distances from 1, of a rank's own sinks, and of gates between residual
    streams.

    SGLang's fused kernels read them (GemmaRMSNorm in layers/layernorm.py). SGLang's loader computes
    them, so they are stale after a transport that writes past the loader. Sinks it copies in the
    first forward only (DeepSeek-V4's _local_attn_sink), and, for kernels of sm_100, gates, stream
    by stream in place of row by row (permute_pad_up_weight of kernels/ops/elementwise/hc_mix.py).
    """
    for path, module in model.named_modules():
        shifted = getattr(module, "gemma_weight", None)
        if shifted is not None:
            yield f"{path}.gemma_weight", shifted, module.weight.detach() + 1.0
        sinks = getattr(module, "_attn_sink_local", None)
        if sinks is not None:
            heads = module.n_local_heads
            own = module.attn_sink.detach()[heads * module.attn_tp_rank :][:heads]
            yield f"{path}._attn_sink_local", sinks[:heads], own
        padded = getattr(module, "_mix_up_weight_padded", None)
        if padded is not None:
            up = module.input_mix_weight_up.weight.detach().unflatten(0, (module.hc_count, -1))
            up = up.transpose(0, 1).flatten(0, 1)
            yield f"{path}._mix_up_weight_padded", padded[:, : up.shape[1]], up
