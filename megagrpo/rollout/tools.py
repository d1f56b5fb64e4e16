"""Tools that a model calls in the middle of a response, so that the response has several turns.

The model's tokens and the tool's alternate; the tool's get loss mask 0 and log-probability 0. Token ids are kept as they were
sampled and put in: every turn continues the very ids of the turns before it. A tool that raises ends the run with its reason.
"""

import asyncio
import difflib
import importlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megagrpo.config.schema import ToolConfig
from megagrpo.rollout.generation import Response
from megagrpo.tiny.arithmetic import exact_value

ToolFunction = Callable[[str], str | None]
Turn = Callable[[int, tuple[int, ...], tuple[int, ...]], Awaitable[Response]]
_LAST_CALL = re.compile(r"<([^<>]*)>$")


def calculator(text: str) -> str | None:
    """The exact value of the expression between the last < and the > that ends the text; None when there is none."""
    call = _LAST_CALL.search(text)
    return exact_value(call.group(1)) if call else None


BUILT_IN: dict[str, ToolFunction] = {"calculator": calculator}


def load_tool(name: str) -> ToolFunction:
    """A built-in tool or "package.module:function". ValueError when there is no such thing."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(BUILT_IN)}"
        raise ValueError(
            f"sampling.tool.function {name!r} is unknown; {hint} (your own is written package.module:function)"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        hint = "; is its folder on PYTHONPATH?" if isinstance(exc, ModuleNotFoundError) else ""
        problem = f"importing {module_name} failed: {type(exc).__name__}: {exc}{hint}"
        raise ValueError(f"sampling.tool.function {name!r}: {problem}") from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"sampling.tool.function {name!r}: {module_name} has no function {function_name}")
    return function


@dataclass(frozen=True)
class Tool:
    function: ToolFunction
    encode: Callable[[str], Sequence[int]]
    call_end: int  # token id
    max_turns: int


def make_tool(config: ToolConfig, tokenizer) -> Tool:
    """Raises ValueError for an unknown function, and when call_end is not exactly one token of the tokenizer."""

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer does not know every character of {text!r:.80}, which is a tool's")
        return ids

    ids = encode(config.call_end)
    if len(ids) != 1:
        raise ValueError(
            f"sampling.tool.call_end {config.call_end!r} is {len(ids)} tokens; it must be one, at which sampling can stop"
        )
    return Tool(load_tool(config.function), encode, ids[0], config.max_turns)


async def respond_with_tool(
    turn: Turn, tool: Tool, decode: Callable[[Sequence[int]], str], max_tokens: int
) -> tuple[Response, tuple[int, ...]]:
    """The whole response, at most max_tokens with the tool's, and its loss mask.

    turn(number, ids so far, more stop ids) samples one turn. A response that is cut by a limit, of tokens or of turns, has finish
    reason "length"; the tool's output is never cut: where it leaves no room for another token the response ends before it.
    """
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    for number in range(tool.max_turns):
        said = await turn(number, tokens, (tool.call_end,))
        tokens, logprobs, mask = tokens + said.token_ids, logprobs + said.logprobs, mask + (1,) * len(said.token_ids)
        if said.finish_reason != "stop" or tokens[-1] != tool.call_end:
            return Response(tokens, logprobs, said.finish_reason), mask
        if number + 1 == tool.max_turns:
            break
        result = await asyncio.to_thread(
            tool.function, decode(tokens)
        )  # a slow tool must not hold up the other samples
        if result is None:
            return Response(tokens, logprobs, "stop"), mask
        ids = tuple(tool.encode(result))
        if len(tokens) + len(ids) >= max_tokens:
            break
        tokens, logprobs, mask = tokens + ids, logprobs + (0.0,) * len(ids), mask + (0,) * len(ids)
    return Response(tokens, logprobs, "length"), mask
