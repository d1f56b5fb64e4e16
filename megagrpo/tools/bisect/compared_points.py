"""The points that are compared, in the order of the computation, by SGLang's and Megatron's names
for them.

An engine's layer adds its residual in the next norm, whose second result it is: a layer's own
output is only the output of its MLP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.models.architecture import Architecture
from megagrpo.models.points import At, Layout, Row, under
from megagrpo.models.table import FAMILIES
from megagrpo.tools.bisect.hooks import TOWER_MODULE, Tap

FINAL_NORM = "final_norm"
TOWER = "tower."  # begins the names of points in a vision tower
Unit = Literal["tokens", "patches", "features"]
# tokens of the sequences; patches and features of their distinct images
Sizes = Mapping[Unit, Sequence[int]]


@dataclass(frozen=True)
class Point:
    """One point that both sides have.

    layout: how tensor-parallel ranks hold it. depth: layers before the point; the bound grows with
    it. unit: what its rows are of.
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
    arch: Architecture,
    name: str,
    says: str,
    engine: At,
    trainer: At,
    depth: int = 0,
    layer: int | None = None,
) -> Point:
    tap = _tap(name, engine)
    return Point(
        name,
        says,
        tap._replace(module=FAMILIES[arch.family].engine_path(tap.module)),
        _tap(name, trainer),
        layer=layer,
        one_rank=name.endswith(("attention_out", "mlp_out")),
        depth=depth,
    )


def _tap(name: str, at: At) -> Tap:
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
        return _point(arch, "embedding", "embedding", "model.embed_tokens", "embedding")
    engine = ("model.layers.0", "in", 1)  # after the positions
    trainer = ("decoder.layers.0.input_layernorm", "in", 0)
    says = "embeddings with the images' features"
    return _point(arch, "scatter", says, engine, trainer, depth_before(arch, 0))


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
        point = _point(
            arch, TOWER + name, says, f"visual.{module}", f"{TOWER_MODULE}.{module}", depth
        )
        yield replace(point, unit=unit)


def final_norm(arch: Architecture) -> Point:
    """Returns the last point before the output layer."""
    depth = depth_before(arch, arch.num_layers)
    trainer = "decoder.final_layernorm"
    return _point(arch, FINAL_NORM, "final norm", "model.norm", trainer, depth, arch.num_layers - 1)


def layer_points(arch: Architecture, layer: int) -> list[Point]:
    """Returns the points inside one layer, including the residual stream after attention and at its
    end."""
    experts = arch.experts if arch.has_experts(layer) else None
    mlp = experts.names.module if experts else "mlp"
    mixer = arch.mixer(layer)
    norm, trainer_norm = "post_attention_layernorm", "pre_mlp_layernorm"
    mixing: list[Row] = []
    if mixer is not None:
        first = "input_layernorm"
        before: Row = ("input_norm", "norm before attention", first, first, "whole")
        mixing = [before, *mixer.points()]
    feeding: list[Row] = []
    if experts is not None or arch.has_mlp(layer):
        feeding = [
            ("mlp_norm", "norm before the MLP", norm, trainer_norm, "whole"),
            *(experts.points() if experts else []),
            ("mlp_out", "MLP or experts", mlp, "mlp", "whole"),
        ]
    says = "residual stream after attention"
    stream: Row = ("after_attention", says, (norm, "out", 1), (trainer_norm, "in", 0), "whole")
    rows = [*mixing, *([stream] if mixing and feeding else []), *feeding]
    depth = depth_before(arch, layer + 1)
    places = f"model.layers.{layer}", f"decoder.layers.{layer}"
    points = [
        replace(
            _point(
                arch,
                f"layers.{layer}.{name}",
                f"{says} {'in' if layout == 'map' else 'of'} layer {layer}",
                under(places[0], engine),
                under(places[1], trainer),
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
        arch,
        f"layers.{layer}.{'deepstack' if deep else 'output'}",
        f"residual stream{features} after layer {layer}",
        (following, "out", 1),
        places[1],
        depth,
        layer,
    )
    return [*points, end]
