"""Qwen3.5: sizes as published, refusals by name, names in files of vision-language models, costs of its layers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import layout_problems
from megagrpo.config.actor import ActorConfig
from megagrpo.config.load import load_config
from megagrpo.models.folder import Model
from megagrpo.models.table import (
    FAMILIES,
    architecture_of,
    attention_length,
    exported_config,
    is_left_out,
    left_out,
    model_problems,
    model_tensors,
    parameter_counts,
)
from megagrpo.system.torchvision import prepare_torchvision
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import layer_cost, stage_parameters
from megagrpo.weights.hf_export import untrained_tensors
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.experiments import QUICKSTART, ROOT

FOLDER = ROOT / "configs" / "models" / "Qwen3.5-397B-A17B"
LARGE = json.loads((FOLDER / "config.json").read_text())

TINY_TEXT = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": 99,
    "max_position_embeddings": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TINY_TOWER = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16,
}  # fmt: skip


def published(**changes: object) -> dict:
    """config.json with other values in its text part."""
    return LARGE | {"text_config": LARGE["text_config"] | changes}


FEWER = {"num_experts": 256, "num_experts_per_tok": 8}
A122 = published(hidden_size=3072, num_hidden_layers=48, **FEWER)
A35 = published(
    hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, linear_num_value_heads=32,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, **FEWER,
)  # fmt: skip


# the values that transformers' class has by default, which are of the 80B-A3B
NEXT = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hf", "total", "active"), [(NEXT, 79.7, 3.6), (LARGE, 396.3, 16.3), (A122, 122.1, 9.0), (A35, 34.7, 2.9)]
)
def test_published_sizes(hf: dict, total: float, active: float):
    """Without vision tower and multi-token-prediction layer."""
    counts = parameter_counts(architecture_of(hf))
    assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 59 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 59}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"linear_num_value_heads": 40}, "linear_num_key_heads"),
        ({"head_dim": 252}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict, named: str):
    [problem] = model_problems(published(**changes))
    assert named in problem


@pytest.mark.parametrize("key", FAMILIES["qwen3_5_moe"].REQUIRED_KEYS)
def test_a_size_that_is_missing_is_named(key: str):
    text = {name: value for name, value in LARGE["text_config"].items() if name != key}
    assert f"config.json lacks {key}" in model_problems(LARGE | {"text_config": text})


def test_a_place_of_theta_that_engines_do_not_read_is_refused():
    """SGLang's Qwen3NextConfig has no rope_parameters, which transformers 5 writes, and would turn by 10,000."""
    plain = {"rope_type": "default", "rope_theta": 1e7}
    [problem] = model_problems(NEXT | {"rope_parameters": plain})
    assert problem.startswith('config.json must have "rope_theta": 1e+07, as in rope_parameters')
    for beside in ({"rope_theta": 1e7, "rope_parameters": plain}, {"rope_theta": 1e7}):
        assert model_problems(NEXT | beside) == [] and architecture_of(NEXT | beside).attention.rotary.theta == 1e7


def test_drafts_and_adapters_are_refused():
    [problem] = model_problems(LARGE, draft=True)
    assert problem.startswith("actor.draft is not supported with a qwen3_5_moe model")
    actor = load_config(QUICKSTART, ["actor.parallel={}", "actor.lora={rank: 4}"]).actor
    [problem] = layout_problems(architecture_of(LARGE), actor)
    assert problem.startswith("actor.lora is not supported with a qwen3_5_moe model")


def test_a_gate_that_is_read_outside_its_forward_is_not_gathered_in_it():
    arch, overlap = architecture_of(LARGE), {"megatron": {"moe_shared_expert_overlap": True}}
    [problem] = layout_problems(arch, ActorConfig.model_validate(overlap))
    assert "reads the gate of a qwen3_5_moe model's shared experts outside the forward" in problem
    assert layout_problems(arch, ActorConfig.model_validate(overlap | {"ddp": {"overlap_param_gather": False}})) == []


def test_heads_are_divided_by_tensor_and_context_ranks():
    arch = architecture_of(LARGE)
    many = {"world_size": 32, "dtype": "bfloat16", "parallel": {"tp": 4, "cp": 8}}
    [problem] = layout_problems(arch, ActorConfig.model_validate(many))
    assert problem == (
        "actor.parallel.tp x cp = 32 does not divide the model's linear_num_key_heads = 16; it may be 16"
    )
    many |= {"parallel": {"tp": 4, "cp": 4, "ep": 2}}
    assert layout_problems(arch, ActorConfig.model_validate(many)) == []


def test_the_text_part_of_a_vision_language_model():
    arch = architecture_of(LARGE)
    names = [spec.name for spec in model_tensors(arch)]
    assert all(name.startswith("model.language_model.") for name in names[:-1])
    assert names[-1] == "lm_head.weight"
    experts = {spec.name: spec.shape for spec in model_tensors(arch) if spec.expert}
    prefix = "model.language_model.layers.59.mlp.experts."
    assert experts[prefix + "gate_up_proj"] == (512, 2048, 4096)
    assert experts[prefix + "down_proj"] == (512, 4096, 1024) and len(experts) == 120
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"):
        assert is_left_out(arch, name)
    assert not any(is_left_out(arch, name) for name in names)
    assert [text.split(":")[0] for text in left_out(LARGE)] == ["model.visual.*", "mtp.*"]
    assert [text.split(":")[0] for text in left_out(NEXT)] == ["mtp.*"]
    assert exported_config(LARGE) == LARGE
    assert not Model.read(FOLDER).sees_images


def test_decays_are_float32_and_gates_whole():
    tensors = list(model_tensors(architecture_of(LARGE)))
    kept = {spec.name for spec in tensors if spec.dtype is not None}
    assert len(kept) == 45 and all(name.endswith(".linear_attn.A_log") for name in kept)
    of_layers = (spec for spec in tensors if spec.whole and ".layers." in spec.name)
    whole = {spec.name.split(".", 4)[4] for spec in of_layers}
    assert whole == {
        *("input_layernorm.weight", "post_attention_layernorm.weight", "linear_attn.norm.weight"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        *("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    }


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_text"])
def test_tiny_models_have_both_kinds_of_layers(family: str):
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family=family)))
    assert [arch.mixer(index) is arch.recurrent for index in range(4)] == [True, True, True, False]
    assert arch.is_moe == family.startswith("qwen3_5_moe") == bool(arch.experts and arch.experts.shared_gate)


def test_costs_of_both_kinds_of_layers():
    """Attention's grow with pairs of tokens in every fourth layer only; a gated delta net sends its
    heads once, attention its keys and values to every context rank."""
    arch = architecture_of(LARGE)
    settings = {"world_size": 32, "dtype": "bfloat16", "parallel": {"tp": 4, "cp": 4, "ep": 8}}
    actor = ActorConfig.model_validate(settings)
    linear, full = (layer_cost(arch, actor, 32768, layer, 1.0) for layer in (58, 59))
    assert linear.pair_flops == 0 < full.pair_flops
    assert linear.flops > full.flops
    tokens, heads = 32768 / 4, 64 / 4
    exchanged = tokens * (12288 / 4 + 2 * heads * 128 + 2 * heads) * 2 * 3 / 4
    assert linear.sent["cp"] == exchanged
    assert linear.sent["tp"] == full.sent["tp"] and linear.sent["ep"] == full.sent["ep"]
    whole = parameter_counts(arch)
    alone = ActorConfig.model_validate({"dtype": "bfloat16"})
    [stage] = stage_parameters(arch, alone)
    assert (stage.dense, stage.expert) == (whole.dense, whole.expert)
    short = architecture_of(published(layer_types=["full_attention"] * 60, full_attention_interval=1))
    assert attention_length(arch) == pytest.approx(4 * attention_length(short), rel=0.05)


def test_an_export_has_every_tensor_that_its_config_promises(tmp_path, monkeypatch):
    """Of transformers' vision-language model: the trained text beside the tower and the layers that speculate."""
    prepare_torchvision()
    text = TINY_TEXT | {"num_hidden_layers": 4, "mtp_num_hidden_layers": 1}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=TINY_TOWER)
    transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2, 3)}, file, metadata={"format": "pt"})
    model, whole, stored = Model.read(tmp_path / "whole"), HfFolder(tmp_path / "whole"), HfFolder.__getitem__
    trained = {name: tensor + 1 for name, tensor in whole.items() if not is_left_out(model.arch, name)}
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in trained)
    read = []
    monkeypatch.setattr(HfFolder, "__getitem__", lambda folder, name: read.append(name) or stored(folder, name))
    shards = [trained, *untrained_tensors(model.folder)]
    assert not trained.keys() & set(read), "in a folder in FP8 it would multiply every weight with its scale"
    write_hf_folder(tmp_path / "out", iter(shards), model.folder, torch.float32)
    exported = HfFolder(tmp_path / "out")
    assert exported.keys() == whole.keys() and torch.equal(exported["mtp.fc.weight"], torch.ones(2, 3))
    _, loaded = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["mismatched_keys"]
    tower = [name for name in whole if name.startswith("model.visual.")]
    assert tower and all(torch.equal(exported[name], whole[name]) for name in tower)
