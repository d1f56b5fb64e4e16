"""`megagrpo init`: what it sees in data, and an experiment that check accepts."""

import json
import shutil
from itertools import product
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from examples.laptop.model import character_tokenizer
from examples.laptop.recipe import TinyModelConfig
from megagrpo import cli
from megagrpo.config.load import load_config
from megagrpo.rewards.graders.functions import load_grader
from megagrpo.system.user_function import load_function
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config
from megagrpo.tools.init import command
from megagrpo.tools.init.looks import columns_of, proposed_grader
from tests.hub import cached

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model's folder without weights: a tokenizer of characters with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    description = hf_config(TinyModelConfig()) | {"vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def write_rows(path: str, rows: list[dict]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(number: int) -> list[dict]:
    return [{"question": f"{n} + 1 =", "answer": f"so\n#### {n + 1}"} for n in range(number)]


@pytest.mark.parametrize(
    "answers, name",
    [
        (["12", "-3.5", "1,000"], "gsm8k"),
        (["7 and\n#### 8", "#### 9"], "gsm8k"),
        (["1,2", "3,4"], "math"),
        (["A", "B", "A", "C", "B", "A"], "exact"),
        (["yes", "no", "no", "yes"], "exact"),
        ([r"\frac{1}{2}", "12", r"(3, \infty)", r"\text{east}", "x"], "math"),
        ([r"We find that the sum is \boxed{3}."], "math"),
        ([json.dumps({"inputs": ["1"], "outputs": ["2"]})], "code"),
        (["a poem about rain", "a letter to the king"], ""),
        (["Paris", "Rome", "Madrid"], ""),
    ],
)
def test_the_grader_that_answers_propose(answers, name):
    proposal = proposed_grader(answers)
    assert proposal.name == name and "{prompt}" in proposal.template
    assert proposal.tokens >= 1024, "models such as Qwen3 reason before a word"
    if name not in ("", "code"):
        grade = load_grader(name, dict(proposal.args))
        form = r"\boxed{%s}" if name == "math" and "boxed" not in answers[0] else "%s"
        assert all(grade(form % each, each, **proposal.args) == 1.0 for each in answers)


@pytest.mark.parametrize(
    "row, found",
    [
        ({"question": "q", "answer": "a"}, ("question", "answer")),
        ({"problem": "q", "solution": "s", "answer": "a"}, ("problem", "answer")),
        ({"prompt": [], "reward_model": {"ground_truth": "a"}}, ("prompt", "reward_model.ground_truth")),
        ({"messages": [{"role": "user"}, {"role": "assistant"}], "label": "x"}, ("messages", "messages.-1.content")),
    ],
)
def test_columns_are_found_by_their_names(row, found):
    columns = columns_of([row], None, None)
    assert (columns.prompt, columns.answer) == found
    with pytest.raises(ValueError, match="say --answer-key COLUMN, one of a, b"):
        columns_of([{"a": 1, "b": 2}], "a", None)


def test_an_instruction_without_its_input_is_no_prompt():
    rows = [{"instruction": "Add.", "input": text, "output": "3"} for text in ("", "1, 2")]
    with pytest.raises(ValueError, match="rows have an instruction and an input; join them"):
        columns_of(rows, None, None)
    assert columns_of(rows, "instruction", None).answer == "output"
    assert columns_of(rows[:1], None, None).prompt == "instruction"
    assert columns_of([row | {"prompt": "Add 1, 2."} for row in rows], None, None).prompt == "prompt"


def test_a_laptops_experiment_passes_check(model, capsys):
    data = write_rows("train.jsonl", sums(30))
    write_rows("test.jsonl", sums(3))
    assert cli.main(["init", str(model), data, "--gpus", "0", "-o", "laptop.yaml"]) == 0
    said = capsys.readouterr().out
    config = load_config("laptop.yaml")
    assert config.actor.device == "cpu" and config.checkpoint.every > 0
    assert config.data.chat_template and config.data.prompt_key == "question"
    assert config.eval_data.paths == ["test.jsonl"] and config.data.limit is None
    assert config.reward.grader == "gsm8k" and "#### 1" not in said
    assert Path("laptop.yaml").read_text().strip() in said
    assert "no problems found" in said, "by all that check looks at"
    with pytest.raises(SystemExit):
        cli.main(["init"])
    before = Path("laptop.yaml").read_text()
    assert cli.main(["init", str(model), data, "-o", "laptop.yaml"]) == 2
    assert "laptop.yaml exists, and nothing is overwritten" in capsys.readouterr().err
    assert Path("laptop.yaml").read_text() == before


def test_a_named_file_is_evaluated_with_the_named_grader(model, capsys):
    data = write_rows("train.jsonl", sums(30))
    write_rows("test.jsonl", sums(3))  # which would be taken
    other = write_rows("other.jsonl", sums(5))
    arguments = ["init", str(model), data, "--gpus", "0", "--eval", other]
    assert cli.main([*arguments, "--grader", "exact"]) == 0
    assert "no problems found" in capsys.readouterr().out
    config = load_config("mine.yaml")
    assert config.eval_data.paths == ["other.jsonl"] and config.data.limit is None
    assert (config.reward.grader, config.reward.args) == ("exact", {})
    assert cli.main([*arguments, "--grader", "gsm8k", "-o", "same.yaml"]) == 0
    assert load_config("same.yaml").reward.args == {"format": "last"}, "those that answers propose for it"


@pytest.mark.parametrize("rows, said", [(None, "other.jsonl: no such file"), ([{"q": "1"}], "other.jsonl:1: ")])
def test_a_file_that_cannot_be_evaluated_ends_init_before_it_writes(rows, said, model, capsys):
    data = write_rows("train.jsonl", sums(30))
    if rows is not None:
        write_rows("other.jsonl", rows)
    assert cli.main(["init", str(model), data, "--gpus", "0", "--eval", "other.jsonl"]) == 2
    assert said in capsys.readouterr().err and not Path("mine.yaml").exists()


def test_an_unknown_grader_is_said(model, capsys):
    data = write_rows("train.jsonl", sums(30))
    assert cli.main(["init", str(model), data, "--gpus", "0", "--grader", "gsm9k"]) != 0
    assert "gsm9k" in "".join(capsys.readouterr())


def test_a_nodes_experiment_has_the_layout_of_the_search(model, capsys):
    rows = [{"prompt": f"{n}?", "answer": f"word {n} of many"} for n in range(40)]
    data = write_rows("rows.jsonl", rows)
    assert cli.main(["init", str(model), data, "--gpus", "8", "-o", "node.yaml"]) == 0
    config = load_config("node.yaml")
    assert config.actor.world_size == 8 and config.rollout.colocate
    assert config.actor.dtype == config.rollout.dtype == "bfloat16"
    assert "megagrpo plan node.yaml --search 1" in capsys.readouterr().out
    # held out from the same file, whose other rows are trained on
    assert config.data.limit == 36 and config.eval_data.paths == ["node_eval.jsonl"]
    held_out = [json.loads(line) for line in Path("node_eval.jsonl").read_text().splitlines()]
    assert held_out == rows[36:]


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v4"])
def test_what_a_family_does_not_take_is_not_written(model, tmp_path, family):
    folder = shutil.copytree(model, tmp_path / "model")
    description = hf_config(TinySizes(family=family)) | {"vocab_size": 128}
    if "compress_ratios" in description:  # transformers reads only published ones
        description["compress_ratios"] = [0, 4, 128, 4][: description["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(description))
    assert cli.main(["init", str(folder), write_rows("rows.jsonl", sums(20)), "--gpus", "8"]) == 0
    config = load_config("mine.yaml")
    assert config.actor.routing_replay is None
    assert (config.algorithm.mismatch.weight is not None) == (family == "deepseek_v4")


def test_an_attempt_that_fails_leaves_nothing_in_the_way_of_the_next(model, capsys):
    rows = [{"prompt": f"{n}?", "answer": f"word {n} of many"} for n in range(40)]
    data = write_rows("rows.jsonl", rows)
    for _ in range(2):
        assert cli.main(["init", str(model), data, "--gpus", "8", "--hardware", "ABACUS"]) == 2
        assert "ABACUS" in capsys.readouterr().err and [str(path) for path in Path().iterdir()] == ["rows.jsonl"]


def test_names_and_answers_with_line_breaks_stay_inside_comments(model):
    rows = [{"question": f"{n}?", "answer": ("yes\nno", "b")[n % 2], "odd\ncol\x1bumn": 1} for n in range(20)]
    assert cli.main(["init", str(model), write_rows("rows.jsonl", rows), "--gpus", "0", "--grader", "exact"]) != 2
    assert "# columns: question, answer, odd col umn" in Path("mine.yaml").read_text()
    assert load_config("mine.yaml").reward.grader == "exact"


def test_a_file_that_is_refused_does_not_stay(model, monkeypatch, capsys):
    def refuse(path, **_):
        raise ValueError(f"{path} is refused")

    monkeypatch.setattr(command, "load_config", refuse)
    data = write_rows("rows.jsonl", sums(20))
    assert cli.main(["init", str(model), data, "--gpus", "0"]) == 2
    assert "mine.yaml is refused" in capsys.readouterr().err
    assert [str(path) for path in Path().iterdir()] == ["rows.jsonl"]


def test_rows_that_json_does_not_hold_are_not_held_out(model):
    rows = [row | {"blob": b"x" if n > 250 else None} for n, row in enumerate(sums(300))]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    assert cli.main(["init", str(model), "rows.parquet", "--gpus", "0"]) == 0
    assert load_config("mine.yaml").eval is None and not Path("mine_eval.jsonl").exists()


def test_no_grader_of_the_package_means_a_stub_with_a_test(model, monkeypatch):
    rows = [{"prompt": f"{n}?", "answer": f"word {n} of many"} for n in range(9)]
    data = write_rows("rows.jsonl", rows)
    assert cli.main(["init", str(model), data, "--gpus", "0"]) == 0
    assert load_config("mine.yaml").reward.grader == "mine_grader.py:grade"
    assert load_config("mine.yaml").eval is None  # nine rows are too few
    assert cli.main(["init", str(model), data, "--gpus", "0", "-o", "7b-v2.5.yaml"]) == 0
    assert load_config("7b-v2.5.yaml").reward.grader == "7b_v2_5_grader.py:grade"
    monkeypatch.syspath_prepend(".")
    for stem, name in product(
        ("mine", "7b_v2_5"), ("the_answer_itself_is_right", "what_is_no_answer_is_wrong_and_no_error")
    ):
        load_function(f"test_{stem}_grader.py:test_{name}", {}, "test")()


def test_names_on_the_hub_stay_names(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    files = {"train.jsonl": "".join(json.dumps(row) + "\n" for row in sums(20))}
    cached(tmp_path, "dataset", "me/sums", files | {"test.jsonl": files["train.jsonl"]})
    described = {file.name: file.read_text() for file in model.iterdir()}
    cached(tmp_path, "model", "me/tiny", described)
    assert cli.main(["init", "me/tiny", "me/sums", "--gpus", "0"]) == 0
    config = load_config("mine.yaml")
    assert (config.model.path, config.data.path) == ("me/tiny", "me/sums")
    assert config.eval_data.path == "me/sums"
    assert cli.main(["init", "me/tony", "me/sums", "-o", "b.yaml"]) == 2
    assert "me/tony does not exist here" in capsys.readouterr().err and not Path("b.yaml").exists()
