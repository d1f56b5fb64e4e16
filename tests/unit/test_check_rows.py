"""What `megagrpo check` tries of the data: every row, the graders on the first ones, the rows of a checkpoint."""

import json
import re
import shutil

import pytest

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import preflight
from megagrpo.data.rows import fingerprint, read_rows
from megagrpo.models.folder import Model
from megagrpo.sandbox import sandbox
from megagrpo.tools.check import loading
from megagrpo.tools.check.loading import LoadingTest, try_loading
from megagrpo.tools.explain import explain, known_problems
from tests.experiments import ROOT, experiment

RIGHT = {"prompt": "12+3", "answer": "15"}
RAISES = "def grade(text, answer): return float(text.split()[0] == answer)"
INVERTED = "def grade(text, answer): return float(text != answer)"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("rows") / "model"
    make_tiny_model(TinyModelConfig(path=str(folder), family="llama", num_layers=1), seed=0)
    return str(folder)


@pytest.fixture
def tried(tmp_path, model):
    """What is found about rows, and the experiment."""

    def check(rows: list, grader: str = "gsm8k", data: dict | None = None, **sections):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        config = experiment(
            **{
                "output_dir": str(tmp_path / "run"),
                "model": {"path": model},
                "data": {"path": str(tmp_path / "a.jsonl"), **(data or {})},
                "reward": {"grader": grader, "timeout_s": 30.0},
            }
            | sections
        )
        return try_loading(config), config

    return check


def named(problems: list[str]) -> list[str]:
    return [re.sub(r"^/.*/", "", problem) for problem in problems]


def test_the_first_ten_bad_rows_are_named_and_the_others_counted(tried):
    unknown = {"prompt": "y", "answer": "1"}
    trial, config = tried([RIGHT, *[unknown, RIGHT] * 12, {"prompt": "", "answer": "1"}])
    wanted = [f"a.jsonl:{line}: the tokenizer does not know" for line in range(2, 22, 2)]
    *first, last = named(trial.problems)
    assert [problem[: len(said)] for problem, said in zip(first, wanted, strict=True)] == wanted
    assert last == "and 3 more rows like these"
    assert trial.loaded[-1].endswith("a.jsonl: 13 rows, at most 4 tokens")
    assert preflight(config) == [] and known_problems(config, trial) == trial.problems


def test_broken_lines_are_named_together_with_rows_that_the_tokenizer_refuses(tried):
    rows = [RIGHT, "{", {"prompt": 1}, {"prompt": "y", "answer": ""}, RIGHT]
    trial, config = tried(rows, "exact")
    found = named(known_problems(config, trial))
    assert [problem.partition(": ")[0] for problem in found] == [f"a.jsonl:{n}" for n in (2, 3, 4)]
    assert "PROBLEMS (3)" in explain(config, trial)


def test_answers_without_tests_are_named(tried):
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    answers = [tests, "[]", "72", json.dumps([""])]
    trial, config = tried([{"prompt": "1", "answer": each} for each in answers], "code")
    assert len(preflight(config)) == 3 and all(":1:" not in each for each in preflight(config))
    if not sandbox.isolation():
        assert "a.jsonl:1: its own answer gets 0, '' 0, 'I do not know.' 0" in str(trial.first_row)


def test_rows_that_are_too_long_are_counted_and_a_problem_if_all_are(tried):
    long = {"prompt": "1" * 20, "answer": "1"}
    trial, _ = tried([RIGHT, long, long], data={"max_prompt_tokens": 10})
    assert trial.loaded[-1].endswith("2 longer than max_prompt_tokens (10): dropped")
    assert trial.problems == []
    trial, _ = tried([long, long], data={"max_prompt_tokens": 10})
    assert ["the shortest has 20 tokens" in problem for problem in trial.problems] == [True]


def test_a_file_without_rows_is_a_problem(tried):
    trial, _ = tried([])
    assert named(trial.problems) == ["a.jsonl: no row"]


def test_of_a_huge_file_a_stated_sample_is_rendered_and_progress_is_said(tried, monkeypatch, capsys):
    monkeypatch.setattr(loading, "_MOST_ROWS", 4)
    monkeypatch.setattr(loading, "_CHUNK", 2)
    monkeypatch.setattr(loading, "_QUIET_S", -1.0)
    trial, _ = tried([RIGHT] * 10)
    assert trial.loaded[-1].startswith("one row in 3 of") and ": 4 rows," in trial.loaded[-1]
    assert "2 of 4 rows rendered" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["README.md", "docs/data-and-rewards.md"])
def test_the_documented_graders_score_every_text(tried, tmp_path, page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "tolerance: float" in block]
    (tmp_path / "g.py").write_text(code)
    name = re.search(r"def (\w+)\(text", code)[1]
    trial, _ = tried([RIGHT, {"prompt": "1", "answer": "-2.5"}], f"{tmp_path}/g.py:{name}")
    graded = [line.partition(": ")[2] for line in trial.first_row[3:]]
    assert graded == ["its own answer gets 1, '' 0, 'I do not know.' 0"] * 2
    assert not trial.problems


def test_a_grader_that_raises_gives_no_score(tried, tmp_path):
    (tmp_path / "g.py").write_text(RAISES)
    trial, _ = tried([RIGHT], f"{tmp_path}/g.py:grade")
    (said,) = trial.first_row[3:]
    (advice,) = trial.advice
    assert said.endswith("gets 1, '' no score (error), 'I do not know.' 0")
    assert "raised IndexError" in advice and "such a response is no 0" in advice
    assert not trial.problems
    trial, _ = tried([RIGHT, {"prompt": "1", "answer": "x"}])
    assert named(trial.problems) == [
        "a.jsonl:2: no response gets a score: gsm8k raised ValueError: the answer 'x' is not a number"
    ]


NEEDS_TEXT = "def grade(text, answer, extra_info): return float(bool(text) and extra_info in text)"


def test_a_grader_that_raises_for_every_answer_is_one_problem(tried, tmp_path):
    (tmp_path / "g.py").write_text(NEEDS_TEXT)
    rows = [{"prompt": f"{n}+1", "answer": f"{n + 1}", "unit": "seconds"} for n in range(4)]
    trial, _ = tried(rows, f"{tmp_path}/g.py:grade", {"extra_key": "unit"})
    (problem,) = named(trial.problems)
    assert "g.py:grade raised TypeError: 'in <string>' requires string as left operand, not dict" in problem
    assert problem.endswith("extra_info was {'unit': 'seconds'} (and 2 more of the rows that were tried)")
    assert "not even its own answer gets a score" in trial.problems[0] and not trial.advice


def test_prompts_that_repeat_are_counted(tried, tmp_path):
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [RIGHT, {"prompt": "1+2", "answer": "3"}])))
    held_out = {"eval": {"data": {"path": str(tmp_path / "b.jsonl")}}}
    trial, _ = tried([RIGHT, {"prompt": "1", "answer": "1"}], **held_out)
    assert named(trial.advice) == ["b.jsonl: 1 of 2 prompts are also in the training data"]
    trial, _ = tried([RIGHT, RIGHT, {**RIGHT, "answer": "16"}])
    said = "a.jsonl: 2 of 3 rows repeat the prompt of an earlier one; prompts with several answers: 1"
    assert named(trial.advice) == [said]


@pytest.mark.parametrize("row, column", [({"image": "a.png"}, "image"), ({"images": ["a.png"]}, "images"), ({}, "")])
def test_images_that_are_not_read_are_said(tried, row, column):
    trial, _ = tried([{**RIGHT, **row}])
    said = f"a.jsonl: its rows have images, which are not read; data.images_key: {column} names their column"
    assert named(trial.advice) == ([said] if column else [])


def test_a_column_of_tools_that_no_row_has_is_said(tried, tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    keys = {"chat_template": True, "tools_key": "tolls"}
    trial, _ = tried([RIGHT | {"tools": []}], data=keys, model={"path": str(folder)})
    assert "a.jsonl: no row has data.tools_key 'tolls'" in named(trial.advice)


def test_teachers_that_no_row_has_are_said(tried):
    distilled = {"teachers": {"math": {"path": "m"}}, "algorithm": {"distillation": {}}}
    said = "a.jsonl: no row has data.teacher_key 'by': no teacher is asked"
    for teacher in ("", None, "math"):
        trial, _ = tried([RIGHT | {"by": teacher}], data={"teacher_key": "by"}, **distilled)
        assert (said in named(trial.advice)) == (not teacher)


def test_a_grader_that_rewards_what_is_no_answer_is_said(tried, tmp_path):
    (tmp_path / "g.py").write_text(INVERTED.replace("text !=", "text.strip('boxed{}#\\\\ ') !="))
    trial, _ = tried([RIGHT], f"{tmp_path}/g.py:grade")
    assert trial.advice[0].endswith("a text that is no answer gets more than the answer itself")


def test_what_cannot_be_asked_here_is_said(tried):
    graders = [{"grader": "gsm8k"}, {"grader": "http", "args": {"url": "http://127.0.0.1:1/"}}]
    trial, _ = tried([RIGHT], reward={"graders": graders})
    assert trial.not_tried[0] == "grader http" and "gets 1" in trial.first_row[-1]
    trial, _ = tried([RIGHT], reward={"graders": graders[1:]})
    assert trial.not_tried[0] == "grader http" and "gets" not in str(trial.first_row)
    environment = {"function": "tests.games:Walk", "episode_timeout_s": 100}
    trial, _ = tried([RIGHT], reward={}, sampling={"environment": environment})
    assert "gets" not in str(trial.first_row), "an environment gives the reward"


def test_each_source_is_graded(tried):
    rows = [{**RIGHT, "of": name, "by": "exact"} for name in "aabbbbb"]
    trial, _ = tried(rows, data={"source_key": "of", "grader_key": "by"})
    lines = [line.rpartition("/")[2].partition(": ")[0] for line in trial.first_row[3:]]
    assert lines == [f"a.jsonl:{number}" for number in (1, 2, 3, 4, 5)]


def test_other_data_than_the_checkpoints_is_a_problem(tried, tmp_path):
    trial, config = tried([RIGHT] * 3)
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    state = {"rows": fingerprint(read_rows(config.data))}
    (folder / "state.json").write_text(json.dumps(state))
    assert tried([RIGHT] * 3)[0].problems == []
    trial, _ = tried([RIGHT] * 4)
    (problem,) = trial.problems
    assert "3 rows in use then" in problem and "4 now" in problem
    assert tried([RIGHT] * 4, checkpoint={"resume": "other_data"})[0].problems == []
    (folder / "state.json").unlink()
    assert tried([RIGHT] * 4)[0].problems == [], "its load gives the reason"


@pytest.mark.slow
def test_the_tool_turn_is_tried_in_a_process_of_sglang(tried, model):
    """The other families: test_tool_parsers.py."""
    from tests.unit.test_tool_parsers import tokenizer_of

    _, config = tried([RIGHT])
    sampling = config.sampling.model_copy(
        update={"agent": experiment(sampling={"agent": {"command": ["true"], "tool_parser": "qwen25"}}).sampling.agent}
    )
    config = config.model_copy(
        update={"sampling": sampling, "data": config.data.model_copy(update={"chat_template": True})}
    )
    trial = LoadingTest()
    read = Model.of(config)
    loading._try_tool_turn(config, sampling.agent, read, tokenizer_of("Qwen3"), trial)
    assert trial.loaded == ["a tool call, written by the template, parsed by qwen25"]
    wrong = sampling.agent.model_copy(update={"tool_parser": "kimi_k2"})
    with pytest.raises(ValueError, match="tool_parser kimi_k2: .* it finds no call"):
        loading._try_tool_turn(config, wrong, read, tokenizer_of("Qwen3"), trial)
