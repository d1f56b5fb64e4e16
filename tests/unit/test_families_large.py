"""Mixtral, GLM-4.5, GLM-5, DeepSeek-V3 and V3.2, Kimi-K2, Moonlight: published sizes, refusals by name, what is
left out."""

import json
from dataclasses import replace

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import layout_problems
from megagrpo.config.actor import ActorConfig
from megagrpo.config.load import load_config
from megagrpo.models.config_json import Rotary, text_part
from megagrpo.models.table import (
    architecture_of,
    attention_length,
    exported_config,
    is_left_out,
    left_out,
    model_problems,
    model_tensors,
    parameter_counts,
    read_description,
)
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.explain import explain
from tests.experiments import QUICKSTART, ROOT, python


def described(name: str) -> dict:
    """config.json as it was published."""
    return text_part(read_description(ROOT / "configs" / "models" / name / "config.json"))


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1e6,
}  # fmt: skip
PARAMETERS = {  # in billions: all, and active without the input embedding
    "Qwen3-30B-A3B": (30.5, 3.0),
    "Qwen3-235B-A22B": (235.1, 21.6),
    "GLM-4.5": (352.8, 32.9),
    "GLM-4.5-Air": (106.9, 12.8),
    "DeepSeek-V3-0324": (671.0, 36.6),
    "Kimi-K2-Instruct": (1026.4, 31.7),
    "Moonlight-16B-A3B": (16.0, 2.6),
    "Mixtral-8x7B": (46.7, 12.7),
    "MiniMax-M2": (228.7, 10.4),
    "Kimi-K2.5": (1026.4, 31.7),
    "GLM-5": (743.9, 40.8),
    "GLM-4.7-Flash": (29.9, 3.6),
}
PUBLISHED = {name: MIXTRAL if name == "Mixtral-8x7B" else described(name) for name in PARAMETERS}
V3, K2, MOONLIGHT = (PUBLISHED[name] for name in ("DeepSeek-V3-0324", "Kimi-K2-Instruct", "Moonlight-16B-A3B"))
GLM, AIR, YARN = PUBLISHED["GLM-4.5"], PUBLISHED["GLM-4.5-Air"], V3["rope_scaling"]
M2, K25 = PUBLISHED["MiniMax-M2"], PUBLISHED["Kimi-K2.5"]
GLM5 = PUBLISHED["GLM-5"]
# its config.json is V3's with these
V32 = V3 | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128}
V32 |= {"index_topk": 2048}
# releases with the config.json of another, by other numbers or the same; GLM-5.2's choices of keys are shared
_SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
_DENSE_35 = {
    "model_type": "qwen3_5", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
}  # fmt: skip
_SMALL_35 = {
    "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16, "linear_num_value_heads": 32,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN35 = described("Qwen3.5-397B-A17B")
RENAMED = [  # name, config.json, billions: all of the text part, and active
    ("Qwen3.6-35B-A3B", QWEN35 | _SMALL_35, 34.7, 2.9),
    ("Qwen3.8-27B", QWEN35 | _DENSE_35, 26.9, 25.6),
    ("GLM-5.3", GLM5 | _SHARED, 743.4, 40.3),
    ("Kimi-K2.6", K25, 1026.4, 31.7),
]
# config.json, what of it would be computed wrongly, what names it
REFUSED = [
    (V3, {"scoring_func": "softmax"}, "scoring_func"),
    (V3, {"topk_method": "greedy"}, "topk_method"),
    (V3, {"norm_topk_prob": False}, "norm_topk_prob"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (V3, {"rope_interleave": False}, "rope_interleave"),
    (V3, {"topk_group": 2}, "topk_group"),
    (V3, {"n_group": 7}, "n_group"),
    (V3, {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    (V3, {"first_k_dense_replace": 61}, "first_k_dense_replace"),
    (V3, {"attention_bias": True}, "attention_bias"),
    (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
    (V3, {"rope_scaling": YARN | {"type": "linear"}}, "rope scaling"),
    (V3, {"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor"),
    *(
        (V3, {"rope_scaling": {k: v for k, v in YARN.items() if k != key}}, key)
        for key in sorted(YARN.keys() - {"type"})
    ),
    *((hf, {"moe_layer_freq": None}, 'lacks "moe_layer_freq": 1, which engines read') for hf in (V3, K2)),
    # with it alone an engine would end at the next key
    *((hf, {"topk_method": None}, "lacks \"topk_method\": 'noaux_tc', which") for hf in (V3, V32, GLM5, K25)),
    (V3, {"scoring_func": None}, "lacks \"scoring_func\": 'sigmoid', which engines read"),
    (GLM, {"rope_scaling": YARN}, "yarn"),
    (GLM, {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
    (GLM, {"partial_rotary_factor": 0.3}, "partial_rotary_factor"),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob"),
    *((GLM, {key: None}, f"lacks {key}") for key in ("n_group", "first_k_dense_replace", "routed_scaling_factor")),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window 4096"),
    (K25, {"scoring_func": "softmax"}, "scoring_func"),
    (M2, {"use_qk_norm": False}, "use_qk_norm"),
    (M2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
    (M2, {"scoring_func": "softmax"}, "scoring_func"),
    (M2, {"use_routing_bias": False}, "use_routing_bias"),
    (M2, {"rotary_dim": 130}, "rotary_dim 130"),
    (M2, {"partial_rotary_factor": 1.0}, "transformers reads the one, engines the other"),
    (M2, {"attn_type_list": [1] * 61 + [0]}, "attn_type_list"),
    (M2, {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
    (M2, {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
    (M2, {"rope_scaling": YARN}, "yarn"),
    # what transformers 5 does not write
    *((M2, {key: None}, f"lacks {key}") for key in ("rotary_dim", "use_qk_norm", "use_routing_bias")),
    (GLM5, {"index_topk_pattern": "FS" * 39}, "index_topk_pattern 'FSFS"),
    (GLM5, {"indexer_types": ["full", "shared"] * 39}, "not what index_topk_freq 1 and"),
    (GLM5, {"index_kpool": 4}, "index_kpool 4"),
    (GLM5, {"q_lora_rank": None}, "lacks q_lora_rank"),
    (GLM5, {"index_head_dim": 32}, "index_head_dim 32 is less than qk_rope_head_dim 64"),
    (GLM5, {"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types"),
    (V32, {"index_topk": None}, "lacks index_topk"),
]


# Megatron's modules of a rank that holds every layer and one expert of each, on the meta device in a pretended world
COUNT = """
import json, sys
from megagrpo.actor.host import prepare_host
prepare_host()
import torch
from megatron.core import tensor_parallel
from megagrpo.actor.megatron_config import kernels_here, transformer_config
from megagrpo.models.build import build_chunks, chunk_parameters
from tests.pretended_world import pretended_world
from megagrpo.config.actor import ActorConfig
from megagrpo.models.table import architecture_of
meta = torch.device("meta")
for name, hf in json.load(sys.stdin).items():
    arch = architecture_of(hf)
    actor = ActorConfig(world_size=arch.experts.count, parallel={"ep": arch.experts.count}, dtype="bfloat16")
    with pretended_world(actor, 0), meta:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        kernels = kernels_here(actor)
        sizes = chunk_parameters(build_chunks(arch, actor, transformer_config(arch, actor, kernels), kernels, meta))
        expert = sum(p.numel() for n, p in sizes.items() if ".experts." in n)
        rest = sum(p.numel() for p in sizes.values()) - expert
        embedding = sum(p.numel() for n, p in sizes.items() if "word_embeddings" in n)
    print(name, rest + arch.experts.count * expert, rest - embedding + arch.experts.per_token * expert)
"""


def test_published_models_have_their_parameters_by_the_families_and_by_the_modules_that_are_built():
    printed = python("-c", COUNT, input=json.dumps(PUBLISHED))
    lines = map(str.split, printed.splitlines())
    built = {name: tuple(round(int(number) / 1e9, 1) for number in rest) for name, *rest in lines}
    assert built == PARAMETERS
    counts = {name: parameter_counts(architecture_of(hf)) for name, hf in PUBLISHED.items()}
    assert built == {name: (round(n.total / 1e9, 1), round(n.active / 1e9, 1)) for name, n in counts.items()}


@pytest.mark.parametrize(("name", "hf", "total", "active"), RENAMED)
def test_new_names_of_old_configurations_have_the_size_that_their_names_say(name, hf, total, active):
    """A dense one keeps keys of experts here, which its family does not read."""
    assert model_problems(hf) == []
    counts = parameter_counts(architecture_of(hf))
    assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(("hf", "change", "said"), REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(hf, change, said):
    """None: without that key. Where a number of yarn is missing, Megatron and transformers take other defaults."""
    assert model_problems(hf) == []
    changed = {key: value for key, value in (hf | change).items() if key not in change or value is not None}
    (problem,) = model_problems(changed)
    assert said in problem


def test_layers_of_glm_5_2_share_choices():
    """Its config.json has both forms."""
    full = {0, 1, 2, *range(6, 78, 4)}
    kinds = ["full" if layer in full else "shared" for layer in range(78)]
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    hf = GLM5 | shared | {"indexer_types": kinds}
    assert model_problems(hf) == model_problems(GLM5 | shared) == []
    names = {spec.name for spec in model_tensors(architecture_of(hf))}
    assert {layer for layer in range(78) if f"model.layers.{layer}.self_attn.indexer.wk.weight" in names} == full

    def problems(**actor) -> list[str]:
        return layout_problems(architecture_of(hf), ActorConfig(**actor))

    stages = {"world_size": 3, "parallel": {"pp": 3}}
    assert problems(**stages | {"parallel": {"pp": 3, "first_stage_layers": 26, "last_stage_layers": 24}}) == []
    (wrong,) = problems(**stages | {"parallel": {"pp": 3, "first_stage_layers": 28, "last_stage_layers": 24}})
    assert "a stage begins at layer 28, which sees the keys that layer 26 of" in wrong
    assert "in packed batches only" in problems(packing=False)[0]
    virtual = problems(world_size=2, parallel={"pp": 2, "vpp": 3})
    assert any("actor.parallel.vpp: layers share" in problem for problem in virtual)


def test_deepseek_v32_is_v3_with_indexers():
    more = parameter_counts(architecture_of(V32)).dense - parameter_counts(architecture_of(V3)).dense
    assert more == 61 * (64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128)


def test_groups_score_their_best_two():
    """Megatron takes the best experts_per_token // topk_group."""
    for chosen, top, right in ((8, 4, True), (9, 4, True), (12, 4, False), (8, 8, False), (4, 1, False)):
        hf = V3 | {"num_experts_per_tok": chosen, "topk_group": top}
        assert (model_problems(hf) == []) == right, (chosen, top)
    assert model_problems(K2 | {"num_experts_per_tok": 6}) == [], "one group scores nothing"


def test_both_spellings_of_rotary_options_are_read():
    """Published files have rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    written = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn", "rope_theta": 1e4}
    rotary = architecture_of(written | {"rope_parameters": rope}).attention.rotary
    assert rotary.theta == 1e4 and rotary.scaling["factor"] == 40
    plain = {key: value for key, value in GLM.items() if key not in ("rope_theta", "partial_rotary_factor")}
    half = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    assert architecture_of(plain).attention.rotary.fraction == 0.5
    assert architecture_of(plain | {"rope_parameters": half}).attention.rotary == Rotary(5e5, None, 0.25)


def test_layers_that_only_speculate_are_left_out():
    assert "multi-token-prediction layer (model.layers.61)" in left_out(V3)[0]
    assert left_out(K2) == left_out(MOONLIGHT) == left_out(MIXTRAL) == []
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    assert exported_config(V3) == plain | {"num_nextn_predict_layers": 0} and exported_config(MIXTRAL) == MIXTRAL
    assert is_left_out(architecture_of(V3), "model.layers.61.eh_proj.weight")
    assert is_left_out(architecture_of(K2), "model.layers.3.self_attn.rotary_emb.inv_freq")
    arch = architecture_of(V3)
    assert is_left_out(replace(arch, tied=True), "lm_head.weight")
    assert not is_left_out(arch, "lm_head.weight")
    assert not any(is_left_out(arch, spec.name) for spec in model_tensors(arch))


def test_the_router_bias_alone_keeps_its_dtype():
    found = {spec.name for spec in model_tensors(architecture_of(AIR)) if spec.dtype is not None}
    assert found == {f"model.layers.{index}.mlp.gate.e_score_correction_bias" for index in range(1, 46)}


def test_every_width_that_is_cut_must_be_divided():
    """Latent attention has no heads of keys to divide; dense, shared and routed experts' widths each have a rule."""
    layout = ["actor.world_size=12", "actor.parallel={tp: 12, etp: 6}"]
    actor = load_config(QUICKSTART, layout).actor
    problems = layout_problems(architecture_of(V3 | {"intermediate_size": 18431}), actor)
    assert [text.split("the model's ")[1].split(" = ")[0] for text in problems] == [
        "num_attention_heads",
        "moe_intermediate_size",
        "n_shared_experts x moe_intermediate_size",
        "intermediate_size",
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_length_at_which_attention_costs_as_much_as_the_rest(name):
    """By the model's matrices that a token is multiplied with, but the router, and products over half of a sequence."""
    arch = architecture_of(PUBLISHED[name])
    elements = arch.vocab_size * arch.hidden_size  # the output layer's
    for spec in model_tensors(arch):
        if spec.kind == "matrix" and ".layers." in spec.name and not spec.name.endswith("gate.weight"):
            elements += spec.size * arch.experts.per_token // arch.experts.count if spec.expert else spec.size
    heads = arch.attention.heads * (arch.attention.head_dim + arch.attention.v_dim) / 2
    if arch.indexer is not None:  # it alone meets every key
        heads = arch.indexer.heads * arch.indexer.head_dim / 2
    assert attention_length(arch) == pytest.approx(elements / arch.num_layers / heads, abs=2)


def test_check_says_what_is_left_out(tmp_path):
    hf = hf_config(TinyModelConfig(path="x", family="deepseek_v3")) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = load_config(QUICKSTART, [f"model.path={tmp_path}", "sft=null"])
    assert "  left out 1 multi-token-prediction layer (model.layers.4)" in explain(config)


@pytest.mark.parametrize("hf", [V3, K2, GLM, MIXTRAL, M2, K25])
def test_adapters_are_refused(hf):
    actor = load_config(QUICKSTART, ["actor.parallel={}", "actor.lora={rank: 4}"]).actor
    [problem] = layout_problems(architecture_of(hf), actor)
    assert problem.startswith(f"actor.lora is not supported with a {hf['model_type']} model")


def test_what_engines_and_transformers_read_is_exported():
    """MiniMax-M2's rotary_dim, and the fraction that transformers reads in its place; of Kimi-K2.5 the text model."""
    plain = {key: value for key, value in M2.items() if key != "quantization_config"}
    assert exported_config(M2) == plain | {"partial_rotary_factor": 0.5}
    assert model_problems(exported_config(M2)) == [] == model_problems(exported_config(K25))
    text = exported_config(K25)
    assert (text["model_type"], text["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert [line.split("*")[0] for line in left_out(K25)] == ["vision_tower.", "mm_projector."]


def test_experts_that_engines_do_not_tell_are_not_replayed():
    actor = load_config(QUICKSTART, ["actor.routing_replay=rollout", "actor.parallel={}"]).actor
    (problem,) = layout_problems(architecture_of(M2), actor)
    assert "does not say which layer chose experts; take old" in problem


def test_a_bias_is_moved_only_where_there_is_one():
    moving = load_config(QUICKSTART, ["actor.router_bias_update=0.001", "actor.parallel={}"]).actor
    (problem,) = layout_problems(architecture_of(PUBLISHED["Qwen3-235B-A22B"]), moving)
    assert problem == "actor.router_bias_update: a qwen3_moe model's routers have no bias; remove it"
    assert layout_problems(architecture_of(V3), moving) == []
