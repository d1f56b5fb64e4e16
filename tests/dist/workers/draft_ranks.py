"""One rank of the tests of a draft: its loss and gradients, and what the model has of it."""

import math
from pathlib import Path

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.tools.certify.measure import whole
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.actor_ranks import RICH, batch_of, exported
from tests.dist.workers.harness import with_actors


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def measure(actor: MegatronActor, job: dict, folder: Path) -> dict:
    """The draft's loss and gradients against transformers', and what the model alone gives, for a job without a draft.

    The job without one writes the file.
    """
    weights = load_initial_weights(actor, job["model"])
    trained = actor.trained_weights(weights)
    batch = batch_of(actor.mesh)
    denominators = step.denominators_of(actor, batch, range(len(batch.lengths)), RICH, 32)
    sums = step.backward(actor, batch, range(len(batch.lengths)), RICH, 1.0, denominators)
    found = on_cpu(whole(trained, actor.gradients(), actor.mesh))
    mine = actor.optimizer_step()
    state = {"loss": sums["loss/total"], "norm": mine["optim/grad_norm"], "gradients": found}
    state["weights"] = on_cpu(whole(trained, actor.trained(), actor.mesh))
    if "draft" not in job:
        if actor.mesh.is_main:
            torch.save(state, job["alone"])
        return {}
    truth, alone = (torch.load(f"{job['model']}.pt", map_location="cpu"), torch.load(job["alone"], map_location="cpu"))
    result = {"draft_loss": abs(sums["draft/kl"] - truth["loss"]), "loss": state["loss"] == alone["loss"]}
    result["norm"] = state["norm"] == alone["norm"]
    squares = sum(float(g.double().square().sum()) for g in truth["gradients"].values())
    result["draft_norm"] = abs(mine["optim/draft_grad_norm"] / math.sqrt(squares) - 1)
    if actor.mesh.is_main:
        result["draft"] = {n: float((found[n] - g).abs().max() / g.abs().max()) for n, g in truth["gradients"].items()}
        result["others"] = sorted(found.keys() - truth["gradients"].keys() - alone["gradients"].keys())
        for what in ("gradients", "weights"):
            result[what] = all(torch.equal(state[what][name], tensor) for name, tensor in alone[what].items())
        before = HfFolder(job["model"])
        result["moved"] = sum(not torch.equal(state["weights"][n], before[n]) for n in truth["gradients"])
    return result | exported(actor, load_initial_weights(actor, job["model"]), job, folder)


def main(folder: Path) -> None:
    with_actors(folder, lambda actor, job: measure(actor, job, folder))
