"""Deadlines, phases of a publish, and what a group does over NCCL: a stand-in takes the backend's place."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megagrpo.system.environment import get, of_all_nccl_ranks
from megagrpo.weights.wire import clock
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.group import EngineGroup, GroupLimits, PeerLost, Receive, Send, join_group

CUDA = torch.device("cuda")


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
    assert group._backend.watchdog == "0", "it would end the process of a rank whose peer dies, an engine's, too"
    assert get("TORCH_NCCL_ASYNC_ERROR_HANDLING") is None
    assert int(of_all_nccl_ranks(59.5)["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == 60


def test_ranks_that_do_not_meet_over_gloo_are_lost_at_the_limit():
    with pytest.raises(PeerLost, match="the 2 ranks of group w did not meet"):
        join_group(dist.HashStore(), "w", 0, 2, torch.device("cpu"), "127.0.0.1", GroupLimits(0.2))


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
