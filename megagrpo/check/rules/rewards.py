"""Rules between graders and environments, and the estimator and data that use their rewards."""

from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule


def as_read(subject: Subject) -> Iterator[Rule]:
    """Yields the rules of the experiment alone."""
    experiment = subject.experiment
    reward, sampling = experiment.reward, experiment.sampling
    advantage = experiment.algorithm.advantage
    # a dumped experiment has the default grader, too
    default = type(reward).model_fields["grader"].default
    graded = (reward.grader, reward.graders, reward.group_grader) != (default, [], None)
    given_by = sampling.rewarding or "sampling.agent"
    yield Rule(
        sampling.rewarding and graded,
        f"reward has graders, but the reward is given by {given_by}",
        "remove the graders",
    )
    yield Rule(
        sampling.rewarding and advantage.needs_greedy_response,
        f"{given_by} with advantage {advantage.name}: it needs a greedy response "
        "to each prompt, which would have other turns",
        "take another estimator",
    )
    played = sampling.environment or sampling.agent
    yield Rule(
        played and played.credit == "turn" and not advantage.has_returns,
        f"credit turn with advantage {advantage.name}, which reads only the sum of a rollout's rewards",
        "take reinforce or reinforce_plus_plus, or credit: rollout",
    )
    step_s = experiment.rollout.step_timeout_s
    for key, part in (("agent", sampling.agent), ("environment", sampling.environment)):
        for name in ("timeout_s", "episode_timeout_s"):
            limit_s = getattr(part, name, None) or 0.0
            yield Rule(
                limit_s >= step_s,
                f"sampling.{key}.{name} {limit_s:g} must be below rollout.step_timeout_s {step_s:g}, which "
                "ends the run, not a rollout",
                "lower it, or raise rollout.step_timeout_s",
            )
    yield Rule(
        experiment.data.images_key is not None and sampling.several_turns,
        "sampling.environment and agent with data.images_key: they continue prompts of text only",
        "remove one of both",
    )
    by_row = any(
        part.grader or part.grader_key or part.grader_by_source for part in experiment.data.parts
    )
    several = len(reward.graders) > 1 and not by_row and reward.group_grader is None
    yield Rule(
        advantage.reads_parts and not several,
        f"advantage {advantage.name} normalizes the scores of several graders one by one",
        "name two or more in reward.graders, all of which score every row: without "
        "group_grader, data.grader_key, grader_by_source and graders of sources",
    )
    yield Rule(
        reward.group_grader and advantage.needs_greedy_response,
        f"reward.group_grader with advantage {advantage.name}: its greedy baseline has no group",
        "remove the group grader, or take another estimator",
    )
