"""The chat endpoint of agents: OpenAI's chat completions and Anthropic's messages, over the turns
of conversations.

Each rollout has a separate key, in the URL or as the API key, which gives access to its conversation
only.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

from megagrpo.rollout.agents import chat
from megagrpo.rollout.agents.conversation import ChatTurn, Conversation, Refused
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.system.run_folder import json_bytes

_KEY_BYTES = 24
_BACKLOG = 4096  # connections of agents that start together
# a client whose connection was closed while a tool ran would fail with its next turn
_IDLE_S = 86400


class _Server(uvicorn.Server):
    """Leaves signals to the surrounding program, because uvicorn would take INT and TERM in a main
    thread."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """Serves conversations by HTTP in the loop that calls `start`, until that ends.

    host: the address that it listens on. model: the model's name in answers.
    """

    def __init__(self, host: str, model: str):
        self._host, self._model = host, model
        self._conversations: dict[str, Conversation] = {}
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to serve, unless it already does."""
        if self._socket is None:
            self._socket = socket.create_server((self._host, 0), backlog=_BACKLOG)
            self._serving = asyncio.create_task(self._serve(self._socket))

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
        routes = [
            Route(f"{prefix}/v1/{path}", endpoint, methods=[method])
            for prefix in ("", "/e/{key}")
            for path, method, endpoint in (
                ("chat/completions", "POST", partial(self._answer, chat.OPENAI)),
                ("messages", "POST", partial(self._answer, chat.ANTHROPIC)),
                ("models", "GET", self._models),
            )
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
        )
        await _Server(config).serve(sockets=[where])

    async def _models(self, request: Request) -> HttpResponse:
        if self._conversation(request) is None:
            return _json(401, chat.OPENAI.error(401, "invalid_api_key", _UNKNOWN))
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "megagrpo"}
        return _json(200, {"object": "list", "data": [model]})

    def _conversation(self, request: Request) -> Conversation | None:
        """Returns the conversation whose key the request has."""
        key = request.path_params.get("key")
        if key is None:
            header = request.headers.get("x-api-key") or request.headers.get("authorization", "")
            key = header.removeprefix("Bearer ")
        return self._conversations.get(key)

    async def _answer(self, dialect: chat.Dialect, request: Request) -> HttpResponse:
        conversation = self._conversation(request)
        if conversation is None:
            return _json(401, dialect.error(401, "invalid_api_key", _UNKNOWN))
        try:
            body = orjson.loads(await request.body())
            if not isinstance(body, dict):
                raise Refused("invalid_request", f"the body is a JSON object, not {body!r:.80}")
            asked = dialect.read(body)
            turn = await _while_connected(request, conversation, asked)
        except ValueError as exc:
            code = exc.code if isinstance(exc, Refused) else "invalid_request"
            return _json(400, dialect.error(400, code, str(exc)))
        except (GenerationFailed, asyncio.CancelledError) as exc:  # the run, or its rollout, ends
            return _json(503, dialect.error(503, "unavailable", str(exc)))
        if turn is None:
            return HttpResponse(status_code=499)  # nobody reads it
        answer = dialect.write(turn, body, self._model)
        if not body.get("stream"):
            return _json(200, answer)

        async def pieces() -> AsyncIterator[bytes]:
            for name, piece in dialect.pieces(answer, body):
                if name:
                    yield f"event: {name}\n".encode()
                data = piece if isinstance(piece, bytes) else _dumped(piece)
                yield b"data: " + data + b"\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")


_UNKNOWN = "no rollout has this key, or it is over"


async def _while_connected(
    request: Request, conversation: Conversation, asked: chat.Asked
) -> ChatTurn | None:
    """Returns the turn; None if the agent has closed its connection, which cancels the turn."""
    saying = asyncio.ensure_future(conversation.say(*asked))
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([saying, leaving], return_when=asyncio.FIRST_COMPLETED)
        if saying.done():
            return saying.result()
        saying.cancel()
        with suppress(asyncio.CancelledError):
            return await saying  # it may have ended meanwhile
        return None
    finally:
        saying.cancel()
        leaving.cancel()


def _json(status: int, body: Mapping[str, object]) -> HttpResponse:
    return HttpResponse(_dumped(body), status, media_type="application/json")


def _dumped(body: Mapping[str, object]) -> bytes:
    return json_bytes(body, np.ndarray.tolist)
