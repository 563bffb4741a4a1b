"""Scripted transcripts of the three roles, with the real prompts and the real simulator."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.scienceworld import get_config
from experiments.tiny_policy.demonstrations import Messages, message
from experiments.tiny_policy.scienceworld import critics
from experiments.tiny_policy.scienceworld.actor import GUIDED, UNGUIDED, Skill, act, things
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.plan import Target
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld.task import SUBTASKS, ScienceWorld

TARGETS = Path(__file__).parent / "targets.json"


def tiny_task(**options) -> ScienceWorld:
    """The task of configs/scienceworld.py:tiny, which the policy is made for."""
    return ScienceWorld(**{**get_config("tiny").task.options, **options})


@functools.cache
def targets() -> Mapping[str, Target]:
    """By item, what the simulator's own solution looks for (targets.py)."""
    found = json.loads(TARGETS.read_text())["targets"]
    return {item: Target(name, room) for item, (name, room) in found.items()}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Transcripts per train item, and the shares within a role.

    Attributes:
      originals: episodes without guidance per item.
      graded, reflected: chance that an episode also gives a grader and a reflector transcript.
      ungraded: share of reflector transcripts without the grades section.
      from_start: share of guided episodes that restart at turn 0 wherever they went wrong.
    """

    originals: int = 1
    graded: float = 1.0
    reflected: float = 1.0
    ungraded: float = 0.15
    from_start: float = 0.3


class Demonstrator:
    """Makes transcripts item by item, all randomness from one seed."""

    def __init__(self, task: ScienceWorld, mixture: Mixture, seed: int):
        self._task = task
        self._mixture = mixture
        self._prompts = Prompts()
        self._seed = seed

    def transcripts(self, split, start: int, stop: int) -> list[Messages]:
        """Transcripts of those items start..stop-1 of a split that have a target, in item order."""
        items = [i for i in self._task.items(split)[start:stop] if i.id in targets()]

        async def run() -> list[list[Messages]]:
            return await asyncio.gather(
                *(
                    self._of_item(item, random.Random(f"{self._seed} {item.id} {i}"))
                    for item in items
                    for i in range(self._mixture.originals)
                )
            )

        return [transcript for found in asyncio.run(run()) for transcript in found]

    async def _of_item(self, item: Item, rng: random.Random) -> list[Messages]:
        mixture = self._mixture
        original = await play(self._task, item, UNGUIDED, rng)
        made = [self._actor(original)]
        episodes = [original]
        if not original.success:
            if rng.random() < mixture.reflected:
                made.append(self._reflector(original, graded=rng.random() >= mixture.ungraded))
            step = 0 if rng.random() < mixture.from_start else critics.retry_step(original)
            retry = await play(self._task, item, GUIDED, rng, prefix=original.turns[:step])
            guidance = self._prompts.guidance_text(
                critics.root_cause(original), critics.suggestion(original)
            )
            made.append(self._actor(retry, step, guidance))
            episodes.append(retry)
        return made + [self._grader(e) for e in episodes if rng.random() < mixture.graded]

    def _actor(self, episode: Episode, step: int = 0, guidance: str | None = None) -> Messages:
        in_system = guidance if step == 0 else None
        messages = [
            message("system", self._task.system_prompt(in_system)),
            message("user", episode.initial_observation),
        ]
        for i, turn in enumerate(episode.turns):
            messages.append(message("assistant", turn.action))
            if guidance is not None and i + 1 == step:
                messages.append(message("system", guidance))
            messages.append(message("user", turn.observation))
        return messages[:-1]

    def _grader(self, episode: Episode) -> Messages:
        prompt = self._prompts.grader_messages(SUBTASKS, episode)
        return [*prompt, message("assistant", critics.grader_answer(episode))]

    def _reflector(self, episode: Episode, graded: bool) -> Messages:
        grades = critics.grade(episode)
        prompt = self._prompts.reflector_messages(
            SUBTASKS,
            episode,
            grades=[grade.score for grade in grades] if graded else None,
            pivots=[grade.pivot for grade in grades] if graded else None,
        )
        return [*prompt, message("assistant", critics.reflector_answer(episode))]


async def play(
    task: ScienceWorld, item: Item, skill: Skill, rng: random.Random, prefix: Sequence[Turn] = ()
) -> Episode:
    """Plays an item with the scripted actor, after replaying `prefix`."""
    target = targets()[item.id]
    alike = [name for name in _alike()[item.data["task"]] if name != target.name]
    environment = task.environment(item)
    try:
        initial = await environment.reset()
        turns: list[Turn] = []
        result = None
        while result is None or not result.done:
            episode = Episode(target, initial, tuple(turns), 0.0, "")
            if len(turns) < len(prefix):
                text = prefix[len(turns)].action
            else:
                seen = turns[-1].observation if turns else initial
                others = things(seen, alike)
                text = act(episode.goal, target, episode.states[-1], others, skill, rng)
            result = await environment.step(text)
            turns.append(Turn(text, result.observation))
    finally:
        await environment.close()
    assert result.ended_by is not None
    return Episode(target, initial, tuple(turns), result.reward, result.ended_by)


@functools.cache
def _alike() -> Mapping[str, list[str]]:
    """By task, the names that its solutions look for."""
    names = defaultdict(set)
    for item, target in targets().items():
        names[item.rpartition("-")[0]].add(target.name)
    return {task: sorted(found) for task, found in names.items()}
