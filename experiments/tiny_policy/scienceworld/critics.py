"""The scripted grader and reflector: their answers follow from what an episode's texts show."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

from experiments.tiny_policy.scienceworld.actor import stated_room
from experiments.tiny_policy.scienceworld.plan import Goal, State, Target, remaining, states
from experiments.tiny_policy.transcripts import Grade
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.scienceworld import commands


@dataclasses.dataclass(frozen=True)
class Episode:
    """A played episode (an `EpisodeText` for the prompts), and a thing that would have done."""

    target: Target
    initial_observation: str
    turns: tuple[Turn, ...]
    reward: float
    ended_by: str

    @property
    def success(self) -> bool:
        return self.ended_by == "completed"

    @functools.cached_property
    def goal(self) -> Goal:
        return Goal.read(self.initial_observation)

    @functools.cached_property
    def states(self) -> list[State]:
        """Before each turn, and after the last."""
        return states(self.initial_observation, self.turns)

    @functools.cached_property
    def helped(self) -> list[bool]:
        """Turns that left less to do."""
        left = [len(remaining(self.goal, self.target, state)) for state in self.states]
        helped = [after < before for before, after in itertools.pairwise(left)]
        if self.success:
            helped[-1] = True
        if self.ended_by == "wrong_focus":
            helped[-1] = False
        return helped

    @property
    def outcome(self) -> str:
        if not self.success:
            return "failure"
        return "success" if all(self.helped) else "success_but_inefficient"

    def first(self, where: Iterable[bool]) -> int | None:
        return next((i for i, holds in enumerate(where) if holds), None)


def grade(episode: Episode) -> tuple[Grade, ...]:
    """A grade per subtask, in the order of `SUBTASKS`."""
    return (
        _goal_decomposition(episode),
        _object_identification(episode),
        _action_sequencing(episode),
        _state_tracking(episode),
        _scientific_reasoning(episode),
        _exploration_efficiency(episode),
    )


def retry_step(episode: Episode) -> int:
    """Where a failed episode first went wrong: the first turn that helped nothing."""
    return episode.first(not helped for helped in episode.helped) or 0


def decisive_step(episode: Episode) -> int:
    """What decided a failure, or first lost a turn: the wrong focus, else `retry_step`."""
    return len(episode.turns) - 1 if episode.ended_by == "wrong_focus" else retry_step(episode)


def root_cause(episode: Episode) -> str:
    """One sentence on the step that decided a failure, or lost a turn."""
    if episode.outcome == "success":
        return "Every step helped."
    step = decisive_step(episode)
    action = commands.parse_action(episode.turns[step].action)
    if action is None:
        return f"Step {step} had no command."
    what = "was wrong" if episode.ended_by == "wrong_focus" else "did not help"
    return f"Step {step}, {action}, {what}."


diagnosis = root_cause  # the reflector says no more


def suggestion(episode: Episode) -> str:
    """What the reflector says to do: the way on from `retry_step`."""
    step = retry_step(episode)
    route = remaining(episode.goal, episode.target, episode.states[step])
    return f"At step {step}: {', '.join(stage.command for stage in route)}."


def summary(episode: Episode) -> str:
    step = retry_step(episode)
    return (
        f"{len(episode.turns)} steps for {episode.goal.thought}. "
        f"At step {step} in {episode.states[step].room}"
    )


def _focus_step(episode: Episode) -> int | None:
    return episode.first(state.focused is not None for state in episode.states[1:])


def _goal_decomposition(episode: Episode) -> Grade:
    focus = _focus_step(episode)
    if episode.success:
        return Grade(5 if all(episode.helped) else 4, focus, "all parts done")
    pivot = decisive_step(episode)
    if focus is None or episode.ended_by == "wrong_focus":
        return Grade(1, pivot, "no part done")
    taken = any(state.taken for state in episode.states)
    return Grade(3 if taken else 2, pivot, "taken, not placed" if taken else "found, not taken")


def _object_identification(episode: Episode) -> Grade:
    if episode.ended_by == "wrong_focus":
        return Grade(1, len(episode.turns) - 1, "wrong thing")
    focus = _focus_step(episode)
    if focus is None:
        return Grade(2, None, "nothing named")
    return Grade(5, focus if episode.success else None, "right thing")


def _action_sequencing(episode: Episode) -> Grade:
    """Commands that the simulator refused, for want of an earlier one."""
    refused = [
        commands.parse_action(turn.action) is not None
        and commands.verdict(turn.observation) == "unknown"
        for turn in episode.turns
    ]
    said = "refused commands" if any(refused) else "right order"
    return Grade((5, 3, 2, 1)[min(sum(refused), 3)], episode.first(refused), said)


def _state_tracking(episode: Episode) -> Grade:
    wrong = [
        stated_room(turn.action) != state.room
        for turn, state in zip(episode.turns, episode.states, strict=False)
    ]
    said = "misread room" if any(wrong) else "room right"
    return Grade((5, 3, 2, 1)[min(sum(wrong), 3)], episode.first(wrong), said)


def _scientific_reasoning(episode: Episode) -> Grade:
    """Searches where no such thing lives, and what was named."""
    if episode.ended_by == "wrong_focus":
        return Grade(1, len(episode.turns) - 1, "wrong kind")
    strays = [
        before.focused is None and after.room not in (before.room, episode.target.room)
        for before, after in itertools.pairwise(episode.states)
    ]
    said = "searched the wrong room" if any(strays) else "searched the right room"
    return Grade((5, 3, 2)[min(sum(strays), 2)], episode.first(strays), said)


def _exploration_efficiency(episode: Episode) -> Grade:
    wasted = [not helped for helped in episode.helped]
    count = sum(wasted)
    said = "none wasted" if not count else f"{count} wasted"
    return Grade(max(1, 5 - count), episode.first(wasted), said)
