"""One rank that moves the routers' biases or computes the routers' losses."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.models.build import routers
from megagrpo.tools.certify.measure import ratios, whole
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import PLAIN, batch_of, gradient, next_floats
from tests.dist.workers.harness import DEVICE, with_actors


def biases(actor: MegatronActor) -> dict[int, list[float]]:
    """Of the routers of all pipeline stages, by layer."""
    mine = {i: r.expert_bias.tolist() for i, r in routers(actor.chunks).items()}
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

    hooks = [r.register_forward_hook(hook(i)) for i, r in routers(actor.chunks).items()]
    step.token_logprobs(actor, batch_of(actor.mesh), 1.0)
    for handle in hooks:
        handle.remove()
    return {layer: count.tolist() for layer, count in counts.items()}


def bias_job(actor: MegatronActor, job: dict) -> dict:
    load_initial_weights(actor, job["model"])
    result: dict = {"before": biases(actor)}
    if "count" in job:
        result["counts"] = counted_by_hand(actor)
    for _ in range(2):  # what was counted before is not counted again
        actor.expert_load.begin()
        gradient(actor, batch_of(actor.mesh), PLAIN)
    actor.optimizer_step()
    return result | {"after": biases(actor), "load": step._expert_metrics(actor)["moe/load_imbalance"]}


def losses_by_hand(actor: MegatronActor, balance: float, z: float) -> dict[str, float]:
    """Leaves the gradients of both losses as plain torch has them: one sample a forward, every formula written out."""
    batch, logits, total = batch_of(actor.mesh), {}, {"balance": 0.0, "z": 0.0}
    of_layer = routers(actor.chunks)
    for layer, router in of_layer.items():
        gating = router.gating
        router.gating = lambda x, layer=layer, gating=gating: (
            logits.setdefault(layer, []).append(gating(x)) or (logits[layer][-1])
        )
    actor.zero_grad()
    experts, chosen = actor.arch.experts.count, actor.arch.experts.per_token
    for row, length in enumerate(batch.lengths.tolist()):
        logits.clear()
        tokens = batch.tokens.long().split(batch.lengths.tolist())[row][None]
        places = torch.arange(length)[None]
        hidden = actor.model[0](tokens.to(DEVICE), places.to(DEVICE), None)
        loss = hidden.sum() * 0.0
        for [of_sequence] in logits.values():
            of_sequence = of_sequence.flatten(0, 1)
            scores = of_sequence.sigmoid() if actor.arch.experts.sigmoid else of_sequence.softmax(1)
            took = torch.zeros_like(scores).scatter(1, scores.topk(chosen).indices, 1.0)
            f = experts / (chosen * length) * took.sum(0)
            mean_score = (scores / scores.sum(1, keepdim=True)).mean(0)
            sequence_loss, z_sum = ((f * mean_score).sum(), (of_sequence.exp().sum(1).log() ** 2).sum())
            total["balance"] += float(sequence_loss) / len(batch.lengths) / len(of_layer)
            total["z"] += float(z_sum) / int(batch.lengths.sum()) / len(of_layer)
            loss = loss + balance * sequence_loss / len(batch.lengths) + z * z_sum / int(batch.lengths.sum())
        loss.backward()
    return total


def losses_job(actor: MegatronActor, job: dict) -> dict:
    """With advantages of 0 the routers' losses alone have a gradient; the reference job writes what is by hand."""
    weights = actor.trained_weights(load_initial_weights(actor, job["model"]))
    if "by_hand" in job:
        with next_floats(actor):
            losses_by_hand(actor, **job["by_hand"])
            neighbors = whole(weights, actor.gradients(), actor.mesh)
        total = losses_by_hand(actor, **job["by_hand"])
        gradients = actor.gradients()
        found = {
            "gradients": whole(weights, gradients, actor.mesh),
            "rounding": max(ratios(weights, gradients, neighbors, actor.mesh).values()),
        }
        torch.save(total | found, job["reference"])
        return {}
    reference = torch.load(job["reference"], map_location="cpu")
    batch = batch_of(actor.mesh)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    rows = range(len(batch.lengths))
    step.token_logprobs(actor, batch, 1.0)  # no update: it adds nothing
    for _ in range(2):  # what was added up before is not added again
        denominators = step.denominators_of(actor, batch, rows, PLAIN, 32)
        sums = step.backward(actor, batch, rows, PLAIN, 1.0, denominators)
    gradients = ratios(weights, actor.gradients(), reference["gradients"], actor.mesh)
    return {
        "balance": sums["router/balance_loss"] / reference["balance"] - 1,
        "z": sums["router/z_loss"] / reference["z"] - 1,
        "gradients": gradients,
        "rounding": reference["rounding"],
    }


def main(folder: Path) -> None:
    with_actors(folder, lambda actor, job: (losses_job if "reference" in job else bias_job)(actor, job))
