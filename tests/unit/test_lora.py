"""Adapters without Megatron: what a configuration may say, what they weigh, and whose weights a checkpoint is for."""

import re
from pathlib import Path

import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import layout_problems
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig
from megagrpo.models.table import architecture_of, model_tensors
from megagrpo.models.tensors import adapter_tensors
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.explain import explain
from megagrpo.tools.plan.checkpoint_cost import checkpoint_cost
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.experiments import QUICKSTART

MOE = architecture_of(hf_config(TinyModelConfig(path="x", family="qwen3_moe")))
TARGETS = ("q_proj", "down_proj")


def test_experts_cut_more_finely_than_the_rest_are_refused():
    def problems(targets: list[str]) -> list[str]:
        actor = {"world_size": 2, "device": "cuda", "parallel": {"tp": 1, "etp": 2}, "lora": {"targets": targets}}
        return layout_problems(MOE, ActorConfig.model_validate(actor))

    assert problems(["q_proj"]) == []
    [problem] = problems(["up_proj"])
    assert "actor.lora has targets in experts" in problem and "divides tp = 1; 2 does not" in problem


def test_reductions_overlap_without_replicas_of_experts_adapters():
    def problems(arch, targets: list[str]) -> list[str]:
        actor = {"lora": {"targets": targets}, "ddp": {"overlap_grad_reduce": True}}
        return layout_problems(arch, ActorConfig.model_validate(actor))

    assert problems(MOE, ["q_proj"]) == []
    [problem] = problems(MOE, ["up_proj"])
    assert "actor.ddp.overlap_grad_reduce: with actor.lora, replicas of experts" in problem


def test_parameters_are_not_gathered_by_a_forward_that_adapters_lack():
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    lora = {"targets": ["q_proj"]}
    dense = architecture_of(hf_config(TinyModelConfig(path="x", family="qwen3")))
    for arch in (MOE, dense):
        [problem] = layout_problems(arch, ActorConfig.model_validate({"lora": lora, "ddp": ddp}))
        assert problem.startswith("actor.ddp.overlap_param_gather") and "would see old adapters" in problem
        assert layout_problems(arch, ActorConfig.model_validate({"ddp": ddp})) == []


def test_adapters_have_peft_names_and_shapes():
    tensors = {spec.name: spec.shape for spec in adapter_tensors(model_tensors(MOE), TARGETS, rank=4)}
    assert len(tensors) == 2 * MOE.num_layers * (1 + MOE.experts.count)
    hidden, heads = MOE.hidden_size, MOE.attention.heads * MOE.attention.head_dim
    assert tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, hidden)
    assert tensors["model.layers.0.self_attn.q_proj.lora_B.weight"] == (heads, 4)
    last = f"model.layers.{MOE.num_layers - 1}.mlp.experts.{MOE.experts.count - 1}.down_proj"
    assert tensors[f"{last}.lora_A.weight"] == (4, MOE.experts.ffn_size)
    assert tensors[f"{last}.lora_B.weight"] == (hidden, 4)


def test_check_says_what_is_saved_and_a_checkpoint_holds_adapters_alone(prepared):
    config = load_config(QUICKSTART, ["actor.lora={rank: 4}", "algorithm.kl.loss_coef=0.1"])
    text = explain(config)
    assert "the reference is the model without adapters, no copy" in text
    assert re.search(r"lora +trains [\d.]+ k of [\d.]+ M parameters", text)
    arch = architecture_of(hf_config(TinyModelConfig()))
    trained = sum(spec.size for spec in adapter_tensors(model_tensors(arch), config.actor.lora.targets, 4))
    assert checkpoint_cost(arch, config.actor, 2).file_bytes == trained * 16
    assert "lora" not in explain(load_config(QUICKSTART, []))


def test_weights_of_the_same_shapes_are_told_apart(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    weights = {"a.weight": torch.randn(5, 3), "norm.weight": torch.ones(7), "tower.input_max": torch.tensor(3.0)}
    other = weights | {"norm.weight": torch.ones(7) + torch.eye(7)[6]}
    for name, values in {"one": weights, "same": weights, "other": other}.items():
        write_hf_folder(tmp_path / name, iter([values]), like=tmp_path, dtype=torch.bfloat16)
    prints = [HfFolder(tmp_path / name).fingerprint() for name in ("one", "same", "other")]
    assert prints[0] == prints[1] != prints[2]
