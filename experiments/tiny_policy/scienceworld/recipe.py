"""The tiny policy of configs/scienceworld.py:tiny."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from configs.scienceworld import get_config
from experiments.tiny_policy.scienceworld import critics
from experiments.tiny_policy.scienceworld.actor import BOXES, ROOMS, THINGS
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.demonstrations import Demonstrator, Mixture
from experiments.tiny_policy.scienceworld.plan import targets
from experiments.tiny_policy.transcripts import Played, Transcript
from rlds_jax.rollouts.prompts import EpisodeText
from rlds_jax.rollouts.types import Trajectory, Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld import texts
from rlds_jax.tasks.scienceworld.reward import PlayedTurn
from rlds_jax.tasks.scienceworld.task import ScienceWorld

_NAMES = {*ROOMS, *BOXES, *THINGS, *(t.name for t in targets().values() if t.clear)}
_LONGEST_FIRST = sorted(_NAMES, key=lambda name: (-len(name), name))


class ScienceWorldRecipe:
    """See `Recipe`. The name of a room or a thing, a stage, a digit and a tag stand alone; merges
    run over lines, since what the simulator says between names is mostly the same."""

    directory = "tiny_scienceworld"
    critics = critics
    alone = (
        r"<action>command</action>|</?action>|</?|(?<=Next: )\w+"
        rf"| ?\b(?:{'|'.join(map(re.escape, _LONGEST_FIRST))}|\d)\b|\d"
    )
    vocabulary = 3072
    sft = types.MappingProxyType(
        {
            "epochs": 1,
            "model.hidden_size": 128,
            "model.intermediate_size": 384,
            "model.num_layers": 4,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.rope_theta": 1000.0,
            "batch.rows": 3,
            "batch.row_length": 640,
            "optimizer.learning_rate": 2e-3,
        }
    )
    items = 287

    def config(self) -> ConfigDict:
        return get_config("tiny")

    def transcripts(
        self, task: ScienceWorld, split: str, start: int, stop: int, seed: int
    ) -> Iterator[Transcript]:
        mixture = Mixture(plays=3, copies=6) if split == "train" else Mixture()
        return iter(Demonstrator(task, mixture, seed).transcripts(split, start, stop))

    def probes(self, task: ScienceWorld) -> Sequence[EpisodeText]:
        """Put together from the package's own texts, so that no simulator is needed."""
        return [_probe(cause) for cause in ("wrong_focus", "completed", "max_turns", "repeated")]

    def replay(self, task: ScienceWorld, item: Item, trajectory: Trajectory) -> Episode:
        """Nothing is played again: the texts of the turns tell all."""
        return Episode(
            targets()[item.id],
            trajectory.initial_observation,
            trajectory.turns,
            trajectory.reward,
            trajectory.ended_by,
        )


RECIPE = ScienceWorldRecipe()


def _probe(ended_by: str) -> Played:
    actions = ["teleport to outside", "dance", "no tag", "focus on axe"]
    played = [PlayedTurn(score, True, None) for score in (8, 8, 8, -100)]
    observations = [
        texts.reminder(7),
        texts.rejection(["open OBJ"]),
        f"{texts.NO_ACTION} {texts.CHOOSE} {texts.BLOCKED}",
        texts.ending(ended_by, played, actions),
    ]
    turns = tuple(map(Turn, actions, observations))
    return Played("Start.", turns, 0.08, ended_by == "completed", ended_by)
