"""Several passes over a step's samples, against a loop written by hand on transformers' model with torch's AdamW.

Layouts: tests/dist/test_certify.py has an experiment of two passes.
"""

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.step import token_logprobs, update, with_logprobs
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import plan_updates
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ActorConfig, OptimizerConfig, TrainConfig
from megagrpo.tools.certify.measure import joined, whole
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from tests.dist.bounds import within
from tests.dist.cases import SMALL
from tests.dist.workers.launch import run_transformers
from tests.padding import padded

TRAIN = TrainConfig(num_prompts_per_step=6, group_size=2, num_updates_per_step=2, num_epochs_per_step=2)
CLIP = 0.02  # narrow: from the second update on it acts
ALGORITHM = AlgorithmConfig.model_validate(
    {"loss": {"name": "ppo_clip", "clip_ratio_low": CLIP, "clip_ratio_high": CLIP}}
)
LR, EPS, TEMPERATURE, MAX_RESPONSE = 2e-3, 1e-3, 0.8, 9
SEED, STEP = 5, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What `update` did, by the actor: metrics, gradients of each update, weights after the last."""
    root = tmp_path_factory.mktemp("epochs")
    model = str(root / "model")
    make_tiny_model(TinyModelConfig(path=model, family="qwen3", **SMALL), 0)
    with actor_of(root / "store", model) as (actor, weights):
        batch = batch_of(actor)
        gradients, one = [], step.backward

        def noting(actor, *args):
            sums = one(actor, *args)
            gradients.append(whole(weights, actor.gradients(), actor.mesh))
            return sums

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "backward", noting)
            values, _ = update(actor, batch, ALGORITHM, TEMPERATURE, MAX_RESPONSE)
        weights_after = whole(weights, actor.parameters(), actor.mesh)
    return model, batch, values, gradients, weights_after


@contextmanager
def actor_of(store: Path, model: str) -> Iterator[tuple[MegatronActor, ActorWeights]]:
    config = ActorConfig(logprob_chunk_tokens=7, micro_batch_tokens=24)
    optimizer = OptimizerConfig(lr=LR, clip_grad=0.0, distributed=False, megatron={"adam_eps": EPS})
    with joined(store, config=config, optimizer=optimizer, model_path=model, device=DEVICE) as actor:
        yield actor, load_initial_weights(actor, model)


def batch_of(actor):
    generator = torch.Generator().manual_seed(3)
    groups = []
    for g in range(TRAIN.num_prompts_per_step):
        answers = [tuple(torch.randint(3, 20, (3 + (g + i) % 6,), generator=generator).tolist()) for i in range(2)]
        samples = [Sample(i, ids, (-1.0,) * len(ids), "stop", 0, "") for i, ids in enumerate(answers)]
        groups.append(RolloutGroup(g, Prompt(g, "", (1, 5, 6), ""), tuple(samples), (Outcome("score"),) * 2))
    batch = build_batch(groups, plan_updates(TRAIN, SEED, STEP), actor.mesh)
    of_samples = torch.randn(len(batch.lengths), generator=generator)
    advantages = of_samples.repeat_interleave(batch.lengths) * batch.loss_mask
    return replace(batch, advantages=advantages, old_logprobs=token_logprobs(actor, batch, TEMPERATURE))


@pytest.mark.verifies("actor", "two passes of two updates equal a handwritten loop on transformers' model")
def test_two_passes_of_two_updates_equal_a_loop_written_by_hand(made, tmp_path):
    model, batch, values, gradients, weights = made
    rows = {name: padded(getattr(batch, name), batch.lengths) for name in ("loss_mask", "advantages")}
    rows["tokens"] = padded(batch.tokens.long(), batch.lengths)
    given = {"model": model, "clip": CLIP, "temperature": TEMPERATURE, "lr": LR, "eps": EPS}
    given["batch"] = {"updates": batch.updates, "group_ids": batch.group_ids} | rows
    torch.save(given, tmp_path / "batch.pt")
    run_transformers(tmp_path, "epochs_by_hand.py")
    expected = torch.load(tmp_path / "by_hand.pt", map_location="cpu")
    assert len(gradients) == 4 == len(expected["gradients"])
    for number, right in enumerate(expected["gradients"]):
        for name, gradient in right.items():
            error = float((gradients[number][name] - gradient).abs().max() / gradient.abs().max())
            assert within("gradient", error, 2e-5), (number, name, error)
    for name, parameter in expected["weights"].items():
        assert within("weights", float((weights[name] - parameter).abs().max()), 1e-6), name
    losses, fractions = expected["losses"], expected["fractions"]
    assert fractions[0] == 0 < min(fractions[1:])
    assert values["loss/total"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    for number in (1, 2):
        of_pass = losses[2 * number - 2 : 2 * number]
        assert values[f"loss/total_pass_{number}"] == pytest.approx(sum(of_pass) / 2, rel=1e-4)
    assert 0 < clip_fraction(values, 1) < clip_fraction(values, 2)


def test_the_engine_s_log_probabilities_may_stand_for_the_old_ones(made, tmp_path):
    """The update is the same if they are, and returns the trainer's of the first of its four parts for a comparison."""
    model, batch, values, _, weights = made
    engine = ALGORITHM.model_copy(update={"old_logprobs": "engine"})
    with actor_of(tmp_path / "store", model) as (actor, own):
        given = with_logprobs(
            actor, replace(batch, old_logprobs=None, rollout_logprobs=batch.old_logprobs), engine, 1.0
        )
        assert given.old_logprobs is None
        again, logprobs = update(actor, given, engine, TEMPERATURE, MAX_RESPONSE)
        weights_after = whole(own, actor.parameters(), actor.mesh)
    assert all(torch.equal(weights_after[name], parameter) for name, parameter in weights.items())
    first = torch.isin(batch.group_ids, torch.tensor(batch.updates[0][0])).repeat_interleave(batch.lengths)
    known = ~logprobs.isnan() & batch.loss_mask
    assert torch.equal(known, first & batch.loss_mask)
    torch.testing.assert_close(logprobs[known], batch.old_logprobs[known])
    apart = {name for name, value in again.items() if value != values[name]}
    assert {name.partition("/")[0] for name in apart} - {"schedule"} == {"mismatch"}
    assert again["mismatch/logprob_abs_mean"] > 0  # by the updates alone


def clip_fraction(values: dict[str, float], number: int) -> float:
    return sum(values[f"policy/clip_fraction_{end}_pass_{number}"] for end in ("low", "high"))
