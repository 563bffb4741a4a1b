"""Fields every task's config shares, with the defaults of METHOD."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from rlds_jax.advantages import AdvantageConfig
from rlds_jax.checkpoint import CheckpointConfig
from rlds_jax.losses import LossConfig
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.step_batch import UpdateConfig
from rlds_jax.update import ComputeConfig, OptimizerConfig
from rlds_jax.validation import ValidationConfig

CONDITIONS = ("rlds", "base_reflection", "rlvr")
ENGINES = ("vllm",)  # in place of the embedded one


def parse_arg(arg: str | None, variants: Sequence[str]) -> set[str]:
    """The variants named in `configs/x.py:a,b`.

    Raises:
      ValueError: an unknown variant, or more than one condition.
    """
    chosen = [part.strip() for part in (arg or "").split(",") if part.strip()]
    known = [*variants, *CONDITIONS, *ENGINES]
    unknown = [part for part in chosen if part not in known]
    if unknown:
        raise ValueError(f"config variant {unknown} is unknown; use {known}")
    if len(set(chosen) & set(CONDITIONS)) > 1:
        raise ValueError(f"config variants {chosen} name more than one of {list(CONDITIONS)}")
    return set(chosen)


def section(cls: type, **values: Any) -> ConfigDict:
    """A dataclass's fields with their defaults, `values` replacing some.

    A field that may be None can be set on the command line to its other type.
    """
    hints = typing.get_type_hints(cls)
    config = ConfigDict()
    for field in dataclasses.fields(cls):
        options = typing.get_args(hints[field.name])
        if isinstance(hints[field.name], types.UnionType) and type(None) in options:
            other = next(option for option in options if option is not type(None))
            config[field.name] = config_dict.placeholder(other)
        value = values.get(field.name, field.default)
        if value is not None:
            config[field.name] = value
    unknown = values.keys() - config.keys()
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)}")
    return config


def get_common(chosen: set[str]) -> ConfigDict:
    """METHOD's defaults for a Qwen3-4B run on one 8-GPU host; a task's config fills in `task`."""
    config = ConfigDict()
    config.seed = 0
    config.steps = 312
    config.prompts_per_step = 64
    config.distributed = False  # one of several processes: docs/scaling.md
    config.profile_steps = ""  # "10:12": these steps leave a trace for TensorBoard's profiler

    config.task = ConfigDict()
    config.task.factory = ""  # "module:callable", called with `options`
    config.task.options = ConfigDict()

    config.model = ConfigDict()
    config.model.path = "Qwen/Qwen3-4B-Instruct-2507"  # hub id or directory

    # rlds: grade, reflect, retry, SDAE. base_reflection: reflect and retry, GRPO. rlvr: GRPO.
    condition = next((name for name in CONDITIONS if name in chosen), "rlds")
    config.rollout = section(
        RolloutConfig, condition=condition, group_size=10 if condition == "rlvr" else 6
    )
    config.advantage = section(AdvantageConfig)
    config.loss = section(LossConfig)
    config.training = section(UpdateConfig)
    config.optimizer = section(OptimizerConfig)
    config.validation = section(ValidationConfig)
    config.checkpoint = section(CheckpointConfig)

    config.compute = section(
        ComputeConfig, dtype="bfloat16", remat="full", attention="auto", logprob_chunk=4096
    )
    config.mesh = ConfigDict()
    config.mesh.replica = 1
    config.mesh.data = 1
    config.mesh.fsdp = -1  # -1: the devices the other axes leave
    config.mesh.tensor = 1

    # Rows of one micro-batch; a row holds the longest sequence of the engine.
    config.batch = ConfigDict()
    config.batch.rows = 8
    config.batch.row_length = 8192
    config.batch.max_micro = 96

    config.engine = _vllm_engine() if "vllm" in chosen else _local_engine()
    return config


def _local_engine() -> ConfigDict:
    """The embedded engine; see rlds_jax/rollouts/engines/local.py."""
    engine = ConfigDict()
    engine.kind = "local"
    engine.num_slots = 256
    engine.max_context = 8192
    engine.cache_tokens = 131072
    engine.max_cache_bytes = 24 * 2**30
    engine.tokens_per_dispatch = 8
    engine.compute_dtype = "bfloat16"
    return engine


def _vllm_engine() -> ConfigDict:
    """vLLM in a sidecar; see rlds_jax/rollouts/engines/vllm_config.py."""
    engine = section(VllmConfig)
    engine.kind = "vllm"
    return engine
