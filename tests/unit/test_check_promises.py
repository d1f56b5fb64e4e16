"""What `check` accepts, `run` runs: bounds of every number, all problems at once with the places that
said them, and what Megatron-Core makes of its fields."""

import json
import re
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.check import libraries, problems
from megagrpo.config.fields import Section, members, sections
from megagrpo.config.load import ConfigError
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.explain import explain
from megagrpo.tools.plan.libraries import all_library_problems
from tests.experiments import QUICKSTART, ROOT, experiment, python, read_experiment


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sampling.top_k=-5", "greater than or equal to -1"),
        ("sampling.temperature=1e-7", "greater than or equal to 0.01"),
        ("sampling.stop_token_ids=[-1]", "greater than or equal to 0"),
        ("sampling.stop=['']", "at least 1 character"),
        ("actor.optimizer.adam_beta2=1", "less than 1"),
        ("actor.optimizer.lr=10", "less than or equal to 1"),
        ("seed=99999999999999999999", "less than or equal to 9007199254740992"),
        ("rollout.step_timeout_s=1e9", "less than or equal to 2000000"),
        ("rollout.sglang.dp_size=0", "must be at least 1"),
        ("rollout.sglang.max_total_tokens='20000'", "and a whole number"),
        ("rollout.sglang.chunked_prefill_size=x", "must be at least -1, and a whole number"),
        ("actor.megatron.recompute_modules=5", "is read with actor.recompute selective only"),
        ("actor.optimizer.megatron.optimizer_offload_fraction=x", "must be a number between 0 and 1"),
        ("rollout.sglang.dp_size=2.5", "must be at least 1, and a whole number"),
        ("rollout.sglang.hicache_ratio=x", "must be at least 0, and a number"),
        ("rollout.sglang.page_size=0", "must be at least 1"),
        ("rollout.sglang.decode_log_interval=0", "must be at least 1"),
        ("rollout.sglang.stream_interval=0", "must be at least 1"),
    ],
)
def test_a_number_that_no_library_takes_is_refused_by_its_key(setting, said):
    key = re.escape(setting.partition("=")[0])
    with pytest.raises(ConfigError, match=rf"--set .*: {key}.* = .*: .*{said}"):
        read_experiment(QUICKSTART, [setting])


def test_a_run_of_the_default_steps_is_over_after_them(monkeypatch):
    monkeypatch.setattr(problems, "latest", lambda _: Path("checkpoints/step_000100"))
    config = read_experiment(QUICKSTART, ["train.num_steps=null", "eval=null"])
    assert "100 of 100 steps are done" in problems.finished(config)
    assert problems.finished(read_experiment(QUICKSTART, ["train={num_epochs: 1}", "eval=null"])) == ""


def test_every_number_of_the_schema_has_bounds():
    without = []

    def look(section: type[Section], path: str) -> None:
        for name, field in section.model_fields.items():
            kinds = members(field.annotation)
            if {int, float} & set(kinds):
                schema = json.dumps(section.model_json_schema()["properties"][name])
                if not ("inimum" in schema and "aximum" in schema):
                    without.append(f"{path}{name}")
            for inner in sections(kinds):
                look(inner, f"{path}{name}.")

    look(ExperimentConfig, "")
    assert without == []


def test_0_means_all_tokens_as_in_other_libraries():
    config = read_experiment(QUICKSTART, ["sampling.top_k=0", "eval.top_k=0"])
    assert config.sampling.top_k == config.eval.top_k == -1


def test_what_changes_nothing_is_no_problem(prepared):
    remax = ["algorithm.advantage={name: remax}", "train.num_steps=2"]
    for off in ("factor: 0", "buffer_tokens: 0"):
        config = read_experiment(QUICKSTART, [*remax, f"algorithm.reward.overlong={{{off}}}"])
        assert config.algorithm.reward.overlong is None
    with pytest.raises(ConfigError, match=r"reward\.overlong would change .* named first"):
        read_experiment(QUICKSTART, [*remax, "algorithm.reward.overlong={}"])
    slow = ["actor.optimizer.min_lr=1e-5", "actor.optimizer.warmup_steps=4", "train.num_steps=2"]
    text = explain(read_experiment(QUICKSTART, slow))
    assert "ADVICE   actor.optimizer.min_lr 1e-05 has no effect with lr_schedule constant" in text
    assert "warmup_steps 4 are not over after the run's 4 updates" in text
    assert "warmup_steps" not in explain(read_experiment(QUICKSTART, slow[:1]))
    idle = "ADVICE   3 of the 8 GPUs of a node (cluster.gpus_per_node) are used: `megagrpo plan CONFIG"
    assert idle in explain(read_experiment(QUICKSTART, ["actor.dtype=bfloat16"]))
    assert "cluster.gpus_per_node" not in text
    long = "sampling.max_response_tokens=32768"
    late = "a response of sampling.max_response_tokens 32768 must come at 55 tokens a second or more"
    assert late in explain(read_experiment(QUICKSTART, [long]))
    assert late not in explain(read_experiment(QUICKSTART, [long, "rollout.request_timeout_s=700"]))


def test_problems_of_all_stages_come_at_once_with_their_places(prepared, monkeypatch, capsys):
    """Types, rules of a section and between sections, settings of libraries, files: whatever is
    refused first hides nothing, and no consequence of it is told."""
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    settings = (
        "seed=-1",
        "rollout.num_engines=no",  # with its default min_healthy_engines would be too many
        "rollout.min_healthy_engines=2",
        "train.num_updates_per_step=3",
        "rollout.max_staleness=1",
        "actor.megatron.hidden_dropout=0.1",
        "data.path=nowhere.jsonl",
    )
    words = [word for text in settings for word in ("--set", text)]
    assert cli.main(["check", str(QUICKSTART), *words]) == 2
    said = capsys.readouterr().err
    lines = QUICKSTART.read_text().splitlines()
    train = next(n for n, line in enumerate(lines, 1) if line.startswith("train:"))
    for expected in (
        "--set seed=-1: seed = -1: should be",
        "--set rollout.num_engines=no: rollout.num_engines = 'no': should be",
        f"{QUICKSTART}:{train}, --set train.num_updates_per_step=3: train: num_prompts_per_step 64 ",
        "--set rollout.max_staleness=1: rollout.max_staleness 1 trains on tokens of older weights",
        "--set actor.megatron.hidden_dropout=0.1: actor.megatron.hidden_dropout = 0.1: is refused",
        "--set data.path=nowhere.jsonl: data.path: nowhere.jsonl does not exist",
    ):
        assert f"\n  {expected}" in said, said
    assert "min_healthy_engines" not in said


@pytest.mark.parametrize("settings", [["model=3"], ["data=3"], ["name=3", "model.path=4"], ["sft={}"], ["eval.data=1"]])
def test_a_section_that_is_missing_or_refused_hides_no_rule(settings):
    with pytest.raises(ConfigError) as error:
        read_experiment(QUICKSTART, [*settings, "train.num_updates_per_step=3"])
    assert "num_updates_per_step 3; take a multiple" in str(error.value)
    own = 2 if settings == ["sft={}"] else len(settings)  # keys that sft needs
    assert f": {1 + own} problems" in str(error.value)


BUILD = """
import json, sys
from megagrpo.actor.host import prepare_host
prepare_host("cpu")
from megagrpo.config.actor import ActorConfig
from megagrpo.models.table import architecture_of
from megagrpo.tools.plan.libraries import build_problems
description, *jobs = json.load(sys.stdin)
for job in jobs:
    actor = ActorConfig.model_validate(job)
    print(json.dumps(build_problems(architecture_of(description), actor)))
"""


def test_megatrons_configurations_are_built():
    """What only their own code knows; an assertion without a text is told by its line."""
    from examples.laptop.recipe import TinyModelConfig
    from megagrpo.tools.certify.tiny_model import hf_config

    wrong = (
        ({"megatron": {"+batch_invariant_mode": True}}, "only supports FlashAttention"),
        ({"megatron": {"+fine_grained_activation_offloading": True}}, "in `assert self.offload_mod"),
        ({"megatron": {"moe_token_dispatcher_type": "flex"}}, "DeepEP .* is not installed here"),
        ({"megatron": {"gradient_accumulation_fusion": True}}, "and neither is here"),
    )
    jobs = [hf_config(TinyModelConfig()), {}, *(job for job, _ in wrong)]
    right, *found = python("-c", BUILD, cwd=ROOT, input=json.dumps(jobs)).splitlines()[-5:]
    assert json.loads(right) == []
    for line, (_, said) in zip(found, wrong, strict=True):
        [problem] = json.loads(line)
        assert "actor.megatron" in problem and re.search(said, problem), problem


def test_a_draft_of_a_model_without_one_is_a_problem_beside_others(prepared, monkeypatch, capsys):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    words = ("--set", "actor.draft={}", "--set", "data.path=nowhere.jsonl")
    assert cli.main(["check", str(QUICKSTART), *words]) == 2
    said = capsys.readouterr().out
    assert "--set actor.draft={}: model.path: actor.draft needs a model with one multi-token" in said
    assert "--set data.path=nowhere.jsonl: data.path: nowhere.jsonl does not exist" in said


def test_a_library_is_given_the_whole_experiment_only_if_it_is_sound(prepared, monkeypatch):
    asked = []
    monkeypatch.setattr(libraries, "_judged", lambda config, *job: asked.append(job) or [])
    all_library_problems(read_experiment(QUICKSTART))
    [(*_, whole), (*_, settings)] = sorted(asked, key=lambda job: job[1])
    assert whole[1]["model_type"] == "qwen3_moe" and "model_path" in settings[0]
    asked.clear()
    broken = experiment(model={"path": "runs/quickstart/random"}, rollout={"sglang": {"tp_size": 2}})
    all_library_problems(broken)
    assert [whole for *_, whole in asked] == [None, None]
