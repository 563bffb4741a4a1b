"""What a tiny policy was trained for: hashes that go stale when a prompt or format changes."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from pathlib import Path

from experiments.tiny_policy.demonstrations import tiny_task
from experiments.tiny_policy.tokenizer import CHAT_TEMPLATE
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import FrozenLake

MANIFEST = "manifest.json"
REBUILD = "python -m experiments.tiny_policy.build --out=rlds_jax/models/tiny"
_BOARD = ["A D C", "D D D", "C D B"]


def formats(directory: Path) -> dict[str, str]:
    """Hashes of everything the policy in `directory` is used to seeing, by what they cover."""
    task = tiny_task()
    hole = ["Up", "jump", "Right", "Right"]  # past an edge and an invalid action
    goal = ["Down", "Right", "Right", "Down"]
    episodes = [_play(task, moves) for moves in (hole, goal, ["Up"] * task.max_turns)]
    prompts = Prompts()
    return {
        "prompts": _digest(
            task.system_prompt(),
            task.system_prompt("guidance"),
            dataclasses.asdict(prompts),
            [prompts.grader_messages(task.subtasks, episode) for episode in episodes],
            prompts.reflector_messages(task.subtasks, episodes[0]),
            prompts.reflector_messages(task.subtasks, episodes[0], grades=[1] * 5, pivots=[2] * 5),
        ),
        "observations": _digest([dataclasses.asdict(episode) for episode in episodes]),
        "template": _digest(CHAT_TEMPLATE),
        "tokenizer": _digest((directory / "tokenizer.json").read_text(encoding="utf-8")),
    }


@dataclasses.dataclass(frozen=True)
class _Episode:
    initial_observation: str
    turns: tuple[Turn, ...]
    reward: float
    ended_by: str


def _play(task: FrozenLake, moves: list[str]) -> _Episode:
    environment = task.environment(Item("manifest", {"board": _BOARD}))

    async def run() -> _Episode:
        initial = await environment.reset()
        turns = []
        for move in moves:
            action = f"<action>{move}</action>"
            result = await environment.step(action)
            turns.append(Turn(action, result.observation))
        assert result.ended_by is not None
        return _Episode(initial, tuple(turns), result.reward, result.ended_by)

    return asyncio.run(run())


def _digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
