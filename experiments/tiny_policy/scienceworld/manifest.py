"""What the tiny ScienceWorld policy was trained for: hashes that go stale when a format changes.

No simulator is needed: observations are those of a short recorded episode, put together by the
package's own texts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.tiny_policy.manifest import digest
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.demonstrations import tiny_task
from experiments.tiny_policy.scienceworld.plan import Target
from experiments.tiny_policy.tokenizer import CHAT_TEMPLATE
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.scienceworld import texts
from rlds_jax.tasks.scienceworld.reward import PlayedTurn

REBUILD = (
    "python -m experiments.tiny_policy.scienceworld.build --out=rlds_jax/models/tiny_scienceworld"
)


def formats(directory: Path) -> dict[str, str]:
    """Hashes of everything the policy in `directory` is used to seeing, by what they cover."""
    task = tiny_task()
    actions = ["teleport to outside", "focus on axe"]
    played = [PlayedTurn(8, True, "teleport"), PlayedTurn(-100, True, "focus")]
    endings = [
        texts.ending(cause, played, actions)
        for cause in ("wrong_focus", "completed", "max_turns", "repeated")
    ]
    turns = tuple(
        Turn(f"<action>{action}</action>", said)
        for action, said in zip(actions, (texts.reminder(7), endings[0]), strict=True)
    )
    episode = Episode(Target("dove", "outside"), "Start.", turns, 0.0, "wrong_focus")
    prompts = Prompts()
    return {
        "prompts": digest(
            task.system_prompt(),
            task.system_prompt("guidance"),
            dataclasses.asdict(prompts),
            prompts.grader_messages(task.subtasks, episode),
            prompts.reflector_messages(task.subtasks, episode),
            prompts.reflector_messages(task.subtasks, episode, grades=[1] * 6, pivots=[1] * 6),
        ),
        "observations": digest(
            endings, texts.reminder(3), texts.rejection(["open OBJ"]), texts.NO_ACTION, texts.CHOOSE
        ),
        "template": digest(CHAT_TEMPLATE),
        "tokenizer": digest((directory / "tokenizer.json").read_text(encoding="utf-8")),
    }
