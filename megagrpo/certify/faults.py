"""Mistakes that were really made in public systems, planted on request: a certificate that cannot fail proves nothing.

Each is a context manager around one case; `after_build` acts on the actor that the case has built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megagrpo.actor import megatron_actor, step
from megagrpo.actor.megatron_actor import MegatronActor

Plant = Callable[[MegatronActor], None]


@contextmanager
def planted(fault: str | None) -> Iterator[Plant]:
    """Inside, actors are built and trained with the fault. ValueError for an unknown name."""
    if fault is None:
        yield lambda actor: None
        return
    if fault not in FAULTS:
        raise ValueError(f"no fault is called {fault!r}; there are: {', '.join(FAULTS)}")
    with FAULTS[fault]() as after_build:
        yield after_build


@contextmanager
def _experts_not_reduced_over_tp() -> Iterator[Plant]:
    """Megatron's own default at EP 1: expert gradients are summed over data-parallel ranks only."""
    build = megatron_actor.build_chunk

    def build_as_released(*args):
        chunk = build(*args)
        for name, parameter in chunk.named_parameters():
            if ".local_experts." in name:
                parameter.allreduce = True
        return chunk

    megatron_actor.build_chunk = build_as_released
    try:
        yield lambda actor: None
    finally:
        megatron_actor.build_chunk = build


@contextmanager
def _no_data_parallel_reduction() -> Iterator[Plant]:
    """Gradients stay those of this rank's own samples."""

    def after_build(actor: MegatronActor) -> None:
        for chunk in actor.model:
            chunk.finish_grad_sync = lambda **_: None

    yield after_build


@contextmanager
def _mean_of_micro_batch_means() -> Iterator[Plant]:
    """Every micro-batch divides by its own tokens, and micro-batches and ranks are averaged."""
    objective, plan = step.objective, step.plan_micro_batches
    count = 1

    def counting_plan(batch, rows, budget, packed, layout, mesh, *rest):
        nonlocal count
        micros = plan(batch, rows, budget, packed, layout, mesh, *rest)
        count = len(micros) * mesh.dp_size
        return micros

    def local_objective(inputs, algorithm, denominators):
        mask = inputs.loss_mask > 0
        own = replace(denominators, num_tokens=int(mask.sum()), num_sequences=int(mask.any(1).sum()))
        loss, sums = objective(inputs, algorithm, own)
        return loss / count, sums

    step.objective, step.plan_micro_batches = local_objective, counting_plan
    try:
        yield lambda actor: None
    finally:
        step.objective, step.plan_micro_batches = objective, plan


@contextmanager
def _router_differs_between_ranks() -> Iterator[Plant]:
    """As a random initialisation without a broadcast leaves it."""

    def after_build(actor: MegatronActor) -> None:
        if actor.mesh.rank > 0:
            with torch.no_grad():
                for name, parameter in actor.parameters().items():
                    if name.endswith("router.weight"):
                        parameter += 0.05 * torch.randn(
                            parameter.shape, generator=torch.Generator().manual_seed(actor.mesh.rank)
                        )

    yield after_build


@contextmanager
def _label_of_local_neighbour() -> Iterator[Plant]:
    """Labels shifted inside this rank's part of a sequence: wrong at the seams that context parallelism cuts."""
    targets = step.targets

    def local_targets(micro, batch):
        flat, rows, columns = targets(micro, batch)
        neighbour = (flat + 1).clamp(max=micro.rows.numel() - 1)
        same_row = micro.rows.flatten()[neighbour] == rows
        return flat, rows, torch.where(same_row, micro.columns.flatten()[neighbour], columns)

    step.targets = local_targets
    try:
        yield lambda actor: None
    finally:
        step.targets = targets


FAULTS = {
    "experts-not-reduced-over-tp": _experts_not_reduced_over_tp,
    "no-data-parallel-reduction": _no_data_parallel_reduction,
    "mean-of-micro-batch-means": _mean_of_micro_batch_means,
    "label-of-local-neighbour": _label_of_local_neighbour,
    "router-differs-between-ranks": _router_differs_between_ranks,
}
