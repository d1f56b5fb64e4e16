"""Names on the Hugging Face Hub in place of folders and files: fetched once, read from the cache, and
one message for those that lead nowhere."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from megagrpo import cli
from megagrpo.config.load import ConfigError
from megagrpo.config.wording import value_at
from megagrpo.data.hub import is_hub_name, with_local_files
from megagrpo.system.environment import child_environment
from tests.experiments import experiment, python, read_experiment
from tests.hub import SHA, cached, serving

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: [socratic/train-*]}
---
# GSM8K
"""
GSM8K = {
    "README.md": CARD,
    "main/train-0.jsonl": "a",
    "main/train-1.jsonl": "b",
    "main/test-0.jsonl": "c",
    "socratic/train-0.jsonl": "d",
}
# a folder of a configuration inside that of another
NESTED = """---
configs:
- {config_name: main, data_files: "data/*.jsonl", default: true}
- {config_name: hard, data_files: "data/hard/*.jsonl"}
- {config_name: all, data_files: "data/**/*.jsonl"}
---
"""
PLAIN = {"README.md": "# no front matter", "train.csv": "a", "test.csv": "b", "notes.txt": "c"}
# of the second kind: packed, and files that only sound like a split's
PLAIN |= {"train_2.jsonl.gz": "d", "contest.csv": "e", "constraints.json": "f", "y/latest.csv": "g"}
# patterns are relative to the folder of a configuration, and a folder alone is one
FOLDERS = """---
configs:
- {config_name: main, data_dir: ./main, default: true}
- config_name: socratic
  data_dir: socratic/
  data_files: [{split: train, path: tr*}]
---
"""
YEARS = "---\nconfigs:\n- {config_name: 2024, data_files: a.csv}\n- {config_name: 2025, data_files: b.csv}\n---\n"
# each file its own text: the cache keeps equal ones once
MODEL = {"config.json": "{}", "tokenizer.json": "[]", "model.safetensors": "w", "model.bin": "b"}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache, with two data sets and a model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "dataset", "openai/gsm8k", GSM8K)
    cached(tmp_path, "dataset", "me/plain", PLAIN)
    cached(tmp_path, "dataset", "me/folders", GSM8K | {"README.md": FOLDERS})
    cached(tmp_path, "dataset", "me/nested", {"README.md": NESTED, "data/a.jsonl": "x", "data/hard/b.jsonl": "y"})
    cached(tmp_path, "dataset", "me/here", PLAIN | {"README.md": FOLDERS.replace("./main", ".")})
    cached(tmp_path, "dataset", "me/years", {"README.md": YEARS, "a.csv": "x", "b.csv": "y"})
    cached(tmp_path, "model", "Qwen/Qwen3-1.7B", MODEL)
    cached(tmp_path, "model", "me/described", {"config.json": "{}"})
    return tmp_path


def read(**sections) -> tuple[dict, list[str]]:
    config, problems = with_local_files(experiment(**sections), "model", cached_only=True)
    return config.model_dump(), [f"{'.'.join(map(str, keys))}: {text}" for keys, text in problems]


@pytest.mark.parametrize(
    "name, files",
    [
        ("openai/gsm8k?config=main", ["main/train-0.jsonl", "main/train-1.jsonl"]),
        ("openai/gsm8k?config=main&split=test", ["main/test-0.jsonl"]),
        ("openai/gsm8k?config=socratic", ["socratic/train-0.jsonl"]),
        ("hf://datasets/openai/gsm8k/main/te*", ["main/test-0.jsonl"]),
        ("me/folders", ["main/train-0.jsonl", "main/train-1.jsonl"]),
        ("me/folders?split=test", ["main/test-0.jsonl"]),
        ("me/folders?config=socratic", ["socratic/train-0.jsonl"]),
        ("me/nested", ["data/a.jsonl"]),
        ("me/nested?config=hard", ["data/hard/b.jsonl"]),
        ("me/nested?config=all", ["data/a.jsonl", "data/hard/b.jsonl"]),
        ("hf://datasets/me/nested/data/*", ["data/a.jsonl"]),
        ("me/years?config=2025", ["b.csv"]),
        ("me/plain", ["train.csv", "train_2.jsonl.gz"]),
        ("me/here", ["train.csv", "train_2.jsonl.gz"]),
        ("hf://datasets/me/plain/train_2.jsonl.gz", ["train_2.jsonl.gz"]),
        ("me/plain@main?split=test", ["test.csv"]),
    ],
)
def test_files_of_a_data_set(cache, name, files):
    values, problems = read(data={"path": name})
    found = values["data"]["path"]
    assert not problems
    found = [found] if isinstance(found, str) else found
    assert [path.partition(f"{SHA}/")[2] for path in found] == files


def test_a_card_in_another_encoding_lists_its_files(cache):
    for card in cache.rglob("README.md"):
        card.write_bytes(card.read_bytes() + "café".encode("latin-1"))
    data, problems = read(data={"path": "hf://datasets/openai/gsm8k?config=main"})
    assert not problems and len(data["data"]["path"]) == 2


@pytest.mark.parametrize(
    "front",
    ["[a, b]", "configs: [", "configs: [{data_files: x}]", "configs: [{config_name: a, data_files: [{path: x}]}]"],
)
def test_a_card_that_is_not_as_the_hub_expects_is_a_problem(cache, front):
    cached(cache, "dataset", "me/odd", {"README.md": f"---\n{front}\n---\n", "train.csv": "a"})
    _, problems = read(data={"path": "me/odd"})
    assert len(problems) == 1 and "me/odd: the front matter of README.md" in problems[0]


def test_an_evaluation_reads_the_test_split_and_a_list_may_mix(cache):
    name = "openai/gsm8k?config=main"
    values, problems = read(data={"path": ["own.jsonl", name]}, eval={"data": {"path": name}})
    assert not problems
    assert [Path(path).name for path in values["data"]["path"]] == ["own.jsonl", "train-0.jsonl", "train-1.jsonl"]
    assert Path(values["eval"]["data"]["path"]).name == "test-0.jsonl"


def test_a_model_is_its_snapshot_and_needs_weights_only_where_they_are_read(cache):
    values, problems = read(model={"path": "Qwen/Qwen3-1.7B"})
    assert not problems and (Path(values["model"]["path"]) / "model.safetensors").is_file()
    config = experiment(model={"path": "me/described"})
    assert not with_local_files(config, "", cached_only=True)[1]
    ((keys, text),) = with_local_files(config, "model", cached_only=True)[1]
    assert keys == ("model", "path") and "no safetensors" in text
    judge = {"grader": "judge", "args": {"path": "Qwen/Qwen3-1.7B", "prompt_file": "p"}}
    for reward, keys in ((judge, ("args",)), ({"graders": [judge]}, ("graders", 0, "args"))):
        values, problems = read(reward=reward)
        folder = value_at(values, ("reward", *keys, "path"))
        assert not problems and (Path(folder) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "sections, said",
    [
        ({"data": {"path": "openai/gsm8k"}}, "main, socratic; write openai/gsm8k?config=main"),
        ({"data": {"path": "openai/gsm8k?config=main&split=dev"}}, "split dev but train, test"),
        ({"data": {"path": "openai/gsm8k?subset=main"}}, "subset is unknown"),
        ({"data": {"path": "hf://datasets/me/plain/x*"}}, "has no file called x*"),
        ({"model": {"path": "Qwen/Qwen3-1,7B"}}, None),  # no name that the Hub allows
        ({"model": {"path": "Qwen/Qwen9"}}, "`hf download Qwen/Qwen9` where there is a network"),
        ({"model": {"path": "m", "tokenizer": "a/b"}}, "model.tokenizer: a/b does not exist here"),
        ({"data": {"path": "no/such"}}, "`hf download no/such --repo-type dataset`"),
    ],
)
def test_a_name_that_leads_nowhere(cache, sections, said):
    _, problems = read(**sections)
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    assert is_hub_name("Qwen/Qwen3-1.7B")
    for path in ("models/Qwen3-1.7B", "mine/model", "a/b/c", "m", "x/d.jsonl", "x/d.json.gz", "../m", "/m/x"):
        assert not is_hub_name(path), path


def test_the_experiment_says_a_wrong_name_once_with_its_line(cache, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("name: n\noutput_dir: o\nmodel: {path: Qwen/Qwen9}\ndata: {path: me/plain, limit: -1}\n")
    with pytest.raises(ConfigError) as found:
        read_experiment(file, fetch=lambda config: with_local_files(config, "model"))
    assert str(found.value).count("Qwen9") == 2  # the name and the command
    assert f"{file}:3: model.path: Qwen/Qwen9 does not exist here" in str(found.value)
    assert f"{file}:4: data.limit" in str(found.value)
    assert cli.main(["plan", str(file)]) == 2
    assert capsys.readouterr().err.count("Qwen/Qwen9 does not exist") == 1


def test_what_the_cache_lacks_is_fetched_from_the_hub(tmp_path):
    """Only what describes a model until its weights are read; the second time from the cache."""
    program = """
import json, sys
from megagrpo.data.hub import with_local_files
from tests.experiments import experiment
for name, weights, cached in json.loads(sys.argv[1]):
    config = experiment(model={"path": name}, data={"path": "openai/gsm8k?config=main"})
    config, problems = with_local_files(config, weights, cached)
    print(json.dumps([config.model.path, config.data.path, problems]))
"""
    with serving({"models/Qwen/Q": MODEL, "datasets/openai/gsm8k": GSM8K}) as (endpoint, fetched):
        env = child_environment() | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        calls = [["Qwen/Q", "", False], ["Qwen/Q", "model", True], ["Qwen/No", "", False]]
        out = python("-c", program, json.dumps(calls), env=env, cwd=Path(__file__).parents[2])
        before = list(fetched)
        calls = [["Qwen/Q", "model", False], ["Qwen/Q", "model", True]]
        again = python("-c", program, json.dumps(calls), env=env, cwd=Path(__file__).parents[2])
    described, lacking, unknown = map(json.loads, out.splitlines())
    assert described[2] == [] and len(described[1]) == 2
    assert {"Qwen/Q/config.json", "openai/gsm8k/main/train-1.jsonl"} <= set(before)
    assert not [name for name in before if "safetensors" in name or "test" in name]
    assert lacking[2][0][0] == ["model", "path"]
    assert f"neither here nor a model on {endpoint}" in unknown[2][0][1]
    whole, offline = map(json.loads, again.splitlines())
    assert whole[2] == offline[2] == [] and whole[0] == offline[0]
    assert fetched[len(before) :] == ["Qwen/Q/model.safetensors"]
