"""Makes an experiment's actor and loads the model's weights into it."""

from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.types import TrainState
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights


def make_actor(
    config: ExperimentConfig, arch: Architecture, num_steps: int, device: torch.device
) -> MegatronActor:
    """Collective. Makes the experiment's actor, without weights. num_steps: after which its
    schedule ends."""
    return MegatronActor(
        arch=arch,
        config=config.actor,
        optimizer=config.actor.optimizer,
        num_updates=num_steps * config.train.updates_of_step,
        seed=config.seed,
        device=device,
    )


def initial_weights(
    config: ExperimentConfig, algorithm: AlgorithmConfig, source: Path | None, actor: MegatronActor
) -> ActorWeights:
    """Loads the model of the configuration, also as the reference if the algorithm uses one.

    Reads only names and shapes if the checkpoint `source` then replaces all weights and no
    reference is kept.
    """
    reference = algorithm.uses_reference
    overwritten = source is not None and not reference and config.actor.lora is None
    weights = load_initial_weights(actor, config.model.path, overwritten)
    if reference:
        actor.keep_reference()  # the initial weights, also when the run resumes
    return weights


def steps_in_all(
    config: ExperimentConfig, num_prompts: int, state: TrainState, actor: MegatronActor
) -> int:
    """Returns after how many steps a resumed run ends: with train.num_epochs when all prompts were
    taken that often, also if earlier steps took another number of them; then the learning-rate
    schedule ends there, too.
    """
    train = config.train
    planned = train.steps(num_prompts)
    if train.num_epochs is None or config.algorithm.dynamic_sampling is not None:
        return planned  # dynamic sampling takes as many prompts as it must
    left = train.num_epochs * num_prompts - state.data_cursor
    found = state.step + max(-(-left // train.num_prompts_per_step), 0)
    if found != planned:
        actor.num_updates = actor.updates_done + (found - state.step) * train.updates_of_step
    return found
