"""Measures a tiny policy in its three roles with the real engine and the real rollouts.

    python -m experiments.tiny_policy.evaluate --task=frozenlake

Every validation item is played twice; every failure is reflected on and retried, and the item's
other attempt tells what a retry without guidance would do. Grades and pivots are compared with the
scripted grader's, which follow from the true log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tiny_policy.recipe import TASKS, Recipe, bundled, load
from rlds_jax.models import weights
from rlds_jax.play import make_context, make_task
from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.types import GroupResult, Trajectory
from rlds_jax.tasks.base import Item, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="frozenlake")
    parser.add_argument("--model", type=Path, help="model directory; the bundled one")
    parser.add_argument("--items", type=int, default=300, help="validation items")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print the texts of so many items")
    args = parser.parse_args()
    recipe = load(args.task)
    task = make_task(recipe.config().task)
    items = task.items("validation")[: args.items]
    groups = rollouts(recipe, args.model or bundled(recipe), task, items, args.seed)
    for group in groups[: args.show]:
        print_texts(group)
    print(json.dumps(quality(recipe, task, items, groups), indent=2))
    task.close()


def rollouts(
    recipe: Recipe, model: Path, task: Task, items: Sequence[Item], seed: int
) -> list[GroupResult]:
    """Two originals per item, their grades, and the retry of every failure."""
    config = recipe.config().unlock()
    config.rollout.update(group_size=2, retry_budget=2, retry_fraction=1.0)
    config.seed = seed
    context = make_context(config, task, model, *weights.load(model))
    try:
        return asyncio.run(run_groups(context, items, step=0))
    finally:
        context.engine.close()


def quality(
    recipe: Recipe, task: Task, items: Sequence[Item], groups: Sequence[GroupResult]
) -> dict[str, float]:
    """Success, validity and agreement with the true log, as shares of what they count."""
    pairs = [(i, t) for i, g in zip(items, groups, strict=True) for t in g.trajectories]
    originals = [t for _, t in pairs if t.parent is None]
    retries = [t for _, t in pairs if t.parent is not None]
    judged = [j for g in groups for j in g.judgements]
    measured = {
        "success": _mean(t.success for t in originals),
        "success_where_other_failed": _mean(
            t.success
            for t, other in itertools.permutations(originals, 2)
            if t.group == other.group and not other.success
        ),
        "retry_success": _mean(t.success for t in retries),
        "retry_success_from_0": _mean(t.success for t in retries if t.retry_from == 0),
        "retry_success_from_later": _mean(t.success for t in retries if t.retry_from),
        "grader_parsed": _mean(j.error is None for j in judged if j.role == "grader"),
        "reflector_valid": _mean(j.error is None for j in judged if j.role == "reflector"),
        "turns": _mean(len(t.turns) for t in originals),
    }
    for name in sorted({name for t in originals for name in t.metrics}):
        measured[name] = _mean(t.metrics[name] for t in originals if name in t.metrics)
    truth = [(t, recipe.replay(task, item, t)) for item, t in pairs]
    retried = {t.parent: t.retry_from for t in retries}
    measured["retry_step_agreement"] = _mean(
        retried[t.uid] == recipe.critics.retry_step(e) for t, e in truth if t.uid in retried
    )
    return measured | agreement(recipe, task, truth)


def agreement(
    recipe: Recipe, task: Task, truth: Sequence[tuple[Trajectory, Any]]
) -> dict[str, float]:
    """Per subtask: shares of equal scores and of equal pivots."""
    graded = [
        (t.grades, t.pivots, recipe.critics.grade(e)) for t, e in truth if t.grades and t.pivots
    ]
    measured = {}
    for k, subtask in enumerate(task.subtasks):
        given = [(scores[k], pivots[k], true[k]) for scores, pivots, true in graded]
        name = subtask.name
        measured[f"{name}/score"] = _mean(score == true.score for score, _, true in given)
        measured[f"{name}/pivot"] = _mean(pivot == true.pivot for _, pivot, true in given)
    return measured


def print_texts(group: GroupResult) -> None:
    for trajectory in group.trajectories:
        print(f"== {trajectory.uid} from {trajectory.retry_from}: {trajectory.ended_by}")
        print(trajectory.initial_observation)
        for turn in trajectory.turns:
            print(turn.action, turn.observation, sep="\n")
    for judgement in group.judgements:
        print(f"== {judgement.role} of {judgement.trajectory}: {judgement.error}", judgement.text)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return round(float(np.mean(numbers)), 3) if numbers else float("nan")


if __name__ == "__main__":
    main()
