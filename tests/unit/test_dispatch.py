"""When requests leave, which groups a step takes, and what becomes of those that are late or of another start."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from aiohttp import web
from fake_service import FakeService, running
from sampling import MESH, digits, evaluated, experiment, plan, prompt_set, source_of, take

from megagrpo.actor.megatron_actor import NonFiniteUpdate
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.run import Run
from megagrpo.mesh import LeaderError, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout import source as source_module
from megagrpo.rollout.agents.answering import NoAnswer
from megagrpo.rollout.control import ServiceControl, ServiceUnreachable
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.source import Inputs, start_source
from megagrpo.tools.plan.engine_memory import concurrency_report
from megagrpo.types import Outcome, RolloutGroup, Sample, TrainState
from tests.experiments import QUICKSTART, until

WANTED, GROUP_SIZE = 2, 2
EXACT = {"grader": "exact", "workers": 1}
TIS = {"mismatch": {"weight": {"name": "tis"}}}


@contextmanager
def sampling(config: ExperimentConfig, state: TrainState | None = None, decode: Callable = digits, **service):
    """(a service with these fields, the source of a rank, its state)"""
    with running(FakeService(**service)) as fake, closing(source_of(fake.control, config, decode=decode)) as source:
        yield fake, source, state or TrainState()


def trained(groups: list[RolloutGroup]) -> list[int]:
    return [group.prompt.id for group in groups]


def test_limits_of_the_engines_own_cache():
    """Six tokens of prompt and guessed response each, a cache of 26: four at once with the tenth beside it."""
    config = experiment(train={"num_prompts_per_step": 4}, sampling={"max_response_tokens": 8})
    free: list[bool] = []
    with sampling(config, cache_tokens=26, hang=lambda body: not free) as (service, source, _):
        batch = source.begin(plan(source, 0, prompt_set().prompts[:4], 0))
        until(lambda: len(service.requests) == 4)
        time.sleep(0.2)
        assert len(service.requests) == 4
        free.append(True)
        assert source.wait([batch], 0) == []
        assert len(source.take(batch)) == 4 and len(service.requests) == 8


@pytest.mark.parametrize(
    "settings, said",
    [
        (["rollout.sglang.max_total_tokens=300"], ["300 tokens an engine, as its arguments on a CPU", " by its cache"]),
        (["rollout.max_running_requests=7"], ["20,000 tokens", "7 samples an engine, by rollout.max_running_requests"]),
        (["rollout.sglang.max_total_tokens=5"], ["5 tokens an engine", "ADVICE   a sample may have"]),
        (["rollout.dtype=bfloat16"], ["on an H100 by the closed forms", "`--hardware H100` asks SGLang"]),
    ],
)
def test_check_says_how_many_samples_run_at_once(prepared, settings, said, tmp_path):
    config = load_config(QUICKSTART, [*settings, "model.path=runs/quickstart/random", f"output_dir={tmp_path}"])
    text = "\n".join(concurrency_report(config))
    assert all(words in text for words in said), text
    # every episode of a run failed before its first token
    rollouts = config.run_folder.rollout_file(1, 0)
    rollouts.parent.mkdir(parents=True)
    rollouts.write_text('{"group_id": 0, "samples": [{"num_tokens": 0}]}\n')
    assert "\n".join(concurrency_report(config)) == text


def test_training_may_take_longer_than_a_rollout():
    config = experiment(rollout={"max_staleness": 1, "step_timeout_s": 3.0}, algorithm=TIS)
    free: list[bool] = []
    hang = lambda body: not free and body["input_ids"][1] >= 100 + WANTED  # noqa: E731
    with sampling(config, hang=hang) as (_, source, state):
        take(source, state)
        time.sleep(3.3)
        free.append(True)
        assert trained(take(source, state).groups) == [2, 3]


def test_the_same_prompts_may_be_on_their_way_twice():
    """Few prompts, in every batch at the same place, and an evaluation of prompts with the same ids beside them."""
    config = experiment(rollout={"max_staleness": 2}, algorithm=TIS)
    of, free = prompt_set(WANTED), []
    hang = lambda body: not free and body["sampling_params"]["temperature"] > 0  # noqa: E731
    with sampling(config, hang=hang) as (service, source, state):
        for number in range(3):
            prompts = of.batch(2 * number, 2, 0)
            source.begin(plan(source, number, prompts, 0, 2 * number, ahead=True))
        until(lambda: len(service.requests) == 3 * WANTED * GROUP_SIZE)
        assert len(evaluated(source, of.prompts, 0, SamplingParams(0.0, 4), 1)) == WANTED
        assert source.waiting()
        free.append(True)
        assert [trained(take(source, state, 4, of).groups) for _ in range(4)] == [[0, 1]] * 4
    assert not source.waiting()


def test_nothing_is_sampled_that_no_step_takes():
    """With greedy responses; test_staleness.py has the others."""
    config = experiment(rollout={"max_staleness": 2}, algorithm=TIS | {"advantage": {"name": "remax"}})
    with sampling(config) as (service, source, state):
        for step in range(4):
            service.version = step
            take(source, state, 4 - step)
        source.drain()
        assert len(service.requests) == 4 * (WANTED * GROUP_SIZE + WANTED)
        assert source.batches.finished() == []


def test_another_batch_size_after_a_restart_repeats_no_prompt():
    for staleness in (0, 2):
        config = experiment(train={"num_prompts_per_step": 3}, rollout={"max_staleness": staleness}, algorithm=TIS)
        with sampling(config, TrainState(step=2, data_cursor=4), version=2) as (_, source, state):
            found = trained(take(source, state).groups) + trained(take(source, state).groups)
        assert found == [4, 5, 6, 7, 8, 9]


def group(place: int, version: int = 0, number: int = GROUP_SIZE) -> RolloutGroup:
    samples = tuple(Sample(i, (7,), (-1.0,), "stop", version, "7") for i in range(number))
    return RolloutGroup(place, prompt_set().prompts[place], samples, (Outcome("score", 1.0),) * number)


def test_what_an_earlier_start_finished_is_kept_until_it_is_taken():
    config = experiment(rollout={"max_staleness": 2}, algorithm=TIS)
    ahead = [group(2), group(5)]
    with sampling(config, TrainState(step=1, data_cursor=2), version=1) as (service, source, state):
        source.batches.restore(TrainState(ahead=list(ahead)))
        assert source.batches.finished() == ahead, "saved again before anything was begun"
        taken = take(source, state, 3)
        assert trained(taken.groups) == [2, 3] and taken.groups[0].samples == ahead[0].samples
        source.drain()
        assert sorted(group.group_id for group in source.batches.finished()) == [4, 5, 6, 7]
        assert len(service.requests) == 4 * GROUP_SIZE


FITS = group(5, 1)
OTHER_TEMPLATE = replace(FITS.prompt, text="?", token_ids=(9, 9))
TOO_LONG = replace(FITS.samples[0], token_ids=(7,) * 1025, logprobs=(-1.0,) * 1025)


@pytest.mark.parametrize(
    "stale",
    {
        "weights too old for a smaller max_staleness": group(5),
        "another group size": group(5, 1, 3),
        "other data": replace(group(4, 1), group_id=5),
        "another template": replace(FITS, prompt=OTHER_TEMPLATE),
        "longer than responses may be now": replace(FITS, samples=(TOO_LONG, FITS.samples[1])),
        "not graded": replace(FITS, outcomes=(FITS.outcomes[0], Outcome("error", detail="judge is down"))),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_an_earlier_start_finished_is_sampled_again_where_it_does_not_fit(stale):
    config = experiment(rollout={"max_staleness": 1}, algorithm=TIS)
    with sampling(config, TrainState(step=1, data_cursor=2), version=1) as (service, source, state):
        source.batches.restore(TrainState(ahead=[stale[1]]))
        take(source, state, 3)
        source.drain()
        assert len(service.requests) == 4 * GROUP_SIZE


def test_a_step_that_fails_leaves_its_finished_groups():
    config = experiment(rollout={"max_staleness": 1, "step_timeout_s": 2.0}, algorithm=TIS)
    with sampling(config, hang=lambda body: body["input_ids"][1] == 101) as (_, source, state):
        with pytest.raises(LeaderError, match=r"1 of 2 groups did not come.*prompts \[1\]"):
            take(source, state)
        assert {group.group_id for group in source.batches.finished()} == {0, 2, 3}


@pytest.mark.parametrize(
    "algorithm, sampled",
    [({"advantage": {"name": "remax"}}, {0, 1}), ({"dynamic_sampling": {"max_num_gen_batches": 2}}, {0, 1, 2, 3})],
    ids=["its greedy responses", "its second batch"],
)
def test_a_step_that_fails_late_leaves_what_it_had_taken(algorithm, sampled):
    """Else the next start would sample it anew, by newer weights than a run that nobody disturbed."""
    config = experiment(rollout={"max_staleness": 2, "step_timeout_s": 2.0}, algorithm=TIS | algorithm)
    late = lambda body: body["sampling_params"]["temperature"] == 0 or body["input_ids"][1] >= 104  # noqa: E731
    with sampling(config, hang=late, decode=lambda ids: "1") as (_, source, state):
        with pytest.raises((LeaderError, RunStopped)):
            take(source, state)
        assert {group.group_id for group in source.batches.finished()} == sampled


def test_drain_asks_again_what_a_lost_host_had():
    config = experiment(rollout={"max_staleness": 1, "request_timeout_s": 600.0}, algorithm=TIS)
    with sampling(config, script=[{}] * (WANTED * GROUP_SIZE) + ["hang"]) as (service, source, state):
        take(source, state)
        until(lambda: len(service.requests) == 2 * WANTED * GROUP_SIZE)
        service.restart()
        source.drain()
        assert len(source.batches.finished()) == WANTED and len(service.requests) > 2 * WANTED * GROUP_SIZE


def test_a_service_that_is_gone_holds_up_no_drain(monkeypatch):
    monkeypatch.setattr(source_module, "UNREACHABLE_S", 0.5)
    config = experiment(rollout={"max_staleness": 1, "step_timeout_s": 600.0}, algorithm=TIS)
    with running(FakeService(script=[{}] * (WANTED * GROUP_SIZE) + ["hang"])) as service:
        source = source_of(service.control, config)
        take(source, TrainState())
    with closing(source):
        source.drain()  # the publish that comes next says what is wrong


@pytest.mark.parametrize("number", [1, 2])
def test_a_service_that_does_not_answer_once_ends_no_run(number):
    calls = itertools.count(1)

    class BusyOnce(FakeService):
        async def status(self, request):
            return web.Response(status=500) if next(calls) == number else await super().status(request)

    with running(BusyOnce()) as service, closing(source_of(service.control, experiment())) as source:
        assert trained(take(source, TrainState()).groups) == [0, 1]


@contextmanager
def run_of(config: ExperimentConfig, service: FakeService, **more) -> Iterator[Run]:
    """A run as far as it samples, with real graders."""
    inputs = Inputs(
        model=None, tokenizer=None, decode=digits, prompts=prompt_set(), eval_prompts=prompt_set(WANTED),
        answering=NoAnswer(), images=None, curriculum=None,
    )  # fmt: skip
    with start_source(config, MESH, inputs, service.control, lambda: None) as source:
        run = object.__new__(Run)
        vars(run).update(
            config=config, actor=SimpleNamespace(mesh=MESH, updates_done=3), updates_done=3, inputs=inputs,
            state=TrainState(), num_steps=6, source=source, control=service.control, enter=lambda phase: None,
            stop_request=None,
        )  # fmt: skip
        vars(run).update(more)
        yield run


def test_each_evaluation_has_its_own_number_of_samples_and_temperature():
    config = experiment(
        eval={"data": {"path": "d"}, "num_samples": 3, "num_as_trained": 2, "temperature": 0.5}, reward=EXACT
    )
    with running(FakeService()) as service, run_of(config, service) as run:
        for as_trained, number, temperature in ((False, 3, 0.5), (True, 2, 1.0)):
            groups = run.evaluation_groups(as_trained)
            assert [len(group.samples) for group in groups] == [number] * WANTED
            assert service.requests[-1]["sampling_params"]["temperature"] == temperature


def test_a_step_whose_gpus_do_not_come_back_is_saved_as_not_begun(monkeypatch):
    def unreachable(control: ServiceControl, limit_s: float) -> None:
        raise ServiceUnreachable("no rollout service answers")

    monkeypatch.setattr(ServiceControl, "sleep", unreachable)
    config = experiment(rollout={"colocate": True}, weights={"transport": "ipc"}, reward=EXACT)
    saved = []
    state = TrainState(step=3, data_cursor=6)
    recording = SimpleNamespace(start_step=2)
    with (
        running(FakeService(version=3)) as service,
        run_of(config, service, state=state, checkpointer=saver(saved), recording=recording) as run,
    ):
        with pytest.raises(RunStopped, match="put engines to sleep"), run.saving():
            run.next_groups(Metrics())
        assert saved == [(3, 6), "written"]


def saver(saved: list) -> SimpleNamespace:
    """What saves a run, as far as an error asks it."""
    return SimpleNamespace(
        save_now=lambda state: saved.append((state.step, state.data_cursor)), complete=lambda: saved.append("written")
    )


@pytest.mark.parametrize(
    ("error", "made", "expected"),
    [
        (NonFiniteUpdate("of the only update"), 0, [(3, 6), "written"]),
        (NonFiniteUpdate("of the second update"), 1, ["written"]),  # weights between two versions
        (LeaderError("of a publish"), 0, [(3, 6), "written"]),
        (RuntimeError("of one rank"), 0, []),  # others would wait for it
    ],
)
def test_finished_steps_are_saved_unless_their_weights_are_gone(error, made, expected):
    saved = []
    run = object.__new__(Run)
    vars(run).update(
        actor=SimpleNamespace(updates_done=8 + made), updates_done=8,
        state=TrainState(step=3, data_cursor=6), checkpointer=saver(saved),
        recording=SimpleNamespace(start_step=2), enter=lambda phase: None,
    )  # fmt: skip
    with pytest.raises(type(error), match=str(error)), run.saving():
        raise error
    assert saved == expected
