"""Reads data files: one Row per row, with the values of all columns, and every problem with file
and line."""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import IO, cast, get_args

from megagrpo.config.data import DataConfig, DataPart
from megagrpo.config.fields import LARGEST, repeated
from megagrpo.config.objective.streams import Component
from megagrpo.data.messages import checked_messages, plain
from megagrpo.data.parquet import parquet_rows
from megagrpo.system.errors import collected, translated

Values = dict[str, object]
Numbered = Iterator[tuple[int, object]]  # rows with the number of rows or lines before each
_MOST_SOURCES = 64  # each has metrics of its own


@dataclass(frozen=True)
class Row:
    """One row of a data section."""

    id: int  # number of rows before it, over all files
    location: str  # file:line; lines count from 1, as in editors
    prompt: str | list[Values]  # a text, or chat messages
    answer: str
    source: str  # "": it has no name
    grader: str | None  # that the row, or its source, chooses
    extra: Values  # from data.extra_key
    part: int  # its part of the section: an index into DataConfig.parts
    images: tuple[object, ...] = ()  # from data.images_key, as the file has them
    tools: tuple[Values, ...] = ()  # from data.tools_key
    teachers: tuple[tuple[str, float], ...] = ()  # from data.teacher_key, weights sum to 1
    # from data.weight_key and data.demonstration_key, as in Prompt
    weights: dict[str, float] = field(default_factory=dict)
    demonstration: str = ""


def read_rows(data: DataConfig, problems: list[str] | None = None) -> list[Row]:
    """Returns the rows in use, all at once, without their images, which may be gigabytes. Raises
    as `iterate_rows`."""
    return [replace(row, images=()) for row in iterate_rows(data, problems)]


def iterate_rows(data: DataConfig, problems: list[str] | None = None) -> Iterator[Row]:
    """Yields the rows in use. Raises ValueError for every problem that does not need a tokenizer.

    problems: problems of rows are added to it instead, and those rows are left out.
    """
    last = -1
    sources: set[str] = set()
    for number, part in enumerate(data.parts):
        num_taken = 0
        for path in map(Path, part.paths):
            if not path.is_file():
                raise ValueError(f"{path}: no such file (data.path)")
            before = last + 1
            for i, raw in _rows(path):
                if num_taken == part.limit:
                    break
                row = None
                location = f"{path}:{i + 1}"
                with collected(problems), translated(location, ValueError):
                    row = _row(part, number, before + i, location, _values(raw))
                if row is not None:
                    num_taken += 1
                    last = row.id
                    sources.add(row.source)
                    yield row
    _refuse_sources(data, sources)


def raw_rows(path: Path) -> Iterator[Values]:
    """Yields the rows of a file as they are written. Raises ValueError by file and line."""
    for i, raw in _rows(path):
        with translated(f"{path}:{i + 1}", ValueError):
            values = _values(raw)
        yield values


def _refuse_sources(data: DataConfig, sources: set[str]) -> None:
    if len(sources) > _MOST_SOURCES:
        raise ValueError(
            f"{data.name}: {len(sources)} sources; metrics are kept for at most {_MOST_SOURCES}"
        )
    spelled = {"as_trained": "the evaluation as in training"}  # eval_as_trained/*
    for source in sorted(sources):
        other = spelled.setdefault(metric_name(source), source)
        if other != source:
            raise ValueError(
                f"{data.name}: source {source!r} and {other!r} have metrics of one name, "
                f"{metric_name(source)}; rename one"
            )


def metric_name(source: str) -> str:
    """Returns a source's name as metrics spell it: `math-500` is math_500, `数学` is u6570u5b66."""
    plain = re.sub(r"[^\x00-\x7f]", lambda match: f"u{ord(match[0]):x}", source.lower())
    return re.sub(r"[^a-z0-9_]", "_", plain)


def fingerprint(rows: Iterable[Row]) -> list[list[str | int]]:
    """Returns [name, number of rows, digest of their prompts and answers] of each file, in order."""
    files: dict[str, hashlib.blake2b] = {}
    sizes = Counter[str]()
    for row in rows:
        path = row.location.rpartition(":")[0]
        spelled = repr((row.prompt, row.answer, row.tools, row.images))
        extras = tuple(filter(None, (row.teachers, row.weights, row.demonstration)))
        if extras:  # else the digest stays as it was before there were any
            spelled += repr(extras)
        files.setdefault(path, hashlib.blake2b(digest_size=16)).update(spelled.encode())
        sizes[path] += 1
    return [[path, sizes[path], digest.hexdigest()] for path, digest in files.items()]


def _row(data: DataPart, part: int, row_id: int, location: str, values: Values) -> Row:
    prompt = _messages(_field(values, data.prompt_key), data)
    answer = _answer(values, data.answer_key, location)
    source = data.source or ""
    grader = data.grader
    if data.source_key is not None:
        source = _text(_field(values, data.source_key), data.source_key)
    if data.grader_key is not None:
        grader = _text(_field(values, data.grader_key), data.grader_key)
    elif data.grader_by_source:
        grader = _grader_of(source, data.grader_by_source)
        if grader is None:
            known = ", ".join(data.grader_by_source)
            raise ValueError(
                f"source {source!r} has no grader in data.grader_by_source; it has {known}"
            )
    extra = _extra(values, data.extra_key)
    shown = _field(values, data.demonstration_key)
    images = _optional(values, data.images_key)
    if images is None:
        images = []
    elif not isinstance(images, list):
        images = [images]
    return Row(
        row_id,
        location,
        prompt,
        answer,
        source,
        grader,
        extra,
        part,
        tuple(images),
        _tools(values, data),
        _teachers(values, data.teacher_key),
        _weights(values, data),
        "" if shown is None else _text(shown, str(data.demonstration_key)),
    )


def _teachers(values: Values, key: str | None) -> tuple[tuple[str, float], ...]:
    """Returns the teachers of a row and their weights, which sum to 1: one name, or weights by
    name, also as JSON."""
    value = _by_name(values, key)
    weights = value or {}
    if value and isinstance(value, str):
        weights = {value: 1.0}
    if not isinstance(weights, dict) or not all(
        type(weight) in (int, float) and 0 < weight <= LARGEST for weight in weights.values()
    ):
        raise ValueError(
            f"{key!r} should be the name of a teacher, or names with weights "
            f"above 0, up to {LARGEST:g}; is {value!r:.80}"
        )
    total = sum(weights.values())
    return tuple((name, weight / total) for name, weight in weights.items())


def unknown_teachers(row: Row, known: Collection[str]) -> list[str]:
    """Returns a sentence for each teacher of a row that the experiment does not have."""
    return [
        f"{row.location}: teacher {name!r} is not among teachers ({', '.join(known)})"
        for name, _ in row.teachers
        if name not in known
    ]


def _extra(values: Values, key: str | list[str] | None) -> Values:
    """Returns the object in a column, or an object with the values of each."""
    if key is None:
        return {}
    extra = {name: plain(_field(values, name)) for name in ([key] if isinstance(key, str) else key)}
    whole = plain(_opened(extra.get(str(key))))
    if isinstance(whole, dict):
        extra = whole
    # what JSON holds of it: a parquet file has dates, and bytes
    return cast(Values, json.loads(json.dumps(extra, default=str)))


def _weights(values: Values, data: DataConfig) -> dict[str, float]:
    """Returns a row's weights by component of the loss."""
    key = data.weight_key
    weights = _by_name(values, key) or {}
    names = get_args(Component)
    if not isinstance(weights, dict) or not all(
        name in names and type(weight) in (int, float) and 0 <= weight <= LARGEST
        for name, weight in weights.items()
    ):
        raise ValueError(
            f"{key!r} should be weights of components, {{rl: 0, cross_entropy: 1}}, "
            f"numbers from 0 to {LARGEST:g} for some of {', '.join(names)}; is {weights!r:.80}"
        )
    return {name: float(weight) for name, weight in weights.items()}


def _by_name(values: Values, key: str | None) -> object:
    """Returns the value of a column: an object, also if it is JSON in a text, without nulls (a
    parquet file has every name in every row); or any other value as it is."""
    column = _opened(_field(values, key))
    if isinstance(column, str) and column.startswith("{"):
        raise ValueError(f"{key!r} is not JSON")
    return plain(column)


def _tools(values: Values, data: DataConfig) -> tuple[Values, ...]:
    """Returns the tools that a row offers the model; the column has a list of them, or its JSON."""
    tools = _opened(_optional(values, data.tools_key))
    if tools is None or tools == "":
        return ()
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise ValueError(
            f'{data.tools_key!r} should be a list of {{"type": "function", '
            f'"function": {{"name", "parameters", ...}}}}, is {tools!r:.80}'
        )
    spelled = json.dumps(plain(tools), ensure_ascii=False, default=str)
    _refuse_half(spelled, repr(data.tools_key))
    return tuple(json.loads(spelled))


def _grader_of(source: str, graders: dict[str, str]) -> str | None:
    """Returns the grader under the source's name, else that of the first `start*` that matches."""
    starts = (key for key in graders if key.endswith("*") and source.startswith(key[:-1]))
    return graders.get(source) or next((graders[key] for key in starts), None)


def _messages(prompt: object, data: DataConfig) -> str | list[Values]:
    """Returns a text, or the messages for a chat template; ROLL writes these as JSON in a text."""
    key = data.prompt_key
    if isinstance(prompt, str):
        prompt = _parsed(prompt)
    if not isinstance(prompt, list):
        return _text(prompt, key)
    if not data.chat_template:
        raise ValueError(f"{key!r} holds chat messages; set data.chat_template: true")
    if not prompt or not all(
        isinstance(message, dict) and message.get("role") for message in prompt
    ):
        raise ValueError(f"{key!r} should be a list of {{role, content}}, is {prompt!r:.60}")
    with translated(repr(key), ValueError):
        prompt = checked_messages(prompt)
    for number, message in enumerate(prompt, start=1):
        spelled = json.dumps(message, ensure_ascii=False, default=str)
        _refuse_half(spelled, f"{key!r}: message {number}")
    if prompt[-1]["role"] != "assistant":
        return prompt
    if not data.answer_key.startswith(f"{key}."):
        raise ValueError(
            f"{key!r} ends with the assistant's message; with data.answer_key: "
            f"{key}.-1.content it is the answer and no part of the prompt"
        )
    return prompt[:-1]


def _parsed(text: str) -> object:
    """Returns the messages if `text` is JSON for some, else the text itself."""
    items = _opened(text)
    if (
        items
        and isinstance(items, list)
        and all(isinstance(item, dict) and "role" in item for item in items)
    ):
        return items
    return text


def _rows(path: Path) -> Numbered:
    match path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix:
        case ".jsonl":
            return _jsonl_lines(path)
        case ".json":
            return _json_rows(path)
        case ".csv":
            return _csv_rows(path)
        case ".parquet" if path.suffix != ".gz":
            return parquet_rows(path)
    raise ValueError(
        f"{path}: prompts are read from .jsonl, .json, .csv (also .gz) or .parquet, not "
        f"{path.suffix or 'a file without ending'}"
    )


def _jsonl_lines(path: Path) -> Numbered:
    with _open(path) as file:
        for i, line in enumerate(file):
            line = line.removeprefix(BOM_UTF8 if i == 0 else b"")
            if line.strip():
                yield i, line


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file, packed or not. Raises ValueError while it is read if it is no gzip file."""
    problems = (gzip.BadGzipFile, EOFError, zlib.error)
    with (
        translated(f"{path}: not a readable .gz file", *problems),
        cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        yield file


def _json_rows(path: Path) -> Numbered:
    """Yields the objects of a list; or lines, because many .json files are .jsonl files."""
    with _open(path) as file:
        is_list = file.read(256).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    if not is_list:
        yield from _jsonl_lines(path)
        return
    with _open(path) as file, translated(f"{path}: not JSON", ValueError, RecursionError):
        rows = json.loads(file.read(), object_pairs_hook=_object)
    yield from enumerate(rows)


def _csv_rows(path: Path) -> Numbered:
    """Yields the records after the header; all values are texts."""
    csv.field_size_limit(2**31 - 1)  # a prompt is longer than the default
    with (
        _open(path) as file,
        translated(f"{path}: not a readable .csv file", csv.Error, UnicodeDecodeError),
    ):
        texts = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(texts, strict=True)
        doubled = repeated(filter(None, reader.fieldnames or ()))
        for row in reader:
            if any(row.pop(None, ())) or doubled:
                raise ValueError(
                    f"{path}:{reader.line_num}: more fields than columns, or two columns of one name"
                )
            yield reader.line_num - 1, row


def _object(pairs: list[tuple[str, object]]) -> Values:
    """Returns a JSON object. Raises ValueError for a key with two values, of which Python would keep
    the last."""
    if twice := repeated(key for key, _ in pairs):
        raise ValueError(f"the key {twice[0]!r} has two values")
    return dict(pairs)


def _values(line: object) -> Values:
    row = line
    if isinstance(line, bytes):
        # also not UTF-8, a number of too many digits, or too deep
        with translated(f"broken JSON {line!r:.60}", ValueError, RecursionError):
            row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    if not isinstance(row, dict):
        raise ValueError(f'should be an object like {{"prompt": ...}}, is {line!r:.60}')
    return row


def _answer(values: Values, key: str, location: str) -> str:
    """Returns an answer as text; a list or an object, such as test cases, as JSON."""
    value = _field(values, key)
    if ".parquet:" in location:  # whose nulls Arrow has filled in; others are expected results
        value = plain(value)
    if isinstance(value, dict | list):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return _text(value, key)


def _opened(value: object) -> object:
    """Returns the object or list of a text that is JSON for one, any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _field(row: object, key: str | None) -> object:
    """Returns the value of column `key`, or of the path that its parts between dots make; None
    without a key."""
    if key is None:
        return None
    if isinstance(row, dict) and key in row:
        return row[key]
    value = row
    for part in key.split("."):
        value = _opened(value)
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif (
            isinstance(value, list)
            and part.removeprefix("-").isdecimal()
            and -len(value) <= int(part) < len(value)
        ):
            value = value[int(part)]
        else:
            keys = ", ".join(map(repr, value)) if isinstance(value, dict) else ""
            where = f" at {part!r}" if part != key else ""
            raise ValueError(f"no key {key!r}{where}; keys found: {keys or 'none'}")
    return value


def _optional(values: Values, key: str | None) -> object:
    """Returns the value of a column that a row may lack, as one of text lacks images."""
    with suppress(ValueError):
        return _field(values, key)
    return None


def well_formed(text: str) -> str:
    """Returns the text with pairs of surrogates joined and lone ones replaced, because tokenizers
    raise for those."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(value: object, key: str) -> str:
    # not NaN, nor 1e400
    if isinstance(value, bool) or not (
        isinstance(value, str) or (isinstance(value, int | float | Decimal) and value * 0 == 0)
    ):
        raise ValueError(f"{key!r} should be a text or a number, is {value!r:.60}")
    _refuse_half(str(value), repr(key))
    return str(value)


def _refuse_half(text: str, what: str) -> None:
    with translated(f"{what} holds half of a character", UnicodeEncodeError):
        text.encode()
