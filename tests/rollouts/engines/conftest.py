"""Engines of the small model, and sidecars that go wrong."""

import pytest
from small_engine import make_engine
from vllm_doubles import FAKE, Faults, run_instead


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


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Sidecars started from now on are scripted, and fail as they are told here."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("RLDS_TEST_FAULTS", str(folder))
    run_instead(FAKE, monkeypatch)
    return Faults(folder)
