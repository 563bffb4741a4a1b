"""The vLLM engine: sidecar processes behind the `Engine` protocol. DESIGN "Engines".

A thread of its own runs an event loop that owns every connection, so `generate` is awaited from any
loop. Requests carry token ids both ways; the text is never looked at. One that fails because its
sidecar is gone is safe to send again (same prompt, seed and weights): the sidecar is restarted, all
replicas get the weights anew, and the request goes out once more.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlds_jax.rollouts.engines.base import GROUP, Completion, PromptTooLong
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_process import SidecarFailed
from rlds_jax.rollouts.engines.vllm_replicas import (
    Replicas,
    RequestRefused,
    Router,
    SidecarGone,
)
from rlds_jax.rollouts.engines.vllm_transport import Transport

T = TypeVar("T")

MAX_SENDS = 3  # of one request
COUNTED = (
    "requests",
    "prompt_tokens",
    "decode_tokens",
    "busy_s",
    "restarts",
    "resent",
    "timed_out",
)

Gate = Callable[["VllmEngine", Any], dict[str, float]]


class EngineStopped(RuntimeError):
    """The engine is closed, or its sidecars cannot be kept alive (the cause is chained)."""


class RequestTimedOut(TimeoutError):
    """A sidecar that is otherwise well did not finish a request within its deadline."""


class VllmEngine:
    """vLLM in sidecar processes.

    Args:
      params: the model's parameter tree, sent before the constructor returns.
      config: of the engine.
      model: directory with config.json and tokenizer.
      transport: carries weights; the engine closes it.
      logs: path that each sidecar's log begins with; its number follows.
      version: of `params`.
      gate: called with the engine and the parameters after the first weights and after the first
        update; it raises if the two do not agree, and returns metrics.

    Raises:
      SidecarFailed: a sidecar does not come up; the message says why and ends with its log.
    """

    def __init__(
        self,
        params: Any,
        config: VllmConfig,
        *,
        model: Path,
        transport: Transport,
        logs: Path,
        version: int = 0,
        gate: Gate | None = None,
    ):
        self._config = config
        self._transport = transport
        self._gate, self._gates_left = gate, 2
        self._replicas = Replicas(config, model, transport, logs)
        self._params, self._version = params, version
        self._router = Router(config.replicas)
        self._slots = [asyncio.Semaphore(config.max_requests) for _ in range(config.replicas)]
        self._serving = asyncio.Event()  # else an update or a repair is on its way
        self._repairing = asyncio.Lock()
        self._epoch = 0  # of repairs
        self._restarts = 0
        self._broken: EngineStopped | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._parity: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._call(self._open())
            self._check_parity()
        except BaseException:
            self.close()
            raise

    @property
    def max_context(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self._config.max_context

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

        vLLM batches as it likes: a token's logprob may differ in its last bits with what else is in
        flight, and with it, rarely, the token.

        Raises:
          PromptTooLong: prompt and completion exceed `max_context`.
          ValueError: an argument is out of range.
          RequestTimedOut: engine.request_timeout_s passed, though the sidecar is well.
          RequestRefused: the sidecar refuses the request, a schema it does not support included.
          EngineStopped: the engine is closed, or sidecars fail again and again.
        """
        ids = [operator.index(token) for token in prompt_ids]
        if not ids or max_tokens < 1:
            raise ValueError(f"prompt of {len(ids)} tokens, max_tokens {max_tokens}: need both")
        if len(ids) + max_tokens > self._config.max_context:
            raise PromptTooLong(
                f"prompt of {len(ids)} tokens and max_tokens {max_tokens} exceed max_context "
                f"{self._config.max_context}: shorten the prompt or raise engine.max_context"
            )
        body = {
            "prompt_ids": ids,
            "max_tokens": operator.index(max_tokens),
            "temperature": float(temperature),
            "stop_ids": [operator.index(token) for token in stop_ids],
            "seed": operator.index(seed),
            "json_schema": None if json_schema is None else dict(json_schema),
        }
        return await asyncio.wrap_future(self._submit(self._generate(body, GROUP.get())))

    def sleep(self) -> None:
        """Gives up GPU memory that is shared with the trainer, until the next update.

        A sidecar that fails at it is found out, and restarted, by that update.
        """
        if self._config.sleeps:
            self._call(self._sleep())

    def update_weights(self, params: Any, version: int) -> None:
        """Sends new weights; requests in flight finish under the old ones, later ones wait.

        The parameters are kept until the next update, for a sidecar that must be restarted.

        Raises:
          ParityError: the gate, after the first update.
          EngineStopped: sidecars fail again and again.
        """
        self._call(self._update(params, version))
        self._check_parity()

    def metrics(self) -> dict[str, float]:
        """Scalars since the last call.

        engine/requests, engine/prompt_tokens, engine/decode_tokens: completed ones.
        engine/busy_s: time with a request in flight; engine/tokens_per_s: sampled, per such second.
        engine/restarts, engine/resent, engine/timed_out: sidecars restarted, requests sent again,
        and given up.
        engine/sync_gb_per_s: of the last update, GB = 1e9 bytes.
        engine/parity_*: of the gate, after it ran.
        """
        return self._call(self._take_metrics())

    def close(self) -> None:
        """Ends the sidecars; requests in flight raise EngineStopped. Idempotent."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._transport.close()

    # Everything below runs on the engine's own loop.

    async def _open(self) -> None:
        await self._replicas.start(range(len(self._replicas)))
        self._gb_per_s = await self._replicas.sync(self._params, self._version)
        self._serving.set()

    async def _generate(self, body: dict[str, Any], group: str | None) -> Completion:
        """One completion, whatever happens to sidecars meanwhile."""
        replica = self._router.start(group)
        self._enter()
        try:
            for attempt in range(MAX_SENDS):
                try:
                    async with self._slots[replica]:
                        await self._wait_until_serving()
                        epoch = self._epoch
                        self._counts["resent"] += attempt > 0
                        return await self._request(replica, body)
                except SidecarGone as error:
                    cause = error
                    await asyncio.shield(asyncio.ensure_future(self._repair(epoch)))
            raise EngineStopped(f"a request failed {MAX_SENDS} times: {cause}") from cause
        finally:
            self._router.end(replica)
            self._leave()

    async def _request(self, replica: int, body: dict[str, Any]) -> Completion:
        try:
            answer = await self._replicas.post(
                replica, "/generate", body, self._config.request_timeout_s
            )
        except TimeoutError as error:
            if replica in await self._replicas.down():
                raise SidecarGone("it answers no more") from error
            self._counts["timed_out"] += 1
            raise RequestTimedOut(
                f"sidecar {replica} did not finish a request of {len(body['prompt_ids'])} + "
                f"{body['max_tokens']} tokens within engine.request_timeout_s "
                f"({self._config.request_timeout_s:g} s); raise it if such requests take longer"
            ) from error
        logprobs = np.array(answer["logprobs"], np.float32)
        if not np.isfinite(logprobs).all():
            version = answer["weight_version"]
            raise FloatingPointError(f"non-finite logprobs under weight version {version}")
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(body["prompt_ids"])
        self._counts["decode_tokens"] += len(logprobs)
        return Completion(
            ids=np.array(answer["ids"], np.int32),
            logprobs=logprobs,
            finish_reason=answer["finish_reason"],
            weight_version=answer["weight_version"],
            constrained=body["json_schema"] is not None,
        )

    async def _wait_until_serving(self) -> None:
        await self._serving.wait()
        if self._broken is not None:
            raise EngineStopped(str(self._broken)) from self._broken

    async def _sleep(self) -> None:
        with contextlib.suppress(SidecarGone, TimeoutError, RequestRefused):
            await self._replicas.post_all("/sleep", {})

    async def _update(self, params: Any, version: int) -> None:
        async with self._repairing:
            self._serving.clear()
            self._params, self._version = params, version
            try:
                self._router.forget()
                await self._sync_or_restart()
            finally:
                self._serving.set()
        await self._wait_until_serving()

    async def _repair(self, epoch: int) -> None:
        """Brings back what is down, unless that was done since `epoch`."""
        async with self._repairing:
            if self._epoch != epoch or self._broken is not None:
                return
            self._serving.clear()
            try:
                down = await self._replicas.down()
                if down:
                    await self._restart(down, self._replicas.failure(down[0]))
                    await self._sync_or_restart()
                self._epoch += 1
            except EngineStopped as error:
                self._broken = error
            finally:
                self._serving.set()

    async def _sync_or_restart(self) -> None:
        """Sends the weights; a sidecar that fails at it is restarted, as often as is allowed."""
        while True:
            try:
                self._gb_per_s = await self._replicas.sync(self._params, self._version)
                return
            except (SidecarFailed, TimeoutError, RequestRefused) as error:
                cause = error
            self._replicas.stop()  # none can be trusted half-way through an update
            try:
                await self._restart(range(len(self._replicas)), cause)
            except EngineStopped as error:
                self._broken = error
                raise

    async def _restart(self, replicas: Sequence[int], cause: Exception) -> None:
        """Starts sidecars again; all of them where that fails, for others may wait for one then.

        Raises:
          EngineStopped: engine.max_restarts are used up.
        """
        while self._broken is None:
            self._restarts += len(replicas)
            self._counts["restarts"] += len(replicas)
            if self._restarts > self._config.max_restarts:
                raise EngineStopped(
                    f"more than engine.max_restarts ({self._config.max_restarts}) restarts of "
                    f"sidecars; the last failure: {cause}"
                ) from cause
            try:
                await self._replicas.start(replicas)
                return
            except (SidecarFailed, TimeoutError) as error:
                cause, replicas = error, range(len(self._replicas))
        raise self._broken

    def _enter(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running.add(task)

    def _leave(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.discard(task)
        if not self._running:
            self._counts["busy_s"] += time.perf_counter() - self._busy_since

    async def _take_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, defaultdict(float)
        metrics = {f"engine/{name}": counts[name] for name in COUNTED}
        if counts["busy_s"]:
            metrics["engine/tokens_per_s"] = counts["decode_tokens"] / counts["busy_s"]
        metrics["engine/sync_gb_per_s"] = self._gb_per_s
        return metrics | self._parity

    async def _close(self) -> None:
        self._broken = EngineStopped("the engine is closed")
        self._replicas.stop()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._replicas.close()

    # Called on other threads.

    def _check_parity(self) -> None:
        self._parity = {}
        if self._gate is not None and self._gates_left:
            self._gates_left -= 1
            self._parity = self._gate(self, self._params)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()
