"""Measures the endpoint of agent programs: 2,000 sessions at once against a scripted engine; prefix
hits of real ones.

    python bench/agents.py load [--sessions 2000] [--turns 5] [--engine-s 25]
    python bench/agents.py prefix

load: the gateway, its conversations and the client of the engines are one process, as in a trainer;
the agents and the engine, which answers each turn after --engine-s seconds on average, are another.
All sessions are open at once. Writes bench/results/agents.{json,md}. prefix: two real engines of a
random model on CPUs. Turns with and without an affinity to the engine of the first, and a turn
after a publish that empties the cache or keeps it under the key of older weights; writes
bench/results/agents_prefix.{json,md}.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import aiohttp
import httpx
import numpy as np
import orjson
import psutil
from aiohttp import web
from common import ROOT, provenance, write_results

sys.path.pop(0)  # this folder, whose statistics.py torch would take for Python's own
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT))

from running_service import RunningService, running_service
from tiny_model import make_tiny_model

from examples.laptop.model import character_tokenizer
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import AgentConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.agents.answering import RolloutTask
from megagrpo.rollout.agents.conversation import Conversation
from megagrpo.rollout.agents.gateway import Gateway
from megagrpo.rollout.agents.renderer import Message, Renderer, Tools
from megagrpo.rollout.control import bearer
from megagrpo.rollout.engine_choice import Affinity, Engines
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams
from megagrpo.rollout.response import CacheKey, CacheUse, Response
from megagrpo.types import EngineInfo, Prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, SAID, SAMPLED = 512, 64, 128  # tokens
START_S = 10.0  # over which agents begin


class Load:
    """The process of the trainer: conversations, the gateway and the client of engines."""

    def __init__(self, turns: int) -> None:
        self._tokenizer = character_tokenizer(LETTERS)
        self._config = AgentConfig(function="of_no_module:function", max_turns=turns)
        self._renderer = Renderer(
            self._tokenizer, DataConfig(path="rows.jsonl", max_prompt_tokens=PROMPT), True
        )
        self._params = SamplingParams(1.0, SAMPLED)

    def conversation(self, client: GenerationClient, number: int) -> Conversation:
        """A rollout's."""

        affinity = Affinity()

        async def sample(turn: int, context: np.ndarray, max_tokens: int, known: int) -> Response:
            request = SampleRequest(context, self._params, number * 1000 + turn, affinity=affinity)
            return await client.generate(request)

        async def parse(text: str, tools: Tools, prefix: str) -> Message:
            return {"role": "assistant", "content": text}

        decode: Callable[[np.ndarray], str] = lambda ids: str(self._tokenizer.decode(ids.tolist()))  # noqa: E731
        prompt = Prompt(number, "", np.zeros(0, np.int32), "")
        task = RolloutTask(prompt, lambda whose: 0, sample, 100_000, decode)
        return Conversation(self._config, self._renderer, task, parse)

    async def run(self, sessions: int, turns: int, engine_s: float) -> dict:
        """Returns what was measured."""
        command = [
            sys.executable,
            __file__,
            "others",
            "--turns",
            str(turns),
            "--engine-s",
            str(engine_s),
        ]
        process, me = psutil.Process(), subprocess.PIPE
        gateway = Gateway("127.0.0.1", "bench")
        with (
            ExitStack() as stack,
            subprocess.Popen(command, stdin=me, stdout=me, text=True) as others,
        ):
            url = others.stdout.readline().strip()
            engine = EngineInfo("engine-0", url, "ready", 0, 1, 0, others.pid, "", serves=True)
            gateway.start()
            policy = RetryPolicy(2, 600.0)
            async with GenerationClient(
                Engines(lambda: [engine], "key"), policy, AdmissionQueue(2 * sessions)
            ) as client:
                before = process.memory_info().rss
                talks = [self.conversation(client, number) for number in range(sessions)]
                keys = [stack.enter_context(gateway.session(talk)) for talk in talks]
                others.stdin.write(json.dumps(keys) + "\n")
                others.stdin.flush()
                reading = asyncio.ensure_future(asyncio.to_thread(others.stdout.readline))
                cpu, largest, load, began = sum(process.cpu_times()[:2]), 0, [], time.monotonic()
                while not reading.done():
                    largest = max(largest, process.memory_info().rss)
                    load.append(os.getloadavg()[0])
                    await asyncio.wait([reading], timeout=1.0)
                cpu = sum(process.cpu_times()[:2]) - cpu
                found = json.loads(await reading)
                parts = [part for talk in talks for part in talk.samples()[0]]
        gateway.close()
        assert len(parts) == sessions, "one sample each: every turn continued the one before"
        masked = sum(int(part.loss_mask.sum()) for part in parts)
        assert masked == found["sampled"] == sessions * turns * SAMPLED
        return found | {
            "cpu_ms_per_turn": 1000 * cpu / found["turns"],
            "kib_per_session": (largest - before) / sessions / 1024,
            "load": [min(load), max(load)],
            "seconds": time.monotonic() - began,
        }


async def others(turns: int, engine_s: float) -> None:
    """The process of the agents and of the scripted engine."""
    counts = {"context": 0, "sampled": 0, "to_agents": 0, "turns": 0, "open": 0, "most_open": 0}
    delays: dict[int, float] = {}
    own_s: tuple[list[float], list[float]] = ([], [])  # of first turns, of later ones

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        counts["context"] += len(body["input_ids"])
        counts["sampled"] += SAMPLED
        seed = body["sampling_params"]["sampling_seed"]
        chance = random.Random(seed)
        delays[seed] = delay = chance.uniform(0.4, 1.6) * engine_s
        pairs = [
            [-chance.random(), chance.randrange(3, 3 + len(LETTERS)), None] for _ in range(SAMPLED)
        ]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "output_token_logprobs": pairs,
        }
        data = orjson.dumps({"meta_info": meta})
        await asyncio.sleep(delay)
        return web.Response(body=data, content_type="application/json")

    async def agent(http: aiohttp.ClientSession, number: int, url: str, key: str) -> None:
        await asyncio.sleep(START_S * random.random())
        counts["open"] += 1
        counts["most_open"] = max(counts["most_open"], counts["open"])
        messages = [{"role": "user", "content": "a" * PROMPT}]
        for turn in range(turns):
            began = time.perf_counter()
            data, headers = orjson.dumps({"messages": messages}), {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/chat/completions", data=data, headers=headers) as answer:
                choice = orjson.loads(await answer.read())["choices"][0]
            own_s[turn > 0].append(time.perf_counter() - began - delays[number * 1000 + turn])
            counts["to_agents"] += len(choice.get("token_ids") or ())
            counts["turns"] += 1
            messages += [choice["message"], {"role": "user", "content": "b" * SAID}]
        counts["open"] -= 1

    async with AsyncExitStack() as stack:
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.post("/generate", generate)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        keys = json.loads(await asyncio.to_thread(sys.stdin.readline))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600))
        )
        await asyncio.gather(*(agent(http, number, *key) for number, key in enumerate(keys)))
        seen = {}
        for name, values in zip(("first", "later"), map(sorted, own_s), strict=True):
            seen |= {f"{name}_median_ms": 1000 * statistics.median(values)}
            seen |= {f"{name}_p99_ms": 1000 * values[len(values) * 99 // 100]}
        print(json.dumps(counts | seen), flush=True)


def load(sessions: int, turns: int, engine_s: float) -> None:
    """Writes bench/results/agents.{json,md}."""
    found = asyncio.run(Load(turns).run(sessions, turns, engine_s))
    data = provenance() | {"sessions": sessions, "engine_s": engine_s} | found
    low, high = found["load"]
    data["machine"] += f"; load {low:.0f} to {high:.0f}, this bench included"
    lines = [
        ["sessions open at once", f"{found['most_open']:,}"],
        [
            "turns",
            f"{found['turns']:,} of {SAMPLED} tokens, after {engine_s:g} s of the engine on average",
        ],
        ["CPU of the gateway's process, a turn", f"{found['cpu_ms_per_turn']:.2f} ms"],
        ["memory of the gateway's process, a session", f"{found['kib_per_session']:.0f} KiB"],
        *(
            [
                f"added to the engine's time, {of}: median, p99",
                f"{found[a]:.0f} ms, {found[b]:.0f} ms",
            ]
            for of, a, b in (
                (
                    f"first turns, which come within {START_S:g} s",
                    "first_median_ms",
                    "first_p99_ms",
                ),
                ("later turns", "later_median_ms", "later_p99_ms"),
            )
        ),
        [
            "times that a sampled token came from an engine as JSON",
            f"{found['sampled'] / _sampled(found):.2f}",
        ],
        ["times that it went to an agent as JSON", f"{found['to_agents'] / _sampled(found):.2f}"],
        [
            "ids sent to engines for each id sampled, contexts",
            f"{found['context'] / _sampled(found):.2f}",
        ],
    ]
    write_results("agents", data, ["what", "figure"], lines)


def _sampled(found: dict) -> int:
    return found["turns"] * SAMPLED


class Prefixes:
    """Episodes against real engines; counts what these read again."""

    EPISODES, TURNS, READ, SPOKEN, ADDED = (
        32,
        4,
        256,
        32,
        64,
    )  # tokens of a prompt, a turn, what is said to it

    def __init__(self, service: RunningService) -> None:
        self._service, self._control, self._chance = (
            service,
            service.control,
            np.random.default_rng(0),
        )
        self._prompts = [self._ids(self.READ) for _ in range(self.EPISODES)]
        self._version = 0

    def _ids(self, number: int) -> np.ndarray:
        return self._chance.integers(3, 250, number).astype(np.int32)

    def publish(self, flush: bool) -> None:
        """What a publish does to engines, beside their weights, which stay."""
        self._version += 1
        headers = bearer(self._control.api_key)
        for number, engine in enumerate(self._control.engines()):
            if flush:
                httpx.post(
                    f"{engine.url}/flush_cache", headers=headers, timeout=60
                ).raise_for_status()
            self._service.set_version(self._version, number)

    def episodes(self, sticky: bool = True, publish: str = "") -> dict:
        """Plays all episodes at once. publish: "flush" or "by_version", before the third turn, and
        new ones after it.

        Returns the tokens of contexts and those found in caches, by turn, and of the new episodes'
        first turns.
        """
        self.publish(flush=True)
        use = CacheUse(newest=self._version)
        keyed = publish == "by_version"

        async def run() -> dict:
            policy = RetryPolicy(4, 120.0)
            engines = Engines.from_service(self._control)
            async with GenerationClient(engines, policy, AdmissionQueue(16)) as client:

                async def turn(
                    number: int, context: np.ndarray, key: CacheKey | None, of: Affinity | None
                ) -> Response:
                    params = SamplingParams(1.0, self.SPOKEN)
                    request = SampleRequest(
                        context, params, number, 0, True, cache_key=key, affinity=of
                    )
                    return await client.generate(request)

                keys = [CacheKey(use) if keyed else None for _ in self._prompts]
                affinities = [Affinity() if sticky else None for _ in self._prompts]
                contexts, read, cached = list(self._prompts), [], []
                for number in range(self.TURNS):
                    if publish and number == 2:
                        self.publish(flush=not keyed)
                        use.newest = self._version
                    each = zip(contexts, keys, affinities, strict=True)
                    answers = await asyncio.gather(*(turn(number, *of) for of in each))
                    read.append(sum(map(len, contexts)))
                    cached.append(sum(answer.num_cached for answer in answers))
                    pairs = zip(contexts, answers, strict=True)
                    contexts = [
                        np.concatenate([c, a.token_ids, self._ids(self.ADDED)]) for c, a in pairs
                    ]
                fresh = CacheKey(use) if keyed else None
                new = await asyncio.gather(
                    *(turn(9, prompt, fresh, None) for prompt in self._prompts)
                )
                return {
                    "read": read,
                    "cached": cached,
                    "cached_of_new": sum(answer.num_cached for answer in new),
                }

        return asyncio.run(run())


def prefix() -> None:
    """Writes bench/results/agents_prefix.{json,md}."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        config = ExperimentConfig.model_validate({
            "name": "bench", "output_dir": folder, "model": {"path": str(model)}, "data": {"path": "none"},
            "rollout": {"num_engines": 2, "load_format": "model", "start_timeout_s": 400.0,
                        "sglang": {"max_total_tokens": 60000}},
        })  # fmt: skip
        with running_service(config, Path(folder) / "service") as service:
            for number in range(2):
                service.wait_alive(number)
            bench = Prefixes(service)
            found = {
                "sticky": bench.episodes(),
                "spread": bench.episodes(sticky=False),
                "flush": bench.episodes(publish="flush"),
                "by_version": bench.episodes(publish="by_version"),
            }
    rows = {
        "later turns, to the engine of the first": ("sticky", slice(1, None)),
        "later turns, to any engine": ("spread", slice(1, None)),
        "the turn after a publish that empties caches": ("flush", slice(2, 3)),
        "the turn after a publish, by_version": ("by_version", slice(2, 3)),
    }
    lines = []
    for name, (of, turns) in rows.items():
        read, cached = sum(found[of]["read"][turns]), sum(found[of]["cached"][turns])
        lines.append([name, f"{read:,}", f"{cached:,}", f"{cached / read:.1%}"])
    for of in ("flush", "by_version"):
        total = Prefixes.EPISODES * Prefixes.READ
        new = found[of]["cached_of_new"]
        lines.append(
            [
                f"new rollouts of the same prompts then, {of}",
                f"{total:,}",
                f"{new:,}",
                f"{new / total:.1%}",
            ]
        )
    data = provenance() | {"engines": 2, "episodes": Prefixes.EPISODES} | found
    write_results("agents_prefix", data, ["requests", "tokens", "found in a cache", "share"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["load", "prefix", "others"])
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine-s", type=float, default=25.0)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.what == "others":
        asyncio.run(others(args.turns, args.engine_s))
    elif args.what == "prefix":
        prefix()
    else:
        load(args.sessions, args.turns, args.engine_s)


if __name__ == "__main__":
    main()
