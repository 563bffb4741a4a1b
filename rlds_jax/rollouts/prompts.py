"""All wording of the grader, the reflector and the guidance, and what fills it (METHOD section 4).

Prompts are short: whatever is the same for every rollout of a task comes first, in the system
message, so that an engine's prefix cache is shared; the trajectory comes last.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any, Protocol

from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Subtask

GRADER_SYSTEM = """\
You grade how an agent did on each subtask of its task. Steps are numbered from 0.

Subtasks:
$subtasks

Scores: 1 critical failure, 2 poor, 3 adequate, 4 good, 5 excellent.

First find the root cause: ask why it ended this way, then why again and again, until one decision \
explains it.

Then give every subtask a score and a pivot_step, which depends on the outcome:
- success or success_but_inefficient: the earliest step whose decision carried the result, where a \
plausible other choice would have made success less likely.
- failure: the earliest step where this skill first broke down.
Use null when no step was pivotal.

Reply with JSON only, one entry for every subtask:
{"trajectory_outcome": "success" or "success_but_inefficient" or "failure", \
"root_cause_analysis": "...", "sub_task_grades": [{"sub_task": "name", "score": 1 to 5, \
"assessment": "...", "pivot_step": step or null}, ...]}"""

GRADER_USER = """\
Trajectory:
$trajectory"""

REFLECTOR_SYSTEM = """\
You review how an agent did and choose the step its next attempt starts from. Steps are numbered \
from 0.

Subtasks:
$subtasks

Say which subtasks to address. Walk forward to the earliest step where a real choice went wrong, \
quote its action or observation, and follow cause and effect from there to the outcome. Turn this \
into a principle that the agent can act on. retry_from_step is that step: 0 when the first action \
was the decisive one.

Reply with JSON only:
{"trajectory_summary": "...", "root_cause_analysis": "...", "trajectory_outcome": "success" or \
"success_but_inefficient" or "failure", "improvement_suggestion": "...", "retry_from_step": step}"""

REFLECTOR_USER = """\
${memory}${contrast}${grades}Trajectory:
$trajectory"""

GUIDANCE = """\
Advice for this attempt. Apply it silently and never mention it.
Do: $suggestion
Because: $diagnosis"""

_PLACEHOLDERS = {
    "grader_system": {"subtasks"},
    "grader_user": {"trajectory"},
    "reflector_system": {"subtasks"},
    "reflector_user": {"memory", "contrast", "grades", "trajectory"},
    "guidance": {"suggestion", "diagnosis"},
}
OUTCOMES = ("success", "success_but_inefficient", "failure")


class EpisodeText(Protocol):
    """What the trajectory text needs; a `Trajectory` has it all."""

    @property
    def initial_observation(self) -> str: ...
    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def reward(self) -> float: ...
    @property
    def ended_by(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The five prompts, as `string.Template` texts: `$name` is filled in, `$$` is a dollar.

    Raises:
      ValueError: a prompt lacks one of its placeholders, or has one that nothing fills.
    """

    grader_system: str = GRADER_SYSTEM
    grader_user: str = GRADER_USER
    reflector_system: str = REFLECTOR_SYSTEM
    reflector_user: str = REFLECTOR_USER
    guidance: str = GUIDANCE

    def __post_init__(self):
        for name, expected in _PLACEHOLDERS.items():
            template = Template(getattr(self, name))
            if not template.is_valid():
                raise ValueError(f"prompt {name}: a lone '$' is not a placeholder; write '$$'")
            found = set(template.get_identifiers())
            if found != expected:
                raise ValueError(
                    f"prompt {name}: placeholders must be {sorted(expected)}, found {sorted(found)}"
                )

    @classmethod
    def load(cls, prompts_dir: str | os.PathLike | None = None) -> Prompts:
        """The built-in prompts, each replaced by `prompts_dir`/<name>.txt where that exists.

        Raises:
          ValueError: the directory does not exist, holds a file of another name, or a prompt in
            it has wrong placeholders.
        """
        if prompts_dir is None:
            return cls()
        directory = Path(prompts_dir)
        if not directory.is_dir():
            raise ValueError(f"prompts_dir {directory} is not a directory")
        known = {f"{name}.txt": name for name in _PLACEHOLDERS}
        texts = {}
        for path in sorted(directory.iterdir()):
            if path.name not in known:
                raise ValueError(f"prompts_dir: {path} is not a prompt; known: {sorted(known)}")
            texts[known[path.name]] = path.read_text(encoding="utf-8")
        return cls(**texts)

    def grader_messages(
        self, subtasks: Sequence[Subtask], episode: EpisodeText, cap: int | None = None
    ) -> list[dict[str, str]]:
        """System and user message of the grader; `cap` as in `trajectory_text`."""
        return [
            _message("system", self.grader_system, subtasks=subtask_list(subtasks)),
            _message("user", self.grader_user, trajectory=trajectory_text(episode, cap)),
        ]

    def reflector_messages(
        self,
        subtasks: Sequence[Subtask],
        episode: EpisodeText,
        *,
        grades: Sequence[int | None] | None = None,
        pivots: Sequence[int | None] | None = None,
        memory: str | None = None,
        contrast: EpisodeText | None = None,
        cap: int | None = None,
    ) -> list[dict[str, str]]:
        """System and user message of the reflector.

        Args:
          grades, pivots: [K], the grader's; without grades the section is left out.
          memory: earlier lessons, one optional section.
          contrast: the best sibling, one optional section.
          cap: as in `trajectory_text`, for both trajectories.
        """
        sections = {"memory": "", "contrast": "", "grades": ""}
        if memory:
            sections["memory"] = f"Lessons so far:\n{memory}\n\n"
        if contrast is not None:
            text = trajectory_text(contrast, cap)
            sections["contrast"] = f"A better attempt, to compare with:\n{text}\n\n"
        if grades is not None:
            sections["grades"] = f"Grades:\n{grade_list(subtasks, grades, pivots)}\n\n"
        text = trajectory_text(episode, cap)
        return [
            _message("system", self.reflector_system, subtasks=subtask_list(subtasks)),
            _message("user", self.reflector_user, trajectory=text, **sections),
        ]

    def guidance_text(self, diagnosis: str, suggestion: str) -> str:
        """What a retry is told, from the reflection's analysis and suggestion."""
        fields = {"diagnosis": diagnosis.strip(), "suggestion": suggestion.strip()}
        return Template(self.guidance).substitute(fields)


def _message(role: str, template: str, **fields: str) -> dict[str, str]:
    return {"role": role, "content": Template(template).substitute(fields)}


def subtask_list(subtasks: Sequence[Subtask]) -> str:
    """Numbered names and descriptions, one a line."""
    return "\n".join(f"{i}. {s.name}: {s.description}" for i, s in enumerate(subtasks, start=1))


def grade_list(
    subtasks: Sequence[Subtask],
    grades: Sequence[int | None],
    pivots: Sequence[int | None] | None,
) -> str:
    """Names with score and pivot step, one a line."""
    lines = []
    for i, (subtask, grade) in enumerate(zip(subtasks, grades, strict=True)):
        score = "not graded" if grade is None else str(grade)
        pivot = pivots[i] if pivots is not None else None
        suffix = "" if pivot is None else f", pivot step {pivot}"
        lines.append(f"{subtask.name}: {score}{suffix}")
    return "\n".join(lines)


def trajectory_text(episode: EpisodeText, cap: int | None = None) -> str:
    """An episode with 0-based step headers, the terminal observation and the outcome.

    An observation longer than `cap` characters loses its middle, marked.
    """
    lines = ["Start:", shorten(episode.initial_observation, cap)]
    for i, turn in enumerate(episode.turns):
        lines += [f"Step {i} action:", turn.action]
        lines += [f"Step {i} result:", shorten(turn.observation, cap)]
    lines.append(f"Outcome: reward {episode.reward:.2f}, ended by {episode.ended_by}")
    return "\n".join(lines)


def shorten(text: str, cap: int | None) -> str:
    """`text`, its middle replaced by a mark where it is longer than `cap` characters."""
    if cap is None or len(text) <= cap:
        return text
    head = (cap + 1) // 2
    tail = text[len(text) - cap // 2 :]
    return f"{text[:head]}[... {len(text) - cap} characters cut ...]{tail}"


def fit_cap(longest: int, fits: Callable[[int], bool]) -> int | None:
    """The largest cap on observations, at most `longest`, for which `fits(cap)`; None if none is.

    One cap for all cuts the longest observations first.
    """
    low, high = -1, longest
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return None if low < 0 else low


def grader_schema(subtasks: Sequence[Subtask], turns: int) -> dict[str, Any]:
    """JSON schema of the grader's answer on an episode of `turns` turns."""
    entry = {
        "sub_task": {"enum": [s.name for s in subtasks]},
        "score": {"enum": [1, 2, 3, 4, 5]},
        "assessment": {"type": "string"},
        "pivot_step": {"enum": [*range(turns), None]},
    }
    grades = {"type": "array", "items": _object(entry)}
    return _object(
        {
            "trajectory_outcome": {"enum": list(OUTCOMES)},
            "root_cause_analysis": {"type": "string"},
            "sub_task_grades": {**grades, "minItems": len(subtasks), "maxItems": len(subtasks)},
        }
    )


def reflector_schema(turns: int) -> dict[str, Any]:
    """JSON schema of the reflector's answer on an episode of `turns` turns."""
    return _object(
        {
            "trajectory_summary": {"type": "string"},
            "root_cause_analysis": {"type": "string"},
            "trajectory_outcome": {"enum": list(OUTCOMES)},
            "improvement_suggestion": {"type": "string"},
            "retry_from_step": {"enum": list(range(turns))},
        }
    )


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
