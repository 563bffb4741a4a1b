"""A task that cannot go on: the run is saved, and the command says why."""

import pytest

from configs import frozenlake
from rlds_jax import train, trainer
from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.tasks.frozenlake import FrozenLake


def test_the_last_step_is_saved_and_the_command_ends_without_a_traceback(
    tmp_path, monkeypatch, capsys
):
    config = frozenlake.get_config("tiny,rlvr")
    config.update(steps=2, prompts_per_step=2)
    config.validation.every = 0
    closed, environment, rollouts = [], FrozenLake.environment, tmp_path / "rollouts.jsonl"

    def unavailable(self, item):
        if rollouts.is_file() and rollouts.stat().st_size:  # the first step was taken
            raise TaskUnavailable("the server is down; start it again")
        return environment(self, item)

    monkeypatch.setattr(FrozenLake, "environment", unavailable)
    monkeypatch.setattr(FrozenLake, "close", lambda self: closed.append(self))
    with pytest.raises(SystemExit) as end:
        train.main(config, tmp_path)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "error: the server is down; start it again" in said
    assert "goes on from the newest checkpoint" in said
    assert len(closed) == 1

    monkeypatch.setattr(FrozenLake, "environment", environment)
    resumed = trainer.Trainer(config, tmp_path)
    assert resumed.completed == 1
    resumed.close()
