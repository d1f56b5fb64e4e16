"""The bodies of the processes that torchrun starts: train, sft, export, replay. A failure becomes one message for the launcher."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megagrpo import checkpoint, environment
from megagrpo.config.schema import ExperimentConfig

FINAL = ".final.txt"


def train_main(config: ExperimentConfig, service_url: str | None) -> int:
    """`megagrpo train`: one trainer rank of a run."""

    def body() -> None:
        from megagrpo.actor.host import prepare_host

        device = prepare_host()
        from megagrpo.monitor.report import write_report
        from megagrpo.run import start_run
        from megagrpo.train import train

        with start_run(config, service_url, device) as run:
            train(run)
            is_main = run.mesh.is_main
        if is_main:
            print(write_report(config.output_dir), flush=True)

    return guarded(config, "trainer", body)


def sft_main(config: ExperimentConfig) -> int:
    """`megagrpo sft`: one rank of the supervised warm-up."""

    def body() -> None:
        from megagrpo.actor.host import prepare_host

        device = prepare_host()
        from megagrpo.sft import sft

        sft(config, device)

    return guarded(config, "sft", body)


def export_main(config: ExperimentConfig, folder: str | None, output: str) -> int:
    """`megagrpo export`: a checkpoint of this run as an HF folder; ValueError when there is none."""

    def body() -> None:
        from megagrpo.actor.host import prepare_host

        device = prepare_host()
        from megagrpo.actor.megatron_actor import MegatronActor
        from megagrpo.actor.saving import load_actor
        from megagrpo.run import run_identity
        from megagrpo.weights.actor_weights import export_hf, load_initial_weights

        source_folder = Path(folder) if folder else checkpoint.latest(Path(config.output_dir) / "checkpoints")
        if source_folder is None:
            raise ValueError(
                f"{config.output_dir}/checkpoints holds no finished checkpoint; name one with --checkpoint"
            )
        actor = MegatronActor(
            model_path=config.model.path,
            config=config.actor,
            optimizer=config.actor.optimizer,
            num_updates=1,
            seed=config.seed,
            device=device,
        )
        weights = load_initial_weights(actor, config.model.path)
        checkpoint.load(source_folder, run_identity(config, actor), lambda f: load_actor(actor, f), actor.mesh)
        export_hf(output, weights, actor.mesh, like=config.model.path, dtype=config.actor.dtype)

    return guarded(config, "export", body)


def replay_main(config: ExperimentConfig, folder: str) -> int:
    """`megagrpo replay`: the update of a dumped step on the newest weights at or before it, beside what was measured then."""

    def body() -> None:
        from megagrpo.actor.host import prepare_host

        device = prepare_host()
        from megagrpo.actor.megatron_actor import MegatronActor
        from megagrpo.actor.saving import load_actor
        from megagrpo.actor.step import update, with_logprobs
        from megagrpo.replay import compare, read_dump
        from megagrpo.run import run_identity
        from megagrpo.weights.actor_weights import load_initial_weights

        dump, num_updates, temperature = (
            read_dump(Path(folder)),
            config.train.num_updates_per_step,
            config.sampling.temperature,
        )
        total = config.train.num_steps * num_updates
        actor = MegatronActor(
            model_path=config.model.path,
            config=config.actor,
            optimizer=config.actor.optimizer,
            num_updates=total,
            seed=config.seed,
            device=device,
        )
        load_initial_weights(actor, config.model.path)
        if dump.algorithm.uses_reference:
            actor.keep_reference()
        version, source = 0, checkpoint.latest(Path(config.output_dir) / "checkpoints", dump.weight_version)
        if source is not None:
            version = checkpoint.load(
                source, run_identity(config, actor), lambda f: load_actor(actor, f), actor.mesh
            ).step
        batch = dump.batch(actor.mesh)
        if (
            dump.algorithm.uses_reference and dump.algorithm.kl.estimator == "full"
        ):  # the reference's states are not dumped
            batch = with_logprobs(actor, batch, temperature, False, "full")
        values = update(actor, batch, dump.algorithm, temperature, config.sampling.max_response_tokens, num_updates)
        if actor.mesh.is_main:
            print(compare(dump, values, version, source or config.model.path), flush=True)

    return guarded(config, "replay", body)


def guarded(config: ExperimentConfig, name: str, body: Callable[[], None]) -> int:
    """Exit status 0, or 1 with the reason in logs/error_<name>_rank<N>.txt; the traceback goes to standard error, which is <name>.log.

    The name ends in FINAL when another try would end in the same way: torchrun starts the ranks again whatever their status, so
    that the launcher, which sees the file, has to end it.
    """
    from megagrpo.mesh import RunStopped

    logs = Path(config.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"error_{name}_rank{environment.get_int('RANK', 0)}"
    for ending in (".txt", FINAL):
        (logs / f"{name}{ending}").unlink(missing_ok=True)
    try:
        body()
        return _ended(0)
    except Exception as exc:
        traceback.print_exc()
        final = isinstance(exc, ValueError | AssertionError | RunStopped)
        draft = logs / f"{name}.tmp"  # the launcher ends this process as soon as it sees the name
        draft.write_text(_reason(exc))
        draft.replace(logs / f"{name}{FINAL if final else '.txt'}")
        return _ended(1)


def _ended(status: int) -> int:
    """The exit status; a rank of torchrun's ends here with it.

    Its work is done and on disk. Python's own way out would take down process groups whose threads still run: now and then that
    aborts ("terminate called without an active exception"), and torchrun would call a finished run failed.
    """
    if environment.under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _reason(exc: Exception) -> str:
    """What a user reads: our own errors say it themselves, anything else is named with the place that raised it."""
    if isinstance(exc, (ValueError, RuntimeError)) and str(exc):
        return str(exc)
    place = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__}: {exc} ({place.filename}:{place.lineno} in {place.name})"
