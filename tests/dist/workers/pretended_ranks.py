"""One rank of the tests of pretended trainer ranks: in a real world first, then in none."""

import os
from pathlib import Path

import torch.distributed as dist

from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.tools.certify.measure import joined
from megagrpo.tools.plan.recordings import representative_ranks
from megagrpo.tools.plan.trainer_dry_run import record_trainer_rank
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.harness import DEVICE, answer


def compare(config: ActorConfig, model: str, store: Path) -> dict:
    """Whether this rank's real copies are those that the rank which stands for it would have, were
    it alone."""
    with joined(
        store, config=config, optimizer=OptimizerConfig(), model_path=model, device=DEVICE
    ) as actor:
        weights, arch, rank = load_initial_weights(actor, model), actor.arch, actor.mesh.rank
    assert not dist.is_initialized()
    representative = representative_ranks(config)[rank]
    place, copies = record_trainer_rank(arch, config, weights.hf_specs, representative)
    own_place = record_trainer_rank(arch, config, weights.hf_specs, rank)[0]
    return {
        "representative": representative,
        "same_place": place == own_place,
        "equal": copies == weights.copies,
        "copies": len(copies),
    }


def main(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])

    def of_job(job: dict, store: Path) -> dict:
        options = {"world_size": world, "parallel": job["parallel"], "deadline_s": 120.0}
        return compare(ActorConfig.model_validate(options), job["model"], store)

    answer(folder, of_job)
