"""The policy reflects on a failure: what went wrong and from where to retry (METHOD section 4)."""

from __future__ import annotations

import dataclasses
from collections import Counter

from rlds_jax.rollouts.context import RolloutContext, RolloutKey
from rlds_jax.rollouts.judging import Unparseable, ask, find_json
from rlds_jax.rollouts.prompts import reflector_schema
from rlds_jax.rollouts.types import Judgement, Trajectory

_TEXTS = (
    "trajectory_summary",
    "root_cause_analysis",
    "trajectory_outcome",
    "improvement_suggestion",
)


@dataclasses.dataclass(frozen=True)
class Reflection:
    """A valid reflection.

    Attributes:
      diagnosis: its root cause analysis.
      suggestion: what to do instead.
      retry_from: first turn of the retry, in [0, turns).
    """

    diagnosis: str
    suggestion: str
    retry_from: int


def parse_reflection(text: str, turns: int) -> Reflection:
    """Reads a reflector's answer on an episode of `turns` turns.

    Raises:
      Unparseable: "not_json", "missing_<field>" (absent, or an empty text), "outcome_success",
        "retry_from_step_type" (a bool, float or string) or "retry_from_step_range".
    """
    report = find_json(text, (*_TEXTS, "retry_from_step"))
    for field in _TEXTS:
        if not isinstance(report.get(field), str) or not report[field].strip():
            raise Unparseable(f"missing_{field}")
    if report["trajectory_outcome"].strip().casefold() == "success":
        raise Unparseable("outcome_success")
    step = report.get("retry_from_step")
    if step is None:
        raise Unparseable("missing_retry_from_step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise Unparseable("retry_from_step_type")
    if not 0 <= step < turns:
        raise Unparseable("retry_from_step_range")
    return Reflection(report["root_cause_analysis"], report["improvement_suggestion"], step)


async def reflect(
    context: RolloutContext,
    key: RolloutKey,
    trajectory: Trajectory,
    sibling: Trajectory | None,
    events: Counter[str],
) -> tuple[Reflection | None, Judgement]:
    """A reflection on a failed original; None where it is not valid, which means no retry.

    Args:
      sibling: a better original of the group for the contrastive section, or None.
      events: counts "trajectory_cut/reflector" and "reflection_invalid/<reason>".

    Raises:
      Unparseable: "prompt_too_long"; there is no judgement then.
    """
    config = context.config
    turns = len(trajectory.turns)
    judgement, cut = await ask(
        context,
        key,
        trajectory,
        role="reflector",
        messages=lambda cap: context.prompts.reflector_messages(
            context.task.subtasks,
            trajectory,
            grades=trajectory.grades,
            pivots=trajectory.pivots,
            memory=config.memory,
            contrast=sibling,
            cap=cap,
        ),
        episodes=(trajectory,) if sibling is None else (trajectory, sibling),
        temperature=config.reflector_temperature,
        schema=reflector_schema(turns),
        events=events,
    )
    try:
        return parse_reflection(judgement.text, turns), judgement
    except Unparseable as error:
        reason = "truncated" if cut else error.reason
        events[f"reflection_invalid/{reason}"] += 1
        return None, dataclasses.replace(judgement, error=reason)
