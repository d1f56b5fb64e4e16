"""Responses of several turns from a real engine, and the loop with all that asks for more than one
batch of samples."""

import numpy as np
import pytest
import torch
from engine_logprobs import logprobs_by
from run_megagrpo import metrics, rollouts, run_experiment
from running_service import RunningService
from sampling import Grader, source_of
from test_service import PROMPTS
from transformers import AutoTokenizer

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.tools import Tool
from megagrpo.types import Prompt, Sample

SAYS_IT_AGAIN = {"function": "string:capwords", "call_end": ">", "max_turns": 3}
MAX_TOKENS, RESULT, GROUP_SIZE = 24, (90, 91, 92), 3


def sample(service: RunningService, tool: Tool | None) -> list[tuple[Prompt, Sample]]:
    tokenizer = AutoTokenizer.from_pretrained(service.config.model.path)
    sections = {
        "train": {"group_size": GROUP_SIZE},
        "sampling": {"max_response_tokens": MAX_TOKENS},
    }
    config = ExperimentConfig.model_validate(service.config.model_dump() | sections)
    source = source_of(service.control, config, Grader(len), tokenizer.decode, tool=tool)
    prompts = [Prompt(i, "", ids, "") for i, ids in enumerate(PROMPTS)]
    return [(group.prompt, s) for group in source.next(0, prompts, 0) for s in group.samples]


def test_turns_continue_the_tokens_that_were_sampled(service):
    """The first turn is the response without a tool up to the call; log-probabilities are those of
    transformers.

    Those of all turns, for the whole sequence: what was put in was seen, and nothing was tokenised
    again.
    """
    service.set_version(0)
    plain = sample(service, None)
    inner = [token for _, s in plain for token in s.token_ids[:-4]]
    call_end = max(set(inner), key=inner.count)  # a random model closes no call of its own accord
    with_tool = sample(
        service, Tool(lambda text: "result", lambda text: RESULT, call_end, max_turns=3)
    )
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
        assert put_in == list(RESULT) * (len(put_in) // len(RESULT))
        assert len(put_in) // len(RESULT) <= (after.token_ids[mask.numpy() > 0] == call_end).sum()
        expected = logprobs_by(service.config.model.path, [*prompt.token_ids, *after.token_ids])
        expected = expected[len(prompt.token_ids) - 1 :] * mask
        assert (expected - torch.tensor(after.logprobs)).abs().max().item() <= 1e-4
        turns.append(1 + len(put_in) // len(RESULT))
    assert max(turns) > 1, "no response had a second turn"
    assert (
        sample(service, Tool(lambda text: "result", lambda text: RESULT, call_end, max_turns=3))
        == with_tool
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dynamic_sampling_tools_and_exact_kl_together(experiments):
    """Three steps, then two more from the checkpoint with its surplus, are five: the surplus and
    its order survive."""
    sections = {
        "sampling": {"max_response_tokens": 10, "tool": SAYS_IT_AGAIN},
        "train": {
            "num_steps": 5,
            "num_prompts_per_step": 8,
            "group_size": 2,
            "num_updates_per_step": 2,
        },
        "algorithm": {"dynamic_sampling": {}, "kl": {"loss_coef": 0.1, "estimator": "full"}},
        "rollout": {"deterministic": True},
        "checkpoint": {"every": 1, "keep": 9},
    }
    whole, parts = experiments / "dynamic", experiments / "dynamic-parts"
    run_experiment(whole, **sections)
    for num_steps in (3, 5):
        run_experiment(parts, **sections | {"train": sections["train"] | {"num_steps": num_steps}})
    entries, again, counted = (
        metrics(whole),
        metrics(parts),
        ("generated", "carried", "dropped", "surplus"),
    )
    for step in range(1, 6):
        entry = entries[step]
        generated, carried, dropped, surplus = (
            entry[f"dynamic_sampling/{name}"] for name in counted
        )
        assert generated + carried == 8 + dropped + surplus
        assert carried == (entries[step - 1]["dynamic_sampling/surplus"] if step > 1 else 0)
        names = [
            n
            for n in entry
            if n.startswith(("dynamic_sampling/", "loss/", "reward/", "response/", "policy/"))
        ]
        assert {n: again[step][n] for n in names} == {n: entry[n] for n in names}
        assert all(
            len({s["reward"] for s in group["samples"]}) > 1 for group in rollouts(whole)[step]
        )
    assert sum(entry.get("dynamic_sampling/dropped", 0) for entry in entries.values()) > 0, (
        "nothing was ever dropped"
    )
    assert sum(entry.get("response/tool_use_fraction", 0) for entry in entries.values()) > 0
    assert entries[5]["policy/kl_reference"] > 1e-6
