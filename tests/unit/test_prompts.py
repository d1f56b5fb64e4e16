"""Prompt files, good and broken, with a real tokenizer; and the order of prompts over epochs."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from examples.laptop.model import character_tokenizer, make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.schema import DataConfig, ModelConfig
from megagrpo.data.prompts import load_prompts, load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer("0123456789+-*/=.()<># abcdefghijklmnopqrstuvwxyz")


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def rows(*pairs):
    return [json.dumps({"prompt": p, "answer": a}) for p, a in pairs]


def test_jsonl_is_read_with_ids_by_line_and_answers_as_text(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [*rows(("1+1=", 2), ("2+2=", "4")), "", *rows(("3/2=", 1.5))])
    prompts = load_prompts(DataConfig(path=path), tokenizer).prompts
    assert [(p.id, p.text, p.answer) for p in prompts] == [(0, "1+1=", "2"), (1, "2+2=", "4"), (3, "3/2=", "1.5")]
    assert tokenizer.decode(prompts[0].token_ids) == "1+1="
    assert prompts[0].token_ids.tolist() == tokenizer.convert_tokens_to_ids(list("1+1="))


def test_parquet_is_read_like_jsonl(tmp_path, tokenizer):
    table = pyarrow.table({"question": ["1+1=", "2+2="], "target": ["2", "4"], "kind": ["exact", "gsm8k"]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    data = DataConfig(path=str(path), prompt_key="question", answer_key="target", grader_key="kind", add_bos=True)
    prompts = load_prompts(data, tokenizer).prompts
    assert [(p.id, p.answer, p.grader) for p in prompts] == [(0, "2", "exact"), (1, "4", "gsm8k")]
    assert prompts[0].token_ids[0] == tokenizer.bos_token_id
    with pytest.raises(ValueError, match=r"a.parquet:1: no key 'prompt'; keys found: 'question', 'target', 'kind'"):
        load_prompts(DataConfig(path=str(path)), tokenizer)


def test_several_files_are_read_as_one(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", ["", *rows(("1+1=", 2), ("2+2=", 4))])
    second = write(tmp_path / "b.jsonl", [*rows(("3+3=", 6)), "", *rows(("4+4=", 8))])
    found = load_prompts(DataConfig(path=[first, second]), tokenizer).prompts
    places = [(p.id, p.answer, p.location.removeprefix(f"{tmp_path}/")) for p in found]
    assert places == [(1, "2", "a.jsonl:2"), (2, "4", "a.jsonl:3"), (3, "6", "b.jsonl:1"), (5, "8", "b.jsonl:3")]
    few = load_prompts(DataConfig(path=[first, second], limit=3), tokenizer).prompts
    assert [p.answer for p in few] == ["2", "4", "6"]
    write(tmp_path / "b.jsonl", [*rows(("3+3=", 6)), "nonsense"])
    with pytest.raises(ValueError, match=r"b.jsonl:2: broken JSON"):
        load_prompts(DataConfig(path=[first, second]), tokenizer)
    with pytest.raises(ValueError, match="names '.*a.jsonl' twice"):
        DataConfig(path=[first, first])


@pytest.mark.parametrize(
    "lines, said",
    [
        (['{"prompt": "1", "answer": "1"}', '{"prompt": "2", "answer'], r"bad.jsonl:2: broken JSON, column 24"),
        (['{"prompt": "1", "answer": "1"}', "", "nonsense"], r"bad.jsonl:3: broken JSON"),
        (['["1", "1"]'], r"bad.jsonl:1: should be an object"),
        (['{"question": "1", "answer": "1"}'], r"bad.jsonl:1: no key 'prompt'; keys found: 'question', 'answer'"),
        (['{"prompt": "1", "anwser": "1"}'], r"bad.jsonl:1: no key 'answer'; keys found: 'prompt', 'anwser'"),
        (['{"prompt": "1", "answer": [1]}'], r"bad.jsonl:1: 'answer' should be a text or a number"),
        (['{"prompt": "1", "answer": null}'], r"bad.jsonl:1: 'answer' should be a text or a number, is None"),
        (['{"prompt": "", "answer": "1"}'], r"bad.jsonl:1: the prompt '' has no tokens"),
        (["", '{"prompt": "\\u00e9", "answer": "1"}'], r"bad.jsonl:2: the tokenizer does not know"),
        ([], r"bad.jsonl: no prompt of at most 1024 tokens \(data.max_prompt_tokens\) in the file"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, tokenizer, lines, said):
    with pytest.raises(ValueError, match=said):
        load_prompts(DataConfig(path=write(tmp_path / "bad.jsonl", lines)), tokenizer)


def test_bad_files(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"missing.jsonl: no such file"):
        load_prompts(DataConfig(path=str(tmp_path / "missing.jsonl")), tokenizer)
    with pytest.raises(ValueError, match=r"jsonl or \.parquet, not \.csv"):
        load_prompts(DataConfig(path=write(tmp_path / "a.csv", [])), tokenizer)
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load_prompts(DataConfig(path=write(tmp_path / "a.parquet", ["x" * 100])), tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:1: not UTF-8"):
        load_prompts(DataConfig(path=str(tmp_path / "latin.jsonl")), tokenizer)


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", rows(("1+1=", "2"), ("1+1+1=", "3"), ("1+1+1+1=", "4"), ("2", "2")))
    found = load_prompts(DataConfig(path=path, max_prompt_tokens=6), tokenizer)
    assert [p.id for p in found.prompts] == [0, 1, 3] and found.num_too_long == 1
    assert load_prompts(DataConfig(path=path, max_prompt_tokens=6, limit=2), tokenizer).num_too_long == 0
    with pytest.raises(ValueError, match=r"at most 3 tokens \(data.max_prompt_tokens\); the shortest has 4 tokens"):
        load_prompts(DataConfig(path=path, max_prompt_tokens=3, limit=3), tokenizer)


def test_templates(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", rows(("1+1=", "2")))
    plain = load_prompts(DataConfig(path=path, prompt_template="solve {prompt} now"), tokenizer)
    assert plain.prompts[0].text == "solve 1+1= now"
    chat = DataConfig(path=path, chat_template=True, system_prompt="be brief")
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(chat, tokenizer)
    templated = character_tokenizer("0123456789+-*/=.()<># abcdefghijklmnopqrstuvwxyz")
    templated.chat_template = TEMPLATE
    assert load_prompts(chat, templated).prompts[0].text == "<system>be brief#<user>1+1=#>"
    turns = [{"role": "assistant", "content": "yo"}, {"role": "user", "content": "hi"}]
    messages = json.dumps({"prompt": turns, "answer": "2"})
    several = DataConfig(path=write(tmp_path / "m.jsonl", [messages]), chat_template=True)
    assert load_prompts(several, templated).prompts[0].text == "<assistant>yo#<user>hi#>"
    with pytest.raises(ValueError, match=r"m\.jsonl:1: 'prompt' holds chat messages; set data.chat_template"):
        load_prompts(DataConfig(path=several.path), templated)


def test_the_cursor_alone_is_the_state(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", rows(*((str(i), str(i)) for i in range(10))))
    prompts = load_prompts(DataConfig(path=path), tokenizer)
    one_by_one = [prompts.batch(i, 1, seed=3)[0].id for i in range(40)]
    assert [p.id for c in range(0, 40, 4) for p in prompts.batch(c, 4, seed=3)] == one_by_one
    assert load_prompts(DataConfig(path=path), tokenizer).batch(17, 6, seed=3) == prompts.batch(17, 6, seed=3)
    epochs = [one_by_one[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert [p.id for p in prompts.batch(0, 10, seed=4)] != epochs[0]
    assert Counter(p.id for p in prompts.batch(10, 100, seed=0)) == dict.fromkeys(range(10), 10)
    in_order = load_prompts(DataConfig(path=path, shuffle=False), tokenizer)
    assert [p.id for p in in_order.batch(8, 4, seed=3)] == [8, 9, 0, 1]
    # in every version: a resumed run goes on with the prompts that the first one would have taken
    eight = load_prompts(DataConfig(path=path, limit=8), tokenizer)
    assert [p.id for p in eight.batch(4, 6, seed=1)] == [7, 6, 1, 4, 6, 1]


def test_the_tokenizer_must_fit_the_model(tmp_path):
    small = TinyModelConfig(path=str(tmp_path / "small"), alphabet="01")
    large = TinyModelConfig(path=str(tmp_path / "large"), alphabet="".join(map(chr, range(33, 93))))
    make_tiny_model(small, seed=0)
    make_tiny_model(large, seed=0)
    assert len(load_tokenizer(ModelConfig(path=small.path))) == 6
    assert len(load_tokenizer(ModelConfig(path=large.path, tokenizer=small.path))) == 6
    with pytest.raises(ValueError, match=r"token id 63 but model .*small only 32 embeddings"):
        load_tokenizer(ModelConfig(path=small.path, tokenizer=large.path))
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer(ModelConfig(path="somebody/on-the-hub"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no tokenizer can be loaded"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "empty")))
