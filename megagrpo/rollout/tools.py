"""Tools that a model calls in the middle of a response, so that the response has several turns.

The model's tokens alternate with the tool's, which have loss mask 0 and log-probability 0. Token ids are kept as they
were sampled or inserted: every turn continues the very ids of the turns before it. A tool that raises ends the run,
with the reason it gave.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megagrpo.config.schema import ToolConfig
from megagrpo.system.user_function import load_function

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

    from megagrpo.rollout.generation import Response  # needs an HTTP client, which `check` and certificates do without

ToolFunction = Callable[[str], str | None]  # (the response so far, as text) -> output, or None to end the response

BUILT_IN = {"calculator": "megagrpo.rollout.calculator:calculator"}


class Turn(Protocol):
    """Samples one turn of a response."""

    def __call__(self, number: int, so_far: np.ndarray, stops: tuple[int, ...]) -> "Awaitable[Response]":
        """Continues the ids `so_far` [T] until a token of `stops` or of the experiment's own; turns count from 0."""
        ...


def load_tool(name: str) -> ToolFunction:
    """Imports the tool `name`, a built-in or the user's own `package.module:function`. Raises ValueError."""
    return load_function(name, BUILT_IN, "sampling.tool.function")


@dataclass(frozen=True)
class Tool:
    """Holds a tool function and what it takes to call it from a response."""

    function: ToolFunction
    encode: Callable[[str], Sequence[int]]  # text -> token ids
    call_end: int  # token id that ends a call
    max_turns: int  # sampled turns of one response


def make_tool(config: ToolConfig, tokenizer: "PreTrainedTokenizerBase") -> Tool:
    """Loads the tool of an experiment.

    Raises ValueError for an unknown function, and when `call_end` is not exactly one token of the tokenizer.
    """

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer does not know every character of {text!r:.80}, which is a tool's")
        return ids

    ids = encode(config.call_end)
    if len(ids) != 1:
        raise ValueError(
            f"sampling.tool.call_end {config.call_end!r} is {len(ids)} tokens; it must be one, where sampling can stop"
        )
    return Tool(load_tool(config.function), encode, ids[0], config.max_turns)


async def respond_with_tool(
    turn: Turn, tool: Tool, decode: Callable[[np.ndarray], str], max_tokens: int
) -> "tuple[Response, np.ndarray]":
    """Samples a whole response of T tokens and returns it with its loss mask [T] bool, False on the tool's tokens.

    max_tokens: limit of the response, the tool's tokens included. A response that is cut by a limit, of tokens or of
    turns, has finish reason "length". The tool's output is never cut: where it leaves no room for another token, the
    response ends before it.
    """
    from megagrpo.rollout.generation import Response

    tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    mask = np.zeros(0, np.bool_)
    versions: list[tuple[int, int]] = []  # (token, version), of all turns
    experts: list[np.ndarray] = []  # of all turns: each goes on where the one before ends

    def append(ids: np.ndarray, of_ids: np.ndarray, sampled: bool) -> None:
        nonlocal tokens, logprobs, mask
        tokens, logprobs = np.concatenate([tokens, ids]), np.concatenate([logprobs, of_ids])
        mask = np.concatenate([mask, np.full(len(ids), sampled)])

    def response(reason: str) -> tuple[Response, np.ndarray]:
        changes = tuple(now for before, now in pairwise(versions) if before[1] != now[1])
        together = np.concatenate(experts) if experts else None
        return Response(tokens, logprobs, reason, versions[0][1], changes, together), mask

    for number in range(tool.max_turns):
        said = await turn(number, tokens, (tool.call_end,))
        versions += [(len(tokens), said.weight_version), *((len(tokens) + at, version) for at, version in said.newer)]
        if said.routed_experts is not None:
            experts.append(said.routed_experts)
        append(said.token_ids, said.logprobs, True)
        if said.finish_reason != "stop" or tokens[-1] != tool.call_end:
            return response(said.finish_reason)
        if number + 1 == tool.max_turns:
            break
        # In a thread: a slow tool must not hold up the other samples.
        result = await asyncio.to_thread(tool.function, decode(tokens))
        if result is None:
            return response("stop")
        ids = np.array(tool.encode(result), np.int32)
        if len(tokens) + len(ids) >= max_tokens:
            break
        append(ids, np.zeros(len(ids), np.float32), False)
    return response("length")
