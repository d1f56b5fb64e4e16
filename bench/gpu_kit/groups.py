"""Groups between trainers and engines on one device: joining, leaving, and a peer that never
comes."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.gpu_kit.figures import Figures, Setting
from megagrpo.system.environment import temporarily
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import EngineGroup, GroupLimits, PeerLost, join_group

LIMIT_S, SMALL_LIMIT_S = 8.0, 0.5  # for a peer that never comes
_GRACE = 3.0  # times the limit, until which waiting must end


def alone(figures: Figures, setting: Setting) -> None:
    """Measures a group of this process alone: joining, the first broadcast, which makes a
    communicator, and the end."""
    device, size = setting.torch_device(), setting.of(1 << 28, 1 << 16)
    values = torch.ones(size, dtype=torch.uint8, device=device)
    for number in ("first", "second"):
        start = time.perf_counter()
        group = join_group(
            dist.HashStore(), f"alone {number}", 0, 1, device, "127.0.0.1", GroupLimits(30.0)
        )
        joined = time.perf_counter()
        group.wait([group.broadcast(values)], Deadline(30.0))
        met = time.perf_counter()
        group.wait([group.broadcast(values)], Deadline(30.0))
        sent = time.perf_counter()
        group.abort()
        figures.add(f"{number} group: joining", joined - start, "s")
        figures.add(f"{number} group: first broadcast", met - joined, "s", "makes the communicator")
        figures.add(f"{number} group: second broadcast", sent - met, "s")
        figures.add(f"{number} group: abort", time.perf_counter() - sent, "s")


def without_peer(figures: Figures, setting: Setting) -> None:
    """Joins a group of two, as either rank, whose other rank never comes: everything must end in a
    PeerLost.

    Then a group of this process alone must still work.
    """
    device, limit_s = setting.torch_device(), setting.of(LIMIT_S, SMALL_LIMIT_S)
    with temporarily("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(limit_s)))):
        for rank in (0, 1):
            _wait_in_vain(figures, rank, device, limit_s)
        group = join_group(dist.HashStore(), "after", 0, 1, device, "127.0.0.1", GroupLimits(30.0))
        group.wait([group.broadcast(torch.ones(4, device=device))], Deadline(30.0))
        group.abort()
        figures.add("a group of one afterwards", "works")


def _wait_in_vain(figures: Figures, rank: int, device: torch.device, limit_s: float) -> None:
    start = time.perf_counter()
    group: EngineGroup | None = None
    ended = "no PeerLost"
    try:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=limit_s))  # rank 1 asks it for what rank 0 never wrote
        group = join_group(
            store, f"in vain {rank}", rank, 2, device, "127.0.0.1", GroupLimits(limit_s)
        )
        figures.add(f"rank {rank}: join returns after", time.perf_counter() - start, "s")
        group.wait([group.broadcast(torch.ones(4, device=device))], Deadline(limit_s))
    except PeerLost as exc:
        ended = str(exc)
    seconds = time.perf_counter() - start
    figures.add(f"rank {rank}: ended after", seconds, "s", ended[:160], _GRACE * limit_s)
    figures.add(f"rank {rank}: ends without PeerLost", int(ended == "no PeerLost"), at_most=0)
    if group is not None:
        start = time.perf_counter()
        group.abort()
        figures.add(
            f"rank {rank}: abort", time.perf_counter() - start, "s", at_most=_GRACE * limit_s
        )
