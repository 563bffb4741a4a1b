"""Scripted transcripts of the three roles, with the real prompts and the real environment."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator

from configs.frozenlake import get_config
from experiments.tiny_policy import critics
from experiments.tiny_policy.actor import GUIDED, UNGUIDED, Skill, act, safe_route
from experiments.tiny_policy.critics import Episode
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.frozenlake import STEPS, SUBTASKS, FrozenLake

Messages = list[dict[str, str]]


def tiny_task() -> FrozenLake:
    """The task of configs/frozenlake.py:tiny, which the policy is made for."""
    return FrozenLake(**get_config("tiny").task.options)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Transcripts per train item, and the shares within a role.

    Attributes:
      graded, reflected: chance that an episode also gives a grader and a reflector transcript.
      ungraded: share of reflector transcripts without the grades section.
      astray: share of guided episodes whose advised route is random, which the actor ignores.
      from_start: share of guided episodes that restart at turn 0 wherever they went wrong.
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
        self._prompts = Prompts()
        self._seed = seed

    def transcripts(self, split, start: int, stop: int) -> Iterator[Messages]:
        """Transcripts of items start..stop-1 of a split, in item order."""
        items = self._task.items(split)
        for index in range(start, stop):
            yield from self._of_item(items[index], random.Random(f"{self._seed} {split} {index}"))

    def _of_item(self, item, rng: random.Random) -> Iterator[Messages]:
        mixture = self._mixture
        original = play(self._task, item, UNGUIDED, rng)
        yield self._actor(original)
        episodes = [original]
        if not original.success:
            if rng.random() < mixture.reflected:
                yield self._reflector(original, graded=rng.random() >= mixture.ungraded)
            step = 0 if rng.random() < mixture.from_start else critics.retry_step(original)
            retry = play(self._task, item, GUIDED, rng, prefix=original.turns[:step])
            yield self._actor(retry, step, self._guidance(original, rng))
            episodes.append(retry)
        for episode in episodes:
            if rng.random() < mixture.graded:
                yield self._grader(episode)

    def _guidance(self, failed: Episode, rng: random.Random) -> str:
        if rng.random() < self._mixture.astray:
            route = rng.choices(list(STEPS), k=rng.randint(1, 4))
        else:
            route = safe_route(failed.board, failed.log[critics.retry_step(failed)].before)
        return self._prompts.guidance_text(
            critics.diagnosis(failed), critics.suggestion(failed, route)
        )

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


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def play(
    task: FrozenLake, item, skill: Skill, rng: random.Random, prefix: tuple[Turn, ...] = ()
) -> Episode:
    """Plays an item with the scripted actor, after replaying `prefix`."""
    environment = task.environment(item)

    async def run() -> Episode:
        initial = await environment.reset()
        turns: list[Turn] = []
        result = None
        while result is None or not result.done:
            if len(turns) < len(prefix):
                text = prefix[len(turns)].action
            else:
                cell = environment.log[-1].after if environment.log else environment.board.start
                text = act(environment.board, cell, skill, rng)
            result = await environment.step(text)
            turns.append(Turn(text, result.observation))
        assert result.ended_by is not None
        return Episode(
            board=environment.board,
            max_turns=task.max_turns,
            initial_observation=initial,
            turns=tuple(turns),
            log=tuple(environment.log),
            reward=result.reward,
            ended_by=result.ended_by,
        )

    return asyncio.run(run())
