"""`megagrpo check` loads what trainers load: what it says of sound and of broken files, and of a broken torchvision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.loading import try_loading
from megagrpo.check.problems import is_made, preflight
from megagrpo.config.load import load_config
from megagrpo.planning.explain import explain
from megagrpo.system.environment import child_environment

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}="
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "model"
    make_tiny_model(TinyModelConfig(path=str(folder), family="llama", num_layers=1), seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def experiment(folder: Path, model: Path, **data) -> Path:
    rows = [{"prompt": "12+3", "answer": "15"}, {"prompt": "1", "answer": "1"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "chat_template": True, "max_prompt_tokens": 2} | data
    text = {"name": "trial", "output_dir": str(folder / "run"), "model": {"path": str(model)}, "data": data}
    (folder / "trial.yaml").write_text(yaml.safe_dump(text))
    return folder / "trial.yaml"


def test_a_sound_experiment_is_loaded_as_far_as_it_goes(tmp_path, model):
    config = load_config(experiment(tmp_path, model))
    trial = try_loading(config)
    assert trial.problems == [] == preflight(config)
    # a first row above max_prompt_tokens is dropped by a run: no problem
    assert trial.loaded == [
        f"the tokenizer of {model}",
        f"the first row of {tmp_path / 'rows.jsonl'}: 5 tokens, by the chat template",
    ]
    text = explain(config, trial)
    assert text.endswith("no problems found") and "not tried: the model's weights, the engines" in text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"system_prompt": "Answer."}, "rows.jsonl:1: the chat template refuses this prompt: TemplateError: no system"),
        ({"prompt_template": "Say {prompt}"}, "rows.jsonl:1: the tokenizer does not know every character"),
    ],
)
def test_a_first_row_that_the_trainers_would_refuse(tmp_path, model, data, said):
    config = load_config(experiment(tmp_path, model, **data))
    trial = try_loading(config)
    assert preflight(config) == [] and len(trial.problems) == 1 and said in trial.problems[0]
    assert "PROBLEMS (1)" in explain(config, trial)


def test_what_is_not_there_yet_is_not_tried(tmp_path, model):
    path = experiment(tmp_path, model)
    sft = "sft={model: " + str(model) + ", data: {path: " + str(tmp_path / "rows.jsonl") + "}}"
    config = load_config(path, [f"model.path={tmp_path / 'later'}", sft])
    assert preflight(config) == [], "the warm-up writes model.path"
    assert is_made(config, str(tmp_path / "later")) and not is_made(config, str(tmp_path / "other"))
    trial = try_loading(config)
    assert trial.problems == [] and trial.loaded[0] == f"the tokenizer of {model}"
    assert "not there yet: made by megagrpo sft" in explain(config, trial)
    config = load_config(path, [f"model.path={tmp_path / 'made'}", "sft={model: made, data: {path: rows.jsonl}}"])
    trial = try_loading(config)
    assert trial.problems == [] and trial.loaded == []
    assert "tokenizer and chat template" in trial.not_tried[0] and "made is not there yet" in trial.not_tried[0]


def test_a_broken_torchvision_is_a_problem_with_its_remedy(tmp_path, model):
    """One that only lacks its operators, as on CPUs, is put right: see the tests above."""
    broken = tmp_path / "path" / "torchvision"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('built for another torch')\n")
    command = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", "check", str(experiment(tmp_path, model))]
    environment = child_environment(python_path=[str(broken.parent)])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEMS (1)" in done.stdout and f"{model}: no tokenizer can be loaded from here" in done.stdout
    assert "built for another torch" in done.stdout and "`bash launch/install.sh --repair`" in done.stdout
