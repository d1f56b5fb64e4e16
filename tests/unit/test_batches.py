"""The bookkeeping of sampling, without processes: which batches a step plans, what it consumes, and
what the next start takes over."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling import MESH, experiment, prompt_set

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.mesh import Mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollout_log import _record
from megagrpo.rollout.batches import Batches, BatchPlan, SamplingJob, StepBatches
from megagrpo.rollout.sampler import all_of
from megagrpo.types import Outcome, RolloutGroup, Sample, TeacherScores, TrainState

TIS = {"mismatch": {"weight": {"name": "tis"}}}
GREEDY = {"advantage": {"name": "remax"}}


def batches_of(config: ExperimentConfig, mesh: Mesh = MESH) -> Batches:
    return Batches(config, mesh, prompt_set())


def leader(number: int, size: int = 2) -> Mesh:
    """A leader of as many replicas; it has nobody to talk to."""
    return Mesh(number, size, number, size, None, None, number, torch.device("cpu"))


def ids(plan: BatchPlan) -> list[int]:
    return [numbered.group_id for numbered in plan.numbered()]


def described(plans: list[BatchPlan]) -> list[tuple[int, list[int], int, int]]:
    """Of each its number, its groups, the weights that sample it, and the oldest that may have."""
    return [(plan.job.step, ids(plan), plan.job.version, plan.oldest) for plan in plans]


def groups_of(plan: BatchPlan, alike: tuple[int, ...] = ()) -> list[RolloutGroup]:
    """Played samples; groups whose ids are `alike` teach nothing."""
    groups = []
    for numbered in plan.numbered():
        group_id = numbered.group_id
        samples = tuple(Sample(i, (7,), (-1.0,), "stop", plan.job.version, str(i)) for i in range(plan.job.num_samples))
        outcomes = [Outcome("score", 1.0 if group_id in alike else float(i)) for i in range(2)]
        outcomes = tuple(outcomes[: plan.job.num_samples])
        groups.append(RolloutGroup(group_id, numbered.prompt, samples, outcomes))
    return groups


def played(step: StepBatches, batches: Batches, alike: tuple[int, ...] = ()) -> list[str]:
    """Samples what a step asks for; returns the purposes of its batches."""
    purposes = []
    while plan := step.wanted():
        purposes.append(plan.job.purpose)
        batch = batches.open(plan)
        step.add(groups_of(plan, alike))
        batch.consumed = True
    step.choose(Metrics())
    return purposes


def test_a_step_is_the_next_prompts_and_changes_the_state_at_its_end():
    batches, state = batches_of(experiment()), TrainState(step=3, data_cursor=6)
    step = StepBatches(batches, state)
    assert step.early() == step.late() == []
    plan = step.wanted()
    assert (ids(plan), plan.job.step, plan.job.version) == ([6, 7], 3, 3)
    assert [prompt.id for prompt in plan.prompts] == [6, 7]
    step.add(groups_of(plan))
    assert step.wanted() is None
    step.choose(Metrics())
    assert [group.group_id for group in step.groups] == [6, 7]
    assert state == TrainState(step=3, data_cursor=6), "until its updates are made"
    step.finish()
    assert state == TrainState(step=4, data_cursor=8)


def test_batches_ahead_are_planned_once_and_not_beyond_the_last_step():
    config = experiment(rollout={"max_staleness": 2}, algorithm=TIS)
    batches, state = batches_of(config), TrainState()
    expected = [
        [(0, [0, 1], 0, -2), (1, [2, 3], 0, -1), (2, [4, 5], 0, 0)],
        [(1, [2, 3], 1, -1), (2, [4, 5], 1, 0), (3, [6, 7], 1, 1)],
        [(2, [4, 5], 2, 0), (3, [6, 7], 2, 1)],
    ]
    in_flight = [[0, 1, 2], [1, 2, 3], [2, 3]]
    versions = [[0, 0, 0], [0, 0, 1], [0, 1]]
    for number, plans in enumerate(expected):
        step = StepBatches(batches, state, steps_left=4 - number)
        early = step.early()
        assert described(early) == plans
        opened = [batches.open(plan) for plan in early]
        assert [batches.open(plan) for plan in early] == opened, "those in flight, again"
        assert [batch.job.version for batch in opened] == versions[number], "of their dispatch"
        assert list(batches.in_flight) == in_flight[number]
        assert played(step, batches) == ["train"]
        step.finish()
    assert list(batches.in_flight) == [3], "what no step has consumed"


@pytest.mark.parametrize(("ahead", "end"), [(0, ""), (0, "done"), (1, "")])
def test_groups_keep_what_the_record_needs_once_their_batch_is_built(ahead, end):
    """Values of tokens take most of the memory. Groups sampled ahead are whole until a checkpoint no longer needs
    them."""
    batches = batches_of(experiment(rollout={"max_staleness": ahead}, algorithm=TIS))
    step = StepBatches(batches, TrainState(), steps_left=2)
    played(step, batches)
    answer = np.array([7, 8, 9, 0], np.int32)  # ids and log-probabilities in one
    scores = TeacherScores([0.5], [[1, 2]], [[0.5, 0.25]], "student_topk")
    values = {"token_ids": answer[:3], "loss_mask": [1, 0, 1], "teacher": scores}
    values["routed_experts"] = np.zeros((3, 2, 1), np.uint8)
    before = []
    for group in step.groups:
        samples = tuple(replace(sample, **values) for sample in group.samples)
        outcomes = tuple(replace(outcome, end=end) for outcome in group.outcomes)
        before.append(replace(group, samples=samples, outcomes=outcomes))
    step.groups[:] = before
    lines = [_record(group, str) for group in before]
    step.forget_values()
    assert [_record(group, str) for group in step.groups] == lines
    assert (step.groups == before) == bool(ahead)
    for sample in (sample for group in step.groups for sample in group.samples if not ahead):
        assert not np.shares_memory(sample.token_ids, answer) and not len(sample.logprobs)
        assert sample.routed_experts is sample.teacher.top_ids is None


def test_greedy_requests_come_by_themselves_after_a_batch():
    config = experiment(rollout={"max_staleness": 1}, algorithm=TIS | GREEDY)
    batches, state = batches_of(config), TrainState()
    step = StepBatches(batches, state, steps_left=2)
    assert step.early() == []
    first = step.wanted()
    step.add(groups_of(first))
    second = step.wanted()
    assert (second.job.purpose, second.job.num_samples, ids(second)) == ("greedy", 1, ids(first))
    assert second.job.params.temperature == 0 and not second.job.or_newer
    step.add(groups_of(second))
    assert step.wanted() is None and described(step.late()) == [(1, [2, 3], 0, 0)]
    step.choose(Metrics())
    assert [group.greedy.text for group in step.groups] == ["0", "0"]


def test_dynamic_sampling_takes_batches_until_enough_groups_differ():
    config = experiment(algorithm={"dynamic_sampling": {}})
    batches, state = batches_of(config), TrainState()
    step = StepBatches(batches, state)
    assert played(step, batches, alike=(0,)) == ["train", "train batch 1"]
    assert [group.group_id for group in step.groups] == [1, 2]
    step.finish()
    assert state.data_cursor == 4 and [group.group_id for group in state.surplus] == [3]
    step = StepBatches(batches, state)
    assert played(step, batches) == ["train"]
    assert [group.group_id for group in step.groups] == [3, 4], "the surplus comes first"
    step.finish()
    assert [group.group_id for group in state.surplus] == [5]


def test_a_surplus_that_is_enough_takes_no_batch_and_still_samples_ahead():
    algorithm = TIS | {"dynamic_sampling": {}}
    config = experiment(rollout={"max_staleness": 2}, algorithm=algorithm)
    plan = BatchPlan(SamplingJob.training(config, 0, 1), prompt_set().prompts[:2])
    batches, state = batches_of(config), TrainState(step=1, data_cursor=2, surplus=groups_of(plan))
    step = StepBatches(batches, state)
    assert [ids(plan) for plan in step.early()] == [[2, 3]]
    assert played(step, batches) == []
    step.finish()
    assert (state.step, state.data_cursor, state.surplus) == (2, 2, [])


def test_shares_of_leaders_are_the_batch():
    plan = BatchPlan(SamplingJob.training(experiment(), 0, 0), prompt_set().prompts[:5], 10)
    shares = [batches_of(experiment(), leader(rank)).open(plan).share for rank in range(2)]
    assert [[numbered.group_id for numbered in share] for share in shares] == [[10, 11], [12, 13, 14]]
    no_leader = replace(leader(1), leader=0)
    assert batches_of(experiment(), no_leader).open(plan).share == ()


def test_a_prompt_that_comes_again_has_other_seeds():
    first, second = prompt_set().prompts[:2]
    plan = BatchPlan(SamplingJob.training(experiment(), 0, 0), [first, second, first])
    assert [numbered.repeats for numbered in plan.numbered()] == [0, 0, 1]


def test_what_an_earlier_start_finished_goes_to_the_leader_whose_share_it_is():
    config = experiment(rollout={"max_staleness": 1}, algorithm=TIS)
    plan = BatchPlan(SamplingJob.training(config, 0, 0, ahead=True), prompt_set().prompts[:4])
    earlier = groups_of(plan)
    for rank, mine in ((0, [0]), (1, [3])):
        batches = batches_of(config, leader(rank))
        batches.restore(TrainState(ahead=[earlier[0], earlier[3]]))
        assert [group.group_id for group in batches.finished()] == mine, "saved again"
        batch = batches.open(plan)
        assert list(batch.finished) == mine
        assert batches.restored == {}
        assert [group.group_id for group in batches.finished()] == mine


def test_nothing_is_restored_without_staleness():
    ahead = groups_of(BatchPlan(SamplingJob.training(experiment(), 0, 0), prompt_set().prompts[:1]))
    batches = batches_of(experiment())
    state = TrainState(ahead=ahead)
    batches.restore(state)
    assert state.ahead == [] and batches.finished() == []


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("actor.optimizer.lr: 0.1 -> 0.2 from step 3", True),
        ("reward.grader: math -> exact from step 3", False),
        ("sampling.temperature: 1.0 -> 0.7 from step 3", False),
        ("teachers.math.path: old -> new from step 3", False),
        ("data.grader_by_source.math: math -> exact from step 3", False),
        ("data.grader_key: not set -> grader from step 3", False),
        ("data.sources.1.grader: math -> exact from step 3", False),
        ("data.extra_key: not set -> extra from step 3", False),
        ("data.sources.0.prompt_template: not set -> Q: {prompt} from step 3", False),
        ("model.tokenizer: not set -> other from step 3", False),
        ("data.teacher_key: a -> b from step 3", False),
        ("data.sources.1.weight_key: not set -> weights from step 3", False),
        ("data.sources.1.source: math -> algebra from step 3", False),
        ("data.sources.1.path: old -> new from step 3", True),
        ("data.path: old -> new from step 3", True),
        ("eval.data.grader_key: not set -> grader from step 3", True),
    ],
)
def test_groups_of_another_grader_or_another_sampling_are_dropped(change: str, kept: bool):
    """Else steps after a resume would train on rewards of the grader that was replaced."""
    config = experiment(rollout={"max_staleness": 1}, algorithm=TIS)
    groups = groups_of(BatchPlan(SamplingJob.training(config, 0, 0, ahead=True), prompt_set().prompts[:2]))
    batches, state = batches_of(config), TrainState(ahead=groups[:1], surplus=groups[1:])
    batches.restore(state, ["train.num_steps: 2 -> 4 from step 3", change])
    assert [len(batches.finished()), len(state.surplus), len(state.ahead)] == [kept, kept, 0]


def test_rows_that_a_curriculum_draws_are_part_of_the_state_at_once():
    config = experiment(data={"path": "d", "curriculum": {"name": "pools"}})
    batches, state = batches_of(config), TrainState()
    batches.curriculum = Curriculum.of(config, batches.prompts.prompts)
    step = StepBatches(batches, state)
    plan = step.wanted()
    drawn = [prompt.id for prompt in plan.prompts]
    assert state.curriculum.drawn.tolist() == drawn and not state.curriculum.times_seen.any()
    again = StepBatches(batches, state).wanted()
    assert [prompt.id for prompt in again.prompts] == drawn, "a step that begins again"
    step.add(groups_of(plan))
    step.choose(Metrics())
    step.finish()
    assert state.curriculum.drawn.tolist() == []
    assert state.curriculum.times_seen.nonzero()[0].tolist() == sorted(drawn)


def test_an_evaluation_has_the_same_seeds_every_time():
    config = experiment(eval={"data": {"path": "d"}, "num_samples": 3, "num_as_trained": 2})
    prompts = prompt_set(2).prompts
    plans = [BatchPlan.evaluation(config, prompts, version, False) for version in (4, 8)]
    assert plans[0].job == replace(plans[1].job, version=4)
    assert [plan.job.num_samples for plan in plans] == [3, 3]
    assert BatchPlan.evaluation(config, prompts, 4, True).job.num_samples == 2
    assert all(plan.job.is_urgent and not plan.job.or_newer for plan in plans)


def test_what_ends_early_closes_what_it_has_opened():
    """Tasks of groups in a batch: each is cancelled once, whoever is the first to end."""
    closed = []

    async def rollout(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02 * (number + 1))
            closed.append(number)

    async def group(first: int) -> None:
        await all_of([rollout(first + number) for number in range(3)])

    async def batch() -> None:
        task = asyncio.create_task(all_of([group(0), group(3)]))
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(batch())
    assert sorted(closed) == list(range(6))
