"""Two-hop questions made from an encyclopedia's short descriptions, by a seeded script.

  bridge      "In which year was the creator of WORK (1968 film) born?": WORK names its creator
  region      "In which part of the world is the country whose capital is CITY?"
  comparison  "Who was born first, A or B?"

Every question is split train or validation by its person or country, so the splits share none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

LIFE = re.compile(r"\((?:born )?(\d{4})(?:–(\d{4}))?\)$")
WORK = re.compile(r"(.+?) by ([^,(]+)$")
CAPITAL = re.compile(
    r"(?:Federal )?capital(?: city)?(?: and (?:the )?(?:largest|most populous) city)?"
    r" of (?:the )?(.+)",
    re.IGNORECASE,
)
COUNTRY = re.compile(r"Country in (?:the )?(.+)")
_VALIDATION_SHARE = 0.2


class Article(NamedTuple):
    """An article's title, one-line description, introduction and topic ("People", ...)."""

    title: str
    description: str
    extract: str
    topic: str

    @property
    def life(self) -> re.Match[str] | None:
        """Years of birth and death (or None), where it is a person and they are known."""
        return LIFE.search(self.description) if self.topic == "People" else None


class Hop(NamedTuple):
    """A query, and the title of the passage it should find."""

    query: str
    title: str


class Question(NamedTuple):
    """A question, its answer, and the searches that lead there."""

    kind: Literal["bridge", "region", "comparison"]
    split: Literal["train", "validation"]
    question: str
    answer: str
    hops: tuple[Hop, ...]


def make_questions(
    articles: Mapping[str, Article], seed: int, comparisons: int = 1500
) -> list[Question]:
    """All bridge and region questions, and a number of comparisons, in a seeded order.

    Args:
      articles: by title.
    """
    rng = np.random.default_rng(seed)
    lives = {t: m for t, a in articles.items() if (m := a.life)}
    works = [
        (article, match)
        for article in articles.values()
        if (match := WORK.fullmatch(article.description)) and match[2] in lives
    ]
    capitals = [
        (article, match[1])
        for article in articles.values()
        if (match := CAPITAL.fullmatch(article.description))
        and match[1] in articles
        and COUNTRY.fullmatch(articles[match[1]].description)
    ]
    owners = sorted({match[2] for _, match in works} | {country for _, country in capitals})
    people = sorted(set(lives) - set(owners))
    held_out = _held_out(owners, rng) | _held_out(people, rng)
    made = [*_bridges(works, lives, held_out), *_regions(capitals, articles, held_out)]
    made += _comparisons(people, lives, held_out, comparisons, rng)
    return [made[i] for i in rng.permutation(len(made))]


def _held_out(names: Sequence[str], rng: np.random.Generator) -> set[str]:
    chosen = rng.permutation(len(names))[: round(_VALIDATION_SHARE * len(names))]
    return {names[i] for i in chosen}


def _split(name: str, held_out: set[str]) -> Literal["train", "validation"]:
    return "validation" if name in held_out else "train"


def _bridges(
    works: Sequence[tuple[Article, re.Match[str]]],
    lives: Mapping[str, re.Match[str]],
    held_out: set[str],
) -> list[Question]:
    made = []
    for (article, match), (verb, group) in itertools.product(works, (("was", 1), ("did", 2))):
        kind, person = match[1], match[2]
        year = lives[person][group]
        if year is None:
            continue
        event = "born" if verb == "was" else "die"
        text = f"In which year {verb} the creator of {article.title} ({kind}) {event}?"
        hops = (Hop(f"{article.title}, {kind}", article.title), Hop(person, person))
        made.append(Question("bridge", _split(person, held_out), text, year, hops))
    return made


def _regions(
    capitals: Sequence[tuple[Article, str]], articles: Mapping[str, Article], held_out: set[str]
) -> list[Question]:
    made = []
    for city, country in capitals:
        region = COUNTRY.fullmatch(articles[country].description)
        assert region is not None
        text = f"In which part of the world is the country whose capital is {city.title}?"
        hops = (Hop(f"{city.title}, capital city", city.title), Hop(f"{country}, country", country))
        made.append(Question("region", _split(country, held_out), text, region[1], hops))
    return made


def _comparisons(
    people: Sequence[str],
    lives: Mapping[str, re.Match[str]],
    held_out: set[str],
    number: int,
    rng: np.random.Generator,
) -> list[Question]:
    """Pairs of the same split whose years of birth differ."""
    made: list[Question] = []
    for _ in range(100 * number if len(people) > 1 else 0):
        if len(made) == number:
            break
        first, second = (people[i] for i in rng.choice(len(people), size=2, replace=False))
        split = _split(first, held_out)
        years = int(lives[first][1]), int(lives[second][1])
        if split != _split(second, held_out) or years[0] == years[1]:
            continue
        text = f"Who was born first, {first} or {second}?"
        answer = first if years[0] < years[1] else second
        hops = (Hop(first, first), Hop(second, second))
        made.append(Question("comparison", split, text, answer, hops))
    return made
