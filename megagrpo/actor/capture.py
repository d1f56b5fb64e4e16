"""Shows what the live model computes inside for given samples, for `megagrpo bisect`: hooks in the actor's own layout.

What a rank saw is told by rows and columns of the batch, which undoes packing, sequence and context parallelism.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from megagrpo.actor.head import token_values
from megagrpo.actor.megatron.model import routers
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.routing.tokens import RouterScope
from megagrpo.actor.step import micro_batches, token_logprobs
from megagrpo.types import Batch, MicroBatch
from megagrpo.weights.engines.hooks import LayerTap, Recorder, SeenTokens, Tap, experts_key


class CapturedForward(NamedTuple):
    """Holds what a forward over a batch gave."""

    logprobs: Tensor  # [T] float32, 0 off the loss mask; on every rank
    pieces: list[SeenTokens]  # of this rank
    problems: list[str]


def captured_forward(
    actor: MegatronActor, batch: Batch, taps: Sequence[LayerTap], forced: Tensor | None = None
) -> CapturedForward:
    """Collective. Computes log-probabilities at temperature 1 and records what taps see, as far as it is on this rank.

    forced: experts [N, S, layers, k] int64 that routers take instead of their own, -1 where they choose; None: they do
    everywhere. What taps called `experts_key` see is always their own choice.
    """
    micros = list(micro_batches(actor, batch, range(len(batch.lengths))))
    recorder = Recorder(list(_tapped(actor, taps)))
    try:
        with _forced_routing(actor, forced) as own:
            logprobs = token_logprobs(actor, batch, 1.0)
    finally:
        recorder.remove()
    recorder.seen.update({key: maps for key, maps in own.items() if key in recorder.seen})
    pieces = []
    for key, calls in recorder.seen.items():
        assert len(calls) == len(micros), f"{key} was called {len(calls)} times for {len(micros)} micro-batches"
        pieces += [_piece(key, micro, values) for micro, values in zip(micros, calls, strict=True)]
    return CapturedForward(logprobs, pieces, recorder.problems)


def head_logprobs(actor: MegatronActor, hidden: Tensor, tokens: Tensor) -> Tensor | None:
    """Collective over tensor-parallel ranks. Returns log-probabilities [T] of tokens [T], at temperature 1, of what the
    actor's head makes of any hidden states [T, h]; None before the last pipeline stage.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return None
    weight = actor.chunks[-1].output_weight()
    tp, count = actor.config.parallel.tp, len(hidden)
    padded = nn.functional.pad(hidden, (0, 0, 0, -count % tp)).to(weight)
    mine = padded.chunk(tp)[mpu.get_tensor_model_parallel_rank()][:, None]
    flat = torch.arange(count, device=weight.device)
    with torch.no_grad():
        return token_values(actor, actor.chunks[-1], mine, flat, tokens.to(weight.device), 1.0)[0]


def speaks_for_tokens() -> bool:
    """Tells whether pieces of this rank are wanted: other data-parallel ranks compute the same of the same batch."""
    return mpu.get_data_parallel_rank() == 0


def _tapped(actor: MegatronActor, taps: Sequence[LayerTap]) -> Iterator[tuple[Tap, nn.Module]]:
    """Yields the taps whose modules are on this rank, with these."""
    for chunk in actor.chunks:
        layers = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
        for tap, index in taps:
            holder = chunk if index is None else layers.get(index)
            module = dict(holder.named_modules()).get(tap.module) if holder is not None else None
            if module is not None:
                yield tap, module


def _places(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns rows and columns [s / cp, b] of this rank's part before sequence parallelism, in Megatron's order."""
    return micro.rows.transpose(0, 1), micro.columns.transpose(0, 1)


def _piece(key: str, micro: MicroBatch, values: Tensor) -> SeenTokens:
    """Says which tokens `values` are of: [s / cp, b, ...] or flattened [s b / cp, ...], or a tp-th of these tokens.

    Raises ValueError for any other shape.
    """
    tp, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    rows, columns = _places(micro)
    length, height = rows.shape
    flat = values.flatten(0, 1) if values.dim() > 2 and values.shape[1] == height else values
    if len(flat) == length * height // tp != length * height:
        rows, columns = rows.chunk(tp)[tp_rank], columns.chunk(tp)[tp_rank]
    elif len(flat) != length * height:
        raise ValueError(f"{key}: shape {list(values.shape)} is not that of {length} x {height} tokens or a part")
    rows, columns = rows.flatten(), columns.flatten()
    real = rows >= 0
    return SeenTokens(key, tp_rank, rows[real], columns[real], flat.reshape(len(flat), -1)[real])


@contextmanager
def _forced_routing(actor: MegatronActor, forced: Tensor | None) -> Iterator[dict[str, list[Tensor]]]:
    """Makes routers take given experts inside. Yields the maps of their own choices by key, filled by the forwards."""
    found = routers(actor.chunks)
    before = [router.router_replay for router in found.values()]
    own: dict[str, list[Tensor]] = {}
    try:
        if forced is not None:
            for index, router in found.items():
                router.router_replay = given = _GivenExperts(forced[:, :, index], actor.router_scope)
                own[experts_key(index)] = given.own
        yield own
    finally:
        for router, replay in zip(found.values(), before, strict=True):
            router.router_replay = replay


class _GivenExperts:
    """Replaces Megatron's RouterReplay in one router; tokens without given experts keep the router's choice."""

    def __init__(self, experts: Tensor, scope: RouterScope):
        self._experts, self._scope = experts, scope  # [N, S, k]
        self.own: list[Tensor] = []  # by micro-batch: [t, experts] bool, on the host

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups=None, group_topk=None, default_compute_topk=None):
        """Returns scores [t, k] at the given experts, and these [t, k]."""
        assert default_compute_topk is not None
        assert self._scope.now is not None, "called by the forward of a micro-batch"
        rows, columns = (places.cpu() for places in self._scope.now.own)
        experts = self._experts.cpu()[rows.clamp(min=0), columns.clamp(min=0)].to(scores.device)
        given = (rows >= 0).to(scores.device) & (experts >= 0).all(1)
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.own.append(torch.zeros_like(scores, dtype=torch.bool).scatter(1, own, True).cpu())
        chosen = torch.where(given[:, None], experts.to(own.dtype), own)
        # in the order of their scores, as the router's own: sums over the same experts are then the same bits
        chosen = chosen.gather(1, scores.gather(1, chosen).argsort(dim=1, descending=True, stable=True))
        return scores.gather(1, chosen), chosen
