"""Responses that come in pieces go on from the tokens that came when their engine ends."""

import asyncio

import pytest
from fake_service import FakeService, running

from megagrpo.rollout.admission import Turnstile
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.rollout.response import Response

PROMPT, QUICK = (5, 6), RetryPolicy(3, 2.0, streaming=True, base_s=0.01, cap_s=0.02)


def streamed(service: FakeService, versions: list[int], accepted: int = 0, **params) -> tuple[Response, int]:
    """A response, and the tokens that were thrown away; the engine's version is the next of `versions` at each try."""

    async def run():
        async with GenerationClient(service.url, "key", QUICK, Turnstile(1)) as client:
            request = SampleRequest(PROMPT, SamplingParams(1.0, 9, **params), 1234, accepted, or_newer=accepted > 0)
            task = asyncio.create_task(client.generate(request))
            for number, version in enumerate(versions, 1):
                while len(service.requests) < number:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.02)
                service.version = version
            return await task, client.num_discarded

    return asyncio.run(run())


def test_a_cut_response_goes_on_from_the_tokens_that_came():
    with running(FakeService(script=[("cut", 1), ("cut", 2)])) as service:
        response, discarded = streamed(service, [])
    assert response == Response((1, 2, 3, 4), (-0.5,) * 4, "stop", 0) and discarded == 0
    assert [request["input_ids"] for request in service.requests] == [[5, 6], [5, 6, 1], [5, 6, 1, 2, 3]]
    sampling = [request["sampling_params"] for request in service.requests]
    assert [each["max_new_tokens"] for each in sampling] == [9, 8, 6]
    assert {each["sampling_seed"] for each in sampling} == {1234}


def test_versions_of_a_response_that_was_cut_between_two_publishes():
    """A piece names the version at its end alone: its first tokens may be of what sampled before."""
    with running(FakeService(version=3, script=[("cut", 1), ("cut", 1)])) as service:
        response, discarded = streamed(service, [4, 6], accepted=3)
    assert response.token_ids.tolist() == [1, 2, 3, 4] and discarded == 0
    assert (response.weight_version, response.newer) == (3, ((2, 6),))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("params, version", [({"stop": ("x",)}, 0), ({}, 1)], ids=["stop texts", "other weights"])
def test_a_cut_response_starts_again_if_it_cannot_go_on(params, version, number):
    with running(FakeService(version=version, script=[("cut", number)])) as service:
        response, discarded = streamed(service, [0], **params)
    assert response == Response((1, 2, 3, 4), (-0.5,) * 4, "stop", 0) and discarded == number
    assert [request["input_ids"] for request in service.requests] == [[5, 6], [5, 6]]
