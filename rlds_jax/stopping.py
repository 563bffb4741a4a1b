"""SIGTERM and Ctrl-C end a run where nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StopRequested(Exception):
    """The run was asked to stop by the signal `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


class StopSignals:
    """While entered, SIGTERM and SIGINT end what `run` is awaiting, or the next such call.

    Everything else (an update, a log line) is finished first. The first signal counts; a second
    Ctrl-C interrupts at once.
    Signals can be handled in the main thread only.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._interrupted = False
        self._cancel: Callable[[], object] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():  # None: not set by Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`asyncio.run(work)`, which a signal cancels.

        Raises:
          StopRequested: a signal came, now or earlier.
        """

        async def cancellable() -> T:
            task = asyncio.create_task(work)
            loop = asyncio.get_running_loop()
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._received is not None:
                task.cancel()
            return await task

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            if self._received is None:
                raise
            raise StopRequested(self._received) from None
        finally:
            self._cancel = None

    def _handle(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._received is None:
            self._received = number
        if self._cancel is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: `run` is about to return
                self._cancel()
