"""What the scripted demonstrations of all tasks share: playing an episode, and writing it down."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlds_jax.rollouts.prompts import EpisodeText, Prompts
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Environment, Task

Transcript = dict[str, Any]  # "messages", and "tools" where the task has any


@dataclasses.dataclass(frozen=True)
class Grade:
    """What the scripted grader says of one subtask."""

    score: int
    pivot: int | None
    assessment: str


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode as the prompts show it (an `EpisodeText`)."""

    initial_observation: str
    turns: tuple[Turn, ...]
    reward: float
    success: bool
    ended_by: str


class Critics(Protocol):
    """A task's scripted grader and reflector: its module `critics`, on episodes of its own."""

    def grade(self, episode: Any, /) -> Sequence[Grade]:
        """In the order of the subtasks."""
        ...

    def root_cause(self, episode: Any, /) -> str:
        """The grader's."""
        ...

    def diagnosis(self, episode: Any, /) -> str:
        """The reflector's."""
        ...

    def suggestion(self, episode: Any, /) -> str: ...

    def summary(self, episode: Any, /) -> str: ...

    def retry_step(self, episode: Any, /) -> int:
        """Where the reflector sends a failure back to."""
        ...


@dataclasses.dataclass(frozen=True)
class Shares:
    """How often a failure is reported on, and how.

    Attributes:
      reflected: chance that a failure gives a reflector transcript.
      ungraded: share of them without the grades section.
      from_start: share of guided episodes that restart at turn 0 wherever they went wrong.
    """

    reflected: float
    ungraded: float
    from_start: float


def play(
    environment: Environment,
    act: Callable[[str, Sequence[Turn]], str],
    prefix: Sequence[Turn] = (),
) -> Played:
    """`play_async`, where no other is to be played meanwhile."""
    return asyncio.run(play_async(environment, act, prefix))


async def play_async(
    environment: Environment,
    act: Callable[[str, Sequence[Turn]], str],
    prefix: Sequence[Turn] = (),
) -> Played:
    """Plays an episode to its end.

    Args:
      act: the text of the next turn, given the first observation and the turns before it.
      prefix: turns whose actions are played first.
    """
    try:
        initial = await environment.reset()
        turns: list[Turn] = []
        result = None
        while result is None or not result.done:
            text = prefix[len(turns)].action if len(turns) < len(prefix) else act(initial, turns)
            result = await environment.step(text)
            turns.append(Turn(text, result.observation))
    finally:
        await environment.close()
    assert result.ended_by is not None
    return Played(initial, tuple(turns), result.reward, result.success, result.ended_by)


class Scribe:
    """Writes episodes down as transcripts of the three roles, with the real prompts."""

    def __init__(self, task: Task, critics: Critics):
        self._task = task
        self._critics = critics
        self._prompts = Prompts()

    def guidance(self, diagnosis: str, suggestion: str) -> str:
        return self._prompts.guidance_text(diagnosis, suggestion)

    def actor(self, episode: EpisodeText, step: int = 0, guidance: str | None = None) -> Transcript:
        """The episode's turns; with `guidance`, those of a retry from `step`."""
        in_system = guidance if step == 0 else None
        messages = [
            _message("system", self._task.system_prompt(in_system)),
            _message("user", episode.initial_observation),
        ]
        for i, turn in enumerate(episode.turns):
            messages.append(_message("assistant", turn.action))
            if guidance is not None and i + 1 == step:
                messages.append(_message("system", guidance))
            messages.append(_message(self._task.observation_role, turn.observation))
        transcript: Transcript = {"messages": messages[:-1]}
        if self._task.tools:
            transcript["tools"] = list(self._task.tools)
        return transcript

    def grader(self, episode: Any) -> Transcript:
        prompt = self._prompts.grader_messages(self._task.subtasks, episode)
        answer = {
            "trajectory_outcome": episode.outcome,
            "root_cause_analysis": self._critics.root_cause(episode),
            "sub_task_grades": [
                {
                    "sub_task": subtask.name,
                    "score": grade.score,
                    "assessment": grade.assessment,
                    "pivot_step": grade.pivot,
                }
                for subtask, grade in zip(
                    self._task.subtasks, self._critics.grade(episode), strict=True
                )
            ],
        }
        return {
            "messages": [*prompt, _message("assistant", json.dumps(answer, ensure_ascii=False))]
        }

    def failure(
        self, episode: Any, shares: Shares, rng: random.Random
    ) -> tuple[list[Transcript], int]:
        """The reports on a failure, at most one, and the step to retry from."""
        reports = []
        if rng.random() < shares.reflected:
            reports.append(self.reflector(episode, graded=rng.random() >= shares.ungraded))
        from_start = rng.random() < shares.from_start
        return reports, 0 if from_start else self._critics.retry_step(episode)

    def reflector(self, episode: Any, graded: bool) -> Transcript:
        """The report on a failure; the reflector is shown its grades if `graded`."""
        grades = self._critics.grade(episode) if graded else None
        prompt = self._prompts.reflector_messages(
            self._task.subtasks,
            episode,
            grades=None if grades is None else [grade.score for grade in grades],
            pivots=None if grades is None else [grade.pivot for grade in grades],
        )
        answer = {
            "trajectory_summary": self._critics.summary(episode),
            "root_cause_analysis": self._critics.diagnosis(episode),
            "trajectory_outcome": "failure",
            "improvement_suggestion": self._critics.suggestion(episode),
            "retry_from_step": self._critics.retry_step(episode),
        }
        return {
            "messages": [*prompt, _message("assistant", json.dumps(answer, ensure_ascii=False))]
        }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
