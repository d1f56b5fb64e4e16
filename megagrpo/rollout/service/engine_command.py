"""The command line and the environment of one SGLang engine, as pure functions of the experiment.

An engine is one model replica of `rollout.tp` ranks over `rollout.nodes_per_engine` nodes; each node runs one server
process, the first one answers HTTP.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig
from megagrpo.environment import ENGINE, WEIGHT_LOADER

CPU_SHIMS = Path(__file__).parents[1] / "cpu"
_CPU_TOKENS = 20_000  # KV cache; SGLang would size it by memory that it shares with the trainer
_MAX_CPU_THREADS = 4  # of a rank: a small model gets slower with more


@dataclass(frozen=True)
class ServerPlace:
    """Says where one node of an engine runs."""

    node_rank: int
    bind_host: str  # interface to listen on
    port: int  # HTTP of this server process
    rendezvous: str  # "host:port" where the engine's nodes meet
    cuda: bool
    num_cores: int  # CPU cores that this server process may count on
    engine: str = ""  # its id


def engine_command(config: ExperimentConfig, place: ServerPlace) -> list[str]:
    """Returns the command of one server process."""
    rollout = config.rollout
    options: dict[str, str | int | float] = {
        "--model-path": config.model.path,
        "--tokenizer-path": config.model.tokenizer or config.model.path,
        "--host": place.bind_host,
        "--port": place.port,
        # Random weights cost no reading: the first publish overwrites and proves them before the engine serves.
        "--load-format": "dummy" if rollout.load_format == "dummy" else "auto",
        "--dtype": rollout.dtype,
        "--tp": rollout.tp,
        "--ep-size": rollout.ep,
        "--max-running-requests": rollout.max_running_requests,
        "--custom-weight-loader": WEIGHT_LOADER,
        "--log-level-http": "warning",  # the supervisor asks every second
        "--random-seed": config.seed % 2**31,
    }
    flags = ["--skip-server-warmup"]  # a request before the weights are verified would say nothing
    if rollout.nodes_per_engine > 1:
        options |= {
            "--nnodes": rollout.nodes_per_engine,
            "--node-rank": place.node_rank,
            "--dist-init-addr": place.rendezvous,
        }
    if rollout.deterministic:
        flags.append("--enable-deterministic-inference")
    max_tokens = rollout.max_total_tokens
    if place.cuda:
        options["--mem-fraction-static"] = rollout.mem_fraction
    else:
        max_tokens = max_tokens or _CPU_TOKENS
        flags.append("--sleep-on-idle")  # else the scheduler burns a core that the trainer needs
        options |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--cuda-graph-backend-decode": "disabled",
            "--cuda-graph-backend-prefill": "disabled",
        }
    if max_tokens:
        options["--max-total-tokens"] = max_tokens
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "megagrpo.rollout.service.engine_process", *words, *flags, *rollout.extra_args]


def engine_environment(config: ExperimentConfig, place: ServerPlace) -> dict[str, str]:
    """Returns the variables to set for one server process."""
    env = {
        # /health would sample a token, which a paused engine cannot: an update of the weights would look like a death.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TOKENIZERS_PARALLELISM": "false",
        ENGINE: place.engine,
    }
    if place.cuda:
        return env
    ranks_here = config.rollout.tp // config.rollout.nodes_per_engine
    env |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler's torch.compile costs seconds of C++ per shape and gains nothing here
        # Threads that wait by spinning starve the others on shared cores: 20 tokens/s instead of 4,000 were measured.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, min(_MAX_CPU_THREADS, place.num_cores // ranks_here))),
    }
    if config.rollout.tp > 1:
        # More ranks than NUMA nodes: SGLang asks to be told a core for each (of all nodes), or refuses.
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % max(1, place.num_cores)) for rank in range(config.rollout.tp)
        )
    return env


def engine_python_path(place: ServerPlace) -> list[str]:
    """Returns the folders that come first on the server process's PYTHONPATH."""
    return [] if place.cuda else [str(CPU_SHIMS)]
