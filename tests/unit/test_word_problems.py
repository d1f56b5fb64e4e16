"""Word problems: right by another route, apart between the files, told in other words to the held-out ones."""

import json
import re
from pathlib import Path

import pytest

from megagrpo.config.schema import DatasetConfig
from megagrpo.rewards.graders.gsm8k import grade
from megagrpo.tiny.datasets import make_dataset

FILES = ("sft", "train", "eval")


def made(folder: Path, seed: int = 0, **options) -> dict[str, list[dict[str, str]]]:
    sizes = {"num_sft": 200, "num_train": 500, "num_eval": 96, "max_operand": 12}
    config = DatasetConfig(kind="word_problems", folder=str(folder), **(sizes | options))
    counts = make_dataset(config, seed)
    files = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in FILES}
    assert {name: len(rows) for name, rows in files.items()} == {name: counts[f"{name}.jsonl"] for name in FILES}
    return files


def asked(prompt: str) -> tuple[str, int, int]:
    """(sign, a, b) read from the words of a problem alone."""
    a, b = map(int, re.findall(r"\d+", prompt))
    return "+" if any(word in prompt for word in ("gets", "more", "another", "Friday")) else "-", a, b


def shape(prompt: str) -> str:
    """The wording: what is left without numbers and without the words that are drawn."""
    names = "Anna|Ben|Clara|David|Emma|Jack|Lily|Max|Mia|Noah|Rosa|Sam|Tom|Zoe"
    things = "apples|balls|books|cards|coins|cups|eggs|flowers|pens|shells|stamps|toys"
    return re.sub(rf"\b({names}|{things}|\d+)\b", "_", prompt)


def test_answers_are_right_and_graded_so(tmp_path):
    for name, rows in made(tmp_path).items():
        for row in rows:
            sign, a, b = asked(row["prompt"])
            value = a + b if sign == "+" else a - b
            assert value > 0
            assert row["answer"] == (f"{a}{sign}{b}={value}" if name == "sft" else str(value))
            assert grade(f"{a}{sign}{b}={value}", row["answer"].rpartition("=")[2], format="last") == 1.0
            assert grade(f"{a}{sign}{b}={value + 1}", str(value), format="last") == 0.0


def test_files_share_no_problem_and_no_sum(tmp_path):
    files = made(tmp_path)
    prompts = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
    sums = {
        name: {(sign, *(sorted((a, b)) if sign == "+" else (a, b))) for sign, a, b in map(asked, texts)}
        for name, texts in prompts.items()
    }
    for one, other in (("sft", "train"), ("sft", "eval"), ("train", "eval")):
        assert not prompts[one] & prompts[other] and not sums[one] & sums[other]
    assert all(len(prompts[name]) == len(rows) for name, rows in files.items())
    assert {sign for sign, *_ in sums["eval"]} == {"+", "-"}


def test_held_out_problems_are_worded_differently(tmp_path):
    wordings = {name: {shape(row["prompt"]) for row in rows} for name, rows in made(tmp_path).items()}
    assert not wordings["eval"] & (wordings["sft"] | wordings["train"])
    assert wordings["sft"] == wordings["train"] and len(wordings["eval"]) >= 4


def test_the_seed_decides_every_byte(tmp_path):
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        made(tmp_path / folder, seed)
    text = {folder: [(tmp_path / folder / f"{name}.jsonl").read_bytes() for name in FILES] for folder in "abc"}
    assert text["a"] == text["b"] and all(x != y for x, y in zip(text["a"], text["c"], strict=True))


def test_too_many_problems_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"prepare.dataset.num_eval: 9000 problems wanted, but \d+ sums"):
        made(tmp_path, max_operand=6, num_eval=9000)
    assert not list(tmp_path.iterdir())
