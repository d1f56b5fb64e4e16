"""How often all ranks exchange Python objects in a publish, which every step has: at 1, 4 and 512
ranks."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, FakeFleet, exchange_config, running, write_checkpoint

from megagrpo.mesh import Mesh, only_fake_groups
from megagrpo.system.environment import child_environment
from megagrpo.weights import exchange as module
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.record import record_copies
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.wire.moving import Traffic
from tests.dist.workers.counted import counted_calls
from tests.dist.workers.launch import run_meshes

CPU = torch.device("cpu")


class NoTransport:
    """What is counted is the exchange's own; a transport may add its own."""

    past_loader = False

    def __init__(self, weights):
        pass

    def transfer(self, version, engines, timer) -> Traffic:
        return Traffic()

    def drop(self, engine) -> None:
        pass

    def leave(self, engine) -> None:
        pass


def counted(mesh: Mesh, folder: Path) -> dict[str, int]:
    """Publishes twice to one engine; returns the calls of the second publish, in which nothing is
    new."""
    live = {
        name: torch.zeros(4, 4) for name in ("gate", "up", "down")
    }  # of the fake engine's model
    specs = dict.fromkeys(live, ((4, 4), torch.float32))
    copies = record_copies(lambda hf: [live[name].copy_(hf[name]) for name in live], specs, live)
    weights = ActorWeights(copies, specs, lambda: live)
    engine = FakeEngine()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(module.TRANSPORTS, {"disk": NoTransport}))
        stack.enter_context(mock.patch.object(Exchange, "_check", lambda *args, **kwargs: None))
        if mesh.is_main:
            stack.enter_context(running(engine))
        config = exchange_config(
            folder, folder / "initial" / "model", weights={"transport": "disk", "timeout_s": 30}
        )
        exchange = Exchange(config, mesh, weights, FakeFleet([engine]), folder)
        stack.callback(exchange.close)
        exchange.publish(1)
        with counted_calls() as calls:
            exchange.publish(2)
    return dict(calls)


def pretended(world: int, folder: Path) -> dict[str, int]:
    """Rank 0 of a world whose other ranks say what it says."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())

    def same(values, value, group=None):
        values[:] = [value] * len(values)

    with (
        only_fake_groups(),
        mock.patch.object(dist, "all_gather_object", same),
        mock.patch.object(dist, "broadcast_object_list", lambda *args, **kwargs: None),
    ):
        mesh = Mesh(0, world, 0, world, dist.group.WORLD, None, 0, CPU)
        return counted(mesh, folder)


@pytest.mark.parametrize("world", [1, 4, 512])
def test_a_publish_gathers_objects_once(world, tmp_path):
    write_checkpoint(tmp_path / "initial", {"norm": torch.zeros(4)})
    if world <= 4:
        found = run_meshes(world, tmp_path, counted, tmp_path)
        assert all(calls == found[0] for calls in found)
        calls = found[0]
    else:
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.dist.test_collectives",
            str(world),
            str(tmp_path),
        ]
        done = subprocess.run(words, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        calls = json.loads(done.stdout.splitlines()[-1])
    if world == 1:
        assert calls == {}
        return
    assert calls["all_gather_object"] == 1, "the bytes that ranks have sent"
    assert calls["broadcast_object_list"] == 1 and "gather_object" not in calls, "seconds by phase"
    assert calls["all_reduce"] <= 12, "integers, and the digests"


if __name__ == "__main__":
    print(json.dumps(pretended(int(sys.argv[1]), Path(sys.argv[2]))))
