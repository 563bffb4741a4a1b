"""Compiled programs and a finished run, each made once for all tests."""

import os
import tempfile

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="rlds_jax_tests_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _CACHE.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The workdir of a finished run: two steps of two prompts, validated at 0 and 2."""
    from configs import frozenlake
    from rlds_jax.trainer import Trainer

    config = frozenlake.get_config("tiny")
    config.update(steps=2, prompts_per_step=2)
    config.validation.num_items = 8
    workdir = tmp_path_factory.mktemp("tiny_run")
    trainer = Trainer(config, workdir)
    trainer.run()
    trainer.close()
    return workdir
