"""Kimi-Linear: layers of Kimi Delta Attention, their names and sizes, and what is refused."""

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig
from megagrpo.models.table import FAMILIES, architecture_of, model_problems, model_tensors, parameter_counts
from megagrpo.tools.bisect.compared_points import layer_points
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import layer_cost, stage_parameters
from megagrpo.tools.plan.work import model_work
from tests.experiments import QUICKSTART, engine_layout_problems, experiment

FULL = [4, 8, 12, 16, 20, 24, 27]
# of Kimi-Linear-48B-A3B: the report's sizes, and the defaults of transformers 5.24's class for this model
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 72, "vocab_size": 163840, "model_max_length": 1048576, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu", "mla_use_nope": True,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "linear_attn_config": {"kda_layers": [n for n in range(1, 28) if n not in FULL], "full_attn_layers": FULL,
                           "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


def linear(**changes: object) -> dict:
    return {"linear_attn_config": {**PUBLISHED["linear_attn_config"], **changes}}


def test_published_sizes():
    counts = parameter_counts(architecture_of(PUBLISHED))
    assert (round(counts.total / 1e9), round(counts.active / 1e9)) == (49, 3)


def test_three_layers_of_delta_attention_to_one_of_latent_attention():
    arch = architecture_of(PUBLISHED)
    assert [index + 1 for index in range(27) if arch.mixer(index) is arch.attention] == FULL
    assert arch.attention_layers == 7 and arch.routed_layers == list(range(1, 27)) and arch.max_positions == 1048576
    assert not arch.plain_rotary and not arch.takes_adapters
    names = {spec.name: spec for spec in model_tensors(arch)}

    def inside(layer: int) -> set[str]:
        prefix = f"model.layers.{layer}."
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    delta = {f"{name}_{part}.weight" for name in "qkv" for part in ("proj", "conv1d")}
    delta |= {f"{name}_proj.weight" for name in ("f_a", "f_b", "g_a", "g_b", "b", "o")}
    delta |= {"A_log", "dt_bias", "o_norm.weight"}
    mlp = {f"{name}_proj.weight" for name in ("gate", "up", "down")}
    assert inside(0) == norms | {f"self_attn.{name}" for name in delta} | {f"mlp.{name}" for name in mlp}
    routed = {name for name in inside(3) if ".experts.255." in name}
    latent = {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    assert routed == {f"block_sparse_moe.experts.255.{name}.weight" for name in ("w1", "w2", "w3")}
    assert {name for name in inside(3) if ".experts." not in name} == norms | {
        *(f"self_attn.{name}.weight" for name in latent),
        *(f"block_sparse_moe.shared_experts.{name}" for name in mlp),
        *(f"block_sparse_moe.gate.{name}" for name in ("weight", "e_score_correction_bias")),
    }
    assert names["model.layers.0.self_attn.A_log"].shape == (1, 1, 32, 1)
    kept = {name.rpartition(".")[2] for name, spec in names.items() if spec.dtype is not None}
    assert kept == {"A_log", "dt_bias"}  # SGLang's router has its bias in the engine's dtype
    whole = {name.split(".")[-2] for name, spec in names.items() if spec.whole and "layers.0." in name}
    assert {"f_a_proj", "g_a_proj", "o_norm"} < whole and not {"f_b_proj", "b_proj"} & whole


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"q_lora_rank": 1536}, "q_lora_rank 1536"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ({"attn_res_block_size": 12}, "attn_res_block_size 12"),
        ({"routed_expert_hidden_size": 3584}, "routed_expert_hidden_size 3584"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate True"),
        ({"hidden_act": "situ"}, "hidden_act 'situ'"),
        ({"moe_renormalize": False}, "moe_renormalize False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_experts_per_token": 1}, "num_experts_per_token 1"),
        ({"num_expert_group": 8, "topk_group": 8}, "topk_group 8 with num_experts_per_token 8"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling"),
        (linear(use_full_rank_gate=True), "linear_attn_config.use_full_rank_gate True"),
        (linear(gate_lower_bound=-5.0), "linear_attn_config.gate_lower_bound -5.0"),
        (linear(full_attn_layers=FULL[:-1]), "must have each of the layers 1 to 27 in one of them"),
        (linear(full_attn_layers=[], kda_layers=list(range(1, 28))), "neither be empty"),
        ({"linear_attn_config": None}, "linear_attn_config lacks num_heads, head_dim"),
        ({"linear_attn_config": {"num_heads": 32}}, "linear_attn_config lacks head_dim, short_conv_kernel_size"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict, named: str):
    [problem] = model_problems(PUBLISHED | changes)
    assert named in problem


def test_kimi_k3_is_refused_by_what_it_has_more():
    """Its text part is described as a kimi_linear model, whose options name the same."""
    published = {"model_type": "kimi_k3", "text_config": PUBLISHED | {"attn_res_block_size": 12}}
    [problem] = model_problems(published)
    assert problem.startswith("model_type 'kimi_k3' is not supported: ") and "attn_res_block_size" in problem


@pytest.mark.parametrize("key", [*FAMILIES["kimi_linear"].REQUIRED_KEYS])
def test_a_size_that_is_missing_is_named(key: str):
    own = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
    own |= {"n_shared_experts": "num_shared_experts", "n_group": "num_expert_group"}
    own |= {"norm_topk_prob": "moe_renormalize", "scoring_func": "moe_router_activation_func"}
    name = own.get(key, key)
    name = "model_max_length" if key == "max_position_embeddings" else name
    assert f"config.json lacks {name}" in model_problems({n: PUBLISHED[n] for n in PUBLISHED if n != name})


def test_drafts_adapters_replay_of_engines_and_cut_heads_are_refused():
    arch = architecture_of(PUBLISHED)
    [problem] = model_problems(PUBLISHED | {"num_nextn_predict_layers": 1}, draft=True)
    assert problem.startswith("actor.draft is not supported with a kimi_linear model")
    actor = load_config(QUICKSTART, ["actor.parallel={}", "actor.lora={rank: 4}"]).actor
    [problem] = layout_problems(arch, actor)
    assert problem.startswith("actor.lora is not supported with a kimi_linear model")
    wide = {"world_size": 64, "dtype": "bfloat16", "parallel": {"tp": 8, "cp": 8}}
    [problem] = layout_problems(arch, ActorConfig.model_validate(wide))
    assert "actor.parallel.tp x cp = 64 does not divide the model's linear_attn_config.num_heads = 32" in problem
    eighths = {"world_size": 8, "dtype": "bfloat16", "parallel": {"tp": 8}, "megatron": {"fp8": "e4m3"}}
    [problem] = layout_problems(arch, ActorConfig.model_validate(eighths))
    assert "with tp = 8 a rank has 1540 rows of a kimi_linear model's recurrent layers" in problem
    halves = eighths | {"parallel": {"tp": 2}}
    assert not layout_problems(arch, ActorConfig.model_validate(halves))
    [problem] = layout_problems(arch, ActorConfig.model_validate({"routing_replay": "rollout"}))
    assert "Kimi-Linear does not say which layer chose experts" in problem
    problems = engine_layout_problems(experiment(rollout={"quantization": "fp8", "dtype": "bfloat16"}).rollout, arch)
    assert any("not for models with Kimi Delta Attention" in each for each in problems)


def test_costs_of_layers_are_of_their_own_part():
    arch = architecture_of(PUBLISHED)
    actor = ActorConfig.model_validate({"world_size": 4, "dtype": "bfloat16", "parallel": {"tp": 2, "cp": 2}})
    delta, latent = (layer_cost(arch, actor, 32768, layer, 1.0) for layer in (2, 3))
    assert delta.pair_flops == 0 < latent.pair_flops
    tokens, values = 32768 / 2, 32 * 128 / 2
    # queries, keys, values, decays, gates, a beta a head, and the outputs back
    assert delta.sent["cp"] == tokens * (6 * values + 16) * 2 / 2
    # a rank's products of a token with the layer's matrices, the narrow ones shared over tensor-parallel ranks
    one = {"world_size": 1, "dtype": "bfloat16"}
    alone = layer_cost(arch, ActorConfig.model_validate(one), 1000, 2, 1.0)
    experts = layer_cost(arch, ActorConfig.model_validate(one), 1000, 3, 1.0).flops - latent_flops(arch)
    matrices = sum(
        spec.size for spec in model_tensors(arch) if "layers.2.self_attn." in spec.name and spec.kind == "matrix"
    )
    rule = 10 * 64 * 4096 + 6 * 4096 * 128
    assert alone.flops - experts == pytest.approx(1000 * (2 * matrices + rule), rel=1e-6)
    [stage] = stage_parameters(arch, ActorConfig.model_validate({"dtype": "bfloat16"}))
    whole = parameter_counts(arch)
    assert (stage.dense, stage.expert) == (whole.dense, whole.expert)


def latent_flops(arch) -> float:
    matrices = sum(
        spec.size for spec in model_tensors(arch) if "layers.3.self_attn." in spec.name and spec.kind == "matrix"
    )
    return 2 * 1000 * matrices


def test_states_and_latents_in_engines():
    """20 layers with a state of 32 x 128 x 128 float32 and 3 inputs of 12,288 channels; 7 with a latent of 576."""
    work = model_work(architecture_of(PUBLISHED))
    assert work.state_bytes(1) == 20 * (32 * 128 * 128 * 4 + 12288 * 3 * 2)
    assert work.state_bytes(8) * 8 == work.state_bytes(1)
    assert work.cache_bytes(8) == 7 * 576 * 2


def test_points_of_bisect_have_the_engines_names():
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="kimi_linear")))
    inside = [[point.engine.module.split(".", 3)[-1] for point in layer_points(arch, layer)[:-1]] for layer in (0, 3)]
    assert inside[0] == [
        *("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "post_attention_layernorm", "mlp")
    ]
    moe = "block_sparse_moe"
    assert inside[1][-4:] == [f"{moe}.gate", f"{moe}.topk", f"{moe}.topk", moe]


@pytest.mark.parametrize(
    ("optimizer", "refused"), [("optimizer_cpu_offload", True), ("use_precision_aware_optimizer", False)]
)
def test_float32_parameters_are_not_trained_on_the_host(optimizer: str, refused: bool):
    """A_log: Megatron's optimizer on the host ended with "can't optimize a non-leaf Tensor"."""
    config = experiment(actor={"dtype": "bfloat16", "optimizer": {"megatron": {optimizer: True}}})
    said = [text for text in check_against_model(config, PUBLISHED) if "trains some parameters in float32" in text]
    assert [text.endswith("take use_precision_aware_optimizer: true instead") for text in said] == [True] * refused
    dense = hf_config(TinyModelConfig(path="x", family="qwen3"))
    assert not any("trains some parameters in float32" in text for text in check_against_model(config, dense))
