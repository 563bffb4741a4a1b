"""FrozenLake with abstract symbols, whose meaning is learned by playing (METHOD section 6)."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from rlds_jax.tasks.base import Item, StepResult, Subtask
from rlds_jax.tasks.think import outside_think

AGENT, GOAL, HOLE, SAFE = "ABCD"

Cell = tuple[int, int]
Move = Literal["Up", "Down", "Left", "Right"]

STEPS: Mapping[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

SUBTASKS = (
    Subtask("path_planning", 0.35, "Chooses moves that form a safe route to the goal."),
    Subtask("hazard_identification", 0.25, "Recognises which tiles are holes and avoids them."),
    Subtask("state_position_tracking", 0.15, "Knows where the agent is, turn after turn."),
    Subtask("dead_end_detection", 0.15, "Avoids or leaves routes that have no way out."),
    Subtask("boundary_awareness", 0.10, "Makes no moves off the grid."),
)

_PROMPT = """\
You play a game on a grid of symbols. Find out by playing what they mean and how to win.
Moves: {moves}. One move per turn, as:
<think>brief reasoning</think><action>move</action>

## Game Rules
{rules}

## Strategic Playbook
{playbook}"""
_UNKNOWN = "(to be discovered through play)"
_LEGEND = f"{AGENT} is you, {GOAL} the goal, {HOLE} a hole that ends the game, {SAFE} safe ground."

_NOTES = {
    "edge": "You hit the edge and stayed in place.",
    "invalid": "Invalid action: nothing moved.",
}
_ENDINGS = {
    "goal": f"You moved onto the {GOAL} tile, the goal. You won!",
    "hole": f"You moved onto a {HOLE} tile and fell into the hole. You lost.",
    "max_turns": f"No turns left, and the {GOAL} tile, the goal, was not reached. You lost.",
}

_ACTION = re.compile(rf"<action>\s*({'|'.join(STEPS)})\s*</action>", re.IGNORECASE | re.ASCII)
_MAX_DRAWS = 10_000


def parse_move(text: str) -> Move | None:
    """The first well-formed action tag outside think blocks, or None."""
    match = _ACTION.search(outside_think(text))
    return match.group(1).capitalize() if match else None  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Board:
    """A grid of tiles with a safe start and a goal that can be reached from it.

    Attributes:
      rows: one string per row over B (goal), C (hole) and D (safe); the start is a D tile.
      start: (row, column) of the agent at the beginning.
    """

    rows: tuple[str, ...]
    start: Cell

    @classmethod
    def parse(cls, rows: Sequence[str]) -> Board:
        """Reads rows such as "A D C" or "ADC", where A marks the start.

        Raises:
          ValueError: the grid is not rectangular, holds another symbol, has not exactly one A and
            one B, or B cannot be reached.
        """
        compact = tuple("".join(row.split()) for row in rows)
        text = "".join(compact)
        if not text or len({len(row) for row in compact}) != 1:
            raise ValueError(f"board: rows must be non-empty and of equal length, got {list(rows)}")
        if unknown := sorted(set(text) - set(AGENT + GOAL + HOLE + SAFE)):
            raise ValueError(f"board: symbols must be among A, B, C and D, got {unknown}")
        for symbol, what in ((AGENT, "start"), (GOAL, "goal")):
            if text.count(symbol) != 1:
                raise ValueError(
                    f"board: needs exactly one {symbol} (the {what}), got {text.count(symbol)}"
                )
        start = divmod(text.index(AGENT), len(compact[0]))
        board = cls(tuple(row.replace(AGENT, SAFE) for row in compact), start)
        if start not in board.distances():
            raise ValueError(f"board: {GOAL} cannot be reached from {AGENT} in {list(rows)}")
        return board

    @property
    def goal(self) -> Cell:
        return divmod("".join(self.rows).index(GOAL), len(self.rows[0]))

    def tile(self, cell: Cell) -> str:
        return self.rows[cell[0]][cell[1]]

    def neighbour(self, cell: Cell, move: str) -> Cell | None:
        """The cell one move away, or None off the grid."""
        row, column = cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return (row, column) if inside else None

    def distances(self) -> dict[Cell, int]:
        """Fewest moves to the goal past no hole, for every cell the goal can be reached from."""
        distances = {self.goal: 0}
        queue = deque(distances)
        while queue:
            cell = queue.popleft()
            for move in STEPS:
                after = self.neighbour(cell, move)
                if after and after not in distances and self.tile(after) != HOLE:
                    distances[after] = distances[cell] + 1
                    queue.append(after)
        return distances

    def render(self, agent: Cell) -> str:
        """The grid as shown to the policy, one space between symbols."""
        grid = [list(row) for row in self.rows]
        grid[agent[0]][agent[1]] = AGENT
        return "\n".join(" ".join(row) for row in grid)


@dataclasses.dataclass(frozen=True)
class LoggedTurn:
    """What truly happened in one turn.

    Attributes:
      before, after: the agent's cell around the turn; equal when nothing moved.
      move: the parsed move, None when the action was invalid.
      edge: the move led off the grid.
      hole: the move led into a hole.
      distance_before, distance_after: fewest moves to the goal past no hole; None in a hole.
    """

    before: Cell
    after: Cell
    move: Move | None
    edge: bool
    hole: bool
    distance_before: int
    distance_after: int | None

    @property
    def invalid(self) -> bool:
        return self.move is None


class FrozenLakeEnvironment:
    """One episode on one board.

    Attributes:
      board: the board played on.
      log: the true log, one entry per turn played.
    """

    def __init__(self, board: Board, max_turns: int):
        self.board = board
        self.log: list[LoggedTurn] = []
        self._max_turns = max_turns
        self._distances = board.distances()
        self._cell = board.start
        self._done = True

    async def reset(self) -> str:
        self.log = []
        self._cell = self.board.start
        self._done = False
        return self._observation()

    async def step(self, text: str) -> StepResult:
        """Plays one turn.

        Raises:
          RuntimeError: the episode has ended or was never reset.
        """
        if self._done:
            raise RuntimeError("FrozenLake: step on an ended episode; call reset first")
        entry = self._play(parse_move(text))
        self.log.append(entry)
        self._cell = entry.after
        tile = self.board.tile(self._cell)
        if tile == GOAL:
            return self._end("goal")
        if tile == HOLE:
            return self._end("hole")
        if len(self.log) == self._max_turns:
            return self._end("max_turns")
        note = "edge" if entry.edge else "invalid" if entry.invalid else None
        return StepResult(self._observation(note))

    async def conclude(self, ended_by: str) -> StepResult:
        return self._end(ended_by)

    async def restore(self, turns: Sequence[tuple[str, str]]) -> None:
        """Raises RuntimeError: this task replays by execution."""
        raise RuntimeError("FrozenLake replays by execution; step through the turns instead")

    async def close(self) -> None:
        self._done = True

    def _play(self, move: Move | None) -> LoggedTurn:
        before = self._cell
        target = self.board.neighbour(before, move) if move else before
        after = before if target is None else target
        return LoggedTurn(
            before=before,
            after=after,
            move=move,
            edge=target is None,
            hole=self.board.tile(after) == HOLE,
            distance_before=self._distances[before],
            distance_after=self._distances.get(after),
        )

    def _observation(self, note: str | None = None) -> str:
        lines = [self.board.render(self._cell)]
        if note:
            lines.append(_NOTES[note])
        lines.append(f"Turns left: {self._max_turns - len(self.log)}")
        return "\n".join(lines)

    def _end(self, ended_by: str) -> StepResult:
        self._done = True
        won = self.board.tile(self._cell) == GOAL
        cause = _ENDINGS.get(ended_by, f"The game was ended ({ended_by}). You lost.")
        return StepResult(
            observation=f"{self.board.render(self._cell)}\n{cause}",
            done=True,
            reward=float(won),
            success=won,
            ended_by=ended_by,
            metrics={
                "edge_hits": sum(turn.edge for turn in self.log),
                "invalid_actions": sum(turn.invalid for turn in self.log),
            },
        )


@dataclasses.dataclass(frozen=True)
class FrozenLake:
    """The task, and its options.

    Attributes:
      size: smallest and largest board side, drawn uniformly.
      frozen: range of the probability that a tile is safe, drawn uniformly.
      min_path, max_path: bounds on the shortest safe path from start to goal.
      max_turns: turns in an episode.
      train_items, validation_items: items per split.
      seed: seeds every item of both splits, which share none.
      legend: say in the prompt what the symbols mean.

    Raises:
      ValueError: a field that cannot hold, by name.
    """

    size: tuple[int, int] = (5, 8)
    frozen: tuple[float, float] = (0.65, 0.85)
    min_path: int = 1
    max_path: int = 12
    max_turns: int = 10
    train_items: int = 20_000
    validation_items: int = 500
    seed: int = 0
    legend: bool = False

    name: ClassVar[str] = "frozenlake"
    subtasks: ClassVar[tuple[Subtask, ...]] = SUBTASKS
    observation_role: ClassVar[Literal["user", "tool"]] = "user"
    replay: ClassVar[Literal["execute", "restore"]] = "execute"
    tools: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __post_init__(self):
        for field in ("size", "frozen"):
            if len(getattr(self, field)) != 2:
                raise ValueError(f"{field} must be two numbers, got {getattr(self, field)}")
        if not 2 <= self.size[0] <= self.size[1]:
            raise ValueError(f"size must be 2 <= smallest <= largest, got {self.size}")
        if not 0 < self.frozen[0] <= self.frozen[1] <= 1:
            raise ValueError(f"frozen must be 0 < lowest <= highest <= 1, got {self.frozen}")
        if not 1 <= self.min_path <= self.max_path:
            raise ValueError(
                "min_path and max_path must be 1 <= min <= max, "
                f"got {self.min_path}, {self.max_path}"
            )
        for field in ("max_turns", "train_items", "validation_items"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    def system_prompt(self, guidance: str | None = None) -> str:
        return _PROMPT.format(
            moves=", ".join(STEPS),
            rules=_LEGEND if self.legend else _UNKNOWN,
            playbook=guidance or _UNKNOWN,
        )

    def items(self, split: Literal["train", "validation"]) -> Sequence[Item]:
        return Boards(self, split)

    def environment(self, item: Item) -> FrozenLakeEnvironment:
        """Raises ValueError when the item's "board" does not hold (see `Board.parse`)."""
        if "board" not in item.data:
            raise ValueError(f'item {item.id}: data needs a "board" (a list of rows)')
        return FrozenLakeEnvironment(Board.parse(item.data["board"]), self.max_turns)

    def close(self) -> None:
        """Nothing is shared between boards."""


class Boards(Sequence[Item]):
    """The items of one split; each board is drawn from its own seed when it is asked for."""

    def __init__(self, task: FrozenLake, split: Literal["train", "validation"]):
        splits = {"train": task.train_items, "validation": task.validation_items}
        if split not in splits:
            raise ValueError(f"split must be one of {sorted(splits)}, got {split!r}")
        self._task = task
        self._split = split
        self._stream = list(splits).index(split)
        self._length = splits[split]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        position = range(self._length)[index]
        rng = np.random.default_rng((self._task.seed, self._stream, position))
        return Item(f"{self._split}-{position}", {"board": draw_board(self._task, rng)})


def draw_board(task: FrozenLake, rng: np.random.Generator) -> list[str]:
    """Draws boards until one keeps the path bounds; returns its rows, "A" marking the start.

    Raises:
      ValueError: no board was found in 10,000 draws.
    """
    for _ in range(_MAX_DRAWS):
        side = int(rng.integers(task.size[0], task.size[1], endpoint=True))
        tiles = np.where(rng.random(side * side) < rng.uniform(*task.frozen), SAFE, HOLE)
        start, goal = rng.choice(side * side, size=2, replace=False)
        tiles[start], tiles[goal] = SAFE, GOAL
        rows = ["".join(row) for row in tiles.reshape(side, side)]
        board = Board(tuple(rows), divmod(int(start), side))
        distance = board.distances().get(board.start)
        if distance is not None and task.min_path <= distance <= task.max_path:
            return board.render(board.start).split("\n")
    raise ValueError(
        f"no board of size {task.size} with a path of {task.min_path}..{task.max_path} moves in "
        f"{_MAX_DRAWS} draws; widen min_path..max_path, size or frozen"
    )
