"""Phase times are unions of intervals."""

import pytest

from rlds_jax.rollouts.timing import PhaseClock


class Ticks:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_overlapping_requests_count_once_and_gaps_not_at_all():
    ticks = Ticks()
    clock = PhaseClock(ticks)
    with clock.phase("gen"):
        ticks.now = 1
        with clock.phase("gen"), clock.phase("grade"):
            ticks.now = 3
        ticks.now = 4
    ticks.now = 10
    with clock.phase("gen"):
        ticks.now = 12
    assert clock.seconds() == {"gen": 6.0, "grade": 2.0}


def test_a_failed_request_still_ends():
    ticks = Ticks()
    clock = PhaseClock(ticks)

    def fail():
        with clock.phase("gen"):
            ticks.now = 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    ticks.now = 5
    assert clock.seconds() == {"gen": 2.0}
