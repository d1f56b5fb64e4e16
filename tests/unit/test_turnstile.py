"""Requests that wait for their turn, the lengths that are expected of them, and patience with a batch."""

import asyncio

import pytest

from megagrpo.rollout.admission import Patience, ResponseLengths, Turnstile


def test_requests_leave_in_order_while_the_caches_have_room():
    left: list[str] = []

    async def run():
        turnstile, let_go = Turnstile(10, tokens=100.0), asyncio.Event()

        async def request(name: str, tokens: float, order: float) -> None:
            async with turnstile.passing((order,), lambda: tokens):
                left.append(name)
                await let_go.wait()

        async def step() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(request(*each)) for each in [("a", 60.0, 1), ("b", 60.0, 1), ("c", 10.0, 1)]]
        await step()
        assert left == ["a"], "c does not pass b, which needs more room"
        tasks.append(asyncio.create_task(request("urgent", 70.0, 0)))
        await step()
        tasks[1].cancel()
        let_go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert left == ["a", "urgent", "c"]
        big = asyncio.create_task(request("big", 1e9, 1))
        await step()
        assert big.done() and left[-1] == "big", "one alone may always"

    asyncio.run(run())


def test_expected_lengths():
    lengths = ResponseLengths(100)
    assert lengths.occupied() == 50 and lengths.expected(1) == 100, "all assumed to be as long as they may"
    for _ in range(40_000):
        lengths.add(1, 10)
        lengths.add(2, 30)
    assert lengths.occupied() == pytest.approx((100 + 900) / 2 / (2 * 20), rel=1e-3)
    assert (lengths.expected(1), lengths.expected(2)) == (10, 30) and lengths.expected(3) == pytest.approx(20, rel=1e-3)


def test_the_limit_of_a_step_counts_while_somebody_waits():
    async def run():
        patience = Patience(0.1)
        async with patience:
            await asyncio.sleep(0.3)
            patience.start()
            patience.stop()
            await asyncio.sleep(0.3)
            with pytest.raises(asyncio.CancelledError):
                patience.start()
                await asyncio.sleep(10)
            raise asyncio.CancelledError

    with pytest.raises(TimeoutError):
        asyncio.run(run())
