"""A task that cannot go on: the run is saved, and the command says why."""

import pytest

from configs import frozenlake
from rlds_jax import train
from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.tasks.frozenlake import FrozenLake
from rlds_jax.trainer import Trainer


def test_the_state_is_saved_and_the_command_ends_without_a_traceback(tmp_path, monkeypatch, capsys):
    def unavailable(self, item):
        raise TaskUnavailable("the server is down; start it again")

    saved, closed = [], []
    monkeypatch.setattr(FrozenLake, "environment", unavailable)
    monkeypatch.setattr(FrozenLake, "close", lambda self: closed.append(self))
    monkeypatch.setattr(Trainer, "save", lambda self: saved.append(self.completed))
    config = frozenlake.get_config("tiny,rlvr")
    config.update(steps=2, prompts_per_step=2)
    config.validation.every = 0
    config.checkpoint.every = 0
    with pytest.raises(SystemExit) as end:
        train.main(config, tmp_path)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "error: the server is down; start it again" in said
    assert "goes on from the newest checkpoint" in said
    assert len(closed) == 1
    assert saved[-1] == 0
