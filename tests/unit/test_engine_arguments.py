"""The engines' command lines of every shipped experiment, as SGLang itself resolves them on pretended H100s."""

import json
from pathlib import Path

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.rules.subject import model_description
from megagrpo.config.hardware import HARDWARE
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.libraries import all_library_problems, resolve_all
from tests.experiments import experiment

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"
STAND_INS = {"Qwen3-1.7B": "Qwen3-8B"}  # described in configs/models, of the same family
DECIDING = {"tp", "ep", "nodes_per_engine", "dtype", "deterministic", "max_running_requests", "max_total_tokens"}
DECIDING |= {"mem_fraction", "sglang", "colocate"}
UNKNOWN = {"smollm2"}  # its model is unpacked from a package


def shipped(tiny: Path) -> dict[str, ExperimentConfig]:
    """Name -> experiment with a model that is described: laptop experiments, which make theirs, get a tiny one."""
    (tiny / "config.json").write_text(json.dumps(hf_config(TinyModelConfig())))
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_config(path)
        name = Path(config.model.path).name
        folder = MODELS / STAND_INS.get(name, name)
        found[path.stem] = load_config(path, [f"model.path={folder if folder.is_dir() else tiny}"])
    return found


def test_sglang_takes_the_arguments_of_every_experiment(tmp_path):
    experiments = {name: config for name, config in shipped(tmp_path).items() if name not in UNKNOWN}
    # Experiments with equal engines are resolved once: half a second each, after SGLang's import.
    distinct: dict[str, list[str]] = {}
    for name, config in experiments.items():
        rollout = config.rollout.model_dump_json(include=DECIDING)
        distinct.setdefault(json.dumps(model_description(config)) + rollout, []).append(name)
    first = [names[0] for names in distinct.values()]
    resolved = resolve_all([experiments[name] for name in first], (HARDWARE["H100"], 8))
    for names, found in zip(distinct.values(), resolved, strict=True):
        rollout = experiments[names[0]].rollout
        half = rollout.dtype == "bfloat16"
        wanted = {
            "dtype": rollout.dtype,
            "tp_size": rollout.tp,
            "ep_size": rollout.ep,
            "mem_fraction_static": rollout.mem_fraction,
            "max_running_requests": rollout.max_running_requests,
            "chunked_prefill_size": 8192 // rollout.sglang.get("dp_size", 1),
            "attention_backend": "fa3" if half else "torch_native",
            "moe_runner_backend": "triton",
            "moe_a2a_backend": "none",
            "kv_cache_dtype": "auto",
            "quantization": None,
            "enable_fp32_lm_head": half,
            "enable_memory_saver": rollout.colocate,
            "enable_deterministic_inference": rollout.deterministic,
        }
        described = model_description(experiments[names[0]]) or {}
        if described.get("model_type") == "deepseek_v4":  # SGLang has no other cache for it
            wanted |= {"attention_backend": "dsv4", "kv_cache_dtype": "fp8_e4m3"}
        elif "index_topk" in described or "index_topk" in described.get("text_config", {}):
            wanted |= {"attention_backend": "dsa", "kv_cache_dtype": "bfloat16"}
        if rollout.sglang.get("moe_a2a_backend") == "deepep":  # its experts have one kernel
            wanted |= {"moe_runner_backend": "auto"}
        wanted |= {name: value for name, value in rollout.sglang.items() if name in found}
        print(", ".join(names), found)
        assert rollout.sglang.keys() <= found.keys(), names  # also those that only the memory depends on
        assert {name: found[name] for name in wanted} == wanted, names


@pytest.mark.parametrize(
    ("settings", "said"),
    [  # SGLang's own rules, of which no rule here knows, at its resolution and at an engine's start
        ({"moe_runner_backend": "flashinfer_cutlass"}, "ep"),
        ({"page_size": 64, "chunked_prefill_size": 1000}, "chunked_prefill_size must be divisible by page_size"),
        ({"moe_dense_tp_size": 2}, "moe_dense_tp_size only supports None, 1, or tp_size"),
    ],
)
def test_check_asks_sglang_about_the_gpu_that_the_experiment_names(settings, said):
    folder = ROOT / "configs" / "models" / "Qwen3-30B-A3B"
    rollout = {"tp": 4, "ep": 2, "dtype": "bfloat16", "sglang": settings}
    wrong = experiment(model={"path": str(folder)}, actor={"dtype": "bfloat16"}, rollout=rollout)
    [(keys, text)] = all_library_problems(wrong)
    assert keys == ("rollout", "sglang") and text.startswith("on H100 SGLang does not resolve"), text
    assert said in text, text
