"""Runs the jobs of jobs.json on this rank, one after the other, each with an actor in a world of its own."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.models.layers.lora import InitialAdapters
from megagrpo.tools.certify.measure import joined
from megagrpo.tools.certify.synthetic import near
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.host import DEVICE

# A large epsilon: Adam divides by |g|, which would turn rounding noise of a vanishing gradient into a full step.
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.01}
EPSILON = {"adam_eps": 1e-4}
SMALL = {"logprob_chunk_tokens": 32, "deadline_s": 120.0}


def answer(folder: Path, of_job: Callable[[dict, Path], dict]) -> None:
    """Writes what `of_job(job, store)` returns for every job: each rank into rankN.json, rank 0 into results.json."""
    jobs = json.loads((folder / "jobs.json").read_text())
    results = []
    for number, job in enumerate(jobs):
        print("job", number, job, flush=True)
        results.append(of_job(job, folder / f"store{number}"))
    rank, text = os.environ["RANK"], json.dumps(results)
    for name in [f"rank{rank}.json", *(["results.json"] if rank == "0" else [])]:
        (folder / name).write_text(text)


def settings(job: dict) -> tuple[ActorConfig, OptimizerConfig]:
    """What a job asks for by names of `actor`'s settings, and whether its optimizer is `distributed`.

    budget: tokens of a micro-batch; optimizer: settings of Megatron's; transformer_engine: perhaps one for each rank.
    """
    fields = {name: job[name] for name in ActorConfig.model_fields.keys() - {"optimizer"} if name in job}
    if isinstance(engines := fields.get("transformer_engine"), list):
        fields["transformer_engine"] = engines[int(os.environ["RANK"])]
    own = {"world_size": int(os.environ["WORLD_SIZE"]), "micro_batch_tokens": job.get("budget", 64)}
    distributed = job.get("distributed", False)
    megatron = EPSILON | job.get("optimizer", {})
    optimizer = OptimizerConfig(**OPTIMIZER, distributed=distributed, megatron=megatron)
    return ActorConfig.model_validate(SMALL | own | fields), optimizer


def with_actors(
    folder: Path,
    measure: Callable[[MegatronActor, dict], dict],
    settings: Callable[[dict], tuple[ActorConfig, OptimizerConfig]] = settings,
) -> None:
    """Answers every job by `measure(actor, job)`; a float becomes the largest of all ranks."""

    def of_job(job: dict, store: Path) -> dict:
        torch.manual_seed(0)  # of the host: on a GPU an actor seeds the device's
        config, optimizer = settings(job)
        options = {"config": config, "optimizer": optimizer, "device": DEVICE}
        with joined(store, model_path=job["model"], **options) as actor:
            return over_ranks(actor, measure(actor, job))

    answer(folder, of_job)


def over_ranks(actor: MegatronActor, result: dict) -> dict:
    """Collective. A result whose floats are the largest of all ranks."""
    floats = {name: value for name, value in result.items() if isinstance(value, float)}
    everyone = actor.mesh.gather_world(floats)
    return result | {name: max(part[name] for part in everyone) for name in everyone[0]}


@contextmanager
def weights_unreadable() -> Iterator[None]:
    """Inside, asking an HF folder for a tensor is an error; its headers can be read."""

    def refuse(folder: HfFolder, target: torch.Tensor, name: str, start: tuple[int, ...]):
        raise AssertionError(f"{name} of {folder.path} was read")

    read, HfFolder.read_into = HfFolder.read_into, refuse
    try:
        yield
    finally:
        HfFolder.read_into = read


def near_initial(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """The adapters of a fresh start with noise: B is no longer 0, so that A has a gradient."""
    initial = InitialAdapters(actor.adapter_specs(), seed=0)
    return {name: near(tensor, 0.05, number) for number, (name, tensor) in enumerate(initial.items())}
