"""Makes an experiment's actor and loads the model's weights into it."""

from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig, TrainConfig
from megagrpo.models.architecture import Architecture
from megagrpo.types import TrainState
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights


def make_actor(config: ExperimentConfig, arch: Architecture, device: torch.device) -> MegatronActor:
    """Collective. Makes the experiment's actor, without weights. plan_schedule sets where its
    learning-rate schedule ends."""
    return MegatronActor(
        arch=arch,
        config=config.actor,
        num_updates=0,
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


def plan_schedule(actor: MegatronActor, train: TrainConfig, steps_left: int) -> None:
    """Lets the learning-rate schedule end with the last of the steps that are left, whatever number
    of updates was made before: earlier starts may have made others a step, and some are skipped."""
    actor.num_updates = actor.updates_done + steps_left * train.updates_of_step


def steps_in_all(config: ExperimentConfig, num_prompts: int, state: TrainState) -> int:
    """Returns after how many steps a resumed run ends: with train.num_epochs when all prompts were
    taken that often, also if earlier steps took another number of them."""
    train = config.train
    if train.num_epochs is None or config.algorithm.dynamic_sampling is not None:
        # dynamic sampling takes as many prompts as it must
        return train.steps(num_prompts)
    left = train.num_epochs * num_prompts - state.data_cursor
    return state.step + max(-(-left // train.num_prompts_per_step), 0)
