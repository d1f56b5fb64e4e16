"""Generation against a real SGLang service."""

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_logprobs import logprobs_by
from tiny_model import EOS

from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.engine_choice import Engines
from megagrpo.rollout.generation import GenerationClient, GenerationFailed, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.tools.status import print_status
from tests.experiments import until

PROMPTS = [(1, 40, 41, 42), (1, *range(50, 80)), (1, 7), (1, *range(100, 190))]
RETRY = RetryPolicy(retries=3, request_timeout_s=120.0)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24)


def generate(service, requests, version=0, retry=RETRY):
    """Responses to [(prompt, params, seed)], all at once."""

    async def run():
        engines = Engines.from_service(service.control)
        async with GenerationClient(engines, retry, AdmissionQueue(64)) as client:
            return await asyncio.gather(*(client.generate(SampleRequest(*request, version)) for request in requests))

    return asyncio.run(run())


@pytest.fixture
def ready(service):
    service.set_version(0)
    return service


def test_logprobs_equal_transformers(ready):
    params = [SAMPLED, replace(SAMPLED, temperature=0.6)]
    requests = [(prompt, p, 10 * i + j) for i, prompt in enumerate(PROMPTS) for j, p in enumerate(params)]
    for (prompt, p, _), response in zip(requests, generate(ready, requests), strict=True):
        expected = logprobs_by(ready.config.model.path, [*prompt, *response.token_ids], p.temperature)
        difference = (expected[len(prompt) - 1 :] - torch.tensor(response.logprobs)).abs().max().item()
        assert difference <= 1e-4, (prompt, p, difference)


def test_a_seed_gives_the_same_tokens_in_any_company(ready):
    alone = [generate(ready, [(prompt, SAMPLED, seed)])[0] for seed, prompt in enumerate(PROMPTS)]
    together = generate(ready, [(prompt, SAMPLED, seed) for seed, prompt in enumerate(PROMPTS)])
    others = generate(ready, [(prompt, SAMPLED, seed + 2**62) for seed, prompt in enumerate(PROMPTS)])
    assert alone == together
    assert [r.token_ids.tolist() for r in others] != [r.token_ids.tolist() for r in alone]


def test_an_engine_says_how_many_tokens_its_cache_holds(ready):
    assert ready.wait_alive().cache_tokens == 20_000


def test_the_load_of_an_engine_is_the_most_since_its_weights_were_verified(ready, capsys):
    sampled = [(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=400), seed) for seed in range(4)]
    load = lambda: ready.control.engines()[0].load  # noqa: E731
    until(lambda: generate(ready, sampled) and load().get("running", 0) >= 1, 120)  # the service looks once a second
    seen = load()
    assert seen["running"] <= 4 and 0 < seen["kv_use"] <= 1 and seen["retracted"] == 0
    assert print_status(ready.run_dir, False) == 0 and " of its cache in use since" in capsys.readouterr().out
    ready.set_version(0)
    assert load().get("running", 0) == 0


def test_how_a_response_ends(ready):
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    (whole,) = generate(ready, [(PROMPTS[0], greedy, 0)])
    assert whole.finish_reason == "length" and EOS not in whole.token_ids
    assert len(whole.token_ids) == len(whole.logprobs) == 12
    ids = whole.token_ids.tolist()
    stop_at = ids[5]
    first = ids.index(stop_at)
    (stopped,) = generate(ready, [(PROMPTS[0], replace(greedy, stop_token_ids=(stop_at,)), 0)])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == ids[: first + 1], "the token that ended it is part of the response"
    assert len(stopped.logprobs) == first + 1
    (other,) = generate(ready, [(PROMPTS[0], replace(greedy, stop=("</a.b>", "\u3002")), 0)])
    assert other.token_ids.tolist() == ids, "texts that it does not write, and their pattern, end nothing"


def test_end_of_sequence_is_part_of_the_response(ready):
    hot = replace(SAMPLED, max_tokens=160, temperature=2.0)
    responses = generate(ready, [(PROMPTS[2], hot, seed) for seed in range(8)])
    ended = [r for r in responses if r.finish_reason == "stop"]
    assert ended, "320 tokens at temperature 2: most of eight responses meet the end of sequence"
    assert all(r.token_ids[-1] == EOS and EOS not in r.token_ids[:-1] for r in ended)


def test_a_wrong_request_is_not_tried_again(ready):
    too_long = replace(SAMPLED, max_tokens=5)
    with pytest.raises(GenerationFailed, match="refused a request"):
        generate(ready, [((1,) * 4000, too_long, 0)], retry=RetryPolicy(1000, 60.0))
