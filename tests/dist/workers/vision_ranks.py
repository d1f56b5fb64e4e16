"""The jobs of actor_ranks.py on vision-language models: samples of vision_samples.py, a frozen or a trained tower."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.models.kinds.vision.layer import Sight
from megagrpo.types import Batch
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from tests.dist.workers import actor_ranks, recorded
from tests.dist.workers.harness import with_actors
from tests.dist.workers.vision_samples import NUM_SAMPLES, VOCAB, images_of, pixels, samples

_batch_of = actor_ranks.batch_of


def batch_of(mesh, shift: int = 0, keep: int = NUM_SAMPLES) -> Batch:
    """Tokens stay as they are: `shift` would move placeholders."""
    batch = _batch_of(mesh, 0, keep)
    return replace(batch, images=tuple(images_of(int(number)) for number in batch.sample_ids))


def swapped_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """How far log-probabilities move by one planted mistake, of samples with images and of others."""
    batch = batch_of(actor.mesh)
    with torch.no_grad():
        before = step.token_logprobs(actor, batch, 1.0)
        with MISTAKES[job["mistake"]](batch) as wrong:
            after = step.token_logprobs(actor, wrong, 1.0)
    moved = (after - before).abs()
    seen = torch.tensor([bool(of) for of in batch.images]).repeat_interleave(batch.lengths)
    return {"moved": float(moved[seen].max()), "others": float(moved[~seen].max())}


def frozen_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Which parts of the tower an update moves, and which have optimizer state."""

    def part(name: str) -> str:
        return name.partition(".visual.module.")[2].split(".")[0]

    before = {name: p.detach().clone() for name, p in actor.parameters().items()}
    actor_ranks.gradient(actor, batch_of(actor.mesh), actor_ranks.PLAIN)
    actor.optimizer_step()
    moved = [name for name, p in actor.parameters().items() if not torch.equal(p, before[name])]
    kept = {id(p) for group in actor.optimizer.param_groups for p in group["params"]}
    with_state = [name for name, p in actor.parameters().items() if id(p) in kept]
    tower = {
        key: sorted({part(name) for name in names if ".visual." in name})
        for key, names in (("moved", moved), ("with_state", with_state))
    }
    return {**tower, "text_moved": any(".visual." not in name for name in moved)}


@contextmanager
def _grids_swapped(batch: Batch) -> Iterator[Batch]:
    images = [tuple(replace(ref, grid=(1, ref.grid[2], ref.grid[1])) for ref in of) for of in batch.images]
    yield replace(batch, images=tuple(images))


@contextmanager
def _one_late(batch: Batch) -> Iterator[Batch]:
    yield replace(batch, images=tuple(tuple(replace(r, start=r.start + 1) for r in of) for of in batch.images))


@contextmanager
def _deepstack_late(batch: Batch) -> Iterator[Batch]:
    with_deep = Sight.with_deep

    def late(self: Sight, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if index == 0 else with_deep(self, index - 1, hidden)

    with patch.multiple(Sight, with_deep=late):
        yield batch


MISTAKES = {"grids swapped": _grids_swapped, "a token late": _one_late, "deepstack late": _deepstack_late}
JOBS = {**actor_ranks.JOBS, "swapped": swapped_job, "frozen": frozen_job}


def main(folder: Path) -> None:
    def measure(actor: MegatronActor, job: dict) -> dict:
        vision = actor.arch.vision
        actor.images = lambda key: pixels(key, vision.patch_values)
        weights = load_initial_weights(actor, job["model"], overwritten="load" in job)
        return JOBS[job["do"]](actor, weights, job, folder)

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(actor_ranks, samples=samples, NUM_SAMPLES=NUM_SAMPLES, batch_of=batch_of))
        stack.enter_context(patch.multiple(recorded, VOCAB=VOCAB))
        stack.enter_context(patch.multiple(actor_ranks, VOCAB=VOCAB))
        with_actors(folder, measure)
