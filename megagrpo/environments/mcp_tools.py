"""The environment `mcp`: tools of a Model Context Protocol server, which the model calls until it
answers.

Calls have the form of Hermes and Qwen models: {"name", "arguments"} in <tool_call> tags. The
protocol comes from the `mcp` package, version 2, which users install.
"""

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from megagrpo.environments.answers import answer_grader, shortened
from megagrpo.rollout.agents import Unavailable
from megagrpo.rollout.agents.program_worker import foreign_environment

try:
    import mcp
    from anyio.from_thread import start_blocking_portal
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT
except ImportError as exc:
    raise ImportError("it needs the mcp package: pip install 'mcp>=2.3,<3'") from exc

# the client's words for a status of 404 in a session, and for another one above 399
_LOST = ("Session terminated", "Server returned an error response")
_ABOUT = """You may call these tools:
<tools>
{tools}
</tools>
Call one with <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>; its result follows in
<tool_response>. Without a call your text is the answer.

{prompt}"""


class McpTools:
    """A rollout with a private session on the server that `command` starts or that listens at
    `url`.

    A turn without a call is the answer, which `grader` rewards as `reward.grader` would. max_chars:
    the limit for a result. timeout_s: the limit for one request, and for the begin of a turn's last
    call. A bad call is answered with text.
    If the server is gone, the rollout ends and begins again elsewhere.
    """

    def __init__(
        self,
        row: Mapping[str, object],
        seed: int,
        grader: str,
        command: str = "",
        url: str = "",
        max_chars: int = 4000,
        timeout_s: float = 14.0,  # twice that is below the environment's 30
    ):
        if bool(command) == bool(url):
            raise ValueError("args.command or args.url, one of them")
        self._prompt = row["prompt"]
        self._answer = answer_grader(grader, row)
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._session = _Session(command, url, timeout_s)
        with ExitStack() as refused:
            refused.callback(self._session.close)
            self._tools = self._session.tools()
            refused.pop_all()

    def reset(self) -> str:
        """Returns the tools and the row's prompt."""
        words = partial(json.dumps, ensure_ascii=False)
        return _ABOUT.format(tools="\n".join(map(words, self._tools)), prompt=self._prompt)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the results of a turn's calls, or the reward of an answer."""
        # no regular expression: a text that repeats the tag would take one minutes
        begun = [piece.partition("</tool_call>") for piece in text.split("<tool_call>")[1:]]
        until = time.monotonic() + self._timeout_s
        results = [self._result(call.strip(), until) for call, end, _ in begun if end]
        if len(begun) > len(results):
            results.append("error: the call has no end; write </tool_call> after it")
        if results:
            responses = (f"<tool_response>\n{result}\n</tool_response>" for result in results)
            return "\n".join(responses), 0.0, False
        return None, self._answer(text), True

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _result(self, call: str, until: float) -> str:
        if time.monotonic() > until:
            return f"error: not called: those before took {self._timeout_s:g} s"
        try:
            asked = json.loads(call, parse_constant=_no_number)
            name = asked["name"]
            arguments = asked.get("arguments") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            return f"error: the call is no JSON with name and arguments: {exc}"
        known = [str(tool["name"]) for tool in self._tools]
        if name not in known:
            return f"error: no tool {name!r}; there are {', '.join(known)}"
        if not isinstance(arguments, dict):
            return f"error: arguments should be an object, not {arguments!r:.80}"
        return shortened(self._session.call(name, arguments), self._max_chars)


class _Session:
    """A session with a server. It lives in a separate thread, because one task must begin and end
    it."""

    def __init__(self, command: str, url: str, timeout_s: float):
        server: str | mcp.StdioServerParameters = url
        if command:
            program, *args = shlex.split(command)
            server = mcp.StdioServerParameters(
                command=program, args=args, env=foreign_environment({})
            )
        with _unavailable(command or url), ExitStack() as refused:
            self._portal = refused.enter_context(start_blocking_portal())
            client = mcp.Client(server, read_timeout_seconds=timeout_s)
            self._client = refused.enter_context(self._portal.wrap_async_context_manager(client))
            self._ends = refused.pop_all()

    def tools(self) -> list[dict[str, object]]:
        """Returns name, description and input schema of all tools. Raises Unavailable."""
        tools: list[dict[str, object]] = []
        cursor: str | None = None
        seen = set[str | None]()
        while cursor not in seen:
            seen.add(cursor)
            with _unavailable("tools/list"):
                page = self._portal.call(partial(self._client.list_tools, cursor=cursor))
            tools += (
                {"name": t.name, "description": t.description, "inputSchema": t.input_schema}
                for t in page.tools
            )
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise Unavailable(f"tools/list: page {cursor!r} comes again and again")

    def call(self, name: str, arguments: dict[str, object]) -> str:
        """Returns the text of a tool's result, which may be an error. Raises Unavailable."""
        try:
            with _unavailable("tools/call"):
                result = self._portal.call(self._client.call_tool, name, arguments)
        except mcp.MCPError as exc:
            return f"error: {exc.message}"
        except (ValueError, RuntimeError) as exc:
            return f"error: the tool's answer is not the protocol's: {(str(exc) or repr(exc)).splitlines()[0]}"
        texts = [*map(_words, result.content)]
        found = result.structured_content
        if found is not None and not _says(texts, found):
            texts.append(json.dumps(found, ensure_ascii=False))
        text = "\n".join(texts)
        if result.is_error:
            return f"error: {text or 'the tool failed without a word'}"
        return text

    def close(self) -> None:
        """Ends the session, and the server that was started for it. Idempotent."""
        with suppress(OSError, ExceptionGroup):  # it has gone before
            self._ends.close()


@contextmanager
def _unavailable(action: str) -> Iterator[None]:
    """Raises Unavailable for a server that cannot be reached, is gone or hangs."""
    try:
        yield
    except mcp.MCPError as exc:
        if exc.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT) and exc.message not in _LOST:
            raise
        raise Unavailable(f"{action}: the server is gone: {exc.message}") from exc
    except (OSError, ExceptionGroup) as exc:
        cause: Exception = exc
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        raise Unavailable(f"{action}: {type(cause).__name__}: {cause}") from exc


def _says(texts: list[str], found: object) -> bool:
    """Returns whether the texts of a result have its structured content, as a server should write
    it; `result` is the name of a value that is no object. Without texts nothing says it, as [] of no items."""
    read: list[object] = []
    for text in texts:
        read.append(text)
        with suppress(ValueError, RecursionError):
            read[-1] = json.loads(text)
    said = (read, *read, texts, *texts)  # a text may look like a number
    return bool(read) and any(found in (each, {"result": each}) for each in said)


def _words(part: mcp.types.ContentBlock) -> str:
    """Returns a part of a result as text; of a resource without text its URI."""
    match part:
        case mcp.types.TextContent():
            return part.text
        case mcp.types.EmbeddedResource(resource=mcp.types.TextResourceContents(text=text)):
            return text
        case mcp.types.EmbeddedResource():
            return f"[resource {part.resource.uri} {part.resource.mime_type or ''}]"
        case mcp.types.ResourceLink():
            return f"[resource {part.uri}: {part.description or part.title or part.name}]"
    return f"[{part.type}]"


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
