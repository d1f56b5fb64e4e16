"""The points that are compared, in the order of the computation, by SGLang's and Megatron's names
for them.

An engine's layer adds its residual in the next norm, whose second result it is: a layer's own
output is only the output of its MLP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.models.architecture import Architecture
from megagrpo.models.table import FAMILIES
from megagrpo.tools.bisect.hooks import TOWER_MODULE, Tap

FINAL_NORM = "final_norm"
TOWER = "tower."  # begins the names of points in a vision tower
Layout = Literal["whole", "heads", "qkv", "map", "shares"]
Unit = Literal["tokens", "patches", "features"]
# tokens of the sequences; patches and features of their distinct images
Sizes = Mapping[Unit, Sequence[int]]
_At = str | tuple[str, str, int]  # a module, of which it is the output, or its side and item


@dataclass(frozen=True)
class Point:
    """One point that both sides have.

    layout: how tensor-parallel ranks hold it: replicated; sharded by heads; sharded by heads of
    queries, keys and values; ids or weights of experts, compared as a map or as the share of each
    expert. depth: layers before the point; the bound grows with it. unit: what its rows are of.
    """

    name: str
    says: str  # in words, for people
    engine: Tap
    trainer: Tap
    layout: Layout = "whole"
    layer: int | None = None  # counted from 0
    one_rank: bool = False  # partial sums on an engine of several ranks: not compared there
    depth: int = 0
    unit: Unit = "tokens"


def _point(
    name: str, says: str, engine: _At, trainer: _At, depth: int = 0, layer: int | None = None
) -> Point:
    return Point(
        name,
        says,
        _tap(name, engine),
        _tap(name, trainer),
        layer=layer,
        one_rank=name.endswith(("attention_out", "mlp_out")),
        depth=depth,
    )


def _tap(name: str, at: _At) -> Tap:
    return Tap(name, at, "out") if isinstance(at, str) else Tap(name, *at)


def residual_points(arch: Architecture) -> list[Point]:
    """Returns the vision tower, the residual stream up to the final norm, and the experts of each
    layer."""
    points = [*_tower_points(arch), _first(arch)]
    kept = ("after_attention", "experts", "output", "deepstack")
    for layer in range(arch.num_layers):
        inside = layer_points(arch, layer)
        points += [point for point in inside if point.name.rpartition(".")[2] in kept]
    return [*points, final_norm(arch)]


def depth_before(arch: Architecture, layer: int) -> int:
    """Returns the number of layers, of the tower and its projector too, before layer `layer`
    counted from 0."""
    return layer if arch.vision is None else arch.vision.depth + 1 + layer


def _first(arch: Architecture) -> Point:
    if arch.vision is None:
        return _point("embedding", "embedding", "model.embed_tokens", "embedding")
    engine = ("model.layers.0", "in", 1)  # after the positions
    trainer = ("decoder.layers.0.input_layernorm", "in", 0)
    says = "embeddings with the images' features"
    return _point("scatter", says, engine, trainer, depth_before(arch, 0))


def _tower_points(arch: Architecture) -> Iterator[Point]:
    if (vision := arch.vision) is None:
        return
    last = vision.depth + 1
    rows: list[tuple[str, str, str, int, Unit]] = [
        ("patch_embed", "the tower's embedding of patches", "patch_embed", 0, "patches")
    ]
    for index in range(vision.depth):
        block = f"blocks.{index}"
        rows.append((block, f"block {index} of the tower", block, index + 1, "patches"))
    rows.append(("projector", "projector", "merger", last, "features"))
    for index in range(vision.deepstack):
        module = f"deepstack_merger_list.{index}"
        says = f"deepstack projector {index}"
        rows.append((f"deepstack.{index}", says, module, last, "features"))
    for name, says, module, depth, unit in rows:
        point = _point(TOWER + name, says, f"visual.{module}", f"{TOWER_MODULE}.{module}", depth)
        yield replace(point, unit=unit)


def final_norm(arch: Architecture) -> Point:
    """Returns the last point before the output layer."""
    depth = depth_before(arch, arch.num_layers)
    trainer = "decoder.final_layernorm"
    return _point(FINAL_NORM, "final norm", "model.norm", trainer, depth, arch.num_layers - 1)


# name, words, modules of the engine's and of the trainers' attention, layout
_Row = tuple[str, str, _At, _At, Layout]


def _attention(arch: Architecture, layer: int) -> list[_Row]:
    """Returns attention's parts and its output projection, or a gated delta net in its place."""
    if arch.is_linear(layer):
        says = "gated delta net"
        return [("attention_out", says, "linear_attn.out_proj", "self_attention.out_proj", "whole")]
    inside = FAMILIES[arch.family].ENGINE_ATTENTION
    output: _Row = (
        "attention_out",
        "output projection of attention",
        "o_proj",
        "linear_proj",
        "whole",
    )
    return [
        (name, says, _under(inside, engine), _under("self_attention", trainer), layout)
        for name, says, engine, trainer, layout in [*_inner_attention(arch), output]
    ]


def _inner_attention(arch: Architecture) -> list[_Row]:
    """Returns what goes into attention's output projection."""
    if arch.mla is not None:
        says = "normed latent of"
        queries: _Row = ("q_latent", f"{says} queries", "q_a_layernorm", "q_layernorm", "whole")
        return [
            *([] if arch.mla.q_lora_rank is None else [queries]),
            ("kv_latent", f"{says} keys and values", "kv_a_layernorm", "kv_layernorm", "whole"),
        ]
    attn = "attn"
    core = "core_attention"
    norms: list[_Row] = [
        ("q_norm", "normed queries", "q_norm", "q_layernorm", "heads"),
        ("k_norm", "normed keys", "k_norm", "k_layernorm", "heads"),
    ]
    qkv: _Row = ("qkv", "projection to queries, keys and values", "qkv_proj", "linear_qkv", "qkv")
    # with gates among the queries the sides differ in their order, and an engine fuses the norms
    before = [] if arch.output_gate else [qkv, *(norms if arch.qk_norm else [])]
    return [
        *before,
        # as attention gets them
        ("q_rotary", "queries with positions", (attn, "in", 0), (core, "in", 0), "heads"),
        ("k_rotary", "keys with positions", (attn, "in", 1), (core, "in", 1), "heads"),
        ("core_attention", "attention (scale, mask, softmax)", attn, core, "heads"),
    ]


def layer_points(arch: Architecture, layer: int) -> list[Point]:
    """Returns the points inside one layer, including the residual stream after attention and at its
    end."""
    mlp = FAMILIES[arch.family].MLP.removesuffix(".")
    rows: list[_Row] = [
        ("input_norm", "norm before attention", "input_layernorm", "input_layernorm", "whole"),
        *_attention(arch, layer),
        (
            "after_attention",
            "residual stream after attention",
            ("post_attention_layernorm", "out", 1),
            ("pre_mlp_layernorm", "in", 0),
            "whole",
        ),
        (
            "mlp_norm",
            "norm before the MLP",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "whole",
        ),
        *(_routing(mlp) if arch.has_experts(layer) else []),
        ("mlp_out", "MLP or experts", mlp, "mlp", "whole"),
    ]
    depth = depth_before(arch, layer + 1)
    places = f"model.layers.{layer}", f"decoder.layers.{layer}"
    points = [
        replace(
            _point(
                f"layers.{layer}.{name}",
                f"{says} {'in' if layout == 'map' else 'of'} layer {layer}",
                _under(places[0], engine),
                _under(places[1], trainer),
                depth,
                layer,
            ),
            layout=layout,
        )
        for name, says, engine, trainer, layout in rows
    ]
    last = layer == arch.num_layers - 1
    following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
    deep = arch.vision is not None and layer < arch.vision.deepstack
    features = " and deepstack's features" if deep else ""
    end = _point(
        f"layers.{layer}.{'deepstack' if deep else 'output'}",
        f"residual stream{features} after layer {layer}",
        (following, "out", 1),
        places[1],
        depth,
        layer,
    )
    return [*points, end]


def _routing(mlp: str) -> list[_Row]:
    """Returns what a router computes."""
    topk = f"{mlp}.topk"
    router = "mlp.router"
    return [
        ("router_logits", "router logits", f"{mlp}.gate", (router, "gating", 0), "whole"),
        ("experts", "experts chosen", (topk, "out", 1), (router, "out", 1), "map"),
        ("expert_shares", "weights of the experts, as shares,", topk, router, "shares"),
    ]


def _under(path: str, at: _At) -> _At:
    if not path:
        return at
    return f"{path}.{at}" if isinstance(at, str) else (f"{path}.{at[0]}", *at[1:])
