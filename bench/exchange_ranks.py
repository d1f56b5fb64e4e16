"""The processes that bench/exchange.py starts.

python bench/exchange_ranks.py command FILE     prints how the engines of the job in FILE are
started, as JSON
python bench/exchange_ranks.py train FILE       one trainer rank, under the variables that torchrun
would set
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from megagrpo.config.schema import ActorConfig, ExperimentConfig, ParallelConfig
from megagrpo.types import EngineEvent

HOST, EVERY = "127.0.0.1", 100


def experiment(job: dict) -> ExperimentConfig:
    limit_s = job["limit_s"]
    return ExperimentConfig.model_validate(
        {
            "name": "exchange",
            "output_dir": job["folder"],
            "model": {"path": job["model"]},
            "data": {"path": "none.jsonl"},
            "rollout": {
                "sglang": {"max_total_tokens": 1000},
                "max_running_requests": 8,
                "health_timeout_s": limit_s,
            }
            | job["rollout"],
            "weights": {
                "transport": job["transport"].partition(",")[0],
                "delta": _changes(job),
                "bucket_mb": job["bucket_mb"],
                "timeout_s": limit_s,
            },
            "actor": {"deadline_s": limit_s + 60.0, "device": "cpu"},
        }
    )


def _changes(job: dict) -> bool:
    return job["transport"].endswith(", changes")


def command(job: dict) -> dict:
    """Words, variables and Python path of every engine's server process."""
    from megagrpo.rollout.service.engine_command import (
        ServerPlace,
        engine_command,
        engine_environment,
        engine_python_path,
    )
    from megagrpo.rollout.service.engine_model import as_engines_see_it
    from megagrpo.system.run_folder import RunFolder

    config = as_engines_see_it(experiment(job), RunFolder(Path(job["folder"], "run")))
    places = [
        ServerPlace(0, HOST, port, f"{HOST}:{port}", cuda=False, num_cores=os.cpu_count())
        for port in job["ports"]
    ]
    return {
        "words": [engine_command(config, place) for place in places],
        "environment": engine_environment(config, places[0]),
        "python_path": [str(path) for path in engine_python_path(places[0])],
    }


class Registry:
    """The service's record of engines that nobody will start again."""

    def __init__(self, job: dict):
        self.api_key = job["api_key"]
        self._infos = [
            SimpleNamespace(
                id=f"e{i}", url=url, state="stale", alive=True, incarnation=1, restarts=0
            )
            for i, url in enumerate(job["urls"])
        ]

    def engines(self) -> list:
        return self._infos

    def report(
        self, event: EngineEvent, engines: Mapping[str, int], weight_version: int = 0
    ) -> set[str]:
        assert event != "lost", f"lost: {', '.join(engines)}"
        return set()


def train(job: dict) -> None:
    """Publishes, with other weights each time; rank 0 writes reports, begin and end of each to
    publishes.json."""
    from megagrpo.actor.host import prepare_host

    device = prepare_host()  # before Megatron is imported
    from megagrpo.actor.megatron_actor import MegatronActor, leave_distributed
    from megagrpo.models.folder import Model
    from megagrpo.weights.actor_weights import load_initial_weights
    from megagrpo.weights.exchange import Exchange

    limit_s = job["limit_s"] + 60.0
    world, parallel = int(os.environ["WORLD_SIZE"]), ParallelConfig(**job["parallel"])
    settings = ActorConfig(world_size=world, parallel=parallel, deadline_s=limit_s)
    arch = Model.read(job["model"]).arch
    actor = MegatronActor(arch=arch, config=settings, num_updates=10, seed=0, device=device)
    weights = load_initial_weights(actor, job["model"])
    exchange = Exchange(experiment(job), actor.mesh, weights, Registry(job), Path(job["folder"]))
    publishes = []
    for version in range(job["publishes"]):
        for parameter in {id(p): p for p in actor.parameters().values()}.values():
            parameter.detach().view(-1)[version :: EVERY if _changes(job) else 1].neg_()
        begin = time.monotonic()
        report = exchange.publish(version)
        publishes.append({"begin": begin, "end": time.monotonic(), "report": report})
    if actor.mesh.is_main:
        Path(job["folder"], "publishes.json").write_text(json.dumps(publishes))
    exchange.close()
    leave_distributed(actor)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "command":
        print(json.dumps(command(asked)))
    else:
        train(asked)
