"""Flat token records of rollouts: what the episode loop writes and the batch builder reads.

Arrays and texts are left out of `repr`: asyncio builds the repr of a finished task's result, which
took over a second for a hundred trajectories.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One assistant turn: the decoded action text, and the observation that answered it."""

    action: str
    observation: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One rollout as flat token arrays, validated at construction.

    Attributes:
      uid: unique within the run.
      group: uid of the prompt (step, slot); originals and retries of a prompt share it.
      item_id: the task item.
      initial_observation: text of the first observation.
      tokens: [T] int32, prompt included.
      turn_ids: [T] int32, 0-based assistant turn that sampled the token, -1 elsewhere. This is the
        sampled mask. Replayed turns of a retry keep their turn numbers.
      logprobs: [T] float32 of the behaviour policy at `temperature`, 0 where not sampled.
      weight_version: [T] int32, version that sampled the token, -1 where not sampled.
      prompt_length: tokens before the first assistant turn, in [1, T].
      temperature: sampling temperature.
      reward, success, ended_by: from the environment.
      turns: text of each turn; the last observation is the terminal one.
      grades: per subtask 1..5 or None (missing); None altogether when ungraded.
      pivots: per subtask turn or None; None altogether when ungraded.
      retry_from: first turn the retry sampled itself; None for originals.
      parent: uid of a retry's original; None for originals.
      guidance: text a retry had in its context; None for originals.
      scores: the environment's after each turn, where it keeps one; a replay must repeat them.
      metrics: per-episode scalars of the environment.

    Raises:
      ValueError: naming the field that does not hold.
    """

    uid: str
    group: str
    item_id: str
    initial_observation: str = dataclasses.field(repr=False)
    tokens: np.ndarray = dataclasses.field(repr=False)
    turn_ids: np.ndarray = dataclasses.field(repr=False)
    logprobs: np.ndarray = dataclasses.field(repr=False)
    weight_version: np.ndarray = dataclasses.field(repr=False)
    prompt_length: int
    temperature: float
    reward: float
    success: bool
    ended_by: str
    turns: tuple[Turn, ...] = dataclasses.field(repr=False)
    grades: tuple[int | None, ...] | None = None
    pivots: tuple[int | None, ...] | None = None
    retry_from: int | None = None
    parent: str | None = None
    guidance: str | None = None
    scores: tuple[float, ...] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        length = len(self.tokens)
        for name, dtype in (
            ("tokens", np.int32),
            ("turn_ids", np.int32),
            ("logprobs", np.float32),
            ("weight_version", np.int32),
        ):
            array = getattr(self, name)
            if array.shape != (length,) or array.dtype != dtype:
                raise ValueError(
                    f"Trajectory {self.uid}: {name} must be {np.dtype(dtype)} [{length}], "
                    f"got {array.dtype} {array.shape}"
                )
        if not 1 <= self.prompt_length <= length:
            raise ValueError(
                f"Trajectory {self.uid}: prompt_length {self.prompt_length} of {length}"
            )
        sampled = self.turn_ids[self.turn_ids >= 0]
        if (self.turn_ids[: self.prompt_length] >= 0).any():
            raise ValueError(f"Trajectory {self.uid}: turn_ids mark prompt tokens as sampled")
        if len(sampled) and ((np.diff(sampled) < 0).any() or sampled[-1] >= len(self.turns)):
            raise ValueError(f"Trajectory {self.uid}: turn_ids do not ascend within 0..turns-1")
        if not np.isfinite(self.reward):
            raise ValueError(f"Trajectory {self.uid}: reward is {self.reward}")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise ValueError(f"Trajectory {self.uid}: logprobs must be finite and at most 0")
        if (self.retry_from is None) != (self.parent is None):
            raise ValueError(f"Trajectory {self.uid}: retry_from and parent go together")
        for name in ("grades", "pivots"):
            if (getattr(self, name) is None) != (self.grades is None):
                raise ValueError(f"Trajectory {self.uid}: grades and pivots go together")

    @property
    def sampled_tokens(self) -> int:
        """Tokens this trajectory sampled itself; a retry's replayed prefix does not count."""
        return int((self.turn_ids >= (self.retry_from or 0)).sum())


@dataclasses.dataclass(frozen=True)
class Judgement:
    """One grader or reflector call: exact tokens, decoded text and whether it parsed.

    Attributes:
      prompt_ids, ids: [P], [n] int32.
      text: decoded completion.
      error: None when it parsed, else the reason it did not.
      trajectory: uid of the rollout judged.
    """

    role: Literal["grader", "reflector"]
    trajectory: str
    prompt_ids: np.ndarray = dataclasses.field(repr=False)
    ids: np.ndarray = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)
    error: str | None


@dataclasses.dataclass(frozen=True)
class AuxiliaryPair:
    """A sequence for the auxiliary NLL (METHOD section 3).

    Attributes:
      channel: "reflect" or "retry".
      tokens: [T] int32.
      targets: [T] bool, the tokens whose NLL is averaged.
      delta: R_retry - R_original.
      uid: uid of the retry it came from.
    """

    channel: Literal["reflect", "retry"]
    tokens: np.ndarray = dataclasses.field(repr=False)
    targets: np.ndarray = dataclasses.field(repr=False)
    delta: float
    uid: str


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """Everything one prompt produced in one step.

    Attributes:
      uid: group uid.
      trajectories: originals first, then retries, each in rollout order.
      judgements: grader and reflector calls, in (rollout, role) order.
      events: counted happenings by name, e.g. "reflection_invalid/not_json".
    """

    uid: str
    trajectories: tuple[Trajectory, ...]
    judgements: tuple[Judgement, ...]
    events: Counter[str]
