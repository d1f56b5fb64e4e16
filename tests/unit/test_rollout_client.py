"""Retries, deadlines, cut responses and turns of the generation client, against a server that fails on purpose."""

import asyncio
import itertools
import threading
import time
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from aiohttp import web
from fake_service import FakeService, running
from sampling import MESH, Grader, digits, evaluated, experiment, prompt_set, sampled, source_of

from megagrpo.cli import main
from megagrpo.mesh import LeaderError
from megagrpo.rollout import control as control_module
from megagrpo.rollout import sampler as sampler_module
from megagrpo.rollout import source as source_module
from megagrpo.rollout.admission import AdmissionQueue, ResponseLengths
from megagrpo.rollout.batches import Batches
from megagrpo.rollout.control import ServiceControl, ServiceFailed, ServiceUnreachable, find_service
from megagrpo.rollout.engine_choice import Engines
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    RetryPolicy,
    SampleRequest,
    SamplingParams,
    sample_seed,
)
from megagrpo.rollout.response import Response
from megagrpo.rollout.sampler import Sampler, all_of
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Prompt

PARAMS = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(7,), stop=("\n",))
QUICK = RetryPolicy(retries=3, request_timeout_s=2.0, base_s=0.01, cap_s=0.02)
ANSWER = Response((1, 2, 3, 4), (-0.5,) * 4, "stop", 0)


def generate(service: FakeService, version: int = 0, retry: RetryPolicy = QUICK) -> tuple[Response, int]:
    """(response, number of retries)"""

    async def run():
        engines = Engines.from_service(service.control)
        async with GenerationClient(engines, retry, AdmissionQueue(4)) as client:
            request = SampleRequest((5, 6), PARAMS, 1234, version)
            return await client.generate(request), client.num_retries

    return asyncio.run(run())


def test_request_as_sglang_wants_it():
    with running(FakeService()) as service:
        assert generate(service) == (ANSWER, 0)
    sampling = {"temperature": 1.0, "max_new_tokens": 4, "top_p": 1.0, "top_k": -1, "sampling_seed": 1234}
    sampling |= {"stop_token_ids": [7], "stop": ["\n"], "stop_regex": "\\\n.{0,1}"}
    assert service.requests == [{"input_ids": [5, 6], "sampling_params": sampling, "return_logprob": True}]


def test_a_stop_is_sought_in_as_many_tokens_as_it_has_bytes():
    """SGLang's windows are its tokenizer's tokens of a stop, and the longest match of a pattern."""
    body = replace(PARAMS, stop=("abcd", "</a.b>", "\u3002")).body(0)
    assert body["stop_regex"] == r"</a\.b>.{0,6}" and body["stop"] == ["abcd", "</a.b>", "\u3002"]
    body = replace(PARAMS, stop=("abcd", "\u3002" * 2)).body(0)
    assert body["stop_regex"] == "\u3002\u3002.{0,6}"


ABORTED = {"finish_reason": {"type": "abort", "message": "paused"}}
PAGES = (b"<html>busy</html>", b'{"text": "cut', b"{}", b"[]", b'{"meta_info": null}')
BAD = (500, 502, "hang", "drop", {"weight_version": "1"}, ABORTED, *PAGES)


@pytest.mark.parametrize("problem", BAD, ids=str)
def test_a_bad_answer_is_tried_again(problem):
    with running(FakeService(script=[problem] * 2)) as service:
        assert generate(service) == (ANSWER, 2)


def test_waiting_for_an_engine_is_no_failure():
    with running(FakeService(looks=9)) as service:
        response, retries = generate(service)
        assert response == ANSWER and len(service.requests) == 1
    assert retries > QUICK.retries


def test_sample_that_saw_two_versions_is_refused():
    spans = [{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 4}]
    with running(FakeService(version=3, script=[{"weight_versions": spans}])) as service:
        assert generate(service, version=3) == (replace(ANSWER, weight_version=3), 1)


@pytest.mark.parametrize(
    "problem, tries, said",
    [
        (500, 4, "status 500: on purpose"),
        ("hang", 4, "TimeoutError"),
        ({"weight_version": "1"}, 4, r"version \['1'\], wanted 0"),
        (400, 1, "refused a request: on purpose"),  # a wrong request is not tried again
    ],
    ids=str,
)
def test_out_of_retries_says_why(problem, tries, said):
    said = rf"no sample in 4 tries.*rollout.request_timeout_s.*{said}" if tries > 1 else said
    with running(FakeService(script=[problem] * 10)) as service:
        with pytest.raises(GenerationFailed, match=said):
            generate(service, retry=replace(QUICK, request_timeout_s=0.5) if problem == "hang" else QUICK)
        assert len(service.requests) == tries


def test_back_off_doubles_up_to_the_cap():
    policy = RetryPolicy(8, 1.0, base_s=1.0, cap_s=10.0)
    for attempt, longest in enumerate([1, 2, 4, 8, 10, 10]):
        waits = [policy.wait_s(attempt) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest


def test_seeds_are_stable_and_their_own():
    # A value once computed: another one would mean that no earlier run can be repeated.
    assert sample_seed(0, "train", 1, 2, 3) == 8447555726090762773
    places = list(itertools.product(range(3), ("train", "greedy"), range(5), range(5), range(4)))
    seeds = {sample_seed(*place) for place in places}
    assert len(seeds) == len(places) and all(0 <= seed < 2**63 for seed in seeds)


PROMPTS = [Prompt(id=10 * i, text="", token_ids=(1, 2), answer="") for i in range(5)]


def make_source(service: FakeService, reward: dict | None = None, **rollout) -> RolloutSource:
    config = experiment(reward=reward or {}, rollout={"request_timeout_s": 5.0, "step_timeout_s": 5.0} | rollout)
    return source_of(service.control, config)


def test_groups_come_in_order_and_graded():
    with running(FakeService(version=3, script=[500, 502])) as service:
        groups = sampled(make_source(service), 7, PROMPTS, 3)
    assert [(g.group_id, g.prompt.id) for g in groups] == [(i, 10 * i) for i in range(5)]
    for group in groups:
        for index, (sample, outcome) in enumerate(zip(group.samples, group.outcomes, strict=True)):
            digits = str(sample_seed(0, "train", 7, group.prompt.id, index))[-4:]
            assert (sample.index, sample.text, sample.weight_version) == (index, digits, 3)
            assert outcome.value == float(digits)


def test_a_group_grader_has_the_last_word_on_training_samples_alone():
    with running(FakeService(version=3)) as service:
        source = make_source(service, reward={"group_grader": "rank"})
        trained = sampled(source, 7, PROMPTS, 3)
        held_out = evaluated(source, PROMPTS, 3, SamplingParams(1.0, 4), 2)
    for groups, sign in ((trained, -1), (held_out, 1)):
        pairs = [pair for group in groups for pair in zip(group.samples, group.outcomes, strict=True)]
        assert len(pairs) == 10 and all(outcome.value == sign * float(sample.text) for sample, outcome in pairs)


@pytest.mark.parametrize("version, state", [(0, "stale"), (3, "ready")])
def test_engine_without_the_version_is_refreshed_and_the_step_completes(version, state):
    calls = []

    def publish(needed, engine_ids):
        calls.append((needed, engine_ids))
        service.control.report("ready", {"engine-0": 1}, 4)

    with running(FakeService(state=state, version=version)) as service:
        groups = sampled(make_source(service), 0, PROMPTS, 4, publish)
    assert len(groups) == 5 and calls == [(4, ["engine-0"])] and service.marked == [(1, 4)]


def test_deadline_names_what_is_missing():
    with running(FakeService(script=["hang"])) as service:
        started = time.monotonic()
        said = (
            r"train step 2.*1 of 5 groups did not come within 1 s.*step_timeout_s.*prompts \[0\]; "
            r"they wait for 1 sample\(s\) of the engines \(prompts \[0\]\)"
        )
        with pytest.raises(LeaderError, match=said):
            sampled(make_source(service, step_timeout_s=1.0), 2, PROMPTS, 0)
    assert time.monotonic() - started < 5


def test_the_time_of_a_step_goes_on_while_engines_get_weights():
    """Else a run whose engine comes back again and again would never end."""
    publish = lambda version, ids: time.sleep(0.1)  # noqa: E731
    failure = pytest.raises(LeaderError, match="5 of 5 groups did not come within 1 s")
    with running(FakeService(state="stale")) as service, failure:
        sampled(make_source(service, step_timeout_s=1.0), 0, PROMPTS, 4, publish)


def test_when_one_of_several_fails_the_others_are_ended():
    ended = []

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise TimeoutError("a tool's own")

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("hang")

    async def run() -> None:
        with pytest.raises(TimeoutError, match="a tool's own"):
            await all_of([hang(), fail(), hang()])
        assert ended == ["hang", "hang"]
        assert await all_of([asyncio.sleep(0.02, "a"), asyncio.sleep(0, "b")]) == ["a", "b"]
        assert await all_of([]) == []

    asyncio.run(run())


def test_service_that_gave_up_ends_the_wait():
    with running(FakeService(state="dead", failed="engine-0 after 5 restart(s): no memory")) as service:
        with pytest.raises(LeaderError, match="failed: engine-0 after 5 restart"):
            sampled(make_source(service, step_timeout_s=60.0), 0, PROMPTS, 0)
        with pytest.raises(ServiceFailed, match="no memory"):
            ServiceControl(service.url, "key").engines()


def test_unreachable_service_is_a_clear_error(tmp_path, monkeypatch):
    for module in (source_module, control_module):
        monkeypatch.setattr(module, "UNREACHABLE_S", 0.5)
    with pytest.raises(ServiceUnreachable, match=r"no rollout service answers at http://127.0.0.1:9.*megagrpo serve"):
        ServiceControl("http://127.0.0.1:9", "key").engines()
    with pytest.raises(ServiceUnreachable, match=r"service\.json did not appear in 0 s"):
        find_service(tmp_path)
    with running(FakeService()) as service:
        source = make_source(service)
    with pytest.raises(LeaderError, match="no rollout service answers"):
        sampled(source, 0, PROMPTS, 0)


def test_another_program_at_the_port_of_a_service_that_was_killed_is_none():
    class Page(FakeService):
        async def status(self, request: web.Request) -> web.Response:
            return web.Response(text="<html>")

    with running(Page()) as page, pytest.raises(ServiceUnreachable, match="is no rollout service: JSON is malformed"):
        page.control.status()


def test_a_step_outlives_a_connection_that_is_lost(monkeypatch):
    monkeypatch.setattr(control_module, "_AGAIN_S", 0.01)
    with running(FakeService()) as service:
        control, lost = service.control, ["/status", "/engines/ready", "/sleep", "/may_start"]
        request = control._http.request

        def requested(method: str, path: str, **options) -> httpx.Response:
            answer = request(method, path, **options)
            if path in lost:
                lost.remove(path)
                raise httpx.ReadError("Connection reset by peer")
            return answer

        monkeypatch.setattr(control._http, "request", requested)
        assert [engine.id for engine in control.engines()] == ["engine-0"]
        assert control.report("ready", {"engine-0": 1}, 3) == set()
        control.sleep(9.0)
        control.let_start()
        assert service.marked == [(1, 3)] * 2 + [("/sleep",)] * 2 + [("/may_start",)] * 2 and not lost


@pytest.mark.parametrize("limit_s", [0.5, 60.0])
def test_a_leader_that_alone_cannot_reach_the_service_ends_the_run(monkeypatch, limit_s):
    """The main rank reaches it; by the leader's own limit, or by that of the step."""
    monkeypatch.setattr(sampler_module, "UNREACHABLE_S", limit_s)
    config = experiment(rollout={"step_timeout_s": 4.0})
    cut_off = Sampler(config, 1, ServiceControl("http://127.0.0.1:9", "key"), Grader(), digits)
    with running(FakeService()) as service:
        source = RolloutSource(service.control, cut_off, Batches(config, MESH, prompt_set()))
        with closing(source), pytest.raises(LeaderError, match="no rollout service answers at http://127.0.0.1:9"):
            sampled(source, 0, PROMPTS, 0)


def test_the_file_of_a_service_that_is_gone_is_one_message(tmp_path, capsys):
    (tmp_path / "service.json").write_text('{"url": "http://127.0.0.1:9"}')
    (tmp_path / "service.key").write_text("key")
    (tmp_path / "config.yaml").touch()
    for words in (["status", "--json", str(tmp_path)], ["engines", "add", str(tmp_path)]):
        assert main(words) == 2
        assert f"megagrpo {words[0]}: {tmp_path}: {tmp_path}/service.json is of a service" in capsys.readouterr().err


def test_an_engine_for_which_there_is_no_room_is_one_message(tmp_path, capsys, monkeypatch):
    control = ServiceControl("http://127.0.0.1:9", "key")
    full = httpx.MockTransport(lambda request: httpx.Response(400, text="no GPU is left"))
    monkeypatch.setattr(control, "_http", httpx.Client(base_url=control.url, transport=full))
    monkeypatch.setattr("megagrpo.tools.engines.find_service", lambda run_dir: control)
    assert main(["engines", "add", str(tmp_path)]) == 2
    assert "answered 400: no GPU is left" in capsys.readouterr().err


def test_requests_to_a_lost_host_are_sent_again():
    """They hang: nobody breaks the connection. The service lists another incarnation, and the step completes."""
    with running(FakeService(script=["hang"] * 3)) as service:
        source = make_source(service, request_timeout_s=600.0, step_timeout_s=60.0)
        started = time.monotonic()

        def lose_it() -> None:
            while len(service.requests) < 10:
                time.sleep(0.05)
            service.restart()

        threading.Thread(target=lose_it, daemon=True).start()
        groups = sampled(source, 7, PROMPTS, 0)
    assert [g.group_id for g in groups] == list(range(5)) and len(service.requests) >= 13
    assert time.monotonic() - started < 50


def test_the_first_requests_leave_before_all_are_prepared():
    happened = []

    async def request(admission: AdmissionQueue, number: int) -> None:
        async with admission.admitted():
            happened.append(("prepared", number))
            await asyncio.sleep(0)
            happened.append(("sent", number))

    async def run() -> None:
        admission = AdmissionQueue(1000)
        await all_of([request(admission, number) for number in range(200)])

    asyncio.run(run())
    assert happened.index(("sent", 0)) < happened.index(("prepared", 199))
    assert len(happened) == 400


def test_the_service_is_not_asked_at_every_meeting(monkeypatch):
    monkeypatch.setattr(source_module, "_LOOK_S", 3600.0)
    monkeypatch.setattr(source_module, "_POLL_S", 0.005)
    meetings = itertools.count()
    with running(FakeService(hang=lambda body: next(meetings) < 200)) as service:
        sampled(make_source(service), 0, PROMPTS, 0)
        assert -service.looks <= 3  # before the first request, by the main rank, by the sampler


def test_requests_leave_in_order_while_the_caches_have_room():
    left: list[str] = []

    async def run():
        admission, let_go = AdmissionQueue(10, tokens=100.0), asyncio.Event()

        async def request(name: str, tokens: float, order: float) -> None:
            async with admission.admitted((order,), lambda: tokens):
                left.append(name)
                await let_go.wait()

        async def step() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(request(*each)) for each in [("a", 60.0, 1), ("b", 60.0, 1), ("c", 10.0, 1)]]
        await step()
        assert left == ["a"], "c does not pass b, which needs more room"
        tasks.append(asyncio.create_task(request("urgent", 70.0, 0)))
        await step()
        tasks[1].cancel()
        let_go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert left == ["a", "urgent", "c"]
        big = asyncio.create_task(request("big", 1e9, 1))
        await step()
        assert big.done() and left[-1] == "big", "one alone may always"

    asyncio.run(run())


def test_expected_lengths():
    lengths = ResponseLengths(100)
    assert lengths.occupied() == 50, "all assumed to be as long as they may"
    for _ in range(40_000):
        lengths.add(10)
        lengths.add(30)
    assert lengths.occupied() == pytest.approx((100 + 900) / 2 / (2 * 20), rel=1e-3)
