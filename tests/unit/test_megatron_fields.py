"""Settings for libraries, checked against their sources, and what Megatron's configuration classes are given."""

import json
import re
from fnmatch import fnmatchcase

import pytest

from megagrpo.check import libraries
from megagrpo.check.rules.subject import model_description
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import annotations_at
from megagrpo.config.libraries import REFUSED, SERVER, refusal
from megagrpo.config.load import ConfigError
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.fields import (
    Kernels,
    ddp_fields,
    expected_kernels,
    optimizer_fields,
    transformer_defaults,
    transformer_fields,
)
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of
from megagrpo.system.environment import child_environment
from megagrpo.tools.explain import settings_report
from megagrpo.tools.plan.work import optimizer_bytes
from tests.experiments import QUICKSTART, ROOT, experiment, python, read_experiment
from tests.unit.test_examples import CONFIGS, LAPTOP, MODELS, described

CPU = Kernels(cuda=False, transformer_engine=False, fused_weight_gradient=False)
CUDA = Kernels(cuda=True, transformer_engine=False, fused_weight_gradient=False)
ENGINE = Kernels(cuda=True, transformer_engine=True, fused_weight_gradient=False)
MODEL_NAMES = ("Qwen3-8B", "Qwen3-235B-A22B", "DeepSeek-V3-0324")
DENSE, EXPERTS, LATENT = (Model.read(MODELS / name).arch for name in MODEL_NAMES)
BUILD = """
import json, sys
from megagrpo.actor.host import prepare_host
prepare_host("cpu", True)
from megagrpo.actor.megatron_config import megatron_configs
from megagrpo.config.actor import ActorConfig
from megagrpo.models.table import architecture_of
from megagrpo.models.fields import expected_kernels
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from megatron.core.transformer import transformer_config
# kernels of sparse attention and gated delta nets, which are not here
transformer_config._validate_dsa_kernel_backend_dependencies = lambda backend: None
sys.modules["fla"] = module_from_spec(ModuleSpec("fla", None))
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
        (LATENT, ENGINE, {}, ["layernorm", "mla_up_proj", "moe_act", "shared_experts", "mlp"]),
        (LATENT, ENGINE, {"fp8": "hybrid"}, ["shared_experts", "mlp"]),
        (LATENT, ENGINE, {"moe_shared_expert_overlap": True}, ["layernorm", "mla_up_proj", "moe_act", "mlp"]),
        (EXPERTS, CPU, {}, ["moe"]),
        (DENSE, CPU, {}, ["mlp"]),
        (EXPERTS, ENGINE, {"recompute_modules": ["core_attn"]}, ["core_attn"]),
    ],
)
def test_selective_recompute_takes_what_holds_memory(arch, kernels, megatron, modules):
    fields = transformer_fields(arch, actor(recompute="selective", megatron=megatron), kernels)
    assert fields["recompute_granularity"] == "selective" and fields["recompute_modules"] == modules


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("dtype", "settings", "gradient", "state", "host"),
    [
        ("float32", {}, 4, 8, 0),
        ("bfloat16", {}, 4, 12, 0),
        ("bfloat16", AWARE, 4, 10, 0),
        ("bfloat16", AWARE | {"store_param_remainders": False}, 4, 12, 0),
        ("bfloat16", AWARE | {"main_grads_dtype": "bfloat16"}, 2, 10, 0),
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
            report = "\n".join(settings_report(architecture_of(hf), config, True))
            for key in ("actor.megatron:", "actor.ddp: {use_dist", "rollout.sglang: {model_path"):
                assert key in report
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
    assert "may be set in actor.megatron" in said
    assert built["qwen3_30b_a3b"][:3] == [True, True, True] and built["quickstart"][:3] == [False, False, False]


def test_ranks_may_have_other_numbers_of_tokens():
    """HybridEP pads them; an allgather is only for the ranks of a sequence, which are padded alike."""
    assert transformer_fields(EXPERTS, actor(), ENGINE)["moe_hybridep_pad_uneven_dispatch_inputs"]
    layout = ["actor.world_size=4", "actor.parallel={tp: 4, ep: 2, etp: 2}", ALLGATHER]
    assert read_experiment(QUICKSTART, layout).actor.megatron["moe_token_dispatcher_type"] == "allgather"


def test_bfloat16_is_for_cuda():
    assert expected_kernels(actor()) == ENGINE
    assert expected_kernels(actor(device="cpu")) == CPU
    assert expected_kernels(actor(lora={"rank": 4})) == CUDA
    assert expected_kernels(ActorConfig()) == CPU


VIRTUAL = ["actor.world_size=4", "actor.parallel.pp=2", "actor.parallel.vpp=2"]
ON_CPU = ["actor.dtype=bfloat16", "actor.device=cpu"]
LORA_ON_GPU = ["actor.dtype=bfloat16", "actor.device=cuda", "actor.lora.rank=4"]
OWN_LAYERS = ["actor.transformer_engine=false", "actor.recompute=selective"]
ALLGATHER = "actor.megatron.moe_token_dispatcher_type=allgather"
MESSAGES = [*VIRTUAL, "actor.megatron.overlap_p2p_comm=true"]


FIELDS = """
import dataclasses, json, sys
from megagrpo.actor.host import prepare_host
prepare_host("cpu")
from megagrpo.actor.megatron_config import _CLASSES
print(json.dumps([[field.name for field in dataclasses.fields(kind)] for kind in _CLASSES.values()]))
"""


@pytest.mark.verifies(
    "actor",
    "each field of Megatron's and SGLang's classes is tried, ours, refused with a reason, or passed on as untried",
    "unit/test_engine_settings.py",
)
def test_every_refusal_fits_a_field_and_names_a_key():
    maps = [path for path in REFUSED if path != SERVER]
    for path, fields in zip(maps, json.loads(python("-c", FIELDS, cwd=ROOT)), strict=True):
        patterns = REFUSED[path].items()
        assert [p for p, _ in patterns if not any(fnmatchcase(name, p) for name in fields)] == []
        for _, why in patterns:
            keys = tuple(why.removeprefix("set by ").split("."))
            free = keys[:-1] in REFUSED and not refusal(keys[:-1], keys[-1])
            assert why.startswith("refused: ") or annotations_at(ExperimentConfig, keys) or free


WRONG = [  # key, right, wrong, message
    ("actor.megatron.+moe_hybridep_num_sms_preprocessing", [5], [5.0, True, "5", None], "declares it as .*int"),
    ("actor.megatron.apply_rope_fusion", [True], [1, "true", None], "valid boolean"),
    ("actor.megatron.fp8", ["hybrid", None], [3], "'e4m3' or 'hybrid'"),
    ("actor.megatron.attention_backend", ["flash"], ["flsh", 2], "flash, fused, unfused, local"),
    ("actor.megatron.+cp_comm_type", ["p2p", ["p2p", "a2a"]], [["p2p", 1], 1], ""),
    ("actor.megatron.recompute_modules", [["mlp"], None], ["mlp", [1]], "List"),
    ("actor.megatron.moe_flex_dispatcher_backend", ["deepep"], ["other"], "deepep"),
    ("actor.megatron.+moe_permute_fusoin", [], [True], "no such field; did you mean 'moe_permute"),
    ("actor.megatron.+no_such_thing_at_all", [], [1], "TransformerConfig has no such field$"),
    ("actor.optimizer.megatron.main_grads_dtype", ["bfloat16"], ["bf16"], "bf16 is no dtype"),
    ("actor.ddp.bucket_size", [40_000_000, None], ["x"], r"Optional\[int\]"),
]


def test_megatron_itself_judges_names_and_values():
    jobs = [
        (key, value, fits)
        for key, right, wrong, _ in WRONG
        for values, fits in ((right, True), (wrong, False))
        for value in values
    ]
    given = [[key.split(".")[:-1], {key.split(".")[-1]: value}] for key, value, _ in jobs]
    # one process for all of them: a path may come twice
    printed = python(
        *("-W", "ignore", "-m", "megagrpo.check.libraries"), cwd=ROOT, input=json.dumps(["megatron", given, None])
    )
    found = json.loads(printed.splitlines()[-1])
    assert [".".join(path) for path, _ in found] == [key for key, _, right in jobs if not right]
    messages = {key: message for key, *_, message in WRONG}
    for path, problem in found:
        assert re.search(messages[".".join(path)], problem), problem


@pytest.mark.parametrize("missing, said", [(True, "not judged, megatron is not installed"), (False, "")])
def test_a_library_is_asked_only_if_it_is_there(missing, said, monkeypatch, capsys):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    settings = {"megatron": {"apply_rope_fusion": 1}} if missing else {}
    assert libraries.library_problems(experiment(actor=settings)) == []
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.megatron.tensor_model_parallel_size=2"], "set by actor.parallel.tp"),
        (["actor.megatron.+tensor_model_parallel_size=2"], "set by actor.parallel.tp"),
        (["actor.megatron.distribute_saved_activations=false"], r"is untried: .*; '\+dist.*' passes it on"),
        (["actor.megatron.mlp_chunks_for_training=2"], "routers would get parts of a micro-batch"),
        (["actor.megatron.moe_permute_fusoin=true"], "did you mean 'moe_permute_fusion'"),
        (["actor.megatron.+moe_permute_fusion=true"], "is tried: write moe_permute_fusion"),
        (["rollout.sglang.deepep_config=a.json"], r"'\+deepep_config' passes it on as it is"),
        (["actor.megatron.calculate_per_token_loss=false"], "Megatron must only sum"),
        (["actor.ddp.average_in_collective=true"], "gradients are sums"),
        (["actor.optimizer.megatron.loss_scale=2.0"], "gradients are not scaled"),
        (["actor.megatron.hidden_dropout=0.1"], "ratio of new to old probabilities"),
        (["actor.ddp.grad_reduce_in_fp32=false"], "set by actor.optimizer.megatron.main_grads_dtype"),
        (["actor.optimizer.megatron.exp_avg_dtype=bfloat16"], "14 bytes of an element at the peak"),
        (["actor.megatron.recompute_modules=[mlp]"], "read with actor.recompute selective only"),
        (["actor.recompute=selective", "actor.megatron.recompute_num_layers=2"], "actor.recompute full"),
        (["actor.megatron.fp8_recipe=tensorwise"], "is read with fp8 only"),
        (["actor.megatron.moe_flex_dispatcher_backend=deepep"], "read with moe_token_dispatcher_type flex only"),
        (["actor.optimizer.megatron.optimizer_offload_fraction=0.5"], "is read with optimizer_cpu_offload only"),
        ([*OWN_LAYERS, "actor.megatron.recompute_modules=[mlp, moe_act]"], "moe_act needs Transformer Engine's"),
        ([*OWN_LAYERS, "actor.megatron.fp8=hybrid"], "needs Transformer Engine's layers"),
        *(
            ([*ON_CPU, f"actor.megatron.{name}"], "needs Transformer Engine's layers")
            for name in ("moe_permute_fusion=true", "apply_rope_fusion=true", "attention_backend=flash")
        ),
        *(
            ([*lead, f"actor.optimizer.megatron.{name}=true"], "needs Transformer Engine's Adam")
            for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer")
            for lead in (ON_CPU, [*OWN_LAYERS, "actor.dtype=bfloat16"], LORA_ON_GPU)
        ),
        (["actor.optimizer.distributed=false", "actor.ddp.overlap_param_gather=true"], "sharded"),
        (["actor.world_size=2", "actor.parallel.ep=2", ALLGATHER], "equal numbers of tokens .* take alltoall"),
        (["actor.world_size=2", "actor.parallel.etp=2", ALLGATHER], "equal numbers of tokens"),
        (["actor.megatron.moe_hybridep_pad_uneven_dispatch_inputs=false"], "set by .*moe_flex_dispatcher_backend"),
        (["actor.megatron.moe_flex_dispatcher_backend=ncclep"], "first micro-batch's size, .* take deepep or hybridep"),
        (["actor.megatron.moe_ncclep_zero_copy=true"], "its buffers have one shape"),
        (["actor.megatron.overlap_p2p_comm=true"], "messages overlap only in the schedule of virtual stages"),
        (["actor.megatron.overlap_p2p_comm_warmup_flush=true"], "messages overlap only in the schedule"),
        (
            ["actor.parallel.ep=1", ALLGATHER, "actor.megatron.moe_shared_expert_overlap=true"],
            "alltoall dispatcher only",
        ),
        (["actor.megatron.cpu_offloading=true"], "is untried"),  # not with stages, nor with recomputation
        (["actor.megatron.cp_comm_type=all_gather"], "is untried"),  # it takes no packed sequences
        (["actor.ddp.align_param_gather=true"], "in others each would be waited for"),
        (["actor.megatron.fused_single_qkv_rope=true"], "is untried"),
        (["actor.megatron.masked_softmax_fusion=false"], "only Megatron's own specifications of layers"),
        ([*MESSAGES, "actor.megatron.deallocate_pipeline_outputs=true"], "waited for before its output is freed"),
        (["actor.optimizer.megatron.optimizer_cpu_offload=true"], "with actor.dtype float32 there are none"),
        (
            ["actor.dtype=bfloat16", "actor.optimizer.megatron.main_grads_dtype=bfloat16"],
            "use_precision_aware_optimizer",
        ),
        (["actor.transformer_engine=true", "actor.megatron.fp8=hybrid"], "fp8_recipe delayed, the default, is refused"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(overrides, message):
    """One of each kind; docs/reference/configuration.md, which a test compares, has all refusals."""
    with pytest.raises(ConfigError, match=message) as error:
        read_experiment(QUICKSTART, overrides)
    assert f"--set {overrides[-1]}: {overrides[-1].partition('=')[0]} = " in str(error.value)


def test_problems_of_all_maps_come_with_their_lines(tmp_path, monkeypatch):
    """The libraries, which other tests ask, would refuse each of these settings."""

    def answer(module, job, *rest):
        return json.dumps([[[*path, name], "is wrong"] for path, names in job[1] for name in names])

    monkeypatch.setattr(libraries, "answer_of", answer)
    actor = "actor:\n  megatron:\n    +moe_hybridep_num_sms_preprocessing: x\n    +tp: 2\n  ddp: {bucket_size: x}\n"
    text = QUICKSTART.read_text().replace("actor:\n", actor, 1)
    text = re.sub(
        r"^rollout: .*$", "rollout:\n  sglang:\n    +page_sise: 1\n    schedule_policy: x", text, flags=re.MULTILINE
    )
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_experiment(tmp_path / "e.yaml", judge=libraries.library_problems)
    megatron, sglang = (text.splitlines().index(f"  {section}:") + 1 for section in ("megatron", "sglang"))
    found = [problem.strip().removeprefix(f"{tmp_path}/") for problem in str(error.value).splitlines()[1:]]
    lines = [megatron + 1, megatron + 2, megatron + 3, sglang + 1, sglang + 2]
    assert [problem.split(": ")[0] for problem in found] == [f"e.yaml:{line}" for line in lines]
    assert found[3].endswith(": rollout.sglang.+page_sise = 1: is wrong")
