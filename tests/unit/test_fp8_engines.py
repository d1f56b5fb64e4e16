"""FP8 engines: the trainers' quantizer, formats of parameters, what engines start from, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megagrpo.check.problems import check_against_model
from megagrpo.cpu.engine import block_fp8
from megagrpo.mesh import make_mesh
from megagrpo.models.stored.quantization import FP8_EXEMPT, fp8_config
from megagrpo.models.table import FAMILIES, architecture_of, model_problems, model_tensors
from megagrpo.rollout.service.engine_command import is_recurrent
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.blocks import block_maxima, block_scales, dequantize, quantize
from megagrpo.weights.copies.recorder import Copy, Recording, coverage_problems, record_whole
from megagrpo.weights.copies.storages import Computed
from megagrpo.weights.engines.derived_tensors import absorbed_matrices, cache_scales, random_cache_scales
from megagrpo.weights.engines.formats import format_problems
from megagrpo.weights.quantized import quantized
from tests import experiments
from tests.published import published_config

FP8 = torch.float8_e4m3fn


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """By definition: the finite code nearest to each value, the even one of two as near."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = codes.view(FP8).double()
    distance = (values.double().reshape(-1, 1) - numbers).abs() + (codes & 1) * 1e-13
    signed = distance + (torch.signbit(numbers) != torch.signbit(values.double().reshape(-1, 1))) * 1e-12
    return codes[signed.argmin(1)].view(values.shape)


def test_the_quantizer_rounds_each_block_by_its_largest_element():
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 300, generator=draw) * torch.logspace(-2, 2, 200)[:, None]
    matrix[:128, 128:256] = 0
    scales = block_scales(block_maxima(matrix, (0, 0)))
    assert scales.shape == (2, 3)
    whole = quantize(matrix, (0, 0), scales)
    for i in range(2):
        for j in range(3):
            block = matrix[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert scales[i, j] == block.abs().max().clamp(min=1e-12) / 448
            codes = whole.view(torch.uint8)[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert torch.equal(codes, nearest_codes(block / scales[i, j]))
    part = matrix[100:190, 50:290]  # begins and ends within blocks
    assert torch.equal(quantize(part, (100, 50), scales).view(torch.uint8), whole[100:190, 50:290].view(torch.uint8))
    assert torch.equal(block_maxima(matrix[128:], (128, 0)), block_maxima(matrix, (0, 0))[1:])
    bad = matrix.clone()
    bad[0, 0] = torch.nan
    assert quantize(bad, (0, 0), block_scales(block_maxima(bad, (0, 0)))).float()[0, 0].isnan(), "not hidden"


def test_a_stack_of_matrices_is_each_matrix():
    """Experts as published files of Qwen3.5 have them, one of them cut within blocks over two parameters."""
    stack = torch.randn(3, 200, 300) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    live = {"some": stack[:1].clone(), "top": stack[1:, :90].clone(), "low": stack[1:, 90:].clone()}

    def load(hf) -> None:
        live["some"].copy_(hf["x"][:1])
        live["top"].copy_(hf["x"][1:, :90])
        live["low"].copy_(hf["x"][1:, 90:])

    specs = {"x": (tuple(stack.shape), torch.float32)}
    mesh = make_mesh(0, 1, torch.device("cpu"), 10.0)
    weights = ActorWeights(record_whole(load, specs, live).copies, specs, lambda: live, fp8={"x"})
    weights = quantized(weights, mesh)
    assert weights.hf_specs["x_scale_inv"] == ((3, 2, 3), torch.float32)
    with weights.merged():
        found = {name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in weights.hf_specs.items()}
        for copy in weights.copies:
            found[copy.hf][copy.box.slices] = copy.view(weights.parameters())
    for number, matrix in enumerate(stack):
        scales = block_scales(block_maxima(matrix, (0, 0)))
        assert torch.equal(found["x_scale_inv"][number], scales)
        wanted = quantize(matrix, (0, 0), scales).view(torch.uint8)
        assert torch.equal(found["x"][number].view(torch.uint8), wanted)


def test_a_large_slice_is_quantized_in_parts(monkeypatch):
    monkeypatch.setattr("megagrpo.weights.quantized._AT_ONCE", 128 * 300)
    live, specs = {"p": torch.randn(500, 300)}, {"x": ((500, 300), torch.float32)}
    copies = record_whole(lambda hf: live["p"].copy_(hf["x"]), specs, live).copies
    mesh = make_mesh(0, 1, torch.device("cpu"), 10.0)
    weights = quantized(ActorWeights(copies, specs, lambda: live, fp8=frozenset("x")), mesh)
    with weights.merged():
        values, scales = (c.view(weights.parameters()) for c in sorted(weights.copies, key=lambda c: len(c.hf)))
        expected = block_scales(block_maxima(live["p"], (0, 0)))
        assert torch.equal(scales, expected)
        assert torch.equal(values.view(torch.uint8), quantize(live["p"], (0, 0), expected).view(torch.uint8))
    assert weights.parameters().keys() == {"p"}


def test_formats_that_no_publish_can_write_are_named():
    copies = [Copy("x", (0, 0), (4, 4), "w", 0, (4, 1)), Copy("n", (4,), (4,), "norm", 0, (1,))]
    specs = {"x": ((4, 4), FP8), "n": ((4,), torch.bfloat16)}
    live = {"w": torch.zeros(4, 4).to(FP8), "norm": torch.zeros(4)}
    recording = Recording(copies)
    assert not list(format_problems(recording, live, specs))
    (line,) = format_problems(recording, live | {"w": torch.zeros(4, 4)}, specs)
    assert line.startswith("parameter w is in torch.float32, and HF tensor x is published in torch.float8_e4m3fn")
    (line,) = format_problems(recording, live | {"norm": torch.zeros(4).to(FP8)}, specs)
    assert "parameter norm is in torch.float8_e4m3fn" in line
    computed = Recording(
        copies, computed={"own": Computed("a product", {"n"}), "of both": Computed("a sum", {"n", "x"})}
    )
    (line,) = format_problems(computed, live | {"own": live["w"], "of both": live["w"]}, specs)
    assert line == "parameter own is in FP8, and computed from n, which are not"
    live["w_scale_inv"] = torch.ones(1, 1)
    live["w_scale_inv"].format_ue8m0 = True  # as SGLang marks them
    (line,) = format_problems(recording, live, specs)
    assert "w_scale_inv: scales are rounded to powers of two" in line and "fp8_gemm_runner_backend: triton" in line


def test_what_latent_attention_keeps_beside_fp8_weights_is_compared_with_their_products():
    heads, nope, v, rank = 2, 96, 64, 192
    matrix = torch.randn(heads * (nope + v), rank)
    projection = nn.Module()
    scales = block_scales(block_maxima(matrix, (0, 0)))
    projection.weight, projection.weight_scale_inv = quantize(matrix, (0, 0), scales), scales
    attention = nn.Module()
    attention.kv_b_proj = projection
    by_head = dequantize(projection.weight, (0, 0), scales).bfloat16().unflatten(0, (heads, -1))
    assert torch.allclose(by_head.flatten(0, 1).float(), matrix, rtol=0.1, atol=0.02)
    attention.w_kc, attention.w_vc = (by_head[:, :nope].clone(), by_head[:, nope:].transpose(1, 2).clone())
    assert [bool((has != wanted).any()) for _, has, wanted in absorbed_matrices(attention)] == [False, False]
    projection.weight_scale_inv = scales * 2  # a publish after which nobody computed them anew
    assert [bool((has != wanted).any()) for _, has, wanted in absorbed_matrices(attention)] == [True, True]


def test_scales_of_a_cache_are_constants_and_a_drawn_one_is_named():
    model = nn.Module()
    model.attn = nn.Module()
    model.attn.k_scale, model.attn.v_scale = (nn.Parameter(torch.ones(()), requires_grad=False) for _ in "kv")
    model.attn.k_scale_float = model.attn.v_scale_float = 1.0
    model.plain = nn.Module()
    model.plain.k_scale = model.plain.k_scale_float = None  # as SGLang's attention without such scales
    recording = Recording(fills=list(cache_scales(model)))
    live = dict(model.named_parameters())
    assert not coverage_problems(recording, live) and len(recording.fills) == 2
    assert all(fill.view(live) == fill.value == 1 for fill in recording.fills)
    assert not random_cache_scales(model)
    model.attn.v_scale_float = 3e-4
    (line,) = random_cache_scales(model)
    assert line.startswith("attn.v_scale_float = 0.0003: drawn at random")


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if not family.FP8_REFUSAL))
def test_every_family_names_its_matrices(family):
    hf = hf_config(TinySizes(family=family)) | {"vocab_size": 32}
    tensors = list(model_tensors(architecture_of(hf)))
    plain = [spec.name for spec in tensors if spec.kind == "matrix" and not spec.in_fp8]
    own = {f"{layer}.{name}" for name in FP8_EXEMPT for layer in ("linear_attn", "indexer")}
    own |= {"mlp.shared_expert_gate"}
    own |= {"mlp.gate", "block_sparse_moe.gate", "lm_head"}
    for name in plain:
        assert "embed_tokens" in name or ".".join(name.split(".")[-3:-1]) in own
    stacks = {spec.name.split(".")[-2] for spec in tensors if spec.in_fp8 and len(spec.shape) > 2}
    assert stacks <= {"experts"} and any(spec.in_fp8 for spec in tensors)


def test_families_that_sglang_cannot_hold_in_fp8_are_refused():
    for family, reason in (("llama", "drops the scales of a Llama's blocks"), ("qwen3_vl", "not for vision-language")):
        config = experiments.experiment(rollout={"quantization": "fp8"}, actor={"device": "cpu"})
        (problem,) = check_against_model(config, hf_config(TinySizes(family=family)) | {"vocab_size": 32})
        assert problem.startswith("rollout.quantization fp8: ") and reason in problem


def test_engines_have_an_hour_to_compile_kernels_unless_the_file_says_otherwise():
    given = {"quantization": "fp8", "dtype": "bfloat16"}
    found = [experiments.experiment(rollout=r).rollout for r in ({}, given, given | {"start_timeout_s": 60})]
    assert [rollout.start_timeout_s for rollout in found] == [300, 3600, 60]
    given |= {"colocate": True}
    shared = {"weights": {"transport": "ipc"}}
    colocated = experiments.experiment(rollout=given, **shared)
    assert colocated.rollout.sleep_limit_s < colocated.actor.deadline_s, "other ranks wait in a collective"
    given |= {"start_timeout_s": 60}
    assert experiments.experiment(rollout=given, actor={"deadline_s": 900}, **shared).actor.deadline_s == 900


def test_engines_start_from_a_description_in_fp8(tmp_path):
    model, run = tmp_path / "model", RunFolder(tmp_path / "run")
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "toy", "dtype": "bfloat16"}))
    sections = {"model": {"path": str(model)}, "rollout": {"quantization": "fp8", "dtype": "bfloat16"}}
    seen = as_engines_see_it(experiments.experiment(output_dir=str(run.path), **sections), run)
    assert json.loads((run.engine_model / "config.json").read_text()) == {
        "model_type": "toy",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    assert seen.model.path == str(run.engine_model)


def test_the_stand_in_multiplies_dequantized_blocks_and_rounded_activations():
    draw = torch.Generator().manual_seed(1)
    weight, x = torch.randn(256, 256, generator=draw), torch.randn(3, 256, generator=draw)
    scales = block_scales(block_maxima(weight, (0, 0)))
    codes = quantize(weight, (0, 0), scales)
    out = block_fp8.linear(x, codes, scales, [128, 128])
    for row in range(3):  # the definition, block by block
        expected = torch.zeros(256, dtype=torch.float64)
        for j in range(2):
            group = x[row, 128 * j : 128 * (j + 1)]
            of_group = group.abs().max() / 448
            rounded = (group / of_group).to(FP8).double()
            for i in range(2):
                rows, columns = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
                product = codes[rows, columns].double() @ rounded
                expected[rows] += product * scales[i, j].double() * of_group.double()
        assert torch.allclose(out[row].double(), expected, rtol=1e-5, atol=1e-4)
    assert (out - x @ weight.t()).norm() / out.norm() < 0.06
    layer = SimpleNamespace(w13_weight=codes[None].repeat(2, 1, 1), w13_weight_scale_inv=scales[None].repeat(2, 1, 1))
    layer.w2_weight, layer.w2_weight_scale_inv = (
        codes[None, :, :128].repeat(2, 1, 1),
        scales[None, :, :1].repeat(2, 1, 1),
    )
    ids, shares = (torch.tensor([[0, 1], [1, -1], [0, -1]]), torch.tensor([[0.5, 0.5], [1.0, 9.0], [1.0, 9.0]]))
    found = block_fp8.experts(layer, x, shares, ids, [128, 128])
    gate, up = out.chunk(2, -1)
    alone = block_fp8.linear(
        nn.functional.silu(gate) * up, layer.w2_weight[0], layer.w2_weight_scale_inv[0], [128, 128]
    )
    assert torch.allclose(found, alone, rtol=1e-4, atol=1e-3), "equal experts, whose shares sum to 1"


def test_engines_of_a_vision_language_file_keep_their_states_and_plain_projections(tmp_path):
    """The text part decides, which stands in a section of config.json."""
    text = hf_config(TinySizes(family="qwen3_5_moe_text")) | {"vocab_size": 32}
    hf = published_config(text)
    described = fp8_config(hf)
    assert described["quantization_config"]["modules_to_not_convert"] == list(FP8_EXEMPT)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert not model_problems(hf) and is_recurrent(str(tmp_path))
    (problem,) = model_problems(described)  # a checkpoint in FP8
    assert "experts apart" in problem and "bfloat16 release" in problem
