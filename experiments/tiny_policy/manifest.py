"""What a tiny policy was trained for: hashes that go stale when a prompt or format changes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from experiments.tiny_policy.recipe import Recipe
from experiments.tiny_policy.tokenizer import CHAT_TEMPLATE
from rlds_jax.rollouts.prompts import EpisodeText, Prompts
from rlds_jax.tasks.base import Task

MANIFEST = "manifest.json"


def formats(recipe: Recipe, task: Task, directory: Path) -> dict[str, str]:
    """Hashes of everything the policy in `directory` is used to seeing, by what they cover."""
    episodes = recipe.probes(task)
    prompts = Prompts()
    k = len(task.subtasks)
    return {
        "prompts": _digest(
            task.system_prompt(),
            task.system_prompt("guidance"),
            dataclasses.asdict(prompts),
            [prompts.grader_messages(task.subtasks, episode) for episode in episodes],
            prompts.reflector_messages(task.subtasks, episodes[0]),
            prompts.reflector_messages(task.subtasks, episodes[0], grades=[1] * k, pivots=[2] * k),
            *task.tools,
        ),
        "observations": _digest([_shown(episode) for episode in episodes]),
        "template": _digest(CHAT_TEMPLATE),
        "tokenizer": _digest((directory / "tokenizer.json").read_text(encoding="utf-8")),
    }


def _shown(episode: EpisodeText) -> dict[str, Any]:
    return {
        "initial_observation": episode.initial_observation,
        "turns": list(episode.turns),
        "reward": episode.reward,
        "ended_by": episode.ended_by,
    }


def _digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
