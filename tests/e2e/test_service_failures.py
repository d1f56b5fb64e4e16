"""What happens when engines die, and what is left when the service ends."""

import os
import signal
from functools import partial

import psutil
import pytest
from running_service import START_S, scheduler_of, start_service
from sampling import Grader, sampled, source_of
from test_service import PROMPTS, SAMPLED, generate
from transformers import AutoTokenizer

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.source import RolloutSource
from megagrpo.system.processes import is_live, stop_tree
from megagrpo.types import Prompt
from tests.experiments import until


def make_source(service, grader: Grader) -> RolloutSource:
    """Of groups of three responses of at most 150 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(service.config.model.path)
    values = service.config.model_dump()
    values |= {"train": {"group_size": 3}, "sampling": {"max_response_tokens": 150}}
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    config = ExperimentConfig.model_validate(values)
    return source_of(service.control, config, grader, decode)


@pytest.mark.slow  # test_engines.py kills one of two
def test_engine_killed_during_a_rollout(service):
    """It is started again, gets its weights by a publish, and every sample of the step arrives, as without the kill."""
    service.set_version(1)
    prompts = [Prompt(i, "", PROMPTS[i % 4], "") for i in range(8)]
    refreshed, arrived = [], []

    def publish(version, engine_ids):
        refreshed.append(engine_ids)
        service.set_version(1)

    undisturbed = sampled(make_source(service, Grader(len)), 5, prompts, 1, publish)
    assert refreshed == [] and len({len(s.token_ids) for g in undisturbed for s in g.samples}) > 1
    victim = service.control.engines()[0]

    def kill_at_the_first_arrival():  # the longer responses are still being sampled
        if not arrived:
            os.kill(victim.pid, signal.SIGKILL)
        arrived.append(1)

    source = make_source(service, Grader(len, kill_at_the_first_arrival))
    groups = sampled(source, 5, prompts, 1, publish)
    assert refreshed == [[victim.id]]
    assert groups == undisturbed
    back = service.control.engines()[0]
    assert (back.incarnation, back.state, back.weight_version) == (victim.incarnation + 1, "ready", 1)
    assert "killed by signal 9" in back.reason
    assert not psutil.pid_exists(victim.pid)
    assert service.control.report("ready", {victim.id: victim.incarnation}, 2), "that incarnation is dead"


@pytest.mark.slow
def test_scheduler_killed(service):
    """Not the server process itself, but the one that computes: the supervisor sees the engine end."""
    service.set_version(1)
    before = service.control.engines()[0]
    scheduler_of(before.pid).kill()
    service.control.report("lost", {before.id: before.incarnation})
    until(lambda: service.control.engines()[0].incarnation != before.incarnation, START_S)
    service.set_version(1)
    assert generate(service, [(PROMPTS[0], SAMPLED, 0)], version=1)


@pytest.mark.slow
def test_model_that_does_not_exist(service, tmp_path):
    """The service ends by itself with the engine's own words, after one more try."""
    nothing = service.config.model.model_copy(update={"path": str(tmp_path / "nothing")})
    process = start_service(service.config.model_copy(update={"model": nothing}), tmp_path / "run")
    try:
        assert process.wait(timeout=START_S) == 1
    finally:
        stop_tree(process.pid)
    said = (tmp_path / "run" / "serve.log").read_text()
    assert "rollout service failed" in said and "after 1 restart" in said and str(tmp_path / "nothing") in said
    assert not (tmp_path / "run" / "service.json").exists()


def test_nothing_is_left_when_the_service_is_killed(service, tmp_path):
    """It has no chance to clean up: the kernel ends its children, and theirs. (The fixture checks the orderly end.)"""
    process = start_service(service.config, tmp_path)
    try:
        engine = "megagrpo.rollout.service.engine_process"
        until(lambda: any(engine in command for command in below(process.pid).values()), START_S, poll_s=0.2)
        tree = below(process.pid)
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(map(is_live, tree)), 60)


def below(pid: int) -> dict[psutil.Process, list[str]]:
    """Everything that process started, whatever its session, with its command line."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found[process] = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
