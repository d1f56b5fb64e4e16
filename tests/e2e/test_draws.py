"""Engines, and the replicas of attention by data in one, give a group different responses."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engine_process import OneEngine, started_engines
from tiny_model import make_tiny_model

from megagrpo.rollout.control import bearer
from megagrpo.rollout.generation import SamplingParams
from tests.experiments import experiment


def ask(engine: OneEngine) -> list[list[int]]:
    """Two responses to one prompt, by a replica each."""
    params = SamplingParams(temperature=1.0, max_tokens=12).body(seed=7) | {"ignore_eos": True}
    body = {"input_ids": [[1, 5, 6, 7, 8, 9]] * 2, "sampling_params": params}
    answer = httpx.post(f"{engine.info.url}/generate", json=body, headers=bearer(engine.api_key), timeout=400)
    return [each["output_ids"] for each in answer.raise_for_status().json()]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_all_responses_to_a_prompt_differ(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    attention = {"enable_dp_attention": True, "dp_size": 2}
    rollout = {"num_engines": 2, "tp": 2, "load_format": "model", "sglang": attention}
    config = experiment(output_dir=str(tmp_path), model={"path": str(model)}, rollout=rollout)
    with started_engines(config, tmp_path) as engines, ThreadPoolExecutor() as pool:
        for _ in range(3):
            responses = [tuple(ids) for each in pool.map(ask, engines) for ids in each]
            assert len(set(responses)) == len(responses) == 4, responses
