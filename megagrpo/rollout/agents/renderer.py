"""Messages to token ids, beside the ids that were sampled: what the model said is never rendered or tokenised again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.data import DataConfig
from megagrpo.data.prompts import render_messages
from megagrpo.system.explained import explained

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]  # {"role", "content"}
Said = str | Sequence[Message]  # a text is a message of the user

_PROBE: list[Message] = [{"role": "user", "content": "a probe"}, {"role": "assistant", "content": "its answer"}]


class Renderer:
    """Renders the messages of an environment with the experiment's chat template, or as they are without one.

    continues: whether messages follow turns of the model. Raises ValueError if the template is not append-only then: if
    it writes an answer other than right after the generation prompt, does not end it with the end of sequence, or
    writes earlier turns in another way once more follow.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig, continues: bool):
        self._tokenizer, self._data = tokenizer, data
        self._before = ""  # what the template writes after the end of an answer, before the next message
        if data.chat_template and continues:
            self._before = self._checked()

    def start(self, said: Said) -> np.ndarray:
        """Returns the ids [T] int32 of a first message, ready for the model's turn. Raises ValueError."""
        if self._data.chat_template:
            messages = _messages(said)
            if self._data.system_prompt is not None:
                messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
            ids = self._encode(self._render(messages, ready=True))
        else:
            begin = [self._tokenizer.bos_token_id] if self._data.add_bos else []
            ids = [*begin, *self._encode(_text(said))]
        if len(ids) > (longest := self._data.max_prompt_tokens):
            raise ValueError(f"an environment began with {len(ids)} tokens, more than data.max_prompt_tokens {longest}")
        return np.array(ids, np.int32)

    def after_turn(self, said: Said) -> np.ndarray:
        """Returns the ids [T] int32 that follow an answer which ended by itself. Raises ValueError."""
        if not self._data.chat_template:
            return np.array(self._encode(_text(said)), np.int32)
        whole = self._render([*_PROBE, *_messages(said)], ready=True)
        return np.array(self._encode(self._before + whole.removeprefix(self._render(_PROBE))), np.int32)

    def _checked(self) -> str:
        """Returns what the template writes after the end of sequence of an answer."""
        end, question, answer = str(self._tokenizer.eos_token), _PROBE[:1], _PROBE[1]["content"]
        asked, answered = self._render(question, ready=True), self._render(_PROBE)
        longer = self._render([*_PROBE, {"role": "user", "content": "more"}], ready=True)
        if not answered.startswith(asked + answer + end) or not longer.startswith(answered):
            found = f"after {asked[-40:]!r} it writes {answered[len(asked) - 8 :]!r:.120}, not the answer and {end!r}"
            if answered.startswith(asked + answer + end):
                found = "it writes earlier turns in another way when more follow"
            raise ValueError(
                f"the chat template cannot be continued turn by turn: {found}. Take another one, or "
                "sampling.environment.history: last, where every turn is a sample of its own"
            )
        return answered[len(asked + answer + end) :]

    def _render(self, messages: Sequence[Message], ready: bool = False) -> str:
        with explained("the chat template refuses the messages of an environment"):
            return render_messages(self._data, self._tokenizer, messages, ready)

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._tokenizer.unk_token_id is not None and self._tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer does not know every character of {text!r:.80}, said by an environment")
        return ids


def _messages(said: Said) -> list[Message]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def _text(said: Said) -> str:
    return said if isinstance(said, str) else "".join(message["content"] for message in said)
