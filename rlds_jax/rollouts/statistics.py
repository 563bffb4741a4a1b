"""Scalars and JSON records of a step's rollouts (METHOD section 2, Diagnostics)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlds_jax.rollouts.types import GroupResult, Trajectory
from rlds_jax.tasks.base import Subtask, Task

# Counted event -> metric of the same reasons.
_EVENTS = {
    "dropped": "rollout/dropped",
    "env_error": "rollout/env_error",
    "retry_dropped": "retry/dropped",
    "replay_diverged": "retry/replay_diverged",
    "retry_candidates": "retry/candidates",
    "reflection_invalid": "reflection/invalid",
    "ungraded": "grader/ungraded",
    "trajectory_cut": "judge_prompt/trajectory_cut",
}


def rollout_metrics(
    results: Sequence[GroupResult], task: Task, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of one step's rollouts; one that has nothing to average is absent.

    Args:
      seconds: by phase, from `PhaseClock.seconds`.
    """
    rows = [t for result in results for t in result.trajectories]
    originals = [t for t in rows if t.parent is None]
    retries = [t for t in rows if t.parent is not None]
    events = sum((result.events for result in results), Counter())
    metrics = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    metrics |= _event_counts(events)
    metrics |= _original_metrics(originals)
    metrics |= _environment_metrics(originals, task)
    metrics |= _judge_metrics(rows, results, events)
    metrics |= _retry_metrics(originals, retries, seconds)
    metrics |= _subtask_metrics(rows, task)
    return metrics


def _original_metrics(originals: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [t.reward for t in originals]
    lengths = [len(t.tokens) - t.prompt_length for t in originals]
    metrics = {
        "rollout/count": float(len(originals)),
        **_mean("critic/rewards/mean", rewards),
        **_mean("rollout/success_rate", [t.success for t in originals]),
        **_mean("prompt_length/mean", [t.prompt_length for t in originals]),
        **_mean("response_length/mean", lengths),
        **_mean("response_length/sampled", [t.sampled_tokens for t in originals]),
        **_mean("num_turns/mean", [len(t.turns) for t in originals]),
    }
    if originals:
        metrics["critic/rewards/max"], metrics["critic/rewards/min"] = max(rewards), min(rewards)
        metrics["response_length/max"] = float(max(lengths))
    for cause, count in Counter(t.ended_by for t in originals).items():
        metrics[f"rollout/ended_by/{cause}"] = count / len(originals)
    return metrics


def _environment_metrics(originals: Sequence[Trajectory], task: Task) -> dict[str, float]:
    """Means of the environments' scalars; names without a prefix get the task's."""
    by_name = defaultdict(list)
    for trajectory in originals:
        for name, value in trajectory.metrics.items():
            by_name[name if "/" in name else f"{task.name}/{name}"].append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}


def _judge_metrics(
    rows: Sequence[Trajectory], results: Sequence[GroupResult], events: Counter[str]
) -> dict[str, float]:
    graded = sum(t.grades is not None for t in rows)
    judgements = [j for result in results for j in result.judgements]
    valid = sum(j.role == "reflector" and j.error is None for j in judgements)
    metrics = {}
    for name, good, bad in (
        ("grader/parse_rate", graded, _total(events, "ungraded")),
        ("reflection/valid_rate", valid, _total(events, "reflection_invalid")),
    ):
        if good + bad:
            metrics[name] = good / (good + bad)
    for role in ("grader", "reflector"):
        answers = [j for j in judgements if j.role == role]
        metrics[f"{role}/count"] = float(len(answers))
        metrics |= _mean(f"{role}/prompt_length", [len(j.prompt_ids) for j in answers])
        metrics |= _mean(f"{role}/response_length", [len(j.ids) for j in answers])
    return metrics


def _retry_metrics(
    originals: Sequence[Trajectory], retries: Sequence[Trajectory], seconds: Mapping[str, float]
) -> dict[str, float]:
    by_uid = {t.uid: t for t in originals}
    deltas = [t.reward - by_uid[t.parent].reward for t in retries if t.parent]
    metrics = {
        "retry/count": float(len(retries)),
        **_mean("retry/rewards/mean", [t.reward for t in retries]),
        **_mean("retry/success_rate", [t.success for t in retries]),
        **_mean("retry/delta/mean", deltas),
        **_mean("retry/improved_rate", [delta > 0 for delta in deltas]),
        **_mean("retry/from_step/mean", [t.retry_from or 0 for t in retries]),
    }
    if originals and retries:
        per_original = sum(t.sampled_tokens for t in originals) / len(originals)
        per_retry = sum(t.sampled_tokens for t in retries) / len(retries)
        metrics["retry/gen_ratio"] = per_retry / max(per_original, 1.0)
    if seconds.get("gen") and "retry" in seconds:
        metrics["retry/gen_time_ratio"] = seconds["retry"] / seconds["gen"]
    return metrics


def _subtask_metrics(rows: Sequence[Trajectory], task: Task) -> dict[str, float]:
    graded = [
        (t, t.grades, t.pivots) for t in rows if t.grades is not None and t.pivots is not None
    ]
    grades_of = {t.uid: grades for t, grades, _ in graded}
    metrics: dict[str, float] = {}
    for k, subtask in enumerate(task.subtasks):
        prefix = f"subtask/{task.name}/{subtask.name}"
        deltas = []
        for trajectory, grades, _ in graded:
            before = grades_of.get(trajectory.parent or "")
            if before is not None:
                deltas.append(_difference(grades[k], before[k]))
        metrics |= _mean(f"{prefix}/grade", [grades[k] for _, grades, _ in graded])
        metrics |= _mean(f"{prefix}/pivot_step", [pivots[k] for _, _, pivots in graded])
        metrics |= _mean(f"{prefix}/retry_grade_delta", deltas)
    return metrics


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _mean(name: str, values: Iterable[float | None]) -> dict[str, float]:
    """The mean of the values there are, under `name`; nothing when there are none."""
    present = [float(value) for value in values if value is not None]
    return {name: math.fsum(present) / len(present)} if present else {}


def _total(events: Counter[str], event: str) -> int:
    return sum(count for name, count in events.items() if name.split("/")[0] == event)


def _event_counts(events: Counter[str]) -> dict[str, float]:
    """Each event's total, 0 included, and its count by reason."""
    metrics = {metric: float(_total(events, event)) for event, metric in _EVENTS.items()}
    for name, count in events.items():
        event, _, reason = name.partition("/")
        if reason:
            metrics[f"{_EVENTS[event]}/{reason}"] = float(count)
    return metrics


def trajectory_record(
    trajectory: Trajectory, result: GroupResult, subtasks: Sequence[Subtask]
) -> dict[str, Any]:
    """One line of rollouts.jsonl: the rollout as text, with what its judges said.

    Args:
      result: the group it belongs to.
    """
    said = {j.role: j for j in result.judgements if j.trajectory == trajectory.uid}
    names = [subtask.name for subtask in subtasks]
    record: dict[str, Any] = {
        "uid": trajectory.uid,
        "group": trajectory.group,
        "item": trajectory.item_id,
        "parent": trajectory.parent,
        "retry_from": trajectory.retry_from,
        "guidance": trajectory.guidance,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "ended_by": trajectory.ended_by,
        "temperature": trajectory.temperature,
        "prompt_tokens": trajectory.prompt_length,
        "response_tokens": len(trajectory.tokens) - trajectory.prompt_length,
        "sampled_tokens": trajectory.sampled_tokens,
        "initial_observation": trajectory.initial_observation,
        "turns": [turn._asdict() for turn in trajectory.turns],
        "turn_tokens": [
            trajectory.tokens[trajectory.turn_ids == turn].tolist()
            for turn in range(len(trajectory.turns))
        ],
        "grades": _by_name(names, trajectory.grades),
        "pivots": _by_name(names, trajectory.pivots),
        "metrics": dict(trajectory.metrics),
    }
    for role, judgement in said.items():
        record[role] = {"text": judgement.text, "error": judgement.error}
    return record


def _by_name(names: Sequence[str], values: Sequence[int | None] | None):
    return None if values is None else dict(zip(names, values, strict=True))
