"""The engine protocol: token ids in, token ids and exact log-probabilities out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import numpy as np

# The group a request is made for; an engine of several replicas keeps a group on one of them.
GROUP: ContextVar[str | None] = ContextVar("GROUP", default=None)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
      ids: sampled token ids [n] int32, the stop token included.
      logprobs: log-probability of each id [n] float32 at the sampling temperature, or, where
        `constrained`, under the grammar's renormalised distribution (never enters a ratio).
      finish_reason: "stop" (a stop id was sampled) or "length" (max_tokens reached).
      weight_version: version of the weights that sampled every token.
      constrained: whether a JSON schema restricted the sampling.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]
    weight_version: int
    constrained: bool = False


class PromptTooLong(ValueError):
    """The prompt and its completion do not fit the engine's longest sequence."""


class Engine(Protocol):
    """Generates one completion per call; batching concurrent calls is the engine's business."""

    @property
    def max_context(self) -> int:
        """Longest prompt plus completion, in tokens."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Samples up to `max_tokens` tokens. Cancelling the awaiting task frees the request.

        Token t of the result depends on (weights, prompt_ids, seed, temperature) alone, never on
        what else is in flight.

        Raises:
          PromptTooLong: len(prompt_ids) + max_tokens exceeds `max_context`.
        """
        ...

    def sleep(self) -> None:
        """No request comes before the next `update_weights`: memory may be given up until then."""
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Takes new weights, once no request is in flight, and forgets every cached prefix."""
        ...

    def metrics(self) -> dict[str, float]:
        """Scalars since the last call, under engine/*."""
        ...

    def close(self) -> None: ...


def request_seed(*parts: int | str) -> int:
    """A 63-bit seed from (run, step, item, rollout, role, turn, ...), stable across processes."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
