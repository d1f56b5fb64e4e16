"""What Megatron's configuration classes are given: defaults on CUDA as a table, and every shipped experiment built."""

import json

import pytest

from megagrpo.actor.megatron.fields import (
    Kernels,
    ddp_fields,
    expected_kernels,
    optimizer_fields,
    transformer_defaults,
    transformer_fields,
)
from megagrpo.check.problems import model_description
from megagrpo.check.settings_report import settings_report
from megagrpo.config.actor import ActorConfig
from megagrpo.families.table import architecture_of, read_architecture
from megagrpo.planning.layer_costs import optimizer_bytes
from megagrpo.system.environment import child_environment
from tests.experiments import ROOT, python
from tests.unit.test_examples import CONFIGS, LAPTOP, MODELS, described

CPU = Kernels(cuda=False, transformer_engine=False, fused_weight_gradient=False)
CUDA = Kernels(cuda=True, transformer_engine=False, fused_weight_gradient=False)
ENGINE = Kernels(cuda=True, transformer_engine=True, fused_weight_gradient=False)
MODEL_NAMES = ("Qwen3-8B", "Qwen3-235B-A22B", "DeepSeek-V3-0324")
DENSE, EXPERTS, LATENT = (read_architecture(MODELS / name) for name in MODEL_NAMES)
BUILD = """
import json, sys
from megagrpo.actor.host import prepare_host
prepare_host("cpu", True)
from megagrpo.actor.megatron.config import megatron_configs
from megagrpo.config.actor import ActorConfig
from megagrpo.families.table import architecture_of
from megagrpo.actor.megatron.fields import expected_kernels
*jobs, refused = json.load(sys.stdin)
for name, description, actor in jobs:
    actor = ActorConfig.model_validate(actor)
    kernels = expected_kernels(actor)
    model, ddp, optimizer = megatron_configs(architecture_of(description), actor, kernels)
    print(json.dumps([name, model.moe_permute_fusion, model.moe_grouped_gemm, ddp.overlap_grad_reduce,
                      str(optimizer.exp_avg_dtype)]))
try:
    megatron_configs(architecture_of(refused[1]), ActorConfig.model_validate(refused[2]), kernels)
except ValueError as exc:
    print(json.dumps([refused[0], str(exc)]))
"""


def actor(**options) -> ActorConfig:
    return ActorConfig.model_validate({"world_size": 8, "dtype": "bfloat16", **options})


BIAS = {"bias_activation_fusion", "bias_dropout_fusion"}
OF_ENGINE = {*BIAS, "gradient_accumulation_fusion"}
OF_EXPERTS = {"moe_permute_fusion", "moe_router_fusion"}
STAGES = {"parallel": {"pp": 2}}


@pytest.mark.parametrize(
    ("arch", "kernels", "options", "on"),
    [
        (EXPERTS, CPU, {"parallel": {"pp": 2, "ep": 2}}, set()),
        (DENSE, CUDA, {}, BIAS),
        (DENSE, CUDA, STAGES, {*BIAS, "deallocate_pipeline_outputs"}),
        (DENSE, ENGINE, {}, {*OF_ENGINE, "apply_rope_fusion"}),
        (EXPERTS, ENGINE, {}, {*OF_ENGINE, *OF_EXPERTS, "apply_rope_fusion"}),
        (LATENT, ENGINE, {}, OF_ENGINE | OF_EXPERTS),
        (DENSE, ENGINE, {"parallel": {"pp": 2, "vpp": 2}}, {*OF_ENGINE, "apply_rope_fusion", "overlap_p2p_comm"}),
        (DENSE, CUDA, {"lora": {"rank": 4}}, BIAS),  # adapters get no fused gradients
    ],
)
def test_defaults_by_kernels(arch, kernels, options, on):
    assert set(transformer_defaults(arch, actor(**options), kernels)) == on


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ({}, ["overlap_p2p_comm"]),
        ({"overlap_p2p_comm": False}, ["deallocate_pipeline_outputs"]),
        ({"deallocate_pipeline_outputs": True}, ["deallocate_pipeline_outputs"]),
        ({"batch_p2p_comm": True}, ["deallocate_pipeline_outputs"]),
    ],
)
def test_no_output_is_freed_while_it_is_sent(given, on):
    layout = actor(parallel={"pp": 4, "vpp": 2}, megatron=given)
    fields = transformer_fields(DENSE, layout, ENGINE)
    assert given.items() <= fields.items(), "the user's settings win"
    assert [name for name in ("overlap_p2p_comm", "deallocate_pipeline_outputs") if fields.get(name)] == on


@pytest.mark.parametrize(
    ("options", "kernels", "overlaps"),
    [
        ({}, CPU, []),
        ({"lora": {"rank": 4}}, CUDA, []),
        ({}, ENGINE, ["overlap_grad_reduce", "overlap_param_gather"]),
        ({"optimizer": {"distributed": False}}, ENGINE, ["overlap_grad_reduce"]),
        ({"parallel": {"tp": 8}}, ENGINE, []),  # no data-parallel ranks
        ({"parallel": {"pp": 8}}, ENGINE, []),
        ({"parallel": {"pp": 2, "tp": 4}}, ENGINE, []),
        ({"parallel": {"pp": 2}}, ENGINE, ["overlap_grad_reduce", "overlap_param_gather"]),
        ({"parallel": {"pp": 2, "vpp": 2}}, CUDA, ["overlap_grad_reduce", "overlap_param_gather"]),
        ({"ddp": {"overlap_param_gather": False}}, ENGINE, ["overlap_grad_reduce"]),
    ],
)
def test_communication_overlaps_on_cuda(options, kernels, overlaps):
    fields = ddp_fields(actor(**options), kernels)
    assert [name for name in ("overlap_grad_reduce", "overlap_param_gather") if fields.get(name)] == overlaps
    assert optimizer_fields(actor(**options), kernels)["overlap_param_gather"] == ("overlap_param_gather" in overlaps)
    assert bool(fields.get("align_param_gather")) == ("vpp" in options.get("parallel", {}))


@pytest.mark.parametrize(
    ("arch", "kernels", "megatron", "modules"),
    [
        (DENSE, ENGINE, {}, ["layernorm", "mlp"]),
        (EXPERTS, ENGINE, {}, ["layernorm", "moe_act"]),
        (LATENT, ENGINE, {}, ["layernorm", "mla_up_proj", "moe_act", "mlp", "shared_experts"]),
        (LATENT, ENGINE, {"fp8": "hybrid"}, ["mlp", "shared_experts"]),
        (EXPERTS, CPU, {}, ["moe"]),
        (DENSE, CPU, {}, ["mlp"]),
        (EXPERTS, ENGINE, {"recompute_modules": ["core_attn"]}, ["core_attn"]),
    ],
)
def test_selective_recompute_takes_what_holds_memory(arch, kernels, megatron, modules):
    fields = transformer_fields(arch, actor(recompute="selective", megatron=megatron), kernels)
    assert fields["recompute_granularity"] == "selective" and fields["recompute_modules"] == modules


AWARE = {"use_precision_aware_optimizer": True}
SMALL = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "fp8", "main_grads_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "settings", "gradient", "state", "host"),
    [
        ("float32", {}, 4, 8, 0),
        ("bfloat16", {}, 4, 12, 0),
        ("bfloat16", AWARE, 4, 10, 0),
        ("bfloat16", AWARE | {"store_param_remainders": False}, 4, 12, 0),
        ("bfloat16", AWARE | SMALL, 2, 5, 0),
        ("bfloat16", {"optimizer_cpu_offload": True}, 4, 0, 16),
        ("bfloat16", {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 4, 9, 4),
    ],
)
def test_bytes_of_a_trained_element(dtype, settings, gradient, state, host):
    config = actor(dtype=dtype, optimizer={"megatron": settings})
    found = optimizer_bytes(config)
    assert (found.gradient, found.state, found.host) == (gradient, state, host)
    assert ddp_fields(config, ENGINE)["grad_reduce_in_fp32"] == (gradient == 4)


def test_every_shipped_experiment_builds_megatrons_objects(prepared):
    """As on CUDA, with the functions that Transformer Engine's stand-in has; Megatron's own checks run and are named.

    Of the laptop's experiments the quickstart has its model's description.
    """
    jobs = []
    for path in CONFIGS:
        config = described(path)
        hf = model_description(config)
        if hf is not None:
            jobs.append([path.stem, hf, config.actor.model_dump()])
            report = "\n".join(settings_report(architecture_of(hf), config.actor, True))
            assert report.count("fields handed over") == 3
    assert {path.stem for path in CONFIGS} - {"gsm8k", *LAPTOP - {"quickstart"}} == {name for name, *_ in jobs}
    hf = json.loads((MODELS / "Qwen3-8B" / "config.json").read_text())
    wrong = {"recompute_method": "block", "distribute_saved_activations": True}
    jobs.append(["wrong", hf, actor(recompute="full", megatron=wrong, parallel={"tp": 2}).model_dump()])
    stand_ins = {"PYTHONPATH": f"{ROOT / 'tests' / 'stand_ins'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    printed = python("-c", BUILD, cwd=ROOT, env=child_environment(stand_ins), input=json.dumps(jobs))
    built = {name: rest for name, *rest in map(json.loads, printed.splitlines())}
    assert built.keys() == {name for name, *_ in jobs}
    said = built["wrong"][0]
    assert "Megatron's TransformerConfig refuses these settings: distribute_saved_activations" in said
    assert "sequence_parallel is actor.parallel.tp here" in said or "actor.megatron.distribute" in said
    assert built["qwen3_30b_a3b"][:3] == [True, True, True] and built["quickstart"][:3] == [False, False, False]


def test_bfloat16_is_for_cuda():
    assert expected_kernels(actor()) == ENGINE
    assert expected_kernels(actor(device="cpu")) == CPU
    assert expected_kernels(actor(lora={"rank": 4})) == CUDA
    assert expected_kernels(ActorConfig()) == CPU
