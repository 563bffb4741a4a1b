"""What every rollout of a step shares."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlds_jax.rollouts.chat import ChatFormat
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.engines.base import Completion, Engine, request_seed
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.rollouts.timing import PhaseClock
from rlds_jax.tasks.base import Environment, Item, Task


class RolloutKey(NamedTuple):
    """Which rollout: step and slot name the prompt's group, `rollout` counts within it."""

    step: int
    slot: int
    rollout: int

    @property
    def group(self) -> str:
        return f"{self.step}-{self.slot}"

    def uid(self, retry: bool = False) -> str:
        return f"{self.group}/{self.rollout}{'r' if retry else ''}"


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """Task, engine, texts and settings of one step's rollouts.

    Attributes:
      run_seed: seed of the run; with the key, role and turn it seeds every request.
      clock: phases gen, grade, reflect and retry.
      environments: bounds the environments alive at once.
    """

    task: Task
    engine: Engine
    chat: ChatFormat
    prompts: Prompts
    config: RolloutConfig
    run_seed: int
    clock: PhaseClock = dataclasses.field(default_factory=PhaseClock)
    environments: asyncio.Semaphore = dataclasses.field(init=False)

    def __post_init__(self):
        limit = asyncio.Semaphore(self.config.max_environments)
        object.__setattr__(self, "environments", limit)

    async def generate(
        self,
        phase: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        """One engine request, timed under `phase`."""
        with self.clock.phase(phase):
            return await self.engine.generate(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_ids=self.chat.stop_ids,
                seed=seed,
                json_schema=json_schema,
            )

    def seed(self, key: RolloutKey, role: str, turn: int = 0) -> int:
        return request_seed(self.run_seed, *key, role, turn)

    @contextlib.asynccontextmanager
    async def environment(self, item: Item) -> AsyncIterator[Environment]:
        """A fresh environment, closed on the way out whatever happens."""
        async with self.environments:
            environment = self.task.environment(item)
            try:
                yield environment
            finally:
                await environment.close()
