"""`broadcast` through the real exchange into fake engines: buckets in flight, what is packed, who dies or refuses."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, running
from test_weights_transport import Trainer

from megagrpo.mesh import LeaderError
from megagrpo.weights.transports import broadcast as transport_broadcast


@pytest.fixture
def engine():
    with running(FakeEngine()) as engine:
        yield engine


class ReceivingEnd:
    """The engine's end of `broadcast`: gloo groups as SGLang makes them; buckets flattened, or tensor by tensor.

    It takes one call after the other. `awaits_next`: it loads a bucket only when the next one's call has arrived.
    """

    def __init__(self, engine: FakeEngine, awaits_next: bool = False):
        self.engine, self.groups, self.num_buckets, self.dies_at = engine, {}, 0, 0
        self.formats, self.awaits_next = [], awaits_next
        self.arrived, self.turn = threading.Semaphore(0), threading.Lock()
        engine.more |= {
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.take,
            "/destroy_weights_update_group": lambda body: self.groups.pop(body["group_name"]),
        }

    def join(self, body: dict) -> None:
        name, limit = body["group_name"], timedelta(seconds=10)
        store = dist.TCPStore(body["master_address"], body["master_port"], wait_for_workers=False, timeout=limit)
        keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=body["master_address"])]
        self.groups[name] = dist.ProcessGroupGloo(keys, body["rank_offset"], body["world_size"], options)

    def take(self, body: dict) -> None:
        self.arrived.release()
        with self.turn:
            self.num_buckets += 1
            if self.num_buckets == self.dies_at:
                self.groups.clear()
                raise OSError("the process is gone")  # the server drops the connection
            forms = zip(body["shapes"], body["dtypes"], strict=True)
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]
            self.formats.append(body.get("load_format"))
            flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
            values = tensors if self.formats[-1] is None else [flat]
            for part in values:
                self.groups[body["group_name"]].broadcast([part], dist.BroadcastOptions()).wait()
            if self.formats[-1] is not None:
                parts = flat.split([tensor.nbytes for tensor in tensors])
                tensors = [
                    part.clone().view(tensor.dtype).view(tensor.shape)
                    for part, tensor in zip(parts, tensors, strict=True)
                ]
            if self.awaits_next and self.num_buckets < 3:
                for _ in range(2):  # its own and the next one's
                    assert self.arrived.acquire(timeout=10), "the next call does not wait for the answer to this one"
                self.arrived.release()
            self.engine.model.load_weights(list(zip(body["names"], tensors, strict=True)))


def test_broadcast_fills_an_engine_in_buckets_and_leaves_it(engine, tmp_path):
    receiving = ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, "broadcast")
    for version in (1, 2):
        trainer.exchange.publish(version)
        trainer.assert_in(engine)
    assert receiving.num_buckets == 6 and len(receiving.groups) == 2, "the same groups for the whole run"
    assert set(receiving.formats) == {"flattened_bucket"}
    trainer.exchange.close()
    assert not receiving.groups


def test_the_next_bucket_is_on_its_way_while_an_engine_loads_one(engine, tmp_path):
    ReceivingEnd(engine, awaits_next=True)
    trainer = Trainer(tmp_path, engine, "broadcast")
    trainer.exchange.publish(1)
    trainer.assert_in(engine)
    assert engine.info.incarnation == 1, "every call was answered"
    trainer.exchange.close()


def test_large_tensors_are_broadcast_as_they_lie(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(transport_broadcast, "_ALONE_BYTES", 1)
    receiving = ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, "broadcast")
    trainer.exchange.publish(1)
    trainer.assert_in(engine)
    assert receiving.formats == [None] * 3
    trainer.exchange.close()


def test_what_an_engine_says_of_a_bucket_that_it_refuses_stops_the_run(engine, tmp_path):
    receiving = ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, "broadcast")

    def refuse_the_second(body: dict) -> None:
        receiving.take(body)
        if receiving.num_buckets == 2:
            raise ValueError("no such parameter")

    engine.more["/update_weights_from_distributed"] = refuse_the_second
    with pytest.raises(LeaderError, match="EngineRefused: .* 400 no such parameter"):
        trainer.exchange.publish(1)
    assert engine.info.state == "stale"


def test_an_engine_that_dies_in_a_broadcast_is_filled_after_its_restart(engine, tmp_path):
    receiving = ReceivingEnd(engine)
    receiving.dies_at = 2
    trainer = Trainer(tmp_path, engine, "broadcast")
    start = time.monotonic()
    trainer.exchange.publish(1)
    assert time.monotonic() - start < 15, "nobody waited for the deadline of the half that was left alone"
    trainer.assert_in(engine)
    assert engine.info.incarnation == 2 and receiving.num_buckets == 2 + 3
    trainer.exchange.close()


def test_an_engine_that_refuses_to_join_says_why(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(transport_broadcast, "_JOIN_S", 1.0)
    ReceivingEnd(engine)
    engine.refuses = "/init_weights_update_group"
    with pytest.raises(LeaderError, match=r"EngineRefused: .* refuses /init_weights_update_group: 400 refused on purp"):
        Trainer(tmp_path, engine, "broadcast").exchange.publish(1)
