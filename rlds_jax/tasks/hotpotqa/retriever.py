"""What the environment searches with: a source of passages behind a cache and a failure bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.single_flight import SingleFlight

T = TypeVar("T")


class RetrievalError(Exception):
    """One search failed, for a reason that lies with the source: it is down, slow or broken."""


class Source(Protocol):
    """Where passages come from: a server, or an index in this process."""

    async def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """The best passages, best first. Raises RetrievalError."""
        ...

    async def close(self) -> None: ...


class Found(NamedTuple):
    """Result of one search, and whether it was known or already asked for."""

    passages: tuple[Passage, ...]
    cached: bool


class Retriever:
    """Searches a source from any event loop, each query once.

    The source lives in a loop of its own, so that its connections and the cache outlast the steps
    of a run, which have a loop each.

    Args:
      source: made by the caller, closed by `close`.
      cache_size: most results kept.
      max_failures: so many failed searches in a row, and the run is stopped.
    """

    def __init__(self, source: Source, cache_size: int = 16384, max_failures: int = 100):
        self._source = source
        self._cache: SingleFlight[tuple[str, int], tuple[Passage, ...]] = SingleFlight(cache_size)
        self._max_failures = max_failures
        self._failures = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def search(self, query: str, top_k: int) -> Found:
        """The best passages for a query.

        Raises:
          RetrievalError: the source failed; the failure is counted, a success clears the count.
          TaskUnavailable: it failed `max_failures` times in a row.
        """
        return Found(*await self._run(self._search(query, top_k)))

    def close(self) -> None:
        """Closes the source; nothing may be searched afterwards."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._source.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _search(self, query: str, top_k: int) -> tuple[tuple[Passage, ...], bool]:
        return await self._cache.get((query, top_k), lambda: self._fetch(query, top_k))

    async def _fetch(self, query: str, top_k: int) -> tuple[Passage, ...]:
        try:
            passages = await self._source.search(query, top_k)
        except RetrievalError as error:
            self._failures += 1
            if self._failures >= self._max_failures:
                raise TaskUnavailable(
                    f"{self._failures} searches in a row failed, the last with: {error}. Start the "
                    "retriever again (python -m rlds_jax.tasks.hotpotqa.serve --index=DIR), or "
                    "raise task.options.max_failures"
                ) from error
            raise
        self._failures = 0
        return passages
