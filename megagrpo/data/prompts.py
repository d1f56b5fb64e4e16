"""Reads prompt files, tokenises prompts, and orders them.

The order depends only on (seed, epoch), so the number of consumed prompts is the whole state to save.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet

from megagrpo.config.schema import DataConfig, ModelConfig
from megagrpo.data.torchvision_ops import define_torchvision_operators, torchvision_problem
from megagrpo.system.explained import explained
from megagrpo.types import Prompt

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set."""

    prompts: tuple[Prompt, ...]
    num_too_long: int  # dropped: longer than data.max_prompt_tokens
    shuffle: bool

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Returns prompts cursor .. cursor + count - 1 of an endless sequence of epochs, each in its own order."""
        size = len(self.prompts)
        return [self.prompts[self._order(seed, i // size)[i % size]] for i in range(cursor, cursor + count)]

    def _order(self, seed: int, epoch: int) -> Sequence[int]:
        return _shuffled(len(self.prompts), seed, epoch) if self.shuffle else range(len(self.prompts))


@lru_cache(maxsize=4)  # a batch touches two epochs, an evaluation set has its own
def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"prompts {seed} {epoch}").shuffle(order)  # a text seed is hashed: close seeds give unrelated orders
    return order


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Returns the model's tokenizer, from local files only.

    Raises ValueError if the folder has none, or if it has more tokens than the model has embeddings.
    """
    define_torchvision_operators()
    from transformers import AutoTokenizer  # takes seconds, and pulls in torch

    folder = Path(model.tokenizer or model.path)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; model.tokenizer (or model.path) is a local Hugging Face folder")
    with explained(f"{folder}: no tokenizer can be loaded from here", lambda exc: torchvision_problem()):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    config_file = Path(model.path) / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{config_file}: no such file; model.path is a local Hugging Face folder")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise ValueError(
            f"tokenizer {folder} has token id {largest} but model {model.path} only {size} embeddings (vocab_size): "
            "they do not belong together"
        )
    return tokenizer


def load_prompts(data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> PromptSet:
    """Returns the rendered and tokenised rows of data.path; Prompt.id is the row's id.

    Raises ValueError with file and line for a missing file, a broken line, a missing key, a value of the wrong type, an
    empty prompt, and if no prompt is short enough.
    """
    rows = read_rows(data)
    texts = [_render(data, tokenizer, row.values[data.prompt_key], row.location) for row in rows]
    token_ids = _tokenize(data, tokenizer, texts)
    prompts = []
    for row, text, ids in zip(rows, texts, token_ids, strict=True):
        if not ids:
            raise ValueError(f"{row.location}: the prompt {text!r} has no tokens")
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"{row.location}: the tokenizer does not know every character of {text!r:.80}")
        grader = None if data.grader_key is None else str(row.values[data.grader_key])
        answer = str(row.values[data.answer_key])
        prompts.append(Prompt(row.id, text, np.array(ids), answer, grader, row.location))
    kept = tuple(p for p in prompts if len(p.token_ids) <= data.max_prompt_tokens)
    if not kept:
        shortest = f"; the shortest has {min(len(p.token_ids) for p in prompts)} tokens" if prompts else " in the file"
        raise ValueError(
            f"{data.name}: no prompt of at most {data.max_prompt_tokens} tokens (data.max_prompt_tokens){shortest}"
        )
    return PromptSet(kept, len(prompts) - len(kept), data.shuffle)


Values = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One row of data.path."""

    id: int  # number of rows before it, over all files
    location: str  # file:line; lines count from 1, as in editors
    values: Values


def read_rows(data: DataConfig) -> list[Row]:
    """Returns the rows in use. Raises ValueError for every problem that does not need a tokenizer."""
    rows: list[Row] = []
    for path in map(Path, data.paths):
        if not path.is_file():
            raise ValueError(f"{path}: no such file (data.path)")
        first = rows[-1].id + 1 if rows else 0
        for i, values in _rows(path):
            if data.limit is not None and len(rows) == data.limit:
                return rows
            location = _location(path, i)
            _field(values, data.prompt_key, location)
            for key in (data.answer_key, *([data.grader_key] if data.grader_key else [])):
                _text(_field(values, key, location), key, location)
            rows.append(Row(first + i, location, values))
    return rows


def describe_dropped(data: DataConfig, prompts: PromptSet) -> str:
    """Returns a sentence about dropped prompts, or "" if none was dropped."""
    if not prompts.num_too_long:
        return ""
    total = prompts.num_too_long + len(prompts)
    limit = f"{data.max_prompt_tokens} tokens (max_prompt_tokens)"
    return f"{data.name}: {prompts.num_too_long} of {total} prompts dropped, longer than {limit}"


def _location(path: Path, row: int) -> str:
    return f"{path}:{row + 1}"


def _rows(path: Path) -> Iterator[tuple[int, Values]]:
    match path.suffix:
        case ".jsonl":
            return _jsonl_rows(path)
        case ".parquet":
            return _parquet_rows(path)
    raise ValueError(f"{path}: prompts are read from .jsonl or .parquet, not {path.suffix or 'a file without ending'}")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Values]]:
    with path.open("rb") as file:
        for i, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as exc:
                raise ValueError(f"{_location(path, i)}: not UTF-8: {exc}") from exc
            except json.JSONDecodeError as exc:
                raise ValueError(
                    f"{_location(path, i)}: broken JSON, column {exc.colno}: {exc.msg}: {line[:60]!r}"
                ) from exc
            if not isinstance(row, dict):
                raise ValueError(f'{_location(path, i)}: should be an object like {{"prompt": ...}}, is {line[:60]!r}')
            yield i, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Values]]:
    with explained(f"{path}: not a readable parquet file"):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        i = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield i, row
                i += 1


def _field(row: Values, key: str, location: str) -> object:
    if key not in row:
        raise ValueError(f"{location}: no key {key!r}; keys found: {', '.join(map(repr, row)) or 'none'}")
    return row[key]


def _text(value: object, key: str, location: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{location}: {key!r} should be a text or a number, is {value!r:.60}")
    return str(value)


def _render(data: DataConfig, tokenizer: "PreTrainedTokenizerBase", prompt: object, location: str) -> str:
    """Returns the text to tokenise. With a chat template, a prompt may be a list of {role, content} messages."""
    messages = prompt if isinstance(prompt, list) and data.chat_template else None
    if messages is None:
        text = data.prompt_template.replace("{prompt}", _text(prompt, data.prompt_key, location))
        if not data.chat_template:
            return text
        messages = [{"role": "user", "content": text}]
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    if not tokenizer.chat_template:
        raise ValueError("data.chat_template is true, but the tokenizer has no chat template")
    with explained(f"{location}: the chat template refuses this prompt"):
        arguments: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **data.chat_template_args}
        return str(tokenizer.apply_chat_template(messages, **arguments))


def _tokenize(data: DataConfig, tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Returns the token ids of each text.

    Special tokens come only from the chat template or data.add_bos, never from the tokenizer itself.
    """
    if not texts:
        return []
    bos = []
    if data.add_bos:
        if tokenizer.bos_token_id is None:
            raise ValueError("data.add_bos is true, but the tokenizer has no <bos> token")
        bos = [tokenizer.bos_token_id]
    return [bos + ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
