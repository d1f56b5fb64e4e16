"""Chats of a model without a chat template (DeepSeek-V4), as SGLang's own module writes them."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.data.messages import Message, Tools, text_of

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase


def take_chat_module(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Gives a tokenizer the module `name` of SGLang in place of a chat template; nothing if SGLang
    is not installed."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return
    file = Path(found.submodule_search_locations[0]) / name
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    tokenizer.apply_chat_template = partial(_render, file)  # type: ignore[method-assign]  # of this one


@cache
def _encode(file: Path) -> Callable[..., str]:
    """Returns the module's function; the module stands by itself, and SGLang is not imported."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.encode_messages


def _render(
    file: Path,
    messages: Sequence[Message],
    tokenize: bool,
    add_generation_prompt: bool,
    tools: Tools,
    thinking: bool = False,
    **options: str,
) -> str:
    """Returns a chat as SGLang's server writes it: tools are in the system message, which is empty if
    there is none.

    thinking, options (reasoning_effort, reasoning_effort_profile): of data.chat_template_args. Raises
    ValueError for images, and for a turn of the model that would follow one of its own.
    """
    chat = [{**message, "content": text_of(message)} for message in messages]
    if chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": ""})
    if tools:
        chat[0]["tools"] = tools
    answered = chat[-1]["role"] == "assistant"
    if answered and add_generation_prompt:
        raise ValueError("a turn of the model follows a message of the user or a tool")
    text = _encode(file)(chat, "thinking" if thinking else "chat", **options)
    if answered or add_generation_prompt:
        return text
    return text[: text.rindex("<\uff5cAssistant\uff5c>")]
