"""One trainer rank of `megagrpo bisect`: publishes and verifies weights, then compares."""

from argparse import Namespace
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.start import make_actor
from megagrpo.check.problems import model_to_train
from megagrpo.checkpoint.resume import load_checkpoint, run_identity
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.mesh import LeaderError
from megagrpo.rollout.control import find_service
from megagrpo.tools.bisect.compare import BOUNDS
from megagrpo.tools.bisect.engine import ProbedEngine
from megagrpo.tools.bisect.findings import write_findings
from megagrpo.tools.bisect.procedure import bisect_pair
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.engines.fleet import EngineRegistry
from megagrpo.weights.exchange import WEIGHTS_DIFFER, Exchange


def bisect_ranks(config: ExperimentConfig, args: Namespace, device: torch.device) -> None:
    """Collective. Compares the service's engine with the actor; the main rank writes the report.
    args: of the command line.

    Raises ValueError for an unusable model, prompts or checkpoint.
    """
    model = model_to_train(config)
    images = ImageStore.of(model, config.run_folder.images)
    prompts = load_prompts(config.data, load_tokenizer(model), images, args.prompts).prompts
    actor = make_actor(config, model.arch, device)
    actor.images = images.pixels if images else None
    weights = load_initial_weights(actor, config.model.path)
    version = 0
    if args.checkpoint is not None:
        source = Path(args.checkpoint)  # often of another layout, for which its optimizer is not
        version = load_checkpoint(
            source, run_identity(config, actor), actor, with_optimizer=False
        ).step
    folder = Path(config.output_dir)
    control = find_service(folder, None, config.rollout.start_timeout_s)
    expected = None if args.own_weights else version
    wrong = prove_weights(config, actor, weights, control, expected)
    engine = None
    dtypes = (config.actor.dtype, config.rollout.dtype)
    bounds = BOUNDS["bfloat16" if "bfloat16" in dtypes else "float32"]  # of the coarser dtype
    if args.bound is not None:
        bounds = replace(bounds, relative=args.bound)
    with ExitStack() as stack:
        if actor.mesh.is_main:
            (info,) = control.engines()
            limit_s = config.rollout.patience_s(actor.mesh.device.type == "cuda")
            engine = ProbedEngine(info, config.rollout.tp, control.api_key, folder, limit_s, images)
            stack.callback(engine.close)
            engine.resume()
        findings = bisect_pair(
            actor, engine, prompts[: args.prompts], args.max_new_tokens, folder, bounds, expected
        )

    def write() -> None:
        assert findings is not None, "runs on the main rank"
        write_findings(folder, replace(findings, weights=findings.weights + wrong))

    actor.mesh.from_main(write, "write the report")


def prove_weights(
    config: ExperimentConfig,
    actor: MegatronActor,
    weights: ActorWeights,
    registry: EngineRegistry,
    publish: int | None,
) -> list[str]:
    """Collective. Publishes the actor's weights as version `publish`, or only verifies those of the
    engine if None.

    Returns the differences between digests of the engine's live parameters and of the actor's, a
    line each.
    """
    exchange = Exchange(config, actor.mesh, weights, registry, Path(config.output_dir))
    with closing(exchange):
        try:
            if publish is None:
                exchange.verify()
            else:
                exchange.publish(publish)
        except LeaderError as exc:
            _, message, details = str(exc).partition(WEIGHTS_DIFFER)
            if not message:  # not a difference: the engine failed or does not answer
                raise
            return (message + details).splitlines()
    return []
