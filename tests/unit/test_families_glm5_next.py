"""GLM-5.3-Flash: its sizes and names as published, what a layer costs, and what is refused."""

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems
from megagrpo.config.schema import ActorConfig
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
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import layer_cost, stage_parameters
from megagrpo.tools.plan.work import model_work
from tests.experiments import engine_layout_problems, experiment

FULL = [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43]
TEXT = {  # as published, without keys that say nothing of the text
    "attention_bias": False, "first_k_dense_replace": 3, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "head_dim": 0, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_kpool": 4,
    "index_kpool_always_select_tail": True, "index_kpool_compress": True, "index_n_heads": 32,
    "index_share_for_mtp_iteration": True, "index_topk": 2048, "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 45, "intermediate_size": 12288, "kv_lora_rank": 512,
    "layer_types": ["deepseek_sparse_attention" if n in FULL else "linear_attention" for n in range(45)],
    "linear_attn_config": {"full_attn_layers": FULL, "gate_lower_bound": -5.0, "head_dim": 128,
                           "kda_layers": [n for n in range(45) if n not in FULL], "num_heads": 64,
                           "short_conv_kernel_size": 4},
    "max_position_embeddings": 1048576, "mhc": True, "mla_use_nope": True,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "model_type": "glm5_next_text", "moe_intermediate_size": 2048,
    "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 288, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 45,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_head_dim": 256,
    "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "tie_word_embeddings": False,
    "text_config": TEXT, "vision_config": {"depth": 24},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
# of the bfloat16 release: 38,770 tensors in 642,646,653,816 bytes, of which the tower has 347 (of 563,627,008 numbers)
# and layer 45 has 889
TENSORS, BYTES = 38_770 - 347 - 889, 642_646_653_816 - 2 * 563_627_008
ON_GPUS = {"actor": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}


def text(**changes: object) -> dict:
    return FLASH | {"text_config": TEXT | changes}


def linear(**changes: object) -> dict:
    return text(linear_attn_config=TEXT["linear_attn_config"] | changes)


def test_published_sizes():
    """Published as 320B, of which a token meets 18B, with the tower and the prediction layer."""
    arch = architecture_of(FLASH)
    counts = parameter_counts(arch)
    assert (counts.total, round(counts.active / 1e9, 1)) == (313_326_811_966, 16.7)
    [stage] = stage_parameters(arch, ActorConfig.model_validate({"dtype": "bfloat16"}))
    assert (stage.dense, stage.expert) == (counts.dense, counts.expert)
    specs = list(model_tensors(arch))
    kept = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")  # published in float32
    held = sum(spec.size * (4 if spec.name.endswith(kept) else 2) for spec in specs)
    hidden = 4096
    attention = 1536 * (hidden + 1 + 64 * 256) + 512 * (hidden + 1 + 64 * 512) + hidden * 64 * 256
    indexer = 32 * 128 * 1536 + (2 * 128 + 32) * hidden + 2 * 128 + 4 * 128
    experts = 288 * hidden + 289 * 3 * 2048 * hidden
    predicting = 2 * (attention + indexer + experts + 2 * hidden * hidden + 5 * hidden) + 4 * 288
    assert len(specs) == TENSORS and held + predicting == BYTES


def test_layers_have_what_their_place_gives_them():
    arch = architecture_of(FLASH)
    assert [index for index in range(45) if arch.mixer(index) is arch.attention] == FULL
    assert arch.routed_layers == list(range(3, 45)) and arch.num_streams == 4 and not arch.plain_rotary
    assert not arch.takes_adapters
    names = {spec.name: spec for spec in model_tensors(arch)}

    def inside(layer: int) -> set[str]:
        prefix = f"model.language_model.layers.{layer}."
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix) and ".experts." not in name}

    common = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    common |= {f"hc_{place}_{part}" for place in ("attn", "ffn") for part in ("fn", "base", "scale")}
    delta = {f"{name}_{part}.weight" for name in "qkv" for part in ("proj", "conv1d")}
    delta |= {f"{name}_proj.weight" for name in ("f_a", "f_b", "g_a", "g_b", "b", "o")}
    delta |= {"A_log", "dt_bias", "o_norm.weight"}
    mlp = {f"{name}_proj.weight" for name in ("gate", "up", "down")}
    assert inside(0) == common | {f"self_attn.{name}" for name in delta} | {f"mlp.{name}" for name in mlp}
    sparse = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    sparse |= {"indexer.wq_b", "indexer.wk", "indexer.weights_proj", "indexer.k_norm"}
    assert inside(3) == common | {
        *(f"self_attn.{name}.weight" for name in sparse),
        *(f"self_attn.indexer.{name}" for name in ("k_norm.bias", "index_kpool_compress_gate")),
        "self_attn.indexer.index_kpool_compress_ape",
        *(f"mlp.shared_experts.{name}" for name in mlp),
        *(f"mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")),
    }
    assert names["model.language_model.layers.0.self_attn.A_log"].shape == (64,)
    others = {name for name in names if ".layers." not in name}
    assert others == {"model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"}
    frozen = {name for name, spec in names.items() if not spec.trained}
    assert frozen == {name for name in names if ".indexer." in name or name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (text(mla_use_nope=False), "mla_use_nope False"),
        (text(qk_rope_head_dim=64), "qk_rope_head_dim 64"),
        (text(mhc=False), "mhc False"),
        (text(hc_mult=1), "hc_mult must be at least 2"),
        (text(index_kpool=1), "index_kpool must be at least 2, and divide index_topk"),
        (text(index_topk=2046), "index_kpool must be at least 2, and divide index_topk"),
        (text(index_kpool_compress=False), "index_kpool_compress False"),
        (text(index_kpool_always_select_tail=False), "index_kpool_always_select_tail False"),
        (text(indexer_types=["full", "shared"] * 22 + ["full"]), "indexer_types is not what"),
        (text(index_k_norm_type="rms"), "index_k_norm_type 'rms'"),
        (text(q_lora_rank=None), "q_lora_rank null"),
        (text(swiglu_limit=None), "swiglu_limit must be above 0"),
        (text(scoring_func="softmax"), "scoring_func 'softmax'"),
        (text(moe_layer_freq=2), "moe_layer_freq 2"),
        (text(n_group=8, topk_group=8), "topk_group 8 with num_experts_per_tok 8"),
        (text(mlp_layer_types=["sparse"] * 45), "mlp_layer_types must begin with"),
        (text(rope_scaling={"type": "yarn", "factor": 4.0}), "rope scaling"),
        (linear(gate_lower_bound=None), "linear_attn_config must have gate_lower_bound"),
        (linear(full_attn_layers=FULL[:-1]), "must have each of the layers 0 to 44 in one of them"),
    ],
)
def test_what_would_be_wrong_is_refused(changed: dict, named: str):
    [problem] = model_problems(changed)
    assert named in problem


@pytest.mark.parametrize("key", FAMILIES["glm5_next"].REQUIRED_KEYS)
def test_a_size_that_is_missing_is_named(key: str):
    given = FLASH | {"text_config": {name: TEXT[name] for name in TEXT if name != key}}
    assert f"config.json lacks {key}" in model_problems(given)


def test_tower_and_prediction_layer_are_left_out_and_said():
    arch = architecture_of(FLASH)
    tower, layer = left_out(FLASH)
    assert tower.startswith("model.visual.*: only texts are trained, exports have the model's own")
    assert "(model.language_model.layers.45), which only speculate" in layer
    for name in ("model.visual.blocks.0.norm1.weight", "model.language_model.layers.45.eh_proj.weight"):
        assert is_left_out(arch, name)
    assert not is_left_out(arch, "model.language_model.layers.44.hc_ffn_fn")
    exported = exported_config(FLASH)
    assert exported == {
        **{key: value for key, value in FLASH.items() if key != "quantization_config"},
        "text_config": TEXT | {"num_nextn_predict_layers": 0},
        "dtype": "bfloat16",
    }
    [problem] = model_problems(FLASH, draft=True)
    assert problem.startswith("actor.draft is not supported with a glm5_next model")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"megatron": {"moe_shared_expert_overlap": True}}, "leaves out the glm5_next model's swiglu_limit"),
        ({"megatron": {"bias_activation_fusion": True}}, "layers of a glm5_next model are computed with False"),
        ({"megatron": {"use_te_activation_func": True}}, "actor.megatron.use_te_activation_func: that"),
        ({"lora": {"rank": 4}}, "actor.lora is not supported with a glm5_next model"),
        ({"world_size": 128, "parallel": {"tp": 8, "cp": 16}}, "tp x cp = 128 does not divide"),
        ({"parallel": {"cp": 2, "dynamic_context": True}, "world_size": 2}, "actor.parallel.dynamic_context is not"),
    ],
)
def test_settings_that_its_layers_do_not_know_are_refused(settings: dict, named: str):
    problems = layout_problems(architecture_of(FLASH), ActorConfig.model_validate(settings))
    assert any(named in problem for problem in problems), problems


def test_engines_without_a_gpu_and_in_fp8_are_refused():
    on_cpu = check_against_model(experiment(), FLASH)
    assert any("TileLang's kernels only" in problem for problem in on_cpu)
    on_gpus = check_against_model(experiment(**ON_GPUS), FLASH)
    assert not any("TileLang" in problem for problem in on_gpus)
    fp8 = experiment(rollout={"quantization": "fp8", "dtype": "bfloat16"}).rollout
    [problem] = engine_layout_problems(fp8, architecture_of(FLASH))
    assert "no test compares GLM-5.3-Flash in FP8" in problem


@pytest.mark.parametrize("actor", [{"transformer_engine": False}, {"megatron": {"dsa_kernel_backend": "none"}}])
def test_long_samples_need_no_kernel_of_megatrons(actor: dict):
    """Masks are those of a block of queries, whatever layers are built of."""
    own = experiment(**(ON_GPUS | {"actor": ON_GPUS["actor"] | actor}), sampling={"max_response_tokens": 8192})
    assert not any("are sparse" in problem for problem in check_against_model(own, FLASH))


def test_what_is_computed_and_kept():
    """34 layers with a state of 64 x 128 x 128 float32; 11 with a latent of 512 and an indexer's key for each token."""
    arch = architecture_of(FLASH)
    work = model_work(arch)
    assert work.state_bytes(1) == 34 * (64 * 128 * 128 * 4 + 3 * 8192 * 3 * 2)
    assert work.cache_bytes(8) == 11 * 512 * 2 + 11 * (128 + 4)
    actor = ActorConfig.model_validate({"world_size": 8, "dtype": "bfloat16", "parallel": {"tp": 2, "cp": 2, "ep": 4}})
    delta, sparse = (layer_cost(arch, actor, 8192, layer, 1.0) for layer in (4, 7))
    assert delta.pair_flops == 0 and sparse.chosen_flops == 0
    assert sparse.pair_flops == 4 * 32 * 256 + arch.attention.index_flops  # every key, and pools of 4
    assert arch.attention.index_flops == 2 * 32 * 128 / 4
    pair = 11 * (4 * 64 * 256 + arch.attention.index_flops) / 2  # half of the keys are before a query
    assert attention_length(arch) == pytest.approx(2 * parameter_counts(arch).active / pair, rel=0.1)


def test_tiny_models_have_every_kind_of_layer():
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="glm5_next")))
    assert arch.recurrent.layers == (True, True, True, False) and arch.indexer.pool == 2
    assert arch.recurrent.bound == -1.0 and arch.routed.limit == 2.0 and not arch.streams.has_head
