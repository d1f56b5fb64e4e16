"""One rank that trains on the trees of an agent, and on the same samples made by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.statistics import alone
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.checkpoint.groups import read_groups
from megagrpo.tools.certify.measure import whole
from megagrpo.types import AlgoState, Batch, Rewards, Routing
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import PLAIN
from tests.dist.workers.harness import with_actors
from tests.dist.workers.routing_replay_ranks import backward, errors


def of_groups(actor: MegatronActor, job: dict) -> Batch:
    """As a trainer makes it of what agents did."""
    groups, mesh = read_groups(Path(job["groups"])), actor.mesh
    layers = actor.routing.layers if actor.routing is not None else None
    updates = one_pass(len(groups))
    batch = build_batch(groups[mesh.dp_rank :: mesh.dp_size], updates, mesh, routed_layers=layers)
    reduce = alone if mesh.dp_size == 1 else mesh.reduce
    return with_advantages(batch, PLAIN, reduce, AlgoState(), 100)[0]


def of_hands(actor: MegatronActor, job: dict, ids: list[int]) -> Batch:
    """The samples of these ids, each one a rollout of its own: nothing of what makes the other batch is used."""
    rows = torch.load(job["rows"], weights_only=False, map_location="cpu")
    most = 1 + max(row["place"] for row in rows)
    mine = [row for row in rows if row["group"] * most + row["place"] in ids]
    lengths = torch.tensor([len(row["tokens"]) for row in mine], dtype=torch.int64)
    mask = torch.tensor([value for row in mine for value in row["mask"]], dtype=torch.bool)
    advantages = torch.cat([torch.full((len(row["tokens"]),), row["advantage"], dtype=torch.float64) for row in mine])
    routing = None
    if actor.routing is not None:
        own = [np.pad(row["experts"], ((0, 1), (0, 0), (0, 0)))[:, list(actor.routing.layers)] for row in mine]
        routing = Routing(torch.from_numpy(np.concatenate(own).astype(np.uint8)), lengths - 1)
    zeros = torch.zeros(len(mine), dtype=torch.float64)
    return Batch(
        sample_ids=torch.tensor(ids),
        group_ids=torch.tensor([row["group"] for row in mine]),
        num_groups=1 + max(row["group"] for row in rows),
        tokens=torch.tensor([token for row in mine for token in row["tokens"]], dtype=torch.int32),
        lengths=lengths,
        prompt_lengths=torch.tensor([row["prompt"] for row in mine], dtype=torch.int64),
        loss_mask=mask,
        rollout_logprobs=torch.tensor([value for row in mine for value in row["logprobs"]]),
        rewards=Rewards(zeros, zeros == 0),
        truncated=zeros != 0,
        advantages=(advantages * mask).float(),
        routing=routing,
        updates=one_pass(1 + max(row["group"] for row in rows)),
    )


def trees_job(actor: MegatronActor, job: dict) -> dict:
    weights = actor.trained_weights(load_initial_weights(actor, job["model"]))
    tree = of_groups(actor, job)
    hand = of_hands(actor, job, tree.sample_ids.tolist())
    names = ("tokens", "lengths", "prompt_lengths", "loss_mask", "rollout_logprobs", "advantages")
    same = [name for name in names if not torch.equal(getattr(tree, name), getattr(hand, name))]
    if tree.routing is not None and not torch.equal(tree.routing.experts, hand.routing.experts):
        same.append("experts")
    expected = step.token_logprobs(actor, hand, 1.0)
    if not torch.equal(step.token_logprobs(actor, tree, 1.0), expected):
        same.append("logprobs")
    sums, gradients = backward(actor, replace(hand, sample_ids=tree.sample_ids))
    again, of_tree = backward(actor, tree)
    same += [name for name in gradients if not torch.equal(gradients[name], of_tree[name])]
    same += ["loss"] if sums["loss/total"] != again["loss/total"] else []
    trained = int(actor.mesh.reduce(tree.loss_mask.sum(), "sum"))
    result = {"same": sorted({name for part in actor.mesh.gather_world(same) for name in part}), "trained": trained}
    if "write" in job:
        torch.save(whole(weights, actor.gradients(), actor.mesh), job["reference"])
        return result
    return result | {"gradients": errors(actor, weights, torch.load(job["reference"], map_location="cpu"))}


def main(folder: Path) -> None:
    with_actors(folder, trees_job)
