"""What a group does over NCCL, as far as its rules can be seen without one: a stand-in takes the backend's place."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megagrpo.system.environment import get, of_all_nccl_ranks
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import EngineGroup, PeerLost, Receive, Send, join_group

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
    group = join_group(dist.HashStore(), "w", 0, 2, CUDA, "127.0.0.1", 5.0)
    options = group._backend.made_of[-1]
    assert options.config.blocking == 0 and options._timeout.total_seconds() == 5
    assert group._backend.watchdog == "0", "it would end the process of a rank whose peer dies, an engine's, too"
    assert get("TORCH_NCCL_ASYNC_ERROR_HANDLING") is None
    assert int(of_all_nccl_ranks()["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) <= 60


def test_ranks_that_do_not_meet_over_gloo_are_lost_at_the_limit():
    with pytest.raises(PeerLost, match="the 2 ranks of group w did not meet"):
        join_group(dist.HashStore(), "w", 0, 2, torch.device("cpu"), "127.0.0.1", 0.2)
