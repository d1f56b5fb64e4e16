"""The command line and the environment of one SGLang engine, as pure functions of the experiment.

An engine is one model replica of `rollout.tp` ranks over `rollout.nodes_per_engine` nodes; each
node runs one server process, the first one answers HTTP.
"""

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.config.libraries import passed_on
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.table import (
    architecture_of,
    exported_config,
    model_problems,
    read_description,
)
from megagrpo.system.environment import (
    SCORES_AT,
    WEIGHT_LOADER,
    child_environment,
    get,
    without_expandable_segments,
)

_INTERLEAVES = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"

_STATES = 3  # of a running request
_STATES_ON_CUDA = 5  # likewise, if schedules overlap

Settings = dict[str, Any]  # by field of SGLang's ServerArgs


@dataclass(frozen=True)
class ServerPlace:
    """The addresses, rank and cores of one server process of an engine."""

    node_rank: int
    bind_host: str = ""  # interface to listen on; this and the next two are known at the start
    port: int = 0  # HTTP of this server process
    rendezvous: str = ""  # "host:port" where the engine's nodes meet
    cuda: bool = False
    num_cores: int = 1  # CPU cores for this server process
    scores: bool = False  # whether it is a teacher's
    engine: int = 0  # the engine's number among those of its model, another one after each restart


def on_gpus(config: ExperimentConfig, num_gpus: float) -> bool:
    """Returns whether engines run on GPUs, given the number visible on their machines.

    Raises ValueError if the configuration requires GPUs and none is visible.
    """
    reasons = {
        "actor.device is cuda": config.actor.device == "cuda",
        "rollout.dtype is bfloat16": config.rollout.dtype == "bfloat16",
    }
    if config.actor.device == "cpu":
        return False
    for reason, holds in reasons.items():
        if holds and not num_gpus:
            raise ValueError(
                f"no GPU is visible where engines are to run, and {reason}: ask for GPUs (sbatch "
                "--gpus-per-node, docker --gpus all), look at `megagrpo doctor` there, or set "
                "actor.device: cpu to run on the CPU"
            )
    return num_gpus > 0


def engine_command(config: ExperimentConfig, place: ServerPlace) -> list[str]:
    """Returns the command of one server process."""
    # -P: another checkout in the working folder is not this program
    program = [sys.executable, "-P", "-m", "megagrpo.rollout.service.engine_process"]
    return [*program, json.dumps(engine_settings(config, place))]


def engine_settings(config: ExperimentConfig, place: ServerPlace) -> Settings:
    """Returns the settings of one server process, by field of ServerArgs: ours, overridden by
    `rollout.sglang`."""
    rollout = config.rollout
    settings: Settings = {
        "model_path": config.model.path,
        "tokenizer_path": config.model.tokenizer or config.model.path,
        "host": place.bind_host,
        "port": place.port,
        # Random weights save reading a checkpoint: the first publish replaces and verifies them
        # before requests come.
        "load_format": "dummy" if rollout.load_format == "dummy" else "auto",
        "dtype": rollout.dtype,
        "tp_size": rollout.tp,
        "ep_size": rollout.ep,
        "max_running_requests": rollout.max_running_requests,
        "custom_weight_loader": WEIGHT_LOADER,
        "log_level_http": "warning",  # the supervisor's probes come every second
        # Engines with one seed would draw the same responses to a prompt, as would a restarted one;
        # _draw_apart of engine_process.py adds the numbers of replicas.
        "random_seed": (config.seed + 1024 * place.engine) % 2**31,
        "skip_server_warmup": True,  # a request before the weights are verified proves nothing
    }
    if rollout.nodes_per_engine > 1:
        settings |= {
            "nnodes": rollout.nodes_per_engine,
            "node_rank": place.node_rank,
            "dist_init_addr": place.rendezvous,
        }
    if rollout.colocate:
        # without it the calls that release memory do nothing
        settings["enable_memory_saver"] = True
    if rollout.deterministic:
        settings["enable_deterministic_inference"] = True
    if rollout.draft_tokens is not None:  # a chain: of each position the one most probable token
        settings |= {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": rollout.draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": rollout.draft_tokens + 1,
        }
        # SGLang takes this draft for a whole model after a start with random weights
        hf = read_description(Path(config.model.path) / "config.json")
        if hf.get("model_type") == "glm4_moe_lite":
            settings["speculative_draft_load_format"] = "auto"
    if config.actor.routing_replay == "rollout":
        settings["enable_return_routed_experts"] = True
    settings |= _on_cuda(rollout) if place.cuda else _stand_ins().SETTINGS
    if is_recurrent(config.model.path):
        settings["max_mamba_cache_size"] = num_states(rollout, place.cuda)
        if not place.cuda:
            settings |= _stand_ins().RECURRENT
    return settings | passed_on(rollout.sglang)


def is_recurrent(model: str) -> bool:
    """Returns whether layers of a model keep a state for each request, besides keys and values."""
    hf = exported_config(read_description(Path(model) / "config.json"))  # engines' may be in FP8
    return not model_problems(hf) and architecture_of(hf).recurrent is not None


def num_states(rollout: RolloutConfig, cuda: bool) -> int:
    """Returns the number of states that an engine with recurrent layers holds; SGLang would take
    all free memory.

    With a prefix cache a running request needs several: one for itself, and those that are kept for
    others (_calculate_mamba_ratio of SGLang's mem_cache/kv_cache_configurator.py). With fewer
    states fewer requests would run.
    """
    per_request = _STATES_ON_CUDA if cuda else _STATES
    if rollout.sglang.get("disable_radix_cache"):
        per_request = 1
    return per_request * rollout.max_running_requests


def _on_cuda(rollout: RolloutConfig) -> Settings:
    settings: Settings = {
        "mem_fraction_static": rollout.mem_fraction,
        # For Qwen3-VL on large Hopper GPUs SGLang would pass images through a pool of GPU memory
        # that no plan counts and that never sleeps, and hold prompts back for 22 decodings.
        "mm_feature_transport": "cpu",
        "prefill_decode_interval": 0,
    }
    if rollout.dtype == "bfloat16":
        # Without this the logits are rounded to bfloat16 after accumulating in float32; the actor's
        # are not rounded. In deterministic mode SGLang's batch-invariant product replaces this one
        # too.
        settings["enable_fp32_lm_head"] = True
    elif rollout.ep > 1 and not rollout.deterministic:
        raise ValueError(
            f"rollout.ep {rollout.ep} with rollout.dtype float32 on GPUs: torch's experts, the only "
            "ones in float32, do not skip those of other ranks; set ep 1 or bfloat16"
        )
    # SGLang would choose fa3 or flashinfer, which have no float32; Triton rounds products to TF32
    else:
        settings["attention_backend"] = "triton" if rollout.deterministic else "torch_native"
    if rollout.sglang.get("moe_a2a_backend", "none") == "none":
        # With "auto" SGLang chooses flashinfer_trtllm on Blackwell, which reorders the experts'
        # weights after loading.
        settings["moe_runner_backend"] = "triton"
    return settings


def engine_environment(config: ExperimentConfig, place: ServerPlace) -> dict[str, str]:
    """Returns the variables to set for one server process. Raises ValueError for one that engines
    must not have."""
    env = {
        # Else /health samples a token, which fails while an update has paused the engine: it would
        # count as dead.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if place.scores:
        env[SCORES_AT] = str(config.sampling.temperature)
    if is_recurrent(config.model.path):
        # Else the last inputs of convolutions are rounded to bfloat16, whatever the dtype: decoded
        # log-probabilities were off by 2.9 within 24 tokens.
        env["SGLANG_MAMBA_CONV_DTYPE"] = config.rollout.dtype
    if place.cuda:
        if get(_INTERLEAVES, "").lower() in ("1", "true", "yes", "y"):
            raise ValueError(
                f"{_INTERLEAVES} is set: SGLang would reorder the experts' weights after "
                "loading, and digests would stop the run; unset it"
            )
        rollout = config.rollout
        # SGLang would turn its cache of images off for Qwen3-VL, and read the images of a group
        # once for each sample.
        env["SGLANG_VLM_CACHE_SIZE_MB"] = get("SGLANG_VLM_CACHE_SIZE_MB", "100")
        if rollout.dtype == "float32" and not rollout.deterministic:
            env["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"  # its kernels of norms have no float32
        # else DeepGEMM compiles 16,384 sizes of each product at the first start; files of teachers
        # and judges may be FP8
        if rollout.quantization is not None or rollout.load_format == "model":
            env["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] = get("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1")
        # Beside trainers, whose stages differ, SGLang would refuse GPUs with less free memory than
        # others.
        if rollout.colocate:
            env |= without_expandable_segments()
            env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return env
    return env | _stand_ins().environment(config.rollout, place.num_cores)


def engine_python_path(place: ServerPlace) -> list[str]:
    """Returns the folders that come first on the server process's PYTHONPATH."""
    return [] if place.cuda else [str(_stand_ins().FOLDER)]


def environment_without_gpu() -> dict[str, str]:
    """Returns the environment of a process that imports SGLang and sees no GPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return child_environment(hidden, [str(_stand_ins().FOLDER)])


def _stand_ins() -> ModuleType:
    """Returns the stand-ins for an engine on a CPU; the rest of the rollout service does not use
    them."""
    return importlib.import_module("megagrpo.cpu.engine_settings")
