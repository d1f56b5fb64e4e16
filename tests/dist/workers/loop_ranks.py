"""One rank of a start of a run: the real loop beside a service over HTTP. Only the exchange is
played: it says which weights it would publish."""

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from megagrpo.actor.megatron_actor import leave_distributed
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop import run as run_module
from megagrpo.loop.run import start_run
from megagrpo.loop.train import train
from megagrpo.mesh import RunStopped
from megagrpo.system.progress import Progress
from megagrpo.system.stop_request import STOP_FILE
from megagrpo.tools.ranks.replay import replay
from tests.dist.workers.harness import answer
from tests.played_exchange import PlayedExchange


def main(folder: Path) -> None:
    answer(folder, one_start)


def one_start(job: dict, store: Path) -> dict:
    """The digests of published weights by version, and why the start ended, "" at its end.

    job: experiment, URL, path of the stop request; the version whose publish fails, if any. Of a dump to replay: its
    folder instead of these; the table of metrics is returned.
    """
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    meeting = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    config = ExperimentConfig.model_validate(job["experiment"])
    if "replay" in job:
        text = io.StringIO()
        with redirect_stdout(text):
            replay(config, Path(job["replay"]), DEVICE)
        leave_distributed(None)
        return {"table": text.getvalue()}
    published: dict[int, str] = {}
    actor, error = None, ""

    class Exchange(PlayedExchange):
        def tell(self, version: int, digest: str) -> None:
            if version == job["fails"]:
                raise TimeoutError("no engine took the weights")
            super().tell(version, digest)

        def published(self, version: int, digest: str) -> None:
            published[version] = digest

    variables = {"MEGAGRPO_API_KEY": "key", STOP_FILE: job["stop_file"]}
    try:
        with (
            patch.object(run_module, "Exchange", Exchange),
            patch.dict(os.environ, variables),
            start_run(config, job["url"], DEVICE, Progress("t", enabled=False)) as run,
        ):
            actor = run.actor
            train(run)
    except RunStopped as exc:
        error = str(exc)
    finally:
        leave_distributed(actor)
    return {"error": error, "published": published}
