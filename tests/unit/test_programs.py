"""Agent programs: real processes and the real gateway over HTTP, in front of the fake service."""

import json
import re
import sys
import time

import pytest
from fake_service import FakeService
from sampling import experiment, plan, playing, sampled
from test_agents import TOKENIZER, ids, masked, says

from examples.laptop.model import character_tokenizer
from megagrpo.rollout import sampler
from megagrpo.rollout.batches import BatchPlan, SamplingJob
from megagrpo.rollout.generation import SamplingParams
from megagrpo.system import worker_process
from megagrpo.types import Prompt, RolloutGroup
from tests.experiments import ROOT, live_children, until

EOS = TOKENIZER.eos_token_id
END = TOKENIZER.eos_token


def run_all(answers: list[str], *turns, program: str, **more) -> tuple[list[RolloutGroup], list[dict]]:
    """(the groups, the requests that were sent); turns: what the engines answer first."""
    function = {} if more.keys() & {"command", "function"} else {"function": f"tests.programs:{program}"}
    tokenizer, environment = more.pop("tokenizer", TOKENIZER), more.pop("environment", None)
    at_once = {"max_running_requests": more.pop("at_once")} if "at_once" in more else {}
    tokens, hang = more.pop("tokens", 32), more.pop("hang", lambda body: False)
    extra = more.pop("extra", lambda number: {})
    player = {"environment": environment} if environment else {"agent": function | {"workers": 1} | more}
    config = experiment(
        train={"group_size": 1},
        rollout={"request_timeout_s": 200.0, "step_timeout_s": 200.0} | at_once,
        algorithm={"advantage": {"name": "reinforce_plus_plus"}},
        sampling={"max_response_tokens": tokens, "stop_token_ids": [EOS], **player},
    )
    prompts = [Prompt(30 + n, "?", tuple(ids("?")), answer, extra=extra(n)) for n, answer in enumerate(answers)]
    before = live_children()
    service = FakeService(version=3, script=list(turns), hang=hang)
    with playing(config, tokenizer, service) as source:
        groups = sampled(source, 7, prompts, 3)
    until(lambda: live_children() <= before, said=live_children)  # no process is left
    return groups, service.requests


def run(*turns, answer: str = "7", program: str = "guess", **more) -> tuple[RolloutGroup, list[dict]]:
    """(the group, the requests that were sent)"""
    [group], requests = run_all([answer], *turns, program=program, **more)
    return group, requests


@pytest.mark.parametrize("program", ["guess", "guess_in_a_thread", "guess_behind_a_decorator"])
def test_a_program_and_an_environment_of_the_same_game_are_the_same_bits(program):
    turns = says("3"), says("9"), says("7")
    group, requests = run(*turns, program=program)
    expected, their_requests = run(*turns, environment={"function": "tests.games:GuessTheNumber", "workers": 1})
    assert requests == their_requests, "ids, seeds and limits"
    assert group.samples == expected.samples
    assert group.outcomes[0].value == expected.outcomes[0].value == 1.0


def test_rewards_of_turns_go_to_their_last_tokens():
    group, _ = run(says("3"), says("77"), says("7"), credit="turn", args={"hint": "H?"})
    assert group.outcomes[0].token_rewards == ((8, 1.0),) and group.outcomes[0].detail == '{"guesses": 3}'


def test_a_command_is_a_program(tmp_path, monkeypatch):
    code = """
import json, sys
from openai import OpenAI
row, client = json.loads(sys.stdin.readline()), OpenAI(max_retries=0)
text = client.chat.completions.create(model="x", messages=row["messages"]).choices[0].message.content
print("progress")
print(json.dumps({"reward": float(text == row["answer"]), "info": text}))
"""
    (tmp_path / "agent.py").write_text(code)
    group, _ = run(says("7"), command=[sys.executable, str(tmp_path / "agent.py")])
    assert (group.outcomes[0].status, group.outcomes[0].value, group.outcomes[0].detail) == ("score", 1.0, "7")
    group, _ = run(command=[sys.executable, "-c", "print('done')"])
    assert "printed is no reward in JSON: 'done'" in group.outcomes[0].detail and group.outcomes[0].status == "error"
    for name in ("MEGAGRPO_API_KEY", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "hunter2")
    group, _ = run(command=[sys.executable, "-c", "import os; print('hunter2' in str(os.environ))"])
    assert "printed is no reward in JSON: 'False'" in group.outcomes[0].detail, "no business of a program's"
    group, _ = run(command=[sys.executable, "-c", "import sys; sys.exit(5)"])
    assert "ended with exit code 5" in group.outcomes[0].detail and group.outcomes[0].status == "error"
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '3600']); time.sleep(3600)"
    group, _ = run(command=[sys.executable, "-c", hangs], timeout_s=1.0)
    assert group.outcomes[0].status == "timeout"


@pytest.mark.parametrize("known", ["", "example.com"])
def test_a_proxy_of_the_machine_is_not_between_a_program_and_its_endpoint(monkeypatch, known):
    """Nodes of many clusters reach the internet through one, which does not reach other nodes."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", known)
    group, _ = run(says("7"), program="guess")
    assert group.outcomes[0].value == 1.0, group.outcomes[0]
    group, _ = run(command=[sys.executable, "-c", "import os; print(repr(os.environ['no_proxy']))"])
    assert known in group.outcomes[0].detail


def test_programs_beyond_a_number_wait_before_their_time_begins(tmp_path, monkeypatch):
    """Else a step of thousands of rollouts would be as many processes at once."""
    monkeypatch.setattr(sampler, "_OPEN", 2)
    counts = tmp_path / "counts"
    open_ones = tmp_path / "open"
    open_ones.mkdir()
    code = f"touch {open_ones}/$$; ls {open_ones} | wc -l >> {counts}; sleep 1; rm {open_ones}/$$"
    command = ["sh", "-c", f"{code}; echo 1"]
    groups, _ = run_all(["7"] * 6, program="", command=command, timeout_s=2.9, at_once=1)
    assert [group.outcomes[0].value for group in groups] == [1.0] * 6
    assert max(map(int, counts.read_text().split())) == 2


def test_an_evaluation_passes_programs_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "_OPEN", 1)
    order = tmp_path / "order"
    code = f"read row; echo $row | grep -o 'a[0-9]' >> {order}; sleep 0.7; echo 1"
    config = experiment(
        train={"group_size": 1},
        rollout={"max_running_requests": 1},
        algorithm={"advantage": {"name": "reinforce_plus_plus"}},
        sampling={"agent": {"command": ["sh", "-c", code], "workers": 1}},
    )
    prompts = [Prompt(n, "?", tuple(ids("?")), f"a{n}") for n in range(4)]
    with playing(config, TOKENIZER, FakeService(version=3)) as source:
        ahead = source.begin(plan(source, 7, prompts[:3], 3))
        until(order.exists)
        evaluation = SamplingJob("evaluate", 0, 3, SamplingParams.of(config.sampling), 1)
        source.wait([source.begin(BatchPlan(evaluation, prompts[3:])), ahead], 3)
    assert order.read_text().split() == ["a0", "a3", "a1", "a2"]


def test_more_programs_than_usual_run_if_the_engines_take_more_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "_OPEN", 1)
    waits = f"touch {tmp_path}/$$; while [ $(ls {tmp_path} | wc -l) -lt 3 ]; do sleep 0.1; done; echo 1"
    groups, _ = run_all(["7"] * 3, program="", command=["sh", "-c", waits], at_once=3, timeout_s=10.0)
    assert [group.outcomes[0].value for group in groups] == [1.0] * 3


@pytest.mark.parametrize("holds", ["sleep 1000 &", "setsid sleep 5 &"], ids=["child", "in another session"])
def test_a_command_has_ended_though_a_child_that_it_left_holds_its_output(holds: str):
    group, _ = run(command=["sh", "-c", f"{holds} echo 0.5"], timeout_s=4.0)
    assert (group.outcomes[0].status, group.outcomes[0].value) == ("score", 0.5), group.outcomes[0]


@pytest.mark.parametrize("info", ["a\u2028b\x85c", "d" * 70_000], ids=["line ends of Unicode", "long"])
def test_the_last_line_of_a_command_is_read_whole(info: str):
    result = json.dumps({"reward": 0.5, "info": info}, ensure_ascii=False)
    group, _ = run(command=[sys.executable, "-c", f"print('x'); print({result!r} + chr(13)); print()"])
    assert (group.outcomes[0].value, group.outcomes[0].detail) == (0.5, info[:1000]), group.outcomes[0]


def test_a_command_has_the_users_pythonpath_and_not_that_of_its_worker(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import mine, os; print(repr([os.environ['PYTHONPATH'], 'MEGAGRPO_USER_PATH' in os.environ]))"
    group, _ = run(command=[sys.executable, "-c", code])
    assert f"{[str(tmp_path), False]}" in group.outcomes[0].detail, group.outcomes[0]


def test_a_command_need_not_read_its_row():
    prints = "print('x' * 10**6); print(0.5)"
    group, _ = run(command=[sys.executable, "-c", prints], answer="9" * 300_000, timeout_s=60)
    assert group.outcomes[0].value == 0.5, group.outcomes[0]


def test_a_fork_and_a_compaction_are_samples_of_one_rollout():
    script = [[0, "?"], [2, "H"], [4, "H"], [4, "L"], [0, "9"]]  # a history that grows, its fork, a new beginning
    turns = [says(text) for text in ("1", "2", "3", "4", "5")]
    group, requests = run(*turns, program="scripted", answer=json.dumps(script))
    assert [sample.rollout for sample in group.samples] == [0, 0, 0] and len(group.outcomes) == 1
    assert masked(group, 0) == f"1{END}[H]2{END}[H]3{END}"
    assert masked(group, 1) == "".join(f"[{c}]" for c in ("1", END, "H", "2", END, "L")) + f"4{END}", "trained once"
    assert masked(group, 2) == f"5{END}" and group.samples[2].prompt_ids.tolist() == ids("9")
    assert group.samples[0].prompt_ids is None, "the prompt of the data"
    sampled = sum(len(turn["output_token_logprobs"]) for turn in turns)
    assert sum(sample.loss_mask.sum() for sample in group.samples) == sampled == 10
    assert len({request["sampling_params"]["sampling_seed"] for request in requests}) == 5
    for request, sample in zip([requests[2], requests[3]], group.samples[:2], strict=True):
        assert request["input_ids"] == [*ids("?"), *sample.token_ids[:-2]], "exact ids"


def test_single_turns_do_not_extend_each_other_so_that_none_is_refused():
    with pytest.raises(ValueError, match="with history last no turn extends another"):
        experiment(sampling={"agent": {"command": ["true"], "history": "last", "fork": "refuse"}})


def test_a_history_that_was_edited_begins_anew_or_is_refused():
    script = [[0, "?"], [1, "H"]]  # without the model's own turn
    group, _ = run(says("1"), says("2"), program="scripted", answer=json.dumps(script))
    assert [masked(group, n) for n in range(2)] == [f"1{END}", f"2{END}"]
    assert group.samples[1].prompt_ids.tolist() == ids("?H")
    group, _ = run(says("1"), program="scripted", answer=json.dumps(script), fork="refuse")
    assert group.outcomes[0].status == "error" and "sampling.agent.fork: refuse" in group.outcomes[0].detail
    assert masked(group) == f"1{END}", "kept"


def test_every_turn_may_be_a_sample():
    script = json.dumps([[0, "?"], [2, "H"]])
    group, requests = run(says("3"), says("7"), program="scripted", answer=script, history="last")
    assert [sample.token_ids.tolist() for sample in group.samples] == [ids("3", True), ids("7", True)]
    assert requests[1]["input_ids"] == ids("?3H") == group.samples[1].prompt_ids.tolist()


@pytest.mark.parametrize(
    ("turns", "more", "reason"),
    [
        ([says("3"), says("4")], {"max_turns": 2}, "2 turns"),
        ([says("33", reason="length")], {"truncated_reward": -1.0, "tokens": 2}, "a turn reached the limit of tokens"),
        ([says("3")], {"tokens": 3}, "no room for another turn"),
    ],
)
def test_each_limit_cuts_a_rollout_and_its_reward_is_what_was_declared(turns, more, reason):
    group, _ = run(*turns, program="scripted", answer=json.dumps([[9, "H"]] * 3), **more)
    outcome = group.outcomes[0]
    declared = more.get("truncated_reward")
    assert (outcome.status, outcome.value) == (("error", 0.0) if declared is None else ("score", declared))
    assert reason in outcome.detail and "RuntimeError: this rollout has a limit" in outcome.detail
    assert group.samples[-1].finish_reason == "length"


FAILURES = {
    "raise": ("error", "tests.programs:bad raised RuntimeError: the tool server is gone"),
    "nothing": ("error", "it returned None, not a finite reward"),
    "garbage": ("error", "not a finite reward"),
    "set": ("error", "it returned {1, 2}, not a finite reward"),
    "many": ("error", "it returned 2 turn_rewards for 1 turns"),
    "hang": ("timeout", "no reward in 8 s"),
    "exit": ("error", "the process of its program died"),
    "sys.exit": ("error", "it calls sys.exit: no browser"),
    "good": ("score", ""),
    "block": ("timeout", "no reward in 8 s"),
}


def test_a_program_that_fails_gives_no_reward_and_takes_no_other_with_it(monkeypatch):
    """All in one process, which two of them end: those that are lost begin again, each in a process of its own."""
    monkeypatch.setattr("megagrpo.system.worker_process.GRACE_S", 0.5)
    groups, requests = run_all(list(FAILURES), program="bad", timeout_s=8.0)
    for group, (status, named) in zip(groups, FAILURES.values(), strict=True):
        outcome = group.outcomes[0]
        assert (outcome.status, outcome.value) == (status, 0.25 if outcome.ok else 0.0) and named in outcome.detail
        assert len(group.samples) == 1 and len(group.samples[0].token_ids) == 4, "what was sampled is kept"
    assert len(FAILURES) < len(requests) <= 2 * len(FAILURES), "at least one began again, none twice"


def test_a_program_that_holds_its_process_costs_no_other_its_time(monkeypatch):
    """Limits pass while nothing in the process can run: who was held begins again elsewhere."""
    monkeypatch.setattr("megagrpo.system.worker_process.GRACE_S", 0.5)
    groups, _ = run_all(["hold", "slow"], program="bad", timeout_s=3.0)
    held, slow = (group.outcomes[0] for group in groups)
    assert (held.status, held.detail) == ("timeout", "no reward in 3 s")
    assert (slow.status, slow.value) == ("score", 0.25), slow


def test_branches_of_parallel_requests_and_a_turn_that_its_agent_did_not_wait_for():
    def hang(body: dict) -> bool:
        return body["input_ids"] == ids("L")

    groups, requests = run_all(["parallel", "leave", "statuses", "patient"], program="bad", hang=hang)
    parallel, left, told, patient = groups
    assert patient.outcomes[0].value == 1.0, "its connection was kept"
    assert parallel.outcomes[0].value == 1.0 and [sample.rollout for sample in parallel.samples] == [0] * 4
    assert all(sample.prompt_ids is None and sample.loss_mask.all() for sample in parallel.samples)
    seeds = {request["sampling_params"]["sampling_seed"] for request in requests}
    assert len(seeds) == len(requests) == 4 + 2 + 1 + 1, "seeds of their own"
    assert left.outcomes[0].value == 0.5 and len(left.samples) == 1
    assert json.loads(told.outcomes[0].detail) == [400, 400, 400, 400, 400, 400, 401, 200, 200, 401]
    group, requests = run(program="bad", answer="refused", fork="refuse")
    assert group.outcomes[0].value == 1.0 and len(requests) == len(group.samples) == 1


def test_a_hung_thread_costs_its_own_rollout_and_no_other(monkeypatch):
    """The others wait for the model when its time is over, and for long after that."""
    monkeypatch.setattr(worker_process, "GRACE_S", 2.0)
    begun: list[float] = []

    def hang(body: dict) -> bool:
        begun.append(time.monotonic())
        return begun[-1] < begun[0] + 8

    groups, requests = run_all(["hang", "a", "b"], program="hang_or_talk", timeout_s=2.0, hang=hang)
    assert [group.outcomes[0].status for group in groups] == ["timeout", "score", "score"]
    assert len(requests) == 2, "each other turn was sampled once"


def test_the_handbooks_program_plays(tmp_path):
    (code,) = re.findall(r"```python\n(# agent.py\n.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    (tmp_path / "agent.py").write_text(code)
    tokenizer = character_tokenizer("0123456789 abcdefghijklmnopqrstuvwxyz?")
    turns, function = [says("9"), says("10")], f"{tmp_path / 'agent.py'}:guess"
    group, _ = run(*turns, answer="10", function=function, tokenizer=tokenizer)
    assert group.outcomes[0].value == 1.0
    told = tokenizer.decode(group.samples[0].token_ids, skip_special_tokens=True)
    assert told == "9higher10"
