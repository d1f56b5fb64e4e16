"""One rank of test_rounding.py: what an actor computes and updates, with actor.fake_quantization or
without."""

from pathlib import Path

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.tools.certify.measure import whole
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of, gradient
from tests.dist.workers.harness import OPTIMIZER, with_actors


def measure(actor: MegatronActor, job: dict) -> dict:
    """Log-probabilities, the reference's too, loss and gradients of the last update, weights after
    it, into `out`.

    Tells whether forwards left a weight changed.
    """
    weights = load_initial_weights(actor, job["model"])
    actor.keep_reference()
    trained, state = actor.trained_weights(weights), {}
    before = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
    batch = batch_of(actor.mesh)
    state["logprobs"] = actor.mesh.gather_world(step.token_logprobs(actor, batch, 1.0))
    with (
        torch.no_grad()
    ):  # other weights than the reference's; rounding commutes with powers of two
        for parameter in actor.parameters().values():
            parameter.mul_(2.0)
    state["reference"] = actor.mesh.gather_world(
        step.with_reference(actor, batch, "k3", 1.0).ref_logprobs
    )
    with torch.no_grad():
        for parameter in actor.parameters().values():
            parameter.mul_(0.5)
    changed = 0
    for number in range(job["updates"]):
        loss = gradient(actor, batch_of(actor.mesh, shift=number), RICH)
        if number == 0:
            changed = sum(
                not torch.equal(p, before[name]) for name, p in actor.parameters().items()
            )
        state |= {"loss": loss, "gradients": whole(trained, actor.gradients(), actor.mesh)}
        actor.optimizer_step(
            loss, followed=True
        )  # with overlap_param_gather the next forward gathers
    actor.gather_parameters()
    state["weights"] = whole(trained, actor.trained(), actor.mesh)
    state["decay"] = 1 - OPTIMIZER["lr"] * OPTIMIZER["weight_decay"]  # of a matrix by an update
    if actor.mesh.is_main:
        torch.save(state, job["out"])
    return {"changed": float(changed)}


def main(folder: Path) -> None:
    with_actors(folder, measure)
