"""Auxiliary pairs of a group: what its successful reflections and retries teach (METHOD 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rlds_jax.rollouts.types import AuxiliaryPair, GroupResult, Judgement, Trajectory


def auxiliary_pairs(result: GroupResult, require_success: bool = False) -> list[AuxiliaryPair]:
    """A reflect and a retry pair for every retry that earned more than its original.

    The retry pair has no guidance: its context is the original's, up to turn s.

    Args:
      require_success: only retries that reached success.
    """
    by_uid = {t.uid: t for t in result.trajectories}
    reflections = {j.trajectory: j for j in result.judgements if j.role == "reflector"}
    pairs = []
    for retry in result.trajectories:
        if retry.parent is None or (require_success and not retry.success):
            continue
        original = by_uid[retry.parent]
        delta = retry.reward - original.reward
        if delta > 0:
            pairs.append(_reflect_pair(reflections[original.uid], retry.uid, delta))
            pairs.append(_retry_pair(original, retry, delta))
    return pairs


def _reflect_pair(judgement: Judgement, uid: str, delta: float) -> AuxiliaryPair:
    tokens = np.concatenate([judgement.prompt_ids, judgement.ids]).astype(np.int32)
    targets = np.arange(len(tokens)) >= len(judgement.prompt_ids)
    return AuxiliaryPair("reflect", tokens, targets, delta, uid)


def _retry_pair(original: Trajectory, retry: Trajectory, delta: float) -> AuxiliaryPair:
    assert retry.retry_from is not None
    clean = without_guidance(original, retry)
    targets = clean.turn_ids >= retry.retry_from
    return AuxiliaryPair("retry", clean.tokens, targets, delta, retry.uid)


def without_guidance(original: Trajectory, retry: Trajectory) -> Trajectory:
    """The retry in the context of its original: same turns, no guidance before turn s.

    The log-probabilities stay those it was sampled with, under guidance.
    """
    assert retry.retry_from is not None
    context = slice(_turn_start(original, retry.retry_from))
    own = slice(_turn_start(retry, retry.retry_from), None)
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(original, name)[context], getattr(retry, name)[own]])
        for name in ("tokens", "turn_ids", "logprobs", "weight_version")
    }
    return dataclasses.replace(retry, prompt_length=original.prompt_length, **joined)


def _turn_start(trajectory: Trajectory, turn: int) -> int:
    """Index of the first token a turn sampled."""
    return int(np.argmax(trajectory.turn_ids == turn))
