"""Tools that a model calls inside a response; the response then has several turns.

The model's tokens alternate with the tool's, which have loss mask 0 and log-probability 0. Token ids are kept as
sampled or inserted: every turn continues exactly the ids of the turns before it. A tool that raises ends the run.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.schema import ExperimentConfig, ToolConfig
from megagrpo.data.prompts import decoder
from megagrpo.rollout.agents.environments import Environments, load_environment
from megagrpo.rollout.agents.program_worker import load_program
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.response import Response, SampleTurn
from megagrpo.rollout.service.addresses import own_address
from megagrpo.system.user_function import load_function

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

    from megagrpo.rollout.agents.programs import Programs

ToolFunction = Callable[[str], str | None]  # (the response so far, as text) -> output, or None to end the response

BUILT_IN = {"calculator": "megagrpo.rollout.calculator:calculator"}


def load_tool(name: str) -> ToolFunction:
    """Imports the tool `name`, a built-in or the user's own `package.module:function`. Raises ValueError."""
    return load_function(name, BUILT_IN, "sampling.tool.function")


def make_answering(
    config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase"
) -> "Tool | Environments | Programs | None":
    """Returns what answers turns of the model: a tool, environments, agent programs, or nothing. Raises ValueError."""
    sampling = config.sampling
    if sampling.agent is not None:
        from megagrpo.rollout.agents.programs import Programs  # its HTTP server: not where a model is only checked

        if sampling.agent.function is not None:
            load_program(sampling.agent.function)
        renderer = Renderer(tokenizer, config.data, continues=sampling.agent.history == "all")
        return Programs(sampling.agent, renderer, own_address(config.rollout.host), config.name, decoder(tokenizer))
    if sampling.environment is not None:
        load_environment(sampling.environment.function)
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

    Raises ValueError for an unknown function, and when `call_end` is not exactly one token of the tokenizer.
    """

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer does not know every character of {text!r:.80}, a text of the tool")
        return ids

    ids = encode(config.call_end)
    if len(ids) != 1:
        raise ValueError(
            f"sampling.tool.call_end {config.call_end!r} is {len(ids)} tokens; it must be one, where sampling can stop"
        )
    return Tool(load_tool(config.function), encode, ids[0], config.max_turns)


async def respond_with_tool(
    turn: SampleTurn, tool: Tool, prompt: np.ndarray, decode: Callable[[np.ndarray], str], max_tokens: int
) -> tuple[Response, np.ndarray]:
    """Samples a whole response of T tokens; returns it with its loss mask [T] bool, False on the tool's tokens.

    turn: ends at tool.call_end too. max_tokens: limit of the response, the tool's tokens included. A response cut by a
    limit, of tokens or of turns, has finish reason "length". The tool's output is never cut: if it leaves no room for
    another token, the response ends before it.
    """
    whole = await turn(0, prompt, max_tokens, 0)
    masks = [np.ones(len(whole.token_ids), np.bool_)]
    for number in range(1, tool.max_turns + 1):
        if whole.finish_reason != "stop" or whole.token_ids[-1] != tool.call_end:
            return whole, np.concatenate(masks)
        if number == tool.max_turns:
            break
        # In a thread: a slow tool must not hold up the other samples.
        result = await asyncio.to_thread(tool.function, decode(whole.token_ids))
        if result is None:
            return whole, np.concatenate(masks)
        ids = np.array(tool.encode(result), np.int32)
        if len(whole.token_ids) + len(ids) >= max_tokens:
            break
        known = len(prompt) + len(whole.token_ids) - 1
        whole = whole.then(Response(ids, np.zeros(len(ids), np.float32), "stop", whole.newest_version))
        context = np.concatenate([prompt, whole.token_ids])
        sampled = await turn(number, context, max_tokens - len(whole.token_ids), known)
        whole = whole.then(sampled)
        masks += [np.zeros(len(ids), np.bool_), np.ones(len(sampled.token_ids), np.bool_)]
    return replace(whole, finish_reason="length"), np.concatenate(masks)
