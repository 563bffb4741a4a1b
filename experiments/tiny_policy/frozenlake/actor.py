"""The scripted actor: reads the board aloud, then moves; how well depends on its skill."""

from __future__ import annotations

import dataclasses
import random
import re

from rlds_jax.tasks.frozenlake import GOAL, HOLE, STEPS, Board, Cell


@dataclasses.dataclass(frozen=True)
class Skill:
    """Chances of each kind of mistake, per turn.

    Attributes:
      invalid: answers without an action tag.
      misread: takes the agent to stand on a neighbouring cell, and moves from there.
      wander: moves anywhere at all.
      reckless: takes the straight way to the goal, whatever lies on it.
    """

    invalid: float
    misread: float
    wander: float
    reckless: float


UNGUIDED = Skill(invalid=0.02, misread=0.08, wander=0.6, reckless=0.35)
GUIDED = Skill(invalid=0.0, misread=0.01, wander=0.02, reckless=0.02)

_STATED = re.compile(r"<think>A (\d) (\d),")


def act(board: Board, cell: Cell, skill: Skill, rng: random.Random) -> str:
    """The text of one turn with the agent on `cell`."""
    if rng.random() < skill.misread:
        cell = rng.choice([n for move in STEPS if (n := board.neighbour(cell, move))])
    thought = f"<think>{look(board, cell)}</think>"
    if rng.random() < skill.invalid:
        return thought
    return f"{thought}<action>{choose(board, cell, skill, rng)}</action>"


def look(board: Board, cell: Cell) -> str:
    """Where the agent and the goal are (row and column from 1), and what lies around the agent."""
    goal = board.goal
    around = " ".join(f"{move} {_tile(board, cell, move)}" for move in STEPS)
    return f"A {cell[0] + 1} {cell[1] + 1}, B {goal[0] + 1} {goal[1] + 1}: {around}"


def stated_cell(text: str) -> Cell | None:
    """The cell a turn's text says the agent is on."""
    match = _STATED.match(text)
    return (int(match[1]) - 1, int(match[2]) - 1) if match else None


def choose(board: Board, cell: Cell, skill: Skill, rng: random.Random) -> str:
    roll = rng.random()
    if roll < skill.wander:
        return rng.choice(list(STEPS))
    if roll < skill.wander + skill.reckless:
        return rng.choice(straight_moves(board, cell))
    return rng.choice(best_moves(board, cell))


def best_moves(board: Board, cell: Cell) -> list[str]:
    """Moves on a shortest safe path to the goal; straight ones where there is none."""
    distances = board.distances()
    reach = {
        move: distances[n]
        for move in STEPS
        if (n := board.neighbour(cell, move)) is not None and n in distances
    }
    if not reach:
        return straight_moves(board, cell)
    return [move for move, distance in reach.items() if distance == min(reach.values())]


def straight_moves(board: Board, cell: Cell) -> list[str]:
    """Moves that come nearer the goal as the crow flies; all of them on the goal itself."""
    goal = board.goal

    def nearer(move: str) -> bool:
        return (goal[0] - cell[0]) * STEPS[move][0] + (goal[1] - cell[1]) * STEPS[move][1] > 0

    return [move for move in STEPS if nearer(move)] or list(STEPS)


def safe_route(board: Board, cell: Cell) -> list[str]:
    """A shortest safe path from `cell` to the goal, as moves."""
    route = []
    while board.tile(cell) != GOAL:
        move = best_moves(board, cell)[0]
        route.append(move)
        after = board.neighbour(cell, move)
        assert after is not None
        cell = after
    return route


def hole_nearby(board: Board, cell: Cell) -> bool:
    return any(_tile(board, cell, move) == HOLE for move in STEPS)


def _tile(board: Board, cell: Cell, move: str) -> str:
    neighbour = board.neighbour(cell, move)
    return "edge" if neighbour is None else board.tile(neighbour)
