"""The chat endpoint of agents: OpenAI's chat completions and Anthropic's messages, over the turns
of conversations.

Each rollout has a separate key, in the URL or as the API key, which gives access to its conversation
only.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
from aiohttp import web

from megagrpo.rollout.agents import chat
from megagrpo.rollout.agents.conversation import Conversation, Refused
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.system.run_folder import json_bytes

_KEY_BYTES = 24
_BACKLOG = 4096  # connections of agents that start together
# a client whose connection was closed while a tool ran would fail with its next turn
_IDLE_S = 86400.0
_UNKNOWN = "no rollout has this key, or it is over"


class Gateway:
    """Serves conversations by HTTP in the loop that calls `start`, until that ends.

    host: the address that it listens on. model: the model's name in answers.
    """

    def __init__(self, host: str, model: str):
        self._host, self._model = host, model
        self._conversations: dict[str, Conversation] = {}
        self._socket: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to serve, unless it already does."""
        if self._socket is None:
            self._socket = socket.create_server((self._host, 0), backlog=_BACKLOG)
            self._opening = asyncio.create_task(self._serve(self._socket))

    @property
    def url(self) -> str:
        """Returns the URL of the endpoint."""
        assert self._socket is not None, "started"
        return f"http://{self._host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Frees its port, after the loop has ended."""
        if self._socket is not None:
            self._socket.close()

    @contextmanager
    def session(self, conversation: Conversation) -> Iterator[tuple[str, str]]:
        """Yields (base URL of OpenAI's clients, key) of a conversation, which ends with the
        block."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._conversations[key] = conversation
        try:
            yield f"{self.url}/e/{key}/v1", key
        finally:
            conversation.close()
            del self._conversations[key]

    async def _serve(self, where: socket.socket) -> None:
        app = web.Application(client_max_size=0)  # no limit
        for prefix in ("", "/e/{key}"):
            for path, dialect in (("chat/completions", chat.OPENAI), ("messages", chat.ANTHROPIC)):
                app.router.add_post(f"{prefix}/v1/{path}", partial(self._answer, dialect))
            app.router.add_get(f"{prefix}/v1/models", self._models)
        # an agent that closes its connection cancels its turn
        runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=_IDLE_S, handler_cancellation=True
        )
        await runner.setup()
        await web.SockSite(runner, where, backlog=_BACKLOG).start()

    async def _models(self, request: web.Request) -> web.Response:
        if self._conversation(request) is None:
            return _json(401, chat.OPENAI.error(401, "invalid_api_key", _UNKNOWN))
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "megagrpo"}
        return _json(200, {"object": "list", "data": [model]})

    def _conversation(self, request: web.Request) -> Conversation | None:
        """Returns the conversation whose key the request has."""
        sent = request.headers
        key = request.match_info.get("key") or sent.get("x-api-key") or sent.get("authorization")
        return self._conversations.get((key or "").removeprefix("Bearer "))

    async def _answer(self, dialect: chat.Dialect, request: web.Request) -> web.Response:
        conversation = self._conversation(request)
        if conversation is None:
            return _json(401, dialect.error(401, "invalid_api_key", _UNKNOWN))
        try:
            # not orjson, which refuses half a character: the renderer replaces it
            body = json.loads(await request.read())
            if not isinstance(body, dict):
                raise Refused("invalid_request", f"the body is a JSON object, not {body!r:.80}")
            turn = await conversation.say(*dialect.read(body))
        except (ValueError, RecursionError) as exc:
            code = exc.code if isinstance(exc, Refused) else "invalid_request"
            return _json(400, dialect.error(400, code, str(exc)))
        except (GenerationFailed, asyncio.CancelledError) as exc:  # the run, or its rollout, ends
            # of the loop's end, or by an agent that has gone: aiohttp would wait for more requests
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            return _json(503, dialect.error(503, "unavailable", str(exc)))
        answer = dialect.write(turn, body, self._model)
        if not body.get("stream"):
            return _json(200, answer)
        events = b""  # all at once: a turn is answered when it is complete
        for name, piece in dialect.pieces(answer, body):
            data = piece if isinstance(piece, bytes) else _dumped(piece)
            events += f"event: {name}\n".encode() * bool(name) + b"data: " + data + b"\n\n"
        return web.Response(body=events, content_type="text/event-stream")


def _json(status: int, body: Mapping[str, object]) -> web.Response:
    return web.Response(body=_dumped(body), status=status, content_type="application/json")


def _dumped(body: Mapping[str, object]) -> bytes:
    return json_bytes(body, np.ndarray.tolist)
