"""Fields every task's config shares, with the defaults of METHOD."""

from collections.abc import Sequence

from ml_collections import ConfigDict

CONDITIONS = ("rlds", "base_reflection", "rlvr")


def parse_arg(arg: str | None, variants: Sequence[str]) -> set[str]:
    """The variants named in `configs/x.py:a,b`.

    Raises:
      ValueError: an unknown variant, or more than one condition.
    """
    chosen = [part.strip() for part in (arg or "").split(",") if part.strip()]
    unknown = [part for part in chosen if part not in (*variants, *CONDITIONS)]
    if unknown:
        raise ValueError(f"config variant {unknown} is unknown; use {[*variants, *CONDITIONS]}")
    if len(set(chosen) & set(CONDITIONS)) > 1:
        raise ValueError(f"config variants {chosen} name more than one of {list(CONDITIONS)}")
    return set(chosen)


def condition_of(chosen: set[str]) -> str:
    """The condition among the chosen variants; rlds unless another is named."""
    return next((name for name in CONDITIONS if name in chosen), "rlds")


def get_common() -> ConfigDict:
    """METHOD's defaults for a Qwen3-4B run on one 8-GPU host; a task's config fills in `task`."""
    config = ConfigDict()
    config.seed = 0
    config.condition = "rlds"  # rlds | base_reflection | rlvr
    config.steps = 312
    config.prompts_per_step = 64

    config.task = ConfigDict()
    config.task.factory = ""  # "module:callable", called with `options`
    config.task.options = ConfigDict()

    config.model = ConfigDict()
    config.model.path = "Qwen/Qwen3-4B-Instruct-2507"  # hub id or HF directory
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"  # none | dots | full
    config.model.attention = "auto"

    config.mesh = ConfigDict()
    config.mesh.data = 1
    config.mesh.fsdp = -1  # -1: the devices the other axes leave
    config.mesh.tensor = 1

    config.engine = ConfigDict()
    config.engine.name = "local"
    config.engine.num_slots = 64
    config.engine.max_context = 16384
    config.engine.max_cache_gib = 24.0

    return config
