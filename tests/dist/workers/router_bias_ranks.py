"""One rank that makes an update and tells where the routers' biases are after it. usage: router_bias_ranks.py FOLDER"""

import json
import os
import sys
import warnings
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import torch
import torch.distributed as dist

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.model import routers
from megagrpo.certify.measure import joined
from megagrpo.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import OPTIMIZER, PLAIN, batch_of, gradient


def biases(actor: MegatronActor) -> dict[int, list[float]]:
    """Of the routers of all pipeline stages, by layer."""
    mine = {i: r.expert_bias.tolist() for chunk in actor.chunks for i, r in routers(chunk).items()}
    everyone: list = [None] * actor.mesh.world_size
    dist.all_gather_object(everyone, mine)
    found: dict[int, list[float]] = {}
    for part in everyone:
        assert all(found.get(layer, bias) == bias for layer, bias in part.items()), "ranks differ"
        found |= part
    return found


def counted_by_hand(actor: MegatronActor) -> dict[int, list[int]]:
    """How many tokens of all samples chose each expert, in a forward of its own of one rank, without padding."""
    counts: dict[int, torch.Tensor] = {}

    def hook(layer: int):
        return lambda module, inputs, output: counts.update({layer: counts.get(layer, 0) + output[1].sum(0)})

    hooks = [r.register_forward_hook(hook(i)) for chunk in actor.chunks for i, r in routers(chunk).items()]
    step.token_logprobs(actor, batch_of(actor.mesh), 1.0)
    for handle in hooks:
        handle.remove()
    return {layer: count.tolist() for layer, count in counts.items()}


def main(folder: Path) -> None:
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        config = ActorConfig(
            world_size=int(os.environ["WORLD_SIZE"]),
            parallel=ParallelConfig(**job.get("parallel", {})),
            packing=job.get("packing", True),
            micro_batch_tokens=job.get("budget", 64),
            recompute=job.get("recompute", "none"),
            router_bias_update=job["rate"],
            deadline_s=120.0,
        )
        with joined(
            folder / f"store{number}",
            config=config,
            optimizer=OptimizerConfig(**OPTIMIZER),
            model_path=job["model"],
            device=DEVICE,
        ) as actor:
            load_initial_weights(actor, job["model"])
            result: dict = {"before": biases(actor)}
            if "count" in job:
                result["counts"] = counted_by_hand(actor)
            for _ in range(2):  # what was counted before is not counted again
                gradient(actor, batch_of(actor.mesh), PLAIN)
            actor.optimizer_step()
            results.append(result | {"after": biases(actor)})
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
