"""Validation: one plain rollout per held-out item, and intervals for its mean reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.types import GroupResult
from rlds_jax.tasks.base import Item, Task


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
    """When and on what a run is validated (METHOD section 4, Validation).

    Attributes:
      every: steps between validations; one comes before training and one after the last step too.
        0 leaves them all out.
      num_items: the first so many validation items; None takes all.
      seed: of the sampling, the same for every run, so that runs can be compared item by item.
      resamples: of the bootstrap.

    Raises:
      ValueError: naming the field that is out of range.
    """

    every: int = 10
    num_items: int | None = None
    seed: int = 0
    resamples: int = 1000

    def __post_init__(self):
        for name, least in (("every", 0), ("seed", 0), ("resamples", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"validation.{name} is {getattr(self, name)}; it must be at least {least}"
                )
        if self.num_items is not None and self.num_items < 1:
            raise ValueError(
                f"validation.num_items is {self.num_items}; it must be None or at least 1"
            )

    def due(self, step: int, steps: int) -> bool:
        """Whether the policy after `step` of `steps` updates is validated."""
        return self.every > 0 and (step % self.every == 0 or step == steps)


class Interval(NamedTuple):
    """A mean with its 95% percentile bootstrap interval over n values."""

    mean: float
    low: float
    high: float
    n: int


class Validation(NamedTuple):
    """Outcome of one validation.

    Attributes:
      rewards: by item id; an item whose rollout was dropped is absent.
      reward: their mean and interval.
      success: share of these rollouts that succeeded.
      turns: their mean number of turns.
      dropped: rollouts that were dropped.
    """

    rewards: dict[str, float]
    reward: Interval
    success: float
    turns: float
    dropped: int

    def metrics(self, task: str) -> dict[str, float]:
        """Scalars by name."""
        named = {
            "reward/mean": self.reward.mean,
            "reward/low": self.reward.low,
            "reward/high": self.reward.high,
            "success/mean": self.success,
            "num_turns/mean": self.turns,
            "dropped": self.dropped,
        }
        return {f"val/{task}/{name}": float(value) for name, value in named.items()}

    def record(self, step: int) -> dict[str, Any]:
        """One line of validation.jsonl."""
        return {
            "step": step,
            **self.reward._asdict(),
            "success": self.success,
            "dropped": self.dropped,
            "rewards": self.rewards,
        }


def validation_items(task: Task, config: ValidationConfig) -> Sequence[Item]:
    """The items every validation of a run plays.

    Raises:
      ValueError: there are fewer than `config.num_items`, or none.
    """
    items = task.items("validation")
    wanted = len(items) if config.num_items is None else config.num_items
    if not 1 <= wanted <= len(items):
        raise ValueError(
            f"validation.num_items is {config.num_items}; task {task.name} has {len(items)} of them"
        )
    return items[:wanted]


async def validate(
    context: RolloutContext, items: Sequence[Item], config: ValidationConfig
) -> Validation:
    """Plays every item once in the `plain` context.

    Raises:
      AllRolloutsDropped: no rollout survived.
    """
    return score(items, await run_groups(plain(context, config), items, step=0), config)


def plain(context: RolloutContext, config: ValidationConfig) -> RolloutContext:
    """The context of a run for its validation: one rollout, no grading, reflection or retry.

    It draws with the same seeds every time, whatever the run's own seed and step.
    """
    return dataclasses.replace(context, config=context.config.validation(), run_seed=config.seed)


def score(
    items: Sequence[Item], groups: Sequence[GroupResult], config: ValidationConfig
) -> Validation:
    """The outcome of playing each item."""
    rows = {
        item.id: row
        for item, group in zip(items, groups, strict=True)
        for row in group.trajectories
    }
    rewards = {item: row.reward for item, row in rows.items()}
    return Validation(
        rewards,
        bootstrap_mean(list(rewards.values()), config.resamples),
        float(np.mean([row.success for row in rows.values()])),
        float(np.mean([len(row.turns) for row in rows.values()])),
        len(items) - len(rows),
    )


def best(validations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of highest mean reward, the first of equals; None of none."""
    return max(validations, key=lambda record: record["mean"], default=None)


def bootstrap_mean(values: Sequence[float], resamples: int = 1000, seed: int = 0) -> Interval:
    """The mean of `values` and its 95% percentile bootstrap interval.

    Raises:
      ValueError: there are no values.
    """
    if not values:
        raise ValueError("there are no values to average")
    mean = float(np.mean(values))
    if len(set(values)) == 1:  # nothing to resample
        return Interval(mean, mean, mean, len(values))
    drawn = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = drawn.confidence_interval
    return Interval(mean, float(low), float(high), len(values))
