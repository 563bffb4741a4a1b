"""The policy grades a rollout: a score and a pivot step per subtask (METHOD sections 1 and 4)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlds_jax.rollouts.context import RolloutContext, RolloutKey
from rlds_jax.rollouts.judging import Unparseable, ask, find_json, integer
from rlds_jax.rollouts.prompts import grader_schema
from rlds_jax.rollouts.types import Judgement, Trajectory

_FIELDS = ("trajectory_outcome", "root_cause_analysis", "sub_task_grades")


class Grades(NamedTuple):
    """[K] scores 1..5 and [K] pivot turns; None where missing or null."""

    scores: tuple[int | None, ...]
    pivots: tuple[int | None, ...]


def parse_grades(text: str, names: Sequence[str], turns: int) -> Grades:
    """Reads a grader's answer: strict in meaning, lenient in form.

    Args:
      names: the task's subtasks; matched after strip and case-fold, the first entry of a name
        counts, unknown names are ignored.
      turns: turns of the episode; a later pivot is clamped to its last, a negative one is null.

    Raises:
      Unparseable: "not_json", "no_grade_list", or "too_few_scores" when fewer than half of the
        subtasks have a score. The rollout is then ungraded.
    """
    entries = find_json(text, _FIELDS).get("sub_task_grades")
    if not isinstance(entries, list):
        raise Unparseable("no_grade_list")
    by_name: dict[str, dict] = {}
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("sub_task"), str):
            by_name.setdefault(_fold(entry["sub_task"]), entry)
    found = [by_name.get(_fold(name), {}) for name in names]
    scores = tuple(_score(entry.get("score")) for entry in found)
    if 2 * sum(score is not None for score in scores) < len(names):
        raise Unparseable("too_few_scores")
    return Grades(scores, tuple(_pivot(entry.get("pivot_step"), turns) for entry in found))


def _fold(name: str) -> str:
    return name.strip().casefold()


def _score(value: object) -> int | None:
    score = integer(value)
    return score if score is not None and 1 <= score <= 5 else None


def _pivot(value: object, turns: int) -> int | None:
    pivot = integer(value)
    return None if pivot is None or pivot < 0 else min(pivot, turns - 1)


async def grade(
    context: RolloutContext, key: RolloutKey, trajectory: Trajectory, events: Counter[str]
) -> tuple[Trajectory, Judgement]:
    """The trajectory with its grades, or as it was when the answer does not parse.

    Args:
      events: counts "trajectory_cut/grader" and "ungraded/<reason>".

    Raises:
      Unparseable: "prompt_too_long"; there is no judgement then.
    """
    subtasks = context.task.subtasks
    turns = len(trajectory.turns)
    judgement, cut = await ask(
        context,
        key,
        trajectory,
        role="grader",
        messages=lambda cap: context.prompts.grader_messages(subtasks, trajectory, cap),
        episodes=(trajectory,),
        temperature=context.config.grader_temperature,
        schema=grader_schema(subtasks, turns),
        events=events,
    )
    try:
        grades = parse_grades(judgement.text, [s.name for s in subtasks], turns)
    except Unparseable as error:
        reason = "truncated" if cut else error.reason
        events[f"ungraded/{reason}"] += 1
        return trajectory, dataclasses.replace(judgement, error=reason)
    graded = dataclasses.replace(trajectory, grades=grades.scores, pivots=grades.pivots)
    return graded, judgement
