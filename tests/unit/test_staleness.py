"""Batches sampled ahead of the weights: the schedule of dispatch, the bound, and which weights sampled which token."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from fake_service import FakeService, running

from megagrpo.algo.correction import staleness_metrics
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import make_mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.generation import sample_seed
from megagrpo.rollout.selection import next_groups
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample, TrainState

WANTED, GROUP_SIZE, STEPS = 2, 2, 6
PROMPTS = PromptSet(tuple(Prompt(i, "", (1, 2), "") for i in range(20)), 0, False)
MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)


class Grader:
    def submit(self, prompt: Prompt, text: str) -> Future:
        future: Future = Future()
        future.set_result(Outcome("score", float(text)))
        return future


def experiment(staleness: int, **algorithm) -> ExperimentConfig:
    mismatch = {"weight": {"name": "tis"}} if staleness else {}
    return ExperimentConfig.model_validate(
        {
            "name": "t",
            "output_dir": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "train": {"group_size": GROUP_SIZE, "num_prompts_per_step": WANTED, "num_steps": STEPS},
            "rollout": {"max_staleness": staleness, "request_timeout_s": 20.0, "step_timeout_s": 20.0},
            "algorithm": {"mismatch": mismatch, **algorithm},
        }
    )


def steps_of(service: FakeService, config: ExperimentConfig, drained: bool = True) -> list[list[RolloutGroup]]:
    """The groups of every step of a loop whose publishes the service takes at once."""
    decode = lambda ids: "".join(map(str, ids))  # noqa: E731
    source, state = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode), TrainState()
    found = []
    for step in range(STEPS):
        state.step = step
        taken = next_groups(source, PROMPTS, state, config, MESH, None, Metrics(), STEPS - step)
        state.data_cursor, state.surplus = taken.data_cursor, taken.surplus
        source.forget_taken()
        found.append(taken.groups)
        if drained:
            source.drain()
        service.version = step + 1
    source.close()
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_batch_is_trained_on_once_in_order_within_the_bound(staleness):
    with running(FakeService()) as service:
        steps = steps_of(service, experiment(staleness))
    prompts = [group.prompt.id for groups in steps for group in groups]
    assert prompts == list(range(WANTED * STEPS)), "in the order of the data: none lost, none twice"
    assert len(service.requests) == WANTED * STEPS * GROUP_SIZE, "nothing is sampled that no step takes"
    for step, groups in enumerate(steps):
        versions = {sample.weight_version for group in groups for sample in group.samples}
        assert versions == {max(0, step - staleness)}, "drained: each batch by the weights at its dispatch"
        assert [group.group_id for group in groups] == list(range(WANTED))


def test_seeds_hang_on_the_place_in_the_data_and_not_on_the_lag():
    texts = {}
    for staleness in (0, 2):
        with running(FakeService()) as service:
            steps = steps_of(service, experiment(staleness))
        texts[staleness] = [sample.text for groups in steps for group in groups for sample in group.samples]
    assert texts[0] == texts[2] and len(set(texts[0])) > 1
    assert texts[0][0] == str(sample_seed(0, "train", 0, 0, 0))[-4:]


def test_sampling_goes_on_while_the_trainer_trains():
    before = set(threading.enumerate())
    with running(FakeService()) as service:
        config = experiment(1)
        decode = lambda ids: "".join(map(str, ids))  # noqa: E731
        source, state = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode), TrainState()
        next_groups(source, PROMPTS, state, config, MESH, None, Metrics(), STEPS)
        deadline = time.monotonic() + 10
        while len(service.requests) < 2 * WANTED * GROUP_SIZE:
            assert time.monotonic() < deadline, "the second batch is not sampled during the first one's training"
            time.sleep(0.01)
        source.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rollout"]


def test_weights_may_change_in_a_response_that_was_begun_before_and_never_go_back():
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}]
    mixed = {"weight_version": "1", "weight_versions": spans}
    late = [{}] * (WANTED * GROUP_SIZE) + [mixed]  # the first answer of the second batch
    with running(FakeService(script=late)) as service:
        steps = steps_of(service, experiment(1))
    samples = [sample for group in steps[1] for sample in group.samples]
    (one,) = [sample for sample in samples if sample.newer]
    assert one.weight_version == 0 and one.newer == ((1, 1),)
    assert one.token_versions().tolist() == [0, 1, 1, 1]
    batch = build_batch(steps[1], one_pass(WANTED), MESH, trained_version=1)
    row = batch.lags.split(batch.lengths.tolist())[int(np.flatnonzero([sample.newer != () for sample in samples])[0])]
    assert row.tolist() == [0, 0, 1, 0, 0, 0] and batch.lags.max() == 1


def test_staleness_asks_for_a_correction():
    with pytest.raises(ValueError, match=r"max_staleness 2 trains on tokens of older weights.*mismatch.weight"):
        ExperimentConfig.model_validate(
            {"name": "t", "output_dir": "t", "model": {"path": "m"}, "data": {"path": "d"}}
            | {"rollout": {"max_staleness": 2}}
        )


def test_versions_of_a_sample_by_token():
    sample = Sample(0, (1, 2, 3, 4), (0.0,) * 4, "stop", 3, "", None, ((2, 4), (3, 6)))
    assert sample.token_versions().tolist() == [3, 3, 4, 6]


def test_mismatch_is_measured_by_lag():
    lags = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 0]])
    ratio = torch.tensor([[9.0, -0.25, 0.5, 4.0], [9.0, -1.5, 1.0, 0.75]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True], [False, True, True, True]])
    found = staleness_metrics(lags, ratio, mask, lambda tensor, op: tensor)
    assert found["lag/mean"] == pytest.approx(5 / 6) and found["lag/max"] == 2
    by_lag = [found[f"mismatch/logprob_abs_mean_lag_{lag}"] for lag in range(3)]
    assert by_lag == pytest.approx([0.5, 1.0, 4.0])
    assert [found[f"lag/fraction_{lag}"] for lag in range(3)] == pytest.approx([1 / 3, 1 / 2, 1 / 6])


@pytest.mark.parametrize("num_finished", [0, 1, WANTED])
def test_what_was_sampled_ahead_is_not_sampled_again_after_a_restart(num_finished):
    """Batch 1 is on its way when the run is killed; of its groups, `num_finished` had come."""
    decode = lambda ids: "".join(map(str, ids))  # noqa: E731
    config, state = experiment(1), TrainState()
    late = [{}] * ((WANTED + num_finished) * GROUP_SIZE) + ["hang"] * ((WANTED - num_finished) * GROUP_SIZE)
    with running(FakeService(script=late)) as service:
        source = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode)
        taken = next_groups(source, PROMPTS, state, config, MESH, None, Metrics(), STEPS)
        source.forget_taken()
        deadline = time.monotonic() + 10
        while len(source.finished()) < num_finished or len(service.requests) < 2 * WANTED * GROUP_SIZE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ahead = source.finished()
        source.close()
    assert len(taken.groups) == WANTED and [group.group_id for group in ahead] == [2, 3][:num_finished]
    state = TrainState(step=1, data_cursor=taken.data_cursor)
    with running(FakeService(version=1)) as service:
        source = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode)
        source.hold(ahead)
        again = next_groups(source, PROMPTS, state, config, MESH, None, Metrics(), 1)
        source.close()
        assert len(service.requests) == (WANTED - num_finished) * GROUP_SIZE
    assert [(group.prompt.id, group.group_id) for group in again.groups] == [(2, 0), (3, 1)]
    versions = [sample.weight_version for group in again.groups for sample in group.samples]
    assert versions == [0] * (num_finished * GROUP_SIZE) + [1] * ((WANTED - num_finished) * GROUP_SIZE)


def test_a_run_goes_on_with_another_batch_size_where_it_was():
    """Prompts are counted, not batches: three of the earlier size are no whole number of today's."""
    for staleness in (0, 1):
        with running(FakeService(version=5)) as service:
            decode = lambda ids: "".join(map(str, ids))  # noqa: E731
            config, state = experiment(staleness), TrainState(step=5, data_cursor=3)
            source = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode)
            prompts = []
            for _ in range(2):
                taken = next_groups(source, PROMPTS, state, config, MESH, None, Metrics(), 2)
                state.data_cursor = taken.data_cursor
                prompts += [group.prompt.id for group in taken.groups]
            source.close()
        assert prompts == [3, 4, 5, 6]


def test_one_prompt_may_be_on_its_way_twice():
    """A set of as many prompts as a batch has: the same prompt at the same place of two batches at once."""
    few = PromptSet(PROMPTS.prompts[:WANTED], 0, False)
    with running(FakeService()) as service:
        decode = lambda ids: "".join(map(str, ids))  # noqa: E731
        config, state = experiment(2), TrainState()
        source = RolloutSource(config, MESH, ServiceControl(service.url, "key"), Grader(), decode)
        taken = next_groups(source, few, state, config, MESH, None, Metrics(), STEPS)
        source.forget_taken()
        source.drain()
        assert source.waiting() == "" and len(source.finished()) == 2 * WANTED
        source.close()
    assert [group.prompt.id for group in taken.groups] == [0, 1]


def test_what_was_sampled_ahead_outlives_a_save_before_it_is_begun():
    group = RolloutGroup(7, PROMPTS.prompts[7], (), ())
    source = RolloutSource(experiment(1), MESH, ServiceControl("http://127.0.0.1:9", "key"), Grader(), str)
    source.hold([group])
    assert source.finished() == [group]
