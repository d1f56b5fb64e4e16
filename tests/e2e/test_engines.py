"""Two engines, and a trainer's exchange: faults, engines that come and go, and who may ask what."""

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from running_service import START_S, RunningService, running_service, scheduler_of
from sampling import Grader, sampled, source_of
from test_exchange import PlainSource
from tiny_model import make_tiny_model
from transformers import AutoTokenizer

from megagrpo.cli import main
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import make_mesh
from megagrpo.rollout.control import bearer
from megagrpo.system.processes import process_tree
from megagrpo.types import Prompt
from megagrpo.weights.exchange import Exchange
from tests import experiments
from tests.experiments import until

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.verifies("runs", "engines killed, hung, added and drained", "e2e/test_service_failures.py"),
]
MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)
PROMPTS = [Prompt(i, "", (1, *range(40 + 3 * i, 60 + 4 * i)), "") for i in range(12)]


def experiment(run_dir: Path, models: list[Path], **rollout) -> ExperimentConfig:
    base = {"num_engines": 2, "deterministic": True, "max_restarts": 9}
    base |= {"start_timeout_s": START_S, "step_timeout_s": 300.0, "health_timeout_s": 20.0}
    return experiments.experiment(
        output_dir=str(run_dir),
        model={"path": str(models[0])},
        sampling={"max_response_tokens": 100},
        train={"group_size": 4},
        rollout=base | rollout,
        weights={"bucket_mb": 0.1, "timeout_s": 400.0},
        actor={"deadline_s": 600.0},
    )


class Trainer:
    """One rank with the weights of a folder, as run.py and the loop would put it together."""

    def __init__(self, service: RunningService, models: list[Path]):
        self.service, self.models = service, models
        self.source, self.grader, self.version, self.refreshed = (PlainSource(models[0]), Grader(len), 0, [])
        tokenizer = AutoTokenizer.from_pretrained(models[0])
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.exchange = self._exchange("broadcast")
        self.rollouts = source_of(service.control, service.config, self.grader, decode)

    def _exchange(self, transport: str) -> Exchange:
        config = self.service.config
        config = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": transport})})
        return Exchange(config, MESH, self.source, self.service.control, self.service.run_dir)

    def use(self, transport: str) -> None:
        self.exchange.close()
        self.exchange = self._exchange(transport)

    def publish(self, model: int = 0) -> dict[str, float]:
        self.version += 1
        self.source.load(self.models[model])
        return self.exchange.publish(self.version)

    def bring(self, version: int, engine_ids: list[str]) -> None:
        self.refreshed.append(engine_ids)
        self.exchange.publish(version, engine_ids)

    def refresh(self, engine_ids: list[str]) -> None:
        self.bring(self.version, engine_ids)

    def step(self, step: int = 0, on_first=None) -> list:
        """Tokens and log-probabilities of every sample; `on_first` is called when the first has arrived."""
        self.grader.texts = arrived = []
        self.grader.on_submit = lambda: on_first() if on_first and len(arrived) == 1 else None
        groups = sampled(self.rollouts, step, PROMPTS, self.version, self.bring)
        assert [group.group_id for group in groups] == list(range(len(PROMPTS))) and len(arrived) == 48
        return [[(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in group.samples] for group in groups]


@pytest.fixture(scope="module")
def models(model_of) -> list[Path]:
    return [model_of(make_tiny_model, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def service(models, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("engines")
    with running_service(experiment(run_dir, models), run_dir) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(service, models):
    trainer = Trainer(service, models)
    trainer.publish()
    yield trainer
    trainer.exchange.close()


def wait_until(true, what: str, timeout_s: float = START_S) -> None:
    until(true, timeout_s, lambda: f"not within {timeout_s:.0f} s: {what}", 0.2)


def states(service: RunningService) -> dict[str, tuple]:
    return {each.id: (each.state, each.weight_version, each.incarnation) for each in service.control.engines()}


def test_both_transports_put_the_same_weights_into_both(trainer):
    for transport, model in (("broadcast", 1), ("disk", 0), ("broadcast", 1)):
        trainer.use(transport)
        trainer.publish(model)
        assert states(trainer.service) == {f"engine-{i}": ("ready", trainer.version, 1) for i in range(2)}
    sampling = {"max_new_tokens": 24, "sampling_seed": 7}
    body = {"input_ids": [1, 50, 51], "return_logprob": True, "sampling_params": sampling}
    key, urls = (bearer(trainer.service.control.api_key), [each.url for each in trainer.service.control.engines()])
    said = [httpx.post(f"{url}/generate", json=body, headers=key, timeout=120).json() for url in urls]
    assert said[0]["output_ids"] == said[1]["output_ids"]
    assert said[0]["meta_info"]["output_token_logprobs"] == said[1]["meta_info"]["output_token_logprobs"]
    trainer.publish()


def test_nobody_is_heard_without_the_key(trainer):
    control, run_dir = trainer.service.control, trainer.service.run_dir
    engine = control.engines()[0].url
    calls = [("GET", f"{control.url}/status"), ("POST", f"{control.url}/engines"), ("POST", f"{engine}/generate")]
    calls += [("POST", f"{engine}/update_weights_from_tensor"), ("POST", f"{engine}/pause_generation")]
    calls += [("GET", f"{engine}/server_info"), ("GET", f"{control.url}/metrics")]
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    for headers in ({}, bearer("x" * len(control.api_key))):
        for method, url in calls:
            status = httpx.request(method, url, json=body, headers=headers, timeout=60).status_code
            assert status in (401, 403), url
    said = httpx.get(f"{control.url}/metrics", headers=bearer(control.api_key)).text
    assert 'state="ready"' in said and f'engine="{control.engines()[0].id}"' in said
    # The key stands in one file, which is its owner's, and in no log and no command line.
    key = control.api_key.encode()
    assert len(key) >= 32
    assert [f.name for f in run_dir.rglob("*") if f.is_file() and key in f.read_bytes()] == ["service.key"]
    assert (run_dir / "service.key").stat().st_mode & 0o777 == 0o600
    for process in psutil.process_iter(["cmdline"]):
        assert control.api_key not in " ".join(process.info["cmdline"] or []), process


def test_services_listen_on_the_given_interface_only(trainer):
    """rollout.host is 127.0.0.1. The store of SGLang's ranks is not ours."""

    def elsewhere(process: psutil.Process) -> list[int]:
        listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        return [address.port for address in listening if address.ip not in ("127.0.0.1", "::1")]

    service = trainer.service.process.pid
    schedulers = {scheduler_of(engine.pid) for engine in trainer.service.control.engines()}

    def ports() -> dict[str, list[int]] | None:
        """By process; None while an engine's others are not seen below the service."""
        found = {}
        for process in set(process_tree(service)) - schedulers:
            words = " ".join([process.name(), *process.cmdline()])
            found[f"{words[:200]} {process.pid}"] = elsewhere(process)
        return found if any("sglang" in name for name in found) else None

    found = until(ports, 60.0)
    assert not {name: ports for name, ports in found.items() if ports} and not elsewhere(psutil.Process())


def test_one_engine_killed_while_the_other_serves(trainer):
    service, undisturbed = trainer.service, trainer.step(2)
    victim = service.control.engines()[0]
    assert trainer.step(2, lambda: os.kill(victim.pid, signal.SIGKILL)) == undisturbed
    trainer.publish(1)  # needs no more than min_healthy_engines, and waits for nobody else
    assert states(service)["engine-1"] == ("ready", trainer.version, 1)
    service.wait_alive(0)
    trainer.step(3)
    wait_until(lambda: states(service)["engine-0"][:2] == ("ready", trainer.version) or trainer.step(3) is None, "0")
    assert states(service) == {"engine-0": ("ready", trainer.version, 2), "engine-1": ("ready", trainer.version, 1)}
    trainer.publish()


@pytest.mark.slow  # in CI a killed engine
def test_hung_scheduler_is_found_and_replaced(trainer):
    """Its HTTP process still answers. The other engine takes its samples; it gets the weights before a request."""
    service, undisturbed = trainer.service, trainer.step(4)
    victim = service.control.engines()[1]
    assert trainer.step(4, scheduler_of(victim.pid).suspend) == undisturbed
    wait_until(lambda: states(service)["engine-1"][2] == victim.incarnation + 1, "a new incarnation")
    assert "hangs: no answer to /server_info for 20 s (rollout.health_timeout_s)" in service.control.engines()[1].reason
    assert not psutil.pid_exists(victim.pid)
    service.wait_alive(1)
    trainer.refresh(["engine-1"])
    assert states(service)["engine-1"] == ("ready", trainer.version, victim.incarnation + 1)


@pytest.mark.slow
def test_engine_that_hangs_in_an_update(trainer):
    """The whole server stops answering; the publish goes on with the other engine when the trainer's patience ends."""
    service, victim = trainer.service, trainer.service.control.engines()[0]
    os.kill(victim.pid, signal.SIGSTOP)
    trainer.publish(1)
    assert states(service)["engine-1"][:2] == ("ready", trainer.version)
    wait_until(lambda: states(service)["engine-0"][2] == victim.incarnation + 1, "a new incarnation")
    service.wait_alive(0)
    trainer.publish()
    assert all(state[:2] == ("ready", trainer.version) for state in states(service).values())


def test_an_engine_is_added_and_another_drained(trainer, capsys):
    service, control, folder = (trainer.service, trainer.service.control, str(trainer.service.run_dir))
    undisturbed = trainer.step(5)
    assert main(["engines", "add", folder]) == 0
    added = capsys.readouterr().out.removesuffix(" is starting\n")
    service.wait_alive(2)
    assert main(["status", folder, "--json"]) == 0
    listed = [engine["id"] for engine in json.loads(capsys.readouterr().out)["engines"]]
    assert listed == ["engine-0", "engine-1", added]
    assert states(service)[added] == ("stale", None, 1)
    assert trainer.step(5) == undisturbed
    wait_until(lambda: states(service)[added] == ("ready", trainer.version, 1) or trainer.step(5) is None, "verified")
    drained = control.engines()[0]
    drain = threading.Thread(target=control.drain_engine, args=[drained.id])
    assert trainer.step(5, drain.start) == undisturbed
    wait_until(lambda: drained.id not in states(service), "drained")
    assert not psutil.pid_exists(drained.pid)
    assert states(service).keys() == {"engine-1", added} and trainer.step(5) == undisturbed
    assert main(["engines", "drain", folder, "engine-1"]) == 0
    with pytest.raises(ValueError, match=r"cannot be drained: .*min_healthy_engines 1 would be left"):
        control.drain_engine(added)
    with pytest.raises(ValueError, match="engine-7 cannot be drained: there are only"):
        control.drain_engine("engine-7")
    trainer.publish(1)
    assert states(service)[added] == ("ready", trainer.version, 1)
