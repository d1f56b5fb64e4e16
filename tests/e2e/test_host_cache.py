"""Engines with a hierarchical cache: keys and values come back from the host, and leave it with the weights."""

import random
import re
from pathlib import Path

import httpx
import pytest
import torch
from engine_logprobs import logprobs_by
from test_exchange import KEY, PlainSource, started
from tiny_model import make_drafting_model, make_tiny_model

from megagrpo.mesh import make_mesh
from megagrpo.weights.exchange import Exchange
from tests import experiments

pytestmark = pytest.mark.timeout(600)
MODELS = {"qwen3_moe": make_tiny_model, "deepseek_v3": lambda at, seed: make_drafting_model(at, "deepseek_v3", seed)}
CACHE, RATIO = 512, 4  # tokens on the engine's device; of host and device
PROMPTS, LENGTH = 6, 200  # three times what the device holds


def ask(url: str, model: Path) -> list[dict]:
    """Where an engine found each prompt's tokens; its log-probabilities are those of transformers."""
    draw, found = random.Random(0), []
    for _ in range(PROMPTS):
        prompt = [draw.randrange(3, 300) for _ in range(LENGTH)]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        response = httpx.post(f"{url}/generate", json=body, headers=KEY, timeout=300)
        answer = response.raise_for_status().json()["meta_info"]
        values, ids, _ = zip(*answer["output_token_logprobs"], strict=True)
        expected = logprobs_by(model, [*prompt, *ids])[LENGTH - 1 :]
        assert (torch.tensor(values) - expected).abs().max() < 2e-5
        found.append(answer.get("cached_tokens_details") or {"device": answer["cached_tokens"], "host": 0})
    return found


@pytest.mark.verifies("weights", "hierarchical cache: found on the host, empty after a publish")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_keys_and_values_come_back_from_the_host_and_leave_with_the_weights(family: str, tmp_path: Path):
    models = [MODELS[family](tmp_path / f"m{seed}", seed) for seed in range(2)]
    config = experiments.experiment(
        output_dir=str(tmp_path),
        model={"path": str(models[0])},
        rollout={"sglang": {"enable_hierarchical_cache": True, "hicache_ratio": RATIO, "max_total_tokens": CACHE}},
        weights={"transport": "reshard", "bucket_mb": 0.1, "timeout_s": 120.0},
    )
    with started(config, tmp_path) as engine:
        mesh, source = (make_mesh(0, 1, torch.device("cpu"), 60.0), PlainSource(models[0]).load(models[0]))
        exchange = Exchange(config, mesh, source, engine, tmp_path)
        exchange.publish(1)
        first, second = ask(engine.info.url, models[0]), ask(engine.info.url, models[0])
        assert all(of == {"device": 0, "host": 0} for of in first)
        assert sum(of["host"] for of in second) > 0.9 * (PROMPTS - CACHE // LENGTH) * LENGTH
        source.load(models[1])
        exchange.publish(2)
        assert all(of == {"device": 0, "host": 0} for of in ask(engine.info.url, models[1]))
        exchange.close()
    logs = "".join(file.read_text() for file in tmp_path.rglob("*.log"))
    [tokens] = re.findall(r"KV host pool: (\d+) tokens", logs)
    assert RATIO * CACHE <= int(tokens) <= RATIO * CACHE + 64, "what host_cache_bytes counts, and a page"
