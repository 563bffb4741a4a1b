"""The sidecars of one engine: started, asked, given weights and ended, on the engine's own loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_process import Launch, Sidecar, SidecarFailed
from rlds_jax.rollouts.engines.vllm_transport import Post, Transport

HEALTH_S = 10.0


class RequestRefused(RuntimeError):
    """The sidecar says that a request is wrong; sending it again would not help."""


class SidecarGone(SidecarFailed):
    """The sidecar broke the connection, or failed while it worked on a request."""


class Router:
    """Which replica serves a request: one for all of a group, so that its prefixes are reused."""

    def __init__(self, replicas: int):
        self._in_flight = [0] * replicas
        self._home: dict[str, int] = {}

    def start(self, group: str | None) -> int:
        """The replica for the next request of a group; of none: the least loaded."""
        if group is None:
            replica = self._in_flight.index(min(self._in_flight))
        else:
            homes = Counter(self._home.values())
            order = sorted(range(len(self._in_flight)), key=lambda replica: homes[replica])
            replica = self._home.setdefault(group, order[0])
        self._in_flight[replica] += 1
        return replica

    def end(self, replica: int) -> None:
        self._in_flight[replica] -= 1

    def forget(self) -> None:
        """New weights: no prefix is left to come back to."""
        self._home.clear()


class Replicas:
    """Sidecar processes that share nothing but the weights they are sent.

    Args:
      model: directory with config.json and tokenizer.
      transport: carries the weights.
      logs: path that each sidecar's log begins with; its number follows.
    """

    def __init__(self, config: VllmConfig, model: Path, transport: Transport, logs: Path):
        self._config = config
        self._transport = transport
        self._launches = [
            Launch(config, i, model.resolve(), logs.with_name(f"{logs.name}_{i}.log"))
            for i in range(config.replicas)
        ]
        self._sidecars: list[Sidecar | None] = [None] * config.replicas
        self._session: aiohttp.ClientSession | None = None

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def pids(self) -> list[int]:
        """Process ids of those that were started."""
        return [sidecar.pid for sidecar in self._sidecars if sidecar is not None]

    async def start(self, replicas: Sequence[int]) -> None:
        """Starts some anew; returns once they answer and know how weights come.

        Raises:
          SidecarFailed, TimeoutError: one does not come up, or all of them do not meet.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),  # the engine bounds it
            )
        fresh = []
        for replica in replicas:
            old = self._sidecars[replica]
            if old is not None:
                old.stop()
            fresh.append(Sidecar(self._launches[replica]))
            self._sidecars[replica] = fresh[-1]
        await asyncio.gather(*(sidecar.wait_until_ready(self._session) for sidecar in fresh))
        await asyncio.to_thread(self._transport.connect, self._poster("/weights/init"))

    async def sync(self, params: Any, version: int) -> float:
        """Sends weights to all; returns GB/s, GB = 1e9 bytes.

        Raises:
          SidecarFailed, RequestRefused, TimeoutError: one failed; none can be trusted then.
        """
        started = time.perf_counter()
        await self.post_all("/weights/start", {"version": version})
        post = self._poster("/weights/update")
        await asyncio.to_thread(self._transport.send, params, version, post)
        await self.post_all("/weights/finish", {"version": version})
        return self._transport.total_bytes / (time.perf_counter() - started) / 1e9

    async def post(
        self, replica: int, path: str, body: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """The answer of one.

        Raises:
          TimeoutError: it took too long.
          RequestRefused: it says that the request is wrong.
          SidecarGone: anything else.
        """
        sidecar = self._sidecars[replica]
        if sidecar is None or self._session is None:
            raise SidecarGone(f"sidecar {replica} is not running")
        try:
            async with self._session.post(
                sidecar.url + path,
                json=body,
                headers=sidecar.headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise SidecarGone(f"sidecar {replica} broke the connection: {error!r}") from error
        if response.status == 400:
            raise RequestRefused(f"sidecar {replica} refuses {path}: {text}")
        if response.status != 200:
            raise sidecar.failed(f"answered {path} with {response.status} ({text})", SidecarGone)
        return json.loads(text)

    async def post_all(self, path: str, body: dict[str, Any]) -> None:
        """The same message to each; as `post`, with engine.update_timeout_s."""
        await self._post_each(path, [body] * len(self))

    async def down(self) -> list[int]:
        """Those whose process has ended or that do not answer."""

        async def is_down(sidecar: Sidecar | None) -> bool:
            if sidecar is None or not sidecar.running or self._session is None:
                return True
            return not await sidecar.answers(self._session, HEALTH_S)

        states = await asyncio.gather(*map(is_down, self._sidecars))
        return [replica for replica, state in enumerate(states) if state]

    def failure(self, replica: int) -> SidecarFailed:
        """The error that says what became of one that is down."""
        sidecar = self._sidecars[replica]
        if sidecar is None:
            return SidecarFailed(f"sidecar {replica} was never started")
        return sidecar.failed("is gone" if not sidecar.running else "answers no more")

    def stop(self) -> None:
        """Ends the processes."""
        for sidecar in self._sidecars:
            if sidecar is not None:
                sidecar.stop()

    async def close(self) -> None:
        """Hangs up; nothing can be asked afterwards."""
        if self._session is not None:
            await self._session.close()

    async def _post_each(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        timeout_s = self._config.update_timeout_s
        await asyncio.gather(
            *(self.post(replica, path, body, timeout_s) for replica, body in enumerate(bodies))
        )

    def _poster(self, path: str) -> Post:
        """For the transport's thread: posts to every replica."""
        loop = asyncio.get_running_loop()
        return lambda bodies: asyncio.run_coroutine_threadsafe(self._post_each(path, bodies), loop)
