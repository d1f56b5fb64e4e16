"""Adds auxiliary losses to the routers, divided by what is counted over the whole update; algo/router_losses.py.

Megatron's own are means over the tokens of a micro-batch on one rank, padding among them, and so depend on how samples
were cut: they stay off. Its way of adding a loss where no loss is returned is kept: a function that passes the routing
weights on, and in the backward starts the loss's own.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megagrpo.actor.megatron.model import HiddenStatesModel, routers
from megagrpo.algo.router_losses import balance_part, chosen_experts, z_part
from megagrpo.config.actor import RouterLossConfig
from megagrpo.families.architecture import Architecture
from megagrpo.types import Batch, MicroBatch, on_device

Routing = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _RoutedTokens:
    """Holds whose the tokens are that a router sees in one micro-batch, T of them, of n sequences."""

    sequence: Tensor  # [T] int64, from 0; n for padding
    lengths: Tensor  # [n] int64, real tokens of the whole sequences


class RouterLosses:
    """Adds the losses to every forward of a micro-batch that has a gradient, and adds up their values."""

    def __init__(
        self, chunks: list[HiddenStatesModel], arch: Architecture, config: RouterLossConfig, device: torch.device
    ):
        self._config, self._top_k, self._sigmoid = config, arch.experts_per_token, arch.sigmoid_router
        self._layers = arch.num_layers - arch.dense_layers
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # balance, z
        self._num_sequences = self._num_tokens = 1
        self._tokens: _RoutedTokens | None = None  # of the forward under way
        self._recomputed: dict[int, deque[_RoutedTokens]] = {}
        for chunk in chunks:
            for layer, router in routers(chunk).items():
                self._recomputed[layer] = deque()
                router.routing = partial(self._routing, layer, router, router.routing)

    def begin(self, num_sequences: int, num_tokens: int) -> None:
        """Begins an update of so many samples and real tokens, over all ranks."""
        self._num_sequences, self._num_tokens = max(num_sequences, 1), max(num_tokens, 1)
        self._sums.zero_()
        for waiting in self._recomputed.values():
            waiting.clear()

    @contextmanager
    def of(self, micro: MicroBatch, batch: Batch) -> Iterator[None]:
        """Adds the losses of this micro-batch to the forward inside, or to the same forward computed again later."""
        members, lengths = (on_device(t, micro.rows.device) for t in (micro.members, batch.lengths[micro.members]))
        found = torch.searchsorted(members, micro.rows.clamp(min=0))
        sequence = torch.where(micro.rows >= 0, found, len(micro.members)).t()  # [s, b], the order of a router's tokens
        tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        own = sequence.chunk(tp_size)[tp_rank].flatten()  # sequence parallelism cuts the sequence
        self._tokens = _RoutedTokens(own, lengths)
        try:
            yield
        finally:
            self._tokens = None

    def take(self) -> dict[str, float]:
        """Collective. Returns the update's losses without their coefficients, mean over layers with experts."""
        assert not any(self._recomputed.values()), "a layer's forward was not computed again in the backward"
        sums = self._sums.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        balance, z = sums.tolist()
        found = {}
        if self._config.balance:
            found["router/balance_loss"] = balance / self._num_sequences / self._layers
        if self._config.z:
            found["router/z_loss"] = z / self._num_tokens / self._layers
        return found

    def _routing(
        self, layer: int, router: TopKRouter, routing: Routing, logits: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Routes as Megatron does; what comes back brings the losses of logits [s, b, E] to the backward."""
        probs, routing_map = routing(logits, *args, **kwargs)
        tokens, waiting = self._tokens, self._recomputed[layer]
        if tokens is not None and not torch.is_grad_enabled():
            # Recomputed in the backward, after other micro-batches' forwards perhaps. Backwards of one layer come in
            # the order of its forwards, in every schedule of Megatron's.
            waiting.append(tokens)
            tokens = None
        elif tokens is None and waiting and torch.is_grad_enabled():
            tokens = waiting.popleft()
        if tokens is not None:
            probs = _Beside.apply(probs, self._loss(router, logits.flatten(0, 1), tokens))
        return probs, routing_map

    def _loss(self, router: TopKRouter, logits: Tensor, tokens: _RoutedTokens) -> Tensor:
        """Collective over ranks that share sequences. Returns the weighted losses of these tokens' logits [T, E]."""
        loss, n = logits.new_zeros((), dtype=torch.float32), len(tokens.lengths)
        if self._config.balance:
            counts = chosen_experts(logits, tokens.sequence, n, self._top_k)
            if router.tp_cp_group.size() > 1:
                dist.all_reduce(counts, group=router.tp_cp_group)
            balance = balance_part(logits, tokens.sequence, counts, tokens.lengths, self._top_k, self._sigmoid)
            self._sums[0] += balance.detach()
            loss = loss + self._config.balance / self._num_sequences * balance
        if self._config.z:
            z = z_part(logits, tokens.sequence < n)
            self._sums[1] += z.detach()
            loss = loss + self._config.z / self._num_tokens * z
        return loss


class _Beside(torch.autograd.Function):
    """Passes a tensor on; its backward starts that of a loss as well, with gradient 1."""

    @staticmethod
    def forward(ctx, tensor, loss):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones((), dtype=torch.float32)
