"""Lets routers take experts that are known already, or records those that they choose: routing replay, R3 and R2.

Megatron's routers ask an object for their top-k (`router_replay` of TopKRouter), with the scores to choose by. Ours
looks a token's experts up by its sample and its place in it, so that packing and every parallel layout come for free.
Weights of experts are computed from the router's own scores, which keep their gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megagrpo.actor.megatron.model import HiddenStatesModel, routers
from megagrpo.families.architecture import Architecture
from megagrpo.types import Batch, MicroBatch, Routing, on_device

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Lookup:
    """Says where the tokens of one micro-batch stand that a router of this rank sees, T of them."""

    experts: Tensor  # [t, layers, k] of tokens of the Batch, as in Batch.routing
    places: Tensor  # [T] int64, among the t
    known: Tensor  # [T] bool, the experts of this token are there


class RoutingReplay:
    """Serves all routers of this rank. Outside `of` and `recording` they choose for themselves.

    Between `begin` and `take` it is counted, in the forwards inside `of`, how often a router would have chosen others.
    """

    def __init__(self, chunks: list[HiddenStatesModel], arch: Architecture, device: torch.device):
        found = {layer: router for chunk in chunks for layer, router in routers(chunk).items()}
        self._top_k, self._type = arch.experts_per_token, getattr(torch, arch.expert_id_type)
        # of this pipeline stage, virtual ones included; counted from the model's first layer with experts
        self.layers = tuple(layer - arch.dense_layers for layer in sorted(found))
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # compared and differing (token, layer)
        self._lookup: _Lookup | None = None  # of the forward under way
        self._recording: _Lookup | None = None
        self._backward_follows = False  # after the forward under way
        self._waiting: list[deque[_Lookup]] = [deque() for _ in found]
        for slot, layer in enumerate(sorted(found)):
            found[layer].router_replay = _OfRouter(self, slot)

    def begin(self) -> None:
        """Begins an update, or a forward of all its micro-batches."""
        self._counts.zero_()
        for waiting in self._waiting:
            waiting.clear()

    @contextmanager
    def of(self, micro: MicroBatch, batch: Batch, forward_only: bool) -> Iterator[None]:
        """Replays the batch's experts in the forward inside, and in the same forward computed again later."""
        rows, columns = own_places(micro)
        if batch.routing is not None and len(batch.tokens):
            # padding looks a first token up and does not take it, also where there is padding alone
            first = torch.zeros(1, dtype=torch.int64)
            chosen, of_chosen = (micro.members, micro.places) if len(micro.members) else (first, first)
            lengths = batch.lengths[chosen]
            routing = batch.routing
            host = routing.experts[of_chosen], chosen, lengths.cumsum(0) - lengths, routing.lengths[chosen]
            experts, members, starts, known = (on_device(tensor, rows.device) for tensor in host)
            of = torch.searchsorted(members, rows).clamp(max=len(members) - 1)
            places = torch.where(rows >= 0, starts[of] + columns, 0)
            self._lookup = _Lookup(experts, places, (rows >= 0) & (columns < known[of]))
        elif self._recording is not None:
            recording, starts = self._recording, on_device(batch.starts, rows.device)
            # padding goes into a place of nobody's: an index by a mask would wait for the device
            nowhere = len(recording.experts) - 1
            if len(starts):
                places = torch.where(rows >= 0, starts[rows.clamp(min=0)] + columns, nowhere)
            else:
                places = torch.full_like(rows, nowhere)
            self._recording = replace(recording, places=places)
        self._backward_follows = not forward_only
        try:
            yield
        finally:
            self._lookup, self._backward_follows = None, False

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[Callable[[], Batch]]:
        """Records the experts of the batch's tokens in the forwards inside, which choose for themselves.

        What it gives is collective: it returns the batch with them, on every rank those of its own layers.
        """
        count, device = len(batch.tokens), self._counts.device
        nowhere = torch.zeros(0, dtype=torch.int64, device=device)
        experts = torch.zeros((count + 1, len(self.layers), self._top_k), dtype=self._type, device=device)
        self._recording = _Lookup(experts, nowhere, nowhere)

        def recorded() -> Batch:
            found = experts[:count].contiguous()
            group = mpu.get_tensor_and_context_parallel_group()
            if dist.get_world_size(group) > 1:  # each token was seen by one of these ranks, the others have 0
                dist.all_reduce(found.view(torch.uint8), group=group)  # NCCL adds no int16
            return replace(batch, routing=Routing(found.cpu(), batch.lengths))

        try:
            yield recorded
        finally:
            self._recording = None

    def take(self) -> dict[str, float]:
        """Collective. Returns the share of (token, layer) with experts that the router itself would not have chosen."""
        assert not any(self._waiting), "a layer's forward was not computed again in the backward"
        counts = self._counts.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        compared, differing = counts.tolist()
        return {"router/replay_differs": differing / compared} if compared else {}

    def choose(self, slot: int, scores: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scores and ids [T, k] of the experts that the router of a layer takes; values, own: its choice.

        scores: [T, experts]. Replayed experts come in the order of their scores, as the router's own do: with the same
        experts every bit is the same.
        """
        lookup, again = self._at_hand(slot)
        if lookup is None:
            if self._recording is not None:
                self._recording.experts[self._recording.places, slot] = own.to(self._type)
            return values, own
        assert len(scores) == len(lookup.places), f"{len(scores)} tokens came to a router, not {len(lookup.places)}"
        with torch.no_grad():
            given = lookup.experts[lookup.places, slot].long()
            order = scores.gather(1, given).argsort(dim=1, descending=True, stable=True)
            ids = torch.where(lookup.known[:, None], given.gather(1, order), own)
            if not again:
                others = (ids.sort(1).values != own.sort(1).values).any(1)
                self._counts += torch.stack([lookup.known.sum(), others.sum()])
        return scores.gather(1, ids), ids

    def _at_hand(self, slot: int) -> tuple[_Lookup | None, bool]:
        """Returns where a layer's tokens stand, None outside; and whether its forward is computed again."""
        lookup, waiting = self._lookup, self._waiting[slot]
        if lookup is not None:
            if self._backward_follows and not torch.is_grad_enabled():
                # Recomputed in the backward, after other micro-batches' forwards perhaps. Backwards of one layer come
                # in the order of its forwards, in every schedule of Megatron's.
                waiting.append(lookup)
            return lookup, False
        if waiting and torch.is_grad_enabled():
            return waiting.popleft(), True
        return None, False


class _OfRouter:
    """Stands where Megatron expects an object of its own class RouterReplay: one router's."""

    def __init__(self, replay: RoutingReplay, slot: int):
        self._replay, self._slot = replay, slot

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Returns values and ids [T, topk] that stand for the top-k of scores [T, experts]."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self._replay.choose(self._slot, scores, values, own)


def own_places(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns samples and places in them, [T] each, of the tokens that a router of this rank sees, in its order.

    -1 is padding.
    """
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    # [s, b] is a router's order; sequence parallelism cuts the sequence
    rows, columns = (places.t().chunk(tp_size)[tp_rank].flatten() for places in (micro.rows, micro.columns))
    return rows, columns
