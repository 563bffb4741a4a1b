"""The scripted grader and reflector: their answers follow from what each turn could know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from experiments.tiny_policy.hotpotqa.actor import (
    Plan,
    answer_of,
    passages,
    plan,
    query_of,
    question_of,
)
from experiments.tiny_policy.transcripts import Grade, Played
from rlds_jax.rollouts.types import Turn

Kind = Literal["good", "verbatim", "repeat", "astray", "broken", "early", "wrong", "right"]

_FAULTS: dict[Kind, str] = {
    "verbatim": "searched the question itself",
    "repeat": "asked the same again",
    "astray": "misread the results",
    "broken": "held no valid call and no answer",
    "early": "answered before all was known",
    "wrong": "drew the wrong answer",
}


@dataclasses.dataclass(frozen=True)
class Episode(Played):
    """A played episode, and per turn its kind and where the question stood before it."""

    kinds: tuple[Kind, ...]
    plans: tuple[Plan, ...]

    @classmethod
    def of(cls, played: Played) -> Episode:
        question = question_of(played.initial_observation)
        before = [played.turns[:i] for i in range(len(played.turns))]
        plans = tuple(plan(question, passages(turns)) for turns in before)
        kinds = tuple(
            _kind(turn, turns, known, question, played.success)
            for turn, turns, known in zip(played.turns, before, plans, strict=True)
        )
        return cls(**vars(played), kinds=kinds, plans=plans)

    @property
    def outcome(self) -> str:
        if not self.success:
            return "failure"
        return "success" if fault(self) is None else "success_but_inefficient"


def _kind(turn: Turn, before: tuple[Turn, ...], known: Plan, question: str, success: bool) -> Kind:
    answer = answer_of(turn.action)
    if answer is not None:
        if known.answer is None:
            return "early"
        return "right" if success else "wrong"
    query = query_of(turn.action)
    if query is None:
        return "broken"
    if query in [query_of(earlier.action) for earlier in before]:
        return "repeat"
    if query == known.target:
        return "good"
    return "verbatim" if query == question else "astray"


def fault(episode: Episode) -> int | None:
    """The first step that went wrong."""
    return _first(episode, lambda kind: kind in _FAULTS)


def retry_step(episode: Episode) -> int:
    """Where a failure went wrong."""
    found = fault(episode)
    return len(episode.turns) - 1 if found is None else found


def root_cause(episode: Episode) -> str:
    """One sentence on the step that decided a failure, or lost a turn."""
    step = fault(episode)
    if step is None:
        return "Every search found what the next step needed."
    return f"Step {step} {_FAULTS[episode.kinds[step]]}."


diagnosis = root_cause  # the reflector says no more


def summary(episode: Episode) -> str:
    return f"{len(episode.turns)} steps, ended by {episode.ended_by}."


def suggestion(episode: Episode, target: str | None = None) -> str:
    """What to do at `retry_step`: search for what is missing (or `target`), or answer."""
    step = retry_step(episode)
    known = episode.plans[step]
    wanted = target or known.target
    if wanted is None:
        return f"At step {step} answer from {known.note}: {known.answer}."
    return f"At step {step} search for {wanted}, then read on before answering."


def grade(episode: Episode) -> tuple[Grade, ...]:
    """A grade per subtask, in the order of the task's."""
    return (
        _search_planning(episode),
        _evidence_extraction(episode),
        _search_iteration(episode),
        _answer_grounding(episode),
    )


def _first(episode: Episode, holds: Callable[[Kind], bool]) -> int | None:
    return next((i for i, kind in enumerate(episode.kinds) if holds(kind)), None)


def _search_planning(episode: Episode) -> Grade:
    first = episode.kinds[0]
    if first == "good":
        return Grade(5, 0 if episode.success else None, "focused query")
    score = 2 if first == "verbatim" else 1
    found = _first(episode, lambda kind: kind == "good")
    return Grade(score, found if episode.success else 0, "unfocused start")


def _evidence_extraction(episode: Episode) -> Grade:
    bad = _first(episode, lambda kind: kind in ("astray", "wrong"))
    if bad is None:
        used = 1 if episode.success and len(episode.turns) > 1 else None
        return Grade(5, used, "read what was found")
    return Grade(2, bad, "misread results")


def _search_iteration(episode: Episode) -> Grade:
    lost = sum(kind in ("repeat", "broken", "early") for kind in episode.kinds[1:])
    good = [i for i, kind in enumerate(episode.kinds) if kind == "good"]
    if not lost:
        return Grade(5, good[-1] if episode.success and good else None, "each query new")
    bad = 1 + [kind in ("repeat", "broken", "early") for kind in episode.kinds[1:]].index(True)
    return Grade((3, 2, 1)[min(lost, 3) - 1], bad, "stalled or stopped early")


def _answer_grounding(episode: Episode) -> Grade:
    last = len(episode.turns) - 1
    kind = episode.kinds[last]
    if kind == "right":
        return Grade(5, last, "answer from results")
    if kind == "wrong":
        return Grade(3, None, "results misused")
    return Grade(1, last, "answer without evidence")
