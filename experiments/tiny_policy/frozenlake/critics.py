"""The scripted grader and reflector: their answers follow from an episode's true log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.tiny_policy.frozenlake.actor import hole_nearby, safe_route, stated_cell
from experiments.tiny_policy.transcripts import Grade, Played
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.frozenlake import Board, FrozenLakeEnvironment, LoggedTurn


@dataclasses.dataclass(frozen=True)
class Episode:
    """A played episode with what truly happened in it (an `EpisodeText` for the prompts)."""

    board: Board
    max_turns: int
    initial_observation: str
    turns: tuple[Turn, ...]
    log: tuple[LoggedTurn, ...]
    reward: float
    ended_by: str

    @classmethod
    def of(cls, played: Played, environment: FrozenLakeEnvironment, max_turns: int) -> Episode:
        """The episode that was played in an environment."""
        return cls(
            board=environment.board,
            max_turns=max_turns,
            initial_observation=played.initial_observation,
            turns=played.turns,
            log=tuple(environment.log),
            reward=played.reward,
            ended_by=played.ended_by,
        )

    @property
    def success(self) -> bool:
        return self.ended_by == "goal"

    @property
    def outcome(self) -> str:
        if not self.success:
            return "failure"
        shortest = self.log[0].distance_before
        return "success" if len(self.log) == shortest else "success_but_inefficient"


def grade(episode: Episode) -> tuple[Grade, ...]:
    """A grade per subtask, in the order of `SUBTASKS`."""
    return (
        _path_planning(episode),
        _hazard_identification(episode),
        _state_position_tracking(episode),
        _dead_end_detection(episode),
        _boundary_awareness(episode),
    )


def retry_step(episode: Episode) -> int:
    """Where a failed episode went wrong: the move into the hole, else the first lost turn."""
    if episode.ended_by == "hole":
        return len(episode.log) - 1
    return _first(not _nearer(turn) for turn in episode.log) or 0


def diagnosis(episode: Episode) -> str:
    """What the reflector says went wrong."""
    rule = "C is a hole, B is the goal."
    return f"{root_cause(episode)} {rule}"


def suggestion(episode: Episode, route: Sequence[str] | None = None) -> str:
    """What the reflector says to do: the way on from `retry_step`, unless `route` is given."""
    if route is None:
        route = safe_route(episode.board, episode.log[retry_step(episode)].before)
    return f"At step {retry_step(episode)} go {' '.join(route)} to B. Never step on C."


def summary(episode: Episode) -> str:
    """What the reflector says happened: how long it took, and where the agent was then."""
    step = retry_step(episode)
    cell = episode.log[step].before
    goal = episode.board.goal
    return (
        f"{len(episode.log)} steps. At step {step} A {cell[0] + 1} {cell[1] + 1}, "
        f"B {goal[0] + 1} {goal[1] + 1}"
    )


def root_cause(episode: Episode) -> str:
    """One sentence on the step that decided a failure, or lost a turn."""
    if episode.outcome == "success":
        return "Every step came nearer to B."
    if not episode.success:
        step = retry_step(episode)
    else:
        step = _first(not _nearer(turn) for turn in episode.log) or 0
    turn = episode.log[step]
    if turn.invalid:
        return f"Step {step} had no action."
    what = "onto C" if turn.hole else "off the edge" if turn.edge else "away from B"
    return f"Step {step} went {turn.move} {what}."


def _nearer(turn: LoggedTurn) -> bool:
    return turn.distance_after is not None and turn.distance_after < turn.distance_before


def _first(conditions) -> int | None:
    return next((i for i, holds in enumerate(conditions) if holds), None)


def _path_planning(episode: Episode) -> Grade:
    lost = [not _nearer(turn) for turn in episode.log]
    if episode.success:
        near_hole = _first(hole_nearby(episode.board, turn.before) for turn in episode.log)
        pivot = near_hole if near_hole is not None else 0
        return Grade((5, 4, 3)[min(sum(lost), 2)], pivot, "route found")
    nearest = episode.log[-1].distance_before
    score = 3 if nearest == 1 else 2 if nearest < episode.log[0].distance_before else 1
    return Grade(score, _first(lost), "no route")


def _hazard_identification(episode: Episode) -> Grade:
    if episode.ended_by == "hole":
        return Grade(1, len(episode.log) - 1, "stepped on C")
    near_hole = _first(hole_nearby(episode.board, turn.before) for turn in episode.log)
    if near_hole is None:
        return Grade(4, None, "no C near")
    return Grade(5, near_hole if episode.success else None, "kept off C")


def _state_position_tracking(episode: Episode) -> Grade:
    wrong = [
        stated_cell(turn.action) != logged.before
        for turn, logged in zip(episode.turns, episode.log, strict=True)
    ]
    return Grade(
        (5, 3, 2, 1)[min(sum(wrong), 3)],
        _first(wrong),
        "misread position" if any(wrong) else "position right",
    )


def _dead_end_detection(episode: Episode) -> Grade:
    """Turns that went back to a cell the agent had been on; the last escape on running out."""
    seen = {episode.log[0].before}
    returned = []
    for turn in episode.log:
        returned.append(turn.after != turn.before and turn.after in seen)
        seen.add(turn.after)
    if episode.ended_by == "max_turns":
        left = [episode.max_turns - i for i in range(len(episode.log))]
        escape = [t.distance_before <= n for t, n in zip(episode.log, left, strict=True)]
        last_escape = len(escape) - 1 - (_first(reversed(escape)) or 0)
        return Grade(1, last_escape, "ran out of turns")
    return Grade(
        (5, 3, 2)[min(sum(returned), 2)],
        _first(returned),
        "went back" if any(returned) else "no way back",
    )


def _boundary_awareness(episode: Episode) -> Grade:
    edges = [turn.edge for turn in episode.log]
    return Grade(
        (5, 3, 2, 1)[min(sum(edges), 3)],
        _first(edges),
        "left the grid" if any(edges) else "inside the grid",
    )
