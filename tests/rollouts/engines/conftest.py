"""Engines of the small model."""

import pytest
from small_engine import make_engine


@pytest.fixture(scope="module")
def shared():
    engine = make_engine(num_slots=64)
    yield engine
    engine.close()


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()
