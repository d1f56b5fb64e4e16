"""Batches sampled ahead of the weights: the schedule of dispatch, the bound, and which weights sampled which token."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_service import FakeService, running
from sampling import MESH, source_of, take
from sampling import experiment as short_experiment

from megagrpo.algo.correction import staleness_metrics
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.run import Run
from megagrpo.rollout.generation import sample_seed
from megagrpo.types import RolloutGroup, Sample, TrainState
from tests.experiments import until

pytestmark = pytest.mark.verifies(
    "runs",
    "`max_staleness`: order, bound, nothing lost or twice; 0 is the run without the setting",
    "e2e/test_async_run.py",
)

WANTED, GROUP_SIZE, STEPS = 2, 2, 6


def experiment(staleness: int) -> ExperimentConfig:
    mismatch = {"weight": {"name": "tis"}} if staleness else {}
    return short_experiment(rollout={"max_staleness": staleness}, algorithm={"mismatch": mismatch})


def steps_of(service: FakeService, config: ExperimentConfig) -> list[list[RolloutGroup]]:
    """The groups of every step of a loop whose publishes the service takes at once."""
    source, state, steps = source_of(service.control, config), TrainState(), []
    for step in range(STEPS):
        steps.append(take(source, state, STEPS - step).groups)
        source.drain()
        service.version = step + 1
    source.close()
    return steps


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
        assert [group.group_id for group in groups] == [group.prompt.id for group in groups], "the index in the run"


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
        source = source_of(service.control, experiment(1))
        take(source, TrainState())
        until(lambda: len(service.requests) == 2 * WANTED * GROUP_SIZE)  # the second batch, in the first one's training
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


@pytest.mark.parametrize("carries", [False, True])
def test_a_surplus_of_dynamic_sampling_is_older_without_staleness_too(carries: bool):
    """Else the alarm of a start takes older weights for a fault of the engine."""
    config = experiment(0)
    if carries:
        config = config.model_copy(update={"algorithm": AlgorithmConfig(dynamic_sampling={})})
    with running(FakeService()) as service:
        (groups,) = steps_of(service, config)[:1]
    actor = SimpleNamespace(arch=None, on_last_stage=True)
    state = TrainState(step=1)
    run = SimpleNamespace(config=config, mesh=MESH, state=state, actor=actor)
    batch = Run.build_batch(run, SimpleNamespace(groups=groups, forget_values=lambda: None), one_pass(WANTED))
    assert (batch.lags is not None and int(batch.lags.max()) == 1) is carries


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
