"""A rollout service in a thread, over real HTTP: the control endpoint and the engine of one, which fail on purpose."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from megagrpo.rollout.control import ServiceControl

RESTARTED = "/restarted"  # follows the URL of a later incarnation


@dataclass
class FakeService:
    """Plays the service and its engine over real HTTP.

    `script` holds what the next requests to /generate get, one entry each, then all get an answer:
    an int is a status, bytes are the body of an answer, "hang", "drop" (close the connection), or a dict that replaces
    parts of meta_info. `hang` tells of a request's body whether it gets no answer yet. `looks`: how
    often it is looked at before its engine serves. `restart`: a next incarnation has taken the
    engine's place.
    """

    script: list = field(default_factory=list)
    version: int = 0
    looks: int = 0
    incarnation: int = 1
    state: str = "ready"
    failed: str | None = None
    url: str = ""
    cache_tokens: int | None = None
    load_now: dict[str, float] = field(default_factory=dict)
    hang: Callable[[dict], bool] = lambda body: False
    teachers: tuple[str, ...] = ()  # whose engines are at the same URL
    judges: tuple[str, ...] = ()  # likewise, by the beginning of their ids; each reply is `Score: 0.5`
    judge_script: list = field(default_factory=list)  # as `script`, of requests for replies
    judged: list[dict] = field(default_factory=list)
    score_script: list = field(default_factory=list)  # as `script`, of requests for scores
    scored: list[dict] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # of requests to /generate
    marked: list[tuple] = field(default_factory=list)

    @property
    def control(self) -> ServiceControl:
        return ServiceControl(self.url, "key")

    def restart(self) -> None:
        self.incarnation += 1

    async def status(self, request: web.Request) -> web.Response:
        verified = self.version if self.state == "ready" else None
        self.looks -= 1
        engine = {
            "id": "engine-0",
            "url": self.url if self.incarnation == 1 else self.url + RESTARTED,
            "state": self.state,
            "serves": self.state == "ready" and self.looks < 0,
            "weight_version": verified,
            "incarnation": self.incarnation,
        }
        engine |= {"restarts": 0, "pid": 1, "reason": "", "load_now": self.load_now}
        engine["cache_tokens"] = self.cache_tokens
        models = [*(f"teacher-{name}" for name in self.teachers), *self.judges]
        scoring = [engine | {"id": f"{name}-0", "model": name, "serves": True} for name in models]
        found = {"failed": self.failed, "engines": [engine, *scoring]}
        return web.json_response(found)

    async def ready(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.marked += [(incarnation, body["weight_version"]) for incarnation in body["incarnations"].values()]
        self.state, self.version = "ready", body["weight_version"]
        return web.json_response({"ended": []})

    async def rest(self, request: web.Request) -> web.Response:
        self.marked.append((request.path,))
        return web.json_response({})

    async def judge(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"].removeprefix("Bearer").strip())
        self.judged.append(await request.json())
        step = self.judge_script.pop(0) if self.judge_script else "stop"
        if isinstance(step, int):
            return web.Response(status=step, body=b"on purpose")
        choice = {"message": {"role": "assistant", "content": "Score: 0.5"}, "finish_reason": step}
        return web.json_response({"choices": [choice]})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers["Authorization"].removeprefix("Bearer").strip())
        scores = "logprob_start_len" in body
        (self.scored if scores else self.requests).append(body)
        script = self.score_script if scores else self.script
        step = script.pop(0) if script else {}
        while self.hang(body):
            await asyncio.sleep(0.01)
        if step == "hang":
            await asyncio.sleep(3600)
        if step == "drop":
            request.transport.close()
        if isinstance(step, bytes):
            return web.Response(body=step, content_type="text/html")
        if isinstance(step, int):
            return web.Response(status=step, body=b"on purpose, says a proxy: nicht verf\xfcgbar")
        if scores:
            return web.json_response({"text": "", "meta_info": scores_of(body) | step})
        # The response is a function of the request alone: the seed's last digits, as tokens.
        tokens = [int(digit) for digit in str(body["sampling_params"]["sampling_seed"])[-4:]]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": str(self.version), "weight_versions": []}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
        if number := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [tokens_at(token, number) for token in tokens]
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta | step})


def tokens_at(token: int, number: int) -> list[list]:
    """As SGLang lists the most probable tokens of a position."""
    return [[-0.5 * (1 + rank), token + rank, None] for rank in range(number)]


def scores_of(body: dict) -> dict:
    """Of a request: the log-probability of a token is a hundredth of its id, as is that of others at its position."""
    first, *rest = body["input_ids"][body["logprob_start_len"] :]
    meta = {
        "finish_reason": {"type": "length", "length": 0},
        "weight_version": "default",
        "input_token_logprobs": [[None, first, None], *([-t / 100, t, None] for t in rest)],
    }
    if number := body.get("top_logprobs_num"):
        meta["input_top_logprobs"] = [None, *(tokens_at(token, number) for token in rest)]
    if asked := body.get("token_ids_logprob"):
        k = len(asked) // len(rest)
        rows = [asked[i * k : i * k + k] for i in range(len(rest))]
        meta["input_token_ids_logprobs"] = [None, *([[-t / 100, t, None] for t in r] for r in rows)]
    return meta


@contextmanager
def running(service: FakeService) -> Iterator[FakeService]:
    """Serve it on a free port until the block ends."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    routes = [web.get("/status", service.status), web.post("/engines/ready", service.ready)]
    routes += [web.post(path, service.rest) for path in ("/sleep", "/may_start")]
    routes += [web.post("/generate", service.generate), web.post(f"{RESTARTED}/generate", service.generate)]
    routes.append(web.post("/v1/chat/completions", service.judge))
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop():
        await runner.cleanup()
        hanging = asyncio.all_tasks() - {asyncio.current_task()}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
