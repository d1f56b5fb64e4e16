"""`megagrpo run` and `export` with Mixtral, GLM-4.5, GLM-5, DeepSeek-V3 and MiniMax-M2, in float32,
and in bfloat16 with exact biases; and with an INT4 release.

And a run whose engine has data-parallel attention.
"""

from pathlib import Path

import pytest
import torch
from run_megagrpo import assert_agrees, make_inputs, metrics, succeed, transformers_accepts, write_experiment

from megagrpo.weights.hf_folder import HfFolder
from tests.int4_checkpoint import pack_folder

pytestmark = pytest.mark.verifies(
    "weights",
    "new families in a real engine: log-probabilities within 1e-5 of transformers' after a publish",
    see="[table](../../bench/results/engine_families.md)",
)

BIAS = "e_score_correction_bias"
IN_FLOAT32 = (BIAS, "A_log")
UNKNOWN = ("kimi_linear",)  # transformers 5.12 has no such model
# one of attention; of the others 2
NUM_LAYERS = dict.fromkeys(("qwen3_5_moe_text", "qwen3_next", "nemotron_h", "kimi_linear"), 4)
NUM_STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "mismatch"),  # the largest mean of |trainer - rollout| log-probabilities
    [
        *(
            (family, "float32", 1e-5)
            for family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "mixtral", "minimax_m2")
        ),
        ("qwen3_5_moe_text", "float32", 1e-5),
        ("qwen3_next", "float32", 1e-5),
        ("nemotron_h", "float32", 1e-5),
        ("kimi_linear", "float32", 1e-5),
        ("qwen3_5_moe_text", "bfloat16", 0.1),  # four layers, and decays kept in float32
        ("glm_moe_dsa", "float32", 1e-5),  # dense, as samples have no more than index_topk tokens
        # routers are in float32 in this engine, with the values that the actor has in bfloat16
        ("minimax_m2", "bfloat16", 0.05),
        ("deepseek_v3", "bfloat16", 0.05),  # the same weights and routing biases, other roundings of activations
    ],
)
def test_steps_agree_with_the_engine_and_are_exported(family, dtype, mismatch, tmp_path: Path):
    sections = {"actor": {"dtype": dtype, "device": "cpu"}, "rollout": {"dtype": dtype, "start_timeout_s": 900}}
    sections |= {"train": {"num_steps": NUM_STEPS}, "checkpoint": {"every": NUM_STEPS}}
    config = write_experiment(tmp_path / family, **sections)
    make_inputs(config, model={"family": family, "num_layers": NUM_LAYERS.get(family, 2)})
    succeed("run", config, timeout_s=900)
    entries = metrics(tmp_path / family)
    for step in range(1, NUM_STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] <= mismatch
        assert entries[step]["optim/grad_norm"] > 0, "nothing was learned, so nothing was tested"
    succeed("export", config, tmp_path / "exported")
    exported = HfFolder(tmp_path / "exported")
    for name, (_, found) in exported.specs.items():
        assert found == (torch.float32 if name.endswith(IN_FLOAT32) else getattr(torch, dtype)), name
    before = HfFolder(tmp_path / "model")
    assert before.keys() == exported.keys()
    frozen = [name for name in before if name.endswith(BIAS) or ".indexer." in name]
    assert all(torch.equal(before[name], exported[name]) for name in frozen)
    if family not in UNKNOWN:
        assert transformers_accepts(tmp_path / "exported") == {"wrong": [], "finite": True}


@pytest.mark.verifies("weights", "Kimi-K2.5's INT4 release is trained: engines agree, the export is its text model")
@pytest.mark.slow
def test_an_int4_release_of_another_models_part_is_trained_and_exported(tmp_path: Path):
    """Engines start from the description of the text model, and get it in the dtype of the run."""
    config = write_experiment(tmp_path / "run", checkpoint={"every": NUM_STEPS})
    make_inputs(config, model={"family": "kimi_k25", "expert_ffn_size": 32})
    (tmp_path / "model").rename(tmp_path / "float32")
    pack_folder(tmp_path / "float32", tmp_path / "model", tmp_path / "twin")
    succeed("run", config, timeout_s=900)
    entries = metrics(tmp_path / "run")
    for step in range(1, NUM_STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] <= 1e-5
        assert entries[step]["optim/grad_norm"] > 0, "nothing was learned, so nothing was tested"
    succeed("export", config, tmp_path / "exported")
    before, exported = HfFolder(tmp_path / "twin"), HfFolder(tmp_path / "exported")
    assert before.keys() == exported.keys()
    assert transformers_accepts(tmp_path / "exported") == {"wrong": [], "finite": True}


@pytest.mark.verifies("weights", "engines with data-parallel attention agree with the trainer")
@pytest.mark.slow
def test_an_engine_with_data_parallel_attention_agrees_and_its_experts_are_replayed(tmp_path: Path):
    """Both publishes between steps are into an engine that has sampled, whose ranks each have a cache of their own."""
    attention = {"enable_dp_attention": True, "dp_size": 2}
    sections = {"rollout": {"tp": 2, "ep": 2, "sglang": attention}, "actor": {"routing_replay": "rollout"}}
    config = write_experiment(tmp_path / "run", **sections, weights={"transport": "reshard"})
    make_inputs(config)
    succeed("run", config, timeout_s=900)
    assert_agrees(tmp_path / "run")
    entries = metrics(tmp_path / "run")
    assert all(entries[step]["optim/grad_norm"] > 0 for step in (1, 2))
