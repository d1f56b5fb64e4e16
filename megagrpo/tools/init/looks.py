"""What a data file looks like: its columns, and the grader that its answers ask for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from megagrpo.config.fields import complaints
from megagrpo.data.rows import Values, raw_rows
from megagrpo.rewards.graders.functions import check_answer
from megagrpo.rewards.graders.gsm8k import grade as gsm8k

LOOKED_AT = 200  # rows
# as data sets call their columns, the best first
_PROMPTS = (
    *("prompt", "question", "problem", "query", "instruction", "input"),
    *("messages", "conversations", "text"),
)
_ANSWERS = (
    *("answer", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer"),
    *("solution", "target", "label", "tests", "output", "response", "completion"),
)
_IMAGES = ("images", "image")
_MOST_CHOICES = 12
_LONGEST_CHOICE = 24  # characters
_LONGEST_FORMULA = 80
_MATHS = re.compile(r"\\boxed|\\[a-zA-Z]+|[\d^_=(){}]")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_TEXT = re.compile(r"\\text\w*\{[^{}]*\}")


@dataclass(frozen=True)
class Columns:
    """Where a row has its prompt and its answer."""

    prompt: str
    answer: str
    images: str | None
    names: list[str]  # all columns


@dataclass(frozen=True)
class ProposedGrader:
    """The grader that answers ask for; name "": none of the package's."""

    name: str
    why: str
    args: dict[str, str | bool] = field(default_factory=dict)
    template: str = "{prompt}"  # of the prompt, which says in what form to answer
    tokens: int = 1024  # of a response


def columns_of(rows: Sequence[Values], prompt: str | None, answer: str | None) -> Columns:
    """Finds the columns by their names. prompt, answer: given by the user. Raises ValueError if
    they are not found."""
    names = list(_names(rows[0]))
    given = prompt
    prompt = prompt or next((name for name in _PROMPTS if name in names), None)
    if given is None and prompt == "instruction" and any(row.get("input") for row in rows):
        raise ValueError(
            "rows have an instruction and an input; join them in a column, and say --prompt-key"
        )
    chat = rows[0].get(prompt or "")
    last = chat[-1] if isinstance(chat, list) and chat else None
    if answer is None and isinstance(last, dict) and last.get("role") == "assistant":
        answer = f"{prompt}.-1.content"
    answer = answer or next((name for name in _ANSWERS if name in names and name != prompt), None)
    for key, column in (("prompt", prompt), ("answer", answer)):
        if column is None:
            raise ValueError(
                f"no column is known as the {key}; say --{key}-key COLUMN, "
                f"one of {', '.join(names)}"
            )
    assert prompt is not None and answer is not None
    return Columns(prompt, answer, next((name for name in _IMAGES if name in names), None), names)


def _names(row: Values) -> Iterator[str]:
    for name, value in row.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)


def first_rows(files: Sequence[str]) -> list[Values]:
    """Returns the first rows of files. Raises ValueError if there are none."""
    rows = list(islice((row for file in files for row in raw_rows(Path(file))), LOOKED_AT))
    if not rows:
        raise ValueError(f"{', '.join(files)}: no row")
    return rows


def proposed_grader(answers: Sequence[str]) -> ProposedGrader:
    """Returns the grader that the looks of answers propose."""
    if not any(complaints(check_answer, "code", answer) for answer in answers):
        return ProposedGrader("code", "every answer holds test cases", tokens=4096)
    if not any(
        # 1,000 is one number, but 1,2 are two
        re.search(r"\d,(?!\d{3}(?!\d))[\d,.]*\s*$", answer)
        or complaints(gsm8k, answer, answer, "last")
        for answer in answers
    ):
        args: dict[str, str | bool] = {"format": "last"}
        return ProposedGrader("gsm8k", "every answer is, or ends in, a number", args)
    choices = sorted(set(answers))
    if len(choices) <= min(_MOST_CHOICES, len(answers) // 2) and all(
        len(choice) <= _LONGEST_CHOICE for choice in choices
    ):
        listed = ", ".join(choices)
        template = f"{{prompt}}\nAnswer with one of {listed}, and nothing else."
        return ProposedGrader("exact", f"the answers are {listed}", {"ignore_case": True}, template)
    if all(map(_is_formula, answers)):
        template = "{prompt}\nPut the final answer within \\boxed{}."
        why = "every answer is a formula or a number"
        return ProposedGrader("math", why, template=template, tokens=4096)
    return ProposedGrader("", "no grader of the package is made for such answers")


def _is_formula(answer: str) -> bool:
    if "\\boxed" in answer:
        return True
    plain = _TEXT.sub("", answer)
    short = len(answer) <= _LONGEST_FORMULA and len(_WORD.findall(plain)) < 2
    return short and (_MATHS.search(answer) is not None or len(answer) <= 2)


def file_beside(file: Path) -> str | None:
    """Returns the file beside a training file that holds its evaluation, by their names."""
    for name in ("test", "eval", "validation", "valid", "val", "dev"):
        other = file.with_name(file.name.replace("train", name))
        if other != file and other.is_file():
            return str(other)
    return None


def is_plain(value: object) -> bool:
    """Returns whether JSON holds all of a row, or of a value in it: images are bytes."""
    if isinstance(value, dict | list):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)
