"""What a task adds to the making of its tiny policy; `load` finds it by the task's name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ml_collections import ConfigDict

from experiments.tiny_policy.transcripts import Critics, Transcript
from rlds_jax.rollouts.prompts import EpisodeText
from rlds_jax.rollouts.types import Trajectory
from rlds_jax.tasks.base import Item, Task

TASKS = ("frozenlake", "hotpotqa", "scienceworld")


class Recipe(Protocol):
    """One task's scripted demonstrations, and the sizes of tokenizer, model and training.

    Attributes:
      directory: of the bundled policy, under rlds_jax/models.
      critics: of the episodes that `replay` gives.
      alone: regular expression of the texts that no merge of the tokenizer runs into.
      vocabulary: most tokens, the chat tokens included.
      sft: fields of configs/sft.py.
      items: train items demonstrated on.
    """

    directory: str
    critics: Critics
    alone: str
    vocabulary: int
    sft: Mapping[str, Any]
    items: int

    def config(self) -> ConfigDict:
        """The tiny config, which the policy is made for."""
        ...

    def transcripts(
        self, task: Task, split: str, start: int, stop: int, seed: int
    ) -> Iterator[Transcript]:
        """Transcripts of all roles on the items start..stop-1 of a split, in item order."""
        ...

    def probes(self, task: Task) -> Sequence[EpisodeText]:
        """A few fixed episodes that show every kind of observation, a failure first."""
        ...

    def replay(self, task: Task, item: Item, trajectory: Trajectory) -> Any:
        """The episode of a trajectory, with what truly happened in it."""
        ...


@runtime_checkable
class Drilled(Protocol):
    """A recipe whose policy is trained on something simpler before its transcripts.

    Attributes:
      drill_sft: fields of configs/sft.py that differ meanwhile.
    """

    drill_sft: Mapping[str, Any]

    def drills(self, task: Any, seed: int) -> Iterable[Transcript]:
        """What it is trained on first."""
        ...


def load(name: str) -> Recipe:
    """The recipe of a task in TASKS."""
    return importlib.import_module(f"experiments.tiny_policy.{name}.recipe").RECIPE


def bundled(recipe: Recipe) -> Path:
    """Where the package keeps the policy."""
    return Path(str(resources.files("rlds_jax") / "models" / recipe.directory))
