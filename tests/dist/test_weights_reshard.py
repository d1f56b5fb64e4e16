"""Several trainer ranks fill several engines of several ranks over real gloo, and one of them dies on the way."""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, FakeFleet, exchange_config, running, write_checkpoint

from megagrpo.mesh import LeaderError, Mesh
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.engines import loader
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.transports.reshard import _TrainerEnd
from megagrpo.weights.wire.engine_group import EngineGroup, Receive
from megagrpo.weights.wire.mailbox import decode, open_mailbox
from tests.dist.test_weights_gather import FFN, HIDDEN, LAYERS, SPECS, VOCAB, ToyActor, hf_tensors
from tests.dist.workers.counted import counted_calls
from tests.dist.workers.launch import run_meshes

ENGINE_TP = 2
ENGINE_VOCAB = 32  # padded


class ToyEngine(nn.Module):
    """One of two tensor-parallel ranks: gate and up fused, q and k fused, rows of both vocabularies with padding."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        shapes = {"embed": (ENGINE_VOCAB // 2, HIDDEN), "norm": (HIDDEN,), "head": (ENGINE_VOCAB // 2, HIDDEN)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}-norm": (HIDDEN,), f"{layer}-fc1": (FFN, HIDDEN), f"{layer}-fc2": (HIDDEN, FFN // 2)}
            shapes |= {f"{layer}-qk": (6, HIDDEN)}
        for name, shape in shapes.items():  # anything, as after a start without a checkpoint
            self.register_parameter(name, nn.Parameter(torch.full(shape, 7.0), requires_grad=False))

    def load_weights(self, weights) -> None:
        live = {name: parameter.data for name, parameter in self.named_parameters()}
        shard = lambda tensor, dim: tensor.chunk(2, dim)[self.rank]  # noqa: E731
        for name, tensor in weights:
            layer, _, part = name.rpartition(".")
            if name in ("embed", "head"):
                rows = tensor[self.rank * 16 : self.rank * 16 + 16]
                live[name][: len(rows)].copy_(rows)
                live[name][len(rows) :].fill_(0)
            elif part == "norm":
                live[f"{layer}-norm" if layer else "norm"].copy_(tensor)
            elif part == "down":
                live[f"{layer}-fc2"].copy_(shard(tensor, 1))
            else:
                parts = dict(zip(("gate", "up"), live[f"{layer}-fc1"].chunk(2), strict=True))
                parts |= dict(zip(("q", "k"), live[f"{layer}-qk"].split([4, 2]), strict=True))
                parts[part].copy_(shard(tensor, 0))


def engine_device(mesh: Mesh, number: int, colocated: bool) -> torch.device:
    """That of the engine rank of this number; all live in the main rank's process."""
    if mesh.device.type == "cpu":
        return mesh.device
    first = mesh.device.index - mesh.rank
    index = number % mesh.world_size if colocated else mesh.world_size + number
    return torch.device(mesh.device.type, (first + index) % torch.cuda.device_count())


def assert_filled(engines: list[FakeEngine], hf: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    for engine in engines:
        for rank, model in enumerate(engine.models):
            expected = ToyEngine(rank)
            expected.load_weights(list(hf.items()))
            for name, parameter in expected.named_parameters():
                found = model.get_parameter(name).cpu().view(torch.int32)
                assert torch.equal(found, parameter.view(torch.int32)), (engine.info.id, rank, name)


def dies_once(engine: FakeEngine, while_joining: bool) -> None:
    """Makes rank 1 of an engine go away when it is next asked to receive, with all that it has on the wire."""

    def run(model: nn.Module, named_tensors: list) -> None:
        request = decode(bytes(dict(named_tensors)["request"].numpy()))
        if model is not engine.models[1] or request["operation"] != "receive":
            loader.run(model, named_tensors)
            return
        engine.run = loader.run
        if while_joining and "size" in request:  # it says that it is ready, but never comes
            open_mailbox(request["mailbox"], 10).set(f"{request['group']}/ready/1")
        loader.engine_end(model).leave()
        raise SystemExit("the process is gone")

    engine.run = run


@dataclass
class Publishing:
    """Trainers of toy weights and engines; the main rank's engines answer."""

    actor: ToyActor
    engines: list[FakeEngine]
    fleet: FakeFleet
    exchange: Exchange


@contextmanager
def publishing(
    mesh: Mesh, actor: ToyActor, folder: Path, number: int = 2, read: Callable[[], None] = lambda: None, **options
) -> Iterator[Publishing]:
    """To so many engines. read: called in each thread that reads the actor's parameters; options:
    dtype, transport and delta if they are not float32, reshard and False."""
    chosen = {"dtype": "float32", "transport": "reshard", "delta": False} | options
    rollout = {"num_engines": number, "tp": ENGINE_TP, "min_healthy_engines": number, "dtype": chosen.pop("dtype")}
    settings = {"timeout_s": 40, "bucket_mb": 2e-3, **chosen}
    config = exchange_config(folder, folder / "initial/model", rollout=rollout, weights=settings)

    def live() -> dict[str, torch.Tensor]:
        read()
        return actor.live

    weights = ActorWeights(record_whole(actor.load, SPECS, actor.live).copies, SPECS, live)
    colocated = chosen["transport"] == "ipc"
    devices = [engine_device(mesh, n, colocated) for n in range(number * ENGINE_TP)]
    models = [ToyEngine(n % ENGINE_TP).to(device) for n, device in enumerate(devices)]
    engines = [FakeEngine(models=models[n : n + ENGINE_TP]) for n in range(0, len(models), ENGINE_TP)]
    fleet = FakeFleet(engines)
    with ExitStack() as stack:
        for engine in engines if mesh.is_main else ():
            stack.enter_context(running(engine))
        exchange = Exchange(config, mesh, weights, fleet, folder)
        stack.callback(exchange.close)
        yield Publishing(actor, engines, fleet, exchange)


def of_rank(mesh: Mesh, tp: int, pp: int, dtype: str, transport: str, folder: Path) -> dict:
    actor, hf = ToyActor.of(mesh, tp, pp), hf_tensors()
    actor.load(hf)
    reads: list[None] = []
    options = {"dtype": dtype, "transport": transport}
    with publishing(mesh, actor, folder, read=lambda: reads.append(None), **options) as made:
        exchange, fleet, engines, rank = made.exchange, made.fleet, made.engines, mesh.rank
        first = exchange.publish(1)
        assert len(reads) <= 1 + len(engines), "by the digests and for each link, not for each message"
        published = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in hf.items()}
        if rank == 0:
            assert_filled(engines, published)
        norm = actor.live.get("norm", torch.zeros(HIDDEN))
        actor.live["norm"] = norm + 1  # after publishing: the engines now differ from the trainers
        with pytest.raises(
            LeaderError, match=r"in 2 places(.|\n)* rank 1: parameter norm does not hold HF tensor norm \[0:8\]"
        ):
            exchange.verify()
        actor.live["norm"] = norm
        for version, (number, joining) in enumerate([(1, False), (0, True)], 2):
            for tensor in actor.live.values():
                tensor.neg_()
            published = {name: -tensor for name, tensor in published.items()}
            if rank == 0:
                if joining:  # as a new engine, so that it dies while the group is made
                    engines[number].info = fleet.by_id[f"engine-{number}"].info
                    engines[number].restart()
                dies_once(engines[number], joining)
            exchange.publish(version)
            if rank == 0:
                assert fleet.lost[-1:] == [f"engine-{number}"]
                assert all(info.state == "ready" and info.weight_version == version for info in fleet.engines())
                assert_filled(engines, published)
    assert not any(loader.engine_end(model).link for engine in engines for model in engine.models)
    return first


def needed_elements() -> int:
    """Of two engines, without the padding of their two vocabularies."""
    of_models = sum(parameter.numel() for rank in range(ENGINE_TP) for parameter in ToyEngine(rank).parameters())
    return 2 * (of_models - 2 * (ENGINE_VOCAB - VOCAB) * HIDDEN)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "dtype", "transport"),
    [
        (3, 1, 3, "float32", "reshard"),
        (4, 2, 2, "float32", "reshard"),
        (4, 2, 1, "bfloat16", "reshard"),
        (4, 2, 1, "bfloat16", "ipc"),  # a trainer rank beside every engine rank
        (3, 1, 3, "float32", "ipc"),  # one of them beside two
    ],
)
def test_engines_are_filled_exactly_and_outlive_a_rank_that_dies(tmp_path, world, tp, pp, dtype, transport):
    write_checkpoint(tmp_path / "initial", hf_tensors())
    in_memory = set(Path("/dev/shm").iterdir())
    arguments = (tp, pp, dtype, transport, tmp_path)
    results = run_meshes(world, tmp_path, of_rank, *arguments, replicas=world // (tp * pp))
    assert all(report == results[0] for report in results)
    if transport == "ipc":
        assert not {path for path in Path("/dev/shm").iterdir() if path.name.startswith("torch_")} - in_memory
    else:
        expected = needed_elements() * getattr(torch, dtype).itemsize
        assert results[0]["wire_bytes"] == expected, "each engine element once"
    assert results[0]["staging_bytes"] <= 2e-3 * 2**20


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limits the files of this process, memory that it shares among them, inside the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def without_memory(mesh: Mesh, folder: Path) -> str:
    """Publishes by ipc, where the last rank gets no memory for what it hands over."""
    actor = ToyActor.of(mesh, 1, 2)
    actor.load(hf_tensors())
    limit = file_size_limit(64) if mesh.rank == 1 else nullcontext()
    with publishing(mesh, actor, folder, transport="ipc") as made, limit, pytest.raises(LeaderError) as error:
        made.exchange.publish(1)
    return str(error.value)


@pytest.mark.slow
def test_a_rank_without_memory_for_an_engine_is_named_on_every_rank(tmp_path):
    write_checkpoint(tmp_path / "initial", hf_tensors())
    for said in run_meshes(2, tmp_path, without_memory, tmp_path, replicas=1):
        assert "rank 1" in said and "OSError: [Errno 27] File too large" in said


def mapped(pid: int) -> int:
    """How many buffers of a hand-over a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:megagrpo-weights")


def held(mesh: Mesh, folder: Path) -> dict[str, list[int]]:
    """Publishes by ipc twice. Returns how many buffers the ranks hold while an engine receives, and when it digests."""
    pids = mesh.gather_world(os.getpid())
    found: dict[str, list[int]] = {"receive": [], "digest": []}

    def run(model: nn.Module, named_tensors: list) -> None:
        operation = decode(bytes(dict(named_tensors)["request"].numpy()))["operation"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(loader.run, model, named_tensors)
            while operation == "receive" and not running.done():
                found[operation].append(sum(map(mapped, pids)))
        if operation == "digest":
            found[operation].append(sum(map(mapped, pids)))

    actor = ToyActor.of(mesh, 1, 2)
    actor.load(hf_tensors())
    with publishing(mesh, actor, folder, transport="ipc") as made:
        for engine in made.engines:
            engine.run = run
        made.exchange.publish(1)
        made.exchange.publish(2)
    return found


def test_memory_of_a_hand_over_is_free_before_the_engine_takes_it(tmp_path):
    write_checkpoint(tmp_path / "initial", hf_tensors())
    found, _ = run_meshes(2, tmp_path, held, tmp_path, replicas=1)
    assert len(found["digest"]) == 2 * 2 * ENGINE_TP and not any(found["digest"])
    assert any(found["receive"]), "both sides have it mapped while it is used"


def few(hf: dict[str, torch.Tensor]) -> None:
    """Changes elements of slices that lie together and of such that do not, some by less than bfloat16 has bits for."""
    hf["norm"][3] = float("inf")
    hf["1.down"][2, 5:8] *= -1
    hf["2.gate"][:, 1] += 1
    hf["0.q"][5] *= 1 + 2**-20


def one_tensor(hf: dict[str, torch.Tensor]) -> None:
    hf["head"].neg_()
    hf["1.norm"][0] = -0.0


def back(hf: dict[str, torch.Tensor]) -> None:
    hf["norm"][3] = 1.0


VERSIONS = (few, one_tensor, lambda hf: None, back)


def delta_rank(mesh: Mesh, tp: int, pp: int, dtype: str, folder: Path) -> list[tuple[dict, int]]:
    """Publishes changes to two engines, of which one dies in the last publish. Returns reports and changed elements."""
    actor, hf, found = ToyActor.of(mesh, tp, pp), hf_tensors(), []
    with publishing(mesh, actor, folder, dtype=dtype, delta=True) as made:
        engines = made.engines
        for version, change in enumerate((lambda hf: None, *VERSIONS), 1):
            change(hf)
            actor.load(hf)
            published = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in hf.items()}
            before = [p.clone() for engine in engines for model in engine.models for p in model.parameters()]
            if mesh.is_main and change is VERSIONS[-1]:
                dies_once(engines[1], while_joining=False)
            report = made.exchange.publish(version)
            after = [p for engine in engines for model in engine.models for p in model.parameters()]
            bits = ((a.view(torch.int32) != b.view(torch.int32)).sum() for a, b in zip(after, before, strict=True))
            found.append((report, int(sum(bits))))
            if mesh.is_main:
                assert_filled(engines, published)
    return found


@pytest.mark.verifies("weights", "changes only (`weights.delta`): the bits of a whole publish")
@pytest.mark.parametrize(
    ("world", "tp", "pp", "dtype"),
    [(1, 1, 1, "float32"), (3, 1, 3, "float32"), (4, 2, 2, "float32"), (4, 2, 1, "bfloat16")],
)
def test_only_what_has_changed_is_sent_and_an_engine_that_dies_gets_all(tmp_path, world, tp, pp, dtype):
    write_checkpoint(tmp_path / "initial", hf_tensors())
    arguments, replicas = (tp, pp, dtype, tmp_path), world // (tp * pp)
    (whole, _), *later = run_meshes(world, tmp_path, delta_rank, *arguments, replicas=replicas)[0]
    item, elements = getattr(torch, dtype).itemsize, needed_elements()
    counts = whole["wire_bytes"] - elements * item  # of every message, 4 bytes
    assert whole["compared"] == 0 and 0 < counts <= 4 * whole["messages"]
    for (report, changed), change in zip(later[:3], VERSIONS, strict=False):
        assert (report["compared"], report["changed"]) == (elements, changed)
        assert (changed == 0) == (change is VERSIONS[2])
        assert report["wire_bytes"] <= counts + changed * (4 + item), "values and positions, or less"
        assert report["wire_bytes"] >= counts + changed * item, "a whole message has no places"
    assert later[0][0]["wire_bytes"] > counts + later[0][1] * item, "places of single elements"
    assert later[1][0]["wire_bytes"] < counts + later[1][1] * (4 + item), "a tensor that has changed as a whole"
    again, _ = later[3]
    assert again["wire_bytes"] > elements / 2 * item, "the engine that died"


class OneQueue:
    """The works of a GPU with one hardware queue: each begins when all before it in this process are done."""

    def __init__(self):
        self._pool, self.begun = ThreadPoolExecutor(1), []

    def start(self, original, group, messages):
        begun = self._pool.submit(lambda: [work.wait() for work in original(group, messages)])
        self.begun.append(group.name)
        return [mock.Mock(wait=lambda timeout: begun.result(timeout.total_seconds()))]


def ordered_rank(mesh: Mesh, folder: Path) -> list[str]:
    """Publishes to two engines; each rank hurries to send to another engine first. Returns the groups in its order."""
    actor, hf = ToyActor.of(mesh, 1, mesh.world_size), hf_tensors()
    actor.load(hf)
    start, send, queue, queues = EngineGroup.start, _TrainerEnd._send, OneQueue(), {}

    def queued(group, messages):
        if not isinstance(messages[0], Receive):
            return queue.start(start, group, messages)
        return queues.setdefault(group, OneQueue()).start(start, group, messages)  # a GPU of an engine rank

    def late(end, weights, deadline, turn):
        joined = ends.setdefault(end.link.name, end)
        if list(ends).index(joined.link.name) % 2 == mesh.rank % 2:
            turn = partial(waiting, turn)
        return send(end, weights, deadline, turn)

    def waiting(turn):
        time.sleep(0.2)
        return turn()

    ends: dict[str, _TrainerEnd] = {}
    with (
        mock.patch.object(EngineGroup, "start", queued),
        mock.patch.object(_TrainerEnd, "_send", late),
        publishing(mesh, actor, folder) as made,
    ):
        made.exchange.publish(1)
        with counted_calls() as calls:
            made.exchange.publish(2)
        assert calls.total() - calls["all_reduce"] == 3, "which engines receive, bytes sent, seconds"
        if mesh.is_main:
            assert not made.fleet.lost
            assert_filled(made.engines, hf)
    return queue.begun


@pytest.mark.verifies("weights", "two trainers start batches to two engines in one order")
def test_links_start_in_one_order_on_every_rank(tmp_path):
    """One hardware queue: two ranks with opposite orders wait for each other."""
    write_checkpoint(tmp_path / "initial", hf_tensors())
    orders = run_meshes(2, tmp_path, ordered_rank, tmp_path, replicas=1)
    assert len(orders[0]) >= 6 and all(order == orders[0][: len(order)] for order in orders), orders


KINDS = (RuntimeError, ValueError, OSError, MemoryError, KeyError)
# Thread of a publish that fails -> the rank on which it does. The first two read the actor's
# parameters in a module of the package, the others wait for an engine that refuses.
READERS = {"send": "reshard.py", "digest": "expected_digests.py"}
THREADS = {"send": 1, "digest": 1, "receive": 0, "verify": 0}


def failing_rank(mesh: Mesh, kind: type[Exception], folder: Path) -> dict[str, tuple[str, float]]:
    """Publishes once for every thread that fails; returns message and seconds."""
    found = {}
    for thread, of_rank in THREADS.items():
        planted = []

        def read(thread: str = thread, planted: list = planted) -> None:
            files = {Path(frame.filename).name for frame in traceback.extract_stack()}
            if planted and READERS.get(thread) in files:
                raise kind(f"planted in {thread}")

        def run(model: nn.Module, named_tensors: list, thread: str = thread) -> None:
            operation = decode(bytes(dict(named_tensors)["request"].numpy()))["operation"]
            if operation == {"receive": "receive", "verify": "digest"}.get(thread):
                raise ValueError(f"planted in {thread}")
            loader.run(model, named_tensors)

        actor = ToyActor.of(mesh, 1, 1)
        actor.load(hf_tensors())
        with publishing(mesh, actor, folder, number=1, read=read) as made:
            made.exchange.publish(1)
            if mesh.rank == of_rank:
                planted.append(thread)
                made.engines[0].run = run
            start = time.monotonic()
            with pytest.raises(LeaderError) as caught:
                made.exchange.publish(2)
            found[thread] = str(caught.value), time.monotonic() - start
    return found


@pytest.mark.verifies("weights", "a failure in any thread of a publish ends all ranks with one message in under 30 s")
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_a_failure_in_any_thread_of_a_publish_ends_all_ranks_at_once(kind, tmp_path):
    write_checkpoint(tmp_path / "initial", hf_tensors())
    first, *others = run_meshes(2, tmp_path, failing_rank, kind, tmp_path)
    for thread, (message, _) in first.items():
        assert f"planted in {thread}" in message, thread
        assert (kind.__name__ if thread in READERS else "EngineRefused") in message, thread
    for found in (first, *others):
        assert {thread: message for thread, (message, _) in found.items()} == {t: m for t, (m, _) in first.items()}
        assert max(seconds for _, seconds in found.values()) < 30  # weights.timeout_s is 40
