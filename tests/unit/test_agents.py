"""Rollouts with environments: real processes, the fake service's HTTP, and the ids that are kept, masked and sent."""

import asyncio
import itertools
import re
import tempfile
import threading
from contextlib import closing

import numpy as np
import pytest
from fake_service import FakeService
from sampling import experiment, finished, plan, playing, sampled
from tokenizers import Regex, normalizers

from examples.laptop.model import character_tokenizer
from megagrpo.algo.statistics import alone
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.agents.environments import EnvironmentFailed, Environments
from megagrpo.rollout.agents.renderer import Renderer, in_time
from megagrpo.rollout.batches import BatchPlan, SamplingJob
from megagrpo.rollout.generation import SamplingParams, sample_seed
from megagrpo.types import Prompt, RolloutGroup
from tests.experiments import ROOT, live_children, until

TOKENIZER = character_tokenizer("0123456789HL?+-:= userasitnm<>|\n")
EOS = TOKENIZER.eos_token_id
PLAIN = DataConfig(path="rows.jsonl")
PROMPT = Prompt(0, "?", (1,), "")


def ids(text: str, end: bool = False) -> list[int]:
    return TOKENIZER(text)["input_ids"] + ([EOS] if end else [])


def says(text: str, reason: str = "stop") -> dict:
    tokens = ids(text, reason == "stop")
    return {"output_token_logprobs": [[-0.25, t, None] for t in tokens], "finish_reason": {"type": reason}}


def config_of(*, samples: int = 1, tokens: int = 32, rollout: dict | None = None, **environment) -> ExperimentConfig:
    """One worker plays; environment: of the section."""
    return experiment(
        train={"group_size": samples},
        rollout=rollout or {},
        algorithm={"advantage": {"name": "reinforce_plus_plus"}, "mismatch": {"weight": {"name": "tis"}}},
        sampling={"max_response_tokens": tokens, "stop_token_ids": [EOS], "environment": {"workers": 1} | environment},
    )


def play(*turns: dict, game: str = "GuessTheNumber", answer: str = "7", **more):
    """(the group, the requests that were sent)"""
    service = FakeService(version=3, script=list(turns))
    with playing(config_of(function=f"tests.games:{game}", **more), TOKENIZER, service) as source:
        [group] = sampled(source, 7, [Prompt(30, "?", tuple(ids("?")), answer)], 3)
        assert not service.script, "turns that were never asked for"
        return group, service.requests


def masked(group: RolloutGroup, sample: int = 0) -> str:
    """A response with what was said to the model in brackets."""
    found = group.samples[sample]
    said = [(TOKENIZER.decode([token]), own) for token, own in zip(found.token_ids, found.loss_mask, strict=True)]
    return "".join(text if own else f"[{text}]" for text, own in said)


def test_a_rollout_is_one_sample_that_grows():
    group, requests = play(says("3"), says("9"), says("7"))
    (sample,) = group.samples
    end = TOKENIZER.eos_token
    assert masked(group) == f"3{end}[H]9{end}[L]7{end}" and sample.rollout is None and sample.prompt_ids is None
    assert sample.logprobs.tolist() == [-0.25 * own for own in sample.loss_mask]
    assert [request["input_ids"] for request in requests] == [
        ids("?"),
        [*ids("?"), *ids("3", True), *ids("H")],
        [*ids("?"), *ids("3", True), *ids("H"), *ids("9", True), *ids("L")],
    ]
    purposes = ["train", "train turn 1", "train turn 2"]
    seeds = [request["sampling_params"]["sampling_seed"] for request in requests]
    assert seeds == [sample_seed(0, purpose, 7, 30, 0) for purpose in purposes], "a seed for every turn"
    assert group.outcomes[0].ok and group.outcomes[0].value == 1.0 and sample.finish_reason == "stop"


def test_a_turn_may_see_the_last_message_alone():
    group, requests = play(says("+"), says("+"), says("+"), game="Walk", history="last")
    assert [sample.rollout for sample in group.samples] == [0, 0, 0] and len(group.outcomes) == 1
    assert [list(sample.prompt_ids) for sample in group.samples] == [ids("0:"), ids("1:"), ids("2:")]
    assert [request["input_ids"] for request in requests] == [ids("0:"), ids("1:"), ids("2:")]
    assert all(s.loss_mask.all() and s.token_ids.tolist() == ids("+", True) for s in group.samples)
    assert group.outcomes[0].value == 0.75 and group.outcomes[0].token_rewards == ()
    group, _ = play(says("+"), says("-"), game="Walk", history="last", credit="turn")
    assert group.outcomes[0].token_rewards == ((1, 0.25),), "the last token of the first turn"


@pytest.mark.parametrize(
    ("turns", "more", "end", "reason", "value"),
    [
        ([says("3"), says("4")], {"max_turns": 2}, "turns", "2 turns", 0.0),
        ([says("33", reason="length")], {"tokens": 2}, "tokens", "a turn reached the limit of tokens", 0.0),
        ([says("3")], {"tokens": 3}, "tokens", "no room for another turn", 0.0),
        ([says("+"), says("+")], {"max_turns": 2, "game": "Walk", "history": "last"}, "turns", "2 turns", 0.5),
        (3 * [says("3")], {"game": "Slow", "episode_timeout_s": 3.1, "timeout_s": 3}, "time", "environment took", 0.75),
    ],
)
def test_each_limit_cuts_a_rollout_and_keeps_its_rewards(turns, more, end, reason, value):
    group, _ = play(*turns, **more)
    outcome = group.outcomes[0]
    assert (outcome.status, outcome.value, outcome.end) == ("score", value, end) and reason in outcome.detail
    assert group.samples[-1].finish_reason == "length"


def test_later_turns_of_a_batch_ahead_let_an_evaluation_pass():
    begun = threading.Event()
    service = FakeService(version=3, script=[says("3"), says("7"), says("7")], hang=lambda body: not begun.is_set())
    config = config_of(function="tests.games:GuessTheNumber", rollout={"max_running_requests": 1})
    prompts = [Prompt(30 + i, "?", tuple(ids("?" * i)), "7") for i in (1, 2)]
    with playing(config, TOKENIZER, service) as source:
        ahead = source.begin(plan(source, 7, prompts[:1], 3))
        until(lambda: service.requests)
        evaluation = SamplingJob("evaluate", 0, 3, SamplingParams.of(config.sampling), 1)
        urgent = source.begin(BatchPlan(evaluation, prompts[1:]))
        until(lambda: source._sampler._engines.admission._waiting, said=source.waiting)
        begun.set()
        source.wait([urgent, ahead], 3)
    lengths = [len(request["input_ids"]) for request in service.requests]
    assert lengths == [1, 2, 4], "the evaluation's only turn, then the second turn of the other"


@pytest.mark.parametrize(
    ("kind", "status", "named"),
    [
        ("make", "error", "tests.games:Bad: make raised KeyError: 'no such task'"),
        ("reset", "error", "reset returned 5, not a text or a list of messages"),
        ("nothing", "error", "the first message has no token"),
        ("raise", "error", "step raised RuntimeError: the tool server is gone"),
        ("strange", "error", "the tokenizer does not know every character of 'x y'"),
        ("content", "error", "the content of a message is a text"),
        ("long", "error", "an environment began with more tokens than data.max_prompt_tokens 1024"),
        ("nan", "error", "step returned the reward nan, not a finite number"),
        ("pair", "error", "not (message, reward, done)"),
        ("die", "error", "step: the environment's process died: exit code 3"),
        ("hang", "timeout", "step gave no answer in 0.5 s"),
        ("fork", "timeout", "step gave no answer in 0.5 s"),
        ("garbage", "error", "step: the environment's process died: it wrote"),
        ("other answer", "error", "which answers no call"),
    ],
)
def test_an_environment_that_fails_gives_no_reward(kind, status, named):
    turns = [] if kind in ("make", "reset", "nothing", "long") else [says("3")]
    before = live_children()
    group, _ = play(*turns, game="Bad", answer=kind, timeout_s=0.5 if kind in ("hang", "fork") else 20)
    (outcome,) = group.outcomes
    assert (outcome.status, outcome.end, outcome.ok) == (status, status, False) and named in outcome.detail
    until(lambda: live_children() <= before, said=live_children)  # no process is left
    assert len(group.samples[0].token_ids) == sum(len(turn["output_token_logprobs"]) for turn in turns), "kept"


def opened(function: str = "tests.games:Bad", tokenizer=TOKENIZER, **more) -> closing[Environments]:
    """A context manager: environments with one worker."""
    config = EnvironmentConfig(function=function, workers=1, **more)
    return closing(Environments(config, Renderer(tokenizer, PLAIN, True)))


@pytest.mark.parametrize(
    ("kind", "good", "begun", "end"),
    [
        ("unavailable", 3, 3, "done"),
        ("connection", 9, 3, "infrastructure"),
        ("killed", 2, 2, "done"),
        ("unusable", 2, 2, "done"),
        ("unusable", 9, 2, "data"),
    ],
)
def test_a_rollout_begins_again_where_that_may_help(tmp_path, kind, good, begun, end):
    """Elsewhere if it can, from the same seed; what it sampled first is in no sample."""
    file = tmp_path / "begun"
    args = {"file": str(file), "good": good}
    group, requests = play(*begun * [says("3")], game="Flaky", answer=kind, args=args, workers=2)
    assert (group.outcomes[0].end, group.outcomes[0].ok) == (end, end == "done")
    processes, seeds = zip(*(line.split() for line in file.read_text().splitlines()), strict=True)
    assert len(processes) == begun and len(set(seeds)) == 1
    assert all(one != other for one, other in itertools.pairwise(processes)), "elsewhere"
    assert len(requests) == begun and masked(group) == f"3{TOKENIZER.eos_token}"


def test_the_handbooks_environment_plays(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(# games.py\n.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    (tmp_path / "games.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    async def run() -> list:
        async with environments.episode({"answer": "7"}, 1) as episode:
            assert await episode.call("reset") is None
            return [await episode.call("step", turn) for turn in ("3", "a", "7")]

    with opened("games:Guess", character_tokenizer("0123456789 abcdefghijklmnopqrstuvwxyz?")) as environments:
        answers = asyncio.run(run())
    assert [(said, done) for said, _, done in answers] == [("higher", False), ("say a number", False), (None, True)]
    assert answers[-1][1] == 1.0


def test_others_of_a_process_that_was_ended_begin_again():
    """One worker, two episodes: the first one's call hangs, the second's process is gone with it."""

    async def run() -> tuple[str, str, float]:
        begin = environments.episode
        async with begin({"answer": "hang"}, 1) as hangs, begin({"answer": "x"}, 1) as other:
            with pytest.raises(EnvironmentFailed) as failed:
                await hangs.call("step", "3")
            with pytest.raises(EnvironmentFailed) as lost:
                await other.call("step", "3")
        async with begin({"answer": "x"}, 1) as again:
            return failed.value.end, str(lost.value), (await again.call("step", "3"))[1]

    before = live_children()
    with opened(timeout_s=0.5) as environments:
        found = asyncio.run(run())
    assert found == ("timeout", "its process was ended while another episode's call hung", 1.0)
    until(lambda: live_children() <= before, said=live_children)  # no process is left


def test_a_rollout_is_not_lost_because_others_hang():
    """One process: each of four hung calls ends those of all others, which begin again."""
    long = {"request_timeout_s": 200.0, "step_timeout_s": 200.0}
    config = config_of(function="tests.games:Bad", timeout_s=1.0, rollout=long)
    answers = [kind for _ in range(4) for kind in ("hang", "x")]
    prompts = [Prompt(30 + n, "?", tuple(ids("?")), kind) for n, kind in enumerate(answers)]
    service = FakeService(version=3, script=[says("3") for _ in range(100)])
    with playing(config, TOKENIZER, service) as source:
        groups = sampled(source, 7, prompts, 3)
    ends = [group.outcomes[0].end for group in groups]
    assert ends == ["timeout" if kind == "hang" else "done" for kind in answers]


def test_a_process_that_cannot_start_is_not_the_environments_mistake(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")  # as on a full disk

    async def run() -> None:
        async with environments.episode({"answer": "7"}, 1):
            pass

    with opened() as environments, pytest.raises(EnvironmentFailed, match="cannot start") as failed:
        asyncio.run(run())
    assert failed.value.end == "infrastructure", "another attempt is made"


def test_a_call_that_is_cancelled_leaves_no_answer_to_the_next_one():
    async def run() -> float:
        async with environments.episode({"answer": "slow"}, 1) as slow:
            call = asyncio.create_task(slow.call("step", "3"))
            await asyncio.sleep(0.2)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with environments.episode({"answer": "x"}, 1) as other:
            return (await other.call("step", "3"))[1]

    with opened(timeout_s=20) as environments:
        assert asyncio.run(run()) == 1.0, "its own, not the slow one's 0.5"


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = CHAT.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else '-' }}")
NO_END = CHAT.replace("{{ eos_token }}", "|")


def chat(template: str) -> tuple:
    tokenizer = character_tokenizer("0123456789HL?+-:= userasitnmpobewfdhclq<>|\n")
    tokenizer.chat_template = template
    return tokenizer, DataConfig(path="rows.jsonl", chat_template=True)


def test_half_a_character_is_replaced_and_a_whole_one_in_two_halves_is_kept():
    """What JSON from JavaScript may hold: tokenizers raise for it, and UTF-8 has none."""
    tokenizer = character_tokenizer("ab\U0001f600\ufffd")
    ids = Renderer(tokenizer, PLAIN, True).start("a\ud83d\ude00b\ud83d", PROMPT).tolist()
    assert tokenizer.decode(ids) == "a\U0001f600b\ufffd"


@pytest.mark.parametrize(
    ("template", "named"), [(FORGETS, "it writes earlier turns in another way"), (NO_END, "not the answer and")]
)
def test_a_template_that_cannot_be_continued_is_refused(template, named):
    tokenizer, data = chat(template)
    with pytest.raises(ValueError, match=named):
        Renderer(tokenizer, data, True)
    assert (
        Renderer(tokenizer, data, False).start("3", PROMPT).tolist() == tokenizer("<user>3\n<assistant>")["input_ids"]
    )


def test_an_answer_that_something_else_ended_gets_the_end_that_the_template_writes():
    tokenizer, data = chat(CHAT)
    renderer = Renderer(tokenizer, data, True)
    follows = tokenizer("\n<user>3\n<assistant>")["input_ids"]
    eos = tokenizer.eos_token_id
    for answer, added in (([5, eos], []), ([5, 6], [eos]), ([], [eos])):
        ids = renderer.after_turn("3", np.array(answer, np.int32))
        assert ids.tolist() == [*added, *follows], answer
    plain = Renderer(tokenizer, PLAIN, True)
    assert plain.after_turn("3", np.array([5])).tolist() == tokenizer("3")["input_ids"]


def test_of_words_that_cannot_fit_only_the_beginning_is_tokenized():
    tokenizer = character_tokenizer("0123456789 ")
    renderer = Renderer(tokenizer, PLAIN, True)
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(renderer.after_turn(10**6 * "3", np.array([5]), room=4)) == 5 * longest
    assert len(renderer.begin(10**6 * "3")) == (renderer.max_prompt_tokens + 1) * longest
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")
    assert len(renderer.after_turn(f"3{1000 * ' '}3", np.array([5]), room=4)) == 3, "it fits"
    group, _ = play(says("3"), game="Bad", answer="flood", tokens=8)
    assert group.outcomes[0].end == "tokens" and masked(group) == f"3{TOKENIZER.eos_token}"


def test_long_words_are_tokenized_in_a_thread():
    async def threads() -> list[bool]:
        text = {"role": "user", "content": 2**17 * "3"}
        said = ["3", 2**17 * "3", [{"role": "user", "content": "3"}], [text]]
        return [await in_time(lambda _: threading.get_ident(), each) == threading.get_ident() for each in said]

    assert asyncio.run(threads()) == [True, False, True, False]


@pytest.mark.parametrize("policy", ["by_version", "flush"])
def test_a_rollout_keeps_its_key_over_a_publish_and_a_new_one_has_the_next(policy):
    config = config_of(function="tests.games:GuessTheNumber", rollout={"prefix_cache": policy, "max_staleness": 1})
    prompts = [Prompt(n, "?", tuple(ids("?")), "7") for n in (30, 31)]
    script = [says("3") | {"cached_tokens": 0}, says("7") | {"cached_tokens": 3}, says("7") | {"cached_tokens": 0}]
    service, metrics = FakeService(version=3, script=script), Metrics()
    service.hang = lambda body: len(body["input_ids"]) > 1 and service.version == 3
    with playing(config, TOKENIZER, service) as source:
        source.begin(plan(source, 1, prompts[:1], 3, ahead=True))
        until(lambda: len(service.requests) == 2, 20)
        service.version = 4  # a publish: the second turn is sampled by its weights
        [old] = finished(source, plan(source, 1, prompts[:1], 4, ahead=True))
        source.begin(plan(source, 2, prompts[1:], 4, 1, ahead=True))
        [new] = finished(source, plan(source, 2, prompts[1:], 4, 1, ahead=True))
        source.add_metrics(metrics)
    (old,), (new,) = old.samples, new.samples
    assert (old.weight_version, old.newer, new.weight_version) == (3, ((3, 4),), 4)
    keys = [request.get("extra_key") for request in service.requests]
    assert keys == (["weights 3", "weights 3", "weights 4"] if policy == "by_version" else [None] * 3)
    found = metrics.reduced(alone)
    read = sum(len(request["input_ids"]) for request in service.requests)
    assert found["prefix/hit_fraction"] == pytest.approx(3 / read)
    if policy == "by_version":
        assert found["prefix/on_older_keys_fraction"] == pytest.approx(2 / 6), "the second turn's two tokens"
    else:
        assert "prefix/on_older_keys_fraction" not in found
