"""Prompt files of our own and of other frameworks, good and broken; the order of prompts; mixtures of sources."""

import gc
import json
import resource
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.schema import DataConfig
from megagrpo.data.prompts import interleaved, load_prompts
from megagrpo.data.rows import iterate_rows, read_rows
from megagrpo.data.stored import StoredPrompts
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.group_metrics import source_metrics
from megagrpo.types import ImageRef, Outcome, Prompt, RolloutGroup, Sample

ALPHABET = "0123456789+-*/=.()<># abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture(scope="module")
def templated():
    """One with a chat template."""
    made = character_tokenizer(ALPHABET)
    made.chat_template = TEMPLATE
    return made


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


def test_json_and_csv_are_read_like_jsonl(tmp_path):
    as_list = write(tmp_path / "a.json", ["[", *rows(("1+1=", 2)), ",", *rows(("2+2=", 4)), "]"])
    as_lines = write(tmp_path / "b.json", rows(("1+1=", 2), ("2+2=", 4)))
    table = write(tmp_path / "c.csv", ["\ufeffprompt,answer", '"1+1=",2', '"2+2\n=",4'])
    for path, ids in ((as_list, [0, 1]), (as_lines, [0, 1]), (table, [1, 3])):
        found = read_rows(DataConfig(path=path))
        assert [(row.id, row.answer) for row in found] == list(zip(ids, "24", strict=True))
    assert found[1].prompt == "2+2\n=" and found[1].location == f"{table}:4"
    for name, lines, said in (
        ("d.json", ["[1]"], r"d\.json:1: should be an object"),
        ("e.json", ["[{]"], r"e\.json: not JSON"),
        ("f.csv", ["prompt,answer", "1+1="], r"f\.csv:2: 'answer' should be a text or a number"),
        ("g.csv", ["prompt,answer", '"1'], r"g\.csv: not a readable \.csv file"),
    ):
        with pytest.raises(ValueError, match=said):
            read_rows(DataConfig(path=write(tmp_path / name, lines)))


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
        (['{"prompt": "1", "answer": "1"}', '{"prompt": "2", "answer'], r"bad.jsonl:2: broken JSON .*column 24"),
        (['{"prompt": "1", "answer": "1"}', "", "nonsense"], r"bad.jsonl:3: broken JSON"),
        (['["1", "1"]'], r"bad.jsonl:1: should be an object"),
        (['{"question": "1", "answer": "1"}'], r"bad.jsonl:1: no key 'prompt'; keys found: 'question', 'answer'"),
        (['{"prompt": "1", "anwser": "1"}'], r"bad.jsonl:1: no key 'answer'; keys found: 'prompt', 'anwser'"),
        (['{"prompt": "1", "answer": true}'], r"bad.jsonl:1: 'answer' should be a text or a number"),
        (["", '{"prompt": "1", "answer": 1' + "0" * 5000 + "}"], r"bad.jsonl:2: broken JSON .*: Exceeds the limit"),
        (["", "[" * 100_000], r"bad.jsonl:2: broken JSON .*: maximum recursion depth"),
        (['{"prompt": "1", "answer": null}'], r"bad.jsonl:1: 'answer' should be a text or a number, is None"),
        (['{"prompt": "1", "answer": 1e400}'], r"bad.jsonl:1: 'answer' should be a text or a number, is inf"),
        (['{"prompt": "", "answer": "1"}'], r"bad.jsonl:1: the prompt '' has no tokens"),
        (["", '{"prompt": "\\u00e9", "answer": "1"}'], r"bad.jsonl:2: the tokenizer does not know"),
        ([], r"bad.jsonl: no row$"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, tokenizer, lines, said):
    with pytest.raises(ValueError, match=said):
        load_prompts(DataConfig(path=write(tmp_path / "bad.jsonl", lines)), tokenizer)


def test_bad_files(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"missing.jsonl: no such file"):
        load_prompts(DataConfig(path=str(tmp_path / "missing.jsonl")), tokenizer)
    with pytest.raises(ValueError, match=r"\.csv \(also \.gz\) or \.parquet, not \.tsv"):
        load_prompts(DataConfig(path=write(tmp_path / "a.tsv", [])), tokenizer)
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load_prompts(DataConfig(path=write(tmp_path / "a.parquet", ["x" * 100])), tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:1: broken JSON .*: .utf-8. codec"):
        load_prompts(DataConfig(path=str(tmp_path / "latin.jsonl")), tokenizer)


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", rows(("1+1=", "2"), ("1+1+1=", "3"), ("1+1+1+1=", "4"), ("2", "2")))
    found = load_prompts(DataConfig(path=path, max_prompt_tokens=6), tokenizer)
    assert [p.id for p in found.prompts] == [0, 1, 3] and found.num_too_long == 1
    assert load_prompts(DataConfig(path=path, max_prompt_tokens=6, limit=2), tokenizer).num_too_long == 0
    with pytest.raises(ValueError, match=r"at most 3 tokens \(data.max_prompt_tokens\); the shortest has 4 tokens"):
        load_prompts(DataConfig(path=path, max_prompt_tokens=3, limit=3), tokenizer)


def test_templates(tmp_path, tokenizer, templated):
    path = write(tmp_path / "a.jsonl", rows(("1+1=", "2")))
    plain = load_prompts(DataConfig(path=path, prompt_template="solve {prompt} now"), tokenizer)
    assert plain.prompts[0].text == "solve 1+1= now"
    chat = DataConfig(path=path, chat_template=True, system_prompt="be brief")
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(chat, tokenizer)
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


USER = {"role": "user", "content": "1+1="}


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def verl_row(source: str, answer: str) -> dict:
    """The columns of verl's examples/data_preprocess."""
    extra = {"split": "train", "index": 0}
    return {"data_source": source, "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": answer}} | {
        "ability": "math",
        "extra_info": extra,
    }


def test_verls_parquet(tmp_path, templated):
    path = tmp_path / "train.parquet"
    rows = [verl_row("openai/gsm8k", "2"), verl_row("lighteval/MATH", "\\frac12"), verl_row("aime25", "7")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    keys = {"answer_key": "reward_model.ground_truth", "source_key": "data_source", "extra_key": "extra_info"}
    graders = {"aime*": "math_dapo", "openai/gsm8k": "gsm8k", "lighteval/MATH": "math"}
    data = DataConfig(path=str(path), chat_template=True, grader_by_source=graders, **keys)
    prompts = load_prompts(data, templated)
    assert [p.text for p in prompts.prompts] == ["<user>1+1=#>"] * 3
    assert [(p.answer, p.source, p.grader) for p in prompts.prompts] == [
        ("2", "openai/gsm8k", "gsm8k"),
        ("\\frac12", "lighteval/MATH", "math"),
        ("7", "aime25", "math_dapo"),
    ]
    assert prompts.prompts[0].extra == {"split": "train", "index": 0}
    assert prompts.sources == ["aime25", "lighteval/MATH", "openai/gsm8k"]


def test_rolls_messages_are_json_in_a_text(tmp_path, templated):
    path = jsonl(tmp_path / "a.jsonl", {"messages": json.dumps([USER]), "ground_truth": "2"})
    keys = {"path": path, "prompt_key": "messages", "answer_key": "ground_truth"}
    assert load_prompts(DataConfig(**keys, chat_template=True), templated).prompts[0].text == "<user>1+1=#>"
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 'messages' holds chat messages; set data.chat_template: true"):
        load_prompts(DataConfig(**keys), templated)
    listed = jsonl(
        tmp_path / "list.jsonl", {"prompt": "[1, 2] is a list", "answer": "2"}, {"prompt": "[1, 2]", "answer": 3}
    )
    assert [row.prompt for row in read_rows(DataConfig(path=listed))] == ["[1, 2] is a list", "[1, 2]"]


def test_openai_messages_and_trls_columns(tmp_path, templated):
    path = jsonl(tmp_path / "a.jsonl", {"messages": [USER, {"role": "assistant", "content": "2"}]})
    keys = {"path": path, "prompt_key": "messages", "chat_template": True}
    prompt = load_prompts(DataConfig(**keys, answer_key="messages.-1.content"), templated).prompts[0]
    assert (prompt.text, prompt.answer) == ("<user>1+1=#>", "2")
    answered = {"messages": [USER, {"role": "assistant", "content": "2"}], "answer": 2}
    with pytest.raises(
        ValueError, match=r"ends with the assistant's message; with data.answer_key: messages.-1.content"
    ):
        read_rows(DataConfig(path=jsonl(tmp_path / "b.jsonl", answered), prompt_key="messages", chat_template=True))
    trl = DataConfig(path=jsonl(tmp_path / "trl.jsonl", {"prompt": [USER], "solution": "2"}), answer_key="solution")
    assert load_prompts(trl.model_copy(update={"chat_template": True}), templated).prompts[0].answer == "2"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"answer_key": "reward_model.truth"}, "no key 'reward_model.truth' at 'truth'; keys "
                                               "found: 'style'"),
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


def test_a_mixture_keeps_its_ratios_in_every_stretch_and_its_place_by_the_cursor_alone(tmp_path, templated):
    prompts = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), templated)
    drawn = prompts.batch(0, 200, seed=3)
    for start in range(0, 200, 10):
        found = Counter(p.source for p in drawn[start : start + 10])
        assert all(abs(found[s] - n) <= 1 for s, n in {"a": 5, "b": 3, "c": 2}.items()), found
    assert Counter(p.source for p in drawn) == {"a": 100, "b": 60, "c": 40}
    assert [p for c in range(0, 200, 8) for p in prompts.batch(c, 8, seed=3)] == drawn
    again = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), templated)  # a restarted process
    assert again.batch(77, 50, seed=3) == drawn[77:127] and again.batch(77, 50, seed=4) != drawn[77:127]
    of_c = [p.answer for p in drawn if p.source == "c"]
    assert sorted(of_c, key=int) == [str(i) for i in range(40)]  # one pass over it, each prompt once
    assert {(p.source, p.grader) for p in drawn} == {("a", "gsm8k"), ("b", "math"), ("c", None)}
    assert {p.text[:4] for p in drawn if p.source == "c"} == {"say "}
    assert len({p.id for p in prompts.prompts}) == 48


def test_a_source_whose_prompts_are_all_too_long_is_named_with_its_own_shortest(tmp_path, templated):
    data = mixture(tmp_path, [0.5, 0.3, 0.2]).model_copy(update={"max_prompt_tokens": 2})
    with pytest.raises(ValueError, match=r"c.jsonl: no prompt of at most 2 tokens .*; the shortest has 5 tokens"):
        load_prompts(data, templated)


def test_without_ratios_sources_are_read_as_one(tmp_path, templated):
    prompts = load_prompts(mixture(tmp_path, [None] * 3), templated)
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


def test_metrics_by_source(tmp_path, templated):
    drawn = load_prompts(mixture(tmp_path, [0.5, 0.3, 0.2]), templated).batch(0, 10, seed=0)
    sample = Sample(0, (1, 2), (-1.0, -1.0), "stop", 0, "")
    groups = [RolloutGroup(i, p, (sample,), (Outcome("score", float(p.source == "a")),)) for i, p in enumerate(drawn)]
    metrics = Metrics()
    source_metrics(metrics, groups, ["a", "b", "c"])
    found = metrics.reduced(lambda values, op: values)
    assert [found[f"source/{s}_fraction"] for s in "abc"] == pytest.approx([0.5, 0.3, 0.2])
    assert [found[f"source/{s}_reward_mean"] for s in "abc"] == [1, 0, 0] and found["source/a_length_mean"] == 2


def test_prompts_in_use_take_a_few_bytes_of_memory_each(tmp_path, tokenizer):
    number = 2000
    path = write(tmp_path / "a.jsonl", rows(*((f"{i}+1=" * 20, i + 1) for i in range(number))))
    load_prompts(DataConfig(path=path, limit=10), tokenizer)  # what its first use keeps
    gc.collect()
    tracemalloc.start()
    prompts = load_prompts(DataConfig(path=path), tokenizer)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(prompts) == number and kept < 50 * number, f"{kept / number:.0f} bytes a prompt"
    assert [prompt.answer for prompt in prompts.prompts[-2:]] == ["1999", "2000"]


def test_a_parquet_file_of_one_row_group_is_read_in_parts(tmp_path):
    texts = [f"{i:06d}" + "x" * 2000 for i in range(10_000)]
    table = pyarrow.table({"prompt": texts, "answer": texts})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    next(found := iterate_rows(DataConfig(path=str(path))))
    held = pyarrow.total_allocated_bytes() - before
    found.close()
    assert held < 8e6 < path.stat().st_size, held


def test_stored_prompts_are_those_that_were_added():
    whole = Prompt(
        3,
        "text",
        [1, 2],
        "4",
        "exact",
        "a.jsonl:4",
        "numbers",
        {"k": [1.5, None]},
        (ImageRef("key", 1, (1, 2, 2)),),
        [1],
        [{"role": "user", "content": "text"}],
        [{"type": "function", "function": {"name": "f"}}],
        (("t", 1.0),),
        {"rl": 0.5},
        [7, 2],
    )
    stored, plain = StoredPrompts(), Prompt(4, "", [5], "")
    stored.extend((whole, plain))
    assert list(stored) == [whole, plain] == stored[:] and stored[-1] == plain
    with pytest.raises(IndexError):
        stored[2]


def test_a_full_disk_of_prompts_is_one_message():
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    stored = StoredPrompts()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most[1]))  # Python ignores its signal
    try:
        with pytest.raises(ValueError, match=r"cannot hold the prompts; set TMPDIR to a larger disk: .*too large"):
            stored.extend([Prompt(0, "x" * 1000, [1], "")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
