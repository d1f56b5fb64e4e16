"""DeepSeek-V4: its sizes as published, the names of its files, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems
from megagrpo.config.schema import ActorConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import (
    FAMILIES,
    architecture_of,
    attention_length,
    exported_config,
    left_out,
    model_problems,
    model_tensors,
    parameter_counts,
)
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import Load, layer_cost, stage_parameters, trainer_stages
from megagrpo.tools.plan.work import model_work
from megagrpo.weights.hf_folder import HfFolder
from tests.experiments import engine_layout_problems, experiment
from tests.installed import installed_function

FLASH = {  # as published
    "model_type": "deepseek_v4", "attention_bias": False, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6,
    "num_hidden_layers": 43, "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
                     "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "vocab_size": 129280, "compress_rope_theta": 160000,
    "topk_method": "noaux_tc", "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "expert_dtype": "fp4",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128]},
}  # fmt: skip


def test_published_sizes():
    """284B, of which a token meets 13B; the last ratio is the prediction layer's."""
    arch = architecture_of(FLASH)
    counts = parameter_counts(arch)
    assert (round(counts.total / 1e9), round(counts.active / 1e9)) == (284, 13)
    assert [arch.attention.ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert left_out(FLASH) and arch.num_streams == 4 and not arch.has_dense_layers
    [stage] = stage_parameters(arch, ActorConfig.model_validate({"dtype": "bfloat16"}))
    assert (stage.dense, stage.expert) == (counts.dense, counts.expert)


def test_transformers_place_of_the_scaling_is_read():
    moved = {**FLASH, "rope_theta": 50000, "rope_parameters": {**FLASH["rope_scaling"], "rope_theta": 10000}}
    del moved["rope_scaling"]
    arch, published = architecture_of(moved), architecture_of(FLASH)
    assert arch.attention.rotary == published.attention.rotary
    assert arch.attention.far_rotary.theta == published.attention.far_rotary.theta
    assert arch.attention.far_rotary.yarn.items() > FLASH["rope_scaling"].items()


def test_layers_have_what_their_place_gives_them():
    specs = {spec.name: spec for spec in model_tensors(architecture_of(FLASH))}
    assert {"embed.weight", "norm.weight", "head.weight", "hc_head_fn", "layers.42.hc_ffn_scale"} < specs.keys()
    assert specs["layers.2.ffn.gate.tid2eid"].shape == (129280, 6) and "layers.2.ffn.gate.bias" not in specs
    assert specs["layers.3.ffn.gate.bias"].shape == (256,) and "layers.3.ffn.gate.tid2eid" not in specs
    assert "layers.1.attn.compressor.ape" not in specs
    assert specs["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert specs["layers.3.attn.compressor.ape"].shape == (128, 512)
    indexed = {name.split(".")[1] for name in specs if ".indexer." in name}
    assert indexed == {str(layer) for layer in range(2, 43, 2)}
    assert not any(spec.trained for name, spec in specs.items() if ".indexer." in name or "tid2eid" in name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"n_group": 8}, "n_group 8"),
        ({"compress_ratios": [4] * 42}, "compress_ratios must give each of 43 layers"),
        ({"compress_ratios": [2] * 44}, "compress_ratios must give each of 43 layers"),
        ({"num_hash_layers": 44}, "num_hash_layers must be 0 to 43"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"o_groups": 7}, "o_groups must divide"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim 256 must be even, and at most"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor must give"),
        ({"hc_mult": 1}, "hc_mult must be at least 2"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "mscale": 2.0}}, "rope scaling 'yarn' with mscale"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "truncate": False}}, "rope scaling 'yarn' with truncate"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict, named: str):
    [problem] = model_problems(FLASH | changes)
    assert named in problem


@pytest.mark.parametrize("key", FAMILIES["deepseek_v4"].REQUIRED_KEYS)
def test_a_size_that_is_missing_is_named(key: str):
    assert f"config.json lacks {key}" in model_problems({name: FLASH[name] for name in FLASH if name != key})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"routing_replay": "old"}, "actor.routing_replay is not supported with a deepseek_v4 model"),
        ({"router_losses": {"balance": 0.1}}, "actor.router_losses is not supported"),
        ({"megatron": {"recompute_modules": ["moe"]}}, "actor.megatron.recompute_modules is not supported"),
        ({"megatron": {"moe_shared_expert_overlap": True}}, "actor.megatron.moe_shared_expert_overlap is not"),
        ({"megatron": {"bias_activation_fusion": True}}, "layers of a deepseek_v4 model are computed with False"),
        ({"megatron": {"use_te_activation_func": True}}, "actor.megatron.use_te_activation_func is not"),
        ({"megatron": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}, "actor.megatron.fp8 is not supported"),
        ({"lora": {"rank": 4}}, "actor.lora is not supported"),
        ({"world_size": 16, "parallel": {"tp": 16}}, "tp = 16 does not divide the model's o_groups = 8"),
    ],
)
def test_settings_that_its_layers_do_not_know_are_refused(settings: dict, named: str):
    problems = layout_problems(architecture_of(FLASH), ActorConfig.model_validate(settings))
    assert any(named in problem for problem in problems)


def test_engines_without_a_gpu_are_refused():
    on_cpu = check_against_model(experiment(), FLASH)
    assert any("TileLang's kernels only" in text for text in on_cpu)
    on_gpus = check_against_model(experiment(actor={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"}), FLASH)
    assert not any("TileLang" in text for text in on_gpus)


def test_a_cache_in_fp8_needs_a_correction():
    for mismatch, refused in (({}, True), ({"weight": {"name": "tis"}}, False)):
        own = experiment(algorithm={"mismatch": mismatch})
        assert (
            any("cache of a deepseek_v4 model is in FP8" in text for text in check_against_model(own, FLASH)) == refused
        )


def test_ranks_that_would_keep_old_sinks_are_refused():
    """SGLang's attention copies its heads' sinks once, if ranks divide them (MQALayer._local_attn_sink)."""
    one = {"dtype": "bfloat16"}
    shared = one | {"tp": 2, "sglang": {"enable_dp_attention": True, "dp_size": 2}}
    broadcast = {"transport": "broadcast"}
    cut = one | {"tp": 2}
    cases = (
        (one, broadcast, False),
        (cut, broadcast, True),
        (shared, broadcast, False),
        (cut, {"transport": "reshard"}, False),
    )
    for rollout, weights, refused in cases:
        own = experiment(actor={"dtype": "bfloat16"}, rollout=rollout, weights=weights)
        assert any("attn_sink" in text for text in check_against_model(own, FLASH)) == refused


def test_stages_send_and_keep_every_stream():
    actor = {"world_size": 2, "dtype": "bfloat16", "recompute": "full", "parallel": {"pp": 2, "first_stage_layers": 22}}
    actor = ActorConfig.model_validate(actor)
    stages = [trainer_stages(architecture_of(FLASH | {"hc_mult": n}), actor, Load(8192))[0] for n in (2, 4)]
    sent = [stage.cost.sent["pp"] for stage in stages]
    assert sent == [2 * 4096 * 8192 * 2, 4 * 4096 * 8192 * 2]


def test_an_engine_has_a_whole_output_group_on_each_rank():
    wide = experiment(rollout={"tp": 16, "dtype": "bfloat16", "nodes_per_engine": 2}).rollout
    [problem] = engine_layout_problems(wide, architecture_of(FLASH))
    assert problem == "rollout.tp = 16 does not divide the model's o_groups = 8; tp may be 1 or 2 or 4 or 8"
    assert not engine_layout_problems(wide.model_copy(update={"tp": 8}), architecture_of(FLASH))


def test_what_is_computed_and_kept():
    """A key for 4 or for 128 tokens in most layers: a cache of 64 numbers a token and layer, and the indexer's."""
    arch = architecture_of(FLASH)
    work = model_work(arch)
    far = sum(512 / ratio for ratio in arch.attention.ratios if ratio) / 43
    assert work.cache_bytes(1) == 43 * round(far) * 2 + 21 * (128 + 4) // 4
    p = {"world_size": 8, "dtype": "bfloat16", "parallel": {"tp": 2, "cp": 2, "ep": 4}}
    cost = layer_cost(arch, ActorConfig.model_validate(p), 8192, 5, 1.0)
    # torch computes with all keys behind the window, and with 1024 + 128 near a query, of 128 + 512 that it sees
    behind = [4 * heads * 512 * (21 / 4 + 20 / 128) + 21 * 2 * 64 * 128 / 4 for heads in (32, 64)]
    assert cost.pair_flops == pytest.approx(behind[0] / 43)
    assert cost.chosen_flops == 4 * 32 * 512 * 1152 / 640
    # half of the keys are before a query
    assert attention_length(arch) == pytest.approx(2 * parameter_counts(arch).active / (behind[1] / 2), rel=0.1)
    # four streams in place of one
    alone = layer_cost(architecture_of(FLASH | {"hc_mult": 2}), ActorConfig.model_validate(p), 8192, 5, 1.0)
    assert cost.kept - alone.kept == 2 * 2 * 4096 * 8192 / 4 * 2


def test_tiny_models_have_every_kind_of_layer():
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="deepseek_v4")))
    assert arch.attention.ratios == (0, 4, 8, 4) and arch.routed.hashed == 1


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
IN_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")


def powers(*shape: int) -> Tensor:
    """Scales from 2 ** -9 to 2 ** 2."""
    return torch.randint(118, 130, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def stored_as_published(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """A random tensor in the format of the published file."""
    *_, part, kind = ("", *name.split("."))
    scale = name.removesuffix("weight") + "scale"
    if ".experts." in name:
        values = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8)
        return {name: values, scale: powers(shape[0], shape[1] // 32)}
    if kind == "weight" and (".shared_experts." in name or (part in IN_FP8 and ".compressor." not in name)):
        values = torch.randn(shape).to(torch.float8_e4m3fn)
        return {name: values, scale: powers(*(-(-size // 128) for size in shape))}
    if "tid2eid" in name:
        return {name: torch.zeros(shape, dtype=torch.int64)}
    return {name: torch.randn(shape, dtype=torch.bfloat16)}


def decoded(values: Tensor, scales: Tensor) -> Tensor:
    """By definition: of a byte the low half is the first number; a scale for 32 columns, or for 128 x 128."""
    block = (128, 128)
    if values.dtype == torch.int8:
        codes = [half for byte in values.view(torch.uint8).flatten().tolist() for half in (byte & 15, byte >> 4)]
        numbers = [E2M1[code & 7] * (-1 if code > 7 else 1) for code in codes]
        values, block = torch.tensor(numbers).view(len(values), -1), (1, 32)
    grid = (scales.view(torch.uint8).double() - 127).exp2()
    grid = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (values.double() * grid[: values.shape[0], : values.shape[1]]).bfloat16()


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("published")
    hf = hf_config(TinyModelConfig(path="x", family="deepseek_v4"))
    stored = {}
    for spec in model_tensors(architecture_of(hf)):
        stored |= stored_as_published(spec.name, spec.shape)
    stored |= stored_as_published("mtp.0.ffn.experts.0.w1.weight", (128, 128))
    save_file(stored, folder / "model.safetensors")
    rest = {key: FLASH[key] for key in ("quantization_config", "expert_dtype")}
    (folder / "config.json").write_text(json.dumps(hf | rest))
    return folder, stored


def test_published_files_are_read_as_their_products(published: tuple[Path, dict[str, Tensor]]):
    """Matrices in FP8, experts in FP4, scales that are powers of two, named *.scale; the rest as it is."""
    folder, stored = published
    Model.read(folder).refuse_weights()
    read = HfFolder(folder)
    forms = {name: stored[name].dtype for name in stored if name.removesuffix("weight") + "scale" in stored}
    assert set(forms.values()) == {torch.int8, torch.float8_e4m3fn}
    assert set(read) == {name for name in stored if not name.endswith(".scale")}
    for name, tensor in read.items():
        expected = stored[name]
        if name in forms:
            expected = decoded(expected, stored[name.removesuffix("weight") + "scale"])
        assert torch.equal(tensor, expected), name
    assert read.fingerprint() == HfFolder(folder).fingerprint()
    exported = exported_config(json.loads((folder / "config.json").read_text()))
    assert not exported.keys() & {"quantization_config", "expert_dtype"} and exported["dtype"] == "bfloat16"


def test_sglang_reads_the_same_numbers(published: tuple[Path, dict[str, Tensor]]):
    folder, stored = published
    read = HfFolder(folder)
    file = "srt/models/deepseek_v4.py"
    dequant = installed_function("sglang", file, "_dequant_fp8")
    wider = installed_function(
        "sglang", "srt/layers/quantization/fp8.py", "cast_e2m1fn_to_e4m3fn", "DSV4_DEQUANT_FP4_TABLE"
    )
    name = "layers.1.ffn.experts.3.w2."
    products = dequant(*wider(stored[name + "weight"], stored[name + "scale"]))
    assert torch.equal(read[name + "weight"], products)
    name = "layers.1.ffn.shared_experts.w1."
    assert torch.equal(read[name + "weight"], dequant(stored[name + "weight"], stored[name + "scale"]))


def test_a_part_of_an_expert_is_the_part(published: tuple[Path, dict[str, Tensor]]):
    """As ranks read it: parts that begin and end within blocks and bytes."""
    read = HfFolder(published[0])
    whole = read["layers.0.ffn.experts.0.w2.weight"]
    for start, size in (((0, 0), (128, 64)), ((64, 0), (64, 128)), ((3, 33), (5, 40)), ((127, 127), (1, 1))):
        box = torch.empty(size)
        read.read_into(box, "layers.0.ffn.experts.0.w2.weight", start)
        assert torch.equal(box, whole[start[0] :, start[1] :][: size[0], : size[1]].float())


@pytest.mark.parametrize("scales", [powers(128, 1), powers(64, 2), torch.ones(128, 2)])
def test_experts_with_other_scales_are_refused(scales: Tensor, tmp_path: Path):
    stored = {"w.weight": torch.zeros(128, 32, dtype=torch.int8), "w.scale": scales}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="w.weight_blocks .* in MXFP4 needs"):
        HfFolder(tmp_path)
