"""What every trainer rank of `megagrpo bisect` does: weights, their proof, then the comparison."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.bisect.command import BisectOptions
from megagrpo.bisect.compare import BOUNDS, Bounds
from megagrpo.bisect.engine_side import AskedEngine
from megagrpo.bisect.findings import Findings
from megagrpo.bisect.procedure import bisect_pair
from megagrpo.bisect.report import write_findings
from megagrpo.checkpoint.resume import load_checkpoint, make_actor
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.mesh import LeaderError
from megagrpo.rollout.control import ServiceControl, find_service
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.engines.fleet import EngineRegistry
from megagrpo.weights.exchange import WEIGHTS_DIFFER, Exchange


def bisect_ranks(config: ExperimentConfig, options: BisectOptions, device: torch.device) -> None:
    """Collective. Compares the service's engine with the actor; the main rank writes what was found.

    Raises ValueError for a model, prompts or a checkpoint that cannot be used.
    """
    prompts = load_prompts(config.data, load_tokenizer(config.model))
    tokens = [p.token_ids.tolist() for p in prompts.batch(0, min(options.num_prompts, len(prompts)), config.seed)]
    actor = make_actor(config, 1, device)
    weights = load_initial_weights(actor, config.model.path)
    version = 0
    if options.checkpoint is not None:
        version = load_checkpoint(config, Path(options.checkpoint), actor).step
    control = find_service(Path(config.output_dir), None, config.rollout.start_timeout_s)
    wrong = prove_weights(config, actor, weights, control, None if options.own_weights else version)
    engine = _engine(config, actor, control)
    try:
        bounds = bounds_of(config, options.bound)
        folder = Path(config.output_dir)
        expected = None if options.own_weights else version
        found = bisect_pair(actor, engine, tokens, options.max_new_tokens, folder, bounds, expected)
    finally:
        if engine is not None:
            engine.close()
    actor.mesh.from_main(lambda: _write(folder, found, wrong), "write the report")


def prove_weights(
    config: ExperimentConfig,
    actor: MegatronActor,
    weights: ActorWeights,
    registry: EngineRegistry,
    publish: int | None,
) -> list[str]:
    """Collective. Publishes the actor's weights as version `publish`, None: leaves the engine's as they are.

    Returns what the digests of the engine's live parameters say against the actor's, [] when they agree.
    """
    exchange = Exchange(config, actor.mesh, weights, registry, Path(config.output_dir))
    with closing(exchange):
        try:
            if publish is None:
                exchange.verify()
            else:
                exchange.publish(publish)
        except LeaderError as exc:
            _, says, where = str(exc).partition(WEIGHTS_DIFFER)
            if not says:  # the engine refuses, or does not answer: there is nothing to compare
                raise
            return (says + where).splitlines()
    return []


def bounds_of(config: ExperimentConfig, relative: float | None) -> Bounds:
    """Returns the bounds of the coarser dtype of actor and engines; `relative` takes the place of theirs."""
    coarse = "bfloat16" if "bfloat16" in (config.actor.dtype, config.rollout.dtype) else "float32"
    return BOUNDS[coarse] if relative is None else replace(BOUNDS[coarse], relative=relative)


def _engine(config: ExperimentConfig, actor: MegatronActor, control: ServiceControl) -> AskedEngine | None:
    """Returns the one engine, on the main rank."""
    if not actor.mesh.is_main:
        return None
    (info,) = control.engines()
    limit_s = config.rollout.patience_s(actor.mesh.device.type == "cuda")
    engine = AskedEngine(info, config.rollout.tp, control.api_key, Path(config.output_dir), limit_s)
    engine.resume()
    return engine


def _write(folder: Path, found: Findings | None, wrong: list[str]) -> None:
    assert found is not None, "runs on the main rank"
    found.weights += wrong
    write_findings(folder, found)
