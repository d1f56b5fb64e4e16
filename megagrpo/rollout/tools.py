"""Tools that a model calls inside a response; the response then has several turns.

The model's tokens alternate with the tool's, which have loss mask 0 and log-probability 0. Token
ids are kept as sampled or inserted: every turn continues exactly the ids of the turns before it. A
tool that raises ends the run.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.schema import ExperimentConfig, ToolConfig
from megagrpo.data.rows import well_formed
from megagrpo.rollout.agents.environments import Environments, load_environment, refuse_machine
from megagrpo.rollout.agents.play import Part
from megagrpo.rollout.agents.program_worker import load_program
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.response import SampleTurn
from megagrpo.rollout.service.addresses import own_address
from megagrpo.system.user_function import load_function

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

    from megagrpo.rollout.agents.programs import Programs

ToolFunction = Callable[
    [str], str | None
]  # (the response so far, as text) -> output, or None to end the response

BUILT_IN = {"calculator": "megagrpo.rollout.calculator:calculator"}


def load_tool(name: str) -> ToolFunction:
    """Imports the tool `name`, a built-in or the user's own `package.module:function`. Raises
    ValueError."""
    return load_function(name, BUILT_IN, "sampling.tool.function")


def make_answering(
    config: ExperimentConfig,
    tokenizer: "PreTrainedTokenizerBase",
    decode: Callable[[np.ndarray], str],
) -> "Tool | Environments | Programs | None":
    """Returns what answers turns of the model: a tool, environments, agent programs, or nothing.
    Raises ValueError."""
    sampling = config.sampling
    if sampling.agent is not None:
        from megagrpo.rollout.agents.programs import (
            Programs,
        )  # its HTTP server: not where a model is only checked

        if sampling.agent.function is not None:
            load_program(sampling.agent.function)
        renderer = Renderer(tokenizer, config.data, continues=sampling.agent.history == "all")
        return Programs(
            sampling.agent,
            renderer,
            own_address(config.rollout.host),
            config.name,
            decode,
        )
    if sampling.environment is not None:
        load_environment(sampling.environment.function)
        refuse_machine(sampling.environment)
        continues = sampling.environment.history == "all"
        return Environments(sampling.environment, Renderer(tokenizer, config.data, continues))
    return make_tool(sampling.tool, tokenizer) if sampling.tool else None


@dataclass(frozen=True)
class Tool:
    """A tool function and how a response calls it."""

    function: ToolFunction
    encode: Callable[[str], Sequence[int]]  # text -> token ids
    call_end: int  # token id that ends a call
    max_turns: int  # sampled turns of one response


def make_tool(config: ToolConfig, tokenizer: "PreTrainedTokenizerBase") -> Tool:
    """Loads the tool of an experiment.

    Raises ValueError for an unknown function, and when `call_end` is not exactly one token of the
    tokenizer.
    """

    def encode(text: str) -> list[int]:
        ids = tokenizer(well_formed(text), add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(
                f"the tokenizer does not know every character of {text!r:.80}, a text of the tool"
            )
        return ids

    ids = encode(config.call_end)
    if len(ids) != 1:
        raise ValueError(
            f"sampling.tool.call_end {config.call_end!r} is {len(ids)} tokens; it must be one, "
            "where sampling can stop"
        )
    return Tool(load_tool(config.function), encode, ids[0], config.max_turns)


async def respond_with_tool(
    turn: SampleTurn,
    tool: Tool,
    prompt: np.ndarray,
    decode: Callable[[np.ndarray], str],
    max_tokens: int,
) -> Part:
    """Returns a whole response, whose loss mask is False on the tool's tokens.

    turn: ends at tool.call_end too. max_tokens: limit of the response, the tool's tokens included.
    A response cut by a limit, of tokens or of turns, has finish reason "length". The tool's output
    is never cut: if it leaves no room for another token, the response ends before it.
    """
    whole, known = Part(None), 0
    for number in range(tool.max_turns):
        context = np.concatenate([prompt, whole.response.token_ids])
        left = max_tokens - len(whole.response.token_ids)
        whole.add(await turn(number, context, left, known), sampled=True)
        so_far = whole.response.token_ids
        if whole.response.finish_reason != "stop" or so_far[-1] != tool.call_end:
            return whole
        if number + 1 == tool.max_turns:
            break
        # In a thread: a slow tool must not hold up the other samples.
        result = await asyncio.to_thread(tool.function, decode(so_far))
        if result is None:
            return whole
        ids = np.array(tool.encode(result), np.int32)
        if len(so_far) + len(ids) >= max_tokens:
            break
        known = len(prompt) + len(so_far) - 1
        whole.add_said(ids)
    whole.response = replace(whole.response, finish_reason="length")
    return whole
