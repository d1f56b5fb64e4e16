"""One rank of the tests of updates that are not finite."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.run import Run
from megagrpo.monitor.alarms import MismatchAlarm
from megagrpo.monitor.run_record import RunRecord
from megagrpo.tools.ranks.dumps import read_dump
from megagrpo.tools.ranks.replay import compare
from megagrpo.types import Batch, TrainState
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of
from tests.dist.workers.harness import with_actors
from tests.dist.workers.routing_replay_ranks import with_planted
from tests.dist.workers.samples import NUM_SAMPLES

NUM_UPDATES, BAD_SAMPLE, WEIGHT_VERSION = 2, 1, 4


def main(folder: Path) -> None:
    with_actors(folder, one_bad_sample)


def one_bad_sample(actor: MegatronActor, job: dict) -> dict:
    """One bad sample on one data-parallel rank, in the first of two updates."""
    load_initial_weights(actor, job["model"])
    initial = weights(actor)
    batch = replace(batch_of(actor.mesh), updates=one_pass(NUM_SAMPLES, NUM_UPDATES))
    batch = with_planted(actor, batch) if actor.routing is not None else batch
    values, _ = step.update(actor, with_infinity(batch), RICH, 1.0, 32)
    with_bad = weights(actor)
    skipped = inspect(actor, job, "skip", with_infinity(batch), values)
    halted = inspect(actor, job, "halt", with_infinity(batch), values)
    quiet = inspect(actor, job, "halt", batch, {"optim/non_finite_updates": 0.0})

    reload(actor, initial)
    dump = read_dump(Path(job["run"]) / "dumps" / f"step_{WEIGHT_VERSION + 1:06d}")
    again, _ = step.update(actor, dump.batch(actor.mesh, actor.routed_layers), dump.algorithm, 1.0, 32)
    replayed = weights(actor)

    reload(actor, initial)
    with (
        patch.object(step, "training_flops", lambda arch, lengths, adapters: float(sum(lengths))),
        patch.object(step, "mfu", lambda flops, *_: {"perf/mfu": flops}),
    ):
        good, _ = step.update(actor, without_first_update(batch), RICH, 1.0, 32)
    trained = torch.isin(batch.group_ids, torch.tensor(batch.updates[0][1]))
    tokens = actor.mesh.reduce(batch.lengths[trained].sum(), "sum")
    without_bad = weights(actor)
    result = {
        "non_finite": values["optim/non_finite_updates"],
        "skipped_when_masked": good["optim/skipped_updates"],
        "counts_what_was_computed": good["perf/mfu"] == float(tokens),
        "loss_is_of_the_good_update": values["loss/total"] == good["loss/total"],
        "same_weights_as_without": same(with_bad, without_bad),
        "moved": not same(with_bad, initial),
        "messages": [skipped, halted, quiet],
        "replayed": same(replayed, with_bad) and again["loss/total"] == dump.values["loss/total"],
        "says": compare(dump, again, 3, "initial").splitlines()[0],
    }
    everyone = actor.mesh.gather_world(result)
    assert all(other == everyone[0] for other in everyone), everyone
    return everyone[0]


def with_infinity(batch: Batch) -> Batch:
    advantages = batch.advantages.clone()
    advantages[(batch.sample_ids == BAD_SAMPLE).repeat_interleave(batch.lengths)] *= float("inf")
    return replace(batch, advantages=advantages)


def without_first_update(batch: Batch) -> Batch:
    first = torch.tensor([group in batch.updates[0][0] for group in batch.group_ids.tolist()])
    assert BAD_SAMPLE in batch.updates[0][0]
    return replace(batch, loss_mask=batch.loss_mask & ~first.repeat_interleave(batch.lengths))


def inspect(actor: MegatronActor, job: dict, policy: str, batch: Batch, values: dict) -> str:
    """What Run.inspect_update says; the rest of a run is not needed for it."""
    sections = {"name": "t", "output_dir": job["run"], "model": {"path": job["model"]}, "data": {"path": "d"}}
    config = ExperimentConfig.model_validate(sections | {"train": {"non_finite": policy}})
    state = TrainState(step=WEIGHT_VERSION)
    absent = dict.fromkeys(
        (
            "updates_done",
            "inputs",
            "control",
            "source",
            "exchange",
            "checkpointer",
            "watchdog",
            "progress",
            "stop_request",
        )
    )
    absent["alarm"] = MismatchAlarm(config, actor.arch.is_moe)
    record = RunRecord(config, actor.mesh, WEIGHT_VERSION)
    run = Run(config=config, actor=actor, state=state, num_steps=9, recording=record, **absent)
    try:
        run.inspect_update(batch, RICH, values, batch.old_logprobs)
    except NonFiniteUpdate as exc:
        return str(exc)
    return ""


def weights(actor: MegatronActor) -> dict:
    return {name: p.detach().clone() for name, p in actor.parameters().items()}


def reload(actor: MegatronActor, values: dict) -> None:
    """The initial weights and an optimizer without history."""
    with torch.no_grad():
        for name, p in actor.parameters().items():
            p.copy_(values[name])
    for part in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        part.optimizer.state.clear()
    actor.weights_loaded()
    actor.updates_done = 0


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())
