"""The embedded engine: JAX on the trainer's own device, behind the `Engine` protocol.

`LocalEngine` is awaited from any event loop. A worker thread owns the device side (batcher.py) and
takes requests, weight updates and the order to close from one queue, in order of arrival, so the
loop never waits for JAX and an update needs no lock: it is a barrier in the queue. DESIGN
"Engines".
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import dataclasses
import operator
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from rlds_jax.models.config import ModelConfig
from rlds_jax.models.qwen3 import parameter_table
from rlds_jax.rollouts.engines import local_kernels as kernels
from rlds_jax.rollouts.engines.base import Completion, PromptTooLong
from rlds_jax.rollouts.engines.batcher import MAX_STOP_IDS, Batcher, Request
from rlds_jax.rollouts.engines.constrained import Grammar
from rlds_jax.rollouts.engines.meter import Meter

_FLOAT = np.finfo(np.float32)


class EngineStopped(RuntimeError):
    """The engine was closed, or its worker failed (the cause is chained)."""


@dataclasses.dataclass(eq=False)
class _Update:
    params: Any
    version: int
    future: concurrent.futures.Future[None]


class LocalEngine:
    """Continuous batching with a paged, prefix-sharing cache.

    The engine keeps its own copy of the weights in `compute_dtype`: once the constructor or
    `update_weights` has returned, the caller may donate or delete what it passed.

    Args:
      params: the model's parameter tree (models/qwen3.py).
      config: its architecture.
      num_slots: most requests running at once; more wait their turn, first come first served.
      max_context: longest prompt plus completion, in tokens.
      page_size: positions of one page of the cache, a power of two of at least 32.
      cache_tokens: positions the cache holds; num_slots * max_context when None. With fewer,
        requests also wait for pages.
      max_cache_bytes: refuse a cache larger than this.
      tokens_per_dispatch: decode steps of one dispatch.
      compute_dtype: of weights, activations and cache.
      version: weight version of `params`.
      tokenizer: for json_schema only: a fast Hugging Face tokenizer, or the path of a directory
        with a tokenizer.json.

    Raises:
      ValueError: an argument is out of range, or the cache exceeds max_cache_bytes.
    """

    def __init__(
        self,
        params: Any,
        config: ModelConfig,
        *,
        max_context: int,
        num_slots: int = 64,
        page_size: int = 64,
        cache_tokens: int | None = None,
        max_cache_bytes: int = 4 * 2**30,
        tokens_per_dispatch: int = 8,
        compute_dtype=jnp.float32,
        version: int = 0,
        tokenizer: Any = None,
    ):
        for name, value in (
            ("max_context", max_context - 1),
            ("num_slots", num_slots),
            ("tokens_per_dispatch", tokens_per_dispatch),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least {2 if name == 'max_context' else 1}")
        if page_size < 32 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two of at least 32, got {page_size}")
        table_width = -(-max_context // page_size)
        self._config = config
        self._max_context = max_context
        self._table_width = table_width
        num_pages = 1 + self._cache_pages(
            num_slots * max_context if cache_tokens is None else cache_tokens, page_size
        )
        size = num_pages * kernels.page_bytes(config, page_size, compute_dtype)
        if size > max_cache_bytes:
            raise ValueError(
                f"the key-value cache would take {size:,} bytes, more than max_cache_bytes "
                f"{max_cache_bytes:,}: lower num_slots, max_context or cache_tokens"
            )
        self.cache_bytes = size
        self._grammar = None if tokenizer is None else Grammar(tokenizer, config.vocab_size)
        self._meter = Meter()
        self._batcher = Batcher(
            config,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            table_width=table_width,
            steps=tokens_per_dispatch,
            dtype=compute_dtype,
            meter=self._meter,
        )
        self._check_params(params)
        self._batcher.load(params, version)
        self._inbox: queue.SimpleQueue[Request | _Update | None] = queue.SimpleQueue()
        self._pending: collections.deque[Request | _Update] = collections.deque()
        self._lock = threading.Lock()  # orders submissions before or after the end of the worker
        self._stopped: EngineStopped | None = None
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._run, name="rlds-engine", daemon=True)
        self._worker.start()
        atexit.register(self.close)

    @property
    def max_context(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self._max_context

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Samples up to `max_tokens` tokens; see `Engine.generate`.

        At temperature 0 the most likely token is taken, and logprobs are those of the model's
        distribution at temperature 1. Token t uses one uniform from fold_in(key(seed), t).

        Raises:
          PromptTooLong: prompt and completion exceed `max_context`.
          ValueError: an argument is out of range, or json_schema is given without a tokenizer.
          TypeError: an argument is no number where one is due.
          FloatingPointError: the weights gave a logprob that is not finite.
          EngineStopped: the engine is closed or has failed.
        """
        future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
        tokens = np.asarray(prompt_ids)
        max_tokens, seed = operator.index(max_tokens), operator.index(seed)
        temperature = float(temperature)
        stop_ids = tuple(dict.fromkeys(map(operator.index, stop_ids)))
        self._check_request(tokens, max_tokens, temperature, stop_ids, seed)
        matcher = None
        if json_schema is not None:
            if self._grammar is None:
                raise ValueError(
                    "json_schema needs the engine's `tokenizer`; pass it to LocalEngine"
                )
            matcher = await asyncio.to_thread(self._grammar.matcher, json_schema, stop_ids)
        request = Request(
            tokens=tokens.tolist(),
            prompt_length=len(tokens),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=stop_ids,
            seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
            matcher=matcher,
            future=future,
        )
        self._submit(request)
        return await asyncio.wrap_future(future)

    def sleep(self) -> None:
        """Keeps what it has: the cache is counted among the trainer's own memory."""

    def update_weights(self, params: Any, version: int) -> None:
        """Takes new weights once every earlier request has finished; blocks until then.

        Later requests wait for it. The cache is cleared, and the engine holds no reference to
        `params` afterwards.

        Raises:
          ValueError: params are not those of this model; the old weights stay.
          EngineStopped: the engine is closed or has failed.
        """
        self._check_params(params)
        update = _Update(params, version, concurrent.futures.Future())
        self._submit(update)
        update.future.result()

    def metrics(self) -> dict[str, float]:
        """Scalars since the last call; meter.py defines each."""
        return self._meter.take()

    def close(self) -> None:
        """Stops the worker; requests in flight raise EngineStopped. Idempotent."""
        self._closing.set()
        self._inbox.put(None)
        self._worker.join()
        atexit.unregister(self.close)

    def _cache_pages(self, tokens: int, page_size: int) -> int:
        if tokens < self._max_context:
            raise ValueError(
                f"cache_tokens {tokens} cannot hold one sequence of max_context {self._max_context}"
            )
        return max(self._table_width, -(-tokens // page_size))

    def _check_params(self, params: Any) -> None:
        shapes = {path: p.shape for path, p in traverse_util.flatten_dict(params, sep="/").items()}
        expected = {path: p.shape for path, p in parameter_table(self._config).items()}
        if shapes != expected:
            wrong = sorted(
                path
                for path in shapes.keys() | expected.keys()
                if shapes.get(path) != expected.get(path)
            )
            raise ValueError(f"params do not fit the engine's model config: {', '.join(wrong)}")

    def _check_request(self, tokens, max_tokens, temperature, stop_ids, seed) -> None:
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError("prompt_ids must be a non-empty list of ids")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"prompt_ids must be integers, got {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self._config.vocab_size:
            raise ValueError(f"prompt_ids must lie in 0..{self._config.vocab_size - 1}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if temperature and not _FLOAT.tiny <= temperature <= _FLOAT.max:
            raise ValueError(
                f"temperature must be 0 or a positive normal float32 number, got {temperature}"
            )
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop_ids, got {len(stop_ids)}")
        if not all(0 <= id < 2**31 for id in stop_ids):
            raise ValueError(f"stop_ids must be token ids, got {stop_ids}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must lie in 0..2**64 - 1, got {seed}")
        if len(tokens) + max_tokens > self._max_context:
            raise PromptTooLong(
                f"prompt of {len(tokens)} tokens and max_tokens {max_tokens} exceed max_context "
                f"{self._max_context}: shorten the prompt or raise max_context"
            )

    def _submit(self, item: Request | _Update) -> None:
        with self._lock:
            if self._stopped is not None:
                raise EngineStopped(*self._stopped.args) from self._stopped.__cause__
            self._inbox.put(item)

    def _run(self) -> None:
        """The worker thread. Whatever ends it reaches every waiter."""
        try:
            while self._receive():
                self._batcher.step()
        finally:
            self._stop(sys.exception())

    def _receive(self) -> bool:
        """Takes what has arrived, waiting when there is nothing to do. False: the engine closes."""
        while not self._closing.is_set():
            idle = not (self._batcher.busy or self._pending)
            while idle or not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    self._pending.append(item)
                idle = False
            self._deliver()
            if self._batcher.busy:
                return not self._closing.is_set()
        return False

    def _deliver(self) -> None:
        """Hands requests to the batcher up to the first update that must wait for them."""
        while self._pending:
            item = self._pending[0]
            if isinstance(item, Request):
                self._batcher.add(item)
            elif self._batcher.busy:
                return
            else:
                self._batcher.load(item.params, item.version)
                item.params = None
                item.future.set_result(None)
            self._pending.popleft()

    def _stop(self, error: BaseException | None) -> None:
        """Fails everything outstanding, now and later."""
        reason = (
            "the engine is closed" if error is None else f"the engine's worker failed: {error!r}"
        )
        stopped = EngineStopped(reason)
        stopped.__cause__ = error
        with self._lock:
            self._stopped = stopped
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    self._pending.append(item)
        for item in [*self._pending, *self._batcher.abandon()]:
            if not item.future.done() and item.future.set_running_or_notify_cancel():
                item.future.set_exception(stopped)
