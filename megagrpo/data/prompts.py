"""Renders and tokenizes prompts, and orders them.

The order depends only on the seed and the mixture, so the number of consumed prompts is the whole
state to save.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.schema import DataConfig
from megagrpo.data.chat_module import take_chat_module
from megagrpo.data.images import ImageStore, image_bytes, images_apart
from megagrpo.data.messages import (
    Message,
    as_messages,
    has_unknown,
    render_whole,
    tokens_behind,
    with_system,
)
from megagrpo.data.rows import Row, fingerprint, iterate_rows
from megagrpo.data.stored import StoredPrompts
from megagrpo.models.config_json import text_part
from megagrpo.models.folder import Model
from megagrpo.models.table import FAMILIES, read_description
from megagrpo.system import environment
from megagrpo.system.errors import collected, explained, git_lfs_hint, translated
from megagrpo.system.torchvision import prepare_torchvision, torchvision_problem
from megagrpo.types import Prompt

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BLOCK = 512  # texts that are tokenized at once
# ratio and number of the prompts of each source; (): all are one
Mixture = tuple[tuple[float, int], ...]

_WithSources = tuple[Prompt, list[object]]  # those of its images


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set, and the endless sequence in which a run takes them."""

    prompts: Sequence[Prompt]
    num_too_long: int  # dropped: longer than data.max_prompt_tokens
    shuffle: bool
    mixture: Mixture = ()
    rows: Sequence[list[str | int]] = ()  # fingerprint of the rows in use, see data/rows.py

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def sources(self) -> list[str]:
        """Names of the sources, sorted; none if the prompts have no names. Reads all prompts, once."""
        return sorted({prompt.source for prompt in self.prompts} - {""})

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Returns prompts cursor .. cursor + count - 1 of an endless sequence of epochs, each in a
        different order."""
        ratios, sizes = zip(*(self.mixture or [(1.0, len(self.prompts))]), strict=True)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        names = [f" source {k}" * bool(self.mixture) for k in range(len(sizes))]
        places = interleaved(ratios, cursor, count)
        return [self._prompt(i, starts[k], sizes[k], seed, names[k]) for k, i in places]

    def _prompt(self, i: int, start: int, size: int, seed: int, name: str) -> Prompt:
        """Returns prompt i of the endless sequence of the `size` prompts from `start` on."""
        place = i % size
        if self.shuffle:
            place = _shuffled(size, seed, i // size, name)[place]
        return self.prompts[start + place]


@lru_cache(maxsize=64)  # a batch touches two epochs of every source, an evaluation set has its own
def _shuffled(size: int, seed: int, epoch: int, name: str) -> list[int]:
    order = list(range(size))
    # a text seed is hashed: close seeds give unrelated orders
    random.Random(f"prompts {seed} {epoch}{name}").shuffle(order)
    return order


def interleaved(ratios: Sequence[float], start: int, count: int) -> list[tuple[int, int]]:
    """Returns places start .. start + count - 1 of an endless mixture: (source, number of its
    prompt), both from 0.

    Prompt j of a source comes at time (j + 1/2) / share, so each source has its share of any
    stretch of the sequence up to one prompt. Only prompts near the stretch are looked at: of all K
    sources together, at most K / 2 more or fewer than `start` come before the time `start`.
    """
    shares = [ratio / sum(ratios) for ratio in ratios]
    margin = len(ratios)
    begin = max(start - margin, 0)
    # each a prompt or two early
    firsts = [max(math.floor(begin * share) - 1, 0) for share in shares]
    times = [
        ((j + 0.5) / share, k, j)
        for k, (share, first) in enumerate(zip(shares, firsts, strict=True))
        for j in range(first, first + math.ceil((count + 2 * margin) * share) + 3)
    ]
    before = start - sum(firsts)
    return [(k, j) for _, k, j in sorted(times)[before : before + count]]


def load_tokenizer(model: Model) -> "PreTrainedTokenizerBase":
    """Returns the model's tokenizer, from local files only.

    Raises ValueError if the folder has none or only Python code for one, or if it has more tokens
    than the model has embeddings.
    """
    prepare_torchvision()
    from transformers import (
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )  # takes seconds, and pulls in torch

    folder = model.tokenizer_folder
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; model.tokenizer (or "
            "model.path) is a local Hugging Face folder"
        )
    _refuse_code(folder)
    if not any(any(folder.glob(name)) for name in ("tokenizer.json", "vocab.*", "*.model")):
        raise ValueError(  # transformers would make one without words
            f"{folder} has no tokenizer.json, vocab.json or tokenizer.model, so no tokenizer; "
            "name a folder that has one as model.tokenizer"
        )
    hint = git_lfs_hint(folder / "tokenizer.json")
    with explained(
        f"{folder}: no tokenizer can be loaded from here{hint}", lambda exc: torchvision_problem()
    ):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            _restore_parts(tokenizer, folder / "tokenizer.json")
    size = text_part(model.description)["vocab_size"]
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise ValueError(
            f"tokenizer {folder} has token id {largest} but model {model.folder} only {size} "
            "embeddings (vocab_size): they do not belong together"
        )
    family = FAMILIES.get(model.description.get("model_type", ""))
    if family and family.CHAT_MODULE and not tokenizer.chat_template:
        take_chat_module(tokenizer, family.CHAT_MODULE)
    return tokenizer


def _refuse_code(folder: Path) -> None:
    """Raises ValueError if the tokenizer is Python code; transformers 5 silently builds another one
    for some models."""
    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file():
        return
    if "AutoTokenizer" in (read_description(settings).get("auto_map") or ()):
        raise ValueError(
            f"{folder}: the tokenizer is Python code (auto_map in tokenizer_config.json), which "
            "is not run here: convert it once to a folder with tokenizer.json and the chat "
            "template, and name that as model.tokenizer"
        )


def _restore_parts(tokenizer: "PreTrainedTokenizerFast", file: Path) -> None:
    """Restores the parts of tokenizer.json that transformers 5 replaces by the parts of the class
    in tokenizer_config.json.

    DeepSeek-R1-Distill-Llama, for example, calls its byte-level tokenizer LlamaTokenizerFast, gets
    SentencePiece's parts and loses spaces. SGLang also compares types and restores the parts
    (_fix_v5_tokenizer_components).
    """
    from tokenizers import Tokenizer

    if not file.is_file():
        return
    stored = Tokenizer.from_file(str(file))
    loaded = tokenizer.backend_tokenizer
    pairs = [
        (getattr(stored, part), getattr(loaded, part)) for part in ("pre_tokenizer", "decoder")
    ]
    if any(a is not None and b is not None and type(a) is not type(b) for a, b in pairs):
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            setattr(loaded, part, getattr(stored, part))


def load_prompts(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    store: ImageStore | None = None,
    most: int | None = None,
) -> PromptSet:
    """Returns the rendered and tokenized rows of data.path or data.sources; Prompt.id is the row's
    id.

    Raises ValueError with file and line for a missing file, a broken line, a missing key, a value
    of the wrong type, an empty prompt, and an image that cannot be read; also if no prompt of the
    file, or of a source with a ratio, is short enough. store: keeps the images of a vision-language
    model. most: the first prompts suffice, so many at least, and rows behind them are not read.
    """
    prompts = StoredPrompts()
    sizes = [0] * len(data.parts)
    lengths: list[tuple[int, int]] = []

    def rows_in_use() -> Iterator[Row]:
        """Yields the rows of short prompts; holds one block of rows, because they may have
        images."""
        rows = iterate_rows(data)
        while block := list(islice(rows, min(most or _BLOCK, _BLOCK))):
            short: list[tuple[Row, Prompt]] = []
            for row, prompt in zip(block, render_rows(data, tokenizer, block, store), strict=True):
                lengths.append((row.part, len(prompt.token_ids)))
                if len(prompt.token_ids) <= data.max_prompt_tokens:
                    short.append((row, prompt))
                    sizes[row.part] += 1
            prompts.extend(prompt for _, prompt in short)
            yield from (row for row, _ in short)

    in_use = fingerprint(islice(rows_in_use(), most))
    if most is None or not prompts:
        refuse_long(data, lengths)
    mixture = tuple(zip(data.ratios, sizes, strict=True)) if data.ratios else ()
    return PromptSet(prompts, len(lengths) - len(prompts), data.shuffle, mixture, in_use)


def render_rows(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    store: ImageStore | None = None,
    problems: list[str] | None = None,
) -> list[Prompt]:
    """Returns the prompts of rows, of any length.

    problems: problems of rows are added to it instead of raised, and those rows are left out.
    """
    parts = data.parts
    rendered: list[tuple[Row, str, list[Message], list[object]]] = []
    for row in rows:
        with collected(problems):
            rendered.append((row, *_render(parts[row.part], tokenizer, row)))
    if data.add_bos and tokenizer.bos_token_id is None:
        raise ValueError("data.add_bos is true, but the tokenizer has no <bos> token")
    # special tokens come from the chat template or data.add_bos, never from the tokenizer itself
    begin = [tokenizer.bos_token_id] * data.add_bos
    tokens = tokenize(tokenizer, [text for _, text, _, _ in rendered], begin)
    prompts: list[_WithSources] = []
    for (row, text, messages, images), ids in zip(rendered, tokens, strict=True):
        with collected(problems):
            own = ids[data.add_bos :]
            if not len(own):
                raise ValueError(f"{row.location}: the prompt {text!r} has no tokens")
            if has_unknown(tokenizer, text, own):
                raise ValueError(
                    f"{row.location}: the tokenizer does not know every character of {text[:60]!r}"
                    "...: take a model whose tokenizer does, or name one as model.tokenizer"
                )
            shown = row.demonstration
            prompt = Prompt(
                row.id,
                text,
                ids,
                row.answer,
                row.grader,
                row.location,
                row.source,
                row.extra,
                messages=messages,
                tools=list(row.tools),
                teachers=row.teachers,
                weights=row.weights,
                demonstration=whole_response(tokenizer, row.location, text, shown)
                if shown
                else None,
            )
            prompts.append((prompt, images))
    return _with_images(store, prompts, problems)


def whole_response(
    tokenizer: "PreTrainedTokenizerBase", location: str, prompt: str, text: str
) -> np.ndarray:
    """Returns the tokens of a response to learn and its end of sequence, [T] int32, without the tag
    that begins its reasoning if the prompt ends with that. Raises ValueError with the row's location."""
    _, begun, rest = prompt.rpartition("<think>")
    if begun and not rest.strip():
        text = text.removeprefix(begun).removeprefix(rest)
        if "</think>" not in text:
            raise ValueError(
                f"{location}: the chat template begins a reasoning, which the response {text!r:.80} does "
                "not end; write </think> before its answer, or set data.chat_template_args to begin none"
            )
    ids = tokens_behind(tokenizer, prompt, text)
    if tokenizer.eos_token_id is None or has_unknown(tokenizer, text, ids):
        raise ValueError(
            f"{location}: the tokenizer does not know every character of the response "
            f"{text!r:.80}, or has no end-of-sequence token, with which it should end"
        )
    return np.array([*ids, tokenizer.eos_token_id], np.int32)


def refuse_long(data: DataConfig, lengths: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError if no prompt of the section, or of a source with a ratio, is short enough.

    lengths: (part of the section, number of tokens) for each prompt.
    """
    most = data.max_prompt_tokens
    mixed = bool(data.ratios)
    for number, part in enumerate(data.parts if mixed else [data]):
        tokens = [length for index, length in lengths if index == number or not mixed]
        if not tokens:
            raise ValueError(f"{part.name}: no row")
        if min(tokens) > most:
            raise ValueError(
                f"{part.name}: no prompt of at most {most} tokens (data.max_prompt_tokens); the "
                f"shortest has {min(tokens)} tokens"
            )


def refuse_long_demonstration(prompts: Iterable[Prompt], most: int) -> None:
    """Raises ValueError for a demonstration of more than `most` tokens, by file and line."""
    for prompt in prompts:
        if prompt.demonstration is not None and len(prompt.demonstration) > most:
            raise ValueError(
                f"{prompt.location}: the demonstration has {len(prompt.demonstration)} tokens with "
                f"its end, more than sampling.max_response_tokens {most}; shorten it, or raise that"
            )


def describe_dropped(data: DataConfig, prompts: PromptSet) -> str:
    """Returns a sentence about dropped prompts, or "" if none was dropped."""
    if not prompts.num_too_long:
        return ""
    return (
        f"{data.name}: {prompts.num_too_long} of {prompts.num_too_long + len(prompts)} prompts "
        f"dropped, longer than {data.max_prompt_tokens} tokens (max_prompt_tokens)"
    )


def _with_images(
    store: ImageStore | None,
    prompts: Sequence[_WithSources],
    problems: list[str] | None,
) -> list[Prompt]:
    """Returns the prompts with their images, which the store keeps.

    Each rank begins at another prompt, so that ranks that start together share the work.
    """

    def expanded(prompt_and_sources: _WithSources) -> Prompt | None:
        with collected(problems):
            return _expanded(store, *prompt_and_sources)
        return None

    rank = environment.get_int("RANK", 0)
    world = environment.get_int("WORLD_SIZE", 1)
    first = len(prompts) * rank // world
    with ThreadPoolExecutor() as pool:  # Pillow lets other threads run
        over = map if store is None else pool.map
        done = list(over(expanded, [*prompts[first:], *prompts[:first]]))
    last = len(prompts) - first
    return [prompt for prompt in done[last:] + done[:last] if prompt is not None]


def _expanded(store: ImageStore | None, prompt: Prompt, sources: list[object]) -> Prompt:
    """Returns the prompt with its images, and the placeholders of all their tokens."""
    if store is None:
        if sources:
            raise ValueError(
                f"{prompt.location}: the prompt has images, but the model (model.path) does not see"
            )
        return prompt
    folder = Path(prompt.location).parent
    images = []
    for number, source in enumerate(sources, 1):
        with explained(f"{prompt.location}: image {number} cannot be used"):
            images.append(store.add(image_bytes(source, folder)))
    with translated(prompt.location, ValueError):
        token_ids, refs = store.expand(prompt.token_ids, images)
    if not refs:
        return prompt
    return replace(prompt, token_ids=token_ids, images=tuple(refs), short_ids=prompt.token_ids)


def _chat(data: DataConfig, row: Row) -> list[Message]:
    """Returns the messages of a row, with data.prompt_template around the last one of the user."""
    messages = [dict(message) for message in as_messages(row.prompt)]
    if data.prompt_template != "{prompt}":
        users = [message for message in messages if message["role"] == "user"]
        if not users or not isinstance(users[-1].get("content"), str):
            raise ValueError(
                f"{row.location}: data.prompt_template needs a message of the user that is a "
                "text; this row has none"
            )
        users[-1]["content"] = data.prompt_template.replace("{prompt}", users[-1]["content"])
    if data.system_prompt is None:
        return messages
    return with_system([{"role": "system", "content": data.system_prompt}], messages)


def require_template(data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ValueError if data.chat_template is set but the tokenizer has no chat template, or one
    without a name in data.chat_template_args."""
    if data.chat_template and not tokenizer.chat_template:
        raise ValueError("data.chat_template is true, but the tokenizer has no chat template")
    for name in data.chat_template_args:
        if name not in str(tokenizer.chat_template):
            raise ValueError(f"data.chat_template_args: the chat template has no {name!r}")


def _render(
    data: DataConfig, tokenizer: "PreTrainedTokenizerBase", row: Row
) -> tuple[str, list[Message], list[object]]:
    """Returns the text to tokenize, its messages if there is a chat template, and the sources of
    its images, which no checkpoint should hold."""
    chat = _chat(data, row)
    if not data.chat_template:
        return str(chat[-1]["content"]), [], []
    require_template(data, tokenizer)
    apart, sources = images_apart(chat, row.images, data.images_key is not None, row.location)
    # a parquet file has times and such, which neither graders nor checkpoints get through JSON
    messages = json.loads(json.dumps(apart, default=str))
    with explained(f"{row.location}: the chat template refuses this prompt"):
        return render_whole(data, tokenizer, messages, tools=row.tools), messages, sources


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], begin: Sequence[int] = ()
) -> Iterator[np.ndarray]:
    """Yields the ids of each text after those of `begin`, [T] int32.

    It works in blocks, because tokenizers return 120 bytes per token.
    """
    for start in range(0, len(texts), _BLOCK):
        block = list(texts[start : start + _BLOCK])
        encoded = tokenizer(block, add_special_tokens=False, return_attention_mask=False)
        yield from (np.array([*begin, *ids], np.int32) for ids in encoded["input_ids"])
