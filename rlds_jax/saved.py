"""The policies that a run saved, for the commands that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rlds_jax import checkpoint, run_files, sharding
from rlds_jax.models import hub, qwen3, weights
from rlds_jax.models.config import ModelConfig
from rlds_jax.validation import best


def config(workdir: Path) -> ConfigDict:
    """The config of the run in `workdir`.

    Raises:
      FileNotFoundError: it holds no run.
      ValueError: its config.json is damaged.
    """
    return ConfigDict(run_files.config(workdir))


def policy(workdir: Path, which: str) -> tuple[int, Path, ModelConfig, Any]:
    """One saved policy of a run.

    Args:
      which: "best" (by validation), "last", or a step.

    Returns:
      Its step, the directory of the model that training started from (config, tokenizer), its model
      config, and its float32 parameters.

    Raises:
      OSError: nothing of the kind was saved, or it cannot be read.
      ValueError: `which` is something else.
    """
    settings = config(workdir)
    directory = workdir / "checkpoints"
    step = _step(workdir, directory, which)
    source = hub.local_directory(settings.model.path)
    model = weights.load_config(source)
    mesh = sharding.make_mesh()  # of the devices here, whatever the run had
    abstract = checkpoint.abstract_like(
        jax.eval_shape(lambda: qwen3.init_params(model, jax.random.key(0))),
        sharding.parameter_shardings(model, mesh),
    )
    return step, source, model, checkpoint.load_params(directory, step, abstract)


def _step(workdir: Path, directory: Path, which: str) -> int:
    if which == "last":
        steps = checkpoint.steps(directory)
        if not steps:
            raise ValueError(f"{directory} holds no checkpoint yet; go on with the run")
        return steps[-1]
    if which == "best":
        found = best(run_files.validations(workdir))
        if found is None:
            raise ValueError(f"{workdir} was never validated, so no step is best; use last")
        return found["step"]
    if not which.isdecimal():
        raise ValueError(f"step is {which!r}; use best, last or a number")
    return int(which)
