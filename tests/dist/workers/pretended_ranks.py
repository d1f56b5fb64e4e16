"""One rank of the tests of pretended trainer ranks: in a real world first, then in none. usage: FOLDER"""

import json
import os
import sys
import warnings
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import torch
import torch.distributed as dist

from megagrpo.actor.dry_run import record_trainer_rank
from megagrpo.certify.measure import joined
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.planning.recordings import representative_ranks
from megagrpo.weights.actor_weights import load_initial_weights


def compare(config: ActorConfig, model: str, store: Path) -> dict:
    """Whether this rank's real copies are those that the rank which stands for it would have, were it alone."""
    with joined(store, config=config, optimizer=OptimizerConfig(), model_path=model, device=DEVICE) as actor:
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
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        config = ActorConfig.model_validate({"world_size": world, "parallel": job["parallel"], "deadline_s": 120.0})
        results.append(compare(config, job["model"], folder / f"store{number}"))
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
