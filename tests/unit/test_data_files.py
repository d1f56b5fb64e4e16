"""Data files as others write them: byte order marks, packed files, objects and JSON in columns, Arrow's maps."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.schema import DataConfig
from megagrpo.data.prompts import load_prompts
from megagrpo.data.rows import iterate_rows, read_rows
from tests.unit.report_cases import rows_file

ROWS = ['{"prompt": "1+1=", "answer": 2}', '{"prompt": "2+2=", "answer": 4}']


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.jsonl", "\ufeff" + "\n".join(ROWS)),
        ("a.json", "\ufeff" + "\n".join(ROWS)),
        ("a.json", "\ufeff[" + ",".join(ROWS) + "]"),
        ("a.jsonl.gz", "\n".join(ROWS)),
        ("a.json.gz", "[" + ",".join(ROWS) + "]"),
        ("a.csv.gz", "\ufeffprompt,answer\n1+1=,2\n2+2=,4\n"),
    ],
)
def test_files_with_a_byte_order_mark_and_packed_files(tmp_path, name, data):
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(data.encode()))
    found = read_rows(DataConfig(path=str(tmp_path / name)))
    assert [(row.prompt, row.answer) for row in found] == [("1+1=", "2"), ("2+2=", "4")]


@pytest.mark.parametrize("data", [b"x" * 100, gzip.compress(b"x" * 10**6)[:500]])
def test_a_broken_packed_file_is_named(tmp_path, data):
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a.jsonl.gz: not a readable .gz file"):
        read_rows(DataConfig(path=str(tmp_path / "a.jsonl.gz")))


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.csv", "prompt,answer,,,answer\na,1,,,2\n", "a.csv:2: more fields than columns, or two columns of one name"),
        ("a.csv", "prompt,answer\na,1\n1,000 + 2 =,1002\n", "a.csv:3: more fields than columns"),
        ("a.jsonl", '{"prompt": "a", "answer": 1, "answer": 2}', "a.jsonl:1: .*the key 'answer' has two values"),
        ("a.json", '[{"prompt": "a", "answer": 1, "answer": 2}]', "a.json: .*the key 'answer' has two values"),
    ],
)
def test_a_value_that_would_be_another_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_rows(DataConfig(path=str(tmp_path / name)))


def test_columns_without_a_name_and_commas_in_quotes_are_read(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer,,\n"1,000 + 2 =",1002,,\na,1,,,\n')
    assert [row.answer for row in read_rows(DataConfig(path=str(tmp_path / "a.csv")))] == ["1002", "1"]


AT = "1970-01-01 00:00:00.000000001"
TESTS = {"inputs": ["1"], "outputs": ["2"]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "key, columns, answer, extra",
    [
        ("answer", {"answer": ["a", "b"]}, '["a", "b"]', None),
        ("answer", {"answer": TESTS}, json.dumps(TESTS), None),
        ("answer", {"answer": [{"in": 1}, {"in": 2, "name": "f"}]}, '[{"in": 1}, {"in": 2, "name": "f"}]', None),
        ("model.truth", {"model": {"truth": ["a"]}}, '["a"]', None),
        ("model.truth", {"model": '{"truth": "a"}'}, "a", None),
        ("model.0.truth", {"model": '[{"truth": "a"}]'}, "a", None),
        ("answer", {"answer": "a", "extra": {"lower": 1, "upper": None}}, "a", {"lower": 1}),
        ("answer", {"answer": "a", "extra": '{"lower": 1, "upper": null}'}, "a", {"lower": 1}),
        ("answer", {"answer": "a", "extra": {"of": [{"x": None, "y": 2}]}}, "a", {"of": [{"y": 2}]}),
        ("answer", {"answer": "a", "extra": [{"x": None, "y": 2}]}, "a", {"extra": [{"y": 2}]}),
        ("answer", {"answer": "a", "extra": "{x} and y"}, "a", {"extra": "{x} and y"}),
        ("answer", {"answer": "a", "extra": "seconds"}, "a", {"extra": "seconds"}),
        ("answer", {"answer": "a", "extra": "[0, 1]"}, "a", {"extra": "[0, 1]"}),  # an interval
    ],
)
def test_columns_as_public_files_have_them(name, key, columns, answer, extra):
    path = rows_file([{"prompt": "1", **columns}], name)
    (row,) = read_rows(DataConfig(path=path, answer_key=key, extra_key="extra" if extra else None))
    assert row.answer == answer and row.extra == (extra or {})


def test_a_null_that_a_result_has_is_expected_of_it():
    """The right result of a tested program may have one; only Parquet's are filled in."""
    answer = [{"input": [1], "output": {"a": None, "b": 1}}, {"input": [2], "output": None}]
    (row,) = read_rows(DataConfig(path=rows_file([{"prompt": "1", "answer": answer}], "a.jsonl")))
    assert json.loads(row.answer) == answer


def test_a_map_of_arrow_is_an_object(tmp_path):
    types = {
        "prompt": pyarrow.string(),
        "answer": pyarrow.string(),
        "extra": pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    }
    table = pyarrow.table({"prompt": ["1"], "answer": ["2"], "extra": [[("a", 1), ("b", 2)]]}, pyarrow.schema(types))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = read_rows(DataConfig(path=str(tmp_path / "a.parquet"), extra_key="extra"))
    assert row.extra == {"a": 1, "b": 2}


def test_times_that_python_cannot_hold_are_texts(tmp_path):
    times = {
        "at": pyarrow.array([1], pyarrow.timestamp("ns")),
        "took": pyarrow.array([1], pyarrow.duration("ns")),
        "daily": pyarrow.array([1], pyarrow.time64("ns")),
        "end": pyarrow.array([2**48], pyarrow.timestamp("ms")),
    }
    dated = pyarrow.array([[(19000, 1)]], pyarrow.map_(pyarrow.date32(), pyarrow.int64()))
    table = pyarrow.table({"prompt": ["1"], "answer": ["2"], "extra": dated, **times})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    data = DataConfig(path=str(tmp_path / "a.parquet"), extra_key=["extra", *times])
    (row,) = read_rows(data)
    assert row.extra["at"] == "1970-01-01 00:00:00.000000001" and row.extra["end"].startswith("10889-")
    assert row.extra["took"] == "1" and row.extra["daily"] == "00:00:00.000000001"
    assert row.extra["extra"] == {"2022-01-08": 1}


def test_short_floats_have_the_digits_that_were_written_and_times_inside_are_texts(tmp_path):
    short = pyarrow.float32()
    kind = pyarrow.struct(
        {
            "truth": short,
            "more": pyarrow.list_(short),
            "at": pyarrow.timestamp("ns"),
            "of": pyarrow.map_("string", short),
            "large": pyarrow.large_list(short),  # as polars writes lists
            "times": pyarrow.large_list(pyarrow.timestamp("ns")),
            "pair": pyarrow.list_(short, 2),
        }
    )
    whole = {"truth": 3.3, "more": [0.1], "at": 1, "of": [("a", 0.7)]}
    whole |= {"large": [0.1], "times": [1], "pair": [0.1, 0.2]}
    table = pyarrow.table(
        {"prompt": ["1"], "answer": pyarrow.array([0.1], short), "extra": pyarrow.array([whole], kind)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    read = lambda **keys: read_rows(DataConfig(path=str(tmp_path / "a.parquet"), extra_key="extra", **keys))[0]  # noqa: E731
    assert read().answer == "0.1" and read(answer_key="extra.truth").answer == "3.3"
    assert read(answer_key="extra.more").answer == "[0.1]"
    assert read().extra == whole | {"at": AT, "of": {"a": 0.7}, "times": [AT]}


def test_rows_read_at_once_hold_no_images(tmp_path):
    path = rows_file([{"prompt": "1", "answer": "1", "images": ["a.png"]}])
    data = DataConfig(path=path, images_key="images", chat_template=True)
    assert read_rows(data)[0].images == () and next(iterate_rows(data)).images == ("a.png",)


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["1"])] * 3, ["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: .*two columns are called 'answer'"):
        read_rows(DataConfig(path=str(tmp_path / "a.parquet")))


def test_a_key_with_two_signs_is_no_number():
    path = rows_file([{"prompt": "1", "answer": ["a"]}])
    with pytest.raises(ValueError, match="no key 'answer.--1'"):
        read_rows(DataConfig(path=path, answer_key="answer.--1"))


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "1" * 5000 + "]"])
def test_a_prompt_that_only_begins_as_json_is_a_text(text):
    (row,) = read_rows(DataConfig(path=rows_file([{"prompt": text, "answer": "1"}])))
    assert row.prompt == text


def test_a_page_of_parquet_that_is_damaged_is_named_by_its_file(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": [str(i) for i in range(2000)], "answer": ["x"] * 2000})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes(340) + data[400:])  # its footer is whole
    with pytest.raises(ValueError, match="a.parquet: not a readable parquet file"):
        read_rows(DataConfig(path=str(path)))


def test_rows_behind_the_first_prompts_are_not_read(tmp_path):
    rows = [{"prompt": text, "answer": "1"} for text in ("1+1+1=", "1=", "2=", "3=")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    tokenizer = character_tokenizer("123+=")
    found = load_prompts(DataConfig(path=str(path), max_prompt_tokens=5), tokenizer, most=2)
    assert [prompt.id for prompt in found.prompts][:2] == [1, 2]
    with pytest.raises(ValueError, match="no prompt of at most 1 tokens"):
        load_prompts(DataConfig(path=str(path), max_prompt_tokens=1, limit=4), tokenizer, most=2)
