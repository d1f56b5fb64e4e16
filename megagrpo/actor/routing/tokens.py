"""The tokens that a router of this rank receives; `RouterScope` is the scope of the current
micro-batch.

Users: RouterBias, RouterLosses, RoutingReplay, ExpertLoad and bisect's captures. It is the only
place that matches recomputed forwards with their micro-batches.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megagrpo.types import Batch, MicroBatch, on_device


@dataclass(frozen=True)
class ReplayedTokens:
    """Experts to replay for the T tokens that a router of this rank sees in one micro-batch."""

    experts: Tensor  # [t, layers, k], of the micro-batch's tokens, as in Batch.routing
    index: Tensor  # [T] int64, into the t
    known: Tensor  # [T] bool, the experts of this token are known


@dataclass(frozen=True)
class MicroBatchScope:
    """One micro-batch on the device, from a router's side: T tokens in the router's order."""

    micro: MicroBatch
    batch: Batch
    forward_only: bool  # no backward follows

    @cached_property
    def own(self) -> tuple[Tensor, Tensor]:
        """Samples and columns in them, [T] each; -1 is padding."""
        return own_places(self.micro)

    @cached_property
    def sequence(self) -> Tensor:
        """Sequence of each token among the micro-batch's n samples, [T] int64, from 0; n for
        padding."""
        rows, _ = self.own
        members = on_device(self.micro.members, rows.device)
        return torch.where(rows >= 0, torch.searchsorted(members, rows.clamp(min=0)), len(members))

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of the whole sequences, [n] int64."""
        return on_device(self.batch.lengths[self.micro.members], self.micro.rows.device)

    @cached_property
    def batch_index(self) -> Tensor:
        """Index of each token among all tokens of the batch, [T] int64; their number for
        padding."""
        rows, columns = self.own
        starts = on_device(self.batch.starts, rows.device)
        padding = len(self.batch.tokens)
        if not len(starts):
            return torch.full_like(rows, padding)
        return torch.where(rows >= 0, starts[rows.clamp(min=0)] + columns, padding)

    @cached_property
    def replayed(self) -> ReplayedTokens | None:
        """Experts of these tokens; None if the batch has none."""
        batch = self.batch
        micro = self.micro
        rows, columns = self.own
        if batch.routing is None or not len(batch.tokens):
            return None
        # padding looks a first token up and does not take it, also in a micro-batch of padding only
        first = torch.zeros(1, dtype=torch.int64)
        samples, tokens = (micro.members, micro.places) if len(micro.members) else (first, first)
        lengths = batch.lengths[samples]
        host = (
            batch.routing.experts[tokens],
            samples,
            lengths.cumsum(0) - lengths,
            batch.routing.lengths[samples],
        )
        experts, members, starts, known = (on_device(tensor, rows.device) for tensor in host)
        sample = torch.searchsorted(members, rows).clamp(max=len(members) - 1)
        index = torch.where(rows >= 0, starts[sample] + columns, 0)
        return ReplayedTokens(experts, index, (rows >= 0) & (columns < known[sample]))


class RouterScope:
    """The micro-batch that a router of this rank is called for: the one under way, or one that is
    computed again."""

    def __init__(self, routers: Mapping[int, TopKRouter]):
        self.now: MicroBatchScope | None = None  # of the present call of a router
        self.again = False  # the present call recomputes a forward in the backward
        self._under_way: MicroBatchScope | None = None
        self._recomputed: dict[int, deque[MicroBatchScope]] = {layer: deque() for layer in routers}
        for layer, router in routers.items():
            router.register_forward_pre_hook(lambda module, inputs, layer=layer: self._enter(layer))

    def begin(self) -> None:
        """Starts a schedule over micro-batches."""
        self.now = None
        for waiting in self._recomputed.values():
            waiting.clear()

    @contextmanager
    def of(self, scope: MicroBatchScope) -> Iterator[None]:
        """Makes `scope` the micro-batch of the forward inside."""
        self._under_way = scope
        try:
            yield
        finally:
            self.now = self._under_way = None

    @property
    def counted(self) -> MicroBatchScope | None:
        """The micro-batch of an update's forward, None in recomputed forwards and those without a
        backward."""
        return None if self.again or self.now is None or self.now.forward_only else self.now

    @property
    def differentiated(self) -> MicroBatchScope | None:
        """The micro-batch of a forward that the backward goes through, None in all others."""
        return (
            self.now if self.now and not self.now.forward_only and torch.is_grad_enabled() else None
        )

    def check_recomputed(self) -> None:
        """Asserts that every forward without gradients has been computed again."""
        assert not any(self._recomputed.values()), (
            "a layer's forward was not computed again in the backward"
        )

    def _enter(self, layer: int) -> None:
        waiting = self._recomputed[layer]
        self.now = self._under_way
        self.again = False
        if self.now is not None:
            if not self.now.forward_only and not torch.is_grad_enabled():
                # Recomputed in the backward, perhaps after other micro-batches' forwards. Backwards
                # of one layer come in the order of its forwards, in every schedule of Megatron.
                waiting.append(self.now)
        elif waiting and torch.is_grad_enabled():
            self.now = waiting.popleft()
            self.again = True


def own_places(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns samples and columns in them, [T] each, of the tokens that a router of this rank sees,
    in its order.

    -1 is padding.
    """
    tp_rank = mpu.get_tensor_model_parallel_rank()
    tp_size = mpu.get_tensor_model_parallel_world_size()
    # [s, b] is a router's order; sequence parallelism cuts the sequence
    rows, columns = (
        places.t().chunk(tp_size)[tp_rank].flatten() for places in (micro.rows, micro.columns)
    )
    return rows, columns
