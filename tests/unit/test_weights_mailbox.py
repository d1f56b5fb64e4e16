"""A process that reaches the trainers' store without the run's secret changes no message of a publish."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, OneTrainer, running

from megagrpo.mesh import LeaderError
from megagrpo.weights.engines import loader
from megagrpo.weights.transports.links import CutFlag
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import PeerLost
from megagrpo.weights.wire.handover import Handover, take_batches
from megagrpo.weights.wire.mailbox import Mailbox, decode, encode, listening_store, open_mailbox

pytestmark = pytest.mark.verifies(
    "weights", "a process without the run's secret puts no message into the trainers' store"
)
CPU = torch.device("cpu")
NAMES = ("gate", "up", "down")
NO_MAC = b"0" * 64
STRANGER = """
import json, sys
from torch.distributed import TCPStore
for line in sys.stdin:
    port, code = json.loads(line)
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    keys = store.list_keys()
    exec(code)
    print("done", flush=True)
"""


class Stranger:
    """Another process, which knows the store's address and nothing else."""

    def __init__(self):
        command = [sys.executable, "-c", STRANGER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)

    def runs(self, port: int, code: str) -> None:
        """Executes `code`, which has `store` and the `keys` that it lists."""
        print(json.dumps([port, code]), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def overwrites(self, port: int, message: object) -> None:
        """Puts a message in the place of every value."""
        self.runs(port, f"[store.set(key, {NO_MAC + encode(message)!r}) for key in keys]")


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    stranger = Stranger()
    store = listening_store("127.0.0.1", 60)
    stranger.runs(store.port, "pass")  # once it has started
    yield stranger
    stranger.process.stdin.close()
    stranger.process.wait(60)


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(listening_store("127.0.0.1", 60))


def test_a_stranger_adds_replaces_and_moves_no_message(stranger, mailbox):
    port = mailbox.access[1]
    first, second, third = (mailbox.put("plan", [number]) for number in range(3))
    flag = CutFlag(SimpleNamespace(name="weights-1"), mailbox)
    code = "values = [store.get(key) for key in keys]\n"
    code += "for key, value in zip(keys, values[1:] + values[:1]): store.set(key, value)\n"
    code += "store.set('weights-1/cut', 'a stranger says so')\n"
    stranger.runs(port, code)
    for key in (first, second, third):
        with pytest.raises(PeerLost, match=f"without the run's secret has overwritten {key}"):
            mailbox.get(key)
    assert flag.reason() == ""
    address, port, secret = mailbox.access
    open_mailbox((address, port, "a guess"), 10).set("weights-1/cut", "a stranger says so")
    assert flag.reason() == ""
    CutFlag(SimpleNamespace(name="weights-1"), open_mailbox(mailbox.access, 10)).cut("it died")
    assert flag.reason() == "it died"
    stranger.overwrites(port, "another reason")
    with pytest.raises(PeerLost, match="has overwritten weights-1/cut"):
        flag.reason()
    assert Mailbox(listening_store("127.0.0.1", 60)).access[2] != secret, "of this start only"


def test_an_engine_opens_no_memory_that_a_stranger_names(stranger, mailbox):
    hand = Handover(mailbox, "k", {}, CPU, Deadline(60), 60.0, lambda: "")
    handle = json.loads(json.dumps(hand._buffer.handle))
    stranger.overwrites(mailbox.access[1], handle)
    with pytest.raises(PeerLost, match="has overwritten k/handle"):
        take_batches(open_mailbox(mailbox.access, 10), "k", [], {}, CPU, Deadline(60))
    hand.lost = "the engine has refused the handle"
    hand.close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with running(FakeEngine()) as engine:
        yield engine


@pytest.fixture
def trainer(engine, tmp_path) -> Iterator[OneTrainer]:
    live = {name: torch.zeros(4, 4) for name in NAMES}
    shapes = dict.fromkeys(NAMES, (4, 4))
    trainer = OneTrainer(tmp_path, engine, "reshard", live, shapes)
    yield trainer
    trainer.exchange.close()


def at_the_next(engine: FakeEngine, operation: str, act: Callable[[dict, Callable], None]) -> None:
    """Calls `act(request, run)` in the place of `run()` when the engine is next asked for it."""

    def run(model: nn.Module, named_tensors: list) -> None:
        request = decode(bytes(dict(named_tensors)["request"].numpy()))
        if request["operation"] != operation:
            loader.run(model, named_tensors)
            return
        engine.run = loader.run
        act(request, lambda: loader.run(model, named_tensors))

    engine.run = run


def test_digests_of_a_stranger_prove_nothing(stranger, engine, trainer):
    def act(request: dict, run: Callable) -> None:
        answer = loader.engine_end(engine.model).digest()  # as the trainers expect it
        engine.model.down += 1
        run()
        stranger.overwrites(request["mailbox"][1], {"answer": answer})

    at_the_next(engine, "digest", act)
    with pytest.raises(LeaderError, match="secret has overwritten digest/engine-0/"):
        trainer.publish()
    assert engine.info.weight_version is None


def test_an_engine_follows_no_plan_of_a_stranger(stranger, engine, trainer):
    links = []

    def act(request: dict, run: Callable) -> None:
        stranger.overwrites(request["mailbox"][1], [])
        run()
        links.append(loader.engine_end(engine.model).link)

    at_the_next(engine, "receive", act)
    trainer.publish()
    assert links == [None]
    assert engine.info.incarnation == 2, "it was given up, and filled after its restart"
    assert torch.equal(engine.model.down, trainer.live["down"])
