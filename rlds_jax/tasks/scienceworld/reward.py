"""The shaped reward of METHOD section 6, one function per term."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rlds_jax.tasks.scienceworld.commands import EXPERIMENTAL

PLAIN_TASKS = ("find-", "lifespan-", "identify-life-stages-")  # need no procedure


@dataclasses.dataclass(frozen=True)
class PlayedTurn:
    """One turn, as far as the reward goes.

    Attributes:
      score: the simulator's after the turn, -100..100.
      thought: the turn has a think block.
      verb: the accepted command's; None where nothing was accepted.
    """

    score: int
    thought: bool
    verb: str | None


class Reward(NamedTuple):
    """The terms; `total` is what the policy gets."""

    base: float
    stall: float
    procedure: float
    think: float
    verbs: float

    @property
    def total(self) -> float:
        return self.base * self.stall * self.procedure + self.think + self.verbs


def reward(turns: Sequence[PlayedTurn], task: str) -> Reward:
    """The reward of an episode of `task`; the JVM's failures are not its business."""
    return Reward(
        base(turns), stall(turns), procedure(turns, task), think_penalty(turns), verb_bonus(turns)
    )


def base(turns: Sequence[PlayedTurn]) -> float:
    """Highest score reached, 0..1."""
    return max([0, *(turn.score for turn in turns)]) / 100


def stall(turns: Sequence[PlayedTurn]) -> float:
    """0.5 when the first points were the last although the episode went on, else 1."""
    first = next((i for i, turn in enumerate(turns) if turn.score > 0), None)
    if first is None or first == len(turns) - 1:
        return 1.0
    stalled = turns[first].score / 100 == base(turns) < 1
    return 0.5 if stalled else 1.0


def procedure(turns: Sequence[PlayedTurn], task: str) -> float:
    """0.25 when a task of experiments got half its points without one, else 1."""
    if task.startswith(PLAIN_TASKS) or base(turns) < 0.5:
        return 1.0
    return 1.0 if any(turn.verb in EXPERIMENTAL for turn in turns) else 0.25


def think_penalty(turns: Sequence[PlayedTurn]) -> float:
    """-0.1 when fewer than half the turns have a think block."""
    return -0.1 if 2 * sum(turn.thought for turn in turns) < len(turns) else 0.0


def verb_bonus(turns: Sequence[PlayedTurn]) -> float:
    """Up to 0.05 for six distinct verbs."""
    return 0.05 * min(1.0, len({turn.verb for turn in turns} - {None}) / 6)
