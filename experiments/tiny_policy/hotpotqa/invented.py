"""Invented questions: real sentences with fresh names and years, so that only copying answers them.

The encyclopedia has a few hundred people, which a small policy learns by heart. Here each question
has names of its own, in the words and letters of real titles, and a shelf of passages to search.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.tiny_policy.transcripts import Transcript
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.hotpotqa.offline import passage_text
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.questions import CAPITAL, COUNTRY, LIFE, WORK, Article

_WORD = re.compile(r"[^\W\d_]{3,}")
_YEAR = re.compile(r"\d{4}")


class Names:
    """Makes names up: a title's capitalised words become words of other titles, or invented ones.

    Args:
      titles: whose words, and whose pairs of letters, names are made of.
      invented: share of the words that are made letter by letter.
    """

    def __init__(self, titles: Iterable[str], invented: float = 0.6):
        self._invented = invented
        words = {word for title in titles for word in _WORD.findall(title) if word[0].isupper()}
        self._words = sorted(words)
        self._next: dict[str, list[str]] = defaultdict(list)
        for word in self._words:
            spelt = f"^^{word}$"
            for i in range(len(spelt) - 2):
                self._next[spelt[i : i + 2]].append(spelt[i + 2])

    def like(self, title: str, rng: random.Random) -> str:
        """A new name of the form of `title`."""

        def replace(match: re.Match[str]) -> str:
            return self.word(rng) if match[0][0].isupper() else match[0]

        return _WORD.sub(replace, title)

    def word(self, rng: random.Random) -> str:
        if rng.random() >= self._invented:
            return rng.choice(self._words)
        while True:
            spelt = "^^"
            while not spelt.endswith("$") and len(spelt) < 13:
                spelt += rng.choice(self._next[spelt[-2:]])
            if spelt.endswith("$") and len(spelt) > 5:
                return spelt[2:-1]


class Scene(NamedTuple):
    """A question with the passages that answer it, and others."""

    item: Item
    passages: tuple[Passage, ...]


def passages_of(articles: Iterable[Article]) -> tuple[Passage, ...]:
    return tuple(Passage("", article.title, passage_text(article)) for article in articles)


class Shelf:
    """A source of passages: those a query names, the longest titles first, then the others."""

    def __init__(self, passages: Sequence[Passage]):
        self._passages = passages

    async def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        named = sorted((p for p in self._passages if p.title in query), key=lambda p: -len(p.title))
        others = [p for p in self._passages if p.title not in query]
        return (*named, *others)[:top_k]

    async def close(self) -> None:
        pass


class Inventor:
    """Makes scenes out of real articles, none of which a validation question is about.

    Args:
      articles: by title.
      validation: the questions of the validation split.
    """

    def __init__(self, articles: Mapping[str, Article], validation: Iterable[str]):
        asked = "\n".join(validation)
        held_out = {title for title in articles if title in asked}
        works = {a.title: m for a in articles.values() if (m := WORK.fullmatch(a.description))}
        held_out |= {works[title][2] for title in held_out & works.keys()}
        free = [articles[title] for title in sorted(articles.keys() - held_out)]
        self._names = Names(article.title for article in free)
        self._people = [a for a in free if a.life and "(" not in a.title]
        self._works = [a for a in free if a.title in works and works[a.title][2] in articles]
        self._cities = [a for a in free if CAPITAL.fullmatch(a.description)]
        self._countries = [a for a in free if COUNTRY.fullmatch(a.description)]

    def scene(self, rng: random.Random) -> Scene:
        """A question, its two articles and three others, no two of one title."""
        make = rng.choices([self._comparison, self._bridge, self._region], [0.5, 0.3, 0.2])[0]
        question, answer, articles = make(rng)
        shelf = [*articles, self._work(self.person(rng), rng)[0]]
        shelf += [self._life(self.person(rng), rng)[0] for _ in range(2)]
        if len({article.title for article in shelf}) < len(shelf):
            return self.scene(rng)
        rng.shuffle(shelf)
        item = Item("invented", {"question": question, "answers": [answer]})
        return Scene(item, passages_of(shelf))

    def person(self, rng: random.Random) -> str:
        """A person's name."""
        return self._names.like(rng.choice(self._people).title, rng)

    def drill(self, rng: random.Random) -> Transcript:
        """A few names, and the same again."""
        names = "\n".join(self.person(rng) for _ in range(rng.choice((1, 1, 2, 3, 5))))
        user, assistant = ({"role": role, "content": names} for role in ("user", "assistant"))
        return {"messages": [user, assistant]}

    def _life(self, name: str, rng: random.Random) -> tuple[Article, re.Match[str]]:
        """An article on an invented person, and years of birth and death (or None)."""
        article = rng.choice(self._people)
        born = rng.randint(1400, 1990)
        alive = article.life is not None and article.life[2] is None
        years = f"(born {born})" if alive else f"({born}–{born + rng.randint(25, 95)})"
        description = LIFE.sub(years, article.description)
        life = LIFE.search(description)
        assert life is not None
        return _renamed(article, name, description, rng), life

    def _work(self, creator: str, rng: random.Random) -> tuple[Article, str]:
        """An article on an invented work, and what kind of work it is."""
        article = rng.choice(self._works)
        match = WORK.fullmatch(article.description)
        assert match is not None
        kind = _YEAR.sub(lambda _: str(rng.randint(1400, 1999)), match[1])
        extract = article.extract.replace(match[2], creator)
        title = self._names.like(article.title, rng)
        return _renamed(article._replace(extract=extract), title, f"{kind} by {creator}", rng), kind

    def _comparison(self, rng: random.Random) -> tuple[str, str, Sequence[Article]]:
        first, one = self._life(self.person(rng), rng)
        second, other = self._life(self.person(rng), rng)
        while other[1] == one[1]:
            second, other = self._life(second.title, rng)
        answer = first.title if int(one[1]) < int(other[1]) else second.title
        return f"Who was born first, {first.title} or {second.title}?", answer, (first, second)

    def _bridge(self, rng: random.Random) -> tuple[str, str, Sequence[Article]]:
        creator = self.person(rng)
        work, kind = self._work(creator, rng)
        person, life = self._life(creator, rng)
        dead = life[2] is not None and rng.random() < 0.5
        verb, event = ("did", "die") if dead else ("was", "born")
        question = f"In which year {verb} the creator of {work.title} ({kind}) {event}?"
        return question, life[2] if dead else life[1], (work, person)

    def _region(self, rng: random.Random) -> tuple[str, str, Sequence[Article]]:
        city, country = rng.choice(self._cities), rng.choice(self._countries)
        capital, where = CAPITAL.fullmatch(city.description), COUNTRY.fullmatch(country.description)
        assert capital is not None
        assert where is not None
        name = self._names.like(country.title, rng)
        form = city.description[: capital.start(1)]
        extract = city.extract.replace(capital[1], name)
        town = self._names.like(city.title, rng)
        articles = (
            _renamed(city._replace(extract=extract), town, form + name, rng),
            _renamed(country, name, country.description, rng),
        )
        question = f"In which part of the world is the country whose capital is {town}?"
        return question, where[1], articles


def _renamed(article: Article, title: str, description: str, rng: random.Random) -> Article:
    """The article under another title; half of them end with the description."""
    extract = article.extract.replace(article.title, title) if rng.random() < 0.5 else ""
    return Article(title, description, extract, article.topic)
