"""Layouts of engines that SGLang 0.5.21 refuses, by the sizes that its own checks name, and what
one rank holds beside plain tensor parallelism."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.rules.engine_layout import server_of
from megagrpo.config.rollout import RolloutConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.folder import Model
from megagrpo.models.table import FAMILIES, architecture_of
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.engine_memory import absorbed_bytes, weight_bytes
from megagrpo.tools.plan.work import model_work
from tests.experiments import engine_layout_problems

MODELS = Path(__file__).parents[2] / "configs" / "models"


def engines(tp: int, ep: int = 1, dp: int = 0, **settings: object) -> RolloutConfig:
    ours = ("moe_a2a_backend", "moe_dense_tp_size")
    sglang = {name: settings.pop(name) for name in ours if name in settings}
    if dp:
        sglang |= {"enable_dp_attention": True, "dp_size": dp}
    nodes = max(tp // 8, 1)
    return RolloutConfig(tp=tp, ep=ep, nodes_per_engine=nodes, dtype="bfloat16", sglang=sglang, **settings)


def arch_of(name: str) -> Architecture:
    return Model.read(MODELS / name).arch


@pytest.mark.parametrize(
    "name, tp, ep, odd, may",
    [
        ("DeepSeek-V3-0324", 32, 32, "MLP 576", "1 or 2 or 4 or 8 or 16"),
        ("Qwen3-235B-A22B", 8, 1, "expert 192", "1 or 2 or 4"),
        ("Qwen3-30B-A3B", 4, 1, "expert 192", "1 or 2"),
        ("GLM-4.5-Air", 1, 1, "MLP 10944", None),
        ("Qwen3.5-397B-A17B", 16, 16, "shared expert 64", "1 or 2 or 4 or 8"),
        ("Qwen3.5-397B-A17B", 8, 8, None, None),
        ("DeepSeek-V3-0324", 16, 16, None, None),
        ("Qwen3-235B-A22B", 4, 1, None, None),
        ("Qwen3-235B-A22B", 8, 8, None, None),
    ],
)
def test_parts_in_fp8_are_whole_blocks(name, tp, ep, odd, may):
    arch = arch_of(name)
    assert not engine_layout_problems(engines(tp, ep), arch)
    problems = engine_layout_problems(engines(tp, ep, quantization="fp8"), arch)
    assert len(problems) == (odd is not None)
    if odd:
        assert odd in problems[0] and f"tp = {tp}, ep = {ep}" in problems[0]
        assert (f"tp may be {may}" if may else "remove quantization") in problems[0]


def test_heads_are_divided_over_the_ranks_of_attention():
    arch = arch_of("DeepSeek-V3-0324")
    changed = {"attention": replace(arch.attention, heads=64), "experts": replace(arch.experts, count=384)}
    arch = replace(arch, **changed)
    whole = {"moe_a2a_backend": "deepep"}  # shared experts, which 96 ranks cannot divide
    assert not engine_layout_problems(engines(96, 96, dp=96, **whole), arch)
    (problem,) = engine_layout_problems(engines(96, 96, **whole), arch)
    assert problem.startswith("rollout.tp = 96 does not divide the model's num_attention_heads")
    (problem,) = engine_layout_problems(engines(8, 8, dp=3), arch)
    assert problem == "rollout.sglang.dp_size = 3 does not divide rollout.tp = 8; it may be 2 or 4"


@pytest.mark.parametrize(
    "name, layout, problem, may",
    [
        ("Qwen2.5-Math-1.5B", {"tp": 8}, "tp = 8 .* num_attention_heads = 12", "tp may be 1 or 2 or 4"),
        ("Qwen2.5-Math-1.5B", {"tp": 3}, "tp = 3 .* intermediate_size = 8960", "tp may be 1 or 2 or 4"),
        ("GLM-4.7-Flash", {"tp": 8}, "tp = 8 .* num_attention_heads = 20", "tp may be 1 or 2 or 4"),
        ("GLM-4.7-Flash", {"tp": 5}, r"tp = 5 / ep 1 = 5 .* moe_intermediate_size = 1536", "tp may be 1 or 2 or 4"),
        ("GLM-4.7-Flash", {"tp": 5}, "tp = 5 .* n_shared_experts x moe_inter", "tp may be 1 or 2 or 4"),
        (
            "GLM-4.7-Flash",
            {"tp": 6, "dp": 2},
            "tp = 6 / sglang.dp_size 2 = 3 .* num_attention_",
            "tp may be 2 or 4 or 8$",
        ),
        ("GLM-4.7-Flash", {"tp": 6, "dp": 2}, "^rollout.tp = 6 does not .* intermediate_size = 10240", "2 or 4 or 8$"),
        ("GLM-4.7-Flash", {"tp": 10, "ep": 10, "dp": 2}, "ep = 10 .* num_experts = 64", "with ep gcd.10, tp.$"),
        ("Qwen2.5-VL-7B-Instruct", {"tp": 8}, "tp = 8 .* vision_config.intermediate_size = 3420", "1 or 2 or 4$"),
        ("Qwen3-VL-235B-A22B-Instruct", {"tp": 32}, "tp = 32 .* vision_config.num_heads = 16", "or 8 or 16$"),
        ("Qwen3-235B-A22B", {"tp": 6, "ep": 3}, "tp = 6 does not .* num_key_value_heads = 4", "1 or 2 or 4 or"),
        ("Qwen3-235B-A22B", {"tp": 24, "dp": 4}, "tp = 24 / sglang.dp_size 4 = 6 .* num_key_value", None),
        ("gpt-oss-120b", {"tp": 2, "ep": 2}, "ep = 2, but a gpt_oss model has experts that", "ep must be 1"),
    ],
)
def test_a_remedy_names_sizes_that_pass_every_rule(name, layout, problem, may):
    arch = arch_of(name)
    found = engine_layout_problems(engines(**layout), arch)
    said = [text for text in found if re.search(problem, text)]
    assert len(said) == 1, found
    if may:
        assert re.search(may, said[0]), said
    for size in map(int, re.findall(r"\d+", said[0].partition("tp may be ")[2].partition(",")[0])):
        smaller = layout | {"tp": size, "ep": math.gcd(size, layout.get("ep", 1))}
        assert not engine_layout_problems(engines(**smaller), arch)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_shared_where_sglang_adds_up_all_ranks(family):
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family=family)))
    problems = engine_layout_problems(engines(2, dp=2), arch)
    assert bool(problems) == (family in ("llama", "qwen2", "qwen2_5_vl", "mixtral", "kimi_linear"))
    assert all(text.startswith("rollout.sglang.enable_dp_attention: ") for text in problems)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_what_data_parallel_attention_and_deepep_add(quantization):
    """DeepSeek-V3 on 32 ranks, by hand: the embedding, the shared experts of 58 layers and the
    copies of keys' and values' projection are whole on every rank."""
    work = model_work(arch_of("DeepSeek-V3-0324"))
    settings = {"quantization": quantization, "moe_a2a_backend": "deepep"}
    server = server_of(engines(32, 32, dp=32, **settings))
    before = replace(server, shared_tp=32)
    shared = weight_bytes(work, server) - weight_bytes(work, before)
    width = 1 + 4 / 128**2 if quantization else 2
    assert shared == pytest.approx(58 * 3 * 7168 * 2048 * 31 / 32 * width)
    embedding = weight_bytes(work, replace(server, head_tp=1)) - weight_bytes(work, server)
    assert embedding == pytest.approx(129280 * 7168 * 31 / 32 * 2)  # the output layer is divided
    assert absorbed_bytes(work, server) == 61 * 128 * 512 * (128 + 128) * 2
    assert absorbed_bytes(work, server_of(engines(8))) == 61 * 16 * 512 * (128 + 128) * 2
    assert absorbed_bytes(model_work(arch_of("Qwen3-235B-A22B")), server) == 0


def test_dense_layers_may_be_whole_beside_data_parallel_attention():
    arch = arch_of("DeepSeek-V3-0324")
    (problem,) = engine_layout_problems(engines(32, 32, dp=8, quantization="fp8"), arch)
    whole = {"moe_dense_tp_size": 1, "moe_a2a_backend": "deepep"}
    says = "{moe_a2a_backend: deepep, moe_dense_tp_size: 1}"
    assert problem.endswith(f"or the same with rollout.sglang: {says}")
    assert not engine_layout_problems(engines(32, 32, dp=8, quantization="fp8", **whole), arch)
    del whole["moe_a2a_backend"]
    (problem,) = engine_layout_problems(engines(32, 32, dp=8, quantization="fp8", **whole), arch)
    assert "left over: shared expert 64; " in problem
    work = model_work(arch)
    before = server_of(engines(32, 32, dp=8))
    added = weight_bytes(work, replace(before, dense_tp=1)) - weight_bytes(work, before)
    assert added == 3 * 3 * 7168 * 18432 * 31 / 32 * 2
