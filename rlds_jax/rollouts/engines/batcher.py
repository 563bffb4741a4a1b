"""Continuous batching: which requests run, and what each dispatch computes.

Runs on the engine's worker thread. One `step` either prefills chunks of admitted requests or
decodes a few tokens of every running one. Prefill goes first: a full batch decodes most cheaply.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable

import jax
import numpy as np

from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines import local_kernels as kernels
from rlds_jax.rollouts.engines.base import Completion
from rlds_jax.rollouts.engines.constrained import Matcher
from rlds_jax.rollouts.engines.meter import Meter
from rlds_jax.rollouts.engines.paged_attention import SCRATCH_PAGE
from rlds_jax.rollouts.engines.prefix_cache import Lease, PrefixCache

CHUNK = 16  # tokens of one prefill chunk
COPIES = 8  # page copies of one dispatch
MAX_STOP_IDS = 8


@dataclasses.dataclass(eq=False)
class Request:
    """One completion being made.

    Attributes:
      tokens: prompt, then what was sampled (or forced by the grammar).
      cached: leading tokens whose keys and values are in the cache.
      seed: [2] uint32 key data.
      future: resolves to the Completion; cancelling it frees the request.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: np.ndarray
    matcher: Matcher | None
    future: concurrent.futures.Future[Completion]
    logprobs: list[float] = dataclasses.field(default_factory=list)
    lease: Lease | None = None
    cached: int = 0

    @property
    def count(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def unfilled(self) -> int:
        """Tokens to prefill; the last one is left to decode."""
        return len(self.tokens) - 1 - self.cached

    @property
    def finish_reason(self):
        if self.count and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.count >= self.max_tokens else None


class Batcher:
    """Requests, cache and compiled kernels of one engine.

    Args:
      num_slots: most requests running at once.
      table_width: pages of the longest sequence.
      steps: most tokens per row in one decode dispatch.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        table_width: int,
        steps: int,
        dtype,
        meter: Meter,
    ):
        self._config, self._dtype = config, dtype
        self._num_slots, self._table_width, self._steps = num_slots, table_width, steps
        self._prefixes = PrefixCache(num_pages, page_size)
        self._kernels = kernels.build(config, steps)
        rows = kernels.invariant_rows(config, dtype)
        self._decode_rows = rows
        self._chunk_counts = tuple(n // CHUNK for n in rows if n % CHUNK == 0)
        self._meter = meter
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def load(self, params, version: int) -> None:
        """Takes new weights; no request may be in flight. Every cached prefix is forgotten."""
        self._weights = self._cache = None  # both may be large: free the old before the new
        self._weights = kernels.prepare(
            params, self._config, self._dtype, self._table_width * self._prefixes.page_size
        )
        self._version = version
        self._prefixes.clear()
        self._cache = kernels.empty_cache(
            self._config, self._prefixes.num_pages, self._prefixes.page_size, self._dtype
        )

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abandon(self) -> list[Request]:
        """Every request that has not finished."""
        return [*self._waiting, *self._running]

    def step(self) -> None:
        """One prefill dispatch, or one decode dispatch of each kind, if there is work."""
        started = time.perf_counter()
        self._forget_cancelled()
        self._admit()
        occupied = len(self._running)
        if any(request.unfilled for request in self._running):
            self._prefill()
        else:
            ready = sorted(self._running, key=lambda r: len(r.tokens), reverse=True)
            self._decode([r for r in ready if r.matcher is None])
            self._decode_constrained([r for r in ready if r.matcher is not None])
        elapsed = time.perf_counter() - started
        self._meter.add(busy_s=elapsed, occupied_s=elapsed * occupied / self._num_slots)
        self._finish()

    def _forget_cancelled(self) -> None:
        self._waiting = collections.deque(r for r in self._waiting if not r.future.cancelled())
        for request in [r for r in self._running if r.future.cancelled()]:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        assert request.lease is not None
        self._running.remove(request)
        self._prefixes.release(request.lease, request.tokens, request.cached)

    def _admit(self) -> None:
        """Fills free slots in order of arrival.

        A request whose next page is being computed for another waits one prefill, and those
        behind it may pass; one that lacks pages holds up all behind it, so that it cannot starve.
        """
        copies = []
        for request in list(self._waiting):
            if len(self._running) >= self._num_slots:
                break
            remaining = request.max_tokens - request.count
            lease = self._prefixes.acquire(request.tokens, remaining)
            if lease == "pending":
                continue
            if lease is None:
                break
            self._waiting.remove(request)
            request.lease, request.cached = lease, lease.cached
            self._running.append(request)
            if lease.copy is not None:
                copies.append(lease.copy)
            self._meter.add(prompt_tokens=request.prompt_length, cached_tokens=lease.cached)
            if request.matcher is not None:
                _force(request)
        self._copy(copies)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), COPIES):
            part = pairs[start : start + COPIES]
            part += [(SCRATCH_PAGE, SCRATCH_PAGE)] * (COPIES - len(part))
            sources, targets = np.array(part, np.int32).T.copy()
            self._cache = self._kernels.copy_pages(self._cache, sources, targets)

    def _prefill(self) -> None:
        started = time.perf_counter()
        chunks = self._chunks()
        count = _bucket(len(chunks), self._chunk_counts)
        tokens = np.zeros((count, CHUNK), np.int32)
        starts, lengths = np.zeros((2, count), np.int32)
        tables = np.zeros((count, self._table_width), np.int32)
        for i, (request, start, length) in enumerate(chunks):
            tokens[i, :length] = request.tokens[start : start + length]
            starts[i], lengths[i] = start, length
            _fill_table(tables[i], request)
        self._cache = self._kernels.prefill(
            self._weights, self._cache, tokens, starts, lengths, tables
        )
        jax.block_until_ready(self._cache)
        for request, _, length in chunks:
            request.cached += length
            assert request.lease is not None
            self._prefixes.computed(request.lease, request.cached)
        self._meter.add(
            prefill_s=time.perf_counter() - started,
            prefill_tokens=int(lengths.sum()),
            prefill_rows=tokens.size,
        )

    def _chunks(self) -> list[tuple[Request, int, int]]:
        """(request, start, length) of the next chunks: oldest requests first, then by start."""
        chunks = []
        for request in self._running:
            end = len(request.tokens) - 1
            for start in range(request.cached, end, CHUNK):
                chunks.append((request, start, min(CHUNK, end - start)))
        return sorted(chunks[: self._chunk_counts[-1]], key=lambda chunk: chunk[1])

    def _decode(self, requests: list[Request]) -> None:
        """Up to `steps` tokens for each."""
        for part in _parts(requests, self._decode_rows[-1]):
            self._dispatch(part, self._steps, None)

    def _decode_constrained(self, requests: list[Request]) -> None:
        """One token for each, then whatever the grammar forces."""
        for part in _parts(requests, self._decode_rows[-1]):
            words = -(-self._config.vocab_size // 32)
            allowed = np.full((_bucket(len(part), self._decode_rows), words), -1, np.int32)
            for row, request in enumerate(part):
                assert request.matcher is not None
                allowed[row] = request.matcher.allowed()
            self._dispatch(part, 1, allowed)
            for request in part:
                assert request.matcher is not None
                request.matcher.consume(request.tokens[-1])
                if request.finish_reason is None:
                    _force(request)

    def _dispatch(self, requests: list[Request], steps: int, allowed) -> None:
        """Decodes `requests`, longest first, and appends what they sampled."""
        started = time.perf_counter()
        rows = self._rows(requests)
        self._cache, *outputs = self._kernels.decode(
            self._weights, self._cache, rows, steps, allowed
        )
        ids, logprobs, produced, ran = jax.device_get(outputs)
        for row, request in enumerate(requests):
            count = int(produced[row])
            request.tokens += ids[:count, row].tolist()
            request.logprobs += logprobs[:count, row].tolist()
            request.cached += count
        self._meter.add(
            decode_s=time.perf_counter() - started,
            decode_tokens=int(produced.sum()),
            decode_slots=int(ran) * min(len(rows.tokens), self._num_slots),
            decode_steps=int(ran),
        )

    def _rows(self, requests: list[Request]) -> kernels.DecodeRows:
        count = _bucket(len(requests), self._decode_rows)
        used = slice(len(requests))
        tokens, positions, counts, limits = np.zeros((4, count), np.int32)
        tokens[used] = [r.tokens[-1] for r in requests]
        positions[used] = [r.cached for r in requests]
        counts[used] = [r.count for r in requests]
        limits[used] = [r.max_tokens for r in requests]
        tables = np.zeros((count, self._table_width), np.int32)
        seeds = np.zeros((count, 2), np.uint32)
        temperatures = np.zeros(count, np.float32)
        stop_ids = np.full((count, MAX_STOP_IDS), -1, np.int32)
        for row, request in enumerate(requests):
            _fill_table(tables[row], request)
            seeds[row] = request.seed
            temperatures[row] = request.temperature
            stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        return kernels.DecodeRows(
            tokens, positions, tables, counts, limits, seeds, temperatures, stop_ids
        )

    def _finish(self) -> None:
        """Retires the requests that reached their end and resolves their futures."""
        for request in [r for r in self._running if r.finish_reason is not None]:
            self._retire(request)
            if not request.future.set_running_or_notify_cancel():
                continue
            logprobs = np.array(request.logprobs, np.float32)
            if not np.isfinite(logprobs).all():
                message = f"non-finite logprobs under weight version {self._version}"
                request.future.set_exception(FloatingPointError(message))
                continue
            request.future.set_result(
                Completion(
                    ids=np.array(request.tokens[request.prompt_length :], np.int32),
                    logprobs=logprobs,
                    finish_reason=request.finish_reason,
                    weight_version=self._version,
                    constrained=request.matcher is not None,
                )
            )


def _force(request: Request) -> None:
    """Appends the tokens its grammar leaves no choice about, at log-probability 0."""
    assert request.matcher is not None
    forced = request.matcher.forced()[: request.max_tokens - request.count]
    request.tokens += forced
    request.logprobs += [0.0] * len(forced)


def _fill_table(table: np.ndarray, request: Request) -> None:
    assert request.lease is not None
    table[: len(request.lease.pages)] = request.lease.pages


def _parts(requests: list[Request], size: int) -> Iterable[list[Request]]:
    return (requests[i : i + size] for i in range(0, len(requests), size))


def _bucket(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the ascending sizes that holds `count`."""
    return next(size for size in sizes if size >= count)
