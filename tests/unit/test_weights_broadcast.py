"""`broadcast` through the real exchange into fake engines: buckets in flight, what is packed, who dies or refuses."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, ReceivingEnd, running
from test_weights_transport import Trainer

from megagrpo.mesh import LeaderError
from megagrpo.weights.transports import broadcast as transport_broadcast


@pytest.fixture
def engine():
    with running(FakeEngine()) as engine:
        yield engine


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
