"""What the scripted demonstrations of all tasks share: playing an episode, and writing it down."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

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


def play(
    environment: Environment,
    act: Callable[[Sequence[Turn]], str],
    prefix: Sequence[Turn] = (),
) -> Played:
    """Plays an episode to its end.

    Args:
      act: the text of the next turn, given those before it.
      prefix: turns whose actions are played first.
    """

    async def run() -> Played:
        initial = await environment.reset()
        turns: list[Turn] = []
        result = None
        while result is None or not result.done:
            text = prefix[len(turns)].action if len(turns) < len(prefix) else act(turns)
            result = await environment.step(text)
            turns.append(Turn(text, result.observation))
        await environment.close()
        assert result.ended_by is not None
        return Played(initial, tuple(turns), result.reward, result.success, result.ended_by)

    return asyncio.run(run())


class Scribe:
    """Writes episodes down as transcripts of the three roles, with the real prompts."""

    def __init__(self, task: Task):
        self._task = task
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

    def grader(
        self, episode: EpisodeText, outcome: str, root_cause: str, grades: Sequence[Grade]
    ) -> Transcript:
        prompt = self._prompts.grader_messages(self._task.subtasks, episode)
        answer = {
            "trajectory_outcome": outcome,
            "root_cause_analysis": root_cause,
            "sub_task_grades": [
                {
                    "sub_task": subtask.name,
                    "score": grade.score,
                    "assessment": grade.assessment,
                    "pivot_step": grade.pivot,
                }
                for subtask, grade in zip(self._task.subtasks, grades, strict=True)
            ],
        }
        return {"messages": [*prompt, _message("assistant", json.dumps(answer))]}

    def reflector(
        self,
        episode: EpisodeText,
        *,
        summary: str,
        diagnosis: str,
        suggestion: str,
        retry_step: int,
        grades: Sequence[Grade] | None,
    ) -> Transcript:
        """The report on a failure; `grades` are shown to the reflector, unless None."""
        prompt = self._prompts.reflector_messages(
            self._task.subtasks,
            episode,
            grades=None if grades is None else [grade.score for grade in grades],
            pivots=None if grades is None else [grade.pivot for grade in grades],
        )
        answer = {
            "trajectory_summary": summary,
            "root_cause_analysis": diagnosis,
            "trajectory_outcome": "failure",
            "improvement_suggestion": suggestion,
            "retry_from_step": retry_step,
        }
        return {"messages": [*prompt, _message("assistant", json.dumps(answer))]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
