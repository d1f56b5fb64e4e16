"""Deadlines, phases of a publish, changed elements of a message, and what a group does over a stand-in for NCCL."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megagrpo.system.environment import get, nccl_variables
from megagrpo.weights.copies.views import ParameterSlice
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.transports.broadcast import _Line
from megagrpo.weights.transports.links import Link, LinkTransport
from megagrpo.weights.transports.reshard import JOIN, SendOrder, _TrainerEnd
from megagrpo.weights.wire import clock
from megagrpo.weights.wire.changes import ALL, LastSent, changes_bytes, count_tags, write_changes
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.engine_group import EngineGroup, GroupLimits, PeerLost, Receive, Send, join_group
from megagrpo.weights.wire.moving import Traffic, receive_batches
from megagrpo.weights.wire.transfer_messages import Message
from tests.fake_engine import FakeEngine, FakeFleet, OneTrainer, running

CUDA = torch.device("cuda")
MAILBOX = SimpleNamespace(access=("127.0.0.1", 1, "a secret"))


class Absent:
    """A non-blocking communicator whose other ranks never come: the first thing that is started raises."""

    def __init__(self, *made_of):
        self.made_of = made_of

    def _start_coalescing(self, *message) -> None:
        pass

    send = recv = _start_coalescing

    def _end_coalescing(self, *values):
        raise dist.DistBackendError("NCCL timeout in: ncclCommInitRankConfig")

    broadcast = _end_coalescing


def test_ranks_that_do_not_come_to_the_first_batch_are_lost():
    group, values = EngineGroup("w", Absent(), CUDA), torch.zeros(2)
    started = "group w did not start: NCCL timeout in"
    with pytest.raises(PeerLost, match=started):
        group.broadcast(values)
    with pytest.raises(PeerLost, match=started):
        group.start([Send(values, 1, 0), Receive(values, 1, 1)])
    assert group.start([]) == []


def test_an_engine_whose_last_call_fails_before_the_next_bucket_is_down():
    """The failure ends the groups, in another thread, when it has been looked for already."""

    def post(*call: object) -> None:
        raise EngineDown("engine-0 does not answer")

    line = _Line(SimpleNamespace(patience=1.0, post=post, close=lambda: None))
    line.groups.append(EngineGroup("w", Absent(), torch.device("cpu")))
    line._abort()
    with pytest.raises(EngineDown, match="does not answer"):
        line.send([torch.zeros(2)], {"names": ["a"]})
    with pytest.raises(PeerLost, match="group w was ended"):
        line.groups[0].set_timeout(1.0)
    line.close()


def test_a_message_that_is_not_taken_is_lost_at_the_deadline():
    never = SimpleNamespace(is_completed=lambda: False)
    with pytest.raises(PeerLost, match="group w took more than 0 s"):
        EngineGroup("w", Absent(), CUDA).wait([never], Deadline(0.02))


def test_a_group_over_nccl_is_not_blocking_and_its_limit_reaches_every_rank(monkeypatch):
    class Backend(Absent):
        class Options:
            def __init__(self):
                self.config = SimpleNamespace(blocking=1)

        def __init__(self, *made_of):
            super().__init__(*made_of)
            self.watchdog = get("TORCH_NCCL_ASYNC_ERROR_HANDLING")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    group = join_group(dist.HashStore(), "w", 0, 2, CUDA, "127.0.0.1", GroupLimits(5.0, 3))
    options = group._backend.made_of[-1]
    assert options.config.blocking == 0 and options.config.max_ctas == 3 and options._timeout.total_seconds() == 5
    by_nccl = join_group(dist.HashStore(), "w", 0, 2, CUDA, "127.0.0.1", GroupLimits(5.0, None))
    assert not hasattr(by_nccl._backend.made_of[-1].config, "max_ctas"), "as SGLang's end of a broadcast has it"
    assert group._backend.watchdog == "0", "it would end the process of a rank whose peer dies, an engine's, too"
    assert get("TORCH_NCCL_ASYNC_ERROR_HANDLING") is None
    assert int(nccl_variables(59.5)["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == 60


@pytest.mark.parametrize("joined_in_turns", [True, False])
def test_groups_that_are_made_together_are_made_in_one_order(joined_in_turns):
    """Two ranks whose first batches for two links come in opposite orders, as in plans of many engines.

    Over NCCL a group is made by all of its ranks together, else in its first batch: neither rank would get further.
    """
    numbers = {"a": [[0, 3], [2]], "b": [[3], [1, 4]]}
    together = [threading.Barrier(2, timeout=1.0) for _ in range(2)]

    def send(order: SendOrder, link: int, batches: list[int]) -> None:
        try:
            for number in [JOIN, *batches] if joined_in_turns else batches:
                with order.turn(link, Deadline(2.0)):
                    if number == (JOIN if joined_in_turns else batches[0]):
                        together[link].wait()
        finally:
            order.leave(link)

    with ThreadPoolExecutor(4) as pool:
        sent = []
        for of_rank in numbers.values():
            order = SendOrder([[JOIN, *of_link] if joined_in_turns else of_link for of_link in of_rank])
            sent += [pool.submit(send, order, link, of_link) for link, of_link in enumerate(of_rank)]
        failed = [each.exception() for each in sent]
    assert any(failed) != joined_in_turns, failed


def test_a_turn_costs_little_more_with_many_links():
    """With 1,000 engines a rank has hundreds of links, and each has hundreds of batches."""
    looked = 0

    class Number(int):
        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return int(self) == other

        __hash__ = int.__hash__

    links, turns = 48, 20
    order, taken = SendOrder([[Number(turn) for turn in range(link % 3, turns)] for link in range(links)]), []

    def send(link: int) -> None:
        for number in range(link % 3, turns):
            if (link, number) == (7, 5):
                break  # its engine is lost
            with order.turn(link, Deadline(20.0)):
                taken.append((number, link))
        order.leave(link)

    with ThreadPoolExecutor(links) as pool:
        list(pool.map(send, range(links)))
    every = [(number, link) for number in range(turns) for link in range(links) if number >= link % 3]
    assert taken == [(number, link) for number, link in every if link != 7 or number < 5]
    assert looked < 50 * len(every), "not a look at every link by every thread"


def test_the_link_of_an_engine_that_hangs_ends_before_the_others_have_no_time():
    """Both deadlines would end together if a batch had as much time as the whole transfer."""

    class Group:
        def __init__(self, wait_s: float):
            self.wait_s = wait_s

        def start(self, messages: list) -> list:
            return messages

        def wait(self, works: list, deadline: Deadline) -> None:
            threading.Event().wait(min(self.wait_s, deadline.left))
            if deadline.over:
                raise PeerLost("late")

    engine = EngineConnection(
        SimpleNamespace(id="engine-0", url="http://127.0.0.1:1", incarnation=1), 1, MAILBOX, "key", patience_s=300.0
    )
    engine.deadline = Deadline(2.0)
    transport = SimpleNamespace(
        _weights=SimpleNamespace(limits=GroupLimits(60.0)), _names={}, _carriers=lambda engine, slot: ()
    )
    link = LinkTransport._link(transport, engine)
    assert link.limits.join_s + link.patience_s < 0.8 * link.left_s, "an engine may hang, and another not come"
    batches = {n: [Message(1, n, torch.float32, (ParameterSlice("p", n, (1,), (1,)),))] for n in range(4)}
    ends = [_TrainerEnd(link, 0, 2, batches, False) for _ in range(2)]
    for end, wait_s in zip(ends, (9.0, 0.0), strict=True):
        end._group = Group(wait_s)
    weights = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")), parameters=lambda: {"p": torch.ones(4)})
    order = SendOrder([end.turns(False) for end in ends])
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(end.send, weights, order, index) for index, end in enumerate(ends)]
    assert isinstance(sent[0].exception(), PeerLost) and sent[1].result().messages == 4
    engine.close()


def test_an_engine_waits_for_a_batch_as_long_as_the_trainers_may_be_held_up():
    """Trainers wait for an engine that hangs before they send the next batch to the others."""

    class Late:
        def start(self, messages: list) -> list:
            return messages

        def wait(self, works: list, deadline: Deadline) -> None:
            assert deadline.left > 15, "the rest of the transfer"

    batches = [[Message(0, 0, torch.float32, (ParameterSlice("p", 0, (2,), (1,)),))]]
    receive_batches(Late(), batches, {"p": torch.ones(2)}, Deadline(20.0))


def test_a_link_over_nccl_takes_a_turn_for_its_group_once(monkeypatch):
    end = _TrainerEnd(SimpleNamespace(), 1, 3, {2: [], 5: []}, False)
    assert end.turns(True) == [JOIN, 2, 5] and end.turns(False) == [2, 5]
    connected = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    backend = SimpleNamespace(eager_connect_single_device=connected.append)
    end._group = EngineGroup("w", backend, CUDA)
    end._group.connect()
    assert connected == [torch.device("cuda", 3)] and end.turns(True) == [2, 5]


def test_ranks_that_do_not_meet_over_gloo_are_lost_at_the_limit():
    with pytest.raises(PeerLost, match="the 2 ranks of group w did not meet"):
        join_group(dist.HashStore(), "w", 0, 2, torch.device("cpu"), "127.0.0.1", GroupLimits(0.2))


def test_a_store_that_does_not_answer_in_time_is_a_lost_peer():
    """At a deadline that is over torch has its own error, which would end the run."""
    limits = GroupLimits(0.2)
    link = Link("w", "http://e", 1, 0, 0, (), ("127.0.0.1", 9, ""), 1.0, limits, 0.01, "t")
    with pytest.raises(PeerLost, match="no connection to the store for http://e"):
        link.open_store()


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand, in seconds."""
    seconds = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_phase_inside_another_is_counted_once(now):
    timer = PhaseTimer()

    def buckets():
        for name in "ab":
            now[0] += 2.0
            yield name

    for _ in range(2):
        with timer("transfer"):
            now[0] += 1.0
            for _ in timer.waiting(buckets(), "gather"):
                now[0] += 0.5
    now[0] += 10.0
    expected = {"gather": 8.0, "transfer": 4.0, "restart": 0.0, "total": 22.0}
    assert timer.seconds("gather", "transfer", "restart") == expected


def test_a_deadline_leaves_a_little_when_it_is_over(now):
    deadline = Deadline(5.0)
    now[0] += 4.0
    assert deadline.left == 1.0 and not deadline.over
    now[0] += 2.0
    assert 0 < deadline.left < 0.1 and deadline.over


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def message(numel: int, dtype: torch.dtype, peer: int = 0, tag: int = 0) -> Message:
    return Message(peer, tag, dtype, (ParameterSlice("w", 0, (numel,), (1,)),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 1001])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.3, 1.0])
def test_what_arrives_is_what_was_sent(dtype, numel, share):
    generator = torch.Generator().manual_seed(numel)
    one, last = message(numel, dtype), LastSent()
    values = torch.randn(numel, generator=generator).to(dtype)
    assert last.update(one, values, Traffic()) == (ALL, values)
    received = values.clone()
    for _ in range(3):  # what was sent last changes, too
        where = torch.rand(numel, generator=generator) < share
        values = torch.where(where, (-values.float()).to(dtype), values)
        sent = Traffic()
        count, content = last.update(one, values, sent)
        if count == ALL:
            received = content.clone()
        elif count:
            assert content.nbytes == changes_bytes(count, numel, dtype) < one.num_bytes
            write_changes(one, count, content, received)
        assert torch.equal(received.view(torch.uint8), values.view(torch.uint8))
        assert (sent.compared, sent.changed) == (numel, int(where.sum()))


def test_few_changes_travel_as_positions_and_many_as_a_mask():
    assert changes_bytes(3, 1000, torch.bfloat16) == 3 * (2 + 4)
    assert changes_bytes(300, 1000, torch.bfloat16) == 300 * 2 + 125


def test_bits_are_compared_and_not_values():
    last, values = LastSent(), torch.tensor([0.0, float("nan"), 1.0] * 100)
    last.update(message(300, torch.float32), values, Traffic())
    assert last.update(message(300, torch.float32), values.clone(), Traffic())[0] == 0, "NaN is what it was"
    values[0] = -0.0
    assert last.update(message(300, torch.float32), values, Traffic())[0] == 1


def test_counts_have_tags_of_their_own():
    batch = [message(1, torch.float32, peer, tag) for peer, tag in ((1, 4), (2, 0), (1, 5))]
    tags = count_tags(batch)
    assert tags.keys() == {1, 2} and not set(tags.values()) & {0, 4, 5}


@pytest.mark.parametrize("hangs_in", ["/pause_generation", "receive", "flush"])
def test_an_engine_that_hangs_leaves_the_others_time(tmp_path, hangs_in):
    """By default an engine on a GPU may be silent for half of a publish. Each engine has half of it, too."""
    engines, ended = [FakeEngine(), FakeEngine()], threading.Event()
    shapes = dict.fromkeys(("gate", "up", "down"), (4, 4))
    live = {name: torch.zeros(4, 4) for name in shapes}
    registry = FakeFleet(engines)
    rollout = {"num_engines": 2, "health_timeout_s": 4.0}
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(running(engine))
        trainer = OneTrainer(tmp_path, registry, "reshard", live, shapes, rollout=rollout, weights={"timeout_s": 8})
        stack.callback(trainer.exchange.close)
        stack.callback(ended.set)
        trainer.publish()
        if hangs_in == "receive":  # its ranks take no batch, so both ends of its link wait
            engines[0].run = lambda *_: ended.wait(20)
        else:
            engines[0].more[hangs_in] = lambda body: ended.wait(20)
        start = time.monotonic()
        trainer.publish()
        assert registry.lost == ["engine-0"] and time.monotonic() - start < 7
        assert torch.equal(engines[1].model.down, live["down"])
        assert engines[1].info.weight_version == 2 and engines[1].info.incarnation == 1
