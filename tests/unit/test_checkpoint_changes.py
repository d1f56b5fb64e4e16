"""A resume is of the same run, or says in which way it is not: every setting is compared, refused or followed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from test_checkpoint import LAYOUT, MESH, SAVED, Plan

from megagrpo.check.problems import preflight
from megagrpo.checkpoint.changes import input_problem, prompt_order, record_start
from megagrpo.checkpoint.resume import run_inputs
from megagrpo.checkpoint.save import PendingSave, RunIdentity, load
from megagrpo.config.fields import Section, elements, members, sections
from megagrpo.config.load import load_config
from megagrpo.config.schema import CheckpointConfig, ExperimentConfig
from megagrpo.mesh import LeaderError
from tests.experiments import QUICKSTART, experiment, read_experiment
from tests.unit.test_stored_weights import tiny_model

# What a resume does about a changed setting.
# same: state.json has it, so that another value is refused (identity.py, layout, rows of the data)
# refused: by input_problem, with another way to go on
# follows: the steps after the checkpoint take the new value, and the start says so
How = Literal["same", "refused", "follows"]
# by key, or by what begins it; the longest counts
SETTINGS: dict[str, How] = {
    "name": "follows",
    "output_dir": "follows",
    "seed": "refused",
    "model.path": "refused",  # its sizes are the same; its files if it is the reference
    "model.tokenizer": "follows",
    "data": "follows",
    "data.path": "same",  # rows by their digest, wherever the files are
    "data.sources": "same",
    "data.sources.ratio": "refused",
    "data.shuffle": "refused",
    "data.limit": "same",
    "data.max_prompt_tokens": "same",
    "sampling": "follows",
    "reward": "follows",
    "algorithm": "follows",
    "train": "follows",
    "eval": "follows",
    "actor": "follows",
    "actor.world_size": "same",  # unless the checkpoint is for any layout
    "actor.parallel": "same",
    "actor.dtype": "same",
    "actor.optimizer.distributed": "same",
    "actor.optimizer.megatron": "same",  # those that determine the form of the state
    "actor.lora": "same",
    "actor.vision": "same",
    "actor.draft": "same",
    "rollout": "follows",
    "weights": "follows",
    "teachers": "follows",
    "cluster": "follows",
    "checkpoint": "follows",
    "log": "follows",
    "sft": "follows",
}
SOURCES = [{"source": "a", "path": "a.jsonl", "ratio": 2}, {"source": "b", "path": "b.jsonl", "ratio": 1}]


def how(key: str) -> How:
    """Returns what a resume does about a setting. Raises KeyError for one that is not listed."""
    while key not in SETTINGS and "." in key:
        key = key.rpartition(".")[0]
    return SETTINGS[key]


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key that has a value, also those in lists and maps of sections."""
    for name, field in section.model_fields.items():
        kinds = [kind for member in members(field.annotation) for kind in (member, *elements(member))]
        inner = sections(kinds)
        if not inner or len(inner) < len(kinds):
            yield prefix + name
        for part in inner:
            yield from keys(part, f"{prefix}{name}.")


def test_every_setting_is_listed_by_itself_or_by_its_section():
    paths = set(keys(ExperimentConfig))
    assert len(paths) > 250 and {how(path) for path in paths} == {"same", "refused", "follows"}
    assert SETTINGS.keys() <= paths | {path.rpartition(".")[0] for path in paths}, "no key that is gone"
    inputs = {*prompt_order(experiment()), "model.path"}
    assert {key for key, kind in SETTINGS.items() if kind == "refused"} == inputs


@pytest.mark.parametrize("section", ["model.revision", "nothing"])
def test_a_setting_that_is_forgotten_fails_the_test_above(section):
    with pytest.raises(KeyError):
        how(section)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"data": {"shuffle": False}}, "data.shuffle was True and is False now"),
        ({"data": {"sources": [SOURCES[0], SOURCES[1] | {"ratio": 2}]}}, r"ratio was \[2.0, 1.0\] and is \[2.0, 2.0\]"),
    ],
)
def test_another_order_of_prompts_is_refused(tmp_path: Path, now: dict, said: str):
    data = {"path": None, "sources": SOURCES}
    before = prompt_order(experiment(data=data))
    after = prompt_order(experiment(**now | {"data": data | now.get("data", {})}))
    folder = PendingSave(
        tmp_path, SAVED, RunIdentity({}, LAYOUT, inputs=before), CheckpointConfig(), Plan, MESH
    ).finish()

    def loaded(inputs: dict) -> object:
        return load(folder, RunIdentity({}, LAYOUT, inputs=inputs), lambda part: None, MESH)

    assert loaded({}) == SAVED, "not compared: an export, or checkpoint.resume: other_data"
    if not said:
        assert loaded(after) == SAVED
        return
    with pytest.raises(LeaderError, match=f"{said}.*some twice and others never.*checkpoint.resume: other_data"):
        loaded(after)
    without = json.loads((folder / "state.json").read_text())
    del without["inputs"]
    (folder / "state.json").write_text(json.dumps(without))
    assert not input_problem(folder, after), "of an earlier megagrpo"


def test_a_seed_or_a_name_that_orders_nothing_is_no_other_order(tmp_path: Path):
    named = {"path": None, "sources": [{"source": "a", "path": "a.jsonl"}], "shuffle": False}
    inputs = prompt_order(experiment(data={"path": "a.jsonl", "shuffle": False}))
    (tmp_path / "state.json").write_text(json.dumps({"inputs": inputs}))
    assert input_problem(tmp_path, prompt_order(experiment(seed=1, data=named))) == ""
    assert "data.shuffle was False" in input_problem(tmp_path, prompt_order(experiment()))


def test_another_reference_is_refused_with_the_way_round(tmp_path: Path):
    model = tiny_model(tmp_path / "model")
    kept = {"kl": {"loss_coef": 0.1}}
    with_reference = experiment(model={"path": str(model)}, algorithm=kept)
    without = experiment(model={"path": str(model)})
    inputs = run_inputs(with_reference, MESH)
    assert inputs.keys() - run_inputs(without, MESH).keys() == {"model.path"}
    (tmp_path / "state.json").write_text(json.dumps({"inputs": inputs}))
    assert input_problem(tmp_path, inputs) == ""
    other = tiny_model(tmp_path / "other", lambda tensors: {name: t + 0.01 for name, t in tensors.items()})
    now = run_inputs(experiment(model={"path": str(other)}, algorithm=kept), MESH)
    said = input_problem(tmp_path, now)
    assert "the reference of the KL, are others" in said and f"checkpoint.load: {tmp_path}" in said
    assert not input_problem(tmp_path, run_inputs(without, MESH)), "a run that keeps none any more"


def test_check_says_that_the_order_changed(prepared: Path):
    config = read_experiment(QUICKSTART)
    folder = config.run_folder.checkpoints / "step_000003"
    folder.mkdir(parents=True)
    state = {"layout": config.actor.layout, "inputs": prompt_order(config)}
    (folder / "state.json").write_text(json.dumps(state))
    assert preflight(config) == []
    [problem] = preflight(read_experiment(QUICKSTART, ["seed=5"]))
    assert "seed was 0 and is 5 now" in problem
    assert preflight(read_experiment(QUICKSTART, ["seed=5", "checkpoint.resume=other_data"])) == []


def start(step: int, *changes: str) -> list[str]:
    return record_start(load_config(QUICKSTART, ["output_dir=run", *changes]), step)


def test_a_start_says_what_differs_from_the_one_before(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start(0, "actor.optimizer.lr=1e-3") == []
    assert start(0, "actor.optimizer.lr=2e-3") == [], "no step was made by the settings before"
    assert start(12, "actor.optimizer.lr=2e-4") == ["actor.optimizer.lr: 0.002 -> 0.0002 from step 13"]
    changed = start(12, "actor.optimizer.lr=2e-3", "sampling.stop=['x', 'y']", "eval=null")
    assert changed[:2] == [f"sampling.stop.{k}: not set -> {word} from step 13" for k, word in enumerate("xy")]
    assert all(line.startswith("eval.") and "-> not set" in line for line in changed[2:]) and len(changed) > 3
    assert start(20, "actor.optimizer.lr=2e-3", "sampling.stop=['x', 'y']", "eval=null") == []
    names = lambda: sorted(path.name for path in Path("run/starts").iterdir())  # noqa: E731
    assert names() == ["step_000000.yaml", "step_000012.yaml", "step_000020.yaml"]
    assert start(15, "actor.optimizer.lr=2e-3", "sampling.stop=['x', 'y']", "eval=null") == []
    assert names() == ["step_000000.yaml", "step_000012.yaml", "step_000015.yaml"], "its steps are made again"
    assert load_config("run/starts/step_000000.yaml").actor.optimizer.lr == 2e-3, "what steps 1 to 12 had"
