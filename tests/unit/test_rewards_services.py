"""Graders http and judge against real servers on loopback that are slow, broken or hostile."""

import json
import logging
import ssl
import time
from dataclasses import replace

import pytest
from hostile_services import SERVICES, serving

from megagrpo.config.load import ConfigError, dump_config
from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.graders.judge import render
from megagrpo.rewards.pool import RewardPool
from megagrpo.system import environment
from megagrpo.types import Prompt
from tests.experiments import experiment, read_experiment

TEMPLATE = "Question: {prompt}\nReference: {answer}\nResponse: {response}\nWrite 'Score: N'."


PROMPT = Prompt(id=0, text="q", token_ids=(1,), answer="a")


def scores(body: dict) -> dict:
    """A good service: the score is the length of the response."""
    return {"scores": [len(sample["response"]) for sample in body["samples"]]}


def pool(server, grader="http", **args) -> RewardPool:
    args = {"url": server.url, "timeout_s": 1.0, "retries": 2, **args}
    return RewardPool(RewardConfig(grader=grader, args=args, workers=1))


@pytest.mark.parametrize("name", SERVICES)
def test_whatever_a_service_does_is_its_outcome(name):
    script, status, detail = SERVICES[name]
    text = "é\n\u2028\ud800\0"  # odd texts arrive unchanged
    with serving(scores, script) as server, pool(server, timeout_s=1.0 if status == "timeout" else 60.0) as rewards:
        outcome = rewards.submit(PROMPT, text).result(timeout=90)
        assert outcome.status == status and detail in outcome.detail, outcome
        if status == "score":
            assert outcome.value == len(text) and len(server.bodies) == len(script) + 1
        else:
            assert server.url in outcome.detail
        assert all(body == {"samples": [{"prompt": "q", "response": text, "answer": "a"}]} for body in server.bodies)


@pytest.mark.parametrize("batch_size, sizes, at_once", [(4, [3, 4, 4], (1, 2, 3)), (1, [1] * 11, (3,))])
def test_batches_come_back_in_order_and_requests_in_flight_are_bounded(batch_size, sizes, at_once):
    with serving(scores, ["slow"] * 11) as server:
        with pool(server, timeout_s=60.0, batch_size=batch_size, batch_wait_s=2.0, concurrency=3) as rewards:
            futures = [rewards.submit(PROMPT, "x" * i) for i in range(11)]
            assert [future.result(timeout=60).value for future in futures] == list(range(11))
        assert sorted(len(body["samples"]) for body in server.bodies) == sizes and server.most_at_once in at_once


def test_a_text_that_the_service_refuses_costs_the_others_of_its_batch_nothing():
    def good(body: dict) -> dict | int:
        return 400 if any("bad" in s["response"] for s in body["samples"]) else scores(body)

    with serving(good, []) as server, pool(server, timeout_s=60.0, batch_size=4) as rewards:
        futures = [rewards.submit(PROMPT, text) for text in ("a", "bad", "ccc", "dddd")]
        outcomes = [future.result(timeout=60) for future in futures]
    assert [outcome.value for outcome in outcomes if outcome.ok] == [1, 3, 4]
    assert "refused a request with status 400: cannot read it" in outcomes[1].detail
    assert [len(body["samples"]) for body in server.bodies] == [4, 1, 1, 1, 1]


def test_close_ends_what_is_on_its_way():
    with serving(scores, ["hangs"]) as server:
        rewards = pool(server, timeout_s=600.0)
        future = rewards.submit(PROMPT, "x")
        while not server.bodies:
            time.sleep(0.01)
        rewards.close()
        rewards.close()
        assert future.result(timeout=5).detail == "the reward pool was closed"


def completion(text, finish_reason="stop"):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return lambda body: {"choices": [choice]}


@pytest.mark.parametrize(
    "reply, args, value, detail",
    [
        ("Score: 3 ... no, Score: 0.5", {}, 0.5, "Score: 0.5"),
        ("VERDICT yes", {"pattern": r"VERDICT (\w+)", "scores": {"yes": 1, "no": -1}}, 1.0, "VERDICT yes"),
        ("VERDICT ?", {"pattern": r"VERDICT (.+)", "scores": {"yes": 1, "no": 0}}, None, "'?' is not one of yes, no"),
        ("I refuse.", {}, None, "nothing in its reply matches the pattern: 'I refuse.'"),
        ("Score: 1", {"pattern": r"Score: (\w)?x?"}, 1.0, ""),
        ("nan", {"pattern": "(nan)"}, None, "is not a finite number"),
        (None, {}, None, "which is no chat completion"),
        ("<think>Score: 2?</think>\nScore: 9", {}, 9.0, "Score: 9"),
        ("Score: 2?</think>\nScore: 9", {}, 9.0, "Score: 9"),  # <think> stood in its prompt
        ("<think>Score: 2?</think>\nNo.", {}, None, "nothing in its reply matches the pattern: '\\nNo.'"),
        ("<think>Maybe Score: 2. Or", {}, None, "its reasoning has no end: '<think>Maybe Score: 2. Or'"),
    ],
)  # fmt: skip
def test_the_judges_reply_becomes_a_score(tmp_path, reply, args, value, detail):
    (tmp_path / "judge.txt").write_text(TEMPLATE)
    args = {"model": "m", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 60.0, **args}
    with serving(completion(reply), []) as server, pool(server, "judge", **args) as rewards:
        outcome = rewards.submit(PROMPT, "abc").result(timeout=60)
    assert detail in outcome.detail and (outcome.value if outcome.ok else None) == value, outcome


@pytest.mark.parametrize("reply", ["Score: 1", "Score: 2, but on a closer look", "<think>Score: 2?</think>", "", None])
def test_a_reply_that_is_cut_is_an_error_with_the_setting(tmp_path, reply):
    """openflipbook 142, litellm 39817: `Score: 1` may be the begin of 10."""
    (tmp_path / "judge.txt").write_text(TEMPLATE)
    args = {"model": "m", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 60.0, "max_tokens": 16}
    with serving(completion(reply, "length"), []) as server, pool(server, "judge", **args) as rewards:
        outcome = rewards.submit(PROMPT, "text").result(timeout=60)
    assert outcome.status == "error" and outcome.detail.endswith("its reply was cut at args.max_tokens 16; raise that")


@pytest.mark.parametrize(
    "reply, value",
    [
        ("**Score**: 7", 7),
        ("Score: +1", 1),
        ("Score：7", 7),
        ("Score: 9\nMaximum score: 10", 9),
        ('{"score": 0.5, "reason": "{foo: 1} is right"}', 0.5),
        ("{'Score': '7'}", 7),
        ("score: -2.5.", -2.5),
        ("Final **score: 3/10**", 3),
        ("Score: 4, as 1,2 are right", 4),
        ("My score (0 to 1): 0.5 and score: 0.25", 0.25),
    ],
)
def test_the_default_pattern_reads_the_usual_forms_of_a_score(tmp_path, reply, value):
    (tmp_path / "judge.txt").write_text(TEMPLATE)
    args = {"model": "m", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 60.0}
    with serving(completion(reply), []) as server, pool(server, "judge", **args) as rewards:
        outcome = rewards.submit(PROMPT, "text").result(timeout=60)
    assert (outcome.status, outcome.value) == ("score", value)


def test_the_judge_is_asked_as_openai_clients_ask(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("KEY_OF_JUDGE", "sk-very-secret")
    (tmp_path / "judge.txt").write_text(TEMPLATE)
    args = {
        "model": "m", "prompt_file": str(tmp_path / "judge.txt"), "system": "Be strict.", "body": {"top_p": 0.9},
        "api_key_env": "KEY_OF_JUDGE", "timeout_s": 60.0, "retries": 0,
    }  # fmt: skip
    with caplog.at_level(logging.DEBUG), serving(completion("Score: 1"), ["good", "fails", "refuses"]) as server:
        with pool(server, "judge", **args) as rewards:
            outcomes = [rewards.submit(PROMPT, "{answer}").result(timeout=60) for _ in range(3)]
        config = experiment(reward={"grader": "judge", "args": {"url": server.url, **args}})
    assert [outcome.status for outcome in outcomes] == ["score", "error", "error"]
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    question = "Question: q\nReference: a\nResponse: {answer}\nWrite 'Score: N'."
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": question}]
    settings = {"model": "m", "temperature": 0.0, "max_tokens": 1024, "top_p": 0.9}
    assert server.bodies[0] == settings | {"messages": messages}
    dump_config(config, tmp_path / "config.yaml")
    said = [caplog.text, *capfd.readouterr(), (tmp_path / "config.yaml").read_text(), *(o.detail for o in outcomes)]
    assert not any("very-secret" in text for text in said)


def test_the_judge_reads_the_whole_conversation(tmp_path):
    said = [("system", "Be brief."), ("user", "x is 2."), ("assistant", "Noted."), ("user", "x+3?")]
    messages = [{"role": role, "content": text} for role, text in said]
    (tmp_path / "judge.txt").write_text(TEMPLATE)
    args = {"model": "m", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 60.0}
    with serving(completion("Score: 1"), []) as server, pool(server, "judge", **args) as rewards:
        for asked in (messages, messages[-1:]):
            prompt = replace(PROMPT, messages=asked)
            assert rewards.submit(prompt, "5").result(timeout=60).value == 1.0
    whole, question = (body["messages"][0]["content"] for body in server.bodies)
    assert whole.startswith(
        "Question: system: Be brief.\n\nuser: x is 2.\n\nassistant: Noted.\n\nuser: x+3?\nReference"
    )
    assert question.startswith("Question: x+3?\nReference")


def test_the_key_must_be_there(monkeypatch):
    monkeypatch.delenv("KEY_OF_JUDGE", raising=False)
    with pytest.raises(ValueError, match=r"environment variable KEY_OF_JUDGE \(api_key_env\) is not set here"):
        RewardPool(RewardConfig(grader="http", args={"url": "http://127.0.0.1:1/", "api_key_env": "KEY_OF_JUDGE"}))


@pytest.mark.parametrize("key", ["sk-se\ncret", "\u201csk-secret\u201d", "sk-\0secret"])
def test_a_key_that_no_header_can_have_is_named_and_not_shown(key):
    with environment.temporarily("KEY_OF_JUDGE", "  \n"), pytest.raises(ValueError, match="is not set here"):
        environment.secret("KEY_OF_JUDGE", "me")
    environ = {"KEY_OF_JUDGE": key}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "get", lambda name, default: environ.get(name, default))
        with pytest.raises(ValueError, match="variable KEY_OF_JUDGE .*a character that no key has") as caught:
            environment.secret("KEY_OF_JUDGE", "me")
        assert "secret" not in str(caught.value)
        environ["KEY_OF_JUDGE"] = " sk-secret\r\n"
        assert environment.secret("KEY_OF_JUDGE", "me") == "sk-secret"


def test_a_host_that_cannot_be_is_an_error_of_the_response():
    args = {"url": "http://münchen..de/", "retries": 0}
    with RewardPool(RewardConfig(grader="http", args=args, workers=1)) as rewards:
        outcome = rewards.submit(PROMPT, "x").result(timeout=60)
    assert outcome.status == "error" and "InvalidURL" in outcome.detail


def test_the_certificates_of_the_environment_count(tmp_path, monkeypatch):
    (tmp_path / "own.pem").write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    with pytest.raises(ssl.SSLError):  # it is read
        RewardPool(RewardConfig(grader="http", args={"url": "https://127.0.0.1:1/"}), preload=False)


def test_a_response_cannot_ask_for_the_answer():
    assert render("{response} {x} {answer}", "p", "{answer}{prompt}", "42") == "{answer}{prompt} {x} 42"


@pytest.mark.parametrize(
    "grader, args, said",
    [
        ("http", {}, "url: Field required"),
        ("http", {"url": "localhost:80"}, "should look like http://host:port/path"),
        ("http", {"url": "http://h:port/"}, "should look like http://host:port/path"),
        ("http", {"url": "http://h/a\nb"}, "should look like http://host:port/path"),
        ("http", {"url": "http://me:secret@h/"}, "holds a user name or password"),
        ("http", {"url": "http://h/", "batchsize": 3}, "batchsize: Extra inputs are not permitted"),
        ("judge", {"url": "http://h/", "model": "m", "prompt_file": "p", "pattern": "("}, "not a regular expression"),
        ("judge", {"url": "http://h/", "model": "m", "prompt_file": "p", "pattern": "x"}, "has no group"),
        ("code", {"score": "some"}, "score: Input should be 'fraction' or 'all'"),
        ("code", {"total_s": 10.0}, "must be some seconds above grader code's total_s 10"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_with_the_configuration(tmp_path, grader, args, said):
    reward = json.dumps({"grader": grader, "args": args})  # also YAML
    text = f"name: n\noutput_dir: o\nmodel: {{path: m}}\ndata: {{path: d}}\nreward: {reward}\n"
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_experiment(tmp_path / "e.yaml")
    assert said in str(caught.value) and "secret" not in str(caught.value)
