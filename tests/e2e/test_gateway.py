"""Agent programs in front of a real engine: what an agent saw is what is trained on, bit for bit."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from engine_logprobs import logprobs_by
from sampling import Grader, experiment, sampled, source_of
from tiny_model import EOS
from transformers import AutoTokenizer

from megagrpo.rollout.agents.make import make_answering
from megagrpo.types import Prompt, RolloutGroup

pytestmark = pytest.mark.timeout(1200)
TURN_ENDS = [EOS, *range(40, 90)]  # of a random model, which hardly ever ends a turn by itself
SAMPLES = 4


def groups(service, model, **sampling) -> Sequence[RolloutGroup]:
    """Two groups of rollouts, of step 3."""
    config = experiment(
        model={"path": str(model)},
        train={"group_size": SAMPLES},
        rollout={"deterministic": True, "request_timeout_s": 300.0, "step_timeout_s": 300.0},
        sampling={"max_response_tokens": 60, "stop_token_ids": TURN_ENDS} | sampling,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [Prompt(n, text, tokenizer(text)["input_ids"], "") for n, text in enumerate(("12+3=", "4+5="))]
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    answering = make_answering(config, tokenizer)
    source = source_of(service.control, config, Grader(), decode, answering=answering)
    try:
        return sampled(source, 3, prompts, service.control.engines()[0].weight_version)
    finally:
        source.close()
        answering.close()


def test_a_program_samples_the_bits_of_the_same_environment_and_branches_are_trained_on_once(service, tiny_model):
    service.set_version(1)
    theirs = groups(service, tiny_model, environment={"function": "tests.games:Sums", "max_turns": 4})
    ours = groups(service, tiny_model, agent={"function": "tests.sums_agent:sums", "workers": 1, "max_turns": 4})
    assert [group.samples for group in ours] == [group.samples for group in theirs]
    rewards = [
        [(outcome.status, outcome.value) for group in side for outcome in group.outcomes] for side in (ours, theirs)
    ]
    assert rewards[0] == rewards[1]
    assert sum(not sample.loss_mask.all() for group in ours for sample in group.samples) > SAMPLES, "several turns"

    trees = groups(service, tiny_model, agent={"function": "tests.sums_agent:branches", "workers": 1})
    for group in trees:
        assert [outcome.ok for outcome in group.outcomes] == [True] * SAMPLES, group.outcomes
        assert [sample.rollout for sample in group.samples] == [n for n in range(SAMPLES) for _ in range(3)]
        for outcome, samples in zip(group.outcomes, group.rollouts, strict=True):
            assert sum(int(sample.loss_mask.sum()) for sample in samples) == int(outcome.detail), "as many as sampled"
            assert not samples[1].loss_mask[0] and samples[1].loss_mask.any(), "its first turn is the other's"
            assert samples[2].prompt_ids is not None and samples[2].loss_mask.all()

    differences = []
    for group in (*ours, *trees):
        for sample in group.samples:
            prompt = group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
            found = logprobs_by(tiny_model, [*prompt, *sample.token_ids])[len(prompt) - 1 :].numpy()
            differences.append(np.abs(found - sample.logprobs)[sample.loss_mask])
    assert np.concatenate(differences).mean() <= 5e-6
