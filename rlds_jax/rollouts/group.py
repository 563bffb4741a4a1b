"""One step's rollouts: each group plays, is graded, reflects and retries (METHOD section 1).

A group waits for itself only: an original is graded as soon as it ends, and failures are reflected
on as soon as the group's own originals are graded. The engine batches whatever is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from rlds_jax.rollouts.context import RolloutContext, RolloutKey
from rlds_jax.rollouts.engines.base import GROUP
from rlds_jax.rollouts.episode import RolloutDropped, run_original, run_retry
from rlds_jax.rollouts.grading import grade
from rlds_jax.rollouts.judging import Unparseable
from rlds_jax.rollouts.reflection import reflect
from rlds_jax.rollouts.types import GroupResult, Judgement, Trajectory
from rlds_jax.tasks.base import EpisodeError, Item, TaskUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")


class AllRolloutsDropped(RuntimeError):
    """No rollout of a step survived: this is a broken run, not a few bad rows."""


async def run_groups(
    context: RolloutContext, items: Sequence[Item], step: int, slots: Sequence[int] | None = None
) -> list[GroupResult]:
    """All groups of a step, concurrently.

    Args:
      items: one per group; an item may occur twice.
      step: enters uids and seeds.
      slots: indices of the items to play, where several hosts share a step; None for all.

    Returns:
      One result per item that was played, in their order.

    Raises:
      AllRolloutsDropped: every rollout failed; the cause is the first failure.
      TaskUnavailable: the task cannot go on.
    """
    slots = range(len(items)) if slots is None else slots
    groups = [_Group(context, items[slot], step, slot) for slot in slots]
    unavailable = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(group.run()) for group in groups]
    except* TaskUnavailable as raised:  # whatever is raised in here comes out in a group
        unavailable = raised.exceptions[0]
    if unavailable is not None:
        raise unavailable
    results = [task.result() for task in running]
    failures = [failure for group in groups for failure in group.failures]
    if failures and not any(result.trajectories for result in results):
        raise AllRolloutsDropped(
            f"step {step}: all rollouts were dropped; the first with: {failures[0]!r}"
        ) from failures[0]
    return results


def retry_candidates(
    originals: Sequence[Trajectory], budget: int, fraction: float, seed: int
) -> list[Trajectory]:
    """Failures to retry: lowest reward first, ties in a seeded order.

    Their number is min(budget, ceil(fraction * number of failures)).
    """
    failures = [t for t in originals if not t.success]
    order = np.random.default_rng(seed).permutation(len(failures))
    ranked = sorted((failures[i] for i in order), key=lambda t: t.reward)
    return ranked[: min(budget, math.ceil(fraction * len(failures)))]


def best_sibling(original: Trajectory, originals: Sequence[Trajectory]) -> Trajectory | None:
    """The original of highest reward, the first of several, if it did better than this one."""
    best = max(originals, key=lambda t: t.reward)
    return best if best.reward > original.reward else None


class _Group:
    """One prompt's rollouts; what fails is counted in `events` and kept in `failures`."""

    def __init__(self, context: RolloutContext, item: Item, step: int, slot: int):
        self.context = context
        self.config = context.config
        self.item = item
        self.keys = [RolloutKey(step, slot, i) for i in range(self.config.group_size)]
        self.events: Counter[str] = Counter()
        self.judgements: dict[tuple[RolloutKey, int], Judgement] = {}
        self.failures: list[Exception] = []

    async def run(self) -> GroupResult:
        GROUP.set(self.keys[0].group)  # of this group's own task
        played = await asyncio.gather(*(self.original(key) for key in self.keys))
        originals = {k: t for k, t in zip(self.keys, played, strict=True) if t is not None}
        retries = await self.retries(originals) if self.config.reflects and originals else []
        return GroupResult(
            uid=self.keys[0].group,
            trajectories=(*originals.values(), *retries),
            judgements=tuple(self.judgements[k] for k in sorted(self.judgements)),
            events=self.events,
        )

    async def original(self, key: RolloutKey) -> Trajectory | None:
        played = run_original(self.context, key, self.item, self.events)
        trajectory = await self.attempt(played, "dropped")
        if trajectory is None or not self.config.grades_originals:
            return trajectory
        return await self.graded(key, trajectory)

    async def retries(self, originals: dict[RolloutKey, Trajectory]) -> list[Trajectory]:
        chosen = retry_candidates(
            list(originals.values()),
            self.config.retry_budget,
            self.config.retry_fraction,
            self.context.seed(self.keys[0], "candidates"),
        )
        uids = {trajectory.uid for trajectory in chosen}
        keys = [key for key, trajectory in originals.items() if trajectory.uid in uids]
        self.events["retry_candidates"] += len(keys)
        retries = await asyncio.gather(*(self.retry(key, originals) for key in keys))
        return [trajectory for trajectory in retries if trajectory is not None]

    async def retry(
        self, key: RolloutKey, originals: dict[RolloutKey, Trajectory]
    ) -> Trajectory | None:
        """Reflects on one original and retries it."""
        original = originals[key]
        sibling = best_sibling(original, list(originals.values())) if self.config.contrast else None
        asked = reflect(self.context, key, original, sibling, self.events)
        answer = await self.attempt(asked, "reflection_invalid")
        if answer is None:
            return None
        reflection, self.judgements[key, 1] = answer
        if reflection is None:
            return None
        guidance = self.context.prompts.guidance_text(reflection.diagnosis, reflection.suggestion)
        start = reflection.retry_from
        played = run_retry(self.context, key, self.item, original, start, guidance, self.events)
        trajectory = await self.attempt(played, "retry_dropped")
        if trajectory is None or not self.config.grades_retries:
            return trajectory
        return await self.graded(key, trajectory)

    async def graded(self, key: RolloutKey, trajectory: Trajectory) -> Trajectory:
        """With grades where the grader's answer holds, else as it is."""
        answer = await self.attempt(grade(self.context, key, trajectory, self.events), "ungraded")
        if answer is None:
            return trajectory
        order = 0 if trajectory.parent is None else 2
        graded, self.judgements[key, order] = answer
        return graded

    async def attempt(self, work: Awaitable[T], event: str) -> T | None:
        """The result, or None after any exception, counted as "<event>/<reason>".

        METHOD section 4 asks for just that: whatever fails costs its row, never the others. Only
        a task that cannot go on ends them all.
        """
        (result,) = await asyncio.gather(work, return_exceptions=True)
        if not isinstance(result, BaseException):
            return result
        if not isinstance(result, Exception) or isinstance(result, TaskUnavailable):
            raise result
        reason = failure_reason(result)
        log.warning("group %s: %s/%s: %s", self.keys[0].group, event, reason, result)
        self.events[f"{event}/{reason}"] += 1
        self.failures.append(result)
        return None


def failure_reason(error: Exception) -> str:
    """What an exception is counted under: its own reason, or the name of its class."""
    if isinstance(error, RolloutDropped | Unparseable):
        return error.reason
    return "env_error" if isinstance(error, EpisodeError) else type(error).__name__
