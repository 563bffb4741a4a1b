"""Scripted transcripts of the three roles, with the real prompts and the real simulator."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from experiments.tiny_policy.scienceworld import critics
from experiments.tiny_policy.scienceworld.actor import GUIDED, UNGUIDED, Skill, act, things
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.plan import targets
from experiments.tiny_policy.scienceworld.renaming import renamed
from experiments.tiny_policy.transcripts import Scribe, Shares, Transcript, play_async
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld.task import ScienceWorld


@dataclasses.dataclass(frozen=True)
class Mixture(Shares):
    """Plays per item, transcripts per play, and the shares within a role; see `Shares`.

    Attributes:
      plays: of each item, with other mistakes.
      copies: of each transcript, with other names.
      graded: chance that an episode of a play, the original or its retry, is graded.
    """

    plays: int = 1
    copies: int = 0
    graded: float = 0.8
    reflected: float = 1.0
    ungraded: float = 0.15
    from_start: float = 0.3


class Demonstrator:
    """Makes transcripts item by item, all randomness from one seed."""

    def __init__(self, task: ScienceWorld, mixture: Mixture, seed: int):
        self._task = task
        self._mixture = mixture
        self._scribe = Scribe(task, critics)
        self._seed = seed

    def transcripts(self, split, start: int, stop: int) -> list[Transcript]:
        """Transcripts of the items start..stop-1 of a split, less those without a clear target."""
        items = [i for i in self._task.items(split)[start:stop] if targets()[i.id].clear]

        async def run() -> list[list[Transcript]]:
            plays = itertools.product(items, range(self._mixture.plays))
            return await asyncio.gather(
                *(
                    self._play(item, random.Random(f"{self._seed} {item.id} {n}"))
                    for item, n in plays
                )
            )

        made = [transcript for found in asyncio.run(run()) for transcript in found]
        rng = random.Random(f"{self._seed} names")
        return made + [renamed(t, rng) for _ in range(self._mixture.copies) for t in made]

    async def _play(self, item: Item, rng: random.Random) -> list[Transcript]:
        mixture = self._mixture
        original = await play(self._task, item, UNGUIDED, rng)
        made = [self._scribe.actor(original)]
        episodes = [original]
        if not original.success:
            reports, step = self._scribe.failure(original, mixture, rng)
            made += reports
            retry = await play(self._task, item, GUIDED, rng, prefix=original.turns[:step])
            guidance = self._scribe.guidance(
                critics.diagnosis(original), critics.suggestion(original)
            )
            made.append(self._scribe.actor(retry, step, guidance))
            episodes.append(retry)
        if rng.random() < mixture.graded:
            made.append(self._scribe.grader(rng.choice(episodes)))
        return made


async def play(
    task: ScienceWorld, item: Item, skill: Skill, rng: random.Random, prefix: Sequence[Turn] = ()
) -> Episode:
    """Plays an item with the scripted actor, after replaying `prefix`."""
    target = targets()[item.id]
    alike = [name for name in _alike()[item.data["task"]] if name != target.name]

    def turn(initial: str, turns: Sequence[Turn]) -> str:
        episode = Episode(target, initial, tuple(turns), 0.0, "")
        others = things(turns[-1].observation if turns else initial, alike)
        return act(episode.goal, target, episode.states[-1], others, skill, rng)

    played = await play_async(task.environment(item), turn, prefix)
    return Episode(target, played.initial_observation, played.turns, played.reward, played.ended_by)


@functools.cache
def _alike() -> Mapping[str, list[str]]:
    """By task, the names that its solutions look for."""
    names = defaultdict(set)
    for item, target in targets().items():
        if target.clear:
            names[item.rpartition("-")[0]].add(target.name)
    return {task: sorted(found) for task, found in names.items()}
