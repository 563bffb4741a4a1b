"""The tiny policy of configs/frozenlake.py:tiny."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from configs.frozenlake import get_config
from experiments.tiny_policy.frozenlake import critics
from experiments.tiny_policy.frozenlake.critics import Episode
from experiments.tiny_policy.frozenlake.demonstrations import Demonstrator, Mixture
from experiments.tiny_policy.transcripts import Played, Transcript, play
from rlds_jax.rollouts.prompts import EpisodeText
from rlds_jax.rollouts.types import Trajectory
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import FrozenLake

_BOARD = ["A D C", "D D D", "C D B"]


class FrozenLakeRecipe:
    """See `Recipe`. A grid cell, a digit, a move and a tag are one token each."""

    directory = "tiny"
    critics = critics
    alone = r" ?\b(?:[A-D]|Up|Down|Left|Right|\d)\b|\d|\n+|</?action>|</?"
    vocabulary = 1536
    sft = types.MappingProxyType(
        {
            "epochs": 1,
            "model.hidden_size": 128,
            "model.intermediate_size": 384,
            "model.num_layers": 4,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.rope_theta": 300.0,
            "batch.rows": 8,
            "optimizer.learning_rate": 1.5e-3,
        }
    )
    items = 9_000

    def config(self) -> ConfigDict:
        return get_config("tiny")

    def transcripts(
        self, task: FrozenLake, split: str, start: int, stop: int, seed: int
    ) -> Iterator[Transcript]:
        return Demonstrator(task, Mixture(), seed).transcripts(split, start, stop)

    def probes(self, task: FrozenLake) -> Sequence[EpisodeText]:
        hole = ["Up", "jump", "Right", "Right"]  # past an edge and an invalid action
        goal = ["Down", "Right", "Right", "Down"]
        return [_probe(task, moves) for moves in (hole, goal, ["Up"] * task.max_turns)]

    def replay(self, task: FrozenLake, item: Item, trajectory: Trajectory) -> Episode:
        actions = iter([turn.action for turn in trajectory.turns])
        environment = task.environment(item)
        played = play(environment, lambda *_: next(actions))
        return Episode.of(played, environment, task.max_turns)


RECIPE = FrozenLakeRecipe()


def _probe(task: FrozenLake, moves: list[str]) -> Played:
    actions = iter([f"<action>{move}</action>" for move in moves])
    return play(task.environment(Item("manifest", {"board": _BOARD})), lambda *_: next(actions))
