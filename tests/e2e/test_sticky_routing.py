"""The real router before fake engines: later turns of a rollout reach the engine of its first
one."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.rollout.service.node import free_port
from megagrpo.rollout.service.router import Router
from megagrpo.system.environment import ENGINE_HEADER

EPISODES, TURNS, ENGINES = 12, 3, 2


async def engine(stack: AsyncExitStack, name: str, down: set[str]) -> str:
    """The URL of an engine that answers anything, and breaks off what is asked while it is down."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate" and name in down:
            request.transport.close()
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, 1, None]],
        }
        await asyncio.sleep(0.05)
        return web.json_response({"meta_info": meta}, headers={ENGINE_HEADER: name})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def episodes(folder: Path, sticky: bool) -> tuple[list[list[str]], list[str]]:
    """The engines of the turns of each episode; those of an episode whose engine breaks off all
    after its first."""
    own, down = "127.0.0.1", set[str]()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = Router(
            bind_host=own, url=f"http://{own}:{free_port(own)}", metrics_port=free_port(own), request_timeout_s=20,
            api_key="key", log=folder / "router.log", sticky=sticky,
        )  # fmt: skip
        stack.push_async_callback(router.stop)
        await router.start(http)
        for number in range(ENGINES):
            assert not await router.add(await engine(stack, f"engine-{number}", down))
        policy = RetryPolicy(4, 20.0, base_s=0.1)
        client = await stack.enter_async_context(
            GenerationClient(router.url, "key", policy, AdmissionQueue(64))
        )
        params = SamplingParams(1.0, 4)

        async def turn(key: str, number: int) -> str:
            request = SampleRequest([1, 2], params, number, routing_key=key)
            answers: list[str] = []
            client.on_request = lambda name, start, end, tokens: answers.append(name)
            await client.generate(request)
            return answers[-1]

        async def episode(number: int) -> list[str]:
            return [await turn(f"episode-{number}", each) for each in range(TURNS)]

        found = [await episode(number) for number in range(EPISODES)]
        first = await turn("lost", 0)
        down.add(first)
        return found, [first, await turn("lost", 1)]


@pytest.mark.parametrize("sticky", [True, False])
def test_turns_of_an_episode_reach_one_engine_and_another_one_if_it_is_lost(tmp_path, sticky):
    found, lost = asyncio.run(episodes(tmp_path, sticky))
    same = sum(len(set(turns)) == 1 for turns in found)
    if sticky:
        assert same == EPISODES and len(set(lost)) == 2, "the retry leaves without the key"
        assert set(Counter(turns[0] for turns in found)) == {"engine-0", "engine-1"}
    else:
        assert same == 0
