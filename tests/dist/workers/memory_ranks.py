"""Measures the memory of a real rank: what stays, and what an update adds at its peak."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.schema import ActorConfig, AlgorithmConfig, OptimizerConfig
from megagrpo.types import Batch, Rewards
from tests.dist.workers.harness import with_actors
from tests.dist.workers.held import gradient_buffers

ALGORITHM = AlgorithmConfig.model_validate(
    {"advantage": {"name": "grpo"}, "loss": {"name": "ppo_clip"}, "aggregation": "token-mean"}
)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return, until they are freed; tensors made before are not seen.

    torch's own MemTracker (2.13) raises inside Megatron's schedule, recomputation and LoRA.
    """

    def __init__(self, known: Iterable[int] = ()) -> None:
        """known: storages that are older, of which views may be returned."""
        super().__init__()
        self.now, self.peak, self._known = 0, 0, frozenset(known)
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def batch_of(lengths: list[int], micro_batches: int) -> Batch:
    """Samples that are cut into this many micro-batches; all tokens but the first are trained on."""
    sizes = torch.tensor(lengths * micro_batches)
    count, total = len(sizes), int(sizes.sum())
    mask = torch.ones(total, dtype=torch.bool)
    mask[sizes.cumsum(0) - sizes] = False
    return Batch(
        sample_ids=torch.arange(count),
        group_ids=torch.arange(count),
        num_groups=count,
        tokens=torch.arange(total, dtype=torch.int32) * 37 % 131,  # different ones go to different experts
        lengths=sizes,
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        rewards=Rewards(torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.bool)),
        truncated=torch.zeros(count, dtype=torch.bool),
        advantages=torch.ones(total),
        updates=((tuple(range(count)),),),
    )


def measure(actor: MegatronActor, lengths: list[int], allocator: bool) -> dict[str, int]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
    actor.weights_loaded()
    batch = batch_of(lengths, 2)

    def update() -> None:
        step.update(actor, batch, ALGORITHM, 1.0, int(batch.lengths.max()))

    update()  # makes the optimizer's state
    parameters = storages(p for chunk in actor.chunks for p in chunk.parameters())
    with LiveBytes() as live:
        update()
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(storages(buffer.grad_data for buffer in gradient_buffers(actor)).values()),
        "optimizer": sum(size for key, size in storages(state_of(actor.optimizer)).items() if key not in parameters),
        "added": live.peak,
        "allocator": allocated(update) if allocator else live.peak,
    }


def storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Bytes by storage: shared memory counts once."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def state_of(optimizer) -> Iterator[Tensor]:
    """The optimizer's state, and what it steps: the weights themselves, or its float32 copies of them."""
    for part in optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in part.optimizer.param_groups:
            yield from group["params"]


def allocated(update: Callable[[], None]) -> int:
    """The most bytes that torch's allocator gave and had not got back, since before an update."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        update()
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def main(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])

    def settings(job: dict) -> tuple[ActorConfig, OptimizerConfig]:
        options = {"world_size": world, "deadline_s": 120.0, "micro_batch_tokens": sum(job["lengths"]), **job["actor"]}
        config = ActorConfig.model_validate(options)
        return config, config.optimizer

    with_actors(folder, lambda actor, job: measure(actor, job["lengths"], allocator=world == 1), settings)
