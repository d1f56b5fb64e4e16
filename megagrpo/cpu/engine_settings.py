"""What the command line and the environment of an engine have on a CPU and nowhere else."""

from pathlib import Path

from megagrpo.config.rollout import RolloutConfig

FOLDER = Path(__file__).parent / "engine"  # comes first on the engine's PYTHONPATH
_MAX_THREADS = 4  # of a rank: a small model gets slower with more

SETTINGS: dict[str, object] = {  # by field of SGLang's ServerArgs
    # SGLang would size the KV cache by free memory, which the trainer needs too
    "max_total_tokens": 20_000,
    # nor by what a prefill may need, which on a small machine would leave nothing
    "mem_fraction_static": 0.85,
    "sleep_on_idle": True,  # else the scheduler burns a core that the trainer needs
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    # of a hierarchical cache; its other copies have no stand-ins
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}

RECURRENT: dict[str, object] = {  # more, for a model with recurrent layers
    # the other strategy and overlapping schedules copy states by Triton kernels
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
    "moe_runner_backend": "triton",  # Nemotron-H's default reorders weights for a GPU's kernel
}


def environment(rollout: RolloutConfig, num_cores: int) -> dict[str, str]:
    """Returns the variables of a server process that has `num_cores` cores."""
    ranks_here = rollout.tp // rollout.nodes_per_engine
    threads = min(_MAX_THREADS, num_cores // ranks_here)
    if rollout.deterministic:
        # The last bits of a sum depend on the number of threads, and their share of the cores on
        # the number of engines.
        threads = 1
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the machine may have GPUs that must not be used
        # the sampler's torch.compile costs seconds of C++ per shape and gains nothing here
        "TORCHDYNAMO_DISABLE": "1",
        # Threads that wait by spinning starve the others on shared cores: 20 tokens/s instead of
        # 4,000 were measured.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, threads)),
    }
    if rollout.tp > 1:
        # With more ranks than NUMA nodes SGLang requires a core for each rank, of all nodes.
        cores = (str(rank % max(1, num_cores)) for rank in range(rollout.tp))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return env
