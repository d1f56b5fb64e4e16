"""Lists the places that are compared, in the order of the computation, by SGLang's and Megatron's names for them.

An engine's layer adds its residual in the next norm, whose second result it is: a layer's own output is only what its
MLP adds.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.families.architecture import Architecture
from megagrpo.weights.engines.hooks import LayerTap, Tap, experts_key

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
    own = f"model.layers.{layer}"
    mlp = f"{own}.{_mlp(arch)}"

    def point(
        name: str,
        says: str,
        engine: tuple[str, int],
        trainer: tuple[str, str],
        layout: Layout = "whole",
        one_rank: bool = False,
    ) -> Point:
        # engine: module, and place of its result; trainer: module of the layer, and side
        key, (module, side) = f"layers.{layer}.{name}", trainer
        taps = Tap(key, engine[0], "out", engine[1]), LayerTap(Tap(key, module, side), layer)
        return Point(key, f"{says} of layer {layer}", *taps, layout=layout, layer=layer, one_rank=one_rank)

    def attention(name: str, says: str, engine: str, trainer: str, layout: Layout = "whole") -> Point:
        at = (f"{own}.self_attn.{engine}", 0), (f"self_attention.{trainer}", "out")
        return point(name, says, *at, layout=layout, one_rank=engine == "o_proj")

    points = [point("input_norm", "norm before attention", (f"{own}.input_layernorm", 0), ("input_layernorm", "out"))]
    if arch.mla is not None:
        if arch.mla.q_lora_rank is not None:
            points.append(attention("q_latent", "normed latent of queries", "q_a_layernorm", "q_layernorm"))
        says = "normed latent of keys and values"
        points.append(attention("kv_latent", says, "kv_a_layernorm", "kv_layernorm"))
    else:
        says = "projection to queries, keys and values"
        points.append(attention("qkv", says, "qkv_proj", "linear_qkv", "qkv"))
        if arch.qk_norm:
            points.append(attention("q_norm", "normed queries", "q_norm", "q_layernorm", "heads"))
            points.append(attention("k_norm", "normed keys", "k_norm", "k_layernorm", "heads"))
        says = "attention (rotary embedding, scale, mask, softmax)"
        points.append(attention("core_attention", says, "attn", "core_attention", "heads"))
    points.append(attention("attention_out", "output projection of attention", "o_proj", "linear_proj"))
    points.append(_between(layer))
    norm = (f"{own}.post_attention_layernorm", 0), ("pre_mlp_layernorm", "out")
    points.append(point("mlp_norm", "norm before the MLP", *norm))
    if _has_experts(arch, layer):
        points.append(point("router_logits", "router logits", (f"{mlp}.gate", 0), ("mlp.router", "gating")))
        points.append(_experts(arch, layer))
        says = "weights of the experts, as shares,"
        points.append(point("expert_shares", says, (f"{mlp}.topk", 0), ("mlp.router", "out"), "shares"))
    points.append(point("mlp_out", "MLP or experts", (mlp, 0), ("mlp", "out"), one_rank=True))
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
    engine = Tap(key, f"model.layers.{layer}.{_mlp(arch)}.topk", "out", 1)
    trainer = LayerTap(Tap(key, "mlp.router", "out", 1), layer)
    return Point(key, f"experts that layer {layer} takes", engine, trainer, layout="map", layer=layer)


def _has_experts(arch: Architecture, layer: int) -> bool:
    return arch.is_moe and layer >= arch.dense_layers


def _mlp(arch: Architecture) -> str:
    return _MLP_NAMES.get(arch.family, "mlp")
