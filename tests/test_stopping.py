"""Signals end rollouts at once, and everything else when it is done."""

import asyncio
import os
import signal
import time

import pytest

from rlds_jax.stopping import StopRequested, StopSignals


def kill(number):
    os.kill(os.getpid(), number)


async def forever(events):
    asyncio.get_running_loop().call_later(0.05, kill, signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        events.append("cancelled")


def test_a_signal_cancels_what_is_awaited():
    events = []
    started = time.monotonic()
    with StopSignals() as signals, pytest.raises(StopRequested, match="SIGTERM"):
        signals.run(forever(events))
    assert events == ["cancelled"]
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_other_work_is_finished_first(number):
    async def never():
        raise AssertionError("started after the signal")

    done = []
    with StopSignals() as signals:
        kill(number)
        done.append("update")
        with pytest.raises(StopRequested) as stop:
            signals.run(never())
    assert done == ["update"]
    assert stop.value.number == number


def test_a_second_interrupt_does_not_wait():
    with StopSignals():
        kill(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        assert signals.run(asyncio.sleep(0, "result")) == "result"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_cancellation_of_another_cause_stays_one():
    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        StopSignals().run(cancelled())


def test_the_first_of_two_signals_counts():
    with StopSignals() as signals:
        kill(signal.SIGTERM)
        kill(signal.SIGINT)
        with pytest.raises(StopRequested, match="SIGTERM"):
            signals.run(asyncio.sleep(60))


def test_a_signal_after_the_last_of_the_work_is_no_error(monkeypatch):
    run = asyncio.run

    def run_and_kill(work):
        result = run(work)
        kill(signal.SIGTERM)  # the loop is closed, and `run` has not returned
        return result

    monkeypatch.setattr(asyncio, "run", run_and_kill)
    with StopSignals() as signals:
        assert signals.run(asyncio.sleep(0, "result")) == "result"
        with pytest.raises(StopRequested):
            signals.run(asyncio.sleep(60))
