"""Everything the policy reads that the simulator does not say."""

from __future__ import annotations

from collections.abc import Sequence

from rlds_jax.tasks.scienceworld.commands import META, Command
from rlds_jax.tasks.scienceworld.reward import PlayedTurn

_SYSTEM = """\
You do science experiments in a simulated house by typing commands. You are given one task and \
score points, up to 100, for each part of it that you bring about. Work out the subgoals first, \
find the things they need, and watch what each command changes.

Commands (OBJ is the name of a thing, PLACE that of a room):
{commands}
Free of game time, but each takes a turn of yours:
{meta}

`focus on` is how an answer is given: focus only on what the task names, and only when you have \
it. A wrong focus ends the task. If the simulator asks which of several things you mean, answer \
with the number alone.

You have {turns} turns. Doing the same thing {repeats} turns running ends the task. In each turn \
write your reasoning and then exactly one command:
<think>brief reasoning</think><action>command</action>"""

_ENDINGS = {
    "completed": "The task is complete.",
    "wrong_focus": "You focused on the wrong thing, which ends the task.",
    "max_turns": "There are no turns left.",
    "repeated": "You did the same thing too many turns running, which ends the task.",
}

NO_ACTION = "No command was found in your turn, so nothing happened."
BLOCKED = "The task cannot be reset. Nothing happened."
CHOOSE = "Answer with the number of your choice; anything else cancels the command."


def system_prompt(
    commands: Sequence[Command], turns: int, repeats: int, guidance: str | None
) -> str:
    prompt = _SYSTEM.format(
        commands="\n".join(f"- {c.template}: {c.meaning}" for c in commands),
        meta="\n".join(f"- {name}: {meaning}" for name, meaning in META.items()),
        turns=turns,
        repeats=repeats,
    )
    return f"{prompt}\n\n{guidance}" if guidance else prompt


def reminder(turns_left: int) -> str:
    """Ends every observation after the first."""
    return f"Turns left: {turns_left}. Write <think>...</think><action>command</action>"


def rejection(templates: Sequence[str]) -> str:
    """Follows the simulator's refusal of a command."""
    fitting = ", ".join(f"`{template}`" for template in templates)
    return f"Commands that fit: {fitting}. `objects` lists the names of things within reach."


def ending(ended_by: str, turns: Sequence[PlayedTurn], actions: Sequence[str | None]) -> str:
    """The terminal text: why, how many steps, the score and where it came from.

    Args:
      actions: per turn, as parsed.
    """
    best = max([0, *(turn.score for turn in turns)])
    label = "solved" if best == 100 else "partly solved" if best else "not solved"
    cause = _ENDINGS.get(ended_by, f"The episode was ended ({ended_by}).")
    return (
        f"{cause}\nSteps: {len(turns)}. Score: {best} of 100 ({label}).\n{_points(turns, actions)}"
    )


def _points(turns: Sequence[PlayedTurn], actions: Sequence[str | None]) -> str:
    before, lines = 0, []
    for step, (turn, action) in enumerate(zip(turns, actions, strict=True)):
        if turn.score > before:
            lines.append(f"Step {step}, `{action}`: +{turn.score - before}")
        before = max(before, turn.score)
    return "Points came from:\n" + "\n".join(lines) if lines else "No step scored any points."
