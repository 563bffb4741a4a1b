"""How the command ends where a run cannot go on."""

import pytest

from configs import frozenlake
from rlds_jax import train
from rlds_jax.batch import BatchError
from rlds_jax.rollouts.group import AllRolloutsDropped
from rlds_jax.trainer import NonfiniteUpdates


def ending_with(error):
    """A trainer whose run raises `error`."""

    class Ending:
        def __init__(self, *_):
            pass

        def run(self):
            raise error

        def close(self):
            pass

    return Ending


@pytest.mark.parametrize("kind", [BatchError, AllRolloutsDropped, NonfiniteUpdates, OSError])
def test_a_run_that_cannot_go_on_is_one_error_with_the_way_on(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "Trainer", ending_with(kind("raise batch.max_micro")))
    with pytest.raises(SystemExit) as stop:
        train.main(frozenlake.get_config("tiny"), tmp_path)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: raise batch.max_micro\n")
    assert "from the newest checkpoint" in said


def test_a_second_interrupt_ends_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "Trainer", ending_with(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as stop:
        train.main(frozenlake.get_config("tiny"), tmp_path)
    assert stop.value.code == 130
    assert "the same command again goes on" in capsys.readouterr().out
