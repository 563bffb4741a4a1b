"""Scores a policy on its task's validation items.

    python -m rlds_jax.evaluate --workdir=runs/tiny [--step=best|last|N]
    python -m rlds_jax.evaluate --model=DIR --config=configs/frozenlake.py:tiny

One plain rollout per item, as in training (validation.* of the config). --out keeps the result,
the reward of every item included, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict

from rlds_jax import commands, play, saved, sharding
from rlds_jax.models import hub, weights
from rlds_jax.rollouts.group import AllRolloutsDropped
from rlds_jax.validation import Validation, ValidationConfig, validate, validation_items

_MODEL = flags.DEFINE_string("model", None, "Hub id or Hugging Face directory, with --config.")
_STEP = flags.DEFINE_string("step", "best", "Of the workdir's run: best, last or a number.")
_OUT = flags.DEFINE_string("out", None, "JSON file to write.")


def evaluate(config: ConfigDict, step: int, source: Path, model: Any, params: Any) -> Validation:
    """Plays every validation item of the config's task.

    Args:
      step: version of the parameters.
      source, model, params: as in `play.make_context`.

    Raises:
      OSError, ValueError: the config or the directory does not hold; the message names what.
      TaskUnavailable: the task cannot go on.
    """
    settings = ValidationConfig(**config.validation)
    with contextlib.closing(play.make_task(config.task)) as task:
        items = validation_items(task, settings)
        context = play.make_context(config, task, source, model, params, step)
        with contextlib.closing(context.engine):
            try:
                return asyncio.run(validate(context, items, settings))
            except AllRolloutsDropped as error:
                raise ValueError(str(error)) from error


def main(config: ConfigDict | None, workdir: Path | None) -> None:
    with commands.refuse_bad_input():
        if _OUT.value is not None and not Path(_OUT.value).absolute().parent.is_dir():
            raise ValueError(f"--out is {_OUT.value}; its directory does not exist")
        if workdir is None and _STEP.present:
            raise ValueError("--step is of the run in --workdir; a model has none")
        if config is not None and "task" not in config:
            raise ValueError("--config names no task to play; give that of a task")
        if workdir is not None and config is None and _MODEL.value is None:
            config = saved.config(workdir)
            play.reserve_devices(config)
            what, (step, *policy) = str(workdir), saved.policy(workdir, _STEP.value)
        elif _MODEL.value is not None and config is not None and workdir is None:
            play.reserve_devices(config)
            source = hub.local_directory(_MODEL.value)
            mesh = sharding.make_mesh(**config.mesh)
            layout = sharding.parameter_shardings(weights.load_config(source), mesh)
            loaded = weights.load(source, jnp.float32, layout)
            what, step, policy = _MODEL.value, 0, [source, *loaded]
        else:
            raise ValueError("give --workdir alone, or --model with --config; see --help")
        outcome = evaluate(config, step, *policy)
        mean, low, high, n = outcome.reward
        where = f"{what} after step {step}" if workdir else what
        print(
            f"{where}: reward {mean:.3f} [{low:.3f}, {high:.3f}], success {outcome.success:.3f}, "
            f"n = {n}, {outcome.dropped} dropped"
        )
        if _OUT.value is not None:
            record = {"policy": what, **outcome.record(step)}
            Path(_OUT.value).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    commands.run(main, required=())
