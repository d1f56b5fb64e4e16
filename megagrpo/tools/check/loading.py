"""Tries tokenizer, data, graders and a tool turn as a run will, so that `megagrpo check` reports the
same errors.

It imports transformers, and with it torch: some seconds. problems.py, which runs before every
start, does not.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.check.rules.inputs import named_first
from megagrpo.check.rules.subject import model_folder
from megagrpo.checkpoint.folder import data_problem, latest
from megagrpo.config.fields import complaints
from megagrpo.config.rollout import AgentConfig
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.images import ImageStore
from megagrpo.data.messages import Message, render_messages
from megagrpo.data.prompts import (
    load_tokenizer,
    refuse_long,
    refuse_long_demonstration,
    render_rows,
    require_template,
)
from megagrpo.data.rows import Row, fingerprint, iterate_rows, raw_rows, read_rows
from megagrpo.data.texts import decoder, reasoning_end
from megagrpo.models.folder import Model
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.agents.parsers import TurnParsers
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.system.errors import collected, explained, translated
from megagrpo.system.worker_process import WorkerError
from megagrpo.tools.check.trial_texts import first_of_each, grade_trial_texts
from megagrpo.tools.check.turn_ends import end_advice

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

_SHOWN = 160  # characters of a text
_MOST_ROWS = 200_000  # of a section that are rendered; of more, as many at equal distances
_ROWS_WITH_IMAGES = 8  # the same of a section with a column of images
_CHUNK = 5_000  # rows that are rendered between looks at the clock
_QUIET_S = 15.0  # between lines of progress
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_ARGUMENTS = {"a": 2}
_ID = "functions.add:0"  # the form that Kimi-K2's parser reads a name from
_ASKED: list[Message] = [{"role": "user", "content": "Add 2."}]
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": _ID,
            "type": "function",
            "function": {"name": "add", "arguments": json.dumps(_ARGUMENTS)},
        }
    ],
}
_SAID: Message = {"role": "tool", "tool_call_id": _ID, "name": "add", "content": "2"}


@dataclass(frozen=True)
class LoadingTest:
    """Result of the loading test."""

    problems: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    first_row: list[str] = field(default_factory=list)  # as the model and the graders read it
    advice: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=lambda: ["the model's weights", "the engines"])


def try_loading(config: ExperimentConfig) -> LoadingTest:
    """Loads the tokenizer, renders and tokenizes the rows of every data file that is already there,
    grades texts for the first ones and has a tool call parsed."""
    trial = LoadingTest()
    folder = model_folder(config)
    if folder is None:
        trial.not_tried.insert(
            0, f"tokenizer, chat template, rows and graders ({config.model.path} is not there yet)"
        )
    else:
        trial.problems.extend(complaints(_try_tokenizer, config, folder, trial))
    return trial


def _try_tokenizer(config: ExperimentConfig, folder: str, trial: LoadingTest) -> None:
    model = Model.read(folder, config.model.tokenizer)
    tokenizer = load_tokenizer(model)
    trial.loaded.append(f"the tokenizer of {config.model.tokenizer or folder}")
    require_template(config.data, tokenizer)
    with collected(trial.problems):
        if end := reasoning_end(config, tokenizer):
            trial.loaded.append(f"answers begin behind {end} (sampling.reasoning_end)")
    # a template that refuses a conversation may do for the rows
    with suppress(ValueError), explained("data.chat_template"):
        trial.advice.extend(end_advice(config, tokenizer, model))
    if config.sampling.several_turns:
        trial.problems.extend(complaints(make_answering, config, tokenizer))
        player = "environment" if config.sampling.agent is None else "agent"
        trial.loaded.append(
            "the chat template, turn by turn" if config.data.chat_template else f"the {player}"
        )
    agent = config.sampling.agent
    if agent is not None and agent.tool_parser and not trial.problems:
        with collected(trial.problems):
            _try_tool_turn(config, agent, model, tokenizer, trial)
    first: list = []  # prompts
    trained: set[str] = set()  # prompts, as texts
    with TemporaryDirectory() as images:
        store = ImageStore.of(model, Path(images))
        for key, data in config.data_sections.items():
            if missing := [path for path in data.paths if not Path(path).exists()]:
                trial.not_tried.insert(0, f"{', '.join(missing)} (not there yet)")
                continue
            with collected(trial.problems):
                # a warm-up may have the prompts of the run
                others = set() if key == "sft" else trained
                prompts = _try_rows(config, data, tokenizer, store, others, trial)
                if key != "sft":  # no grader reads its rows
                    first += prompts
    if not config.sampling.rewarding:
        with collected(trial.problems), translated("reward.grader", WorkerError):
            graded = grade_trial_texts(config.reward, first)
            trial.not_tried[:0] = [f"grader {name}" for name in graded.away]
            trial.first_row.extend(graded.lines)
            trial.problems.extend(graded.problems)
            trial.advice.extend(graded.advice)


# ---- rows --------------------------------------------------------------------------------------


def _try_rows(
    config: ExperimentConfig,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    store: ImageStore | None,
    trained: set[str],
    trial: LoadingTest,
) -> list:
    """Renders and tokenizes rows of a section; returns the first prompts of each source and grader.

    Raises ValueError if none is short enough, or if the run's checkpoint has other rows.
    """
    problems: list[str] = []
    first: list = []
    unread: list[str] = []  # among the problems of preflight
    rows = read_rows(data, unread)
    every, tried = _spread(data, rows)
    which = "every row" if every == 1 else f"one row in {every}"
    lengths: dict[int, int] = {}  # tokens, by row
    said = time.monotonic()
    for start in range(0, len(tried), _CHUNK):
        found = render_rows(data, tokenizer, tried[start : start + _CHUNK], store, problems)
        lengths |= {prompt.id: len(prompt.token_ids) for prompt in found}
        with collected(problems):
            refuse_long_demonstration(found, config.sampling.max_response_tokens)
        first += first_of_each(found)
        if time.monotonic() - said > _QUIET_S:
            said = time.monotonic()
            done = f"{len(lengths):,} of {len(tried):,} rows rendered"
            print(f"check: {data.name}: {done}", file=sys.stderr, flush=True)
    trial.problems.extend(named_first(problems))
    if data.images_key is None:
        trial.advice.extend(chain(_unread_images(data), _repetitions(data, rows, trained)))
    elif not any(row.images for row in tried):
        trial.advice.append(f"{data.name}: no row tried has data.images_key {data.images_key!r}")
    if not first:
        if not rows and not unread:
            refuse_long(data, [])
        return []
    _say_first_row(config, data, tokenizer, first, trial)
    template = ", by the chat template" if data.chat_template else ""
    longest = f"at most {max(lengths.values())} tokens{template}"
    kept = {row for row, length in lengths.items() if length <= data.max_prompt_tokens}
    dropped = len(lengths) - len(kept)
    if dropped:
        longest += (
            f"; {dropped:,} longer than max_prompt_tokens ({data.max_prompt_tokens}): dropped"
        )
    trial.loaded.append(f"{which} of {data.name}: {len(lengths):,} rows, {longest}")
    if len(lengths) == len(rows) and not unread:
        refuse_long(data, [(row.part, lengths[row.id]) for row in tried])
        if data == config.data:
            _try_rows_in_use(config, [row for row in tried if row.id in kept], trial)
    return list(first_of_each(first))


def _spread(data: DataConfig, rows: Sequence[Row]) -> tuple[int, Sequence[Row]]:
    """Returns the distance of the rows that are tried, and these rows, with their images."""
    most = _MOST_ROWS if data.images_key is None else _ROWS_WITH_IMAGES
    every = max(1, -(-len(rows) // most))
    if data.images_key is None:
        return every, rows[::every]
    chosen = {row.id for row in rows[::every]}
    return every, [row for row in iterate_rows(data, []) if row.id in chosen]


def _unread_images(data: DataConfig) -> Iterator[str]:
    """Yields the files whose first row has images that the run would not read."""
    for path in data.paths:
        with suppress(ValueError):  # of a row that cannot be read, which is named already
            row = next(raw_rows(Path(path)), {})
            columns = [name for name in ("images", "image") if row.get(name)]
            if columns or "<image>" in str(row.get(data.prompt_key)):
                column = columns[0] if columns else "images"
                yield (
                    f"{path}: its rows have images, which are not read; "
                    f"data.images_key: {column} names their column"
                )


def _repetitions(data: DataConfig, rows: Sequence[Row], trained: set[str]) -> Iterator[str]:
    """Yields how many rows have the prompt of others, here or among those that a run trains on, and
    that none has tools, or a teacher."""
    if data.tools_key and not any(row.tools for row in rows):
        yield f"{data.name}: no row has data.tools_key {data.tools_key!r}"
    if data.teacher_key and not any(row.teachers for row in rows):
        yield f"{data.name}: no row has data.teacher_key {data.teacher_key!r}: no teacher is asked"
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(str(row.prompt), set()).add(row.answer)
    repeated = len(rows) - len(answers)
    if repeated:
        several = sum(len(each) > 1 for each in answers.values())
        yield (
            f"{data.name}: {repeated:,} of {len(rows):,} rows repeat the prompt of an earlier one; "
            f"prompts with several answers: {several:,}"
        )
    common = len(answers.keys() & trained)
    trained.update(answers)  # the sections of a run, those of training first
    if common:
        yield f"{data.name}: {common:,} of {len(answers):,} prompts are also in the training data"


def _try_rows_in_use(config: ExperimentConfig, rows: Sequence[Row], trial: LoadingTest) -> None:
    """Raises ValueError if a curriculum cannot draw from them; notes that a checkpoint has
    others."""
    ratios = config.data.ratios
    sizes = [sum(row.part == number for row in rows) for number in range(len(ratios))]
    Curriculum.of(config, rows, tuple(zip(ratios, sizes, strict=True)))
    source = latest(config.run_folder.checkpoints)
    if source is not None and config.checkpoint.resume == "auto":
        with suppress(OSError):  # of a damaged checkpoint, whose load gives the reason
            if problem := data_problem(source, fingerprint(rows)):
                trial.problems.append(problem)


def _say_first_row(
    config: ExperimentConfig,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    first: Sequence,
    trial: LoadingTest,
) -> None:
    if trial.first_row:
        return
    prompt = first[0]
    images = f" with {len(prompt.images)} image(s)" if prompt.images else ""
    rewarding = config.sampling.rewarding
    by = f"rewarded by {rewarding}"
    if not rewarding:
        by = f"graded by {prompt.grader or 'the graders of reward'}"
    trial.first_row[:] = [
        f"{prompt.location}, {len(prompt.token_ids)} tokens{images}, {by}:",
        f"  the model reads     {_short(prompt.text)}",
        f"  its answer          {_short(prompt.answer)}",
    ]
    if tokenizer.chat_template and not data.chat_template:
        trial.advice.append(
            "the tokenizer has a chat template; data.chat_template: true renders prompts by it"
        )


def _short(text: str) -> str:
    """Returns a text as one line of its start and its end."""
    text = repr(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


# ---- tool calls --------------------------------------------------------------------------------


def _try_tool_turn(
    config: ExperimentConfig,
    agent: AgentConfig,
    model: Model,
    tokenizer: "PreTrainedTokenizerBase",
    trial: LoadingTest,
) -> None:
    """Has the template write a turn with a call, the parser read it, and the template answer it.

    Raises ValueError if any of them cannot.
    """
    data = config.data
    renderer = Renderer(tokenizer, data, continues=agent.history == "all")
    if agent.history == "all":
        renderer.after_turn([_SAID], np.zeros(0, np.int32), [_TOOL])
    else:
        renderer.begin([*_ASKED, _CALLED, _SAID], [_TOOL])
    turn = render_messages(data, tokenizer, [*_ASKED, _CALLED], ready=False, tools=[_TOOL]).rstrip()
    for ready in (True, False):  # a template may begin an answer in another way than it writes one
        turn = turn.removeprefix(render_messages(data, tokenizer, _ASKED, ready, [_TOOL]))
    decode = decoder(tokenizer, model, config.sampling)
    text = decode(np.array(tokenizer(turn, add_special_tokens=False)["input_ids"]))
    calls = _parsed_by_sglang(text, agent.tool_parser)
    if calls != [["add", _ARGUMENTS]]:
        raise ValueError(
            f"sampling.agent.tool_parser {agent.tool_parser}: in the turn that the chat template "
            f"writes for a call, {text!r:.300}, it finds {calls or 'no call'}"
        )
    trial.loaded.append(f"a tool call, written by the template, parsed by {agent.tool_parser}")


def _parsed_by_sglang(text: str, tool_parser: str) -> list[list[object]]:
    """Returns [name, arguments] of the calls that SGLang's parser finds. Raises ValueError."""
    with (
        closing(TurnParsers(tool_parser, "")) as parsers,
        translated("a tool call is not parsed", GenerationFailed),
    ):
        message = asyncio.run(parsers.message(text, [_TOOL], ""))
    return [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
