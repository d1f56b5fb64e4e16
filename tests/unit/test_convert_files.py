"""What `megagrpo convert` says of files that are not translated, of secrets, and of what it would write over."""

import pytest
import yaml

from megagrpo.cli import main
from megagrpo.config.load import ConfigError
from megagrpo.tools.convert.command import draft_of
from megagrpo.tools.convert.reading import Source, overrides
from tests.experiments import read_experiment
from tests.unit.test_convert import COMMAND, lost, source


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("grpo:\n  num_prompts_per_step: 8\npolicy:\n  model_name: m\n", "a.yaml", "this is NeMo-RL's"),
        ("python -m openrlhf.cli.train_ppo_ray --pretrain m", "run.sh", "OpenRLHF's, which is not translated"),
        ("uv run rl @ x.toml", "run.sh", "this is prime-rl's"),
        ("[orchestrator]\nbatch_size = 8\n", "rl.toml", "group_size (once rollouts_per_example) is train.group_size"),
        ("from trl import GRPOConfig, GRPOTrainer\n", "train.py", "this is TRL's, which is not translated"),
        ("per_device_train_batch_size: 8\n", "a.yaml", "num_generations is train.group_size"),
        ("exp_name: x\nactor_train:\n  a: 1\n", "a.yaml", "num_return_sequences_in_group is train.group_size"),
        ("swift rlhf --rlhf_type grpo --model m", "run.sh", "this is ms-swift's"),
    ],
)  # fmt: skip
def test_a_file_of_another_framework_is_answered_with_where_to_look(tmp_path, capsys, text, name, message):
    assert main(["convert", "verl", str(source(tmp_path, text, name))]) != 0
    assert message in capsys.readouterr().err


def test_trl_is_answered_with_the_names_of_its_keys_and_nothing_is_written(tmp_path, capsys):
    path, out = source(tmp_path, "print(1)\n", "train.py"), tmp_path / "mine.yaml"
    assert main(["convert", "trl", str(path), "-o", str(out), "--partial"]) != 0
    error = capsys.readouterr().err
    assert "TRL's, which is not translated (verl, slime, miles are)" in error
    assert "TRL column of docs/reference/names.md" in error and not out.exists()
    given = {"name": "x", "output_dir": "x", "model": {"path": "m"}, "data": {"path": "a.jsonl"}}
    mine = source(tmp_path, yaml.safe_dump(given | {"per_device_train_batch_size": 8}), "own.yaml")
    with pytest.raises(ConfigError, match="TRL's per_device_train_batch_size is ") as raised:
        read_experiment(mine)
    assert "megagrpo convert trl" not in str(raised.value)


def verl(*words: str):
    return draft_of("verl", Source(overrides(["algorithm.adv_estimator=grpo", *words])))


def test_files_and_keys_of_hydra_that_are_taken_or_taken_away_are_named():
    draft = verl("actor@actor_rollout_ref.actor=other_actor", "~algorithm.gamma")
    assert set(lost(draft)) == {"actor@actor_rollout_ref.actor", "~algorithm.gamma"}


def test_values_inside_sections_keep_their_place():
    given = "custom_reward_function.reward_kwargs={weights: {length: 0.2}, penalty: {length: 7}, cap: 1}"
    draft = verl("custom_reward_function.path=f.py", given, "+data.apply_chat_template_kwargs.thinking-mode=off")
    assert lost(draft) == {} and draft.nested()["data"]["chat_template_args"] == {"thinking-mode": "off"}
    assert draft.nested()["reward"]["args"] == {"weights": {"length": 0.2}, "penalty": {"length": 7}, "cap": 1}
    hydras = "{thinking-mode:off,url: http://h:1/x,other:{a:'b: c'}}"  # Hydra needs no space after a colon
    found = overrides([f"+data.apply_chat_template_kwargs={hydras}", "a=[b:1,c:2]", 'd={"e":1}'])
    args = {key.removeprefix("data.apply_chat_template_kwargs."): value for key, value in found.items()}
    assert args == {"thinking-mode": "off", "url": "http://h:1/x", "other.a": "b: c", "a": ["b:1", "c:2"], "d.e": 1}


def test_files_that_hydra_reads_besides_and_words_that_are_no_overrides_are_named():
    draft = verl("--config-path=/mine", "-cd", "other", "--config-name", "ppo_trainer", "-m", "+a b=1")
    assert lost(draft).keys() == {"--config-path", "--config-dir", "-m", "+a b=1"}
    assert "its file says more" in lost(draft)["--config-dir"]
    assert (draft.given["--config-path"], draft.given["--config-dir"]) == ("/mine", "other")


def test_secrets_are_not_written(tmp_path, capsys):
    words = "ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=SECRET-1 +not_known_password=SECRET-2"
    path = source(tmp_path, COMMAND.replace("ESTIMATOR", "grpo").replace("MORE", words), "run.sh")
    assert main(["convert", "verl", str(path), "--partial"]) == 0
    out = capsys.readouterr()
    assert "SECRET" not in out.out + out.err
    assert 'not_known_password = "...":' in out.out


def test_a_secret_of_a_reward_function_and_one_inside_a_text_are_not_written():
    custom = "custom_reward_function."
    draft = verl(
        f"{custom}path=f.py",
        f"{custom}reward_kwargs.api_key=SECRET-1",
        'ray_kwargs.runtime_env=\'{"WANDB_API_KEY": "SECRET-2"}\'',
        "data.prompt_key=question",
    )
    assert list(lost(draft)) == [f"{custom}reward_kwargs.api_key"]
    assert "SECRET" not in draft.yaml("") and 'prompt_key: "question"' in draft.yaml("")


def test_a_file_that_is_there_is_not_written_over_without_a_word(tmp_path, capsys):
    path = source(tmp_path, COMMAND.replace("ESTIMATOR", "grpo").replace("MORE", ""))
    out = source(tmp_path, "mine", "mine.yaml")
    assert main(["convert", "verl", str(path), "-o", str(out)]) != 0
    assert "mine.yaml exists: name another file, or say --overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["convert", "verl", str(path), "-o", str(out), "--overwrite"]) == 0
    assert out.read_text() != "mine"


def test_files_to_evaluate_on_without_a_number_of_steps():
    draft = verl("data.train_files=a.parquet", "data.val_files=b.parquet", "+trainer.extra={}")
    assert lost(draft) == {}
    assert draft.values["eval.every"] == 1_000_000 and draft.values["eval.data.path"] == "b.parquet"
    draft = verl("data.val_files=b.parquet", "trainer.val_before_train=False")
    assert lost(draft) == {} and "eval" not in draft.nested()
    assert "verl evaluates nothing, because test_freq names no steps" in draft.yaml("")


def test_evaluations_that_are_turned_off_and_an_evaluation_alone():
    words = "data.train_files=a.parquet data.val_files=b.parquet"
    draft = verl(*words.split(), "trainer.test_freq=5", "trainer.val_before_train=False")
    assert lost(draft) == {} and draft.values["eval.before_first_step"] is False
    draft = verl(*words.split(), "trainer.val_only=True", "trainer.total_epochs=15")
    assert lost(draft) == {} and draft.nested()["train"]["num_steps"] == 0
    assert "train.num_epochs" not in draft.values and draft.values["eval.data.path"] == "b.parquet"
    draft = verl("actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "trainer.val_only=True")
    assert any("there is no section eval" in problem for problem in draft.problems), "it would train"


def test_batches_of_dynamic_sampling_have_the_size_of_a_step_here():
    groups = "algorithm.filter_groups."
    words = [f"{groups}enable=True", f"{groups}max_num_gen_batches=10", f"{groups}metric=acc"]
    draft = verl(*words, "data.train_batch_size=256", "data.gen_batch_size=512")
    assert draft.values["algorithm.dynamic_sampling.max_num_gen_batches"] == 20
    assert "filter_groups.metric acc is the grader's score here" in draft.yaml("")
