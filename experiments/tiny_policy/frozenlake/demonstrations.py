"""Scripted transcripts of the three roles, with the real prompts and the real environment."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from experiments.tiny_policy import transcripts
from experiments.tiny_policy.frozenlake import critics
from experiments.tiny_policy.frozenlake.actor import GUIDED, UNGUIDED, Skill, act
from experiments.tiny_policy.frozenlake.critics import Episode
from experiments.tiny_policy.transcripts import Scribe, Shares, Transcript
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import STEPS, FrozenLake


@dataclasses.dataclass(frozen=True)
class Mixture(Shares):
    """Transcripts per train item, and the shares within a role; see `Shares`.

    Attributes:
      graded: chance that an episode also gives a grader transcript.
      astray: share of guided episodes whose advised route is random, which the actor ignores.
    """

    graded: float = 0.35
    reflected: float = 0.5
    ungraded: float = 0.15
    astray: float = 0.15
    from_start: float = 0.2


class Demonstrator:
    """Makes transcripts item by item, all randomness from one seed."""

    def __init__(self, task: FrozenLake, mixture: Mixture, seed: int):
        self._task = task
        self._mixture = mixture
        self._scribe = Scribe(task, critics)
        self._seed = seed

    def transcripts(self, split, start: int, stop: int) -> Iterator[Transcript]:
        """Transcripts of items start..stop-1 of a split, in item order."""
        items = self._task.items(split)
        for index in range(start, stop):
            yield from self._of_item(items[index], random.Random(f"{self._seed} {split} {index}"))

    def _of_item(self, item, rng: random.Random) -> Iterator[Transcript]:
        mixture = self._mixture
        original = play(self._task, item, UNGUIDED, rng)
        yield self._scribe.actor(original)
        episodes = [original]
        if not original.success:
            reports, step = self._scribe.failure(original, mixture, rng)
            yield from reports
            retry = play(self._task, item, GUIDED, rng, prefix=original.turns[:step])
            yield self._scribe.actor(retry, step, self._guidance(original, rng))
            episodes.append(retry)
        for episode in episodes:
            if rng.random() < mixture.graded:
                yield self._scribe.grader(episode)

    def _guidance(self, failed: Episode, rng: random.Random) -> str:
        route = None
        if rng.random() < self._mixture.astray:
            route = rng.choices(list(STEPS), k=rng.randint(1, 4))
        return self._scribe.guidance(critics.diagnosis(failed), critics.suggestion(failed, route))


def play(
    task: FrozenLake, item: Item, skill: Skill, rng: random.Random, prefix: Sequence[Turn] = ()
) -> Episode:
    """Plays an item with the scripted actor, after replaying `prefix`."""
    environment = task.environment(item)

    def turn(*_: object) -> str:
        cell = environment.log[-1].after if environment.log else environment.board.start
        return act(environment.board, cell, skill, rng)

    played = transcripts.play(environment, turn, prefix)
    return Episode.of(played, environment, task.max_turns)
