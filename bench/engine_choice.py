"""Who chooses the engine of a request: the process that samples, or sglang-router, as until now.

    python bench/engine_choice.py [--real]

Played engines are one process, which counts what every one of them has in flight; each request
takes 2 to 18 s, and so many are open at once that an engine has four on average: 100 engines with
both, 1,000 without the router. --real: two engines of a random model on CPUs instead. The
router's side runs the class of the last commit that had it, if sglang-router 0.3.2 is installed.
Writes bench/results/engine_choice{,_real}.{json,md}.
"""

import argparse
import asyncio
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import aiohttp
import numpy as np
import orjson
import psutil
from aiohttp import web
from common import ROOT, provenance, write_results

sys.path.pop(0)  # this folder, whose statistics.py torch would take for Python's own
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT))

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.control import ServiceControl, bearer
from megagrpo.rollout.engine_choice import Affinity, Engines
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.rollout.service.node import free_port
from megagrpo.types import EngineInfo

PLAYED = ((100, True), (1000, False))  # engines, and whether the router is measured too
ROUTER = "1ee7b4b:megagrpo/rollout/service/router.py"  # the last commit that had it
KEY, HOST = "key", "127.0.0.1"
PER_ENGINE, ROUNDS, TURNS, EACH = 4, 2, 3, 100  # EACH: seeds of a session
PARAMS = SamplingParams(1.0, 16)
POLICY = RetryPolicy(2, 300.0)


def played_url(number: int, port: int) -> str:
    """Every engine has an address of its own on the loopback interface."""
    return f"http://127.0.{number // 250 + 1}.{number % 250 + 1}:{port}"


async def play(number: int, port: int) -> None:
    """The process of the engines and of the service's status."""
    in_flight, most = Counter(), []
    homes: dict[int, str] = {}
    later = Counter()

    async def generate(request: web.Request) -> web.Response:
        seed = orjson.loads(await request.read())["sampling_params"]["sampling_seed"]
        engine = request.host
        if seed % EACH:
            later["hit" if homes[seed // EACH] == engine else "miss"] += 1
        homes[seed // EACH] = engine
        in_flight[engine] += 1
        await asyncio.sleep(random.Random(seed).uniform(2, 18))
        in_flight[engine] -= 1
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        meta |= {"output_token_logprobs": [[-0.5, 1, None]]}
        return web.Response(body=orjson.dumps({"meta_info": meta}), content_type="application/json")

    async def status(request: web.Request) -> web.Response:
        engines = []
        for each in range(number):
            url = played_url(each, port)
            load = {"running": in_flight[url.removeprefix("http://")], "waiting": 0}
            info = EngineInfo(f"engine-{each}", url, "ready", 0, 1, 0, 1, "", load_now=load)
            engines.append(replace(info, serves=True))
        body = orjson.dumps({"failed": None, "engines": engines})
        return web.Response(body=body, content_type="application/json")

    async def counts(request: web.Request) -> web.Response:
        """What was counted since the last call."""
        found = {"most": list(most), "later": dict(later)}
        for each in (most, later, homes):
            each.clear()
        return web.json_response(found)

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            most.append((sum(in_flight.values()) / number, max(in_flight.values(), default=0)))

    async def anything(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/status", status)])
    app.add_routes([web.get("/counts", counts), web.route("*", "/{path:.*}", anything)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port, backlog=4096).start()
    print("ready", flush=True)
    await watch()


def router_of_before() -> ModuleType | None:
    """The module of the router that was, or None if it cannot run here."""
    source = subprocess.run(["git", "show", ROUTER], cwd=ROOT, capture_output=True, text=True)
    if source.returncode or importlib.util.find_spec("sglang_router") is None:
        return None
    module = ModuleType("router_of_before")
    exec(compile(source.stdout, ROUTER, "exec"), vars(module))
    vars(module).update(_START_S=600.0, _ADD_S=600.0)  # the machine may be busy
    return module


Send = Callable[[int, object, np.ndarray], Awaitable[int]]  # seed, affinity, prompt -> cached


@asynccontextmanager
async def chooser(engines: Engines, width: int) -> AsyncIterator[Send]:
    """The client of this package."""
    async with GenerationClient(engines, POLICY, AdmissionQueue(width)) as client:
        await engines.look()

        async def send(seed: int, affinity: object, prompt: np.ndarray) -> int:
            assert affinity is None or isinstance(affinity, Affinity)
            request = SampleRequest(prompt, PARAMS, seed, or_newer=True, affinity=affinity)
            return (await client.generate(request)).num_cached

        yield send


@asynccontextmanager
async def keyed(url: str, api_key: str, width: int) -> AsyncIterator[Send]:
    """Requests with the router's key."""
    connector, room = aiohttp.TCPConnector(limit=0), asyncio.Semaphore(width)
    timeout = aiohttp.ClientTimeout(total=POLICY.request_timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def send(seed: int, affinity: object, prompt: np.ndarray) -> int:
            body = {"input_ids": prompt.tolist(), "return_logprob": True}
            body |= {"sampling_params": PARAMS.body(seed)}
            headers = bearer(api_key) | {"X-SMG-Routing-Key": str(affinity)}
            async with room, http.post(f"{url}/generate", json=body, headers=headers) as answer:
                answer.raise_for_status()
                return (await answer.json())["meta_info"].get("cached_tokens", 0)

        yield send


class Cost:
    """Seconds of CPU of this process and of another one since it was made."""

    def __init__(self, other: int | None):
        self._processes = [psutil.Process(), *([] if other is None else [psutil.Process(other)])]
        self._before = self._now()

    def _now(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def ms(self, requests: int) -> list[float]:
        """Milliseconds a request of each."""
        pairs = zip(self._now(), self._before, strict=True)
        return [1000 * (now - before) / requests for now, before in pairs]


async def single(send: Send, number: int) -> None:
    """Requests of one turn."""
    prompt = np.arange(5, 21)
    await asyncio.gather(*(send(each * EACH, None, prompt) for each in range(number)))


async def sessions(send: Send, number: int, affinity: Callable[[int], object]) -> list[int]:
    """Sessions of several turns; returns the tokens of all later prompts and those cached."""

    async def session(each: int) -> list[int]:
        chance, of = np.random.default_rng(each), affinity(each)
        prompt, counts = chance.integers(5, 200, 128), [0, 0]
        for turn in range(TURNS):
            cached = await send(each * EACH + turn, of, prompt)
            if turn:
                counts[0], counts[1] = counts[0] + len(prompt), counts[1] + cached
            prompt = np.concatenate([prompt, chance.integers(5, 200, 64)])
        return counts

    counts = await asyncio.gather(*map(session, range(number)))
    return [sum(each) for each in zip(*counts, strict=True)]


@asynccontextmanager
async def before(
    module: ModuleType, urls: list[str], api_key: str, sticky: bool
) -> AsyncIterator[tuple[object, dict]]:
    """The router in front of these engines, and the seconds of its listing them."""
    with tempfile.TemporaryDirectory() as folder:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            router = module.Router(
                bind_host=HOST, url=f"http://{HOST}:{free_port(HOST)}", metrics_port=free_port(HOST),
                request_timeout_s=300.0, api_key=api_key, log=Path(folder) / "log", sticky=sticky,
            )  # fmt: skip
            await router.start(http)
            seconds = {}
            try:
                start = time.perf_counter()
                router._wanted.update(urls)  # not one by one, which took minutes for so many
                while len(await router._reconcile() or ()) < len(urls):
                    await asyncio.sleep(0.2)
                seconds["first"] = time.perf_counter() - start
                start = time.perf_counter()
                problems = await asyncio.gather(*map(router.add, urls))
                seconds["again"] = time.perf_counter() - start
                assert not any(problems), problems[:3]
                yield router, seconds
            finally:
                await router.stop()


def row(name: str, counted: dict, ms: list[float], seconds: float) -> dict:
    """What is told of a run over played engines."""
    fullest = max(mean for mean, _ in counted["most"])
    steady = [(mean, most) for mean, most in counted["most"] if mean > 0.8 * fullest]
    later = counted["later"]
    return {
        "who chooses": name,
        "most over mean": float(np.mean([most / mean for mean, most in steady])),
        "hits": later.get("hit", 0) / max(1, sum(later.values())),
        "ms": ms,
        "seconds": seconds,
    }


async def over_played(number: int, with_router: bool) -> dict:
    """What is measured over so many played engines."""
    port = free_port(HOST)
    command = [sys.executable, __file__, "--play", str(number), str(port)]
    width, found = number * PER_ENGINE, defaultdict(list)
    urls = [played_url(each, port) for each in range(number)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as played:
        try:
            assert await asyncio.to_thread(played.stdout.readline) == "ready\n"
            control = ServiceControl(f"http://{HOST}:{port}", KEY)
            async with aiohttp.ClientSession() as http:

                async def measured(name: str, send: Send, affinity, other: int | None) -> None:
                    await (await http.get(f"{control.url}/counts")).read()
                    cost, start = Cost(other), time.perf_counter()
                    requests = ROUNDS * width
                    if affinity is None:
                        await single(send, requests)
                    else:
                        await sessions(send, requests // TURNS, affinity)
                    seconds = time.perf_counter() - start
                    counted = await (await http.get(f"{control.url}/counts")).json()
                    found["rows"].append(row(name, counted, cost.ms(requests), seconds))
                    print(found["rows"][-1], flush=True)

                start, cost = time.perf_counter(), Cost(None)
                for _ in range(10):
                    control.status()
                found["look"] = [(time.perf_counter() - start) / 10, cost.ms(10)[0] / 1000]
                async with chooser(Engines.from_service(control), width) as send:
                    await measured("the process that samples", send, None, None)
                    of: Callable[[int], object] = lambda each: Affinity()  # noqa: E731
                    await measured("the same, turns with an affinity", send, of, None)
                module = router_of_before() if with_router else None
                for sticky in (False, True) if module else ():
                    async with before(module, urls, KEY, sticky) as (router, seconds):
                        found["listing"].append(seconds)
                        pid = router._process.pid
                        info = EngineInfo(
                            "router", router.url, "ready", 0, 1, 0, pid, "", serves=True
                        )
                        if sticky:
                            async with keyed(router.url, KEY, width) as send:
                                of = lambda each: f"session-{each}"  # noqa: E731
                                await measured("sglang-router, turns with a key", send, of, pid)
                        else:
                            async with chooser(
                                Engines(lambda info=info: [info], KEY), width
                            ) as send:
                                await measured("sglang-router", send, None, pid)
        finally:
            played.kill()
    return dict(found)


def played() -> None:
    """Writes bench/results/engine_choice.{json,md}."""
    header = ["who chooses", "engines", "most in flight over mean"]
    header += ["later turns at the engine of the first", "CPU a request", "seconds"]
    data, lines = provenance(), []
    for number, with_router in PLAYED:
        found = data[str(number)] = asyncio.run(over_played(number, with_router))
        engines = f"{number:,}"
        for each in found["rows"]:
            client, *router = each["ms"]
            line = [each["who chooses"], engines, f"{each['most over mean']:.2f}"]
            line += [f"{each['hits']:.1%}" if each["hits"] else ""]
            line += [f"{client:.2f} ms" + "".join(f" + {ms:.2f} ms of the router" for ms in router)]
            lines.append([*line, f"{each['seconds']:.0f}"])
        wall, cpu = found["look"]
        what = f"a look at the status: {wall:.3f} s, {cpu:.3f} s of CPU"
        lines.append([what, engines, "", "", "", ""])
        for name, when in (("first", "at the start"), ("again", "at a publish")):
            if found.get("listing"):
                seconds = min(each[name] for each in found["listing"])
                what = f"the router lists all engines {when}: {seconds:.1f} s"
                lines.append([what, engines, "", "", "", ""])
        write_results("engine_choice", data, header, lines)


async def over_real(control: ServiceControl) -> list[list[str]]:
    """Both sides over real engines: sessions of three turns, and what they find in caches."""
    lines, number = [], 48
    infos = control.engines()

    async def measured(name: str, send: Send, affinity, other: int | None) -> None:
        for info in infos:
            async with (
                aiohttp.ClientSession(headers=bearer(control.api_key)) as http,
                http.post(f"{info.url}/flush_cache") as answer,
            ):
                answer.raise_for_status()
        cost, start = Cost(other), time.perf_counter()
        read, cached = await sessions(send, number, affinity)
        seconds, ms = time.perf_counter() - start, cost.ms(number * TURNS)
        cost_ms = " + ".join(f"{each:.1f}" for each in ms) + " ms"
        lines.append([name, f"{cached / read:.1%}", cost_ms, f"{seconds:.1f}"])
        print(lines[-1], flush=True)

    async with chooser(Engines.from_service(control), 16) as send:
        await measured("the process that samples, any engine", send, lambda each: None, None)
        await measured("the same, turns with an affinity", send, lambda each: Affinity(), None)
    module = router_of_before()
    for sticky in (False, True) if module else ():
        urls = [info.url for info in infos]
        async with before(module, urls, control.api_key, sticky) as (router, _):
            pid = router._process.pid
            async with keyed(router.url, control.api_key, 16) as send:
                name = "sglang-router, turns with a key" if sticky else "sglang-router, any engine"
                await measured(name, send, lambda each: f"session-{each}", pid)
    return lines


def real() -> None:
    """Writes bench/results/engine_choice_real.{json,md}."""
    # here, as they import torch, which played engines need not wait for
    from running_service import running_service
    from tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        config = ExperimentConfig.model_validate({
            "name": "bench", "output_dir": folder, "model": {"path": str(model)}, "data": {"path": "none"},
            "rollout": {"num_engines": 2, "load_format": "model", "start_timeout_s": 400.0,
                        "sglang": {"max_total_tokens": 60000}},
        })  # fmt: skip
        with running_service(config, Path(folder) / "service") as service:
            for number in range(2):
                service.set_version(0, number)
            lines = asyncio.run(over_real(service.control))
    header = ["who chooses", "later prompts found in a cache", "CPU a request: client + router"]
    data = provenance() | {"engines": 2, "lines": lines}
    write_results("engine_choice_real", data, [*header, "seconds"], lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--play", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        asyncio.run(play(*given.play))
    elif given.real:
        real()
    else:
        played()
