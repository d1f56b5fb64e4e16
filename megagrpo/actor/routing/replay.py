"""Routing replay, R3 and R2: routers use the experts of an earlier forward, or record their own
choice.

A router of Megatron calls an object for its top-k (`router_replay` of TopKRouter) with the scores
to choose by. Ours looks a token's experts up by its sample and column, so it works with packing and
every parallel layout. Weights of experts are computed from the router's own scores, which keep
their gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megagrpo.actor.routing.tokens import RouterScope
from megagrpo.models.architecture import Architecture
from megagrpo.types import Batch, Routing

TopK = Callable[..., tuple[Tensor, Tensor]]


class RoutingReplay:
    """Serves all routers of this rank. For a batch without experts, and outside a scope, they
    choose for themselves.

    Counts between `begin` and `take` how often a router would have chosen other experts.
    """

    def __init__(
        self,
        routers: Mapping[int, TopKRouter],
        scope: RouterScope,
        arch: Architecture,
        device: torch.device,
    ):
        self._scope = scope
        self._top_k = arch.routed.per_token
        self._type = getattr(torch, arch.routed.id_type)
        # of this pipeline stage, virtual ones included; counted among the model's layers with
        # experts
        self.layers = tuple(map(arch.routed_layers.index, sorted(routers)))
        # compared and differing (token, layer)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._recorded: Tensor | None = None  # [T + 1, layers, k], the last row for padding
        for slot, layer in enumerate(sorted(routers)):
            routers[layer].router_replay = SimpleNamespace(
                get_replay_topk=partial(self._topk, slot)
            )

    def begin(self) -> None:
        """Starts an update, or a forward of all its micro-batches."""
        self._counts.zero_()

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[Callable[[], Batch]]:
        """Records the experts that routers choose for the batch's tokens in the forwards inside.

        Yields a collective function that returns the batch with them, on every rank those of its
        own layers.
        """
        count = len(batch.tokens)
        device = self._counts.device
        experts = torch.zeros(
            (count + 1, len(self.layers), self._top_k), dtype=self._type, device=device
        )
        self._recorded = experts

        def recorded() -> Batch:
            found = experts[:count].contiguous()
            group = mpu.get_tensor_and_context_parallel_group()
            # each token was seen by one of these ranks, the others have 0; NCCL adds no int16
            dist.all_reduce(found.view(torch.uint8), group=group)
            return replace(batch, routing=Routing(found.cpu(), batch.lengths))

        try:
            yield recorded
        finally:
            self._recorded = None

    def take(self) -> dict[str, float]:
        """Collective. Returns the share of (token, layer) with experts that the router itself would
        not have chosen."""
        self._scope.check_recomputed()
        counts = self._counts.clone()
        dist.all_reduce(counts)
        compared, differing = counts.tolist()
        return {"router/replay_differs": differing / compared} if compared else {}

    def _topk(
        self,
        slot: int,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Returns, of scores [T, experts], those and the ids [T, k] of the experts that the router
        of a layer takes.

        own_topk: the router's choice. Replayed experts come in the order of their scores, as the
        router's own do: with the same experts every bit is the same.
        """
        values, own = own_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        scope = self._scope.now
        replayed = None if scope is None else scope.replayed
        if replayed is None:
            if self._recorded is not None and scope is not None:
                self._recorded[scope.batch_index, slot] = own.to(self._type)
            return values, own
        assert len(scores) == len(replayed.index), (
            f"{len(scores)} tokens came to a router, not {len(replayed.index)}"
        )
        with torch.no_grad():
            given = replayed.experts[replayed.index, slot].long()
            order = scores.gather(1, given).argsort(dim=1, descending=True, stable=True)
            ids = torch.where(replayed.known[:, None], given.gather(1, order), own)
            if not self._scope.again:
                others = (ids.sort(1).values != own.sort(1).values).any(1)
                self._counts += torch.stack([replayed.known.sum(), others.sum()])
        return scores.gather(1, ids), ids
