"""Rows as verl, ROLL and TRL write them, mixtures of sources, and the graders that a source chooses."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.schema import DataConfig
from megagrpo.data.prompts import interleaved, load_prompts
from megagrpo.data.rows import read_rows
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.selection import source_metrics
from megagrpo.types import Outcome, RolloutGroup, Sample

USER = {"role": "user", "content": "1+1="}


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tokenizer():
    made = character_tokenizer("0123456789+-*/=.()<># abcdefghijklmnopqrstuvwxyz")
    made.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return made


def verl_row(source: str, answer: str) -> dict:
    """The columns of verl's examples/data_preprocess."""
    extra = {"split": "train", "index": 0}
    return {"data_source": source, "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": answer}} | {
        "ability": "math",
        "extra_info": extra,
    }


def test_verls_parquet(tmp_path, tokenizer):
    path = tmp_path / "train.parquet"
    rows = [verl_row("openai/gsm8k", "2"), verl_row("lighteval/MATH", "\\frac12")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    keys = {"answer_key": "reward_model.ground_truth", "source_key": "data_source", "extra_key": "extra_info"}
    graders = {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math"}
    data = DataConfig(path=str(path), chat_template=True, grader_by_source=graders, **keys)
    prompts = load_prompts(data, tokenizer)
    assert [p.text for p in prompts.prompts] == ["<user>1+1=#>"] * 2
    assert [(p.answer, p.source, p.grader) for p in prompts.prompts] == [
        ("2", "openai/gsm8k", "gsm8k"),
        ("\\frac12", "lighteval/MATH", "math"),
    ]
    assert prompts.prompts[0].extra == {"split": "train", "index": 0}
    assert prompts.sources == ["lighteval/MATH", "openai/gsm8k"]


def test_rolls_messages_are_json_in_a_text(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", {"messages": json.dumps([USER]), "ground_truth": "2"})
    keys = {"path": path, "prompt_key": "messages", "answer_key": "ground_truth"}
    assert load_prompts(DataConfig(**keys, chat_template=True), tokenizer).prompts[0].text == "<user>1+1=#>"
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 'messages' holds chat messages; set data.chat_template: true"):
        load_prompts(DataConfig(**keys), tokenizer)
    listed = jsonl(
        tmp_path / "list.jsonl", {"prompt": "[1, 2] is a list", "answer": "2"}, {"prompt": "[1, 2]", "answer": 3}
    )
    assert [row.prompt for row in read_rows(DataConfig(path=listed))] == ["[1, 2] is a list", "[1, 2]"]


def test_openai_messages_and_trls_columns(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", {"messages": [USER, {"role": "assistant", "content": "2"}]})
    keys = {"path": path, "prompt_key": "messages", "chat_template": True}
    prompt = load_prompts(DataConfig(**keys, answer_key="messages.-1.content"), tokenizer).prompts[0]
    assert (prompt.text, prompt.answer) == ("<user>1+1=#>", "2")
    answered = {"messages": [USER, {"role": "assistant", "content": "2"}], "answer": 2}
    with pytest.raises(
        ValueError, match=r"ends with the assistant's message; with data.answer_key: messages.-1.content"
    ):
        read_rows(DataConfig(path=jsonl(tmp_path / "b.jsonl", answered), prompt_key="messages", chat_template=True))
    trl = DataConfig(path=jsonl(tmp_path / "trl.jsonl", {"prompt": [USER], "solution": "2"}), answer_key="solution")
    assert load_prompts(trl.model_copy(update={"chat_template": True}), tokenizer).prompts[0].answer == "2"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"answer_key": "reward_model.truth"}, "no key 'reward_model.truth' at 'truth'; keys found: 'style'"),
        ({"answer_key": "truth"}, "no key 'truth'; keys found: 'data_source'"),
        ({"source_key": "data_source", "grader_by_source": {"a": "exact"}}, "source 'math' has no grader"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named_with_what_is_there(tmp_path, keys, message):
    path = jsonl(tmp_path / "a.jsonl", verl_row("math", "2"))
    right = {"answer_key": "reward_model.ground_truth", "chat_template": True}
    with pytest.raises(ValueError, match=message):
        read_rows(DataConfig(path=path, **right | keys))


def mixture(tmp_path: Path, ratios: list) -> DataConfig:
    """Three sources of 3, 5 and 40 rows, with keys and graders of their own."""
    a = jsonl(tmp_path / "a.jsonl", *({"question": f"{i}", "answer": str(i)} for i in range(3)))
    b = jsonl(tmp_path / "b.jsonl", *({"prompt": f"{i}", "solution": str(i)} for i in range(5)))
    c = jsonl(tmp_path / "c.jsonl", *({"prompt": f"{i}", "answer": str(i)} for i in range(40)))
    keys = [{"prompt_key": "question", "grader": "gsm8k"}, {"answer_key": "solution", "grader": "math"}]
    keys.append({"prompt_template": "say {prompt}"})
    files = zip("abc", (a, b, c), ratios, keys, strict=True)
    return DataConfig(sources=[{"source": s, "path": path, "ratio": ratio, **more} for s, path, ratio, more in files])


def test_a_mixture_keeps_its_ratios_in_every_stretch_and_its_place_by_the_cursor_alone(tmp_path, tokenizer):
    prompts = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), tokenizer)
    drawn = prompts.batch(0, 200, seed=3)
    for start in range(0, 200, 10):
        found = Counter(p.source for p in drawn[start : start + 10])
        assert all(abs(found[s] - n) <= 1 for s, n in {"a": 5, "b": 3, "c": 2}.items()), found
    assert Counter(p.source for p in drawn) == {"a": 100, "b": 60, "c": 40}
    assert [p for c in range(0, 200, 8) for p in prompts.batch(c, 8, seed=3)] == drawn
    again = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), tokenizer)  # a restarted process
    assert again.batch(77, 50, seed=3) == drawn[77:127] and again.batch(77, 50, seed=4) != drawn[77:127]
    of_c = [p.answer for p in drawn if p.source == "c"]
    assert sorted(of_c, key=int) == [str(i) for i in range(40)]  # one pass over it, each prompt once
    assert {(p.source, p.grader) for p in drawn} == {("a", "gsm8k"), ("b", "math"), ("c", None)}
    assert {p.text[:4] for p in drawn if p.source == "c"} == {"say "}
    assert len({p.id for p in prompts.prompts}) == 48


def test_without_ratios_sources_are_read_as_one(tmp_path, tokenizer):
    prompts = load_prompts(mixture(tmp_path, [None] * 3), tokenizer)
    assert Counter(p.source for p in prompts.batch(0, 48, seed=1)) == {"a": 3, "b": 5, "c": 40}


@pytest.mark.parametrize(
    "ratios", [(0.62, 0.21, 0.1, 0.05, 0.02), (1.0, 1.0, 1.0), (3.0,), (1e-6, 1.0), (7.0, 1.0 / 3.0)]
)
def test_a_stretch_of_a_mixture_is_that_of_the_whole_sequence(ratios):
    shares = [ratio / sum(ratios) for ratio in ratios]
    whole = sorted(((j + 0.5) / share, k, j) for k, share in enumerate(shares) for j in range(5000))
    whole = [(k, j) for time, k, j in whole if time < 4096]
    for start, count in ((0, 1), (0, 64), (1, 3), (63, 64), (1000, 513), (3000, 1000)):
        assert interleaved(ratios, start, count) == whole[start : start + count]


def test_the_place_in_a_long_run_is_found_without_its_past():
    (first, *_), far = interleaved((2.0, 1.0), 0, 3), interleaved((2.0, 1.0), 3 * 10**12, 3)
    assert [k for k, _ in far] == [k for k, _ in interleaved((2.0, 1.0), 0, 3)] and far[0][1] == first[1] + 2 * 10**12


def test_metrics_by_source(tmp_path, tokenizer):
    drawn = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), tokenizer).batch(0, 10, seed=0)
    sample = Sample(0, (1, 2), (-1.0, -1.0), "stop", 0, "")
    groups = [RolloutGroup(i, p, (sample,), (Outcome("score", float(p.source == "a")),)) for i, p in enumerate(drawn)]
    metrics = Metrics()
    source_metrics(metrics, groups, ["a", "b", "c"])
    found = metrics.reduced(lambda values, op: values)
    assert [found[f"source/{s}_fraction"] for s in "abc"] == pytest.approx([0.5, 0.3, 0.2])
    assert [found[f"source/{s}_reward_mean"] for s in "abc"] == [1, 0, 0] and found["source/a_length_mean"] == 2
