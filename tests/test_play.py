"""A config's task, made and refused; its engine."""

import batch_doubles as doubles
import pytest

from configs import frozenlake
from rlds_jax.play import make_engine, make_task


def test_a_missing_task_factory_is_named():
    config = frozenlake.get_config()
    config.task.factory = "rlds_jax.tasks.frozenlake:NoSuchTask"
    with pytest.raises(ValueError, match=r"task\.factory.*NoSuchTask"):
        make_task(config.task)


def test_task_options_that_do_not_fit_are_named():
    config = frozenlake.get_config()
    with config.unlocked():
        config.task.options.wind = 1
    with pytest.raises(ValueError, match=r"task\.options.*wind"):
        make_task(config.task)


def test_sidecars_of_hosts_that_share_a_workdir_log_apart(monkeypatch, tmp_path):
    config = frozenlake.get_config("tiny,vllm")
    logs = []

    def engine(*_, **options):
        options["transport"].close()
        logs.append(options["logs"])

    monkeypatch.setattr("rlds_jax.rollouts.engines.vllm.VllmEngine", engine)
    for host in (0, 1):
        monkeypatch.setattr("jax.process_index", lambda host=host: host)
        make_engine(config, tmp_path, doubles.MODEL, {}, 0, tmp_path)
    assert logs == [tmp_path / "sidecar_0", tmp_path / "sidecar_1"]
