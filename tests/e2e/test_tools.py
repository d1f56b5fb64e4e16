"""Responses of several turns from a real engine, and the loop with all that asks for more than one batch of samples."""

from contextlib import closing

import numpy as np
import pytest
import torch
from engine_logprobs import logprobs_by
from run_megagrpo import metrics, rollouts, run_experiment
from running_service import RunningService
from sampling import Grader, sampled, source_of
from test_service import PROMPTS
from transformers import AutoTokenizer

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.agents.make import make_answering
from megagrpo.types import Prompt, Sample

SAYS_IT_AGAIN = {
    "stop": [">"],
    "environment": {"function": "graders_of_tests:SaysItAgain", "rewards": False, "max_turns": 3},
}
MAX_TOKENS, GROUP_SIZE = 24, 3


def sample(service: RunningService, **sampling) -> list[tuple[Prompt, Sample]]:
    tokenizer = AutoTokenizer.from_pretrained(service.config.model.path)
    sections = {"train": {"group_size": GROUP_SIZE}, "sampling": {"max_response_tokens": MAX_TOKENS} | sampling}
    config = ExperimentConfig.model_validate(service.config.model_dump() | sections)
    prompts = [Prompt(i, "", ids, "") for i, ids in enumerate(PROMPTS)]
    with (
        closing(make_answering(config, tokenizer)) as answering,
        closing(source_of(service.control, config, Grader(len), tokenizer.decode, answering=answering)) as source,
    ):
        return [(group.prompt, s) for group in sampled(source, 0, prompts, 0) for s in group.samples]


def test_turns_continue_the_tokens_that_were_sampled(service):
    """The first turn is the response without a tool up to the call; log-probabilities are those of transformers.

    Those of all turns, for the whole sequence: what was put in was seen, and nothing was tokenized again.
    """
    service.set_version(0)
    plain = sample(service)
    inner = [token for _, s in plain for token in s.token_ids[:-4]]
    # a random model closes no call of its own accord
    call_end = int(max(set(inner), key=inner.count))
    tokenizer = AutoTokenizer.from_pretrained(service.config.model.path)
    says = tokenizer.decode([90, 91, 92])
    result = tokenizer(says, add_special_tokens=False)["input_ids"]
    called = {
        "stop_token_ids": [call_end],
        "environment": {
            "function": "tests.games:SaysOneThing",
            "args": {"call": tokenizer.decode([call_end]), "says": says},
            "rewards": False,
            "max_turns": 3,
            "workers": 1,
        },
    }
    with_tool = sample(service, **called)
    turns = []
    for (prompt, before), (_, after) in zip(plain, with_tool, strict=True):
        assert before.loss_mask is None
        assert len(after.loss_mask) == len(after.token_ids) == len(after.logprobs) <= MAX_TOKENS
        mask = torch.tensor(after.loss_mask)
        calls = np.flatnonzero(before.token_ids == call_end)
        cut = calls[0] + 1 if len(calls) else len(before.token_ids)
        assert (after.token_ids[:cut] == before.token_ids[:cut]).all()
        assert after.logprobs[:cut] == pytest.approx(before.logprobs[:cut], abs=1e-5)
        put_in = torch.tensor(after.token_ids)[mask == 0].tolist()
        assert put_in == list(result) * (len(put_in) // len(result))
        assert len(put_in) // len(result) <= (after.token_ids[mask.numpy() > 0] == call_end).sum()
        expected = logprobs_by(service.config.model.path, [*prompt.token_ids, *after.token_ids])
        expected = expected[len(prompt.token_ids) - 1 :] * mask
        assert (expected - torch.tensor(after.logprobs)).abs().max().item() <= 1e-4
        turns.append(1 + len(put_in) // len(result))
    assert max(turns) > 1, "no response had a second turn"
    assert sample(service, **called) == with_tool


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dynamic_sampling_tools_and_exact_kl_together(experiments):
    """Three steps, then two more from the checkpoint with its surplus, are five: the surplus and its order survive."""
    sections = {
        "sampling": {"max_response_tokens": 10} | SAYS_IT_AGAIN,
        "train": {"num_steps": 5, "num_prompts_per_step": 8, "group_size": 2, "num_updates_per_step": 2},
        "algorithm": {"dynamic_sampling": {}, "kl": {"loss_coef": 0.1, "estimator": "full"}},
        "rollout": {"deterministic": True},
        "checkpoint": {"every": 1, "keep": 9},
    }
    whole, parts = experiments / "dynamic", experiments / "dynamic-parts"
    run_experiment(whole, **sections)
    for num_steps in (3, 5):
        run_experiment(parts, **sections | {"train": sections["train"] | {"num_steps": num_steps}})
    entries, again, counted = (metrics(whole), metrics(parts), ("generated", "carried", "dropped", "surplus"))
    for step in range(1, 6):
        entry = entries[step]
        generated, carried, dropped, surplus = (entry[f"dynamic_sampling/{name}"] for name in counted)
        assert generated + carried == 8 + dropped + surplus
        assert carried == (entries[step - 1]["dynamic_sampling/surplus"] if step > 1 else 0)
        names = [n for n in entry if n.startswith(("dynamic_sampling/", "loss/", "reward/", "response/", "policy/"))]
        assert {n: again[step][n] for n in names} == {n: entry[n] for n in names}
        assert all(len({s["reward"] for s in group["samples"]}) > 1 for group in rollouts(whole)[step])
    assert sum(entry.get("dynamic_sampling/dropped", 0) for entry in entries.values()) > 0, "nothing was ever dropped"
    assert sum(entry.get("response/tool_use_fraction", 0) for entry in entries.values()) > 0
    assert entries[5]["policy/kl_reference"] > 1e-6
