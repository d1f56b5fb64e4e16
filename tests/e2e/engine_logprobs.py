"""The log-probabilities of an engine beside those that transformers computes of the same tokens with an HF folder, or
the published equations of a model that it does not know."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import httpx
import torch
from engine_process import OneEngine

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from transformers import AutoModelForCausalLM

from megagrpo.models.table import read_description
from megagrpo.rollout.control import bearer
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.kimi_reference import KimiLinear

PROMPTS = [[1, 5, 6, 7, 8, 9], [1, *range(40, 90)]]
NEW_TOKENS = 24


class Difference(NamedTuple):
    """Of the log-probabilities of all tokens after the first: the mean and the largest distance.

    replicas: the engine's data-parallel ranks that sampled.
    """

    mean: float
    largest: float
    replicas: int


def sampled(url: str, new_tokens: int = NEW_TOKENS) -> list[dict]:
    """The engine's answers to PROMPTS, with the log-probabilities of all tokens."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
    answer = httpx.post(f"{url}/generate", json=body, headers=bearer(OneEngine.api_key), timeout=300)
    return answer.raise_for_status().json()


@torch.no_grad()
def logprobs_by(model: Path | str, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of every token after the first, by transformers in float32."""
    ids = torch.tensor(tokens)
    logits = logits_by(model, ids[None])[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@torch.no_grad()
def logits_by(model: Path | str, rows: torch.Tensor) -> torch.Tensor:
    """[rows, length, vocabulary] of rows of the same length, by transformers in float32."""
    return torch.cat([_load(model)(some).logits for some in rows.split(250)])


@lru_cache(maxsize=4)
def _load(model: Path | str) -> torch.nn.Module:
    config = read_description(Path(model) / "config.json")
    if config["model_type"] == "kimi_linear":  # which transformers 5.12 does not know
        reference = KimiLinear(SimpleNamespace(**config))
        reference.load_state_dict(dict(HfFolder(Path(model)).items()))
        return reference
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def logprob_difference(url: str, model: Path, version: int | None = None) -> Difference:
    """Samples from an engine whose cache holds nothing of the prompts, as after a publish of `version`."""
    distances, replicas = [], set()
    for prompt, out in zip(PROMPTS, sampled(url), strict=True):
        info = out["meta_info"]
        replicas.add(info.get("dp_rank"))
        assert version is None or info["weight_version"] == str(version)
        found = [entry[0] for entry in [*info["input_token_logprobs"], *info["output_token_logprobs"]]]
        expected = logprobs_by(model, prompt + out["output_ids"])
        assert found[0] is None and len(found) == 1 + len(expected)
        distances.append((torch.tensor(found[1:]) - expected).abs())
    together = torch.cat(distances)
    return Difference(float(together.mean()), float(together.max()), len(replicas))
