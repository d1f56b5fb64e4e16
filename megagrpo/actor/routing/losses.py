"""Auxiliary losses of the routers, divided by counts of the whole update; mathematics in
algo/router_losses.py.

Megatron's own are means over the tokens of a micro-batch on one rank, padding included, and so
depend on how samples were cut: they stay off. Losses are added as Megatron adds its own: its
autograd function returns the routing weights and starts the loss's backward in theirs, with
gradient 1 as losses of tokens are summed.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megagrpo.actor.routing.tokens import MicroBatchScope, RouterScope
from megagrpo.algo.router_losses import balance_part, chosen_experts, z_part
from megagrpo.config.actor import RouterLossConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.layers.context import context_group

Routing = Callable[..., tuple[Tensor, Tensor]]


class RouterLosses:
    """Adds the losses to every forward of a micro-batch that has a gradient, and sums their
    values."""

    def __init__(
        self,
        routers: Mapping[int, TopKRouter],
        scope: RouterScope,
        arch: Architecture,
        config: RouterLossConfig,
        device: torch.device,
    ):
        self._config = config
        self._top_k = arch.routed.per_token
        self._sigmoid = arch.routed.sigmoid
        self._layers = arch.expert_layers
        self._scope = scope
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # balance, z
        self._num_sequences = self._num_tokens = 1
        for router in routers.values():
            router.routing = partial(self._routing, router, router.routing)

    def begin(self, num_sequences: int, num_tokens: int) -> None:
        """Starts an update; the numbers of its samples and real tokens are over all ranks."""
        self._num_sequences = max(num_sequences, 1)
        self._num_tokens = max(num_tokens, 1)
        self._sums.zero_()

    def take(self) -> dict[str, float]:
        """Collective. Returns the update's losses without their coefficients, mean over layers with
        experts."""
        self._scope.check_recomputed()
        sums = self._sums.clone()
        dist.all_reduce(sums)
        balance, z = sums.tolist()
        found = {}
        if self._config.balance:
            found["router/balance_loss"] = balance / self._num_sequences / self._layers
        if self._config.z:
            found["router/z_loss"] = z / self._num_tokens / self._layers
        return found

    def _routing(
        self, router: TopKRouter, routing: Routing, logits: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Routes as Megatron does; the probabilities carry the losses of logits [s, b, E] into the
        backward."""
        probs, routing_map = routing(logits, *args, **kwargs)
        scope = self._scope.differentiated
        if scope is not None:
            probs = MoEAuxLossAutoScaler.apply(
                probs, self._loss(router, logits.flatten(0, 1), scope)
            )
        return probs, routing_map

    def _loss(self, router: TopKRouter, logits: Tensor, scope: MicroBatchScope) -> Tensor:
        """Collective over ranks that share sequences. Returns the weighted losses of these tokens'
        logits [T, E]."""
        loss = logits.new_zeros((), dtype=torch.float32)
        n = len(scope.lengths)
        if self._config.balance:
            counts = chosen_experts(logits, scope.sequence, n, self._top_k)
            for group in (router.tp_group, context_group(scope.micro.context)):
                dist.all_reduce(counts, group=group)
            balance = balance_part(
                logits, scope.sequence, counts, scope.lengths, self._top_k, self._sigmoid
            )
            self._sums[0] += balance.detach()
            loss = loss + self._config.balance / self._num_sequences * balance
        if self._config.z:
            z = z_part(logits, scope.sequence < n)
            self._sums[1] += z.detach()
            loss = loss + self._config.z / self._num_tokens * z
        return loss
