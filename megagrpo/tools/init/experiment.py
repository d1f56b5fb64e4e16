"""The sections of a new experiment, and the reason for each, which becomes its comment."""

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megagrpo.config.fields import complaints
from megagrpo.config.load import Plain
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.data.hub import with_local_files
from megagrpo.data.prompts import load_tokenizer, render_rows
from megagrpo.data.rows import Values, raw_rows, read_rows
from megagrpo.models.architecture import Architecture
from megagrpo.models.folder import Model
from megagrpo.models.kinds.compressed.describe import CompressedAttention
from megagrpo.system.run_folder import write_json_lines, write_whole
from megagrpo.tools.init.looks import (
    LOOKED_AT,
    Columns,
    ProposedGrader,
    columns_of,
    file_beside,
    first_rows,
    is_plain,
    proposed_grader,
)

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

_HELD_OUT = 128  # rows of an evaluation, if no file has them
_LONGER = 1.25  # prompts than the longest that was looked at
_ROUND = 64  # a limit of prompts is a multiple of it
_ON_CPU = 64  # tokens of a response, so that a step takes a minute
_GRADER = '''"""The grader of {yaml}: change it to what is right, and run `pytest {test}`."""


def grade(text: str, answer: str) -> float:
    """Returns 1.0 if the response holds the answer, else 0.0.

    What is wrong, or in the wrong form, is 0.0: an exception would count as an error, which is left
    out of the statistics, and a step of which half are errors ends the run.
    """
    return float(bool(answer.strip()) and answer.strip().casefold() in text.casefold())
'''
_TEST = """from importlib import import_module

grade = import_module({module!r}).grade  # its name may begin with a digit

ANSWER = {answer!r}


def test_the_answer_itself_is_right():
    assert grade(ANSWER, ANSWER) == 1.0


def test_what_is_no_answer_is_wrong_and_no_error():
    for text in ("", "I do not know."):
        assert grade(text, ANSWER) == 0.0
"""


@dataclass(frozen=True)
class Draft:
    """An experiment that is being written."""

    file: Path
    sections: dict[str, Plain] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)  # by section
    written: list[Path] = field(default_factory=list)  # or to be

    def add(self, section: str, value: Plain, *comments: str) -> None:
        """Adds a section, or keys of one."""
        if isinstance(value, dict):
            self.keys(section).update(value)
        else:
            self.sections[section] = value
        self.comments.setdefault(section, []).extend(comments)

    def keys(self, *path: str) -> dict[str, Plain]:
        """Returns the keys of a section, or of one inside it, which is made."""
        section = self.sections
        for key in path:
            section = cast(dict[str, Plain], section.setdefault(key, {}))
        return section

    def first_rows(self, number: int) -> DataConfig:
        """Returns its data, cut to a number of rows. Raises ValueError."""
        return self.config().data.model_copy(update={"limit": number})

    def config(self) -> ExperimentConfig:
        """Returns it without its preset, with the local files of names on the Hub. Raises
        ValueError."""
        own = {name: value for name, value in self.sections.items() if name != "preset"}
        config = ExperimentConfig.model_validate(own)
        config, problems = with_local_files(config, weights="")
        if problems:
            raise ValueError("\n".join(f"{keys[0]}: {text}" for keys, text in problems))
        return config

    def beside(self, name: str) -> Path:
        """Returns a file next to it. Raises ValueError if there is one: it is not overwritten."""
        path = self.file.with_name(name.format(self.file.stem))
        if path.exists():
            raise ValueError(f"{path} exists, and nothing is overwritten; choose another name (-o)")
        self.written.append(path)
        return path

    def remove(self) -> None:
        """Removes its files, which would be in the way of the next attempt."""
        for path in self.written:
            path.unlink(missing_ok=True)


def draft_experiment(
    draft: Draft,
    on_cpu: bool,
    named: Sequence[str | None],
    grader: str | None,
    held_out: str | None,
) -> None:
    """Adds all sections but those of the layout to a draft that names model and data. named: columns
    of prompt and answer; held_out: file of the evaluation. None for what to look for. Raises
    ValueError."""
    config = draft.config()
    model = Model.of(config)
    tokenizer = load_tokenizer(model)
    rows = first_rows(config.data.paths)
    columns = columns_of(rows, *named)
    chat = bool(tokenizer.chat_template)
    keys: dict[str, Plain] = {
        "prompt_key": columns.prompt,
        "answer_key": columns.answer,
        "chat_template": chat,
    }
    says = "has a chat template" if chat else "has no chat template: prompts are plain text"
    draft.add("data", keys, f"columns: {', '.join(columns.names)}", f"the tokenizer {says}")
    if columns.images is not None and model.sees_images:
        draft.add("data", {"images_key": columns.images})
    answers = [row.answer for row in read_rows(draft.first_rows(LOOKED_AT))]
    proposal = proposed_grader(answers)
    if grader not in (None, proposal.name):
        proposal = ProposedGrader(grader, "named by --grader")
    if proposal.template != "{prompt}":
        draft.add("data", {"prompt_template": proposal.template})
    response = _add_lengths(draft, model.arch, tokenizer, proposal, on_cpu)
    _add_reward(draft, proposal, rows, columns)
    samples = {"num_prompts_per_step": 8 if on_cpu else 64, "group_size": 8}
    draft.add("train", {"num_steps": 100, **samples}, "a step: prompts x responses to each")
    _add_algorithm(draft, model.arch)
    _add_evaluation(draft, held_out)
    draft.add("checkpoint", {"every": 20, "keep": 2}, "Ctrl-C, or `megagrpo stop`, saves too")
    draft.add("actor", _actor(draft, response, on_cpu))


def _actor(draft: Draft, response: int, on_cpu: bool) -> dict[str, Plain]:
    tokens = max(4096, cast(int, draft.keys("data")["max_prompt_tokens"]) + response)
    if on_cpu:
        return {"device": "cpu", "optimizer": {"lr": 5e-6}, "micro_batch_tokens": tokens}
    optimizer: dict[str, Plain] = {"lr": 1e-6, "warmup_steps": 10}
    return {"dtype": "bfloat16", "optimizer": optimizer, "micro_batch_tokens": tokens}


def _add_lengths(
    draft: Draft,
    arch: Architecture,
    tokenizer: "PreTrainedTokenizerBase",
    proposal: ProposedGrader,
    on_cpu: bool,
) -> int:
    """Adds the longest prompt and response; returns the latter, in tokens."""
    data = draft.first_rows(LOOKED_AT)
    prompt = 1024
    if data.images_key is None:
        tokens = [len(each.token_ids) for each in render_rows(data, tokenizer, read_rows(data))]
        longest = max(tokens)
        draft.comments["data"].append(
            f"the longest of the first {len(tokens)} prompts has {longest} tokens; longer ones than "
            "max_prompt_tokens are dropped"
        )
        prompt = _ROUND * math.ceil(longest * _LONGER / _ROUND)
    prompt = min(prompt, arch.max_positions // 2)
    response = min(_ON_CPU if on_cpu else proposal.tokens, arch.max_positions - prompt)
    draft.add("data", {"max_prompt_tokens": prompt})
    draft.add("sampling", {"temperature": 1.0, "max_response_tokens": response})
    return response


def _add_reward(
    draft: Draft, proposal: ProposedGrader, rows: Sequence[Values], columns: Columns
) -> None:
    reward: dict[str, Plain] = {"grader": proposal.name}
    if proposal.args:
        reward["args"] = dict(proposal.args)
    draft.add("reward", reward, proposal.why)
    if proposal.name:
        return
    module = re.sub(r"\W", "_", draft.file.stem) + "_grader"  # a dot would make it a package's
    grader = draft.beside(f"{module}.py")
    test = draft.beside(f"test_{module}.py")
    answer = read_rows(draft.first_rows(1))[0].answer
    write_whole(grader, _GRADER.format(yaml=draft.file.name, test=test))
    write_whole(test, _TEST.format(module=module, answer=answer))
    draft.add("reward", {"grader": f"{grader}:grade"}, f"a stub: write it, and {test} with it")


def _add_algorithm(draft: Draft, arch: Architecture) -> None:
    if isinstance(arch.attention, CompressedAttention):
        draft.add("algorithm", {"mismatch": {"weight": {"name": "tis"}}}, "its FP8 cache rounds")
    if arch.is_moe:
        draft.add("preset", "gspo", "made for mixture-of-experts models")
        return
    loss: dict[str, Plain] = {"name": "ppo_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    draft.add("algorithm", {"loss": loss}, "GRPO with DAPO's wider upper clip")


def _add_evaluation(draft: Draft, named: str | None) -> None:
    """Adds held-out prompts: those of the named file, the data set's own, those of the file beside,
    or the last rows."""
    files = draft.config().data.paths
    path: str | None = named or cast(str, draft.keys("data")["path"])
    if named:
        _evaluated(draft, named)
    elif files == [path]:
        path = file_beside(Path(files[0]))
    elif complaints(_evaluated, draft, path):
        path = None
    if path is not None:
        draft.add("eval", {"data": {"path": path}, "every": 20})
        return
    total = 0
    last = deque[Values](maxlen=_HELD_OUT)
    for file in files:
        for row in raw_rows(Path(file)):
            total += 1
            last.append(row)
    number = min(_HELD_OUT, total // 10)
    rows = list(last)[len(last) - number :]
    if not rows or not all(map(is_plain, rows)):
        draft.comments["data"].append("no evaluation: no file with held-out prompts was found")
        return
    held_out = draft.beside("{}_eval.jsonl")
    write_json_lines(held_out, rows)
    draft.add("data", {"limit": total - number}, f"the other {number} rows are the evaluation's")
    draft.add("eval", {"data": {"path": str(held_out)}, "every": 20}, "the last rows of the data")


def _evaluated(draft: Draft, path: str) -> None:
    """Raises ValueError if a data set on the Hub has no split for an evaluation, or if first rows
    cannot be read as those of the training are."""
    evaluation: dict[str, Plain] = {"eval": {"data": {"path": path}}}
    data = Draft(draft.file, draft.sections | evaluation).config().eval_data
    assert data is not None, "it was added"
    read_rows(data.model_copy(update={"limit": LOOKED_AT}))
