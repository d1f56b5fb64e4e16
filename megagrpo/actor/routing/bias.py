"""Moves the routers' biases against the load of their experts: DeepSeek-V3's balance without an auxiliary loss.

arXiv 2412.19437, section 2.1.2: after an update b_i += u sign(mean - c_i), where c_i counts the tokens of the update
that chose expert i. Counts are of all ranks and of real tokens alone, so they do not depend on the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megagrpo.actor.megatron.model import HiddenStatesModel, routers
from megagrpo.families.architecture import Architecture
from megagrpo.types import MicroBatch


class RouterBias:
    """Counts what an update routes where, and moves the biases after it by `rate`."""

    def __init__(self, chunks: list[HiddenStatesModel], arch: Architecture, rate: float, device: torch.device):
        self._counts = torch.zeros(arch.num_layers, arch.num_experts, dtype=torch.int64, device=device)
        self._rate = rate
        self._real: Tensor | None = None  # [tokens] bool of the forward that is counted
        self._routers = {layer: router for chunk in chunks for layer, router in routers(chunk).items()}
        for layer, router in self._routers.items():
            router.register_forward_hook(self._hook(layer))

    def clear(self) -> None:
        """Begins an update: nothing is counted yet."""
        self._counts.zero_()

    @contextmanager
    def counting(self, micro: MicroBatch) -> Iterator[None]:
        """Counts the forward inside; what is computed again in the backward comes after it and is not counted."""
        real = (micro.rows >= 0).t()  # [s, b], the order of a router's tokens
        tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self._real = real.chunk(tp_size)[tp_rank].flatten()  # sequence parallelism cuts the sequence
        try:
            yield
        finally:
            self._real = None

    def move(self) -> None:
        """Collective. Moves every bias by the rate, up where fewer tokens came than to the mean expert, in float32."""
        if dist.get_world_size() > 1:
            dist.all_reduce(self._counts)
        experts = self._counts.shape[1]
        # in integers: the mean times the number of experts
        direction = (self._counts.sum(1, keepdim=True) - experts * self._counts).sign()
        for layer, router in self._routers.items():
            router.expert_bias.add_(direction[layer], alpha=self._rate)

    def _hook(self, layer: int):
        def count(module, inputs, output):
            if self._real is not None:
                real_map = output[1] & self._real[:, None]  # an index by a mask would wait for the device
                self._counts[layer] += real_map.sum(0, dtype=torch.int64)

        return count
