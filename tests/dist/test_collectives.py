"""How often all ranks exchange Python objects in a publish, which every step has: at 1, 2 and 4 ranks."""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, FakeFleet, exchange_config, running, write_checkpoint

from megagrpo.mesh import Mesh
from megagrpo.weights import exchange as module
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.wire.moving import Traffic
from tests.dist.workers.counted import counted_calls
from tests.dist.workers.launch import run_meshes


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
    """Publishes twice to one engine; returns the calls of the second publish, in which nothing is new."""
    # The zeros that the fake engine's model begins with: its digests are right without a transfer.
    live = {name: torch.zeros(4, 4) for name in ("gate", "up", "down")}
    specs = dict.fromkeys(live, ((4, 4), torch.float32))
    copies = record_whole(lambda hf: [live[name].copy_(hf[name]) for name in live], specs, live).copies
    weights = ActorWeights(copies, specs, lambda: live)
    engine = FakeEngine()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(module.TRANSPORTS, {"disk": NoTransport}))
        if mesh.is_main:
            stack.enter_context(running(engine))
        config = exchange_config(folder, folder / "initial" / "model", weights={"transport": "disk", "timeout_s": 30})
        exchange = Exchange(config, mesh, weights, FakeFleet([engine]), folder)
        stack.callback(exchange.close)
        exchange.publish(1)
        with counted_calls() as calls:
            exchange.publish(2)
    return dict(calls)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_publish_gathers_objects_once(world, tmp_path):
    write_checkpoint(tmp_path / "initial", {"norm": torch.zeros(4)})
    calls, *others = run_meshes(world, tmp_path, counted, tmp_path)
    assert all(found == calls for found in others)
    if world == 1:
        assert calls == {}
        return
    assert calls["all_gather_object"] == 1, "the bytes that ranks have sent"
    assert calls["broadcast_object_list"] == 1 and "gather_object" not in calls, "seconds by phase"
    assert calls["all_reduce"] <= 12, "integers, and the digests"
