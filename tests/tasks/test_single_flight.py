import asyncio

import pytest

from rlds_jax.tasks.single_flight import SingleFlight


class Counter:
    def __init__(self, *failures):
        self.made, self.failures = [], list(failures)

    def make(self, key):
        async def work():
            self.made.append(key)
            await asyncio.sleep(0.01)
            if self.failures:
                raise self.failures.pop(0)
            return key.upper()

        return work


def test_equal_calls_in_flight_share_one():
    counter, cache = Counter(), SingleFlight(4)

    async def run():
        return await asyncio.gather(*(cache.get(k, counter.make(k)) for k in "abaa"))

    assert asyncio.run(run()) == [("A", False), ("B", False), ("A", True), ("A", True)]
    assert counter.made == ["a", "b"]


def test_the_least_recently_used_is_dropped():
    counter, cache = Counter(), SingleFlight(2)

    async def run():
        return [(await cache.get(k, counter.make(k)))[1] for k in "abacab"]

    assert asyncio.run(run()) == [False, False, True, False, True, False]
    assert len(cache) == 2


def test_a_failure_reaches_all_who_wait_and_is_not_kept():
    counter, cache = Counter(OSError("down")), SingleFlight(4)

    async def run():
        waiting = [cache.get("a", counter.make("a")) for _ in range(2)]
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        return failed, await cache.get("a", counter.make("a"))

    failed, after = asyncio.run(run())
    assert [type(error) for error in failed] == [OSError, OSError]
    assert after == ("A", False)


def test_a_cancelled_caller_leaves_the_others_flight_alone():
    counter, cache = Counter(), SingleFlight(4)

    async def run():
        first = asyncio.create_task(cache.get("a", counter.make("a")))
        second = asyncio.create_task(cache.get("a", counter.make("a")))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(run()) == ("A", True)
