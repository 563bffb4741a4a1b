"""Random sequences to train on, for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlds_jax.batch import TokenSequence


class RandomSequence(NamedTuple):
    """Ids [T], how many of them are the prompt, and the advantage of the others."""

    ids: np.ndarray
    prompt: int
    advantage: float


def make(lengths: Iterable[int], vocabulary: int, rng: np.random.Generator) -> list[RandomSequence]:
    """Random ids, the first quarter of each sequence a prompt, and random advantages."""
    return [
        RandomSequence(rng.integers(0, vocabulary, n), n // 4, float(rng.normal())) for n in lengths
    ]


def records(sequences: Sequence[RandomSequence]) -> list[TokenSequence]:
    """As they are packed: policy loss and KL are means over all tokens after the prompts."""
    total = sum(len(s.ids) - s.prompt for s in sequences)
    found = []
    for index, sequence in enumerate(sequences):
        sampled = np.arange(len(sequence.ids)) >= sequence.prompt
        weight = np.where(sampled, 1 / total, 0).astype(np.float32)
        zeros = np.zeros_like(weight)
        found.append(
            TokenSequence(
                key=(f"{index:06}",),
                tokens=sequence.ids.astype(np.int32),
                policy_weight=weight,
                kl_weight=weight,
                nll_weight=zeros,
                advantage=np.full_like(weight, sequence.advantage),
                behaviour_logprobs=zeros,
            )
        )
    return found
