"""Engines' command lines, settings and environments: every field of ServerArgs is decided; a CPU's shims."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from megagrpo.check.libraries import library_problems
from megagrpo.config.libraries import REFUSED, SERVER
from megagrpo.config.schema import ExperimentConfig
from megagrpo.cpu.engine_settings import FOLDER
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
    engine_settings,
    on_gpus,
)
from megagrpo.system.environment import child_environment
from megagrpo.tools.explain import settings_report
from tests.experiments import ROOT, experiment, python, setting_problems


def place(cuda: bool, node_rank: int = 0) -> ServerPlace:
    return ServerPlace(node_rank, "127.0.0.1", 20001, "10.0.0.1:20002", cuda, 8)


def config(**rollout) -> ExperimentConfig:
    return experiment(rollout=rollout)


def problems(**rollout) -> list[str]:
    return said(config(**rollout))


def said(experiment: ExperimentConfig) -> list[str]:
    found = setting_problems(experiment.actor, experiment.rollout)
    return [f"{'.'.join(keys)}: {problem}" for keys, problem in found]


FIELDS = """
import json
from sglang.srt.server_args import ServerArgs
print(json.dumps(ServerArgs.__struct_fields__))
"""
RIGHT = {
    "chunked_prefill_size": 4096,
    "disable_radix_cache": True,
    "disable_overlap_schedule": False,  # SGLang's default, which no word can say
    "cuda_graph_bs_decode": [1, 2],
    "bf16_gemm_backend": "torch",  # its option has another name
    "radix_eviction_policy_config": {"a": 1},
    "sampling_backend": "flashinfer",  # its option is added by hand
    "log_level_http": "info",
}
WORDS = """
import json, sys
from megagrpo.rollout.service.engine_words import engine_words
print(json.dumps(engine_words(json.loads(sys.argv[1]))))
"""


def test_every_refusal_fits_a_field():
    fields = json.loads(in_engine_python(FIELDS).splitlines()[-1])
    assert len(fields) > 500
    patterns = REFUSED[SERVER]
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in fields)] == []


def test_sglang_itself_judges_names_and_values():
    wrong = {
        "+chunked_prefil_size": (1, "no such option; did you mean 'chunked_prefill_size'?"),
        "page_size": ("8k", "invalid int value: '8k'"),
        "enable_metrics": (1, "no word"),
        "schedule_policy": ("best", "choose from 'lpm', 'random', 'fcfs'"),
        "cuda_graph_bs_prefill": ([1, "y"], "invalid int value: 'y'"),
        "hicache_ratio": (None, "null has no word"),
        "context_length": (True, "true has no word"),
    }
    given = RIGHT | {name: value for name, (value, _) in wrong.items()}
    found = {keys[-1]: text for keys, text in library_problems(config(sglang=given))}
    assert found.keys() == wrong.keys()
    assert all(text in found[name] for name, (_, text) in wrong.items()), found


@pytest.mark.parametrize(
    "given, said",
    [
        ({"lora_paths": []}, "is refused: engines receive whole weights"),
        ({"max_queued_requests": 8}, "is refused: rejected requests are sent again"),
        ({"mm_process_config": {}}, "is refused: images come with the trainers' requests"),
        ({"quantization": "fp8"}, "is refused: rollout.quantization is the format"),
        ({"hicache_storage_backend": "file"}, "is refused: keys and values of older weights would outlive a publish"),
        ({"tp_size": 8}, "rollout.sglang.tp_size: is set by rollout.tp"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "digests would stop the run; it may be "
                                                      "triton, deep_gemm"),
        ({"moe_runner_backend": "auto"}, "digests would stop the run"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "it may be auto, bf16, bfloat16, fp8_e4m3"),
        ({"dp_size": 2}, "rollout.sglang.dp_size: is refused without enable_dp_attention"),
        ({"enable_hierarchical_cache": True}, "needs hicache_size, GB of host memory for each "
                                              "engine rank"),
    ],
)  # fmt: skip
def test_refused(given, said):
    """One field of each kind of refusal; docs/reference/configuration.md, which a test compares, has them all."""
    found = problems(sglang=given)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize(("model", "read"), [("GLM-4.7-Flash", "auto"), ("GLM-4.5-Air", None)])
def test_a_draft_that_cannot_start_with_random_weights_is_read(model, read):
    """sglang's Glm4MoeLiteForCausalLMNextN takes itself for a whole model after a dummy start, and ends the engine."""
    drafting = experiment(
        model={"path": str(ROOT / "configs/models" / model)}, rollout={"draft_tokens": 2}, actor={"draft": {}}
    )
    settings = engine_settings(drafting, place(cuda=True))
    assert (settings["load_format"], settings.get("speculative_draft_load_format")) == ("dummy", read)


def test_a_hierarchical_cache_has_a_size_and_no_drafts():
    sized = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    assert problems(sglang=sized) == []
    drafting = experiment(rollout={"sglang": sized, "draft_tokens": 2}, actor={"draft": {}})
    assert "is refused with rollout.draft_tokens" in said(drafting)[0]
    ahead = experiment(
        rollout={"sglang": sized, "max_staleness": 2}, algorithm={"mismatch": {"weight": {"name": "tis"}}}
    )
    assert "ends no copies" in said(ahead)[0]


def test_keys_and_values_in_fp8_want_a_correction():
    cache = {"rollout": {"sglang": {"kv_cache_dtype": "fp8_e4m3"}}}
    with pytest.raises(ValueError, match="a cache in fp8_e4m3 rounds, which needs a correction"):
        experiment(**cache)
    experiment(**cache, algorithm={"mismatch": {"weight": {"name": "tis"}}})
    experiment(**cache, algorithm={"loss": {"name": "dppo"}})  # which weighs by the engine's probabilities itself
    with pytest.raises(ValueError, match="needs a correction"):
        experiment(**cache, algorithm={"loss": {"name": "dppo", "against": "old"}})


def test_right_ones_arrive_and_take_the_place_of_our_defaults():
    command = engine_command(config(sglang=RIGHT), place(False))
    variables, path = engine_environment(config(), place(False)), engine_python_path(place(False))
    environment = child_environment(variables, path)
    words = json.loads(python("-c", WORDS, command[-1], env=environment).splitlines()[-1])
    text = " ".join(words)
    assert words[0] == "--model-path" and "--overlap" not in text
    assert '--radix-eviction-policy-config {"a": 1}' in text
    assert "--chunked-prefill-size 4096 --disable-radix-cache --cuda-graph-bs-decode 1 2" in text
    assert "--bf16-gemm-backend torch" in text and "--skip-server-warmup" in words
    assert words.count("--sampling-backend") == words.count("--log-level-http") == 1
    assert words[words.index("--sampling-backend") + 1] == "flashinfer"


def test_interleaved_experts_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "true")
    with pytest.raises(ValueError, match="digests would stop the run; unset it"):
        engine_environment(config(), place(True))
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0")
    engine_environment(config(), place(True))


@pytest.mark.parametrize(
    "device, dtype, gpus, on_gpu",
    [
        ("auto", "float32", 0, False),
        ("auto", "float32", 2, True),
        ("auto", "bfloat16", 2, True),
        ("auto", "bfloat16", 0, None),
        ("cuda", "float32", 0, None),
        ("cpu", "bfloat16", 0, False),
        ("cpu", "float32", 2, False),
    ],
)
def test_engines_without_a_gpu_run_on_the_cpu_only_where_that_is_meant(device, dtype, gpus, on_gpu):
    resolved = config(dtype=dtype)
    resolved = resolved.model_copy(update={"actor": resolved.actor.model_copy(update={"device": device})})
    if on_gpu is None:
        with pytest.raises(ValueError, match="no GPU is visible where engines are to run, .* set actor.device: cpu"):
            on_gpus(resolved, gpus)
    else:
        assert on_gpus(resolved, gpus) is on_gpu
        assert resolved.rollout.patience_s(on_gpu) == (300 if on_gpu else 60)
        assert config(health_timeout_s=20.0).rollout.patience_s(on_gpu) == 20


@pytest.mark.parametrize(
    "rollout, setting, value",
    [
        ({"dtype": "bfloat16"}, "enable_fp32_lm_head", True),  # logits of float32
        ({}, "enable_fp32_lm_head", None),
        ({}, "attention_backend", "torch_native"),  # it knows float32
        ({"deterministic": True}, "attention_backend", "triton"),
        ({"dtype": "bfloat16"}, "attention_backend", None),
        ({}, "moe_runner_backend", "triton"),  # experts keep their order on every GPU
        ({"sglang": {"moe_a2a_backend": "deepep"}}, "moe_runner_backend", None),
        ({}, "mm_feature_transport", "cpu"),  # no pool of GPU memory that never sleeps
        ({"sglang": {"prefill_decode_interval": 4}}, "prefill_decode_interval", 4),
        ({}, "load_format", "dummy"),  # weights are read at the start only on request
        ({"load_format": "model"}, "load_format", "auto"),
    ],
)
def test_settings_of_our_own_on_gpus(rollout, setting, value):
    assert engine_settings(config(**rollout), place(True)).get(setting) == value
    assert "enable_fp32_lm_head" not in engine_settings(config(**rollout), place(False))


def test_engines_in_float32_and_fp8_on_gpus(monkeypatch):
    """SGLang's kernels of norms know no float32, torch's experts skip none; DeepGEMM compiles for minutes."""
    forced, warm = "SGLANG_FORCE_FUSED_OP_BACKEND", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"

    def found(cuda: bool = True, **rollout) -> tuple[str | None, str | None]:
        env = engine_environment(config(**rollout), place(cuda))
        return env.get(forced), env.get(warm)

    assert found() == ("torch", None) and found(deterministic=True) == found(cuda=False) == (None, None)
    in_fp8 = {"dtype": "bfloat16", "quantization": "fp8"}
    assert found(dtype="bfloat16") == (None, None) and found(**in_fp8) == (None, "1")
    monkeypatch.setenv(warm, "0")
    assert found(**in_fp8) == (None, "0"), "the user's own"
    with pytest.raises(ValueError, match="rollout.ep 2 with rollout.dtype float32 on GPUs: .* set ep 1 or bfloat16"):
        engine_settings(config(tp=2, ep=2), place(True))
    engine_settings(config(tp=2, ep=2), place(False))


def test_check_says_what_is_handed_over():
    given = config(dtype="bfloat16", sglang={"page_size": 64})
    text = " ".join(" ".join(settings_report(None, given, True)).split())
    assert "engines as on CUDA" in text and "rollout.sglang: {model_path: m" in text
    assert "enable_fp32_lm_head: true" in text and "page_size: 64" in text
    assert "engines as on a CPU" in settings_report(None, config(), True)[0]
    assert settings_report(None, given, False) == ["libraries  rollout.sglang.page_size: 64"]
    assert settings_report(None, config(), False) == []


def test_cpu_engine():
    found = engine_settings(config(deterministic=True), place(False))
    expected = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    expected |= {"max_total_tokens": 20000, "dtype": "float32", "tokenizer_path": "m"}
    expected |= {"custom_weight_loader": "megagrpo.weights.engines.loader.run"}
    expected |= dict.fromkeys(("sleep_on_idle", "skip_server_warmup", "enable_deterministic_inference"), True)
    assert expected.items() <= found.items() and "nnodes" not in found
    environment = engine_environment(config(), place(False))
    expected = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}
    assert expected.items() <= environment.items() and "SGLANG_CPU_OMP_THREADS_BIND" not in environment
    # the bits of a deterministic run do not depend on how many engines share the cores
    assert engine_environment(config(deterministic=True), place(False))["OMP_NUM_THREADS"] == "1"


def test_gpu_engine_is_plain():
    found = engine_settings(config(tp=8, ep=4, dtype="bfloat16"), place(True))
    assert (found["tp_size"], found["ep_size"], found["mem_fraction_static"]) == (8, 4, 0.85)
    of_cpus = {"device", "max_total_tokens", "attention_backend", "sleep_on_idle"}
    assert not {*of_cpus, "enable_deterministic_inference"} & set(found)
    assert engine_python_path(place(True)) == []
    assert "SGLANG_USE_CPU_ENGINE" not in engine_environment(config(), place(True))


def test_engine_over_two_nodes():
    two = config(tp=2, nodes_per_engine=2)
    first, second = (engine_settings(two, place(False, rank)) for rank in (0, 1))
    assert (second["nnodes"], second["node_rank"], second["dist_init_addr"]) == (2, 1, "10.0.0.1:20002")
    assert first["random_seed"] == second["random_seed"]  # its ranks draw the same numbers
    # a core for every rank of the engine, not only of the node
    assert engine_environment(two, place(False, 1))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_no_two_engines_and_no_two_replicas_of_one_draw_the_same_numbers():
    """Else they would give the same responses to a group's prompt."""
    places = [replace(place(False), engine=number) for number in range(3000)]
    seeds = [engine_settings(config(), each)["random_seed"] for each in places]
    assert len({seed + rank for seed in seeds for rank in range(64)}) == 192_000
    code = """
import runpy, torch
runpy.run_module("megagrpo.rollout.service.engine_process", run_name="__mp_main__")
from sglang.srt.managers import scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
load_plugins()
for rank in 0, 1:
    with get_parallel().override(tp_size=2, dp_size=2, enable_dp_attention=True, attn_dp_rank=rank):
        scheduler.set_random_seed(7)
    print(torch.initial_seed())
"""
    assert in_engine_python(code).split()[-2:] == ["7", "8"]


def in_engine_python(code: str) -> str:
    variables, path = engine_environment(config(), place(False)), engine_python_path(place(False))
    return python("-c", code, env=child_environment(variables, path))


def test_shims_are_there_for_the_engine_alone():
    code = "import sys, sgl_kernel, sitecustomize; print(sgl_kernel.__file__, sitecustomize.__file__)"
    assert in_engine_python(code) == f"{FOLDER}/sgl_kernel/__init__.py {FOLDER}/sitecustomize.py"
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        python("-c", "import sgl_kernel")


def test_kernels_are_defined_and_not_run():
    code = """
import triton, triton.language as tl
from triton.runtime.jit import KernelInterface
@triton.jit
def kernel(x, BLOCK: tl.constexpr): return tl.load(x)
@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=[])
def other(): return 3
class Launcher(KernelInterface[int]): pass
from sgl_kernel import silu_and_mul
try: silu_and_mul(1)
except NotImplementedError as exc: print(kernel.__name__, other(), exc, triton.cdiv(7, 2), triton.next_power_of_2(9))
"""
    assert in_engine_python(code) == "kernel 3 sgl_kernel.silu_and_mul does not exist on a CPU 4 16"


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for whole blocks of four bytes, from the published algorithm, in integers."""
    state = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        state ^= k * 0x1B873593 & 0xFFFFFFFF
        state = ((state << 13 | state >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_seed_hash_is_murmur3():
    from megagrpo.cpu.engine.sgl_kernel import murmur_hash32

    seeds, positions, columns = [0, 2**62 + 12345, 2**63 - 1], [0, 5, 70_000], [0, 1, 151_000]
    got = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))

    def pack(s, p, c):
        return s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")

    assert got.tolist() == [[murmur3(pack(s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]
