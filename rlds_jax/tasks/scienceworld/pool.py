"""JVMs shared by the episodes of a run: started on demand, reused, replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rlds_jax.tasks.scienceworld.jvm import Jvm

T = TypeVar("T")

JVM_BYTES = 256 * 2**20  # resident, after some episodes; see the benchmark
_JVMS_PER_CORE = 16  # a step takes a core some 20 ms, a turn of the policy a second


def default_size() -> int:
    """JVMs that the cores keep busy and half of the free memory holds; at least 1."""
    return max(1, min(_JVMS_PER_CORE * _cores(), _free_memory() // 2 // JVM_BYTES))


class JvmPool:
    """At most `size` JVMs, one per live episode.

    Calls run in threads of the pool, never in the event loop. It serves one event loop at a time,
    and must not be used in a forked child.

    Args:
      size: most JVMs at once; None for `default_size`.
      deadline: seconds one call may take before its JVM is killed.
      recycle_after: episodes a JVM plays before it is replaced.
      deterministic: see `Jvm`.
    """

    def __init__(
        self,
        size: int | None = None,
        deadline: float = 60.0,
        recycle_after: int = 100,
        deterministic: bool = True,
    ):
        self.size = size or default_size()
        self._recycle_after = recycle_after
        self._new_jvm = lambda: Jvm(deterministic, deadline)
        self._idle: list[Jvm] = []
        self._live: set[Jvm] = set()
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="jvm")
        # Starting takes a core a second; more at once only delays all of them.
        self._starting = threading.Semaphore(_cores())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._live, self._threads)

    @property
    def jvms(self) -> tuple[Jvm, ...]:
        """Those alive now, idle or not."""
        return tuple(self._live)

    async def lease(self) -> Lease:
        """An exclusive JVM, waited for while all are in use.

        Raises:
          JavaMissing, JvmFailed: as `Jvm`.
          RuntimeError: the pool is closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the JVM pool is closed")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # each training step has its own
            self._loop, self._slots = loop, asyncio.Semaphore(self.size)
        slots = self._slots
        await slots.acquire()
        try:
            jvm = self._take_idle() or await self._start()
        except BaseException:
            slots.release()
            raise
        return Lease(self, jvm, slots)

    def close(self) -> None:
        """Ends every JVM; calls in flight raise JvmFailed."""
        self._finalizer()

    def _take_idle(self) -> Jvm | None:
        while self._idle:
            jvm = self._idle.pop()
            if jvm.alive:
                return jvm
            self._discard(jvm)
        return None

    async def _start(self) -> Jvm:
        def start() -> Jvm:
            with self._starting:
                jvm = self._new_jvm()
                self._live.add(jvm)
            if not self._finalizer.alive:  # closed meanwhile
                self._discard(jvm)
            return jvm

        future = self._threads.submit(start)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._discard_started)
            raise

    def _discard_started(self, future: Future[Jvm]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._discard(future.result())

    def _give_back(self, jvm: Jvm) -> None:
        if jvm.alive and jvm.episodes < self._recycle_after and self._finalizer.alive:
            self._idle.append(jvm)
        else:
            self._discard(jvm)

    def _discard(self, jvm: Jvm) -> None:
        jvm.kill()
        self._live.discard(jvm)


class Lease:
    """One episode's JVM; closing it twice is harmless."""

    def __init__(self, pool: JvmPool, jvm: Jvm, slots: asyncio.Semaphore):
        self.jvm = jvm
        self._pool = pool
        self._slots: asyncio.Semaphore | None = slots

    async def run(self, method: Callable[..., T], *args: Any) -> T:
        """Runs a method of the JVM in a thread. Cancelled, it kills the JVM, whose answer would
        otherwise be taken for that of the next call."""
        try:
            return await asyncio.wrap_future(self._pool._threads.submit(method, *args))
        except asyncio.CancelledError:
            self.jvm.kill()
            raise

    def close(self) -> None:
        """Gives the JVM back to the pool."""
        if self._slots is not None:
            slots, self._slots = self._slots, None
            self._pool._give_back(self.jvm)
            slots.release()


def _end(owner: int, live: set[Jvm], threads: ThreadPoolExecutor) -> None:
    if os.getpid() != owner:  # a forked child: the JVMs are its parent's
        return
    threads.shutdown(wait=False, cancel_futures=True)
    for jvm in tuple(live):
        jvm.kill()
    live.clear()


def _cores() -> int:
    return os.cpu_count() or 1


def _free_memory() -> int:
    """Bytes this process may still take, by the machine, its kernel and the control group."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):  # no such file outside Linux
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max", or no group of its own
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    return max(free, 0)
