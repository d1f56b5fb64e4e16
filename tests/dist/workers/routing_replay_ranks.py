"""One rank that replays experts: recorded ones, and any that were planted."""

import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.models.build import routers
from megagrpo.tools.certify.measure import ratios, whole
from megagrpo.types import Batch, Routing
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from tests.dist.workers.actor_ranks import PLAIN, batch_of, next_floats
from tests.dist.workers.harness import with_actors
from tests.dist.workers.samples import LENGTHS, NUM_SAMPLES, WIDTH
from tests.padding import flat, padded


def planted_experts(actor: MegatronActor) -> Tensor:
    """Of all samples and layers with experts, any: [NUM_SAMPLES, WIDTH, layers, k]."""
    arch, generator = actor.arch, torch.Generator().manual_seed(5)
    scores = torch.rand(
        NUM_SAMPLES, WIDTH, arch.num_layers - arch.experts.dense_layers, arch.experts.count, generator=generator
    )
    return scores.topk(arch.experts.per_token).indices.to(torch.uint8)


def with_planted(actor: MegatronActor, batch: Batch) -> Batch:
    """As an engine's: of all tokens but the last; what stands beyond them is nobody's choice."""
    assert actor.routing is not None
    own = planted_experts(actor)[batch.sample_ids][:, :, list(actor.routing.layers)]
    return replace(batch, routing=Routing(flat(own, batch.lengths), batch.lengths - 1))


def backward(actor: MegatronActor, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    rows = range(len(batch.lengths))
    denominators = step.denominators_of(actor, batch, rows, PLAIN, 32)
    sums = step.backward(actor, batch, rows, PLAIN, 1.0, denominators)
    return sums, {name: values.clone() for name, values in actor.gradients().items()}


def errors(actor: MegatronActor, weights: ActorWeights, reference: dict[str, Tensor]) -> dict[str, float]:
    """Collective. Of the gradients, by HF tensor; an expert's against the largest of all experts of its layer.

    One expert sees some ten tokens, whose gradients may cancel: rounding of the whole layer is what is left then.
    """

    def kind(name: str) -> str:
        return re.sub(r"experts\.\d+", "experts", name)

    largest: dict[str, float] = {}
    for name, values in reference.items():
        largest[kind(name)] = max(largest.get(kind(name), 0.0), float(values.abs().max()))
    found = ratios(weights, actor.gradients(), reference, actor.mesh)
    shares = {name: float(values.abs().max()) / largest[kind(name)] for name, values in reference.items()}
    return {name: error * shares[name] if shares[name] else error for name, error in found.items()}


def counts_of(actor: MegatronActor) -> dict[int, list[int]]:
    """What moves the routers' biases, by layer: the tokens that went to each expert; {} without the option."""
    if actor.router_bias is None:
        return {}
    counts = actor.router_bias.counts.clone()
    dist.all_reduce(counts)
    return dict(enumerate(counts.tolist()))


def by_hand(actor: MegatronActor, batch: Batch) -> dict:
    """On one rank, a sample a forward, which has no padding: which experts every router used, with which weights."""
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    logits: dict[int, Tensor] = {}
    undo = []
    for layer, router in routers(actor.chunks[:1]).items():

        def gating(x, layer=layer, original=router.gating):
            logits[layer] = original(x)
            return logits[layer]

        def hook(module, inputs, output, layer=layer):
            found = (*output, logits[layer].flatten(0, 1))
            seen.setdefault(layer, []).append(tuple(part.cpu() for part in found))

        router.gating = gating
        undo.append(router.register_forward_hook(hook))
    step.token_logprobs(actor, batch, 1.0)
    for handle, router in zip(undo, routers(actor.chunks[:1]).values(), strict=True):
        handle.remove()
        del router.gating
    planted, arch = planted_experts(actor), actor.arch
    wrong = differing = compared = 0
    worst = 0.0
    for layer, forwards in seen.items():
        by_length = {len(probs): (probs, used, values) for probs, used, values in forwards}
        for sample, length in enumerate(LENGTHS):
            probs, used, values = by_length[length]
            given = planted[sample, : length - 1, layer - arch.experts.dense_layers].long()
            expected = torch.zeros_like(used[:-1]).scatter(1, given, True)
            wrong += int((used[:-1] != expected).any(1).sum()) + int(used[-1].sum() != arch.experts.per_token)
            scores = values[:-1].double()
            if arch.experts.sigmoid:
                weights = scores.sigmoid().gather(1, given)
                weights = weights / weights.sum(1, keepdim=True) * arch.experts.scale
            else:
                weights = scores.gather(1, given).softmax(1)
                own = scores.topk(arch.experts.per_token).indices
                differing += int((own.sort(1).values != given.sort(1).values).any(1).sum())
            compared += length - 1
            worst = max(worst, float((probs[:-1].gather(1, given) - weights).abs().max()))
    return {"wrong": wrong, "weights": worst, "differs": differing / compared}


def same_sets(found: Tensor, expected: Tensor, lengths: Tensor) -> bool:
    return torch.equal(found.sort(-1).values, flat(expected, lengths).sort(-1).values)


def replay_job(actor: MegatronActor, job: dict) -> dict:
    weights, routing = (actor.trained_weights(load_initial_weights(actor, job["model"])), actor.routing)
    assert routing is not None
    batch = batch_of(actor.mesh)
    with routing.recording(batch) as recorded:
        natural = step.token_logprobs(actor, batch, 1.0)
    known = recorded()
    assert known.routing is not None
    # in another order: which experts they are decides, not in which place they stand
    known = replace(known, routing=replace(known.routing, experts=known.routing.experts.flip(-1)))
    result = {"logprobs": torch.equal(step.token_logprobs(actor, known, 1.0), natural)}
    plain, gradients = backward(actor, batch)
    again, replayed = backward(actor, known)
    result |= {
        "loss": again["loss/total"] == plain["loss/total"],
        "gradients": all(torch.equal(gradients[name], replayed[name]) for name in gradients),
        "differs": again["router/replay_differs"],
        "reports nothing": "router/replay_differs" not in plain,
    }
    planted = with_planted(actor, batch)
    if "write" in job:
        result["by hand"] = by_hand(actor, planted)
    if "write" in job:
        with next_floats(actor):
            of_neighbor = step.token_logprobs(actor, planted, 1.0)
            backward(actor, planted)
            neighbors = whole(weights, actor.gradients(), actor.mesh)
    logprobs = step.token_logprobs(actor, planted, 1.0)
    sums, _ = backward(actor, planted)
    of_planted = {"differs": sums["router/replay_differs"], "counts": counts_of(actor), "loss": sums["loss/total"]}
    result["moved"] = not torch.equal(logprobs, natural)
    if "write" in job:
        found = {
            "gradients": whole(weights, actor.gradients(), actor.mesh),
            "natural": padded(known.routing.experts, batch.lengths),
            "rounding": {
                "gradients": max(errors(actor, weights, neighbors).values()),
                "logprobs": float((logprobs - of_neighbor).abs().max()),
            },
        }
        torch.save(found | {"planted": of_planted, "logprobs": padded(logprobs, batch.lengths)}, job["reference"])
        return result | {"planted": of_planted}
    reference = torch.load(job["reference"], map_location="cpu")
    expected = reference["natural"][batch.sample_ids][:, :, list(routing.layers)]
    everywhere = actor.mesh.gather_world(same_sets(known.routing.experts, expected, batch.lengths))
    return result | {
        "recorded": all(everywhere),
        "planted logprobs": float(
            (logprobs - flat(reference["logprobs"][batch.sample_ids], batch.lengths)).abs().max()
        ),
        "planted loss": of_planted["loss"] / reference["planted"]["loss"] - 1,
        "planted differs": of_planted["differs"] - reference["planted"]["differs"],
        "planted counts": of_planted["counts"] == reference["planted"]["counts"],
        "planted gradients": errors(actor, weights, reference["gradients"]),
        "rounding": reference["rounding"],
    }


def main(folder: Path) -> None:
    with_actors(folder, replay_job)
