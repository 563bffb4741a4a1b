"""From a step's groups to packed batches: one per optimizer step (METHOD section 3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args

import numpy as np

from rlds_jax import batch as batching
from rlds_jax.advantages import StepAdvantages
from rlds_jax.batch import Batch, BatchLayout
from rlds_jax.losses import Aggregation
from rlds_jax.rollouts.pairs import auxiliary_pairs, without_guidance
from rlds_jax.rollouts.types import GroupResult


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a step's rollouts are trained on.

    Attributes:
      epochs, minibatches: passes over the step's groups, and optimizer steps per pass.
      aggregation: how the policy loss and the KL are averaged.
      clean_retries: train retries without the guidance they were sampled with.
      reflect_coefficient, retry_coefficient: weights of the auxiliary losses.
      max_pairs: auxiliary pairs per channel.
      success_only: only retries that reach success make pairs.
      max_nonfinite: updates in a row that may be skipped for a NaN or inf before the run stops.

    Raises:
      ValueError: naming the field that is out of range.
    """

    epochs: int = 1
    minibatches: int = 1
    aggregation: Aggregation = "token-mean"
    clean_retries: bool = False
    reflect_coefficient: float = 0.05
    retry_coefficient: float = 0.10
    max_pairs: int = 64
    success_only: bool = False
    max_nonfinite: int = 3

    def __post_init__(self):
        for name in ("epochs", "minibatches", "max_nonfinite"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("reflect_coefficient", "retry_coefficient", "max_pairs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"training.{name} is {getattr(self, name)}; it must be finite and not negative"
                )
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(
                f"training.aggregation is {self.aggregation!r}; use one of {get_args(Aggregation)}"
            )


def make_batches(
    groups: Sequence[GroupResult],
    estimate: StepAdvantages,
    config: UpdateConfig,
    layout: BatchLayout,
) -> tuple[list[Batch], dict[str, float]]:
    """Packs the groups into `config.minibatches` batches of whole groups.

    Args:
      groups: of the step.
      estimate: advantages of the groups' trajectories, in order.

    Returns:
      The batches, and metrics of the auxiliary pairs, averaged over them.

    Raises:
      BatchError: the layout cannot hold them.
    """
    everything = [t for group in groups for t in group.trajectories]
    columns = zip(everything, estimate.token, estimate.loss_mask, strict=True)
    estimate_of = {t.uid: (token, mask) for t, token, mask in columns}
    batches, metrics = [], []
    for first in range(config.minibatches):
        part = groups[first :: config.minibatches]
        rows = [t for group in part for t in group.trajectories]
        policy = batching.policy_sequences(
            rows,
            [estimate_of[t.uid][0] for t in rows],
            [estimate_of[t.uid][1] for t in rows],
            config.aggregation,
        )
        auxiliary, counts = batching.auxiliary_sequences(
            (pair for group in part for pair in auxiliary_pairs(group, config.success_only)),
            layout,
            coefficients={"reflect": config.reflect_coefficient, "retry": config.retry_coefficient},
            max_pairs=config.max_pairs,
        )
        batches.append(batching.pack([*policy, *auxiliary], layout))
        metrics.append(counts)
    return batches, mean_metrics(metrics)


def without_guidance_everywhere(groups: Sequence[GroupResult]) -> list[GroupResult]:
    """The groups with every retry in the context of its original (`clean_retries`)."""
    cleaned = []
    for group in groups:
        by_uid = {t.uid: t for t in group.trajectories}
        rows = tuple(
            t if t.parent is None else without_guidance(by_uid[t.parent], t)
            for t in group.trajectories
        )
        cleaned.append(dataclasses.replace(group, trajectories=rows))
    return cleaned


def mean_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Per name the mean over the dicts that have it."""
    names = sorted({name for each in metrics for name in each})
    return {name: float(np.mean([m[name] for m in metrics if name in m])) for name in names}
