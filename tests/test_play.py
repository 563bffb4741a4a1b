"""A config's task, made and refused."""

import pytest

from configs import frozenlake
from rlds_jax.play import make_task


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
