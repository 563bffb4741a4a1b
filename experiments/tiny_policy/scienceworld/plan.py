"""What an episode of the tiny tasks has reached, read from its texts, and what is left to do."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.scienceworld import commands

TARGETS = Path(__file__).parent / "targets.json"

_TASK = re.compile(r"Your task is to find (?:a\(n\) |the animal with the )(.+?)\. ")
_BOX = re.compile(r"move it to the (\w+ box) in the ([\w ]+)\.")
_ROOM = re.compile(r"(?:room|location) is called the ([\w ]+)\.")
_ARRIVED = re.compile(r"You (?:teleport|move) to the ([\w ]+)\.")
_NUMBERED = re.compile(r"(\d+):\t.*in inventory")


@dataclasses.dataclass(frozen=True)
class Goal:
    """What the task text asks for.

    Attributes:
      what: "plant", "longest life span", ...
      box, box_room: where to bring it; None where naming it is all.
    """

    what: str
    box: str | None
    box_room: str | None

    @classmethod
    def read(cls, initial_observation: str) -> Goal:
        text = " ".join(initial_observation.split())
        what, box = _TASK.search(text), _BOX.search(text)
        if what is None:
            raise ValueError(f"not a find or lifespan task: {text[:80]}")
        return cls(what[1], *(box.groups() if box else (None, None)))

    @property
    def thought(self) -> str:
        return f"{self.what} to {self.box} in {self.box_room}" if self.box else self.what


@dataclasses.dataclass(frozen=True)
class Target:
    """A thing that fulfils a goal: its name, and the room it is in."""

    name: str
    room: str

    @property
    def clear(self) -> bool:
        """Whether the name is one thing's own."""
        return not any(words in self.name for words in _VAGUE)


@functools.cache
def targets() -> Mapping[str, Target]:
    """By item, what the simulator's own solution looks for (targets.py)."""
    found = json.loads(TARGETS.read_text())["targets"]
    return {item: Target(name, room) for item, (name, room) in found.items()}


@dataclasses.dataclass(frozen=True)
class State:
    """Where an episode stands.

    Attributes:
      room: the agent's.
      looked: the room has been described.
      focused: name of the thing focused on, or None.
      taken: it is in the inventory.
      choice: number to answer an ambiguous request with, or None.
    """

    room: str
    looked: bool = True
    focused: str | None = None
    taken: bool = False
    choice: str | None = None

    @classmethod
    def start(cls, initial_observation: str) -> State:
        room = _ROOM.search(initial_observation)
        if room is None:
            raise ValueError(f"no room in {initial_observation[:80]}")
        return cls(room[1])

    def after(self, turn: Turn) -> State:
        """The state that one more turn leads to."""
        action, said = commands.parse_action(turn.action), turn.observation
        state = dataclasses.replace(self, choice=None)
        if action is None:
            return state
        if commands.verdict(said) == "ambiguous":
            number = _NUMBERED.search(said)
            return dataclasses.replace(self, choice=number[1] if number else "0")
        if arrived := _ARRIVED.match(said):
            return dataclasses.replace(state, room=arrived[1], looked=False)
        if _ROOM.search(said):
            return dataclasses.replace(state, looked=True)
        if said.startswith("You focus on "):
            return dataclasses.replace(state, focused=action.removeprefix("focus on "))
        if said.startswith("You move ") and " to the inventory." in said:
            return dataclasses.replace(state, taken=True)
        return state


def states(initial_observation: str, turns: Iterable[Turn]) -> list[State]:
    """The state before each turn, and after the last."""
    found = [State.start(initial_observation)]
    for turn in turns:
        found.append(found[-1].after(turn))
    return found


@dataclasses.dataclass(frozen=True)
class Stage:
    """A thing to do: its name in a thought, and the command."""

    name: str
    command: str


def remaining(goal: Goal, target: Target, state: State) -> list[Stage]:
    """What is left to do, in order."""
    if state.choice is not None:
        return [Stage("answer", state.choice)]
    stages = []
    room, name = state.room, state.focused or target.name
    if state.focused is None:
        if room != target.room:
            stages.append(Stage("find", f"teleport to {target.room}"))
        if room != target.room or not state.looked:
            stages.append(Stage("look", "look around"))
        stages.append(Stage("focus", f"focus on {name}"))
        room = target.room
    if goal.box is None:
        return stages
    if target.room != goal.box_room and not state.taken:
        if room != target.room:
            stages.append(Stage("find", f"teleport to {target.room}"))
            room = target.room
        stages.append(Stage("take", f"pick up {name}"))
    if room != goal.box_room:
        stages.append(Stage("carry", f"teleport to {goal.box_room}"))
    return [*stages, Stage("place", f"move {name} to {goal.box}")]


def target_of(gold_path: Sequence[str], start: str) -> Target:
    """What the simulator's own solution focuses on, and where.

    Args:
      start: the room it begins in.
    """
    room = start
    for command in gold_path:
        if command.startswith("go to "):
            room = command.removeprefix("go to ")
        if command.startswith("focus on "):
            words = command.removeprefix("focus on ").split()
            return Target(" ".join(word for word in words if word not in _AGES), room)
    raise ValueError(f"a solution that focuses on nothing: {list(gold_path)}")


_VAGUE = ("living thing",)
_AGES = {"adult", "baby", "egg", "juvenile", "seed", "seedling", "hatched", "in", "stage"}
