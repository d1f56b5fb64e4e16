"""Phases of a publish: what one takes inside another is counted once."""

import pytest

from megagrpo.weights.wire import clock
from megagrpo.weights.wire.clock import Deadline, PhaseTimer


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
    assert timer.seconds("gather", "transfer", "restart") == {
        "gather": 8.0,
        "transfer": 4.0,
        "restart": 0.0,
        "total": 22.0,
    }


def test_a_deadline_leaves_a_little_when_it_is_over(now):
    deadline = Deadline(5.0)
    now[0] += 4.0
    assert deadline.left == 1.0 and not deadline.over
    now[0] += 2.0
    assert 0 < deadline.left < 0.1 and deadline.over
