"""A bounded cache of awaited results, where equal calls in flight share one."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Results by key, the least recently used dropped first. For one event loop.

    Args:
      size: most results kept.
    """

    def __init__(self, size: int):
        self._size = size
        self._flights: OrderedDict[K, asyncio.Task[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flights)

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> tuple[V, bool]:
        """The result, and whether it was there or already asked for.

        A failure goes to everyone who waits for it and is not kept. A caller that is cancelled
        leaves the others' flight alone.
        """
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(make())
            flight.add_done_callback(functools.partial(self._forget_failure, key))
        self._flights.move_to_end(key)
        while len(self._flights) > self._size:
            self._flights.popitem(last=False)
        return await asyncio.shield(flight), shared

    def _forget_failure(self, key: K, flight: asyncio.Task[V]) -> None:
        failed = flight.cancelled() or flight.exception() is not None
        if failed and self._flights.get(key) is flight:
            del self._flights[key]
