"""One rank of the tests of uneven stages, schedule times and saves in the background."""

import resource
import time
from functools import partial
from pathlib import Path

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.save import RunIdentity
from megagrpo.config.schema import CheckpointConfig
from megagrpo.tools.certify.measure import ratios, whole
from megagrpo.types import TrainState
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of, gradient
from tests.dist.workers.harness import with_actors
from tests.dist.workers.recorded import recorded_logits
from tests.dist.workers.samples import NUM_SAMPLES, VOCAB, WIDTH

ANY = RunIdentity({}, {})
SMALL_FILE = 100_000  # bytes; a stage of the model has more


def equality_job(actor: MegatronActor, weights: ActorWeights, job: dict) -> dict:
    """Logits of every trained position, loss and gradients; written by one rank, compared by two."""
    grid = torch.zeros(NUM_SAMPLES, WIDTH, VOCAB)
    batch = batch_of(actor.mesh)
    with recorded_logits() as seen, torch.no_grad():
        step.token_logprobs(actor, batch, 1.0)
    for rows, columns, logits in seen:
        grid[batch.sample_ids[rows], columns] = logits
    loss = gradient(actor, batch, RICH)
    if job.get("write"):
        torch.save(
            {"logits": grid, "loss": loss, "gradients": whole(weights, actor.gradients(), actor.mesh)}, job["reference"]
        )
        return {"positions": int((grid.abs().amax(-1) > 0).sum())}
    reference = torch.load(job["reference"], map_location="cpu")
    error = float((grid - reference["logits"]).abs().max()) if seen else 0.0
    gradients = ratios(weights, actor.gradients(), reference["gradients"], actor.mesh)
    layers = [layer.layer_number for chunk in actor.chunks for layer in chunk.decoder.layers]
    return {
        "logits": error,
        "loss": abs(loss - reference["loss"]),
        "gradients": max(gradients.values()),
        "layers": actor.mesh.gather_world(layers),
    }


def clock_job(actor: MegatronActor, weights: ActorWeights, job: dict) -> dict:
    """The step's schedule metrics, with forwards of the given ranks made slow."""
    slow = job["slow_s"][actor.mesh.rank]
    actor.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
    batch = batch_of(actor.mesh)
    step.token_logprobs(actor, batch, 1.0)  # must not count
    metrics, _ = step.update(actor, batch, RICH, 1.0, 32)
    return {name: value for name, value in metrics.items() if name.startswith("schedule/")}


def background_job(actor: MegatronActor, weights: ActorWeights, job: dict) -> dict:
    """Saved at once, and in the background of two more updates: both must resume to the same weights, bit by bit."""
    batch, root = batch_of(actor.mesh), Path(job["root"])

    def save(name: str, snapshot: bool) -> checkpoint.PendingSave:
        plan = partial(save_actor, actor, reshardable=job["reshardable"], snapshot=snapshot)
        return checkpoint.PendingSave(root / name, TrainState(step=1), ANY, CheckpointConfig(keep=2), plan, actor.mesh)

    gradient(actor, batch, RICH)
    actor.optimizer_step()
    at_once = save("at_once", False).finish()
    pending = save("background", True)
    unfinished = not (root / "background" / "step_000001").exists()
    for _ in range(2):
        gradient(actor, batch, RICH)
        actor.optimizer_step()
    while not pending.ready():
        time.sleep(0.05)
    found = []
    for folder in (at_once, pending.finish()):
        checkpoint.load(folder, ANY, lambda f: load_actor(actor, f), actor.mesh)
        gradient(actor, batch, RICH)
        actor.optimizer_step()
        found.append({name: p.detach().clone() for name, p in actor.parameters().items()})
    same = all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    return {"unfinished": unfinished, "different": 0.0 if same else 1.0}


def failure_job(actor: MegatronActor, weights: ActorWeights, job: dict) -> dict:
    """A save that one rank cannot write: every rank hears of it, and nothing of it gets into the next one."""
    root, message = Path(job["root"]), ""
    plan = partial(save_actor, actor, reshardable=True)
    checkpoint.PendingSave(root, TrainState(step=1), ANY, CheckpointConfig(keep=2), plan, actor.mesh).finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if actor.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, limits[1]))
    in_background = partial(plan, snapshot=True)
    pending = checkpoint.PendingSave(root, TrainState(step=2), ANY, CheckpointConfig(keep=2), in_background, actor.mesh)
    try:
        pending.finish()
    except RuntimeError as exc:
        message = str(exc)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    messages = actor.mesh.gather_world(message)
    left = sorted(path.name for path in root.iterdir())
    gradient(actor, batch_of(actor.mesh), RICH)
    actor.optimizer_step()  # a checkpoint has more parts from now on
    saved = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
    again = checkpoint.PendingSave(root, TrainState(step=3), ANY, CheckpointConfig(keep=2), plan, actor.mesh).finish()
    different = []
    for with_optimizer in (True, False):  # an export reads the weights only
        with torch.no_grad():
            for parameter in actor.parameters().values():
                parameter.zero_()
        load_actor(actor, again / "actor", with_optimizer)
        different += [name for name, parameter in actor.parameters().items() if not torch.equal(parameter, saved[name])]
    return {"messages": messages, "left": left, "again": again.name, "different": actor.mesh.gather_world(different)}


JOBS = {"equality": equality_job, "clock": clock_job, "background": background_job, "failure": failure_job}


def main(folder: Path) -> None:
    with_actors(folder, lambda actor, job: JOBS[job["do"]](actor, load_initial_weights(actor, job["model"]), job))
