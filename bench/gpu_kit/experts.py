"""One layer of experts at the sizes of Qwen3-235B: one after the other, grouped, and torch's
grouped product."""

from importlib import import_module

import torch
from torch import Tensor

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from bench.gpu_kit.models import DEVICE, description, random_actor
from bench.gpu_kit.timing import peak_bytes, seconds_of

TOKENS = 8192
SIZES = {"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
SIZES |= {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12_288,
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
}
_COMMON = {
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def experts(figures: Figures, setting: Setting) -> None:
    """Measures forward and backward of one layer; TFLOP/s count the experts' products alone."""
    sizes, tokens = setting.of(SIZES, SMALL), setting.of(TOKENS, 64)
    one_way = (
        2
        * tokens
        * sizes["num_experts_per_tok"]
        * 3
        * sizes["hidden_size"]
        * sizes["moe_intermediate_size"]
    )
    figures.add("tokens", tokens, "", f"{one_way * 3 / 1e12:.2f} TFLOP forward and backward")
    for title, transformer_engine in (
        ("one after the other", False),
        ("grouped by Transformer Engine", True),
    ):
        try:
            seconds, peak = _layer(setting, sizes, tokens, transformer_engine)
        except Unavailable as exc:
            figures.add(title, None, note=str(exc))
            continue
        figures.add(
            title,
            seconds,
            "s",
            f"router and permutation included, {one_way * 3 / seconds / 1e12:.1f} TFLOP/s",
        )
        figures.add("  peak beyond weights and gradients", peak / 2**30, "GiB")
    try:
        seconds = _torch_grouped(sizes, tokens)
    except (RuntimeError, AttributeError, NotImplementedError) as exc:
        figures.add(
            "torch's grouped_mm", None, note=f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
        )
    else:
        note = f"the products alone, equal loads, {one_way * 3 / seconds / 1e12:.1f} TFLOP/s"
        figures.add("torch's grouped_mm", seconds, "s", note)


def _layer(
    setting: Setting, sizes: dict, tokens: int, transformer_engine: bool
) -> tuple[float, int]:
    if transformer_engine:
        try:
            import_module("transformer_engine.pytorch")  # what is installed may still not load
        except ImportError as exc:
            raise Unavailable(f"Transformer Engine: {exc}") from None
    folder = setting.folder / f"experts_{transformer_engine}"
    options = {"dtype": "bfloat16", "transformer_engine": transformer_engine}
    with random_actor(folder, description("qwen3_moe", {**_COMMON, **sizes}), **options) as actor:
        layer = actor.chunks[0].decoder.layers[0].mlp
        hidden = (
            torch.randn(tokens, 1, sizes["hidden_size"], device=DEVICE).bfloat16().requires_grad_()
        )

        def both_ways() -> None:
            layer(hidden)[0].float().square().mean().backward()
            hidden.grad = None

        with actor.model[0].no_sync():  # every call is one of several micro-batches
            return seconds_of(both_ways, DEVICE), peak_bytes(both_ways, DEVICE)


def _torch_grouped(sizes: dict, tokens: int) -> float:
    """Returns seconds of the three products of all experts, forward and backward, with equal
    loads."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    count, hidden, inner = (
        sizes["num_experts"],
        sizes["hidden_size"],
        sizes["moe_intermediate_size"],
    )
    load = tokens * sizes["num_experts_per_tok"] // count
    ends = (torch.arange(count, device=DEVICE) + 1).mul(load).int()

    def weight(rows: int, columns: int) -> Tensor:
        return (
            (torch.randn(count, rows, columns, device=DEVICE) * columns**-0.5)
            .bfloat16()
            .requires_grad_()
        )

    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    rows = torch.randn(load * count, hidden, device=DEVICE).bfloat16().requires_grad_()

    def both_ways() -> None:
        gate, value = grouped(rows, up.transpose(1, 2), offs=ends).chunk(2, -1)
        out = grouped(torch.nn.functional.silu(gate) * value, down.transpose(1, 2), offs=ends)
        out.backward(torch.ones_like(out))
        rows.grad = up.grad = down.grad = None

    return seconds_of(both_ways, DEVICE)
