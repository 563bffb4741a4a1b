"""The scripted actor: searches for what a question names, notes what it reads, and answers.

It reads only what the policy reads: the question and the results of its searches.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.hotpotqa.environment import SEARCH
from rlds_jax.tasks.hotpotqa.reward import extract_boxed
from rlds_jax.tasks.tool_calls import ToolCall, check_arguments, parse_tool_calls

_COMPARISON = re.compile(r"Who was born first, (.+) or (.+)\?")
_WORK = re.compile(r"In which year (?:was|did) the creator of (.+) (born|die)\?")
_CAPITAL = re.compile(r"whose capital is (.+)\?")
_RESULT = re.compile(r"\[\d+\] (.+)")
_YEARS = re.compile(r"\((?:born )?(\d{4})(?:–(\d{4}))?\)")
_CREATOR = re.compile(r"^.{0,60}? by ((?:\w\. ?)*[^,(.\[]+)\.")
_COUNTRY_OF = re.compile(r"^.{0,60}? of (?:the )?([^.\[]+)\.")
_REGION = re.compile(r"^Country (?:located )?in (?:the )?([^.\[]+)\.")


@dataclasses.dataclass(frozen=True)
class Skill:
    """Chances of each kind of mistake.

    Attributes:
      malformed: per call, that it is not valid JSON.
      verbatim: that the first query is the question itself.
      repeat: per further search, that it asks the same again.
      early: per further turn, that it answers before everything is known.
      misread: per further turn, that it takes what it reads from another line.
      misjudge: that a comparison goes the wrong way.
    """

    malformed: float
    verbatim: float
    repeat: float
    early: float
    misread: float
    misjudge: float


UNGUIDED = Skill(0.03, 0.25, 0.12, 0.25, 0.08, 0.2)
GUIDED = Skill(0.0, 0.01, 0.01, 0.01, 0.01, 0.01)


class Plan(NamedTuple):
    """Where a question stands after what has been read.

    Attributes:
      target: the title to search for next; None where all is known.
      note: what the last results said, in a few words; "" before the first.
      answer: of the question; None where something is missing.
      guesses: answers one might give too early.
    """

    target: str | None
    note: str
    answer: str | None
    guesses: tuple[str, ...]


def question_of(observation: str) -> str:
    return observation.removeprefix("Question: ")


def passages(turns: Sequence[Turn]) -> list[str]:
    """All results shown so far, each "title text"."""
    return [found for turn in turns for found in _RESULT.findall(turn.observation)]


def plan(question: str, results: Sequence[str]) -> Plan:
    """What to do next, given the results read so far."""
    if match := _COMPARISON.search(question):
        return _compare(match[1], match[2], results)
    if match := _WORK.search(question):
        return _bridge(match[1], 2 if match[2] == "die" else 1, results)
    match = _CAPITAL.search(question)
    assert match is not None, question
    return _region(match[1], results)


def _about(title: str, results: Sequence[str], pattern: re.Pattern[str]) -> re.Match[str] | None:
    """The pattern's match in the text of the result of that title."""
    texts = [r.removeprefix(title + " ") for r in results if r.startswith(title + " ")]
    return next((m for text in texts if (m := pattern.search(text))), None)


def _compare(first: str, second: str, results: Sequence[str]) -> Plan:
    names = (first, second)
    lives = [_about(name, results, _YEARS) for name in names]
    if lives[0] is None:
        return Plan(first, "", None, names)
    if lives[1] is None:
        return Plan(second, lives[0][1], None, names)
    at = 0 if int(lives[0][1]) < int(lives[1][1]) else 1
    note = f"{lives[0][1]} {'<' if at == 0 else '>'} {lives[1][1]}"
    return Plan(None, note, names[at], names)


def _bridge(work: str, group: int, results: Sequence[str]) -> Plan:
    title = re.sub(r" \([^()]*\)$", "", work)
    creator = _about(title, results, _CREATOR)
    years = tuple(re.findall(r"\b1\d{3}\b", work)) or ("1900",)
    if creator is None:
        return Plan(title, "", None, years)
    life = _about(creator[1], results, _YEARS)
    if life is None or life[group] is None:
        return Plan(creator[1], f"by {creator[1]}", None, years)
    return Plan(None, life[0].strip("()"), life[group], years)


def _region(city: str, results: Sequence[str]) -> Plan:
    country = _about(city, results, _COUNTRY_OF)
    if country is None:
        return Plan(city, "", None, ("Africa", "Europe", "Asia"))
    region = _about(country[1], results, _REGION)
    if region is None:
        return Plan(country[1], f"of {country[1]}", None, (country[1],))
    return Plan(None, f"in {region[1]}", region[1], (country[1],))


def act(question: str, turns: Sequence[Turn], skill: Skill, rng: random.Random) -> str:
    """The text of the next turn."""
    results = passages(turns)
    known = plan(question, results)
    asked = [query for turn in turns if (query := query_of(turn.action)) is not None]
    if not turns:
        verbatim = rng.random() < skill.verbatim
        return _search(question if verbatim else str(known.target), "", skill, rng)
    if known.answer is not None:
        answer, note = known.answer, known.note
        if len(known.guesses) == 2 and rng.random() < skill.misjudge:
            answer = next(guess for guess in known.guesses if guess != answer)
            note = note.translate(str.maketrans("<>", "><"))
        return _answer(answer, note)
    stuck = known.target in asked  # its passage does not come, or is cut before what it should say
    if stuck or rng.random() < skill.early:
        return _answer(rng.choice(known.guesses), known.note)
    if asked and rng.random() < skill.repeat:
        return _search(asked[-1], known.note, skill, rng)
    target = str(known.target)
    if results and rng.random() < skill.misread:
        target = " ".join(rng.choice(results).split()[:2])
    return _search(target, known.note, skill, rng)


def query_of(action: str) -> str | None:
    """The query of a turn whose first call is valid."""
    call = next(iter(parse_tool_calls(action)), None)
    arguments = check_arguments(call, [SEARCH]) if isinstance(call, ToolCall) else None
    return arguments["query"] if isinstance(arguments, dict) else None


def answer_of(action: str) -> str | None:
    """The boxed answer of a turn without a call."""
    return None if parse_tool_calls(action) else extract_boxed(action)


def _search(query: str, note: str, skill: Skill, rng: random.Random) -> str:
    call = {"name": "search", "arguments": {"query": query, "top_k": 1}}
    body = json.dumps(call, ensure_ascii=False)
    if rng.random() < skill.malformed:
        body = body.removesuffix("}")
    return f"{_think(note)}<tool_call>{body}</tool_call>"


def _answer(answer: str, note: str) -> str:
    return f"{_think(note)}\\boxed{{{answer}}}"


def _think(note: str) -> str:
    return f"<think>{note}</think>" if note else ""
