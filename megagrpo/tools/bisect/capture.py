"""Records values inside the actor's live model by forward hooks, for `megagrpo bisect`.

Values come with rows and columns of the batch, which undoes packing, sequence and context
parallelism.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from megagrpo.actor.head import token_values
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.routing.replay import RoutingReplay, TopK
from megagrpo.actor.schedule import micro_batches
from megagrpo.actor.step import token_logprobs
from megagrpo.models.build import routers
from megagrpo.tools.bisect.hooks import TOWER_MODULE, Recorder, SeenTokens, Tap, experts_key
from megagrpo.types import Batch, ImageRef, MicroBatch, Routing


class CapturedForward(NamedTuple):
    """The result of a forward over a batch."""

    logprobs: Tensor  # [T] float32, 0 off the loss mask; on every rank
    pieces: list[SeenTokens]  # of this rank
    problems: list[str]


def captured_forward(
    actor: MegatronActor, batch: Batch, taps: Sequence[Tap], forced: Routing | None = None
) -> CapturedForward:
    """Collective. Computes log-probabilities at temperature 1 and records the taps whose modules
    are on this rank.

    taps: by Megatron's module names, with the layers of the whole model counted from 0. forced:
    experts of all layers that have some, which routers take instead of their own choice. Taps called
    `experts_key` always record the routers' own choice.
    """
    recorder = Recorder(_modules(actor), taps)
    own: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        stack.callback(recorder.remove)
        if forced is not None:
            mine, own = stack.enter_context(_replayed(actor, forced))
            batch = replace(batch, routing=mine)
        logprobs = token_logprobs(actor, batch, 1.0)
    micros = list(micro_batches(actor, batch, range(len(batch.lengths))))
    recorder.seen.update({key: maps for key, maps in own.items() if key in recorder.seen})
    pieces = []
    images = list(distinct_images(batch))
    seeing = [micro for micro in micros if micro.images and micro.images.refs]
    in_tower = {tap.key for tap in taps if tap.module.startswith(TOWER_MODULE)}
    for key, calls in recorder.seen.items():
        inputs = micros
        cut: Callable[[str, MicroBatch, Tensor], SeenTokens] = _piece
        if key in in_tower:
            inputs = seeing
            cut = partial(_image_piece, images)
        assert len(calls) == len(inputs), (
            f"{key} was called {len(calls)} times for {len(inputs)} micro-batches"
        )
        pieces += [cut(key, micro, values) for micro, values in zip(inputs, calls, strict=True)]
    return CapturedForward(logprobs, pieces, recorder.problems)


def distinct_images(batch: Batch) -> dict[str, ImageRef]:
    """Returns the images of a batch by key, in the order in which they come first."""
    return {image.key: image for images in batch.images for image in images}


def head_logprobs(actor: MegatronActor, hidden: Tensor, tokens: Tensor) -> Tensor | None:
    """Collective over tensor-parallel ranks. Returns log-probabilities [T] of tokens [T] at
    temperature 1, computed by the actor's head from hidden states [T, h]; None before the last
    pipeline stage.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return None
    chunk = actor.chunks[-1]
    weight = chunk.output_weight()
    with torch.no_grad():
        return token_values(actor, chunk, hidden.to(weight), tokens.to(weight.device), 1.0)[0]


def _modules(actor: MegatronActor) -> dict[str, nn.Module]:
    """Returns this rank's modules by name, with the layers of the whole model counted from 0."""
    modules = {}
    for chunk in actor.chunks:
        for name, module in chunk.named_modules():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
            modules[".".join(parts)] = module
    return modules


def _piece(key: str, micro: MicroBatch, values: Tensor) -> SeenTokens:
    """Returns the real tokens of values [s / cp, b, ...] or [s b / cp, ...], or of a tp-th of
    them."""
    tp = mpu.get_tensor_model_parallel_world_size()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    # [s / cp, b], Megatron's order
    rows = micro.rows.transpose(0, 1)
    columns = micro.columns.transpose(0, 1)
    flat = values.flatten(0, 1) if values.dim() > 2 and values.shape[1] == rows.shape[1] else values
    if len(flat) == rows.numel() // tp != rows.numel():  # sequence parallel
        rows = rows.chunk(tp)[tp_rank]
        columns = columns.chunk(tp)[tp_rank]
    assert len(flat) == rows.numel(), (
        f"{key}: shape {list(values.shape)} does not fit {list(micro.rows.shape)} tokens"
    )
    rows = rows.flatten()
    columns = columns.flatten()
    real = rows >= 0
    return SeenTokens(key, tp_rank, rows[real], columns[real], flat.reshape(len(flat), -1)[real])


def _image_piece(images: Sequence[str], key: str, micro: MicroBatch, values: Tensor) -> SeenTokens:
    """Returns the tower's values of a micro-batch, which follow its images. rows: indices of
    `images`, by key."""
    assert micro.images is not None
    patches = torch.tensor([math.prod(image.grid) for image in micro.images.refs])
    counts = patches * len(values) // int(patches.sum())  # patches, or features of several
    rows = torch.tensor([images.index(image.key) for image in micro.images.refs]).repeat_interleave(
        counts
    )
    columns = torch.cat([torch.arange(count) for count in counts.tolist()])
    return SeenTokens(
        key, mpu.get_tensor_model_parallel_rank(), rows, columns, values.reshape(len(values), -1)
    )


@contextmanager
def _replayed(
    actor: MegatronActor, experts: Routing
) -> Iterator[tuple[Routing, dict[str, list[Tensor]]]]:
    """Makes routers take given experts inside, as training does. Yields those of this rank's layers,
    and the maps [t, experts] of the routers' own choices by key, on the host, which the forwards
    fill.
    """
    own: dict[str, list[Tensor]] = {}

    def choose(
        layer: int,
        replay: TopK,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        def seen(*args: object, **options: object) -> tuple[Tensor, Tensor]:
            values, chosen = own_topk(*args, **options)
            none = torch.zeros_like(scores, dtype=torch.bool)
            own.setdefault(experts_key(layer), []).append(none.scatter(1, chosen, True).cpu())
            return values, chosen

        return replay(scores, topk, num_groups, group_topk, seen)

    with ExitStack() as stack:
        mine = routers(actor.chunks)
        for router in mine.values():
            stack.callback(setattr, router, "router_replay", router.router_replay)
        layers = RoutingReplay(mine, actor.router_scope, actor.arch, actor.mesh.device).layers
        for layer, router in mine.items():
            replay = partial(choose, layer, router.router_replay.get_replay_topk)
            router.router_replay = SimpleNamespace(get_replay_topk=replay)
        yield replace(experts, experts=experts.experts[:, list(layers)]), own
