"""The service's own address, key, connections and Ray, which need no engine."""

import asyncio
import json
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from aiohttp import web
from fake_service import FakeService, running

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.service import ray_cluster, server, supervisor
from megagrpo.rollout.service.addresses import interface_of, own_address
from megagrpo.rollout.service.node import free_port, server_ports
from megagrpo.rollout.service.server import make_key
from megagrpo.rollout.service.sleep import SleepFailed
from megagrpo.rollout.service.supervisor import SupervisedEngine
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.status import print_status
from tests import experiments
from tests.experiments import until


def test_host_is_an_address_or_an_interface():
    assert own_address("127.0.0.1") == own_address("lo") == own_address("localhost") == "127.0.0.1"
    assert own_address("0.0.0.0") == "0.0.0.0" and interface_of("0.0.0.0") is None
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(
        ValueError, match=r"rollout.host eht0 is no interface and no IPv4 address of .*'lo': \['127.0.0.1'\]"
    ):
        own_address("eht0")
    assert free_port("127.0.0.1") in range(20_000, 30_000)


def test_no_two_servers_of_a_run_choose_among_the_same_ports():
    chosen = [port for slot in range(1000, 1600) for ports in server_ports(slot, 3) for port in ports]
    assert len(chosen) == len(set(chosen)) and set(chosen) <= set(range(20_000, 30_000))


def test_a_restarted_engine_has_another_url_and_a_taken_port_is_passed_by():
    first, second = (server_ports(7, incarnation)[0] for incarnation in (1, 2))
    assert first[0] != second[0] and sorted(first) == sorted(second)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first[0]))
        taken.listen()
        assert free_port("127.0.0.1", first) in first[1:]


def test_a_key_is_made_for_its_owner_alone_unless_it_is_given(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.API_KEY, raising=False)
    file = tmp_path / "run" / "service.key"
    first, second = make_key(file), make_key(file)
    assert first != second == file.read_text() and len(second) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv(environment.API_KEY, "given by its user")
    assert make_key(file) == "given by its user" == file.read_text(), "`status` and Prometheus read it there"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_connection_outlives_its_call():
    """An idle one would be closed by the first thread that finds it too old, maybe when another was just given it."""
    with running(FakeService()) as service:
        control, port = service.control, int(service.url.rpartition(":")[2])

        def connections() -> list:
            """Of both ends, as the service is in this process."""
            every = psutil.Process().net_connections("tcp")
            return [one for one in every if one.raddr and port in (one.raddr.port, one.laddr.port)]

        for _ in range(2):
            control.status()
            until(lambda: not [one for one in connections() if one.status == psutil.CONN_ESTABLISHED], 5)


BUSY = Exception("The current node timed out during startup. This could happen because\nsome of the raylet failed")


class FakeRay:
    """Plays ray.init: fails so many times, each time leaving a process behind."""

    def __init__(self, monkeypatch, failures: int):
        self.failures, self.attempts, self.left = failures, [], []
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray_cluster, "_PAUSE_S", 0.01)

    def init(self, **options) -> None:
        self.attempts.append(options)
        if len(self.attempts) <= self.failures:
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            raise BUSY


def experiment(folder: Path, **rollout) -> ExperimentConfig:
    return experiments.experiment(output_dir=str(folder), rollout=rollout)


def test_ray_is_tried_again_and_failed_attempts_leave_nothing(tmp_path, monkeypatch):
    fake = FakeRay(monkeypatch, failures=2)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with ray_cluster.in_ray_cluster(experiment(tmp_path), None):
        folder = Path(fake.attempts[-1]["_temp_dir"]).parent
        assert folder.is_dir() and len(fake.attempts) == 3
        assert all(process.wait(10) != 0 for process in fake.left), "a failed attempt left a process"
        assert other.poll() is None, "a process that was there before was ended"
    assert not folder.exists()
    other.kill()
    other.wait()


def test_a_second_service_of_a_running_run_is_refused(tmp_path):
    """It would replace the address and the key that the run's trainers read."""
    with running(FakeService()) as service:
        address = json.dumps({"url": service.url})
        (tmp_path / "service.json").write_text(address)
        (tmp_path / "service.key").write_text("key")
        with pytest.raises(ValueError, match=f"output_dir {tmp_path}: .* at {service.url}; wait"):
            server.serve(experiment(tmp_path, start_timeout_s=1.0), tmp_path)
    assert (tmp_path / "service.json").read_text() == address


def test_status_says_that_the_service_refuses_its_key(tmp_path, capsys):
    class Refuses(FakeService):
        async def status(self, request: web.Request) -> web.Response:
            return web.Response(status=401)

    with running(Refuses()) as service:
        (tmp_path / "service.json").write_text(json.dumps({"url": service.url}))
        (tmp_path / "service.key").write_text("of an earlier start")
        assert print_status(tmp_path, as_json=False) == 0
    assert f"({service.url} refuses the API key" in capsys.readouterr().out


def test_a_service_that_ends_late_leaves_the_key_of_the_next_start(tmp_path, monkeypatch):
    """Its launcher was killed, and the same command was given again while its engines ended."""
    monkeypatch.delenv(environment.API_KEY, raising=False)
    folder = RunFolder(tmp_path)

    @contextmanager
    def ends(config: ExperimentConfig, address: str | None):
        if starts_again:
            folder.service.write_text(json.dumps({"url": "http://127.0.0.1:1"}))
            make_key(folder.service_key)
        raise ray_cluster.RayNotStarted("it was ended")
        yield

    monkeypatch.setattr(server, "in_ray_cluster", ends)
    for starts_again in (True, False):
        assert server.serve(experiment(tmp_path), tmp_path) == 1
        assert {file.exists() for file in (folder.service, folder.service_key)} == {starts_again}


def test_the_service_gives_up_with_one_line(tmp_path, monkeypatch, capfd):
    fake, started = FakeRay(monkeypatch, failures=1000), time.monotonic()
    assert server.serve(experiment(tmp_path, start_timeout_s=1.0), tmp_path) == 1
    assert time.monotonic() - started < 30
    printed = capfd.readouterr()
    *tries, last = printed.out.splitlines()
    assert len(tries) == len(fake.attempts) - 1 and all("trying again" in line for line in tries)
    assert last.startswith("rollout service failed: Ray on ") and "The current node timed out during startup" in last
    assert f"in {len(fake.attempts)} attempt(s) within 1 s" in last and "raise rollout.start_timeout_s" in last
    assert "Traceback" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == [] and all(process.poll() is not None for process in fake.left)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_given_address_is_joined_and_a_private_cluster_is_small(tmp_path, monkeypatch, address):
    fake = FakeRay(monkeypatch, failures=0)
    with ray_cluster.in_ray_cluster(experiment(tmp_path, num_engines=3), address):
        [options] = fake.attempts
    assert options["address"] == (address or "local")
    assert options.get("num_cpus") == (5 if address is None else None)


def test_whoever_asks_an_engine_to_sleep_is_answered_when_its_memory_is_free(tmp_path):
    async def run() -> list[bool]:
        free = asyncio.Event()
        engine = SupervisedEngine(
            0, experiments.experiment(), cuda=False, api_key="", log_dir=tmp_path, may_start=asyncio.Event()
        )
        engine.state = "ready"
        engine._memory = SimpleNamespace(release=lambda http: free.wait())
        asked = [asyncio.create_task(engine.sleep(None)) for _ in range(2)]
        await asyncio.sleep(0.05)
        done = [task.done() for task in asked]
        free.set()
        await asyncio.gather(*asked)
        return done

    assert asyncio.run(run()) == [False, False]


def test_an_engine_that_refuses_to_sleep_is_gone_when_trainers_take_its_gpu(tmp_path, monkeypatch):
    """Its server process ends in order, which takes seconds, and holds its memory until then."""
    monkeypatch.setattr(ray, "kill", lambda node: None)

    async def run() -> list[bool]:
        ended = asyncio.Event()
        engine = SupervisedEngine(
            0, experiments.experiment(), cuda=False, api_key="", log_dir=tmp_path, may_start=asyncio.Event()
        )
        engine.state, engine._lost = "ready", asyncio.get_running_loop().create_future()
        engine._nodes = [SimpleNamespace(stop=SimpleNamespace(remote=ended.wait))]

        async def refuses(http: object) -> None:
            raise SleepFailed("it refuses")

        engine._memory = SimpleNamespace(release=refuses)
        asked = [asyncio.create_task(engine.sleep(None))]
        await engine._lost
        ending = asyncio.create_task(engine.stop())
        asked.append(asyncio.create_task(engine.sleep(None)))  # of another rank
        await asyncio.sleep(0.3)
        done = [task.done() for task in asked]
        ended.set()
        await asyncio.gather(ending, *asked)
        return done

    assert asyncio.run(run()) == [False, False]


def test_an_engine_whose_actor_raised_without_a_text_has_died_like_any_other(tmp_path):
    config = experiments.experiment(rollout={"max_restarts": 1})

    async def run() -> SupervisedEngine:
        engine = SupervisedEngine(0, config, cuda=False, api_key="", log_dir=tmp_path, may_start=asyncio.Event())

        async def start(http: object) -> None:
            raise ray.exceptions.RayTaskError("EngineNode.start", "", AssertionError())

        engine._start = start
        await engine._run(None)
        return engine

    engine = asyncio.run(run())
    assert engine.gave_up and (engine.state, engine.restarts, engine.reason) == ("dead", 1, "")


def test_a_report_is_of_many_engines_and_names_those_that_have_ended(tmp_path):
    config = experiments.experiment(output_dir=str(tmp_path), rollout={"host": "127.0.0.1"})

    async def run() -> list:
        service = server._Service(config, RunFolder(tmp_path), cuda=False, api_key="a key")
        service._http = None
        for index in range(3):
            engine = SupervisedEngine(
                index, config, cuda=False, api_key="", log_dir=tmp_path, may_start=asyncio.Event()
            )
            engine.url, engine.state, engine.incarnation = "http://127.0.0.1:1", "stale", 1 + index // 2
            service._engines[engine.id] = engine
        runner = web.AppRunner(service._application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        control = ServiceControl(url, "a key")
        everyone = {f"engine-{index}": 1 for index in range(4)}  # one is restarted, one was drained
        ended = [await asyncio.to_thread(control.report, "update", everyone)]
        ended.append(await asyncio.to_thread(control.report, "ready", everyone, 7))
        await asyncio.to_thread(control.report, "lost", {"engine-1": 1, "engine-2": 1})
        infos = await asyncio.to_thread(control.engines)
        await runner.cleanup()
        return [ended, [(info.state, info.weight_version) for info in infos]]

    ended, states = asyncio.run(run())
    assert ended == [{"engine-2", "engine-3"}] * 2
    assert states == [("ready", 7), ("dead", None), ("stale", None)]


def test_the_service_answers_while_ray_does_not(tmp_path, monkeypatch):
    """Its one loop waits for machines and answers the trainers' /status."""
    asked, answer = threading.Event(), threading.Event()

    def table(group) -> dict:
        asked.set()
        answer.wait(20)
        return {"state": "CREATED"}

    monkeypatch.setattr(supervisor, "placement_group", lambda bundles, strategy: None)
    monkeypatch.setattr(supervisor, "placement_group_table", table)
    engine = SimpleNamespace(_config=experiment(tmp_path), _cuda=False)

    async def waits() -> bool:
        reserving = asyncio.create_task(SupervisedEngine._reserve_machines(engine))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        waited = not reserving.done()
        answer.set()
        await reserving
        return waited

    assert asyncio.run(waits())
