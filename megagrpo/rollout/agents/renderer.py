"""Messages to token ids that follow sampled ids: the model's turns are never rendered or tokenized
again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.data import DataConfig
from megagrpo.data.messages import (
    Message,
    Tools,
    as_messages,
    checked_messages,
    has_unknown,
    render_whole,
    text_of,
    tokens_behind,
    with_system,
)
from megagrpo.data.rows import well_formed
from megagrpo.system.errors import explained
from megagrpo.types import Prompt

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

Observation = str | Sequence[Message]  # a text is a message of the user

_ALL = 2**40  # tokens
_LONG = 2**16  # characters that are rendered and tokenized in a thread
ANSWER = "its answer"
PROBE: list[Message] = [
    {"role": "user", "content": "a probe"},
    {"role": "assistant", "content": ANSWER},
]


class Renderer:
    """Renders the messages of an environment with the experiment's chat template, or as they are
    without one.

    continues: whether messages follow turns of the model. The template must then be append-only.
    Raises ValueError if it does not write an answer right after the generation prompt, does not end
    it with the end of sequence, or writes earlier turns in another way when more follow.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: DataConfig,
        continues: bool,
        reasoning_end: str = "",
    ):
        self._tokenizer, self._data = tokenizer, data
        self.reasoning_end = reasoning_end  # behind which the model's answers and calls begin
        self.max_prompt_tokens = data.max_prompt_tokens  # of a first message
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        # the template's text after the end of an answer, before the next message
        self._before = ""
        if data.chat_template and continues:
            self._before = self._checked()

    def start(self, observation: Observation, prompt: Prompt) -> np.ndarray:
        """Returns the ids [T] int32 of a prompt with an environment's first message, ready for the
        model's turn. Raises ValueError."""
        if prompt.messages:
            observation = _begun(observation, prompt.messages)
        ids = self.begin(observation, prompt.tools)
        if len(ids) > self.max_prompt_tokens:
            raise ValueError(
                "an environment began with more tokens than data.max_prompt_tokens "
                f"{self.max_prompt_tokens}"
            )
        return ids

    def begin(self, messages: Observation, tools: Tools = None) -> np.ndarray:
        """Returns the ids [T] int32 of a conversation as it is, ready for the model's turn; the
        first ones if there are more than max_prompt_tokens. Raises ValueError."""
        most = self.max_prompt_tokens
        if self._data.chat_template:
            ids = self._encode(self._render(as_messages(messages), True, tools), most)
        else:
            bos = [self._tokenizer.bos_token_id] * self._data.add_bos
            ids = self._encode(_text(messages, tools), most, bos)
        if not len(ids):
            raise ValueError("the first message has no token")
        return ids

    def after_turn(
        self, observation: Observation, answer: np.ndarray, tools: Tools = None, room: int = _ALL
    ) -> np.ndarray:
        """Returns the ids [T] int32 that follow an answer which ended by itself; the first ones if
        there are more than `room`. Raises ValueError.

        answer: the answer's ids. If something other than the end of sequence ended it
        (sampling.stop, sampling.stop_token_ids) and the chat template writes the end of sequence,
        the ids begin with it.
        """
        if not self._data.chat_template:
            return self._encode(_text(observation, tools), room, known="\n")
        messages = as_messages(observation)
        end = str(self._tokenizer.eos_token) + self._before
        # some templates need the call of every tool's output
        function = {"name": "probe", "arguments": "{}"}
        calls = [
            {"id": message["tool_call_id"], "type": "function", "function": function}
            for message in messages
            if "tool_call_id" in message
        ]
        probe = PROBE
        if calls:
            probe = [*PROBE[:1], {"role": "assistant", "content": "", "tool_calls": calls}]
        before = self._render(probe, tools=tools)
        rendered = self._render([*probe, *messages], True, tools)
        if not before.endswith(end) or not rendered.startswith(before):
            raise ValueError(
                "the chat template writes a turn with tools in another way when more follow; take "
                "history: last, or another template"
            )
        eos = self._tokenizer.eos_token_id
        begin = [] if len(answer) and answer[-1] == eos else [eos]
        text = self._before + rendered.removeprefix(before)
        return self._encode(text, room, begin, known=str(self._tokenizer.eos_token))

    def _checked(self) -> str:
        """Returns the template's text after the end of sequence of an answer."""
        end, question, answer = str(self._tokenizer.eos_token), PROBE[:1], ANSWER
        asked, answered = self._render(question, ready=True), self._render(PROBE)
        longer = self._render([*PROBE, {"role": "user", "content": "more"}], ready=True)
        if not answered.startswith(asked + answer + end) or not longer.startswith(answered):
            wrote = answered[len(asked) - 8 :]
            problem = f"after {asked[-40:]!r} it writes {wrote!r:.120}, not the answer and {end!r}"
            if answered.startswith(asked + answer + end):
                problem = "it writes earlier turns in another way when more follow"
            raise ValueError(
                f"the chat template cannot be continued turn by turn: {problem}. Take another "
                "one, or history: last (sampling.environment or sampling.agent), where every "
                "turn is a sample of its own"
            )
        return answered[len(asked + answer + end) :]

    def _render(self, messages: Sequence[Message], ready: bool = False, tools: Tools = None) -> str:
        refused = "data.chat_template: it refuses the messages of an environment or agent"
        with explained(refused):
            chat = [
                {**message, "content": text_of(message)} for message in checked_messages(messages)
            ]
            return render_whole(self._data, self._tokenizer, chat, ready, tools)

    def _encode(
        self, text: str, most: int, begin: Sequence[int] = (), known: str = ""
    ) -> np.ndarray:
        """Returns the ids [T] int32 of `begin` and of a text that follows a known one. Of a text
        that cannot have as few as `most` tokens it reads only the beginning, which has more."""
        whole = well_formed(text)
        text = whole[: (most + 1) * self._longest]
        ids = tokens_behind(self._tokenizer, known, text)
        if len(ids) <= most and text != whole:  # it has fewer: a normalizer shortens it
            ids = tokens_behind(self._tokenizer, known, whole)
        if has_unknown(self._tokenizer, text, ids):
            raise ValueError(
                f"the tokenizer does not know every character of {text!r:.80}, said to the model"
            )
        return np.array([*begin, *ids], np.int32)


async def in_time(
    render: Callable[..., np.ndarray], observation: Observation, *arguments: object
) -> np.ndarray:
    """Returns the ids that a renderer's method makes of an observation, of a long one in a thread:
    other rollouts go on meanwhile."""
    if len(str(observation)) < _LONG:
        return render(observation, *arguments)
    return await asyncio.to_thread(render, observation, *arguments)


def _begun(observation: Observation, prompt: Sequence[Message]) -> Observation:
    """Returns the conversation that an environment begins. Messages follow the prompt's system
    message, unless they have one; a text replaces the prompt's last message, or follows it if that
    is the system message."""
    if not isinstance(observation, str):
        return with_system(prompt, observation)
    if prompt[-1]["role"] == "system":
        prompt = [*prompt, {"role": "user"}]
    text_of(prompt[-1])  # refuses images, which would be lost
    return [*prompt[:-1], {**prompt[-1], "content": observation}]


def _text(observation: Observation, tools: Tools) -> str:
    if tools:
        raise ValueError("tools are written by a chat template: set data.chat_template: true")
    return "".join(map(text_of, as_messages(observation)))
