"""What playing a config's task takes: its task, and a context with engine, chat and prompts."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.chat import ChatFormat
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.engines.local import LocalEngine
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.tasks.base import Task


def make_task(config: ConfigDict) -> Task:
    """Calls `config.factory` ("module:callable") with `config.options`.

    Raises:
      ValueError: the factory cannot be found, or does not take the options.
    """
    module, _, name = config.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"task.factory {config.factory!r} cannot be found: {error}") from error
    try:
        inspect.signature(factory).bind(**config.options)
    except TypeError as error:
        raise ValueError(f"task.options do not fit {config.factory}: {error}") from error
    return factory(**config.options)


def make_context(
    config: ConfigDict,
    task: Task,
    source: Path,
    model: ModelConfig,
    params: Any,
    version: int = 0,
) -> RolloutContext:
    """A context with a new engine that holds `params`; whoever made it closes the engine.

    Args:
      source: model directory with tokenizer and chat template.
      version: of the parameters.

    Raises:
      OSError, ValueError: the config or the directory does not hold; the message names what.
    """
    rollout = RolloutConfig(**config.rollout)
    chat = ChatFormat.from_directory(source, (task.observation_role,))
    prompts = Prompts.load(rollout.prompts_dir)
    engine = LocalEngine(params, model, tokenizer=source, version=version, **config.engine)
    return RolloutContext(task, engine, chat, prompts, rollout, config.seed)
