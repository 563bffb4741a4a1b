"""One episode: the policy plays an environment, from the start or from a turn of an original."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlds_jax.rollouts.context import RolloutContext, RolloutKey
from rlds_jax.rollouts.engines.base import Completion
from rlds_jax.rollouts.types import Trajectory, Turn
from rlds_jax.tasks.base import Environment, EpisodeError, Item, StepResult


class RolloutDropped(Exception):
    """The row leaves its group; `reason` is what it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass
class _Tape:
    """Flat token arrays being written, always extended together.

    prompt: tokens before the first turn.
    free: guidance tokens after the prompt, which the response limit does not count.
    """

    tokens: list[int]
    turn_ids: list[int]
    logprobs: list[float]
    weight_version: list[int]
    prompt: int
    free: int = 0

    @classmethod
    def start(cls, prompt: Sequence[int]) -> _Tape:
        tape = cls([], [], [], [], prompt=len(prompt))
        tape.append(prompt)
        return tape

    def append(self, ids: Sequence[int]) -> None:
        """Tokens that were not sampled."""
        self.tokens += ids
        self.turn_ids += [-1] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.weight_version += [-1] * len(ids)

    def sample(self, turn: int, completion: Completion) -> None:
        """The tokens of one assistant turn."""
        self.tokens += completion.ids.tolist()
        self.turn_ids += [turn] * len(completion.ids)
        self.logprobs += completion.logprobs.tolist()
        self.weight_version += [completion.weight_version] * len(completion.ids)

    def replay(self, turn: int, original: Trajectory) -> list[int]:
        """The tokens of one turn of an original, as they were sampled."""
        where = np.flatnonzero(original.turn_ids == turn)
        ids = original.tokens[where].tolist()
        self.tokens += ids
        self.turn_ids += [turn] * len(ids)
        self.logprobs += original.logprobs[where].tolist()
        self.weight_version += original.weight_version[where].tolist()
        return ids

    @property
    def response(self) -> int:
        """Tokens the response limit counts."""
        return len(self.tokens) - self.prompt - self.free


async def run_original(
    context: RolloutContext, key: RolloutKey, item: Item, events: Counter[str]
) -> Trajectory:
    """Plays one episode from the start (METHOD section 4).

    Args:
      events: counts "env_error/<reason>".

    Raises:
      RolloutDropped: the prompt exceeds its limit, or config.env_error is "drop" and the
        environment failed.
      EpisodeError: the environment failed before the first turn.
      Exception: whatever else environment and engine raise.
    """
    async with context.environment(item) as environment:
        observation = await environment.reset()
        episode = _Episode(context, key, item, "actor", observation, events)
        result = await episode.play(environment)
    return episode.trajectory(result)


async def run_retry(
    context: RolloutContext,
    key: RolloutKey,
    item: Item,
    original: Trajectory,
    retry_from: int,
    guidance: str,
    events: Counter[str],
) -> Trajectory:
    """Plays on from turn `retry_from` of an original, with guidance in the context.

    The turns before it are replayed with their original tokens. Where re-executing them gives
    another observation than recorded, the retry starts from turn 0 instead.

    Args:
      guidance: cut to the config's `max_guidance_tokens`.
      events: counts "replay_diverged" and "env_error/<reason>".

    Raises:
      As `run_original`.
    """
    guidance = context.chat.truncate(guidance, context.config.max_guidance_tokens)

    async def attempt(start: int, replay: bool) -> Trajectory | None:
        async with context.environment(item) as environment:
            observation = await environment.reset()
            if replay and not await _reach(context, environment, observation, original, start):
                return None
            episode = _Episode(context, key, item, "retry", observation, events, guidance)
            if start:
                episode.replay(original, start)
            result = await episode.play(environment)
        return episode.trajectory(result, retry_from=start, parent=original.uid)

    trajectory = await attempt(retry_from, replay=True)
    if trajectory is None:
        events["replay_diverged"] += 1
        trajectory = await attempt(0, replay=False)
    assert trajectory is not None
    return trajectory


async def _reach(
    context: RolloutContext,
    environment: Environment,
    observation: str,
    original: Trajectory,
    retry_from: int,
) -> bool:
    """Brings a reset environment to turn `retry_from`; False if it does not repeat itself."""
    if context.task.replay == "restore":
        if retry_from:
            await environment.restore(original.turns[:retry_from])
        return True
    if observation != original.initial_observation:
        return False
    played = zip(original.turns, original.scores, strict=True)
    for turn, score in itertools.islice(played, retry_from):
        result = await environment.step(turn.action)
        if result.done or (result.observation, result.score) != (turn.observation, score):
            return False
    return True


class _Episode:
    """Plays one episode, writing its tokens and turns."""

    def __init__(
        self,
        context: RolloutContext,
        key: RolloutKey,
        item: Item,
        role: Literal["actor", "retry"],
        observation: str,
        events: Counter[str],
        guidance: str | None = None,
    ):
        self.context = context
        self.config = context.config
        self.key = key
        self.item = item
        self.role = role
        self.observation = observation
        self.events = events
        self.guidance = guidance
        self.tape = _Tape.start(self.prompt())
        self.turns: list[Turn] = []
        self.scores: list[float] = []

    def prompt(self) -> list[int]:
        """Initial prompt ids, with the guidance, which is outside the prompt limit."""
        task, limit = self.context.task, self.config.max_prompt_tokens
        user = {"role": "user", "content": self.observation}

        def render(system: str) -> list[int]:
            return self.context.chat.prompt(
                [{"role": "system", "content": system}, user], task.tools
            )

        prompt = render(task.system_prompt())
        if len(prompt) > limit:
            raise RolloutDropped(
                "prompt_too_long",
                f"{task.name} item {self.item.id}: its prompt has {len(prompt)} tokens, more than "
                f"rollout.max_prompt_tokens={limit}; raise the limit or leave the item out",
            )
        return prompt if self.guidance is None else render(task.system_prompt(self.guidance))

    def replay(self, original: Trajectory, start: int) -> None:
        """Takes over turns 0..start-1 of an original; the guidance goes before the observation
        of turn `start`, no longer into the prompt."""
        chat, role = self.context.chat, self.context.task.observation_role
        self.observation = original.initial_observation
        self.tape = _Tape.start(original.tokens[: original.prompt_length].tolist())
        self.turns = list(original.turns[:start])
        self.scores = list(original.scores[:start])
        for turn, (_, observation) in enumerate(self.turns):
            ids = self.tape.replay(turn, original)
            plain = chat.suffix(ids, observation, role)
            if turn < start - 1:
                self.tape.append(plain)
            else:
                guided = chat.suffix(ids, observation, role, self.guidance)
                self.tape.append(guided)
                self.tape.free = len(guided) - len(plain)

    async def play(self, environment: Environment) -> StepResult:
        """Alternates policy and environment until the episode ends."""
        while True:
            turn = len(self.turns)
            room = self.config.max_response_tokens - self.tape.response
            completion = await self.context.generate(
                "gen" if self.role == "actor" else "retry",
                list(self.tape.tokens),
                max_tokens=min(room, self.config.max_turn_tokens or room),
                temperature=self.config.temperature,
                seed=self.context.seed(self.key, self.role, turn),
            )
            if not len(completion.ids):
                raise RolloutDropped("no_tokens", "the engine returned a completion without tokens")
            self.tape.sample(turn, completion)
            action = self.context.chat.decode(completion.ids)
            result, suffix = await self.answer(environment, action, completion.ids.tolist())
            self.turns.append(Turn(action, result.observation))
            self.scores.append(result.score)
            if result.done:
                return result
            self.tape.append(suffix)

    async def answer(
        self, environment: Environment, action: str, ids: Sequence[int]
    ) -> tuple[StepResult, list[int]]:
        """The environment's answer, final where the next observation does not fit; its suffix."""
        try:
            result = await environment.step(action)
            if result.done:
                return result, []
            room = self.config.max_response_tokens - self.tape.response
            role = self.context.task.observation_role
            suffix = self.context.chat.suffix(ids, result.observation, role)
            # The estimate is METHOD's rule; the count holds where characters make many tokens.
            if math.ceil(len(result.observation) / 3) + 20 > room or len(suffix) >= room:
                return await environment.conclude("response_budget"), []
            return result, suffix
        except EpisodeError as error:
            self.events[f"env_error/{error.reason}"] += 1
            if self.config.env_error == "drop":
                raise RolloutDropped("env_error", error.reason) from error
            observation = f"The environment failed: {error.reason}"
            return StepResult(observation, True, error.reward, ended_by="env_error"), []

    def trajectory(
        self, result: StepResult, retry_from: int | None = None, parent: str | None = None
    ) -> Trajectory:
        tape = self.tape
        return Trajectory(
            uid=self.key.uid(retry=parent is not None),
            group=self.key.group,
            item_id=self.item.id,
            initial_observation=self.observation,
            tokens=np.array(tape.tokens, np.int32),
            turn_ids=np.array(tape.turn_ids, np.int32),
            logprobs=np.array(tape.logprobs, np.float32),
            weight_version=np.array(tape.weight_version, np.int32),
            prompt_length=tape.prompt,
            temperature=self.config.temperature,
            reward=result.reward,
            success=result.success,
            ended_by=result.ended_by or "done",
            turns=tuple(self.turns),
            scores=tuple(self.scores),
            metrics=dict(result.metrics),
            retry_from=retry_from,
            parent=parent,
            guidance=self.guidance,
        )
