"""Chat messages to text: the one place where rows, environments, agents and evaluation are
rendered."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import numpy as np

from megagrpo.config.data import DataConfig
from megagrpo.types import parts_of

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"  # as SentencePiece writes it
Message = dict  # {"role", "content", ...}, as in OpenAI's chat completions
Tools = Sequence[Message] | None  # {"type": "function", "function": {"name", "parameters", ...}}
_PROBE = "another text"


def as_messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    """Returns messages; a text becomes one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Returns messages without null members, which Arrow fills in: so rows of a parquet file equal
    those of JSON lines.

    A message with tool calls may have no content. Raises ValueError for any other without one, and
    for a content that is neither a text nor parts.
    """
    checked = cast(list[Message], plain(messages))
    for number, message in enumerate(checked, start=1):
        content = message.get("content", [] if message.get("tool_calls") else None)
        if not isinstance(content, str | list):
            raise ValueError(
                f"message {number} has no content, a text or parts, and no tool calls: {content!r:.60}"
            )
    return checked


def with_system(others: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Returns messages that begin with the system message of others, unless they have one
    themselves."""
    if any(message["role"] == "system" for message in messages):
        return list(messages)
    return [*(message for message in others if message["role"] == "system"), *messages]


def render_messages(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    ready: bool = True,
    tools: Tools = None,
) -> str:
    """Returns messages as the chat template writes them; ready: up to where the model's answer
    begins.

    Arguments of tool calls are objects, for templates that write them as JSON. Templates that
    append them to a text (DeepSeek-V3, R1, V3.1) get texts. Raises whatever the template raises.
    """
    settings: dict = {
        "tokenize": False,
        "add_generation_prompt": ready,
        "tools": list(tools or ()) or None,
        **data.chat_template_args,
    }
    render = tokenizer.apply_chat_template
    with suppress(TypeError):
        objects = [_with_arguments(message, as_text=False) for message in messages]
        return str(render(objects, **settings))
    texts = [_with_arguments(message, as_text=True) for message in messages]
    return str(render(texts, **settings))


def render_whole(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    ready: bool = True,
    tools: Tools = None,
) -> str:
    """Returns render_messages. Raises ValueError if the chat template leaves out the tools or a
    message that is not the model's."""
    text = render_messages(data, tokenizer, messages, ready, tools)
    if tools and "tools" not in str(tokenizer.chat_template):
        raise ValueError("it leaves out the tools")
    contents = [str(message.get("content", "")).strip() for message in messages]
    said = "\0".join(contents)
    for message, content in zip(messages, contents, strict=True):
        role = message["role"]
        # as often as the messages say it: one may be part of another
        if role == "assistant" or text.count(content) >= said.count(content):
            continue
        # it may write a content in another way
        other = [m | {"content": _PROBE} if m is message else m for m in messages]
        if _PROBE not in render_messages(data, tokenizer, other, ready, tools):
            raise ValueError(f"it leaves out the message of the role {role!r}")
    return text


def has_unknown(
    tokenizer: "PreTrainedTokenizerBase", text: str, token_ids: Sequence[int] | np.ndarray
) -> bool:
    """Returns whether a tokenizer used its token for unknown characters, except where the text
    names that token.

    Some byte-level tokenizers use it as their end of text, which templates write.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return False
    number = int(np.count_nonzero(np.equal(token_ids, unknown)))
    return number > text.count(str(tokenizer.unk_token))


def tokens_behind(tokenizer: "PreTrainedTokenizerBase", known: str, text: str) -> list[int]:
    """Returns the ids of a text that follows a known one. Tokenizers of SentencePiece's kind put a
    space before a separate text, and the model writes none."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not known or not "".join(tokenizer.convert_ids_to_tokens(ids[:1])).startswith(_SPACE):
        return ids
    before = tokenizer.encode(known, add_special_tokens=False)
    both = tokenizer.encode(known + text, add_special_tokens=False)
    spans_both = both[: len(before)] != before  # a token
    return ids if spans_both else both[len(before) :]


def text_of(message: Message) -> str:
    """Returns the content of a message as text. Raises ValueError for a content of another kind,
    such as images."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts_of(message)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the content of a message is a text, not {message['content']!r:.80}")
    return "".join(map(str, texts))


def plain(value: object) -> object:
    """Returns a value of a row without null members of objects, at any depth."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _with_arguments(message: Message, as_text: bool) -> Message:
    """Returns a message whose calls have their arguments as objects, or as texts, and whose content is
    a text unless it has images: templates of text models, such as Qwen3's, write no other one."""
    out = {**message}
    with suppress(ValueError):
        out["content"] = text_of(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call, as_text) for call in message["tool_calls"]]
    return out


def _call(call: Message, as_text: bool) -> Message:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if as_text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        with suppress(ValueError):  # a text that is not JSON stays a text
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}
