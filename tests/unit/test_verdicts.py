"""`check`, `plan` and `submit` refuse the same experiments with the same words, over sixty drawn ones."""

import json
import random
import shutil
from pathlib import Path

from megagrpo.check.problems import check_against_model
from megagrpo.check.rules.inputs import absent_files
from megagrpo.check.rules.subject import broken, model_description
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.explain import known_problems
from megagrpo.tools.job_request import Request
from megagrpo.tools.plan.command import placed_plan
from megagrpo.tools.plan.fitting import with_model
from megagrpo.tools.submit import submit
from tests.experiments import experiment

MODELS = Path(__file__).parents[2] / "configs" / "models"
SIZES = ("Qwen2.5-3B-Instruct", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "GLM-4.5-Air", "Moonlight-16B-A3B")


def drawn(seed: int, folder: Path) -> ExperimentConfig:
    """An experiment that the schema takes, for GPUs or not."""
    chance = random.Random(seed)
    model = folder / "model"
    model.mkdir()
    shutil.copy(MODELS / chance.choice(SIZES) / "config.json", model)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    nodes = chance.choice((1, 1, 2, 4))
    tp = chance.choice((1, 2, 4, 8, 8, 3))
    per_engine = max(tp // 8, 1)
    settings = {
        "name": "drawn",
        "output_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"path": str(folder / "rows.jsonl"), "max_prompt_tokens": 512},
        "sampling": {"max_response_tokens": chance.choice((512, 4096, 65536))},
        "actor": {
            "world_size": 8 * nodes,
            "dtype": chance.choice(("bfloat16", "bfloat16", "float32")),
            "device": chance.choice(("auto", "auto", "cuda", "cpu")),
            "parallel": {"tp": chance.choice((1, 2, 4, 8)), "ep": chance.choice((1, 1, 2, 8))},
            "recompute": chance.choice(("none", "full")),
            "micro_batch_tokens": chance.choice((4096, 65536)),
            "optimizer": {"distributed": chance.choice((True, True, False))},
        },
        "rollout": {
            "num_engines": chance.choice((1, 2, 4)),
            "tp": tp,
            "nodes_per_engine": per_engine,
            "mem_fraction": chance.choice((0.1, 0.5, 0.85)),
            "host": "eth0",
            **({"quantization": "fp8"} if chance.random() < 0.3 else {}),
        },
    }
    file = folder / "drawn.yaml"
    file.write_text(json.dumps(settings))
    return load_config(file)


def refusals(config: ExperimentConfig) -> dict[str, set[str]]:
    """The problems by command; `plan` needs no files, and so says nothing of them."""
    found = {"check": set(known_problems(config)), "plan": set()}
    try:
        found["plan"] = set(placed_plan(with_model(config)).problems)
    except ValueError as exc:
        found["plan"] = {line.strip() for line in str(exc).splitlines()}
    try:
        submit(config, ["drawn.yaml"], Request(), dry_run=True)
        found["submit"] = set()
    except ValueError as exc:
        found["submit"] = {line.strip() for line in str(exc).splitlines()[1:]}  # below its heading
    return found


def test_three_commands_agree(tmp_path, capsys):
    accepted = refused = 0
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            config = drawn(seed, folder)
        except ValueError:
            continue  # the schema refuses it before any command
        found = refusals(config)
        assert found["check"] == found["submit"], (seed, found)
        if config.actor.device == "cpu":
            continue  # `plan` is about GPUs
        if check_against_model(config, model_description(config)):
            assert found["plan"] and found["check"], (seed, found)
        else:
            assert found["plan"] <= found["check"], (seed, found)
        accepted += not found["check"]
        refused += bool(found["check"])
    print(accepted, "accepted,", refused, "refused")
    assert accepted >= 4 and refused >= 20, (accepted, refused)


def test_how_a_missing_model_is_fetched():
    config = experiment(model={"path": "models/Qwen3-1.7B"})
    (found,) = (text for text in broken(absent_files(config)) if text.startswith("model.path"))
    assert found.endswith("`hf download OWNER/NAME --local-dir models/Qwen3-1.7B`")
