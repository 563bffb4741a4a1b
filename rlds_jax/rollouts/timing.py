"""Time of overlapping phases: when at least one request of a phase was in flight."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator


class PhaseClock:
    """Measures, per phase, the union of the intervals in which it was entered (METHOD section 2).

    Phases overlap, so their times need not sum to the step's. For one thread.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._in_flight: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._in_flight[name]:
            self._since[name] = self._now()
        self._in_flight[name] += 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                self._seconds[name] += self._now() - self._since[name]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, of the phases that have ended at least once."""
        return dict(self._seconds)
