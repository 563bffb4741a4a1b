"""Counts and seconds of the local engine, and the metrics made of them."""

from __future__ import annotations

import collections
import threading

REPORTED = (
    "prefill_tokens",
    "prefill_rows",
    "prefill_s",
    "decode_tokens",
    "decode_slots",
    "decode_steps",
    "decode_s",
    "busy_s",
)


class Meter:
    """Adds up counts on the worker thread; read and reset from any other."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sums: collections.Counter[str] = collections.Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._sums.update(amounts)

    def take(self) -> dict[str, float]:
        """Metrics since the last call.

        engine/tokens_per_s: sampled tokens per second in which a request was in flight.
        engine/idle_slots: share of decode slot-steps that sampled nothing. A dispatch runs the
          smallest compiled number of slots that holds its requests (at most num_slots); a slot is
          idle while it has no request, or its request ended within the dispatch.
        engine/occupancy: running requests over num_slots, averaged over busy time.
        engine/prefix_hit_rate: share of prompt tokens found in the cache.
        engine/prefill_tokens, engine/decode_tokens: tokens computed; engine/prefill_rows counts
          padding too; engine/decode_slots: slot-steps; engine/decode_steps: forward passes.
        engine/prefill_s, engine/decode_s: seconds spent on them; engine/busy_s: all of it.
        A ratio whose denominator is zero is absent.
        """
        with self._lock:
            sums, self._sums = self._sums, collections.Counter()
        metrics = {f"engine/{name}": float(sums[name]) for name in REPORTED}
        if sums["busy_s"]:
            metrics["engine/tokens_per_s"] = sums["decode_tokens"] / sums["busy_s"]
            metrics["engine/occupancy"] = sums["occupied_s"] / sums["busy_s"]
        if sums["decode_slots"]:
            metrics["engine/idle_slots"] = 1 - sums["decode_tokens"] / sums["decode_slots"]
        if sums["prompt_tokens"]:
            metrics["engine/prefix_hit_rate"] = sums["cached_tokens"] / sums["prompt_tokens"]
        return metrics
