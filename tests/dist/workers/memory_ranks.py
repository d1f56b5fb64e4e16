"""One rank whose memory is measured: in a real world first, then alone in a pretended one. usage: FOLDER"""

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megagrpo.actor import step
from megagrpo.actor.live_bytes import LiveBytes
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.pretended_update import Work, measured_bytes, pretended_bytes
from megagrpo.certify.measure import joined
from megagrpo.config.schema import ActorConfig, AlgorithmConfig

ALGORITHM = AlgorithmConfig.model_validate(
    {"advantage": {"name": "grpo"}, "loss": {"name": "ppo_clip"}, "aggregation": "token-mean"}
)


def real_bytes(config: ActorConfig, work: Work, model: str, store: Path) -> dict:
    """What this rank's tensors hold, and what torch's allocator says of one more update."""
    config = config.model_copy(update={"micro_batch_tokens": sum(work.lengths)})
    with (
        LiveBytes() as live,
        joined(store, config=config, optimizer=config.optimizer, model_path=model, device=DEVICE) as actor,
    ):
        _draw(actor)
        found = measured_bytes(actor, ALGORITHM, work, live)
        return {**asdict(found), "allocator": _allocated(actor, work) if config.world_size == 1 else 0}


def _draw(actor: MegatronActor) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
    actor.weights_loaded()


def _allocated(actor: MegatronActor, work: Work) -> int:
    """The most bytes that torch's allocator gave and had not got back, since before an update."""
    batch = work.batch(2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.update(actor, batch, ALGORITHM, 1.0, int(batch.lengths.max()))
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        options = {"world_size": world, "deadline_s": 120.0, **job["actor"]}
        config, work = ActorConfig.model_validate(options), Work(tuple(job["lengths"]))
        real = real_bytes(config, work, job["model"], folder / f"store{number}")
        assert not dist.is_initialized()
        pretended = pretended_bytes(Path(job["model"]), config, ALGORITHM, work, rank, cuda=False)
        results.append({"real": real, "pretended": asdict(pretended)})
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
