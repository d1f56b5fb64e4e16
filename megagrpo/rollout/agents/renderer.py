"""Messages to token ids, beside the ids that were sampled: what the model said is never rendered or
tokenised again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.data import DataConfig
from megagrpo.data.messages import (
    Message,
    Tools,
    checked_messages,
    has_unknown,
    render_messages,
    text_of,
    with_system_prompt,
)
from megagrpo.data.rows import well_formed
from megagrpo.system.errors import explained

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

Observation = str | Sequence[Message]  # a text is a message of the user

_ANSWER = "its answer"
_PROBE: list[Message] = [
    {"role": "user", "content": "a probe"},
    {"role": "assistant", "content": _ANSWER},
]


class Renderer:
    """Renders the messages of an environment with the experiment's chat template, or as they are
    without one.

    continues: whether messages follow turns of the model. Raises ValueError if the template is not
    append-only then: if it writes an answer other than right after the generation prompt, does not
    end it with the end of sequence, or writes earlier turns in another way once more follow.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig, continues: bool):
        self._tokenizer, self._data = tokenizer, data
        self._before = (
            ""  # what the template writes after the end of an answer, before the next message
        )
        if data.chat_template and continues:
            self._before = self._checked()

    def start(self, said: Observation) -> np.ndarray:
        """Returns the ids [T] int32 of a first message, ready for the model's turn. Raises
        ValueError."""
        messages = _messages(said)
        if self._data.chat_template:
            messages = with_system_prompt(self._data, messages)
        ids = self.begin(messages)
        if len(ids) > (longest := self.max_prompt_tokens):
            raise ValueError(
                f"an environment began with {len(ids)} tokens, more than data.max_prompt_tokens "
                f"{longest}"
            )
        return ids

    def begin(self, messages: Observation, tools: Tools = None) -> np.ndarray:
        """Returns the ids [T] int32 of a conversation as it is, ready for the model's turn. Raises
        ValueError."""
        if self._data.chat_template:
            return np.array(self._encode(self._render(_messages(messages), True, tools)), np.int32)
        begin = [self._tokenizer.bos_token_id] if self._data.add_bos else []
        return np.array([*begin, *self._encode(_text(messages, tools))], np.int32)

    def after_turn(self, said: Observation, answer: np.ndarray, tools: Tools = None) -> np.ndarray:
        """Returns the ids [T] int32 that follow an answer which ended by itself. Raises ValueError.

        answer: its ids. Where a chat template writes the end of sequence and something else ended
        it (sampling.stop, sampling.stop_token_ids), that end comes first.
        """
        if not self._data.chat_template:
            return np.array(self._encode(_text(said, tools)), np.int32)
        probe, messages, end = (
            _PROBE,
            _messages(said),
            str(self._tokenizer.eos_token) + self._before,
        )
        if called := [message["tool_call_id"] for message in messages if "tool_call_id" in message]:
            function = {
                "name": "probe",
                "arguments": "{}",
            }  # some templates want the call of every tool's output
            calls = [{"id": each, "type": "function", "function": function} for each in called]
            probe = [*_PROBE[:1], {"role": "assistant", "content": "", "tool_calls": calls}]
        before = self._render(probe, tools=tools)
        whole = self._render([*probe, *messages], True, tools)
        if not before.endswith(end) or not whole.startswith(before):
            raise ValueError(
                "the chat template writes a turn with tools in another way when more follow"
            )
        ids = self._encode(self._before + whole.removeprefix(before))
        ended = len(answer) > 0 and answer[-1] == self._tokenizer.eos_token_id
        return np.array(ids if ended else [self._tokenizer.eos_token_id, *ids], np.int32)

    @property
    def max_prompt_tokens(self) -> int:
        """Returns the limit of a first message, in tokens."""
        return self._data.max_prompt_tokens

    def _checked(self) -> str:
        """Returns what the template writes after the end of sequence of an answer."""
        end, question, answer = str(self._tokenizer.eos_token), _PROBE[:1], _ANSWER
        asked, answered = self._render(question, ready=True), self._render(_PROBE)
        longer = self._render([*_PROBE, {"role": "user", "content": "more"}], ready=True)
        if not answered.startswith(asked + answer + end) or not longer.startswith(answered):
            found = (
                f"after {asked[-40:]!r} it writes {answered[len(asked) - 8 :]!r:.120}, not "
                "the "
                f"answer and {end!r}"
            )
            if answered.startswith(asked + answer + end):
                found = "it writes earlier turns in another way when more follow"
            raise ValueError(
                f"the chat template cannot be continued turn by turn: {found}. Take another one, "
                "or "
                "history: last (sampling.environment or sampling.agent), where every turn is a "
                "sample of its own"
            )
        return answered[len(asked + answer + end) :]

    def _render(self, messages: Sequence[Message], ready: bool = False, tools: Tools = None) -> str:
        refused = "data.chat_template: it refuses the messages of an environment or agent"
        with explained(refused):
            chat = [_for_template(message) for message in checked_messages(messages)]
            return render_messages(self._data, self._tokenizer, chat, ready, tools)

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer(well_formed(text), add_special_tokens=False)["input_ids"]
        if has_unknown(self._tokenizer, text, ids):
            raise ValueError(
                f"the tokenizer does not know every character of {text!r:.80}, said to the model"
            )
        return ids


def _messages(said: Observation) -> list[Message]:
    return (
        [{"role": "user", "content": said}]
        if isinstance(said, str)
        else [dict(message) for message in said]
    )


def _text(said: Observation, tools: Tools) -> str:
    if tools:
        raise ValueError("tools are written by a chat template: set data.chat_template: true")
    return said if isinstance(said, str) else "".join(text_of(message) for message in said)


def _for_template(message: Message) -> Message:
    """Returns a message whose content is a text: images are refused."""
    return {**message, "content": text_of(message)}
