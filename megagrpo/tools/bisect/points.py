"""The points that are compared, in the order of the computation, by SGLang's and Megatron's names
for them.

An engine's layer adds its residual in the next norm, whose second result it is: a layer's own
output is only the output of its MLP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.families.architecture import Architecture
from megagrpo.families.table import FAMILIES
from megagrpo.tools.bisect.hooks import TOWER_MODULE, Tap, experts_key

FINAL_NORM = "final_norm"
TOWER = "tower."  # begins the names of points in a vision tower
Layout = Literal["whole", "heads", "qkv", "map", "shares"]
Unit = Literal["tokens", "patches", "features"]
Sizes = Mapping[
    Unit, Sequence[int]
]  # tokens of the sequences; patches and features of their distinct images


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


def residual_points(arch: Architecture) -> list[Point]:
    """Returns the vision tower, the residual stream up to the final norm, and the experts of each
    layer."""
    points = [*_tower_points(arch), _first(arch)]
    for layer in range(arch.num_layers):
        names = {
            f"layers.{layer}.{name}"
            for name in ("after_attention", "experts", "output", "deepstack")
        }
        points += [point for point in layer_points(arch, layer) if point.name in names]
    return [*points, final_norm(arch)]


def depth_before(arch: Architecture, layer: int) -> int:
    """Returns the number of layers, of the tower and its projector too, before layer `layer`
    counted from 0."""
    return layer if arch.vision is None else arch.vision.depth + 1 + layer


def _first(arch: Architecture) -> Point:
    if arch.vision is None:
        return _point("embedding", "embedding", ("model.embed_tokens", 0), ("embedding", "out", 0))
    engine = Tap("scatter", "model.layers.0", "in", 1)  # after the positions
    trainer = Tap("scatter", "decoder.layers.0.input_layernorm", "in")
    return Point(
        "scatter",
        "embeddings with the images' features",
        engine,
        trainer,
        depth=depth_before(arch, 0),
    )


def _tower_points(arch: Architecture) -> Iterator[Point]:
    if (vision := arch.vision) is None:
        return

    def point(name: str, says: str, module: str, depth: int, unit: Unit) -> Point:
        engine, trainer = (
            Tap(name, f"visual.{module}", "out"),
            Tap(name, f"{TOWER_MODULE}.{module}", "out"),
        )
        return Point(name, says, engine, trainer, depth=depth, unit=unit)

    yield point(
        TOWER + "patch_embed", "the tower's embedding of patches", "patch_embed", 0, "patches"
    )
    for index in range(vision.depth):
        yield point(
            f"{TOWER}blocks.{index}",
            f"block {index} of the tower",
            f"blocks.{index}",
            index + 1,
            "patches",
        )
    last = vision.depth + 1
    yield point(TOWER + "projector", "projector", "merger", last, "features")
    for index in range(vision.deepstack):
        module = f"deepstack_merger_list.{index}"
        yield point(
            f"{TOWER}deepstack.{index}", f"deepstack projector {index}", module, last, "features"
        )


def final_norm(arch: Architecture) -> Point:
    """Returns the last point before the output layer."""
    of_trainer, depth = ("decoder.final_layernorm", "out", 0), depth_before(arch, arch.num_layers)
    return _point(
        FINAL_NORM,
        "final norm",
        ("model.norm", 0),
        of_trainer,
        layer=arch.num_layers - 1,
        depth=depth,
    )


class _Layer:
    """Makes the points of one layer. engine, trainer, mlp: dotted paths of its modules."""

    def __init__(self, arch: Architecture, layer: int):
        self.arch, self.layer = arch, layer
        self.engine, self.trainer = f"model.layers.{layer}", f"decoder.layers.{layer}"
        self.mlp = f"{self.engine}.{FAMILIES[arch.family].MLP.removesuffix('.')}"

    def point(
        self,
        name: str,
        says: str,
        of_engine: tuple[str, int],
        of_trainer: tuple[str, str, int],
        layout: Layout = "whole",
    ) -> Point:
        place, depth = f"layers.{self.layer}.{name}", depth_before(self.arch, self.layer + 1)
        says = f"{says} layer {self.layer}"
        return _point(place, says, of_engine, of_trainer, layout, self.layer, depth)

    def attention(
        self, name: str, says: str, of_engine: str, of_trainer: str, layout: Layout = "whole"
    ) -> Point:
        engine = f"{self.engine}.self_attn.{of_engine}", 0
        trainer = f"{self.trainer}.self_attention.{of_trainer}", "out", 0
        return self.point(name, f"{says} of", engine, trainer, layout)

    def inside_attention(self) -> Iterator[Point]:
        """Yields what goes into attention's output projection."""
        arch = self.arch
        if arch.mla is not None:
            if arch.mla.q_lora_rank is not None:
                says = "normed latent of queries"
                yield self.attention("q_latent", says, "q_a_layernorm", "q_layernorm")
            says = "normed latent of keys and values"
            yield self.attention("kv_latent", says, "kv_a_layernorm", "kv_layernorm")
            return
        says = "projection to queries, keys and values"
        yield self.attention("qkv", says, "qkv_proj", "linear_qkv", "qkv")
        if arch.qk_norm:
            yield self.attention("q_norm", "normed queries", "q_norm", "q_layernorm", "heads")
            yield self.attention("k_norm", "normed keys", "k_norm", "k_layernorm", "heads")
        for item, says in enumerate(("queries", "keys")):  # as attention gets them
            name = f"{says[0]}_rotary"
            turned = self.attention(
                name, f"{says} with positions", "attn", "core_attention", "heads"
            )
            engine = turned.engine._replace(side="in", item=item)
            trainer = turned.trainer._replace(side="in", item=item)
            yield replace(turned, engine=engine, trainer=trainer)
        says = "attention (scale, mask, softmax)"
        yield self.attention("core_attention", says, "attn", "core_attention", "heads")

    def routing(self) -> Iterator[Point]:
        """Yields what a router computes; nothing in a dense layer."""
        if not self.arch.has_experts(self.layer):
            return
        router, topk = f"{self.trainer}.mlp.router", f"{self.mlp}.topk"
        gate = f"{self.mlp}.gate", 0
        yield self.point("router_logits", "router logits of", gate, (router, "gating", 0))
        chosen = self.point("experts", "experts chosen in", (topk, 1), (router, "out", 1), "map")
        assert chosen.name == experts_key(self.layer)
        yield chosen
        says = "weights of the experts, as shares, of"
        yield self.point("expert_shares", says, (topk, 0), (router, "out", 0), "shares")


def layer_points(arch: Architecture, layer: int) -> list[Point]:
    """Returns the points inside one layer, including the residual stream after attention and at its
    end."""
    at = _Layer(arch, layer)
    point, engine, trainer = at.point, at.engine, at.trainer
    norm, mlp_norm = f"{engine}.post_attention_layernorm", f"{trainer}.pre_mlp_layernorm"
    input_norm = (f"{engine}.input_layernorm", 0), (f"{trainer}.input_layernorm", "out", 0)
    says = "residual stream after attention of"
    last = layer == arch.num_layers - 1
    following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
    deep = arch.vision is not None and layer < arch.vision.deepstack
    name, features = ("deepstack", " and deepstack's features") if deep else ("output", "")
    return [
        point("input_norm", "norm before attention of", *input_norm),
        *at.inside_attention(),
        at.attention("attention_out", "output projection of attention", "o_proj", "linear_proj"),
        point("after_attention", says, (norm, 1), (mlp_norm, "in", 0)),
        point("mlp_norm", "norm before the MLP of", (norm, 0), (mlp_norm, "out", 0)),
        *at.routing(),
        point("mlp_out", "MLP or experts of", (at.mlp, 0), (f"{trainer}.mlp", "out", 0)),
        point(name, f"residual stream{features} after", (following, 1), (trainer, "out", 0)),
    ]


def _point(
    name: str,
    says: str,
    engine: tuple[str, int],
    trainer: tuple[str, str, int],
    layout: Layout = "whole",
    layer: int | None = None,
    depth: int = 0,
) -> Point:
    """engine: a module and the index of its result; trainer: a module, the side of it, and the
    index there."""
    module, index = engine
    one_rank = name.endswith(("attention_out", "mlp_out"))
    return Point(
        name,
        says,
        Tap(name, module, "out", index),
        Tap(name, *trainer),
        layout,
        layer,
        one_rank,
        depth,
    )
