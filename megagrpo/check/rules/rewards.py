"""What gives the reward, with the estimator and the data that it goes to."""

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule


def grader_rules(subject: Subject) -> list[Rule]:
    """Rules about graders."""
    experiment = subject.experiment
    reward = experiment.reward
    advantage = experiment.algorithm.advantage
    by_row = any(
        part.grader or part.grader_key or part.grader_by_source for part in experiment.data.parts
    )
    several = len(reward.graders) > 1 and not by_row and reward.group_grader is None
    return [
        Rule(
            advantage.reads_parts and not several,
            f"advantage {advantage.name} normalizes the scores of several graders one by one",
            "name two or more in reward.graders, all of which score every row: without "
            "group_grader, data.grader_key, grader_by_source and graders of sources",
        ),
        Rule(
            reward.group_grader and advantage.needs_greedy_response,
            f"reward.group_grader with advantage {advantage.name}: its greedy baseline has no group",
            "remove the group grader, or take another estimator",
        ),
    ]


def environment_rules(subject: Subject) -> list[Rule]:
    """Rules about environments and agents."""
    experiment = subject.experiment
    sampling = experiment.sampling
    sees = experiment.data.images_key is not None
    reward = experiment.reward
    advantage = experiment.algorithm.advantage.name
    given = (
        reward.grader,
        reward.graders,
        reward.group_grader,
    )  # a dumped experiment has the default grader, too
    graded = given != (type(reward).model_fields["grader"].default, [], None)
    given_by = sampling.rewarding or "sampling.agent"
    whole_s = 0.0 if sampling.environment is None else sampling.environment.episode_timeout_s or 0.0
    return [
        Rule(
            sampling.rewarding and graded,
            f"reward has graders, but the reward is given by {given_by}",
            "remove the graders",
        ),
        Rule(
            sampling.rewarding and experiment.algorithm.needs_greedy_response,
            f"{given_by} with advantage {advantage}: it needs a greedy response "
            "to each prompt, which would have other turns",
            "take another estimator",
        ),
        Rule(
            whole_s >= experiment.rollout.step_timeout_s,
            "sampling.environment.episode_timeout_s must be below "
            "rollout.step_timeout_s, that of all rollouts of a step",
            "lower it, or raise rollout.step_timeout_s",
        ),
        Rule(
            sees and sampling.several_turns,
            "sampling.environment and agent with data.images_key: they continue "
            "prompts of text only",
            "remove one of both",
        ),
    ]
