"""Repeats the update of a dumped step and compares its metrics with the recorded ones: `megagrpo
replay`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.check.problems import model_to_train
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.ranks import guarded
from megagrpo.system.environment import under_torchrun
from megagrpo.tools.ranks.start import latest_checkpoint, train_ranks

if TYPE_CHECKING:
    import torch

    from megagrpo.tools.ranks.dumps import Dump


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("dump", help="dumps/step_N in a run folder")


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command, or one rank that it started."""
    refuse_replay(config, args.dump)
    if under_torchrun():
        return guarded(config, "replay", partial(replay, config, Path(args.dump)))
    return train_ranks(config, "replay", [args.dump])


def refuse_replay(config: ExperimentConfig, dump_folder: str) -> None:
    """Raises ValueError for what a replay lacks, and for a dump of another number of data-parallel
    ranks."""
    from megagrpo.tools.ranks.dumps import read_dump  # takes seconds

    dump = read_dump(Path(dump_folder))
    dp = config.actor.dp
    if dump.dp != dp:
        raise ValueError(f"{dump_folder} is of {dump.dp} data-parallel ranks, this layout has {dp}")
    model_to_train(config)


def replay(config: ExperimentConfig, dump_folder: Path, device: torch.device) -> None:
    """Collective. Updates the newest saved weights not later than the dumped step; the main rank
    prints the comparison.

    Raises ValueError if the folder is not a finished dump, or has another data-parallel size.
    """
    # these import Megatron, which the host must be prepared for
    from megagrpo.actor.start import initial_weights, make_actor, plan_schedule, steps_in_all
    from megagrpo.actor.step import update, with_reference
    from megagrpo.checkpoint.resume import resume, run_identity, run_inputs
    from megagrpo.data.images import ImageStore
    from megagrpo.data.prompts import load_prompts, load_tokenizer
    from megagrpo.tools.ranks.dumps import read_dump

    dump = read_dump(dump_folder)
    model = model_to_train(config)
    images = ImageStore.of(model, config.run_folder.images)
    num_prompts = 0
    if config.train.num_epochs is not None:  # then the run's length depends on the prompts
        num_prompts = len(load_prompts(config.data, load_tokenizer(model), images))
    actor = make_actor(config, model.arch, device)
    actor.images = images.pixels if images else None
    source = latest_checkpoint(config, actor.mesh, dump.weight_version)
    if source is None and config.checkpoint.load is not None:  # the run began with it
        source = Path(config.checkpoint.load)
    initial_weights(config, dump.algorithm, source, actor)
    identity = run_identity(config, actor, inputs=run_inputs(config, actor.mesh))
    state = resume(config, source, identity, actor)
    version = state.step
    plan_schedule(actor, config.train, steps_in_all(config, num_prompts, state) - version)
    batch = dump.batch(actor.mesh, actor.routed_layers)
    sampling = config.sampling
    if dump.algorithm.uses_reference and dump.algorithm.kl.estimator == "full":
        # the reference's states are not dumped
        batch = with_reference(actor, batch, "full", sampling.temperature)
    values, _ = update(
        actor, batch, dump.algorithm, sampling.temperature, sampling.max_response_tokens
    )
    if actor.mesh.is_main:
        print(compare(dump, values, version, source or config.model.path), flush=True)


def compare(dump: Dump, values: dict[str, float], version: int, source: str | Path) -> str:
    """Returns a table of recorded and repeated metrics, with the weights that were used."""
    weights = f"weights of version {version} ({source})"
    if version != dump.weight_version:
        weights += f"; the step itself started from version {dump.weight_version}: figures differ"
    lines = [weights, f"{'':32}{'then':>24}{'now':>24}"]
    for name, value in sorted(values.items()):
        then = repr(dump.values[name]) if name in dump.values else "-"
        lines.append(f"{name:32}{then:>24}{value!r:>24}")
    return "\n".join(lines)
