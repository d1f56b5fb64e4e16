"""One rank that computes an update of samples of very different lengths, for layouts to be compared."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.schedule import micro_batches
from megagrpo.batching import rounds
from megagrpo.batching.updates import one_pass
from megagrpo.mesh import Mesh
from megagrpo.tools.certify.measure import ratios, whole
from megagrpo.types import Batch
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, gradient, next_floats
from tests.dist.workers.harness import with_actors
from tests.dist.workers.samples import VOCAB
from tests.padding import batch_of_rows


def batch_of(mesh: Mesh, lengths: list[int]) -> Batch:
    """This rank's share of samples of these lengths, in which a token in seven is none of the policy's."""
    number, width = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCAB, (number, width), generator=generator)
    noise = torch.randn(number, width, generator=generator)
    advantages = torch.randn(number, 1, generator=generator)
    column = torch.arange(width)
    of = torch.tensor(lengths)
    inside = (column < of[:, None]).float()
    mask = inside * (column >= of[:, None] // 3) * (column % 7 > 0)
    near = (0.2 * noise - 6.0) * mask
    mine = torch.arange(mesh.dp_rank, number, mesh.dp_size)
    return batch_of_rows(
        sample_ids=mine,
        group_ids=mine,
        num_groups=number,
        tokens=(tokens * inside)[mine],
        lengths=of[mine],
        prompt_lengths=of[mine] // 3,
        loss_mask=mask[mine],
        rollout_logprobs=near[mine],
        rewards=torch.zeros(len(mine), dtype=torch.float64),
        valid=torch.ones(len(mine), dtype=torch.bool),
        truncated=torch.zeros(len(mine), dtype=torch.bool),
        advantages=(advantages * mask)[mine],
        old_logprobs=near[mine],
        ref_logprobs=near[mine] * 1.02,
        updates=one_pass(number),
    )


def measure(actor: MegatronActor, job: dict) -> dict:
    """Loss, sums, log-probabilities and gradients; of another layout, how far they are from the reference's."""
    weights = actor.trained_weights(load_initial_weights(actor, job["model"]))
    batch = batch_of(actor.mesh, job["lengths"])
    rows = range(len(batch.lengths))
    moved = {}
    if job.get("write"):
        with next_floats(actor):
            gradient(actor, batch, RICH)
            moved = whole(weights, actor.gradients(), actor.mesh)
    if actor.config.routing_replay:  # the experts of this forward, in the update of the same samples
        batch = replace(step.with_old_logprobs(actor, batch, 1.0), old_logprobs=batch.old_logprobs)
    logprobs = step.token_logprobs(actor, batch, 1.0)
    seen = torch.full_like(logprobs, torch.nan)
    sums = step.backward(
        actor, batch, rows, RICH, 1.0, step.denominators_of(actor, batch, rows, RICH, 32), seen.to(actor.mesh.device)
    )
    values = actor.gradients()
    every = list(batch.tokens.split(batch.lengths.tolist())), list(logprobs.split(batch.lengths.tolist()))
    by_sample = dict(zip(batch.sample_ids.tolist(), every[1], strict=True))
    if job.get("write"):
        rounding = max(ratios(weights, values, moved, actor.mesh).values())
        kept = {"gradients": whole(weights, values, actor.mesh), "sums": sums, "logprobs": by_sample}
        torch.save({**kept, "rounding": rounding}, job["reference"])
        return {}
    reference = torch.load(job["reference"], map_location="cpu")
    apart = [float((found - reference["logprobs"][i]).abs().max()) for i, found in by_sample.items()]
    records = step.holds_token_values()
    seen_apart = float((seen - logprobs)[batch.loss_mask].abs().max()) if records and len(seen) else 0.0
    micros = micro_batches(actor, batch, rows)
    known = {name for name in sums if name != "padded"}
    return {
        "missing": sorted(known ^ (reference["sums"].keys() - {"padded"})),
        "sums": {
            name: abs(sums[name] - reference["sums"][name]) / max(abs(reference["sums"][name]), 1.0) for name in known
        },
        "logprobs": max(apart, default=0.0),
        "seen": seen_apart if seen_apart == seen_apart else torch.inf,
        "gradients": ratios(weights, values, reference["gradients"], actor.mesh),
        "rounding": reference["rounding"],
        "contexts": [micro.context for micro in micros],
        "most": max(height * width for height, width in micros.shapes),
    }


def main(folder: Path) -> None:
    # the fewest ranks that hold a sample, whatever it costs: every size is used
    with patch.object(rounds, "cheapest_cut", lambda *_, **__: 0):
        with_actors(folder, measure)
