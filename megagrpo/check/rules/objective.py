"""The objective with the rest of the experiment: passes, groups, KL and components of the loss."""

import math
from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule
from megagrpo.config.objective.kl import KL_ERROR_LIMIT
from megagrpo.config.objective.policy_loss import KlCovLoss
from megagrpo.config.schema import ExperimentConfig


def as_read(subject: Subject) -> Iterator[Rule]:
    """Yields the rules of the experiment alone."""
    experiment = subject.experiment
    yield from _steps(experiment)
    yield from _components(experiment)
    algorithm, train = experiment.algorithm, experiment.train
    parallel = experiment.actor.parallel
    updates = train.updates_of_step
    elsewhere = not experiment.actor.packing or parallel.dynamic_context
    moves = parallel.cp > 1 and updates > 1 and elsewhere
    yield Rule(
        moves and algorithm.kl.estimator == "full" and algorithm.uses_reference,
        f"algorithm.kl.estimator full, actor.parallel.cp {parallel.cp} and {updates} updates a step "
        "need actor.packing: true without parallel.dynamic_context: else reference and actor have "
        "positions on different ranks",
        "pack all ranks' parts, or use another estimator",
    )
    yield Rule(
        algorithm.kl.reference_every and experiment.actor.lora is not None,
        "algorithm.kl.reference_every: with actor.lora the reference is the model without adapters",
        "remove one of them",
    )
    yield Rule(
        isinstance(algorithm.loss, KlCovLoss)
        and algorithm.old_logprobs == "trainer"
        and updates == 1,
        "algorithm.loss kl_cov charges the change since the step began, and its first update has none: with one "
        "update a step it is the policy gradient alone",
        "raise train.num_updates_per_step, or use clip_cov",
    )
    alone = train.group_size == 1
    yield Rule(
        alone and algorithm.reward.normalizes_by_group,
        "reward.mean/std: group with train.group_size 1 makes every reward 0",
        "use batch, running or none",
    )
    if refused := algorithm.advantage.refuses_group_of_one:
        yield Rule(alone, *refused)
    yield Rule(
        alone and algorithm.dynamic_sampling,
        "dynamic_sampling keeps groups whose responses differ",
        "train.group_size must be at least 2",
    )
    horizon = algorithm.kl.adaptive.horizon if algorithm.kl.adaptive is not None else math.inf
    responses = train.num_prompts_per_step * train.group_size
    longest = experiment.sampling.max_response_tokens
    overlong = algorithm.reward.overlong
    yield Rule(
        horizon <= KL_ERROR_LIMIT * responses,
        f"algorithm.kl.adaptive.horizon {horizon:g} is too short for {responses} "
        f"responses a step: the coefficient is multiplied by 1 - {KL_ERROR_LIMIT} x {responses} / horizon at worst",
        f"use more than {KL_ERROR_LIMIT * responses:g}",
    )
    yield Rule(
        overlong is not None and overlong.buffer(longest) > longest,
        f"algorithm.reward.overlong.buffer_tokens {overlong and overlong.buffer_tokens} is more than "
        f"sampling.max_response_tokens {longest}: every response would be punished",
        "DAPO's buffer is a fifth of the longest response",
    )


def _steps(experiment: ExperimentConfig) -> Iterator[Rule]:
    """Yields the rules of runs by what says how long they are."""
    data = experiment.data
    passes = experiment.train.num_epochs
    yield Rule(
        experiment.train.num_steps == 0 and experiment.eval is None,
        "train.num_steps 0 is an evaluation alone, and there is no section eval",
        "write eval: {data: {path: FILE}}, or raise train.num_steps",
    )
    uneven = {
        "ratios in data.sources: sources are not passed equally often": any(
            source.ratio for source in data.sources
        ),
        "data.curriculum: rows are not passed equally often": data.curriculum,
        "algorithm.dynamic_sampling: a step takes as many prompts as it must, and passes do not say how "
        "many steps there are": experiment.algorithm.dynamic_sampling,
    }
    for what, given in uneven.items():
        yield Rule(passes and given, f"train.num_epochs with {what}", "give train.num_steps")


def _components(experiment: ExperimentConfig) -> Iterator[Rule]:
    data, sampling, algorithm = experiment.data, experiment.sampling, experiment.algorithm
    writers = {writer for each in algorithm.streams if each.weight for writer in each.written_by}
    played = sampling.environment or sampling.agent
    yield Rule(
        ("data" in writers) != (data.demonstration_key is not None),
        "data.demonstration_key and a stream in algorithm.streams that is written_by data "
        "belong together, and one of them is missing",
        "write both, or none",
    )
    yield Rule(
        "tool" in writers and (played is None or played.history == "last"),
        "a stream that is written_by tool: responses hold a tool's words only with "
        "sampling.environment or agent and history all",
        "remove tool from written_by",
    )
    yield Rule(
        algorithm.old_logprobs == "engine" and algorithm.kl.importance and writers - {"policy"},
        "algorithm.kl.importance with old_logprobs engine, which has none of tokens that a stream "
        "takes from a tool or from data",
        "remove importance, or take trainer",
    )
    yield Rule(
        data.weight_key and not algorithm.components,
        "data.weight_key has weights of components, and rl is the only one",
        "name others in algorithm.streams, or remove weight_key",
    )
    yield Rule(
        experiment.actor.trains_draft and algorithm.components,
        "a trained draft with several components of the loss: it learns from rl's tokens",
        "set actor.draft: {train: false}, or remove algorithm.streams and distillation",
    )
