"""What grader and reflector share: fitting the prompt, the call, and finding JSON in the answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from rlds_jax.rollouts.chat import Message
from rlds_jax.rollouts.context import RolloutContext, RolloutKey
from rlds_jax.rollouts.prompts import EpisodeText, fit_cap
from rlds_jax.rollouts.types import Judgement, Trajectory

_THINK = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)
_INTEGER = re.compile(r"\s*-?[0-9]{1,9}\s*")
_DECODER = json.JSONDecoder(strict=False)  # raw newlines in strings are form, not meaning


class Unparseable(ValueError):
    """A judge's answer that does not hold; `reason` is what it is counted under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def find_json(text: str, keys: Collection[str]) -> dict[str, Any]:
    """The JSON object of the text that has most of `keys`, the first of several.

    A leading think block and whatever surrounds the objects (a code fence, a preamble with
    braces) are ignored.

    Raises:
      Unparseable: "not_json" when no object has any of the keys.
    """

    def known(value: dict[str, Any]) -> int:
        return sum(key in value for key in keys)

    best = max(_objects(text), key=known, default={})
    if not known(best):
        raise Unparseable("not_json")
    return best


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object that is not part of another, past a leading think block."""
    think = _THINK.match(text)
    at = text.find("{", think.end() if think else 0)
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
            yield value
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def integer(value: object) -> int | None:
    """An integer, or a string that is one; None for anything else, True and 4.0 included."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return None


async def ask(
    context: RolloutContext,
    key: RolloutKey,
    trajectory: Trajectory,
    *,
    role: Literal["grader", "reflector"],
    messages: Callable[[int | None], list[Message]],
    episodes: tuple[EpisodeText, ...],
    temperature: float | None,
    schema: Mapping[str, Any],
    events: Counter[str],
) -> tuple[Judgement, bool]:
    """One call of a judge; the judgement comes without an error yet.

    Args:
      messages: renders the conversation with observations capped at so many characters.
      episodes: those it renders; together they set the largest cap.
      events: counts "trajectory_cut/<role>".

    Returns:
      The judgement, and whether the answer was cut by its token limit.

    Raises:
      Unparseable: "prompt_too_long" when it does not fit even without observations.
    """
    prompt = _fit(context, role, messages, episodes, events)
    retry = trajectory.parent is not None
    completion = await context.generate(
        "grade" if role == "grader" else "reflect",
        prompt,
        max_tokens=context.config.max_judge_tokens,
        temperature=context.config.temperature if temperature is None else temperature,
        seed=context.seed(key, f"retry_{role}" if retry else role),
        json_schema=schema if context.config.constrained_json else None,
    )
    judgement = Judgement(
        role=role,
        trajectory=trajectory.uid,
        prompt_ids=np.array(prompt, np.int32),
        ids=completion.ids,
        text=context.chat.decode(completion.ids),
        error=None,
    )
    return judgement, completion.finish_reason == "length"


def _fit(
    context: RolloutContext,
    role: str,
    messages: Callable[[int | None], list[Message]],
    episodes: tuple[EpisodeText, ...],
    events: Counter[str],
) -> list[int]:
    """Prompt ids; where they are too many, the longest observations lose their middle."""
    limit = context.engine.max_context - context.config.max_judge_tokens
    prompt = context.chat.prompt(messages(None))
    if len(prompt) <= limit:
        return prompt
    longest = max(
        len(observation)
        for episode in episodes
        for observation in (episode.initial_observation, *(t.observation for t in episode.turns))
    )
    cap = fit_cap(longest, lambda cap: len(context.chat.prompt(messages(cap))) <= limit)
    if cap is None:
        raise Unparseable("prompt_too_long")
    events[f"trajectory_cut/{role}"] += 1
    return context.chat.prompt(messages(cap))
