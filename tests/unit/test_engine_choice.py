"""Which engine gets a request: by load, by affinity, and without those that do not serve."""

import asyncio
import random
import threading
from collections import Counter
from contextlib import AsyncExitStack, ExitStack

import pytest
from aiohttp import web

from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.control import ServiceUnreachable
from megagrpo.rollout.engine_choice import Affinity, Engines
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.types import EngineInfo


def engine(number: int, running: int = 0, state: str = "ready", **changes) -> EngineInfo:
    values = {"id": f"engine-{number}", "url": f"http://{number}", "state": state}
    values |= {"weight_version": 1, "incarnation": 1, "restarts": 0, "pid": 1, "reason": ""}
    values |= {"serves": state == "ready", "load_now": {"running": running, "waiting": 0.0}}
    return EngineInfo(**values | changes)


class Listing:
    """What a service lists, which a test changes, and how often it was asked."""

    def __init__(self, *engines: EngineInfo):
        self.engines, self.asked = engines, 0

    def __call__(self) -> tuple[EngineInfo, ...]:
        self.asked += 1
        return self.engines


FOREVER = ExitStack()  # in flight until the end of the tests


def chosen_of(engines: Engines, number: int, affinity: Affinity | None = None) -> Counter:
    """How many of so many requests, which stay in flight, each engine gets."""

    async def run() -> Counter:
        counts = Counter()
        for request in range(number):
            found = await engines.choose(affinity)
            FOREVER.enter_context(engines.in_flight(found.url, lambda request=request: None))
            counts[found.id] += 1
        return counts

    return asyncio.run(run())


def test_requests_are_spread_evenly():
    assert set(chosen_of(Engines(Listing(engine(0), engine(1)), "key"), 100).values()) == {50}
    many = chosen_of(Engines(Listing(*map(engine, range(50))), "key"), 50 * 20)
    assert len(many) == 50 and set(many.values()) == {20}


def test_the_engine_with_the_fewest_requests_is_chosen_whatever_begins_and_ends():
    """Some requests go by affinity to others, an engine fails or is gone, and comes back."""
    chance = random.Random(0)
    listing = Listing(*map(engine, range(9)))
    engines = Engines(listing, "key")
    counts = Counter()
    running: list[tuple[str, ExitStack]] = []

    def begin(url: str) -> None:
        stack = ExitStack()
        stack.enter_context(engines.in_flight(url, lambda stack=stack: None))
        running.append((url, stack))
        counts[url] += 1

    async def run() -> None:
        for number in range(3000):
            if number % 100 == 0:
                listing.engines = [engine(i) for i in range(9) if i != chance.randrange(12)]
                await engines.look()
            urls = [each.url for each in listing.engines]
            avoid = chance.choice(urls) if chance.random() < 0.05 else ""
            found = await engines.choose(avoid=avoid)
            assert counts[found.url] == min(counts[url] for url in urls if url != avoid)
            begin(found.url if chance.random() < 0.8 else chance.choice(urls))
            while len(running) > chance.randrange(60):
                url, stack = running.pop(chance.randrange(len(running)))
                stack.close()
                counts[url] -= 1

    asyncio.run(run())


def test_what_other_processes_have_in_flight_decides_between_equals():
    for _ in range(9):
        listing = Listing(engine(0, running=40), engine(1))
        assert chosen_of(Engines(listing, "key"), 1) == {"engine-1": 1}


def test_processes_that_see_the_same_loads_do_not_all_choose_one_engine():
    """64 processes with one request each, to 100 engines of which one has the fewest."""
    counts = Counter()
    for _ in range(64):
        listing = Listing(engine(0), *(engine(number, running=5) for number in range(1, 100)))
        counts += chosen_of(Engines(listing, "key"), 1)
    assert counts["engine-0"] <= 10  # two of a hundred on average


def test_own_requests_are_not_counted_twice():
    """An engine's load includes them."""
    listing = Listing(engine(0), engine(1))
    engines = Engines(listing, "key")
    chosen_of(engines, 100)
    listing.engines = (engine(0, running=50), engine(1, running=60))
    asyncio.run(engines.look())
    assert chosen_of(engines, 1) == {"engine-0": 1}


def test_requests_of_one_affinity_go_to_one_engine_and_elsewhere_when_it_is_gone():
    listing = Listing(*map(engine, range(4)))
    engines, affinity = Engines(listing, "key"), Affinity()
    (first,) = chosen_of(engines, 20, affinity)
    listing.engines = tuple(each for each in listing.engines if each.id != first)
    asyncio.run(engines.look())
    (second,) = chosen_of(engines, 20, affinity)
    assert second != first
    other = asyncio.run(engines.choose(affinity, avoid=affinity.url))
    assert other.id != second and chosen_of(engines, 20, affinity) == {other.id: 20}


def test_only_serving_engines_are_chosen_and_one_that_failed_if_there_is_no_other():
    states = ("stale", "asleep", "draining", "dead", "starting")
    others = [engine(number, state=state) for number, state in enumerate(states)]
    listing = Listing(engine(9), *others)
    engines = Engines(listing, "key")
    assert chosen_of(engines, 10) == {"engine-9": 10}
    assert asyncio.run(engines.choose(avoid="http://9")).id == "engine-9"
    listing.engines = tuple(others)
    asyncio.run(engines.look())
    assert asyncio.run(engines.choose()) is None
    updated = engine(0, state="stale", serves=True)  # newer weights are written into it
    listing.engines = (updated,)
    asyncio.run(engines.look())
    assert asyncio.run(engines.choose()) == updated


@pytest.mark.parametrize("state, gone", [("dead", True), ("draining", False), ("asleep", False)])
def test_requests_to_a_server_that_has_ended_are_abandoned(state, gone):
    listing, abandoned = Listing(engine(0), engine(1)), []
    engines = Engines(listing, "key")

    async def run() -> None:
        await engines.look()
        with (
            engines.in_flight("http://0", lambda: abandoned.append(0)),
            engines.in_flight("http://1", lambda: abandoned.append(1)),
        ):
            listing.engines = (engine(0, state=state), engine(1))
            await engines.look()

    asyncio.run(run())
    assert abandoned == ([0] if gone else [])


def test_calls_share_a_look_and_a_service_that_is_gone_leaves_the_last_one():
    listing = Listing(engine(0))

    async def run(engines: Engines) -> None:
        await asyncio.gather(*(engines.look() for _ in range(50)))
        assert listing.asked <= 2
        before = listing.asked
        await engines.look(older_than_s=60.0)
        assert listing.asked == before

    engines = Engines(listing, "key")
    asyncio.run(run(engines))

    def unreachable() -> tuple[EngineInfo, ...]:
        raise ServiceUnreachable("gone")

    engines._listing = unreachable
    assert asyncio.run(engines.choose(avoid="http://0")).id == "engine-0"
    assert asyncio.run(Engines(unreachable, "key").choose()) is None


def test_a_look_that_began_before_it_was_asked_for_does_not_count():
    """It may hold what was true before an engine failed."""
    listing, answer = Listing(engine(0)), threading.Event()

    def slow() -> tuple[EngineInfo, ...]:
        found = listing()
        answer.wait(20)
        return found

    async def run() -> None:
        engines = Engines(slow, "key")
        first = asyncio.create_task(engines.look())
        while not listing.asked:
            await asyncio.sleep(0.01)
        listing.engines = (engine(1),)
        second = asyncio.create_task(engines.look())
        await asyncio.sleep(0)
        answer.set()
        await asyncio.gather(first, second)
        assert engines.listed == listing.engines

    asyncio.run(run())


TURNS = 3


async def fake_engine(stack: AsyncExitStack, number: int, down: set[str], answered: list[str]) -> EngineInfo:
    """An engine that answers over HTTP and notes its name, and breaks off every request while it is down."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer key":
            return web.Response(status=401)
        if listed.id in down:
            request.transport.close()
        answered.append(listed.id)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": [[-0.5, 1, None]]}
        return web.json_response({"meta_info": meta})

    app = web.Application()
    app.add_routes([web.post("/generate", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    listed = engine(number, weight_version=0, url=url)
    return listed


async def episodes(number: int) -> tuple[list[list[str]], list[str]]:
    """The engines of the turns of each episode; those of an episode whose engine breaks off all
    after its first turn."""
    down = set[str]()
    answered: list[str] = []
    async with AsyncExitStack() as stack:
        listed = [await fake_engine(stack, each, down, answered) for each in range(2)]
        client = GenerationClient(Engines(lambda: listed, "key"), RetryPolicy(4, 20.0, base_s=0.01), AdmissionQueue(64))
        await stack.enter_async_context(client)

        async def turn(affinity: Affinity) -> str:
            request = SampleRequest([1, 2], SamplingParams(1.0, 4), 0, affinity=affinity)
            await client.generate(request)
            return answered[-1]

        async def episode() -> list[str]:
            affinity = Affinity()
            return [await turn(affinity) for _ in range(TURNS)]

        found = [await episode() for _ in range(number)]
        affinity = Affinity()
        first = await turn(affinity)
        down.add(first)
        return found, [first, *[await turn(affinity) for _ in range(2)]]


def test_turns_of_an_episode_reach_one_engine_and_another_one_if_it_is_lost():
    found, lost = asyncio.run(episodes(24))
    assert all(len(set(turns)) == 1 for turns in found)
    assert {turns[0] for turns in found} == {"engine-0", "engine-1"}
    assert lost[0] != lost[1] == lost[2]
