"""Lists the places that are compared, in the order of the computation, by SGLang's and Megatron's names for them.

An engine's layer adds its residual in the next norm, whose second result it is: a layer's own output is only what its
MLP adds.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.families.architecture import Architecture
from megagrpo.weights.capture import LayerTap, Tap, experts_key

EMBEDDING, FINAL_NORM = "embedding", "final_norm"
Layout = Literal["whole", "heads", "qkv", "map", "shares"]

_MLP_NAMES = {"mixtral": "block_sparse_moe"}  # of families whose engine model does not say "mlp"


@dataclass(frozen=True)
class Point:
    """Describes one place that both sides have.

    layout: how tensor-parallel ranks hold it: all the same; each its heads, side by side; each its heads of queries,
    keys and values; ids and weights of experts, as a map or as shares of each expert.
    """

    name: str
    says: str  # in words, for people
    engine: Tap
    trainer: LayerTap
    layout: Layout = "whole"
    layer: int | None = None  # counted from 0
    one_rank: bool = False  # compared where the engine has one rank: else its ranks hold parts of a sum

    @property
    def depth(self) -> int:
        """Returns how many layers are behind it; the bound grows with that."""
        return 0 if self.layer is None else self.layer + 1


def embedding() -> Point:
    """Returns the first place."""
    engine = Tap(EMBEDDING, "model.embed_tokens", "out")
    return Point(EMBEDDING, "embedding", engine, LayerTap(Tap(EMBEDDING, "embedding", "out"), None))


def final_norm(arch: Architecture) -> Point:
    """Returns the last place before the output layer."""
    engine, trainer = Tap(FINAL_NORM, "model.norm", "out"), Tap(FINAL_NORM, "decoder.final_layernorm", "out")
    point = Point(FINAL_NORM, "final norm", engine, LayerTap(trainer, None))
    return replace(point, layer=arch.num_layers - 1)


def residual_points(arch: Architecture) -> list[Point]:
    """Returns the residual stream from the embedding to the final norm, and which experts each layer takes."""
    points = [embedding()]
    for layer in range(arch.num_layers):
        points.append(_between(layer))
        points += [_experts(arch, layer)] if _has_experts(arch, layer) else []
        points.append(_after(arch, layer))
    return [*points, final_norm(arch)]


def layer_points(arch: Architecture, layer: int) -> list[Point]:
    """Returns the places inside one layer, the residual stream after attention and at the end among them."""

    def point(name: str, says: str, engine: Tap, module: str, side: str = "out", index: int = 0, **more) -> Point:
        key = f"layers.{layer}.{name}"
        at, says = engine._replace(key=key), f"{says} of layer {layer}"
        return Point(key, says, at, LayerTap(Tap(key, module, side, index), layer), **more)

    mlp = f"model.layers.{layer}.{_MLP_NAMES.get(arch.family, 'mlp')}"
    own = f"model.layers.{layer}"

    def engine(module: str, side: str = "out", index: int = 0) -> Tap:
        return Tap("", f"{own}.{module}", side, index)

    of = {"layer": layer}
    points = [point("input_norm", "norm before attention", engine("input_layernorm"), "input_layernorm", **of)]
    if arch.mla is not None:
        if arch.mla.q_lora_rank is not None:
            taps = engine("self_attn.q_a_layernorm"), "self_attention.q_layernorm"
            points.append(point("q_latent", "normed latent of queries", *taps, **of))
        taps = engine("self_attn.kv_a_layernorm"), "self_attention.kv_layernorm"
        points.append(point("kv_latent", "normed latent of keys and values", *taps, **of))
    else:
        taps = engine("self_attn.qkv_proj"), "self_attention.linear_qkv"
        points.append(point("qkv", "projection to queries, keys and values", *taps, layout="qkv", **of))
        if arch.qk_norm:
            for which, says in (("q", "queries"), ("k", "keys")):
                taps = engine(f"self_attn.{which}_norm"), f"self_attention.{which}_layernorm"
                points.append(point(f"{which}_norm", f"normed {says}", *taps, layout="heads", **of))
        taps = engine("self_attn.attn"), "self_attention.core_attention"
        says = "attention (rotary embedding, scale, mask, softmax)"
        points.append(point("core_attention", says, *taps, layout="heads", **of))
    taps = engine("self_attn.o_proj"), "self_attention.linear_proj"
    points.append(point("attention_out", "output projection of attention", *taps, one_rank=True, **of))
    points.append(_between(layer))
    taps = engine("post_attention_layernorm"), "pre_mlp_layernorm"
    points.append(point("mlp_norm", "norm before the MLP", *taps, **of))
    if _has_experts(arch, layer):
        gate = Tap("", f"{mlp}.gate", "out")
        points.append(point("router_logits", "router logits", gate, "mlp.router", "gating", **of))
        points.append(_experts(arch, layer))
        weights = Tap("", f"{mlp}.topk", "out", 0)
        says = "weights of the experts, as shares"
        points.append(point("expert_shares", says, weights, "mlp.router", "out", 0, layout="shares", **of))
    says = "MLP or experts"
    points.append(point("mlp_out", says, Tap("", mlp, "out"), "mlp", one_rank=True, **of))
    return [*points, _after(arch, layer)]


def _between(layer: int) -> Point:
    key = f"layers.{layer}.after_attention"
    engine = Tap(key, f"model.layers.{layer}.post_attention_layernorm", "out", 1)
    trainer = LayerTap(Tap(key, "pre_mlp_layernorm", "in"), layer)
    return Point(key, f"residual stream after attention of layer {layer}", engine, trainer, layer=layer)


def _after(arch: Architecture, layer: int) -> Point:
    key = f"layers.{layer}.output"
    last = layer == arch.num_layers - 1
    engine = Tap(key, "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm", "out", 1)
    trainer = LayerTap(Tap(key, "", "out"), layer)
    return Point(key, f"residual stream after layer {layer}", engine, trainer, layer=layer)


def _experts(arch: Architecture, layer: int) -> Point:
    key = experts_key(layer)
    engine = Tap(key, f"model.layers.{layer}.{_MLP_NAMES.get(arch.family, 'mlp')}.topk", "out", 1)
    trainer = LayerTap(Tap(key, "mlp.router", "out", 1), layer)
    return Point(key, f"experts that layer {layer} takes", engine, trainer, layout="map", layer=layer)


def _has_experts(arch: Architecture, layer: int) -> bool:
    return arch.is_moe and layer >= arch.dense_layers
