"""The log-probabilities of an engine beside those that transformers computes of the same tokens with an HF folder."""

from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from engine_process import OneEngine

import megagrpo.rollout.cpu.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from transformers import AutoModelForCausalLM

from megagrpo.rollout.control import bearer

PROMPTS = [[1, 5, 6, 7, 8, 9], [1, *range(40, 90)]]
NEW_TOKENS = 24


class Difference(NamedTuple):
    """Of the log-probabilities of all tokens after the first: the mean and the largest distance."""

    mean: float
    largest: float


def logprob_difference(url: str, model: Path) -> Difference:
    """Samples from an engine whose cache holds nothing of the prompts, as after a publish; float32 on both sides."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    body = {
        "input_ids": PROMPTS,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
    }
    answer = httpx.post(f"{url}/generate", json=body, headers=bearer(OneEngine.api_key), timeout=120)
    distances = []
    for prompt, out in zip(PROMPTS, answer.raise_for_status().json(), strict=True):
        tokens = torch.tensor(prompt + out["output_ids"])
        with torch.no_grad():
            expected = hf(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        info = out["meta_info"]
        found = [entry[0] for entry in [*info["input_token_logprobs"], *info["output_token_logprobs"]]]
        assert found[0] is None and len(found) == len(tokens)
        distances.append((torch.tensor(found[1:]) - expected).abs())
    together = torch.cat(distances)
    return Difference(float(together.mean()), float(together.max()))
