"""The scripted actor: says where it is and what comes next, then acts, as well as its skill."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from experiments.tiny_policy.scienceworld.plan import Goal, Stage, State, Target, remaining

ROOMS = (
    *("hallway", "kitchen", "bathroom", "bedroom", "living room", "art studio", "workshop"),
    *("greenhouse", "outside", "foundry"),
)
THINGS = ("axe", "fire pit", "fountain", "bee hive", "jug", "shovel")
STAGES = ("find", "look", "focus", "take", "carry", "place", "answer", "rest")
_IDLE = ("inventory", "wait1")  # short answers keep transcripts short
BOXES = ("red box", "green box", "blue box", "orange box", "purple box", "yellow box")
_STATED = re.compile(r"<think>In ([\w ]+)\. Next: (\w+)\. ")


@dataclasses.dataclass(frozen=True)
class Skill:
    """Chances of each kind of mistake, where it can be made.

    Attributes:
      invalid: answers without an action tag.
      idle: does something that changes nothing.
      misread: takes the agent to be in another room.
      stray: teleports to another room than the one needed.
      confuse: focuses on another thing.
      forget: leaves without taking the thing along.
      misplace: moves it to a box of another colour.
    """

    invalid: float
    idle: float
    misread: float
    stray: float
    confuse: float
    forget: float
    misplace: float


UNGUIDED = Skill(0.01, 0.08, 0.03, 0.25, 0.25, 0.3, 0.2)
GUIDED = Skill(0.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)


def things(seen: str, alike: Sequence[str]) -> list[str]:
    """Names that occur in an observation, among things alike and things of other kinds."""
    words = [name for name in (*alike, *THINGS) if re.search(rf"\b{name}\b", seen)]
    return words or list(THINGS)


def act(
    goal: Goal, target: Target, state: State, others: list[str], skill: Skill, rng: random.Random
) -> str:
    """The text of one turn; `others` are things to mistake the target for."""
    stages = remaining(goal, target, state)
    stage = stages[0] if stages else Stage("rest", "wait1")
    stage = _mistaken(stage, goal, target, state, others, skill, rng)
    room = rng.choice(ROOMS) if rng.random() < skill.misread else state.room
    thought = f"<think>In {room}. Next: {stage.name}. For {goal.thought}</think>"
    if rng.random() < skill.invalid:
        return thought
    return f"{thought}<action>{stage.command}</action>"


def stated_room(text: str) -> str | None:
    """The room a turn's text says the agent is in."""
    match = _STATED.match(text)
    return match[1] if match else None


def _mistaken(
    stage: Stage,
    goal: Goal,
    target: Target,
    state: State,
    others: list[str],
    skill: Skill,
    rng: random.Random,
) -> Stage:
    """The stage, or a mistake in its place."""

    def errs(chance: float) -> bool:
        return rng.random() < chance

    if stage.name == "answer":
        return stage
    if errs(skill.idle):
        return Stage("rest", rng.choice(_IDLE))
    if stage.name == "take" and errs(skill.forget):
        return Stage("carry", f"teleport to {goal.box_room}")
    if stage.name in ("find", "carry") and errs(skill.stray):
        return Stage(stage.name, f"teleport to {_other(ROOMS, stage.command, rng)}")
    if stage.name == "focus" and errs(skill.confuse):
        return Stage("focus", f"focus on {rng.choice(others)}")
    if stage.name == "place" and errs(skill.misplace):
        name = state.focused or target.name
        return Stage("place", f"move {name} to {_other(BOXES, stage.command, rng)}")
    return stage


def _other(names: tuple[str, ...], command: str, rng: random.Random) -> str:
    """One of the names that the command does not end in."""
    return rng.choice([name for name in names if not command.endswith(name)])
