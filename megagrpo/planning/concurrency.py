"""Says how many samples engines really run at once: what their caches hold, and what a running sample holds of it."""

from pathlib import Path

from megagrpo.check.problems import longest_samples, model_description
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.table import architecture_of
from megagrpo.planning.engine_memory import engine_side, server_of
from megagrpo.planning.hardware import hardware_of
from megagrpo.planning.lengths import Lengths, assumed_lengths, lengths_of_run
from megagrpo.planning.recordings import describe_model, resolve_all
from megagrpo.planning.work import model_work
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings
from megagrpo.system.run_folder import RunFolder

_DEFAULT_GPU, _GPUS_PER_NODE = "H100", 8


def at_once_report(config: ExperimentConfig, hardware: str | None = None) -> list[str]:
    """Returns lines for `megagrpo check`; [] for a model that is not there yet.

    hardware: kind of GPU on which SGLang resolves the engines' arguments, which takes some seconds. Without it the
    closed forms take the experiment's own. Engines on a CPU have what their arguments say.
    """
    if model_description(config) is None:
        return []
    lengths, rollout = _lengths(config), config.rollout
    tokens, how = _cache_tokens(config, lengths, hardware)
    by_cache = int(tokens / lengths.held)
    at_once = min(rollout.max_running_requests, by_cache)
    samples = config.train.num_prompts_per_step * config.train.group_size / rollout.num_engines
    limit = "its cache" if by_cache < rollout.max_running_requests else "rollout.max_running_requests"
    lines = [
        f"cache      {tokens:,} tokens an engine, {how}",
        f"  responses  {lengths.origin}; a running sample holds {lengths.held:,.0f} tokens on average",
        f"  at once    {at_once:,} samples an engine, by {limit}, of {samples:,.0f} that it gets a step; the others "
        "wait at the trainers, and leave as there is room",
    ]
    longest = longest_samples(config)["data"]
    if tokens < longest:
        lines.append(f"  ADVICE   a sample may have {longest:,} tokens, more than an engine's cache holds")
    return lines


def _lengths(config: ExperimentConfig) -> Lengths:
    """Returns the lengths of the run's own samples, where it has any."""
    folder = Path(config.output_dir)
    return lengths_of_run(folder, config) if RunFolder(folder).rollout_files() else assumed_lengths(config)


def _cache_tokens(config: ExperimentConfig, lengths: Lengths, hardware: str | None) -> tuple[int, str]:
    rollout = config.rollout
    on_gpus = hardware is not None or config.actor.device == "cuda" or rollout.dtype == "bfloat16"
    if not on_gpus or (config.actor.device == "cpu" and hardware is None):
        place = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=False, num_cores=1)
        return engine_settings(config, place)["max_total_tokens"], "as its arguments on a CPU say"
    kind = hardware or _DEFAULT_GPU
    gpu, server = hardware_of(kind), server_of(rollout)
    how = f"on an {kind} by the closed forms; `--hardware {kind}` asks SGLang for its arguments"
    if hardware is not None:
        server = server_of(rollout, resolve_all([config], (gpu, _GPUS_PER_NODE))[0])
        how = f"on an {kind}, as SGLang resolves its arguments"
    work = model_work(architecture_of(describe_model(config)))
    side = engine_side(work, server, lengths, longest_samples(config)["data"], gpu)
    return side.cache_tokens, how
