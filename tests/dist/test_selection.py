"""Dynamic sampling over gloo ranks: the same groups for every data-parallel size, none lost, also across a resume."""

from pathlib import Path

import pytest
import torch

from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.folder import latest
from megagrpo.checkpoint.groups import read_groups, saved_groups, shared_groups, write_groups
from megagrpo.config.schema import CheckpointConfig, ExperimentConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, make_mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.batches import Batches, BatchPlan, StepBatches
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample, TrainState
from tests import experiments
from tests.curricula import ANY, NoActor
from tests.dist.workers.launch import run_meshes

WANTED, NUM_STEPS, NUM_PROMPTS = 4, 4, 9
DROPPED = "dynamic_sampling/dropped"
PROMPTS = PromptSet(tuple(Prompt(i, str(i), (1, i), "") for i in range(NUM_PROMPTS)), 0, shuffle=True)


class Source:
    """Two responses to each prompt; two prompts of three teach something."""

    def __init__(self, mesh: Mesh, config: ExperimentConfig, always_alike: bool = False):
        self.batches, self.always_alike = Batches(config, mesh, PROMPTS), always_alike
        self.asked: list[str] = []

    def take(self, state: TrainState, metrics: Metrics) -> StepBatches:
        """The step after a state, without its end."""
        step = StepBatches(self.batches, state)
        while plan := step.wanted():
            self.asked.append(plan.job.purpose)
            step.add(self.groups(plan))
        step.choose(metrics)
        return step

    def groups(self, plan: BatchPlan) -> list[RolloutGroup]:
        assert plan.job.step == plan.job.version
        share = self.batches.open(plan).share
        return [self.group(each.group_id, each.prompt, plan.job.version) for each in share]

    def group(self, group_id: int, prompt: Prompt, version: int) -> RolloutGroup:
        alike = self.always_alike or prompt.id % 3 == 0
        other = Outcome("score", 0.1) if alike else Outcome("timeout") if prompt.id == 1 else Outcome("score", 1.0)
        outcomes = (Outcome("score", 0.1), other)
        samples = tuple(Sample(i, (5, 6 + i), (-0.1, -1 / 3), "stop", version, "a") for i in range(2))
        return RolloutGroup(group_id, prompt, samples, outcomes)


def experiment(**options) -> ExperimentConfig:
    train = {"num_prompts_per_step": WANTED, "group_size": 2}
    return experiments.experiment(train=train, algorithm={"dynamic_sampling": options})


def run_steps(mesh: Mesh, folder: Path, num_steps: int) -> list[dict]:
    """Steps of the loop without training, continued from the folder's checkpoint; one more checkpoint after each."""
    state = TrainState()
    if found := latest(folder):
        state = checkpoint.load(found, ANY, lambda _: None, mesh)
        state.surplus = dealt(mesh, found)
    source, steps = Source(mesh, experiment()), []
    while state.step < num_steps:
        metrics = Metrics()
        taken = source.take(state, metrics)
        taken.finish()
        checkpoint.PendingSave(folder, state, ANY, CheckpointConfig(keep=9), NoActor, mesh).finish()
        written = latest(folder) / f"surplus-{mesh.dp_rank:05}.npz"
        assert (read_groups(written) if written.exists() else []) == list(state.surplus), "each leader's own"
        parts = [group for part in mesh.gather_dp(taken.groups) for group in part]
        surplus = [group for part in mesh.gather_dp(state.surplus) for group in part]
        numbers = metrics.reduced(mesh.reduce)
        steps.append({"chosen": parts, "surplus": surplus, "cursor": state.data_cursor, "metrics": numbers})
    return steps


def alone() -> Mesh:
    return make_mesh(0, 1, torch.device("cpu"), 60.0)


def by_id(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return sorted(groups, key=lambda group: group.group_id)


def test_batches_are_full_and_nothing_is_lost(tmp_path):
    steps = run_steps(alone(), tmp_path, NUM_STEPS)
    order, taken, carried = iter(PROMPTS.batch(0, 1000, 0)), 0, 0
    for step in steps:
        ids = [group.group_id for part in ("chosen", "surplus") for group in step[part]]
        assert ids == sorted(set(ids)) and [PROMPTS.batch(i, 1, 0)[0].id for i in ids[:WANTED]] == [
            group.prompt.id for group in step["chosen"]
        ], "the index in the run, through the surplus too"
        # the informative prompts in the order of the data, none left out and none twice
        expected = [next(prompt for prompt in order if prompt.id % 3 and prompt.id != 1).id for _ in range(WANTED)]
        assert [g.prompt.id for g in step["chosen"]] == expected
        numbers = {name.split("/")[1]: value for name, value in step["metrics"].items()}
        assert numbers["generated"] == step["cursor"] - taken == WANTED * numbers["num_gen_batches"]
        assert numbers["carried"] == carried and numbers["surplus"] == len(step["surplus"])
        assert numbers["generated"] + carried == WANTED + numbers["dropped"] + numbers["surplus"]
        taken, carried = step["cursor"], len(step["surplus"])
    assert any(step["surplus"] for step in steps) and sum(step["metrics"][DROPPED] for step in steps) > 0


@pytest.mark.parametrize("world", [2, 3])
def test_selection_does_not_depend_on_the_layout(tmp_path, world):
    """Two steps by one rank, the rest by `world` from its checkpoint: the same groups as one rank without a break."""
    whole = run_steps(alone(), tmp_path / "whole", NUM_STEPS)
    assert whole[1]["surplus"], "the break would prove nothing about the surplus"
    run_steps(alone(), tmp_path / "parts", 2)
    resumed = run_meshes(world, tmp_path, run_steps, tmp_path / "parts", NUM_STEPS)[0]
    for one, many in zip(whole[2:], resumed, strict=True):
        assert many["chosen"] != [] and by_id(many["chosen"]) == one["chosen"]
        assert by_id(many["surplus"]) == one["surplus"]
        assert many["cursor"] == one["cursor"]
        # sums of floats, which Python 3.12 rounds once for all that a rank adds
        assert many["metrics"] == pytest.approx(one["metrics"], rel=1e-12)


def dealt(mesh: Mesh, folder: Path) -> list[RolloutGroup]:
    saved = saved_groups(folder, "surplus", mesh)
    return shared_groups(saved[mesh.share(len(saved))], mesh)


def test_ranks_of_a_replica_share_its_leaders_groups(tmp_path):
    """Only leaders read the files; the others have no experts and texts, as in a step."""
    prompts = PROMPTS.batch(0, 5, 0)
    groups = [Source(alone(), experiment()).group(number, prompt, 1) for number, prompt in enumerate(prompts)]
    write_groups(tmp_path / "surplus-00000.npz", groups[:3])
    write_groups(tmp_path / "surplus-00001.npz", groups[3:])
    first, second = groups[:2], groups[2:]
    bare = [[group.for_other_ranks() for group in part] for part in (first, second)]
    assert run_meshes(4, tmp_path, dealt, tmp_path, replicas=2) == [first, bare[0], second, bare[1]]
    assert bare[0] != first


def test_too_few_groups_is_an_error_that_says_what_to_do():
    source = Source(alone(), experiment(max_num_gen_batches=3), always_alike=True)
    state = TrainState()
    said = (
        r"3 batches of 4 prompts .*max_num_gen_batches.* 0 of 4 groups; 12 of 12 were dropped "
        r"\(groups of equal reward\)"
    )
    with pytest.raises(RuntimeError, match=said):
        source.take(state, Metrics())
    assert source.asked == ["train", "train batch 1", "train batch 2"]
    assert state == TrainState(), "a step that fails leaves the state as it was"


def test_shaped_rewards_can_tell_groups_apart():
    """Rewards alike, lengths not: overlong shaping makes the difference."""
    config = experiment(metric="shaped_reward")
    options = {"reward": {"overlong": {"buffer_tokens": 4}}, "dynamic_sampling": config.algorithm.dynamic_sampling}
    config = config.model_copy(
        update={
            "algorithm": type(config.algorithm)(**options),
            "sampling": config.sampling.model_copy(update={"max_response_tokens": 5}),
        }
    )

    class Lengths(Source):
        def group(self, group_id, prompt, version):
            lengths = (2, 2 + prompt.id % 2)
            samples = tuple(Sample(i, (5,) * n, (-0.1,) * 5, "stop", version, "") for i, n in enumerate(lengths))
            return RolloutGroup(group_id, prompt, samples, (Outcome("score", 1.0),) * 2)

    chosen = Lengths(alone(), config).take(TrainState(), Metrics())
    assert [g.prompt.id % 2 for g in chosen.groups] == [1] * WANTED


def test_without_dynamic_sampling_the_step_is_the_next_prompts():
    config = experiment()
    config = config.model_copy(update={"algorithm": type(config.algorithm)()})
    source, state = Source(alone(), config), TrainState()
    for step in range(2):
        taken = source.take(state, Metrics())
        assert [g.prompt for g in taken.groups] == PROMPTS.batch(step * WANTED, WANTED, 0)
        taken.finish()
        assert (state.step, state.data_cursor) == (step + 1, (step + 1) * WANTED)
    assert source.asked == ["train", "train"]
