"""What happens when engines die, and what is left when the service ends."""

import os
import signal
import threading
import time

import psutil
import pytest
from running_service import start_service
from test_service import PROMPTS, SAMPLED, generate, make_source

from megagrpo.processes import process_tree, stop_tree
from megagrpo.types import Prompt


def test_engine_killed_during_a_rollout(service):
    """It is started again, gets its weights through `refresh`, and every sample of the step arrives, as without the kill."""
    service.set_version(1)
    prompts = [Prompt(i, "", PROMPTS[i % 4], "") for i in range(16)]
    source, refreshed = make_source(service), []

    def refresh(engine_ids):
        refreshed.append(engine_ids)
        service.set_version(1)

    undisturbed = source.next(5, prompts, 1, refresh)
    assert refreshed == []
    victim = service.control.engines()[0]
    threading.Timer(0.4, os.kill, (victim.pid, signal.SIGKILL)).start()
    groups = source.next(5, prompts, 1, refresh)
    assert refreshed == [[victim.id]]
    assert groups == undisturbed
    back = service.control.engines()[0]
    assert (back.incarnation, back.state, back.weight_version) == (victim.incarnation + 1, "ready", 1)
    assert "killed by signal 9" in back.reason
    assert not psutil.pid_exists(victim.pid)
    assert not service.control.mark_ready(victim.id, victim.incarnation, 2), "a word about the dead incarnation is not believed"


def test_scheduler_killed(service):
    """Not the server process itself, but the one that computes: the supervisor sees the engine end."""
    service.set_version(1)
    before = service.control.engines()[0]
    scheduler = next(p for p in psutil.Process(before.pid).children(recursive=True) if "scheduler" in p.name() or "sched" in p.cmdline()[0])
    scheduler.kill()
    service.control.report_suspect(before.id)
    deadline = time.monotonic() + 60
    while service.control.engines()[0].incarnation == before.incarnation:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    service.wait_for("stale")
    service.set_version(1)
    assert generate(service, [(PROMPTS[0], SAMPLED, 0)], version=1)


def test_model_that_does_not_exist(service, tmp_path):
    """The service ends by itself with the engine's own words, after one more try."""
    broken = service.config.model_copy(update={"model": service.config.model.model_copy(update={"path": str(tmp_path / "nothing")})})
    process = start_service(broken, tmp_path / "run")
    try:
        assert process.wait(timeout=120) == 1
    finally:
        stop_tree(process.pid)
    said = (tmp_path / "run" / "serve.log").read_text()
    assert "rollout service failed" in said and "after 1 restart" in said and str(tmp_path / "nothing") in said
    assert not (tmp_path / "run" / "service.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(service, tmp_path, number):
    """Also when the service has no chance to clean up: the kernel ends its children, and theirs."""
    config = service.config
    process = start_service(config, tmp_path)
    tree = []
    deadline = time.monotonic() + 120
    while not any("sglang" in " ".join(p.cmdline()) for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE):
        assert process.poll() is None and time.monotonic() < deadline
        tree = process_tree(process.pid)
        time.sleep(0.2)
    tree = everything_below(process.pid)
    assert len(tree) > 5, tree
    process.send_signal(number)
    process.wait(timeout=60)
    gone, alive = psutil.wait_procs(tree, timeout=20)
    assert not alive, [(p.pid, p.cmdline()) for p in alive]


def everything_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
