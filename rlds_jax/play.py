"""What playing a config's task takes: its task, and a context with engine, chat and prompts."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.chat import ChatFormat
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.engines.base import Engine
from rlds_jax.rollouts.engines.local import LocalEngine
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
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
    workdir: Path | None = None,
) -> RolloutContext:
    """A context with a new engine that holds `params`; whoever made it closes the engine.

    Args:
      source: model directory with tokenizer and chat template.
      version: of the parameters.
      workdir: where sidecars log; None for a temporary folder.

    Raises:
      OSError, ValueError: the config or the directory does not hold; the message names what.
      SidecarFailed, ParityError: a sidecar does not come up, or does not agree with `params`.
    """
    rollout = RolloutConfig(**config.rollout)
    chat = ChatFormat.from_directory(source, (task.observation_role,))
    prompts = Prompts.load(rollout.prompts_dir)
    engine = make_engine(config, source, model, params, version, workdir)
    return RolloutContext(task, engine, chat, prompts, rollout, config.seed)


def vllm_settings(config: ConfigDict) -> VllmConfig | None:
    """What `config.engine` says of vLLM; None if it names the local engine.

    Raises:
      ValueError: a field of it does not hold.
    """
    if config.engine.kind == "local":
        return None
    if config.engine.kind == "vllm":
        return VllmConfig(**_options(config))
    raise ValueError(f"engine.kind is {config.engine.kind!r}; use local or vllm")


def reserve_devices(config: ConfigDict) -> None:
    """Keeps JAX off what is the engine's; before JAX has touched a device.

    On GPUs that a sleeping engine shares JAX must give back what it does not use, so it allocates
    without a pool of its own.

    Raises:
      ValueError: a field of the engine does not hold.
    """
    settings = vllm_settings(config)
    if settings is not None and settings.placement != "cpu":
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, settings.trainer_gpus)))
        if settings.sleeps:
            os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"


def make_engine(
    config: ConfigDict,
    source: Path,
    model: ModelConfig,
    params: Any,
    version: int,
    workdir: Path | None,
) -> Engine:
    """The engine that `config.engine.kind` names; arguments as of `make_context`."""
    settings = vllm_settings(config)
    if settings is None:
        return LocalEngine(params, model, tokenizer=source, version=version, **_options(config))
    try:
        from rlds_jax.rollouts.engines.parity import ParityGate
        from rlds_jax.rollouts.engines.vllm import VllmEngine
        from rlds_jax.rollouts.engines.vllm_transport import make_transport
    except ModuleNotFoundError as error:
        raise ValueError(
            f"engine.kind=vllm needs the package {error.name}: pip install -e '.[vllm]'"
        ) from error

    logs = Path(tempfile.mkdtemp(prefix="rlds_jax_")) if workdir is None else workdir
    return VllmEngine(
        params,
        settings,
        model=source,
        transport=make_transport(settings, model),
        logs=logs / f"sidecar_{jax.process_index()}",  # hosts may share a workdir
        version=version,
        gate=ParityGate(model, settings.dtype, config.compute.dtype),
    )


def _options(config: ConfigDict) -> dict[str, Any]:
    """The fields of the engine that `config.engine.kind` names."""
    return {name: value for name, value in config.engine.items() if name != "kind"}
