"""The environment `mcp`: tools of a Model Context Protocol server, which the model calls until it
answers.

Calls are written as Hermes and Qwen models write them: {"name", "arguments"} in <tool_call> tags.
Protocol: modelcontextprotocol.io/specification/2025-06-18, tools over stdio and streamable HTTP;
nothing else of it is offered to the server.
"""

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

import httpx

from megagrpo.environments.answers import answer_grader
from megagrpo.rollout.agents import Unavailable
from megagrpo.rollout.agents.program_worker import foreign_environment

_VERSION = "2025-06-18"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_ABOUT = """You may call these tools:
<tools>
{tools}
</tools>
Call one with <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>; its result follows in
<tool_response>. Without a call your text is the answer.

{prompt}"""


class McpTools:
    """A rollout with a session of its own on the server that `command` starts or that listens at
    `url`.

    A turn without a call is the answer, which `grader` rewards as `reward.grader` would. max_chars:
    of a result. A bad call is answered with text; a server that is gone ends the rollout, which
    begins again elsewhere.
    """

    def __init__(
        self,
        row: Mapping[str, object],
        seed: int,
        grader: str,
        command: str = "",
        url: str = "",
        max_chars: int = 4000,
        timeout_s: float = 20.0,
    ):
        if bool(command) == bool(url):
            raise ValueError("args.command or args.url, one of them")
        self._prompt, self._answer, self._max_chars = (
            row["prompt"],
            answer_grader(grader, row),
            max_chars,
        )
        self._server = _Process(command) if command else _Http(url, timeout_s)
        self._session = _Session(self._server)
        about = {"name": "megagrpo", "version": "1"}
        begin = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": about}
        with ExitStack() as refused:
            refused.callback(self._server.close)
            self._session.ask("initialize", begin)
            self._session.tell("notifications/initialized")
            self._tools = list(self._listed())
            refused.pop_all()

    def reset(self) -> str:
        """Returns the tools and the row's prompt."""
        tools = "\n".join(
            json.dumps({k: tool.get(k) for k in ("name", "description", "inputSchema")})
            for tool in self._tools
        )
        return _ABOUT.format(tools=tools, prompt=self._prompt)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the results of a turn's calls, or the reward of an answer."""
        if calls := _CALL.findall(text):
            results = [f"<tool_response>\n{self._result(call)}\n</tool_response>" for call in calls]
            return "\n".join(results), 0.0, False
        return None, self._answer(text), True

    def close(self) -> None:
        """Ends the session."""
        self._server.close()

    def _listed(self) -> Iterator[dict]:
        cursor: object = None
        while True:
            page = self._session.ask("tools/list", {} if cursor is None else {"cursor": cursor})
            yield from page["tools"]
            if (cursor := page.get("nextCursor")) is None:
                return

    def _result(self, call: str) -> str:
        try:
            asked = json.loads(call)
            name, arguments = asked["name"], asked.get("arguments") or {}
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            return f"error: the call is no JSON with name and arguments: {exc}"
        if name not in (known := [tool["name"] for tool in self._tools]):
            return f"error: no tool {name!r}; there are {', '.join(known)}"
        try:
            found = self._session.ask("tools/call", {"name": name, "arguments": arguments})
        except _Refused as exc:
            return f"error: {exc}"[: self._max_chars]
        texts = [
            part["text"] if part["type"] == "text" else f"[{part['type']}]"
            for part in found.get("content", [])
        ]
        return ("error: " * bool(found.get("isError")) + "\n".join(texts))[: self._max_chars]


class _Refused(Exception):
    """Raised for a request that the server answers with an error."""


class _Session:
    """JSON-RPC 2.0 with a server."""

    def __init__(self, server: "_Process | _Http"):
        self._server, self._numbers = server, itertools.count(1)

    def ask(self, method: str, params: Mapping[str, object]) -> dict:
        """Returns the result of a request. Raises _Refused, and Unavailable if the server does not
        answer."""
        number = next(self._numbers)
        for message in self._server.exchange(
            {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        ):
            if message.get("id") == number and "method" not in message:
                if "error" in message:
                    raise _Refused(str(message["error"].get("message", message["error"])))
                return message["result"]
            if (
                "id" in message and "method" in message
            ):  # it asks; a client without capabilities has nothing but ping
                refused = {"error": {"code": -32601, "message": "not supported"}}
                said = {"result": {}} if message["method"] == "ping" else refused
                self._server.send({"jsonrpc": "2.0", "id": message["id"], **said})
        raise Unavailable(f"{method}: the server is gone")

    def tell(self, method: str) -> None:
        """Sends a notification."""
        self._server.send({"jsonrpc": "2.0", "method": method})


class _Process:
    """A server that is started for this session: a message a line on its standard input and
    output."""

    def __init__(self, command: str):
        pipe, own = subprocess.PIPE, foreign_environment({})
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                env=own,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as exc:
            raise Unavailable(f"{command}: {exc}") from exc

    def exchange(self, message: Mapping[str, object]) -> Iterator[dict]:
        """Sends a request; yields what the server says from then on."""
        self.send(message)
        assert self._process.stdout is not None, "a pipe"
        for line in self._process.stdout:
            if line.strip():
                yield json.loads(line)

    def send(self, message: Mapping[str, object]) -> None:
        """Sends what has no answer."""
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise Unavailable(f"the server is gone: {exc}") from exc

    def close(self) -> None:
        """Closes its input, on which it ends; kills it if it does not."""
        with suppress(OSError):
            self._process.communicate(timeout=2.0)
        self._process.kill()
        self._process.wait()


class _Http:
    """A server with streamable HTTP: a message is a POST, answered by JSON or by a stream of
    events."""

    def __init__(self, url: str, timeout_s: float):
        accept = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": _VERSION}
        self._url, self._client = (
            url,
            httpx.Client(headers=accept, timeout=timeout_s, trust_env=False),
        )

    def exchange(self, message: Mapping[str, object]) -> Iterator[dict]:
        """Sends a request; yields what the server says in answer to it."""
        try:
            with self._client.stream("POST", self._url, json=message) as answer:
                if answer.status_code >= 400:
                    raise Unavailable(f"{self._url}: {answer.status_code} {answer.read()[:200]!r}")
                if "mcp-session-id" in answer.headers:
                    self._client.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    for line in answer.iter_lines():
                        if line.startswith("data:"):
                            yield json.loads(line.removeprefix("data:"))
                elif content := answer.read():
                    yield json.loads(content)
        except httpx.HTTPError as exc:
            raise Unavailable(f"{self._url}: {type(exc).__name__}: {exc}") from exc

    def send(self, message: Mapping[str, object]) -> None:
        """Sends what has no answer."""
        for _ in self.exchange(message):
            pass

    def close(self) -> None:
        """Ends the session on the server."""
        with suppress(httpx.HTTPError):
            self._client.delete(self._url)
        self._client.close()
