"""Tool calls and reasoning in a turn of the model, found by the parsers of SGLang's own registry
inside an engine.

What the parsers drop is lost to the agent's message only, never to the ids. A text that gives
nothing stays whole.
"""

import asyncio
import re
from contextlib import suppress

import aiohttp

from megagrpo.data.messages import Message, Tools
from megagrpo.rollout.control import ServiceControl, ServiceUnreachable, bearer
from megagrpo.rollout.generation import GenerationFailed

# Kimi-K2 names its calls itself, and its template repeats the name before a tool's output.
# Bounded: a text that repeats "functions." would hold the event loop for minutes.
_OWN_IDS = re.compile(r"functions\.[\w.-]{1,128}:\d{1,9}(?=\s*<\|tool_call_argument_begin\|>)")
_TRIES, _PAUSE_S, _REQUEST_S = 20, 1.0, 30.0


class EngineParsers:
    """Asks any engine that is ready. Empty names: the text is the message."""

    def __init__(self, control: ServiceControl, tool_parser: str = "", reasoning_parser: str = ""):
        self._control = control
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._engine = ""  # URL of one that answered

    async def message(self, text: str, tools: Tools, prefix: str) -> Message:
        """Returns the message of a turn. prefix: of the ids of its calls. Raises GenerationFailed
        without an engine."""
        message: Message = {"role": "assistant", "content": text}
        if self._reasoning_parser:
            asked: dict[str, object] = {"text": text, "reasoning_parser": self._reasoning_parser}
            found = await self._ask("separate_reasoning", asked)
            if reasoning := found.get("reasoning_text"):
                message |= {"content": found.get("text") or "", "reasoning_content": reasoning}
        if self._tool_parser and tools:
            asked = {
                "text": message["content"],
                "tools": list(tools),
                "tool_call_parser": self._tool_parser,
            }
            found = await self._ask("parse_function_call", asked)
            parsed = found.get("calls") or ()
            ids = _OWN_IDS.findall(str(message["content"]))
            if len(set(ids)) != len(parsed):
                ids = [f"{prefix}{index:03}" for index in range(len(parsed))]
            calls = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["parameters"]},
                }
                for call_id, call in zip(ids, parsed, strict=True)
            ]
            if calls:
                message |= {"content": found.get("normal_text") or "", "tool_calls": calls}
        return message

    async def _ask(self, path: str, body: dict[str, object]) -> dict:
        """Returns the answer; {} if the parser cannot read the text, which is then the message."""
        problem = ""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        headers = bearer(self._control.api_key)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            for _ in range(_TRIES):
                while not self._engine:
                    self._engine = await self._ready_engine()
                try:
                    async with http.post(f"{self._engine}/{path}", json=body) as answer:
                        return await answer.json() if answer.status == 200 else {}
                except (aiohttp.ClientError, TimeoutError) as exc:
                    problem, self._engine = f"{self._engine}/{path}: {exc!r}", ""
                    await asyncio.sleep(_PAUSE_S)
        raise GenerationFailed(f"no engine parsed a turn in {_TRIES} tries: {problem}")

    async def _ready_engine(self) -> str:
        """Returns the URL of an engine; after a pause "" if none is ready, as while engines
        restart."""
        with suppress(ServiceUnreachable):
            status = await asyncio.to_thread(self._control.status)
            for engine in status.engines_of(""):
                if engine.state == "ready":
                    return engine.url
        await asyncio.sleep(_PAUSE_S)
        return ""
