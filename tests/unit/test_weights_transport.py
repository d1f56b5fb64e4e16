"""Transports through the real exchange into fake engines, and that one is a class and a row: a toy one."""

import errno
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, FakeFleet, FusedModel, OneTrainer, ReceivingEnd, running

from megagrpo.config.schema import WeightsConfig
from megagrpo.mesh import LeaderError
from megagrpo.weights.engines import client, derived_tensors, fleet
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.loader import engine_end
from megagrpo.weights.exchange import TRANSPORTS
from megagrpo.weights.transports import broadcast as transport_broadcast
from megagrpo.weights.transports import disk
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard import ReshardTransport
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.mailbox import Mailbox, listening_store
from megagrpo.weights.wire.moving import Traffic


class ToyTransport:
    """Posts exactly the slices that an engine rank needs from the trainer rank that holds them:
    nothing is gathered."""

    past_loader = True

    def __init__(self, weights: TrainerWeights):
        self.weights, self.events, self.dies = weights, [], False
        self.connected: set[str] = set()

    def transfer(self, version, engines, timer) -> Traffic:
        self.engines = engines
        self.weights.mesh.from_main(lambda: engines.for_each(self._send), "toy weights to engines")
        return Traffic()

    def _send(self, engine: EngineConnection) -> None:
        self.connected.add(engine.id)
        self.events.append(f"transfer {engine.incarnation}")
        if self.dies:
            self.dies = False
            raise EngineDown("it died half-way")
        engine.begin()
        for index, part in enumerate(self.engines.kinds[engine.kind][0]):
            for copy in self.weights.copies[0]:
                common = copy.box.intersect(part.box) if copy.hf == part.hf else None
                if common is not None:
                    values = copy.restrict(common).view(self.weights.parameters()).to(self.weights.dtype)
                    engine.post("/toy", {"index": index, "start": common.start, "values": values.tolist()})
        engine.end()

    def drop(self, engine: EngineConnection) -> None:
        self.connected.discard(engine.id)
        self.events.append(f"drop {engine.incarnation}")

    def leave(self, engine: EngineConnection) -> None:
        self.events.append(f"leave {engine.incarnation}")


def take_toy(engine: FakeEngine, body: dict) -> None:
    """The engine's end: it finds slice number `index` in its own recording."""
    copy = engine_end(engine.model).recorded.recording.copies[body["index"]]
    values = torch.tensor(body["values"])
    live = copy.view(dict(engine.model.named_parameters()))
    for dim, (start, first, size) in enumerate(zip(body["start"], copy.start, values.shape, strict=True)):
        live = live.narrow(dim, start - first, size)
    live.copy_(values)


SHAPES = dict.fromkeys(("gate", "up", "down"), (4, 4))


class Trainer(OneTrainer):
    """A trainer of one rank, whose parameters are cut and fused otherwise than the engine's."""

    def __init__(self, folder: Path, engine: FakeEngine, transport: str, **weights: float):
        live = {"up_down": torch.zeros(4, 8), "gate.0": torch.zeros(3, 4), "gate.1": torch.zeros(1, 4)}
        self.added = 0.0
        super().__init__(folder, engine, transport, live, SHAPES, weights=weights)

    def load(self, hf) -> None:
        self.live["up_down"][:, :4].copy_(hf["up"])
        self.live["up_down"][:, 4:].copy_(hf["down"])
        self.live["gate.0"].copy_(hf["gate"][:3])
        self.live["gate.1"].copy_(hf["gate"][3:])

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Adapters that add `added` to all weights."""
        kept = {name: values.clone() for name, values in self.live.items()}
        for values in self.live.values():
            values += self.added
        yield
        for name, values in kept.items():
            self.live[name].copy_(values)

    def publish_and_compare(self) -> dict[str, float]:
        report, model, live = self.publish(), self.engine.model, self.live
        assert torch.equal(model.gate_up, torch.cat([live["gate.0"], live["gate.1"], live["up_down"][:, :4]]))
        assert torch.equal(model.down, live["up_down"][:, 4:])
        return report


@pytest.fixture
def engine():
    with running(FakeEngine()) as engine:
        engine.more["/toy"] = lambda body: take_toy(engine, body)
        yield engine


@pytest.fixture
def toy(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "toy", ToyTransport)
    return Trainer(tmp_path, engine, "toy")


def test_the_table_has_what_the_configuration_offers():
    assert set(TRANSPORTS) == set(get_args(WeightsConfig.model_fields["transport"].annotation))


def test_a_toy_transport_publishes_without_gathering(engine, toy):
    report = toy.publish_and_compare()
    assert engine.info.state == "ready" and engine.info.weight_version == 1
    assert report["gather"] == 0 and report["transfer"] > 0 and report["bytes"] == 48 * 4
    order = ["/pause_generation", "/begin_weight_update", "/toy", "/end_weight_update", "flush"]
    order += ["/update_weight_version", "/continue_generation"]
    after_toy = engine.calls.index("/toy")
    found = [engine.calls.index(path, after_toy if number > 2 else 0) for number, path in enumerate(order)]
    assert found == sorted(found)
    toy.publish_and_compare()
    toy.exchange.close()
    assert toy.exchange._transport.events == ["transfer 1", "transfer 1", "leave 1", "drop 1"]


def test_a_transport_learns_of_an_engine_that_died_and_meets_it_again(engine, toy):
    transport = toy.exchange._transport
    transport.dies = True
    toy.publish_and_compare()
    assert engine.info.incarnation == 2 and transport.connected == {"engine-0"}
    assert [event for event in transport.events if event.startswith("transfer")] == ["transfer 1", "transfer 2"]
    assert transport.events.index("drop 1") < transport.events.index("transfer 2")


class Dying(ToyTransport):
    def _send(self, engine: EngineConnection) -> None:
        raise EngineDown("it dies in every update")


def test_a_publish_ends_at_its_deadline_though_its_engine_comes_back(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "toy", Dying)
    trainer = Trainer(tmp_path, engine, "toy", timeout_s=1)
    with pytest.raises(LeaderError, match="rank 0 waited 1 s .*; they died because: "):
        trainer.publish()


def test_an_engine_that_dies_before_its_update_begins_is_updated_when_it_is_back(engine, toy, monkeypatch):
    """It has no address while it starts."""
    back = engine.info
    starting = replace(back, state="starting", url="", incarnation=2)
    listed = [[back], [starting], [starting], [replace(back, incarnation=2)]]

    def engines() -> list:
        if len(listed) > 1:
            return listed.pop(0)
        return [engine.info]

    monkeypatch.setattr(engine, "engines", engines)
    engine.info = listed[-1][0]
    toy.publish_and_compare()
    assert not listed[1:] and engine.info.state == "ready" and engine.info.incarnation == 2


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("toy", "/toy"),
        ("reshard", "/update_weights_from_tensor"),
        ("broadcast", "/init_weights_update_group"),
        ("broadcast", "/update_weights_from_distributed"),
    ],
)
def test_an_engine_that_refuses_stops_the_run_at_once_and_says_why(engine, tmp_path, monkeypatch, transport, path):
    monkeypatch.setitem(TRANSPORTS, "toy", ToyTransport)
    ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, transport, timeout_s=10)
    if transport == "reshard":
        trainer.publish()
    engine.refuses, start, before = path, time.monotonic(), engine.info
    with pytest.raises(LeaderError, match=f"rank 0, .*EngineRefused: .* refuses {path}: 400 refused on purpose"):
        trainer.publish()
    assert engine.info == before and time.monotonic() - start < 15


def test_what_a_dummy_start_leaves_random_for_ever_is_named(engine, tmp_path):
    engine.model.register_buffer("scale", torch.rand(3))
    engine.model.register_buffer("cache", torch.rand(3), persistent=False)  # computed, which a dummy start does as well
    with pytest.raises(LeaderError, match=r"rank 0: buffer scale \(3,\): random .* set rollout.load_format: model$"):
        Trainer(tmp_path, engine, "disk").publish()
    assert engine.info.state == "stale"


@pytest.mark.parametrize("transport", ["disk", "reshard"])
def test_what_adapters_add_is_published_and_verified(engine, tmp_path, transport):
    trainer = Trainer(tmp_path, engine, transport)
    trainer.added = 1.0
    trainer.publish()
    trainer.exchange.verify()
    assert torch.equal(engine.model.down, trainer.live["up_down"][:, 4:] + 1), "the frozen weights are as they were"
    trainer.exchange.close()


def test_disk_gives_the_same_parameters_and_keeps_the_last_version_only(engine, tmp_path):
    trainer = Trainer(tmp_path, engine, "disk")
    (tmp_path / "weights" / "v1_best").mkdir(parents=True)  # a user's copy
    for version in (1, 2):
        trainer.publish_and_compare()
        trainer.exchange.verify()
        assert {path.name for path in (tmp_path / "weights").iterdir()} == {f"v{version}", "v1_best"}


def test_a_version_that_cannot_be_removed_ends_no_run(engine, tmp_path, monkeypatch):
    """NFS keeps the name of a file that an engine still maps, so its folder is not empty."""
    trainer = Trainer(tmp_path, engine, "disk")
    trainer.publish_and_compare()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse_to_remove)
        trainer.publish_and_compare()
    trainer.publish_and_compare()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v3"], "tried again"


def refuse_to_remove(path, **_) -> None:
    raise OSError(errno.ENOTEMPTY, "Directory not empty", path)


def test_engines_have_half_of_what_is_left_when_a_checkpoint_is_written(engine, tmp_path, monkeypatch):
    """Not half of what was left before: a large model's writing would use it up, and healthy engines count as dead."""
    write = disk.write_hf_folder

    def slowly(*args) -> None:
        time.sleep(2.2)
        write(*args)

    monkeypatch.setattr(disk, "write_hf_folder", slowly)
    Trainer(tmp_path, engine, "disk", timeout_s=4.0).publish_and_compare()


def test_reshard_sends_every_slice_once_and_leaves(engine, tmp_path):
    trainer = Trainer(tmp_path, engine, "reshard")
    for _ in range(2):
        report = trainer.publish_and_compare()
        assert report["wire_bytes"] == 48 * 4 and report["gather"] == 0
    calls = [path for path in engine.calls if path == "/update_weights_from_tensor"]
    assert len(calls) == 1 + 2 * 2, "record once; receive and digest in every publish"
    assert engine_end(engine.model).link
    trainer.exchange.close()
    assert not engine_end(engine.model).link


@pytest.mark.parametrize(
    ("large", "formats"), [(None, {"flattened_bucket"}), (1, {None})], ids=["packed", "as they lie"]
)
def test_broadcast_fills_an_engine_in_buckets_and_leaves_it(engine, tmp_path, monkeypatch, large, formats):
    if large is not None:
        monkeypatch.setattr(transport_broadcast, "_ALONE_BYTES", large)
    receiving = ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, "broadcast")
    for _ in range(2):
        trainer.publish_and_compare()
    assert receiving.num_buckets == 6 and len(receiving.groups) == 2, "the same groups for the whole run"
    assert set(receiving.formats) == formats
    trainer.exchange.close()
    assert not receiving.groups


def test_the_next_bucket_is_on_its_way_while_an_engine_loads_one(engine, tmp_path):
    ReceivingEnd(engine, awaits_next=True)
    trainer = Trainer(tmp_path, engine, "broadcast")
    trainer.publish_and_compare()
    assert engine.info.incarnation == 1, "every call was answered"
    trainer.exchange.close()


def test_an_engine_that_dies_in_a_broadcast_is_filled_after_its_restart(engine, tmp_path):
    """tests/dist/test_weights_reshard.py has the others."""
    receiving = ReceivingEnd(engine)
    receiving.dies_at = 5
    trainer = Trainer(tmp_path, engine, "broadcast")
    trainer.publish()
    start = time.monotonic()
    trainer.publish_and_compare()
    assert time.monotonic() - start < 15, "no wait for the deadline of the half that was left alone"
    assert engine.info.incarnation == 2 and receiving.num_buckets == 3 + 2 + 3
    trainer.exchange.close()


class ComputedModel(FusedModel):
    """A loader that rounds `down` to int8, and a matrix that is computed from a parameter after loading."""

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        self.doubled = torch.zeros(8, 4)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "down":
                self.down.data.copy_((tensor * 16).round().to(torch.int8))
            else:
                super().load_weights([(name, tensor)])

    def post_load_weights(self) -> None:
        self.doubled = self.gate_up.data * 2


def test_what_is_no_slice_is_loaded_by_the_models_own_code_and_what_is_derived_is_refreshed(engine, tmp_path, capsys):
    engine.models = [ComputedModel()]
    captured = engine.model.doubled  # by CUDA graphs
    trainer = Trainer(tmp_path, engine, "reshard")
    for _ in range(2):
        report = trainer.publish()
        down, gate_up = trainer.live["up_down"][:, 4:], engine.model.gate_up
        assert torch.equal(engine.model.down, (down * 16).round().to(torch.int8))
        assert torch.equal(gate_up[4:], trainer.live["up_down"][:, :4])
        assert engine.model.doubled is captured and torch.equal(captured, gate_up * 2)
        assert report["wire_bytes"] == 48 * 4
    printed = capsys.readouterr().out
    assert "not copied but computed" in printed and "of HF tensor down" in printed
    trainer.exchange.verify()
    engine.model.down[2, 1] += 1
    with pytest.raises(LeaderError, match="parameter down: not what the loader has computed of the weights"):
        trainer.exchange.verify()
    trainer.live["up_down"][0, 4] += 1  # sent as it was before
    with pytest.raises(LeaderError, match=r"parameter HF tensor down does not hold HF tensor down \[0:4, 0:4\]"):
        trainer.exchange.verify()


def test_what_cannot_be_brought_up_to_date_is_named(engine, tmp_path, monkeypatch):
    engine.models = [ComputedModel()]
    with pytest.raises(LeaderError, match="parameter down is filled from .* of HF tensor down"):
        Trainer(tmp_path / "broadcast", engine, "broadcast").publish()
    monkeypatch.delattr(ComputedModel, "post_load_weights")
    engine.models = [ComputedModel()]
    with pytest.raises(LeaderError, match=r"holds, besides .*doubled \(8, 4\), .* use weights.transport: broadcast"):
        Trainer(tmp_path / "reshard", engine, "reshard").publish()


def test_what_a_model_computes_after_loading_is_looked_for_once(monkeypatch):
    """Transport broadcast loads a large model in thousands of buckets."""
    model = ComputedModel()
    captured = model.doubled
    derived_tensors.compute_in_place(model)
    monkeypatch.setattr(derived_tensors, "_derived", lambda model: pytest.fail("a walk over all modules"))
    model.gate_up.data.fill_(3.0)
    model.post_load_weights()
    assert model.doubled is captured and torch.equal(captured, torch.full((8, 4), 6.0))


def test_a_draft_is_told_that_it_is_one():
    class Draft(torch.nn.Module):
        def post_load_weights(self, is_nextn=False, weight_names=None):
            self.computed_as = is_nextn

    target, draft = Draft(), Draft()
    engine_end(target, draft)
    for model, is_draft in ((target, False), (draft, True)):
        model.post_load_weights()
        assert model.computed_as is is_draft


def test_a_bucket_has_the_time_of_its_publish_and_not_what_was_left_when_the_engine_joined(engine, tmp_path):
    receiving = ReceivingEnd(engine)
    trainer = Trainer(tmp_path, engine, "broadcast")
    trainer.publish()
    for group in trainer.exchange._transport._lines["engine-0"].groups:
        group.set_timeout(0.05)  # of an engine that came back when little was left
    engine.more["/update_weights_from_distributed"] = lambda body: time.sleep(0.5) or receiving.take(body)
    trainer.publish_and_compare()
    assert engine.info.incarnation == 1
    trainer.exchange.close()


def test_an_engine_that_is_given_up_with_two_calls_open_ends_both(engine):
    hangs = threading.Event()
    engine.more["/slow"] = lambda body: hangs.wait(20)
    connection = EngineConnection(
        engine.info, 1, Mailbox(listening_store("127.0.0.1", 20.0)), engine.api_key, patience_s=20.0
    )
    connection.deadline = Deadline(20.0)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        stack.callback(hangs.set)
        calls = [pool.submit(connection.post, "/slow") for _ in range(2)]
        while engine.calls.count("/slow") < 2:
            time.sleep(0.01)
        assert connection.asked == "/slow"
        connection.close()
        for call in calls:
            with pytest.raises(EngineDown, match="does not answer /slow"):
                call.result(10)
    assert connection.asked == ""


def test_an_engine_that_answers_nothing_holds_up_no_other(engine, monkeypatch):
    """Its ranks cannot reach the mailbox, in which all engines' answers lie."""
    monkeypatch.setattr(client, "_ANSWER_S", 5.0)
    mailbox = Mailbox(listening_store("127.0.0.1", 20.0))
    with running(FakeEngine(run=lambda model, named_tensors: None)) as silent, ThreadPoolExecutor(1) as pool:
        both = [EngineConnection(each.info, 1, mailbox, engine.api_key, patience_s=20.0) for each in (silent, engine)]
        for connection in both:
            connection.deadline = Deadline(20.0)
        asked = pool.submit(both[0].ask, "leave", [{}])
        while "/update_weights_from_tensor" not in silent.calls:
            time.sleep(0.01)
        time.sleep(0.5)
        assert both[1].ask("leave", [{}]) == [{}] and not asked.done()
        with pytest.raises(EngineDown, match="waits for the leave of .* rank 0: none after 5 s"):
            asked.result()


def test_a_connection_to_an_engine_loads_no_certificates(engine, monkeypatch):
    """Engines speak plain HTTP; an unused TLS context takes 50 ms, for each of a thousand."""
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **kwargs: pytest.fail("TLS"))
    mailbox = Mailbox(listening_store("127.0.0.1", 20.0))
    connection = EngineConnection(engine.info, 1, mailbox, engine.api_key, patience_s=20.0)
    connection.deadline = Deadline(20.0)
    connection.begin()
    assert engine.updating
    connection.close()


def begin_with(others: threading.Barrier, engine: FakeEngine, body: dict) -> None:
    others.wait()
    engine.updating = True


def test_no_engine_waits_for_another_to_be_left(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "_LEAVE_S", 120.0)  # else the second would be asked meanwhile
    both = threading.Barrier(2, timeout=60)
    engines = [FakeEngine(), FakeEngine()]
    rollout = {"num_engines": 2, "min_healthy_engines": 2}
    live = {name: torch.zeros(4, 4) for name in SHAPES}
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(running(engine))
        registry = FakeFleet(engines)
        trainer = OneTrainer(tmp_path, registry, "reshard", live, SHAPES, rollout=rollout)
        trainer.publish()
        for engine in engines:
            engine.more["/begin_weight_update"] = partial(begin_with, both, engine)
        trainer.exchange.close()
    assert not both.broken and not any(engine_end(engine.model).link for engine in engines)
    assert registry.lost == []


def test_what_equal_engines_need_is_reported_read_and_planned_once(tmp_path, monkeypatch):
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    live = {name: torch.zeros(4, 4) for name in SHAPES}
    rollout = {"num_engines": 3, "min_healthy_engines": 3}
    reports, written, read = [], [], []
    put, get = Mailbox.put, Mailbox.get
    monkeypatch.setattr(Mailbox, "put", lambda self, *args: written.append(args[0]) or put(self, *args))
    monkeypatch.setattr(Mailbox, "get", lambda self, key: read.append(key) or get(self, key))
    registry = FakeFleet(engines)
    answer = registry.report
    monkeypatch.setattr(registry, "report", lambda *args: reports.append(len(args[1])) or answer(*args))
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(running(engine))
        trainer = OneTrainer(tmp_path, registry, "reshard", live, SHAPES, rollout=rollout)
        stack.callback(trainer.exchange.close)
        trainer.publish()
        trainer.publish()
        for engine in engines:
            assert torch.equal(engine.model.down, live["down"])
    assert reports == [3, 3, 3, 3], "one request for all engines, before and after each publish"
    assert [key for key in read if key.startswith("copies/")] == list(
        {key for key in read if key.startswith("copies/")}
    )
    assert written == ["specs", "plan"]


def test_an_engine_that_died_has_only_its_own_plan_written_again(tmp_path, monkeypatch):
    engines = [FakeEngine(), FakeEngine()]
    live = {name: torch.zeros(4, 4) for name in SHAPES}
    rollout = {"num_engines": 2, "min_healthy_engines": 2}
    make_plan, put, keys = ReshardTransport._make_plan, Mailbox.put, []

    def of_slot(self, cover, link):  # engines of one trainer rank would share a plan
        plan = make_plan(self, cover, link)
        return replace(plan, limit=plan.limit + link.slot)

    def noted(self, subject, message):
        key = put(self, subject, message)
        keys.extend([key] * (subject == "plan"))
        return key

    monkeypatch.setattr(ReshardTransport, "_make_plan", of_slot)
    monkeypatch.setattr(Mailbox, "put", noted)
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(running(engine))
        trainer = OneTrainer(tmp_path, FakeFleet(engines), "reshard", live, SHAPES, rollout=rollout)
        stack.callback(trainer.exchange.close)
        trainer.publish()
        engines[1].restart()
        trainer.publish()
        for engine in engines:
            assert torch.equal(engine.model.down, live["down"])
        assert len(keys) == 3
        assert sum(map(trainer.exchange._fleet._mailbox.has, keys)) == 2, "what nobody reads is gone"
