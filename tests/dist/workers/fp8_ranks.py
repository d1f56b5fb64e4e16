"""One rank that loads an FP8 checkpoint, then its bfloat16 twin, and compares."""

from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.models.table import is_left_out
from megagrpo.weights.actor_weights import load_initial_weights, read_recorded
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.harness import settings, with_actors


def loading_job(actor: MegatronActor, job: dict) -> dict:
    load_initial_weights(actor, job["twin"])
    twin = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
    hf, parameters = HfFolder(job["model"]), actor.parameters()
    specs = {n: spec for n, spec in hf.specs.items() if not is_left_out(actor.arch, n)}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    read_recorded(hf, record_whole(actor.load_hf, specs, parameters), parameters)
    same = [torch.equal(parameter, twin[name]) for name, parameter in actor.parameters().items()]
    load_initial_weights(actor, job["model"])
    again = [torch.equal(parameter, twin[name]) for name, parameter in actor.parameters().items()]
    return {"bytes_read": hf.bytes_read, "parameters": len(same), "equal": all(same + again)}


def main(folder: Path) -> None:
    def everyones(actor: MegatronActor, job: dict) -> dict:
        return {"ranks": actor.mesh.gather_world(loading_job(actor, job))}

    with_actors(folder, everyones, lambda job: settings({"deadline_s": 300.0} | job))
