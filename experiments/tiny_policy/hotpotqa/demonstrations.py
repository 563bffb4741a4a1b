"""Scripted transcripts of the three roles, with the real prompts and the real environment."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from experiments.tiny_policy import transcripts
from experiments.tiny_policy.hotpotqa import critics
from experiments.tiny_policy.hotpotqa.actor import GUIDED, UNGUIDED, Skill, act
from experiments.tiny_policy.hotpotqa.critics import Episode
from experiments.tiny_policy.hotpotqa.invented import Inventor, Scene, Shelf, passages_of
from experiments.tiny_policy.transcripts import Scribe, Shares, Transcript
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.hotpotqa import offline
from rlds_jax.tasks.hotpotqa.environment import HotpotQAEnvironment
from rlds_jax.tasks.hotpotqa.retriever import Retriever
from rlds_jax.tasks.hotpotqa.task import HotpotQA


@dataclasses.dataclass(frozen=True)
class Mixture(Shares):
    """Transcripts per question, and the shares within a role; see `Shares`.

    Attributes:
      real: share of questions from the encyclopedia, which is searched by title for them; the
        others are invented.
      bare: share of an invented question's actor transcripts without system prompt and tools,
        which takes half the tokens.
      drills: chance that an invented question comes with a list of names to write down again.
      graded: chance that an episode also gives a grader transcript.
      astray: share of guided episodes whose advised query is another question's, which the actor
        ignores.
    """

    real: float = 0.1
    bare: float = 0.7
    drills: float = 0.4
    graded: float = 0.25
    reflected: float = 0.4
    ungraded: float = 0.15
    astray: float = 0.1
    from_start: float = 0.2


class Demonstrator:
    """Makes transcripts question by question, all randomness from one seed."""

    def __init__(self, task: HotpotQA, mixture: Mixture, seed: int):
        self._task = task
        self._mixture = mixture
        self._scribe = Scribe(task, critics)
        self._seed = seed
        validation = (item.data["question"] for item in task.items("validation"))
        articles = offline.load_articles()
        self._inventor = Inventor(articles, validation)
        self._encyclopedia = passages_of(articles.values())

    def transcripts(self, split, start: int, stop: int) -> Iterator[Transcript]:
        """Transcripts of questions start..stop-1; the real ones are a split's, over and over."""
        items = self._task.items(split)
        for index in range(start, stop):
            rng = random.Random(f"{self._seed} {split} {index}")
            real = rng.random() < self._mixture.real
            item, passages = (
                Scene(items[index % len(items)], self._encyclopedia)
                if real
                else self._inventor.scene(rng)
            )
            searches = Retriever(Shelf(passages))
            environment = HotpotQAEnvironment(
                item.data["question"], item.data["answers"], searches, self._task.limits
            )
            yield from self._of_item(item, environment, 0.0 if real else self._mixture.bare, rng)
            searches.close()
            if rng.random() < self._mixture.drills:
                yield self._inventor.drill(rng)

    def _of_item(
        self, item: Item, environment: HotpotQAEnvironment, bare: float, rng: random.Random
    ) -> Iterator[Transcript]:
        mixture = self._mixture
        original = play(environment, item, UNGUIDED, rng)
        yield self._actor(original, bare, rng)
        episodes = [original]
        if not original.success:
            reports, step = self._scribe.failure(original, mixture, rng)
            yield from reports
            retry = play(environment, item, GUIDED, rng, prefix=original.turns[:step])
            yield self._scribe.actor(retry, step, self._guidance(original, rng))
            episodes.append(retry)
        for episode in episodes:
            if rng.random() < mixture.graded:
                yield self._scribe.grader(episode)

    def _actor(self, episode: Episode, bare: float, rng: random.Random) -> Transcript:
        transcript = self._scribe.actor(episode)
        return {"messages": transcript["messages"][1:]} if rng.random() < bare else transcript

    def _guidance(self, failed: Episode, rng: random.Random) -> str:
        target = "Paris" if rng.random() < self._mixture.astray else None
        return self._scribe.guidance(critics.diagnosis(failed), critics.suggestion(failed, target))


def play(
    environment: HotpotQAEnvironment,
    item: Item,
    skill: Skill,
    rng: random.Random,
    prefix: Sequence[Turn] = (),
) -> Episode:
    """Plays a question with the scripted actor, after replaying `prefix`."""
    question = item.data["question"]

    def turn(_: str, turns: Sequence[Turn]) -> str:
        return act(question, turns, skill, rng)

    return Episode.of(transcripts.play(environment, turn, prefix))
