"""Updates the routers' biases against the load of their experts: DeepSeek-V3's balance without an
auxiliary loss.

arXiv 2412.19437, section 2.1.2: after an update b_i += u sign(mean - c_i), where c_i counts the
tokens of the update that chose expert i. Counts are of all ranks and of real tokens only, so they
do not depend on the layout.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megagrpo.actor.routing.tokens import RouterScope
from megagrpo.models.architecture import Architecture


class ExpertLoad:
    """Counts the real tokens that an update routes to each expert of each layer: padding depends on
    how samples are cut, and its tokens are all alike."""

    def __init__(
        self,
        routers: Mapping[int, TopKRouter],
        scope: RouterScope,
        arch: Architecture,
        device: torch.device,
    ):
        experts = arch.experts.count if arch.experts else 0
        self.counts = torch.zeros(arch.num_layers, experts, dtype=torch.int64, device=device)
        self._scope = scope
        self._routers = routers
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._count, layer))

    def begin(self) -> None:
        """Starts from 0."""
        self.counts.zero_()

    def _count(
        self, layer: int, router: TopKRouter, inputs: tuple, output: tuple[Tensor, Tensor]
    ) -> None:
        scope = self._scope.counted
        if scope is not None:
            rows, _ = scope.own
            # an index by a mask would wait for the device
            real_map = output[1] & (rows >= 0)[:, None]
            self.counts[layer] += real_map.sum(0, dtype=torch.int64)


class RouterBias(ExpertLoad):
    """Counts the tokens of an update, and then moves the biases."""

    def move(self, rate: float) -> None:
        """Collective. Moves every bias by the rate, in float32: up if its expert had fewer tokens
        than the mean."""
        dist.all_reduce(self.counts)
        experts = self.counts.shape[1]
        # in integers: the mean times the number of experts
        direction = (self.counts.sum(1, keepdim=True) - experts * self.counts).sign()
        for layer, router in self._routers.items():
            router.expert_bias.add_(direction[layer], alpha=rate)
