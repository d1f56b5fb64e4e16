"""Measures the memory of a trainer rank that is not there: its real update runs in a pretended world, on shapes alone.

Megatron's model, gradient buffers, optimiser and schedule, our head and our loss are the ones that train; only numbers
are missing, see shapes_only.py. bench/plan_memory.py compares the figures with those of real ranks.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megagrpo.actor import megatron_actor, step
from megagrpo.actor.dry_run import pretended_world
from megagrpo.actor.live_bytes import LiveBytes, storage_bytes
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.optimizer import take_step
from megagrpo.actor.shapes_only import META, ShapesOnly, as_on_device
from megagrpo.algo import logprob
from megagrpo.config.actor import ActorConfig
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch, Rewards

_HEAD = "head"


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: what stays, and what phases add at their peak."""

    parameters: int
    gradients: int
    optimiser: int
    load: int  # while the model is built
    logprobs: int
    one_in_flight: int  # of forward and backward, with one micro-batch
    two_in_flight: int  # with two: on all pipeline stages but the last both are kept at once
    head: int  # what of the last figure the head made
    step: int  # of the optimiser's step, beside its state


@dataclass(frozen=True)
class Work:
    """What a rank is given: micro-batches alike, of sequences with these lengths in tokens."""

    lengths: tuple[int, ...]  # of one micro-batch
    imbalance: float = 1.0  # tokens that the experts of this rank get, over the mean

    def batch(self, micro_batches: int) -> Batch:
        """Returns samples that are cut into so many micro-batches; all tokens but the first are trained on."""
        lengths = torch.tensor(self.lengths * micro_batches)
        count, total = len(lengths), int(lengths.sum())
        mask = torch.ones(total, dtype=torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        return Batch(
            sample_ids=torch.arange(count),
            group_ids=torch.arange(count),
            num_groups=count,
            tokens=mask.int(),
            lengths=lengths,
            prompt_lengths=torch.ones(count, dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=torch.zeros(total),
            rewards=Rewards(torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.bool)),
            truncated=torch.zeros(count, dtype=torch.bool),
            advantages=torch.ones(total),
            updates=((tuple(range(count)),),),
        )


def pretended_bytes(
    model: Path, config: ActorConfig, algorithm: AlgorithmConfig, work: Work, rank: int, cuda: bool
) -> RankBytes:
    """Measures rank `rank` of `config.world_size`, of a model of which `model` has the config.json.

    cuda: count what kernels of a GPU keep, not those of a CPU. The process must be in no process group.
    """
    changes = {"device": "cpu", "transformer_engine": False, "micro_batch_tokens": sum(work.lengths)}
    config = config.model_copy(update=changes)
    live = LiveBytes()
    with pretended_world(config, rank), _own_mesh(), live, ShapesOnly(), as_on_device(cuda):
        actor = MegatronActor(
            model_path=model, config=config, optimizer=config.optimizer, num_updates=1, seed=0, device=META
        )
        return measured_bytes(actor, algorithm, work, live)


def measured_bytes(actor: MegatronActor, algorithm: AlgorithmConfig, work: Work, live: LiveBytes) -> RankBytes:
    """Collective. Measures an actor, real or pretended, whose tensors `live` has counted from the first."""
    _route(actor, work.imbalance)
    parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
    buffers = [b for chunk in actor.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    held = storage_bytes(parameters) + storage_bytes([buffer.grad_data for buffer in buffers])

    def state() -> int:
        return storage_bytes([*_tensors(actor.optimizer), *parameters]) - storage_bytes(parameters)

    load = live.peak - held - state()
    with _watched(actor, live, lambda: held + state()) as watch:
        watch.begin()
        step.token_logprobs(actor, work.batch(1), 1.0)
        logprobs = live.peak - held - state()
        peaks = []
        for count in (1, 2):
            batch = work.batch(count)
            watch.begin()
            step.update(actor, batch, algorithm, 1.0, int(batch.lengths.max()))
            peaks.append(watch.before_step)
    return RankBytes(
        parameters=storage_bytes(parameters),
        gradients=held - storage_bytes(parameters),
        optimiser=state(),
        load=load,
        logprobs=logprobs,
        one_in_flight=peaks[0],
        two_in_flight=peaks[1],
        head=watch.head,
        step=watch.step,
    )


def _tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yields the optimiser's state and what it steps: the weights themselves, or its float32 copies of them."""
    for part in optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in part.optimizer.param_groups:
            yield from group["params"]


class _Watch:
    """Splits an update's peak, beside what is held, into that of forward and backward and that of the step."""

    def __init__(self, live: LiveBytes, held: Callable[[], int]):
        self.live, self.held = live, held
        self.before_step = self.head = self.step = 0

    def begin(self) -> None:
        """Counts from here."""
        gc.collect()
        self.live.restart()

    def gradients_done(self) -> None:
        """Ends forward and backward: what gloo copies to sum gradients, NCCL does not."""
        self.before_step = self.live.peak - self.held()
        self.head = self.live.at_peak.get(_HEAD, 0)

    def stepping(self, step_of_optimiser: Callable) -> Any:
        """Runs the optimiser's step."""
        self.live.restart()
        out = step_of_optimiser()
        self.step = self.live.peak - self.held()
        return out


@contextmanager
def _watched(actor: MegatronActor, live: LiveBytes, held: Callable[[], int]) -> Iterator[_Watch]:
    def in_head(function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with live.labelled(_HEAD):
                return function(*args, **kwargs)

        return run

    watch, head = _Watch(live, held), logprob._LogProbs
    end = actor.clock.gradients_done

    def gradients_done() -> None:
        watch.gradients_done()
        end()

    with (
        patch.object(head, "forward", staticmethod(in_head(head.forward))),
        patch.object(head, "backward", staticmethod(in_head(head.backward))),
        patch.object(actor.clock, "gradients_done", gradients_done),
        patch.object(megatron_actor, "take_step", lambda *args: watch.stepping(partial(take_step, *args))),
    ):
        yield watch


def _route(actor: MegatronActor, imbalance: float) -> None:
    """Lets every router choose experts evenly, but that this rank's get `imbalance` times as many tokens."""

    def hook(module: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        own = mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()
        return output[0], routing(len(output[1]), actor.arch.num_experts, actor.arch.experts_per_token, own, imbalance)

    for chunk in actor.chunks:
        for layer in chunk.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.register_forward_hook(hook)


def routing(tokens: int, experts: int, each: int, own: tuple[int, int], imbalance: float) -> Tensor:
    """Returns which experts get which tokens, [tokens, experts] bool with `each` in every row.

    own: the expert-parallel rank that gets `imbalance` times the mean, and the number of them.
    """
    place, size = own
    local = experts // size
    mine, rest = torch.arange(place * local, (place + 1) * local), torch.arange(experts - local)
    rest = rest + local * (rest >= place * local)
    share = min(imbalance * each / size, each, local)
    counts = ((torch.arange(tokens) + 1) * share).floor() - (torch.arange(tokens) * share).floor()
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for group, number in ((mine, counts.long()), (rest, each - counts.long())):
        if len(group):
            first = number.cumsum(0) - number
            for k in range(int(number.max())):
                rows = number > k
                chosen[torch.arange(tokens)[rows], group[((first + k) % len(group))[rows]]] = True
    return chosen


@contextmanager
def _own_mesh() -> Iterator[None]:
    """Describes a rank that is alone in a pretended world, where nobody answers who is where."""

    def start(config: ActorConfig, device: torch.device) -> Mesh:
        return Mesh(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            dp_group=mpu.get_data_parallel_group(),
            replica_group=mpu.get_model_parallel_group(),
            leader=0,
            device=device,
        )

    def names_of_metrics(box: list, **_: Any) -> None:  # which the last pipeline stage would send
        box[:] = [box[0] or ["loss/total"]]

    with (
        patch("megagrpo.actor.megatron_actor.start_distributed", start),
        patch.object(dist, "broadcast_object_list", names_of_metrics),
    ):
        yield
