"""What a turn may say: the action tag, the simulator's commands, and what it makes of them."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from rlds_jax.tasks.think import outside_think


class Command(NamedTuple):
    """A kind of command.

    Attributes:
      verb: what it counts as.
      template: as shown to the policy.
      meaning: what it does, a phrase.
      words: beginnings the simulator knows it by, the template's own aside.
    """

    verb: str
    template: str
    meaning: str
    words: tuple[str, ...] = ()


_WALKING = ("move to", "move through", "move into", "walk to", "walk through")

COMMANDS = (
    Command("look around", "look around", "describes the room", ("look",)),
    Command("look at", "look at OBJ", "describes a thing closely", ("look on", "examine")),
    Command("look in", "look in OBJ", "lists what a container holds"),
    Command("inventory", "inventory", "lists what you carry"),
    Command("read", "read OBJ", "reads a note or a book"),
    Command("teleport", "teleport to PLACE", "takes you to any room at once"),
    Command("go", "go to PLACE", "walks through an open door", _WALKING),
    Command("open", "open OBJ", "opens a door or a container"),
    Command("close", "close OBJ", "closes it"),
    Command("pick up", "pick up OBJ", "takes a thing into the inventory", ("get", "take")),
    Command("put down", "put down OBJ", "leaves a carried thing here", ("drop",)),
    Command("move", "move OBJ to OBJ", "puts a thing into or onto another", ("put",)),
    Command("pour", "pour OBJ into OBJ", "empties a container into another"),
    Command("dunk", "dunk OBJ into OBJ", "dips a thing into a liquid"),
    Command("mix", "mix OBJ", "lets the contents of a container react", ("stir",)),
    Command("activate", "activate OBJ", "turns a device on", ("turn on",)),
    Command("deactivate", "deactivate OBJ", "turns it off", ("turn off",)),
    Command("use", "use OBJ on OBJ", "applies a tool or an instrument, such as a thermometer"),
    Command("connect", "connect OBJ to OBJ", "joins electrical parts"),
    Command("disconnect", "disconnect OBJ", "undoes that"),
    Command("eat", "eat OBJ", "eats it", ("consume",)),
    Command("flush", "flush OBJ", "flushes it"),
    Command("focus", "focus on OBJ", "names the thing that the task asks for", ("focus",)),
    Command("wait", "wait", "lets ten moments pass; `wait1` lets one pass", ("wait1",)),
)
META = {
    "help": "lists the commands",
    "objects": "lists the names of the things within reach",
    "task": "repeats the task",
}
EXPERIMENTAL = frozenset({"connect", "activate", "deactivate", "use", "mix", "pour", "wait"})

_ELECTRICAL = frozenset({"connect", "disconnect"})
_ARTICLES = frozenset({"a", "an", "the"})  # the simulator drops them
_ACTION = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.ASCII | re.DOTALL)


def parse_action(text: str) -> str | None:
    """The last action tag outside think blocks, spaces collapsed, or None."""
    actions = _ACTION.findall(outside_think(text))
    return " ".join(actions[-1].split()) if actions else None


def thinks(text: str) -> bool:
    """Whether a turn has a think block."""
    return outside_think(text) != text


def canonical(action: str) -> str:
    """What the simulator compares: lower case, without articles."""
    return " ".join(word for word in action.lower().split() if word not in _ARTICLES)


def is_reset(action: str) -> bool:
    """Whether it would reset the task's progress, which an episode must not."""
    return canonical(action) == "reset task"


def verb(action: str) -> str | None:
    """The verb an action counts as: the command with the longest beginning that fits, or None."""
    said = canonical(action)
    found: tuple[int, str] | None = None
    for command in COMMANDS:
        for words in (command.verb, *command.words):
            if f"{said} ".startswith(f"{words} ") and (found is None or len(words) > found[0]):
                found = len(words), command.verb
    return found[1] if found else None


Verdict = Literal["accepted", "unknown", "ambiguous"]


def verdict(observation: str) -> Verdict:
    """What the simulator made of a command, by its answer."""
    if observation.startswith("Ambiguous request"):
        return "ambiguous"
    if observation.startswith(("No known action matches", "Unknown action")):
        return "unknown"
    return "accepted"


def available(simplification: str, electrical: bool) -> tuple[Command, ...]:
    """The commands an episode has.

    Args:
      electrical: the task is about circuits, where "easy" leaves the electrical commands in.
    """
    used = simplification.split(",")
    teleports = "easy" in used or "teleportAction" in used
    connects = electrical or not {"easy", "noElectricalAction"} & set(used)
    return tuple(
        command
        for command in COMMANDS
        if (teleports or command.verb != "teleport")
        and (connects or command.verb not in _ELECTRICAL)
    )


def that_fit(action: str, commands: tuple[Command, ...]) -> list[str]:
    """Templates to show for a rejected action: those that share its verb or its first word, else
    all of them."""
    said = verb(action)
    first = canonical(action).partition(" ")[0]
    fitting = [c.template for c in commands if c.verb == said or first in c.template.split()]
    return fitting or [command.template for command in commands]
