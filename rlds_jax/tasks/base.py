"""What a task is: items, an environment per episode, and the subtasks its rollouts are graded on.

Nothing here knows about tokens, engines or training. A new task implements `Task` and
`Environment`; the rollout loop needs no other knowledge of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Subtask:
    """One competency a rollout is graded on (METHOD section 5).

    Attributes:
      name: identifier used in the grader's JSON and in metric names.
      weight: phi_k, the share of this subtask in the advantage; a task's weights sum to one.
      description: one sentence for the grader and reflector prompts.
    """

    name: str
    weight: float
    description: str


@dataclasses.dataclass(frozen=True)
class Item:
    """One problem. `data` is whatever the task's environment needs to build its episode."""

    id: str
    data: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the environment answers to one turn.

    `reward`, `success` and `ended_by` are meaningful only when `done`: the reward is that of the
    whole trajectory, and `ended_by` names the cause ("goal", "hole", "max_turns", ...).
    `score` is what the environment holds so far, where it keeps a score: not shown to the policy,
    but a replay must repeat it.
    `metrics` are per-episode scalars for logging, by metric name.
    """

    observation: str
    done: bool = False
    reward: float = 0.0
    success: bool = False
    ended_by: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    score: float = 0.0


class EpisodeError(Exception):
    """An error the task defines as an ending: the rollout stays in its group with this reward.

    Any other exception out of an environment drops the row (METHOD section 4).
    """

    def __init__(self, reason: str, reward: float = 0.0):
        super().__init__(reason)
        self.reason = reason
        self.reward = reward


class TaskUnavailable(Exception):
    """What a task cannot do without is gone (its server is down): the run stops.

    The message says what is gone and what to do; the same command goes on from the last step.
    """


class Environment(Protocol):
    """One episode on one item. Used by one coroutine at a time; `close` is always called."""

    async def reset(self) -> str:
        """Starts the episode and returns the first observation."""
        ...

    async def step(self, text: str) -> StepResult:
        """Takes the text of one assistant turn (special tokens removed)."""
        ...

    async def conclude(self, ended_by: str) -> StepResult:
        """Ends the episode from outside (response budget) and scores what has been reached.

        The returned result has `done=True` and the given `ended_by`.
        """
        ...

    async def restore(self, turns: Sequence[tuple[str, str]]) -> None:
        """Takes over recorded (action, observation) turns without executing them.

        Called after `reset`, and only where `Task.replay` is "restore".
        """
        ...

    async def close(self) -> None: ...


class Task(Protocol):
    """A task: its texts, its items and its environments.

    Attributes:
      name: metric prefix, e.g. "frozenlake".
      subtasks: graded competencies, in the order of every [K] array.
      observation_role: chat role of observations after the first: "user", or "tool".
      replay: how a retry reaches turn s: "execute" re-runs the actions in a fresh environment and
        compares every observation and score; "restore" hands the recorded turns to the environment.
      tools: Hermes tool schemas for the chat template; empty for tasks without tools.
    """

    # Read-only, so that a class constant or a frozen field will do.
    @property
    def name(self) -> str: ...
    @property
    def subtasks(self) -> tuple[Subtask, ...]: ...
    @property
    def observation_role(self) -> Literal["user", "tool"]: ...
    @property
    def replay(self) -> Literal["execute", "restore"]: ...
    @property
    def tools(self) -> tuple[dict[str, Any], ...]: ...

    def system_prompt(self, guidance: str | None = None) -> str:
        """The system message; with `guidance`, the one of a retry from turn 0."""
        ...

    def items(self, split: Literal["train", "validation"]) -> Sequence[Item]: ...

    def environment(self, item: Item) -> Environment: ...

    def close(self) -> None:
        """Ends what the environments share (processes, connections); called once, at the end."""
        ...
