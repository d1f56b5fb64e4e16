"""Python scripts and command lines of TRL as ours; nothing of them runs."""

import pytest

from megagrpo.cli import main
from megagrpo.tools.convert.command import translate
from tests.unit.test_convert import lost, source

SCRIPT = """
import argparse
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from rewards import brevity
open("/nonexistent/made", "w").write("this would fail")

GROUP = 8
SHARED = dict(learning_rate=1e-6 * 2, lr_scheduler_type="constant", warmup_steps=LATER)

def shorter(completions, **kwargs):
    return [-len(each) / 100 for each in completions]

parser = argparse.ArgumentParser()
parser.add_argument("--model-id", default="Qwen/Qwen2.5-0.5B-Instruct")

def main():
    args = parser.parse_args()
    dataset = load_dataset("json", data_files=f"data/{'train'}.jsonl", split="train")
    dataset = dataset.map(lambda row: {"prompt": row["question"]})
    config = GRPOConfig(
        output_dir="runs/mine", num_generations=GROUP, per_device_train_batch_size=2 * GROUP,
        gradient_accumulation_steps=2, max_steps=10, max_completion_length=256, beta=0.04, loss_type="dr_grpo",
        chat_template_kwargs={"enable_thinking": False}, seed=SEED, push_to_hub=args.push, **SHARED,
    )
    trainer = GRPOTrainer(
        model=args.model_id, args=config, train_dataset=dataset, reward_funcs=[accuracy_reward, brevity, shorter],
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


def trl(tmp_path, text=SCRIPT, name="train.py", **more):
    return translate("trl", source(tmp_path, text, name), **more)


def test_a_script_whole(tmp_path):
    draft = trl(tmp_path, num_processes=4)
    assert lost(draft).keys() == {"seed", "warmup_steps"}, "names that are set nowhere"
    values = draft.values
    assert values["model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert values["data.path"] == "data/train.jsonl"
    assert (values["train.group_size"], values["train.num_prompts_per_step"]) == (8, 16)
    assert (values["actor.world_size"], values["actor.optimizer.lr"]) == (4, 2e-6)
    assert (
        values["algorithm.kl.loss_coef"] == 0.04 and values["sampling.max_response_tokens"] == 256
    )
    assert values["data.chat_template_args.enable_thinking"] is False
    assert (values["actor.lora.rank"], values["actor.lora.alpha"]) == (16, 8), "PEFT's default"
    names = [each["grader"] for each in values["reward.graders"]]
    assert names == ["math", "rewards:brevity", f"{tmp_path}/train.py:shorter"]
    assert draft.notes == []
    assert "#   seed = " in draft.yaml("") and "SEED" in draft.yaml("")


def test_functions_of_a_script_that_trains_when_it_is_imported_are_all_named(tmp_path):
    text = """
from trl import GRPOConfig, GRPOTrainer
def short(completions): return [0.0]
def polite(completions): return [0.0]
trainer = GRPOTrainer(model="m", reward_funcs=[short, polite], train_dataset="a.jsonl", args=GRPOConfig("x", bf16=True))
"""
    reason = lost(trl(tmp_path, text, num_processes=1))["reward_funcs"]
    assert reason.startswith("short, polite: put it into a file of its own, as it is")


@pytest.mark.parametrize(
    ("text", "message"),
    [("print(1)", "calls neither GRPOTrainer"), ("a = (", "train.py is no Python")],
)
def test_another_file_is_named(tmp_path, capsys, text, message):
    path = source(tmp_path, text, "train.py")
    assert main(["convert", "trl", str(path)]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "world"),
    [
        ("trl grpo --num_processes 8", 8),
        ("accelerate launch --num_processes 2 examples/grpo.py", 2),
        ("trl grpo --vllm_tensor_parallel_size 4", 4),
    ],
)
def test_the_command_line_has_the_names_of_its_options(tmp_path, command, world):
    text = f"""
    {command} --model_name_or_path Qwen/Qwen2.5-7B --dataset_name data/a.jsonl --use_peft \\
        --lora_r 32 --lora_dropout 0 --lora_target_modules q_proj v_proj --max_prompt_length 700 \\
        --reward_funcs accuracy_reward my_lib.rewards.own --per_device_train_batch_size 8 \\
        --max_steps 100 --lr_scheduler_type constant --learning_rate 1e-5
    """
    draft = trl(tmp_path, text, "run.sh")
    assert (lost(draft), draft.problems) == ({}, [])
    values = draft.values
    assert (values["model.path"], values["data.path"]) == ("Qwen/Qwen2.5-7B", "data/a.jsonl")
    assert (values["actor.lora.rank"], values["data.max_prompt_tokens"]) == (32, 700)
    assert [each["grader"] for each in values["reward.graders"]] == ["math", "my_lib.rewards:own"]
    assert values.get("actor.world_size", 1) == world
    assumed = "num_processes is not named: 4 processes are assumed; say --num-processes N"
    assert draft.notes == ([] if "num_" in command else [assumed])
