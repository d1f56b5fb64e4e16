"""Experiments of verl as ours: what each key becomes, what is refused, and that the result loads."""

import re
from pathlib import Path

import pytest
import yaml

from megagrpo.cli import main
from megagrpo.config.fields import all_paths, annotations_at
from megagrpo.config.load import ConfigError
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.convert.command import draft_of, translate
from megagrpo.tools.convert.foreign import FRAMEWORKS, alike, defaults, entries, find
from megagrpo.tools.convert.reading import Source, read_source
from tests.experiments import read_experiment

pytestmark = pytest.mark.verifies(
    "algorithms",
    "`megagrpo convert` from verl, slime, miles: what each key becomes",
    "unit/test_convert*.py",
    see="[their examples](../coming.md)",
)

CASES = yaml.safe_load(Path(__file__).with_name("convert_cases.yaml").read_text())
COMMAND = """#!/bin/bash
set -xeuo pipefail
pip install something > install.log
export MODEL=${MODEL:-"$HOME/models/Qwen2.5-7B"}
prompt=512; n=4; batch=$((64 * n))
DATA=(data.train_files=$HOME/data/train.parquet data.val_files="['$HOME/a.parquet','$HOME/b.parquet']")
if [ "$1" = "never" ]; then exit 1; fi
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\
    algorithm.adv_estimator=ESTIMATOR "${DATA[@]}" data.train_batch_size=$batch data.max_prompt_length=$prompt \\
    data.max_response_length=1024 actor_rollout_ref.rollout.n=$n actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.optim.lr=1e-6 trainer.n_gpus_per_node=8 trainer.test_freq=5 trainer.total_epochs=2 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name='my run' MORE $@ > out.log 2>&1 &
wait
"""
FREE_KEYS = ("actor.ddp.", "actor.megatron.", "actor.optimizer.megatron.", "reward.args", "rollout.sglang.")
TRAINER = "python3 -m verl.trainer.main_ppo"
WITH_KL = (
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl"
)


def source(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def verl(tmp_path: Path, estimator: str = "grpo", more: str = ""):
    return translate("verl", source(tmp_path, COMMAND.replace("ESTIMATOR", estimator).replace("MORE", more)))


def lost(draft) -> dict[str, str]:
    return {each.key: each.text for each in draft.outcomes() if each.status in ("not translated", "unknown")}


def becomes(draft, key: str) -> object:
    """What the experiment has at a dotted key; None without it."""
    value: object = draft.nested()
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def test_a_clip_ratio_that_verl_does_not_read_is_said(tmp_path):
    draft = verl(tmp_path, more="actor_rollout_ref.actor.clip_ratio=0.1")
    assert "verl reads clip_ratio 0.1 only where" in draft.yaml("")
    assert "# verl reads" not in verl(tmp_path).yaml("")


@pytest.mark.parametrize(
    ("words", "lost_ones"), [("--config-name='ppo_megatron_trainer.yaml'", []), ("-cn fully_async", ["--config-name"])]
)
def test_the_file_that_verls_command_builds_on(tmp_path, words, lost_ones):
    assert list(lost(verl(tmp_path, more=words))) == lost_ones


def test_what_verl_adds_to_a_rows_extra_info_is_said(tmp_path):
    for more, said in ("", False), (" custom_reward_function.path=r.py", True):
        draft = translate("verl", source(tmp_path, f"{TRAINER} algorithm.adv_estimator=grpo{more}"))
        assert any("num_turns" in remark for remark in draft.remarks) is said


def test_verls_own_default_said_aloud_is_translated():
    given = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True}
    draft = draft_of("verl", Source(given))
    assert lost(draft) == {} and draft.values["algorithm.advantage.name"] == "grpo"


def test_verls_file_that_builds_on_another(tmp_path):
    keys = {"actor_rollout_ref": {"rollout": {"n": 4}}, "algorithm": {"adv_estimator": "grpo"}}
    for others, lost_ones in ([], []), (["mine"], ["defaults"]):
        text = yaml.safe_dump(keys | {"defaults": ["ppo_trainer", *others, "_self_"]})
        assert list(lost(translate("verl", source(tmp_path, text, "run.yaml")))) == lost_ones


def test_verls_dumped_configuration_has_keys_that_say_nothing(tmp_path):
    keys = {
        "actor_rollout_ref": {
            "rollout": {"n": 4, "engine_kwargs": {"vllm": {}}, "mtp": None},
            "actor": {"use_remove_padding": "${oc.select:actor_rollout_ref.no.key,false}"},
        },
        "algorithm": {"adv_estimator": "${oc.select:mine.estimator,rloo}"},
        "mine": {"estimator": "grpo"},
    }
    draft = translate("verl", source(tmp_path, yaml.safe_dump(keys), "run.yaml"))
    assert list(lost(draft)) == ["mine.estimator"]
    assert draft.values["algorithm.advantage.name"] == "grpo"
    assert draft.given["actor_rollout_ref.actor.use_remove_padding"] is False


def test_verls_command_whole(tmp_path):
    draft = verl(tmp_path, more=WITH_KL)
    assert lost(draft) == {} and draft.problems == []
    config = ExperimentConfig.model_validate(draft.nested())
    train = config.train
    assert (train.num_prompts_per_step, train.group_size, train.num_updates_per_step) == (256, 4, 4)
    assert (train.num_epochs, config.name, config.log.wandb.project) == (2, "my run", "verl_examples")
    actor, rollout = config.actor, config.rollout
    assert (actor.world_size, actor.parallel.tp, actor.dtype, actor.recompute) == (8, 2, "bfloat16", "full")
    assert (rollout.num_engines, rollout.tp, rollout.colocate, rollout.dtype) == (4, 2, True, "bfloat16")
    assert config.weights.transport == "ipc" and actor.micro_batch_tokens == 4 * (512 + 1024)
    assert actor.optimizer.weight_decay == 0.01, "verl's default"
    algorithm = config.algorithm
    assert algorithm.loss.dual_clip == 3.0 and algorithm.aggregation == "token-mean"
    assert (algorithm.kl.estimator, algorithm.kl.loss_coef, algorithm.kl.value_clamp) == ("k3", 0.001, 10)
    data = config.data
    assert data.chat_template and (data.answer_key, data.source_key) == ("reward_model.ground_truth", "data_source")
    graders = data.grader_by_source
    assert graders["openai/gsm8k"] == "gsm8k" and graders["lighteval/MATH"] == "math"
    assert {graders[name] for name in ("math_dapo", "math", "math_dapo_reasoning", "aime*")} == {"math_dapo"}
    assert [(entry.grader, entry.args) for entry in config.reward.entries] == [("math_dapo", {"box": True})]
    assert config.eval.every == 5 and len(config.eval_data.paths) == 2 and config.eval.temperature == 0


@pytest.mark.parametrize("case", CASES["verl"])
def test_what_their_keys_become(tmp_path, case):
    draft = verl(tmp_path, case["estimator"], case["more"])
    assert {key: becomes(draft, key) for key in case["becomes"]} == case["becomes"]
    assert draft.problems == [] and lost(draft) == {}


@pytest.mark.parametrize("case", CASES["verl_lost"])
def test_what_cannot_be_said_is_named_and_nothing_is_written(tmp_path, capsys, case):
    key, reason = case["key"], case["reason"]
    assert reason in lost(verl(tmp_path, case["estimator"], case["more"]))[key]
    out = tmp_path / "mine.yaml"
    assert main(["convert", "verl", str(tmp_path / "run.sh"), "-o", str(out)]) == 1
    assert not out.exists() and reason in capsys.readouterr().err
    assert main(["convert", "verl", str(tmp_path / "run.sh"), "-o", str(out), "--partial"]) == 0
    assert f"#   {key} = " in out.read_text()


def test_a_line_break_of_a_value_ends_no_comment():
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    draft = draft_of("verl", Source({key: "a\nseed: [\u2028seed: ["}))
    assert "\nseed: [" in lost(draft)[key]
    assert yaml.safe_load(draft.yaml("of a\nname")) == draft.nested()


def test_the_file_loads_and_every_key_has_a_line(tmp_path):
    text = COMMAND.replace("ESTIMATOR", "grpo").replace("MORE", "")
    path, out = source(tmp_path, text), tmp_path / "mine.yaml"
    assert main(["convert", "verl", str(path), "-o", str(out)]) == 0
    assert read_experiment(out) == ExperimentConfig.model_validate(translate("verl", path).nested())
    written = out.read_text()
    for key in read_source("verl", path).given:
        assert key in written


def test_columns_of_images_are_said(tmp_path):
    words = "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B"
    assert "verl reads the column images of rows" in verl(tmp_path, more=words).yaml("")
    assert "reads the column" not in verl(tmp_path, more=f"{words} data.image_key=pictures").yaml("")


def test_a_value_that_no_rule_took_is_not_as_here(tmp_path):
    draft = verl(tmp_path, more="trainer.total_training_steps=7")
    draft.values.pop("train.num_steps"), draft.because.pop("train.num_steps")
    assert "train.num_steps" in lost(draft)["trainer.total_training_steps"]


def test_the_table_names_keys_that_exist_and_each_of_theirs_once():
    ours = set(all_paths(ExperimentConfig))
    for entry in entries():
        assert bool(entry.to) + bool(entry.free) + bool(entry.lacks) >= 1, entry
        if entry.to and "*" not in entry.to and not entry.to.startswith(FREE_KEYS):
            assert entry.to in ours or annotations_at(ExperimentConfig, path_of(entry.to)), entry.to
    for framework in FRAMEWORKS:
        names = [name for entry in entries() for name in entry.keys[framework]]
        assert len(names) == len(set(names))
        known = {} if framework in ("roll", "trl") else defaults(framework)
        assert all(find(framework, key) is not None for key in known)


VERL = {"data.train_files": "a", "data.val_files": "b", "trainer.test_freq": 5}
SLIME = {"train.py": True, "--prompt-data": "a", "--eval-prompt-data": ["e", "b"], "--eval-interval": 5}
WORKING = {  # so that options count which need others
    "verl": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": "m"} | VERL,
    "slime": {"--hf-checkpoint": "m"} | SLIME,
    "miles": {"--hf-checkpoint": "m", "--lora-rank": 8} | SLIME,
}


@pytest.mark.parametrize("framework", WORKING)
def test_no_row_of_a_table_loses_a_value_without_a_word(framework):
    """Each key in an experiment, with values of each type: true is not 1. What is as here is one value."""
    for entry in entries():
        for key in (name.replace("*", "any") for name in entry.keys[framework]):
            as_here = set()
            known = defaults(framework).get(key)
            for value in (True, False, 0.0, 2, "text", [1], known):
                draft = draft_of(framework, Source(WORKING[framework] | {key: value}))
                (outcome,) = (each for each in draft.outcomes() if each.key == key)
                if entry.lacks and not entry.rule and value is not None and value != [1]:
                    is_lost = outcome.status == "not translated"
                    assert is_lost != any(alike(value, same) for same in entry.same), (key, value)
                if outcome.status == "translated":
                    assert all(becomes(draft, ours) is not None for ours in outcome.text.split(", ")), key
                if outcome.status == "as here" and not alike(value, known):
                    as_here.add(str(value))
            if entry.to and not entry.needs:
                assert as_here in (set(), {"False"}, {"True"}, {"0.0"}, {"False", "0.0"}), (key, as_here)


def path_of(key: str) -> tuple:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"path": "a.jsonl", "train_files": "b"}}, "verl's data.train_files is data.path "
                                                            "here"),
        ({"rollout_batch_size": 64}, "ROLL's rollout_batch_size is train.num_prompts_per_step here"),
        ({"trainer": {"n_gpus_per_node": 8}}, "verl's trainer.n_gpus_per_node is "
                                              "cluster.gpus_per_node here"),
        ({"algorithm": {"kl": {"estimator": "low_var_kl"}}}, "'low_var_kl' is 'k3' here"),
        ({"algorithm": {"loss": {"name": "vanilla"}}}, "'vanilla' is 'ppo_clip' here"),
        ({"algorithm": {"advantage": {"name": "grpo_vectorized"}}}, "'grpo_vectorized' is 'grpo' "
                                                                    "here"),
        ({"algorithm": {"advantage": {"name": "grpo", "norm_adv_by_std_in_grpo": False}}}, "_in_grpo: false`"),
        ({"algorithm": {"reward": {"scale": True}}}, "ROLL's reward_scale: true is "
                                                     "algorithm.reward.std here"),
        ({"critic_warmup": 0}, "not here: there is no critic"),
        ({"rollout_max_response_len": 8}, "slime's rollout_max_response_len is sampling.max_response_tokens here"),
    ],
)  # fmt: skip
def test_a_foreign_key_in_our_file_is_answered_with_ours(tmp_path, keys, message):
    given = {"name": "x", "output_dir": "x", "model": {"path": "m"}, "data": {"path": "a.jsonl"}} | keys
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_experiment(path)
