"""Teachers and judges: their scores and replies beside those of transformers, and engines of theirs that die."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logprobs import logits_by
from run_megagrpo import Job, assert_same_run, metrics, rollouts, run_experiment, succeed, write_experiment
from running_service import START_S, running_service
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.control import find_service
from megagrpo.rollout.served_models import EngineJudge, Teachers
from megagrpo.rollout.service.engine_command import ServerPlace, engine_environment, engine_python_path
from megagrpo.system.environment import child_environment
from megagrpo.types import Outcome, Prompt, TeacherScores
from tests.experiments import experiment, python, until

CONTEXT = np.array([1, *range(40, 60)], np.int32)
RESPONSES = [np.array([*range(60, 60 + n), 2], np.int32) for n in (1, 30, 200)]
LOSSES = ("reverse_kl", "teacher_topk", "student_topk")
K = 5


def distilled(service, loss: str, **sections) -> dict[str, object]:
    """The sections of a service's experiment, with a loss that its teachers score for."""
    options = {"loss": loss} | ({} if loss == "reverse_kl" else {"top_k": K})
    said = service.config.model_dump() | {"algorithm": {"distillation": options}}
    return experiment(**(said | sections))


def scores_of(teachers: Teachers, given: list[np.ndarray | None], prompt=None) -> list[TeacherScores]:
    """Of all responses at once."""

    async def run():
        prompted = prompt or Prompt(0, "", CONTEXT, "")
        async with teachers.opened() as opened:
            pairs = zip(RESPONSES, given, strict=True)
            return await asyncio.gather(*(opened.score(prompted, CONTEXT, ids, top) for ids, top in pairs))

    return asyncio.run(run())


def expected(model, ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at the positions of a response, by transformers."""
    whole = torch.tensor(np.concatenate([CONTEXT, ids]).astype(np.int64))
    logits = logits_by(model, whole[None])[0, len(CONTEXT) - 1 : -1] / temperature
    return logits.log_softmax(-1)


def assert_equal(scores, by_position: torch.Tensor, ids: np.ndarray, top: bool) -> None:
    own = by_position.gather(1, torch.tensor(ids.astype(np.int64))[:, None])[:, 0]
    assert (torch.tensor(scores.logprobs) - own).abs().max() <= 1e-5
    assert (scores.top_ids is None) == (not top)
    if top:
        rows = torch.tensor(scores.top_ids.astype(np.int64))
        assert (torch.tensor(scores.top_logprobs) - by_position.gather(1, rows)).abs().max() <= 1e-5


@pytest.mark.parametrize("loss", LOSSES[:2])
def test_a_server_that_runs_elsewhere_scores_as_transformers(service, monkeypatch, loss):
    """Any SGLang server; here the session's own engine."""
    url = service.wait_alive().url
    monkeypatch.setenv("TEACHER_KEY", service.control.api_key)
    config = distilled(service, loss, teachers={"math": {"url": url, "api_key_env": "TEACHER_KEY"}})
    teachers = Teachers(config, 1, service.control)
    for scores, ids in zip(scores_of(teachers, [None] * 3), RESPONSES, strict=True):
        by_position = expected(service.config.model.path, ids)
        assert_equal(scores, by_position, ids, loss == "teacher_topk")
        if loss == "teacher_topk":
            assert np.array_equal(scores.top_ids, by_position.topk(K).indices)
    assert teachers.use.samples == 3 and teachers.use.tokens == sum(map(len, RESPONSES))


def judged(folder: Path) -> tuple[dict[str, object], str]:
    """The section of a judge, and its reply to a response `5`: greedy, up to a character that is new in it."""
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    file = folder / "judge.txt"
    file.write_text("How good is {response}?")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = torch.tensor([tokenizer("How good is 5?").input_ids])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    written = model.generate(asked, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, asked.shape[1] :]
    text = tokenizer.decode(written)
    end = next(i for i, letter in enumerate(text) if i > 1 and letter.isascii() and letter not in text[:i])
    args = {"path": str(folder), "prompt_file": str(file), "pattern": "()", "scores": {"": 0.5}}
    return {"grader": "judge", "args": args | {"max_tokens": 40, "body": {"stop": text[end]}}}, text[:end]


def verdict(service) -> Outcome:
    """Of the response `5`, by the judge of a service."""
    with RewardPool(service.config.reward) as pool:
        pool.connect("judge", EngineJudge(service.config, "judge", 1, service.control))
        return pool.submit(Prompt(0, "", CONTEXT, ""), "5").result(START_S)


@pytest.mark.slow
@pytest.mark.verifies(
    "runs",
    "teachers' engines score as transformers does within 1e-5, at temperature 0.7, for each loss of "
    "distillation and as a mixture; a judge's engine writes as transformers does; a killed one comes "
    "back and is waited for",
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_engines_of_teachers_and_of_a_judge(tiny_model, tmp_path, deterministic):
    """At the temperature of samples, for every loss, alone and as a mixture; a killed one comes
    back, and scores are waited for. So is the judge's reply, which is its own model's."""
    other = make_tiny_model(tmp_path / "other", 1)
    reward, reply = judged(other)
    temperature = 0.7
    rollout = {"start_timeout_s": START_S, "load_format": "model", "deterministic": deterministic}
    # so that the longest response comes in parts
    rollout["sglang"] = {"chunked_prefill_size": 64, "max_prefill_tokens": 64}
    sections = {
        "model": {"path": str(tiny_model)},
        "data": {"path": "d", "teacher_key": "teacher"},
        "rollout": rollout,
        "sampling": {"max_response_tokens": 24, "temperature": temperature},
        "teachers": {"math": {"path": str(other)}, "code": {"path": str(tiny_model)}},
        "algorithm": {"distillation": {}},
        "reward": reward,
    }
    config = experiment(output_dir=str(tmp_path), **sections)
    with running_service(config, tmp_path / "run") as service:
        status = service.control.status()
        ids = ["engine-0", "teacher-math-0", "teacher-code-0", "judge-judge-0"]
        assert [e.id for e in status.engines] == ids
        assert [e.serves for e in status.engines] == [False, True, True, True]
        assert [e.id for e in service.control.engines()] == ["engine-0"], "to which trainers publish"
        assert verdict(service) == Outcome("score", 0.5, reply)
        of_math = [expected(other, ids, temperature) for ids in RESPONSES]
        of_code = [expected(tiny_model, ids, temperature) for ids in RESPONSES]
        mixed = [torch.logaddexp(a + np.log(0.3), b + np.log(0.7)) for a, b in zip(of_math, of_code, strict=True)]
        chance = np.random.default_rng(0)
        given = [chance.integers(0, 320, (len(ids), K)).astype(np.int32) for ids in RESPONSES]
        cases = {"math": of_math, "code": of_code, "both": mixed}
        weights = {"both": (("math", 0.3), ("code", 0.7))}
        for loss in LOSSES:
            teachers = Teachers(distilled(service, loss), 1, service.control)
            candidates = given if loss == "student_topk" else [None] * 3
            for name, by_position in cases.items():
                if (loss, name) == ("teacher_topk", "both"):
                    continue
                prompt = Prompt(0, "", CONTEXT, "", teachers=weights.get(name, ((name, 1.0),)))
                found = scores_of(teachers, candidates, prompt)
                for scores, rows, ids in zip(found, by_position, RESPONSES, strict=True):
                    assert_equal(scores, rows, ids, loss != "reverse_kl")

        prompt = Prompt(0, "", CONTEXT, "", teachers=(("math", 1.0),))
        for number in (1, 3):
            os.kill(service.control.status().engines[number].pid, signal.SIGKILL)
        assert verdict(service) == Outcome("score", 0.5, reply)
        again = scores_of(Teachers(distilled(service, "reverse_kl"), 1, service.control), [None] * 3, prompt)
        for scores, rows, ids in zip(again, of_math, RESPONSES, strict=True):
            assert_equal(scores, rows, ids, False)
        until(lambda: [e.restarts for e in service.control.status().engines] == [0, 1, 0, 1], 60)


SPAWNED = """
import runpy
runpy.run_module("megagrpo.rollout.service.engine_process", run_name="__mp_main__")
from sglang.srt.layers.logits_processor import LogitsProcessor
print(LogitsProcessor._get_logits.__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scores", [False, True])
def test_a_process_that_sglang_spawns_is_prepared_too(tiny_model, scores):
    """On a CPU it forks them, unlike on GPUs."""
    place = ServerPlace(0, "127.0.0.1", 1, "", cuda=False, num_cores=1, scores=scores)
    config = experiment(model={"path": str(tiny_model)}, sampling={"temperature": 0.7})
    env = child_environment(engine_environment(config, place), engine_python_path(place))
    said = python("-c", SPAWNED, env=env).splitlines()
    assert said[-1] == ("scaled" if scores else "_get_logits")


STEPS = 4


@pytest.mark.slow
@pytest.mark.verifies(
    "runs", "a run with a teacher, which is killed, and then everything, has the bits of the undisturbed one"
)
def test_a_run_whose_teacher_and_then_everything_is_killed_is_the_undisturbed_one(experiments):
    """Two runs of the same steps, ahead of the weights; nothing is trained without a score."""
    sections = {
        "train": {"num_steps": STEPS},
        "rollout": {"deterministic": True, "max_staleness": 1},
        "weights": {"in_flight": "drain"},
        "sampling": {"temperature": 0.7},
        "checkpoint": {"every": 1, "keep": 20},
        "teachers": {"first": {"path": str(experiments / "model")}},
        "algorithm": {"distillation": {"loss": "student_topk", "top_k": 4}, "mismatch": {"weight": {"name": "tis"}}},
    }
    whole = experiments / "taught"
    run_experiment(whole, **sections)
    folder = experiments / "taught_again"
    config = write_experiment(folder, **sections)

    def teacher():
        return find_service(folder).status().engines[1]

    with Job("run", config) as job:
        job.wait_for_step(1)
        os.kill(teacher().pid, signal.SIGKILL)
        job.wait_for_step(2)
        job.wait_for(lambda: teacher().restarts == 1, "a restart")  # then everything is killed
    succeed("run", config)
    assert_same_run(folder, whole, STEPS)
    for step, groups in rollouts(folder).items():
        scores = [s["teacher_logprob"] for group in groups for s in group["samples"]]
        assert all(np.isfinite(score) and score < 0 for score in scores), step
    entries = metrics(whole)
    assert entries[STEPS]["teachers/tokens"] > 0 and entries[STEPS]["teachers/restarts"] == 0
