"""Measures the tiny ScienceWorld policy in its three roles, with the real engine and simulator.

    python -m experiments.tiny_policy.scienceworld.evaluate --model=rlds_jax/models/tiny_scienceworld

Every validation item is played twice; every failure is reflected on and retried, and the item's
other attempt tells what a retry without guidance would do. Grades and pivots are compared with the
scripted grader's; beside the agreement stands that of always giving the commonest true answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np

from configs.scienceworld import get_config
from experiments.tiny_policy.scienceworld import critics
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.demonstrations import targets, tiny_task
from rlds_jax.models import weights
from rlds_jax.rollouts.chat import ChatFormat
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.engines.local import LocalEngine
from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.types import GroupResult, Trajectory
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld.task import SUBTASKS, ScienceWorld


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--items", type=int, default=60, help="validation items")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print the texts of so many items")
    args = parser.parse_args()
    task = tiny_task()
    items = [i for i in task.items("validation") if i.id in targets()][: args.items]
    try:
        groups = rollouts(args.model, task, items, args.seed)
    finally:
        task.close()
    for group in groups[: args.show]:
        print_texts(group)
    print(json.dumps(quality(groups), indent=2))


def rollouts(
    model: Path, task: ScienceWorld, items: Sequence[Item], seed: int
) -> list[GroupResult]:
    """Two originals per item, their grades, and the retry of every failure."""
    config = get_config("tiny")
    every_failure = {"group_size": 2, "retry_budget": 2, "retry_fraction": 1.0}
    rollout = RolloutConfig(**{**config.rollout, **every_failure})
    model_config, params = weights.load(model)
    engine = LocalEngine(params, model_config, **config.engine)
    chat = ChatFormat.from_directory(model, (task.observation_role,))
    context = RolloutContext(task, engine, chat, Prompts(), rollout, run_seed=seed)
    try:
        return asyncio.run(run_groups(context, items, step=0))
    finally:
        engine.close()


def quality(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Success, score, validity and agreement with the scripted grader."""
    trajectories = [t for g in groups for t in g.trajectories]
    originals = [t for t in trajectories if t.parent is None]
    retries = [t for t in trajectories if t.parent is not None]
    judged = [j for g in groups for j in g.judgements]
    pairs = [
        (t, other)
        for t, other in itertools.permutations(originals, 2)
        if t.group == other.group and not other.success
    ]
    measured = {
        "originals": float(len(originals)),
        "retries": float(len(retries)),
        "success": _mean(t.success for t in originals),
        "score": _mean(t.metrics["score"] for t in originals if t.metrics),
        "turns": _mean(len(t.turns) for t in originals),
        "rejected_turns": _mean(t.metrics["rejected_turns"] for t in originals if t.metrics),
        "success_where_other_failed": _mean(t.success for t, _ in pairs),
        "score_where_other_failed": _mean(t.metrics["score"] for t, _ in pairs if t.metrics),
        "retry_success": _mean(t.success for t in retries),
        "retry_score": _mean(t.metrics["score"] for t in retries if t.metrics),
        "grader_parsed": _mean(j.error is None for j in judged if j.role == "grader"),
        "reflector_valid": _mean(j.error is None for j in judged if j.role == "reflector"),
    }
    truth = [(t, episode(t)) for t in trajectories if t.turns]
    retried = {t.parent: t.retry_from for t in retries}
    measured["retry_step_agreement"] = _mean(
        retried[t.uid] == critics.retry_step(e) for t, e in truth if t.uid in retried
    )
    return measured | agreement(truth)


def episode(trajectory: Trajectory) -> Episode:
    """What the scripted grader needs of a trajectory."""
    return Episode(
        targets()[trajectory.item_id],
        trajectory.initial_observation,
        trajectory.turns,
        trajectory.reward,
        trajectory.ended_by,
    )


def agreement(truth: Sequence[tuple[Trajectory, Episode]]) -> dict[str, float]:
    """Per subtask: shares of equal scores and of equal pivots, and those of the commonest answer."""
    graded = [(t.grades, t.pivots, critics.grade(e)) for t, e in truth if t.grades and t.pivots]
    measured = {}
    for k, subtask in enumerate(SUBTASKS):
        for what, given in (
            ("score", [(scores[k], true[k].score) for scores, _, true in graded]),
            ("pivot", [(pivots[k], true[k].pivot) for _, pivots, true in graded]),
        ):
            name = f"{subtask.name}/{what}"
            measured[name] = _mean(said == true for said, true in given)
            measured[f"{name}_commonest"] = _commonest(true for _, true in given)
    return measured


def print_texts(group: GroupResult) -> None:
    for trajectory in group.trajectories:
        print(f"== {trajectory.uid} from {trajectory.retry_from}: {trajectory.ended_by}")
        print(trajectory.initial_observation)
        for turn in trajectory.turns:
            print(turn.action, turn.observation, sep="\n")
    for judgement in group.judgements:
        print(f"== {judgement.role} of {judgement.trajectory}: {judgement.error}", judgement.text)


def _commonest(values: Iterable[Hashable]) -> float:
    counts = Counter(values)
    return round(max(counts.values()) / counts.total(), 3) if counts else float("nan")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return round(float(np.mean(numbers)), 3) if numbers else float("nan")


if __name__ == "__main__":
    main()
