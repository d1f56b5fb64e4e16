"""Nemotron-3: layers of one part each, their names and sizes, and what is refused."""

import json

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig
from megagrpo.models.table import (
    FAMILIES,
    architecture_of,
    exported_config,
    is_left_out,
    left_out,
    model_problems,
    model_tensors,
    parameter_counts,
)
from megagrpo.tools.bisect.compared_points import layer_points, residual_points
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import layer_cost, stage_parameters
from megagrpo.tools.plan.work import model_work
from tests.experiments import QUICKSTART, ROOT, engine_layout_problems, experiment

FOLDER = ROOT / "configs" / "models" / "Nemotron-3-Super-120B-A12B"
SUPER = json.loads((FOLDER / "config.json").read_text())
NANO = SUPER | {
    "hidden_size": 2688, "num_hidden_layers": 52, "mamba_num_heads": 64, "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
del NANO["moe_latent_size"], NANO["num_nextn_predict_layers"]
# all that the headers of its files count, without 2,942,324,736 of mtp.* and the 512 float32 of that layer's router
SUPER_PARAMETERS = 123_611_033_088 - 2_942_324_736 - 512


def test_published_sizes():
    counts = parameter_counts(architecture_of(SUPER))
    assert (counts.total, round(counts.active / 1e9, 1)) == (SUPER_PARAMETERS, 12.2)
    small = parameter_counts(architecture_of(NANO))
    assert (round(small.total / 1e9, 1), round(small.active / 1e9, 1)) == (31.6, 3.2)
    # as Nemotron-H-4B, which says attention_head_dim: engines and transformers take their default
    assert architecture_of({key: NANO[key] for key in NANO if key != "head_dim"}).attention.head_dim == 128


def test_layers_are_of_one_part_each():
    arch = architecture_of(SUPER)
    assert (arch.num_layers, arch.attention_layers, arch.expert_layers) == (88, 8, 40)
    assert arch.routed_layers[:5] == [1, 3, 5, 8, 10] and not arch.has_dense_layers
    assert [arch.mixer(index) for index in (0, 1, 7)] == [arch.recurrent, None, arch.attention]
    assert not arch.plain_rotary and not arch.takes_adapters
    names = {spec.name: spec for spec in model_tensors(arch)}
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} < names.keys()
    parts = {
        0: {f"{name}.weight" for name in ("in_proj", "conv1d", "norm", "out_proj")}
        | {"conv1d.bias", "A_log", "D", "dt_bias"},
        7: {f"{name}_proj.weight" for name in "qkvo"},
        1: {"gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight"}
        | {f"{experts}.{name}_proj.weight" for experts in ("shared_experts", "experts.511") for name in ("up", "down")},
    }
    for layer, inside in parts.items():
        prefix = f"backbone.layers.{layer}."
        found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        found = {name for name in found if ".experts." not in name or ".511." in name}
        assert found == {"norm.weight", *(f"mixer.{name}" for name in inside)}
    assert names["backbone.layers.1.mixer.experts.0.up_proj.weight"].shape == (2688, 1024)
    assert names["backbone.layers.0.mixer.in_proj.weight"].shape == (2 * 8192 + 2 * 1024 + 128, 4096)
    kept = {name.rpartition(".")[2] for name, spec in names.items() if spec.dtype is not None}
    assert kept == {"A_log", "e_score_correction_bias"}


def test_layers_by_their_words_are_those_of_the_pattern():
    """As transformers 5 writes config.json: without a pattern, and with an object for infinity."""
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    written = SUPER | {"layers_block_type": [words[letter] for letter in SUPER["hybrid_override_pattern"]]}
    del written["hybrid_override_pattern"], written["num_hidden_layers"]
    written["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    assert architecture_of(written) == architecture_of(SUPER)
    both = written | {"hybrid_override_pattern": "M*"}  # engines and transformers read the words then
    assert architecture_of(both) == architecture_of(SUPER)


def test_layers_that_only_speculate_stay_in_an_export_under_their_own_names():
    arch = architecture_of(SUPER)
    assert is_left_out(arch, "mtp.layers.0.norm.weight")
    [text] = left_out(SUPER)
    assert text.startswith("mtp.*: multi-token-prediction") and text.endswith("exports have the model's own")
    assert exported_config(SUPER) == SUPER


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_override_pattern": "ME*X"}, "has X; supported: M, *, E, -"),
        ({"hybrid_override_pattern": ""}, "has no layer"),
        ({"hybrid_override_pattern": "MEME"}, "without attention"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ({"use_bias": True}, "use_bias True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias True"),
        ({"use_conv_bias": False}, "use_conv_bias False"),
        ({"residual_in_fp32": True}, "residual_in_fp32 True"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"n_group": 8, "topk_group": 4}, "topk_group 4"),
        ({"intermediate_size": [2688, 5376]}, "intermediate_size must be one number"),
        ({"n_groups": 4}, "n_groups is 4, but SGLang would compute with 8"),
        ({"n_groups": 48, "mamba_n_groups": 48}, "n_groups must divide mamba_num_heads"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict, named: str):
    [problem] = model_problems(SUPER | changes)
    assert named in problem


@pytest.mark.parametrize("key", [*FAMILIES["nemotron_h"].REQUIRED_KEYS, "n_routed_experts", "moe_intermediate_size"])
def test_a_size_that_is_missing_is_named(key: str):
    assert f"config.json lacks {key}" in model_problems({name: SUPER[name] for name in SUPER if name != key})


def test_drafts_adapters_replay_of_engines_and_cut_groups_are_refused():
    arch = architecture_of(SUPER)
    [problem] = model_problems(SUPER, draft=True)
    assert problem.startswith("actor.draft is not supported with a nemotron_h model")
    actor = load_config(QUICKSTART, ["actor.parallel={}", "actor.lora={rank: 4}"]).actor
    [problem] = layout_problems(arch, actor)
    assert problem.startswith("actor.lora is not supported with a nemotron_h model")
    wide = {"world_size": 16, "dtype": "bfloat16", "parallel": {"tp": 4, "cp": 4}}
    [problem] = layout_problems(arch, ActorConfig.model_validate(wide))
    assert problem == "actor.parallel.tp x cp = 16 does not divide the model's n_groups = 8; it may be 8"
    [problem] = layout_problems(arch, ActorConfig.model_validate({"routing_replay": "rollout"}))
    assert "Nemotron-H does not say which layer chose experts" in problem
    overlap = ActorConfig.model_validate({"megatron": {"moe_shared_expert_overlap": True}})
    [problem] = layout_problems(arch, overlap)
    assert problem.startswith("actor.megatron.moe_shared_expert_overlap: Megatron refuses it")
    assert not layout_problems(architecture_of(NANO), overlap)
    problems = engine_layout_problems(experiment(rollout={"tp": 16}).rollout, arch)
    assert any("tp = 16 does not divide the model's n_groups = 8" in each for each in problems)


@pytest.mark.parametrize("transport", ["broadcast", "disk", "reshard", "ipc"])
def test_decays_that_an_engines_loader_computes_need_a_transport_that_verifies_them(transport: str):
    config = experiment(model={"path": str(FOLDER)}, weights={"transport": transport})
    said = [text for text in check_against_model(config, SUPER) if "Mamba-2 layers" in text]
    assert len(said) == (transport in ("broadcast", "disk"))


def test_costs_of_layers_are_of_their_own_part():
    arch = architecture_of(SUPER)
    settings = {"world_size": 32, "dtype": "bfloat16", "parallel": {"tp": 4, "cp": 2, "ep": 8}}
    actor = ActorConfig.model_validate(settings)
    mamba, experts, attention = (layer_cost(arch, actor, 32768, layer, 1.0) for layer in (0, 1, 7))
    assert mamba.pair_flops == experts.pair_flops == 0 < attention.pair_flops
    assert experts.sent["ep"] > 0 and not mamba.sent.get("ep") and not attention.sent.get("ep")
    tokens, groups = 32768 / 2, 8 / 4
    rows = groups * (16 * 64 * 2 + 2 * 128 + 16)
    assert mamba.sent["cp"] == tokens * (rows + groups * 16 * 64) * 2 / 2
    # what a token sends to an expert is of the latent width
    assert experts.sent["ep"] == 2 * tokens / 4 * 22 * 1024 * 2 * 7 / 8
    whole = parameter_counts(arch)
    [stage] = stage_parameters(arch, ActorConfig.model_validate({"dtype": "bfloat16"}))
    assert (stage.dense, stage.expert) == (whole.dense, whole.expert)


def test_states_and_keys_in_engines():
    """40 layers with a state of 128 x 64 x 128 float32 and 3 inputs of 10,240 channels; 8 with two heads of 128."""
    work = model_work(architecture_of(SUPER))
    assert work.state_bytes(1) == 40 * (128 * 64 * 128 * 4 + 10240 * 3 * 2)
    assert work.state_bytes(8) * 8 == work.state_bytes(1)
    assert work.cache_bytes(1) == 8 * 2 * 2 * 128 * 2


def test_what_every_rank_of_an_engine_holds_whole():
    """Routers and projections into the latent space of the 40 layers that have them, and norms."""
    work = model_work(architecture_of(SUPER))
    assert work.whole * work.layers == pytest.approx(40 * (512 + 512 * 4096 + 2 * 1024 * 4096) + 88 * 4096)


def test_tiny_models_have_every_kind_of_layer():
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="nemotron_h")))
    assert arch.parts == ("mamba", "moe", "attention", "moe") and arch.routed.latent_size
    assert arch.routed_layers == [1, 3]


def test_points_of_bisect_have_the_engines_names():
    """Layers of one part: no residual stream between parts, and one norm before each."""
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="nemotron_h")))
    engine = {point.name: point.engine.module for point in residual_points(arch)}
    assert engine["embedding"] == "model.embed_tokens" and engine["final_norm"] == "model.norm_f"
    assert engine["layers.0.output"] == "model.layers.1.norm" and engine["layers.3.output"] == "model.norm_f"
    assert not any(name.endswith("after_attention") for name in engine)
    inside = [[point.engine.module.split(".", 3)[3] for point in layer_points(arch, layer)[:-1]] for layer in range(3)]
    assert inside[0] == ["norm", "mixer.out_proj"]
    assert inside[1] == ["norm", "mixer.gate", "mixer.topk", "mixer.topk", "mixer"]
    assert inside[2] == ["norm", "mixer.qkv_proj", *["mixer.attn"] * 3, "mixer.o_proj"]
