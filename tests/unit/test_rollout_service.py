"""The service's own address, key, connections and Ray, which need no engine."""

import asyncio
import json
import socket
import stat
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from aiohttp import web
from fake_service import FakeService, running

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.service import addresses, ray_cluster, server
from megagrpo.rollout.service.addresses import interface_of, own_address, reachable_host
from megagrpo.rollout.service.engine_command import ServerPlace
from megagrpo.rollout.service.node import EngineDied, Placed, ThisMachine, free_port, server_ports
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
    for host in ("eht0", "::"):
        with pytest.raises(
            ValueError, match=rf"rollout.host {host} is no interface and no IPv4 address of .*'lo': \['127.0.0.1'\]"
        ):
            own_address(host)
    assert free_port("127.0.0.1") in range(20_000, 30_000)


@pytest.mark.parametrize("others", [{}, {"eth0": "10.0.0.5", "eth1": "10.1.0.5"}])
def test_without_a_route_a_service_has_an_address_that_others_may_reach(monkeypatch, others):
    def no_route(host: str, port: int) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(addresses, "route_address", no_route)
    found = {
        name: [
            SimpleNamespace(family=socket.AF_INET6, address="::1"),
            SimpleNamespace(family=socket.AF_INET, address=own),
        ]
        for name, own in {"lo": "127.0.0.1", **others}.items()
    }
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
    assert reachable_host("0.0.0.0") == others.get("eth0", "127.0.0.1")


def test_a_service_on_ray_does_not_look_for_gpus_of_its_machine(monkeypatch, tmp_path):
    """With a driver that imports torch."""

    def joined(address: str) -> None:
        raise ValueError(f"joined {address}")

    monkeypatch.setattr(server, "visible_gpus", lambda: pytest.fail("looked"))
    monkeypatch.setattr(ray_cluster, "in_ray_cluster", joined)
    with pytest.raises(ValueError, match="joined 10.0.0.1:1"):
        server.serve(experiments.experiment(), tmp_path, "10.0.0.1:1")


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


ADDRESS = "10.0.0.1:6379"


def experiment(folder: Path, **rollout) -> ExperimentConfig:
    return experiments.experiment(output_dir=str(folder), rollout=rollout)


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
    def ends(address: str):
        if starts_again:
            folder.service.write_text(json.dumps({"url": "http://127.0.0.1:1"}))
            make_key(folder.service_key)
        raise ValueError("it was ended")
        yield

    monkeypatch.setattr(ray_cluster, "in_ray_cluster", ends)
    for starts_again in (True, False):
        with pytest.raises(ValueError, match="it was ended"):
            server.serve(experiment(tmp_path), tmp_path, ADDRESS)
        assert {file.exists() for file in (folder.service, folder.service_key)} == {starts_again}


def test_a_cluster_that_cannot_be_joined_is_named(tmp_path, monkeypatch):
    def init(address: str, **options) -> None:
        raise Exception(f"no GCS at {address}")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        ValueError, match=f"--ray-address {ADDRESS}: see whether Ray runs there: .* no GCS at {ADDRESS}"
    ):
        server.serve(experiment(tmp_path), tmp_path, ADDRESS)
    assert list(tmp_path.iterdir()) == []


def test_engines_on_this_machine_have_gpus_of_their_own(tmp_path):
    """As many as fit, in order; an engine that ends leaves its own to the next, which waits for them."""
    config = experiment(tmp_path, tp=2, host="127.0.0.1", start_timeout_s=2)

    def gpus(placed: Placed) -> list[list[str]]:
        return [ask.__closure__[0].cell_contents._gpus for ask in placed.asks]

    async def run() -> list:
        machine = ThisMachine(["0", "GPU-a", "4", "5", "6"])
        place = partial(machine.place, place=ServerPlace(0, cuda=True), cores_share=1, api_key="")
        first, second = await place(config, 2), await place(config, 2)
        with pytest.raises(EngineDied, match="1 x 2 GPUs for an engine: 1 of 5 are free on this machine"):
            await place(config, 2)
        asyncio.get_running_loop().call_later(0.7, first.release)
        again = await place(config, 2)
        second.release()
        wide = experiment(tmp_path, tp=2, nodes_per_engine=2, host="127.0.0.1")
        on_cpu = await ThisMachine([]).place(wide, 0, ServerPlace(0), 1, "")
        return [gpus(placed) for placed in (first, second, again, await place(wide, 1), on_cpu)]

    assert asyncio.run(run()) == [[["0", "GPU-a"]], [["4", "5"]], [["0", "GPU-a"]], [["4"], ["5"]], [[], []]]


def test_whoever_asks_an_engine_to_sleep_is_answered_when_its_memory_is_free(tmp_path):
    async def run() -> list[bool]:
        free = asyncio.Event()
        engine = SupervisedEngine(
            0,
            experiments.experiment(),
            machines=ThisMachine([]),
            api_key="",
            log_dir=tmp_path,
            may_start=asyncio.Event(),
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


def test_an_engine_that_refuses_to_sleep_is_gone_when_trainers_take_its_gpu(tmp_path):
    """Its server process ends in order, which takes seconds, and holds its memory until then."""

    async def run() -> list[bool]:
        ended = asyncio.Event()
        engine = SupervisedEngine(
            0,
            experiments.experiment(),
            machines=ThisMachine([]),
            api_key="",
            log_dir=tmp_path,
            may_start=asyncio.Event(),
        )
        engine.state, engine._lost = "ready", asyncio.get_running_loop().create_future()
        engine._placed = Placed([lambda method: ended.wait()], lambda: None)

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


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (ray.exceptions.RayTaskError("EngineNode.start", "", AssertionError()), ""),
        (ray.exceptions.ActorDiedError(), "its node was lost: ActorDiedError: "),
        (ray.exceptions.ActorUnavailableError("for now", b"x" * 16), "The actor "),
        (ValueError("rollout.host is not reachable"), "rollout.host is not reachable"),
        (PermissionError("no log"), "no log"),
    ],
)
def test_an_engine_whose_node_raised_has_died_like_any_other(raised, reason, tmp_path):
    config = experiments.experiment(rollout={"max_restarts": 1})
    numbers = []

    class Raises:
        def __getattr__(self, name: str):
            return self

        async def remote(self, *arguments):
            raise raised

    async def run() -> SupervisedEngine:
        machine = ThisMachine([])
        engine = SupervisedEngine(0, config, machines=machine, api_key="", log_dir=tmp_path, may_start=asyncio.Event())

        async def place(config, gpus: int, place: ServerPlace, *arguments) -> Placed:
            numbers.append(place.engine)
            return Placed([ray_cluster._ask_actor(Raises())], lambda: None)

        machine.place = place
        await engine._run(None)
        return engine

    engine = asyncio.run(run())
    assert engine.gave_up and (engine.state, engine.restarts) == ("dead", 1) and engine.reason.startswith(reason)
    assert numbers == [0, 1024], "each start draws numbers of its own"


def test_a_report_is_of_many_engines_and_names_those_that_have_ended(tmp_path):
    config = experiments.experiment(output_dir=str(tmp_path), rollout={"host": "127.0.0.1"})

    async def run() -> list:
        service = server._Service(config, RunFolder(tmp_path), machines=ThisMachine([]), api_key="a key")
        service._http = None
        for index in range(3):
            engine = SupervisedEngine(
                index, config, machines=ThisMachine([]), api_key="", log_dir=tmp_path, may_start=asyncio.Event()
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

    actor = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments, **others: None))
    played = {
        "placement_group": lambda bundles, strategy: None, "placement_group_table": table, "_EngineNodeActor": actor,
        "PlacementGroupSchedulingStrategy": lambda *arguments, **options: None,
    }  # fmt: skip
    for name, plays in played.items():
        monkeypatch.setattr(ray_cluster, name, plays)
    monkeypatch.setattr(ray, "cluster_resources", dict)

    async def waits() -> bool:
        machines = ray_cluster.RayMachines()
        reserving = asyncio.create_task(machines.place(experiment(tmp_path), 0, ServerPlace(0), 1, ""))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        waited = not reserving.done()
        answer.set()
        await reserving
        return waited

    assert asyncio.run(waits())
