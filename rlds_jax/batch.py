"""Trajectories and auxiliary pairs to packed rows (DESIGN "The one data path").

A `TokenSequence` is one token record with its loss weights; `pack` lays sequences into rows.
Position p of a row predicts the token after it, so every per-token field at p belongs to
`targets[p]`, and a sequence of T tokens fills at most T - 1 positions: what follows its last active
target is cut.

Weights already hold every global count (METHOD section 3): the loss of a batch is a plain weighted
sum, which neither packing nor padding nor the split into micro-batches can change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import flax.struct
import numpy as np

from rlds_jax import losses
from rlds_jax.models.flash import max_segments
from rlds_jax.rollouts.types import AuxiliaryPair, Trajectory

Leaf = Any  # a device array, a numpy array, or its sharding

CHANNELS = ("reflect", "retry")


class BatchError(ValueError):
    """Sequences that the configured rows cannot hold."""


@flax.struct.dataclass
class Batch:
    """Packed sequences, each array [max_micro, rows, row_length] unless said otherwise.

    Attributes:
      num_micro: [] int32, micro-batches that hold anything; the update runs no others.
      tokens: int32 inputs.
      targets: int32, the token after each input in its own segment; 0 where there is none.
      segment_ids: int32, 1.. per row in order of packing, 0 = padding.
      positions: int32, index within the segment.
      advantage: float32, of the target.
      policy_weight, kl_weight, nll_weight: float32 loss weights of the target.
      temperature: float32 > 0, sampling temperature of the target; 1 on auxiliary tokens.
      behaviour_logprobs: float32 log-probability of the target under the sampling policy.
      channel: int32, 0 for policy tokens and padding, 1 + index in CHANNELS for auxiliary ones.
      old_logprobs: float32 under the policy at the start of the step, or None with one update per
        batch, where they equal the current ones.
    """

    num_micro: Leaf
    tokens: Leaf
    targets: Leaf
    segment_ids: Leaf
    positions: Leaf
    advantage: Leaf
    policy_weight: Leaf
    kl_weight: Leaf
    nll_weight: Leaf
    temperature: Leaf
    behaviour_logprobs: Leaf
    channel: Leaf
    old_logprobs: Leaf = None


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """The static shape of every batch of a run.

    Attributes:
      rows: rows of one micro-batch, a multiple of the devices rows are spread over.
      row_length: positions of a row.
      max_micro: micro-batches a batch may fill; arrays are sized for it, work is not.

    Raises:
      ValueError: naming the field that is not positive.
    """

    rows: int
    row_length: int
    max_micro: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"batch.{field.name} is {getattr(self, field.name)}; at least 1")


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One token record to train on; all arrays [T], fields belong to the token at their index.

    Attributes:
      key: (group, trajectory, role); sequences are packed in the order of their keys.
      tokens: int32.
      policy_weight, kl_weight, nll_weight: float32 loss weights, 0 where not trained.
      advantage, behaviour_logprobs: float32.
      temperature: of the whole sequence.
      channel: see `Batch`.
    """

    key: tuple[str, ...]
    tokens: np.ndarray
    policy_weight: np.ndarray
    kl_weight: np.ndarray
    nll_weight: np.ndarray
    advantage: np.ndarray
    behaviour_logprobs: np.ndarray
    temperature: float = 1.0
    channel: int = 0

    @functools.cached_property
    def positions(self) -> int:
        """Row positions needed: up to the one that predicts the last active token."""
        active = np.flatnonzero((self.policy_weight + self.kl_weight + self.nll_weight)[1:])
        return int(active[-1]) + 1 if len(active) else 0


def nll_sequence(key: tuple[str, ...], tokens, weight, channel: int = 0) -> TokenSequence:
    """A sequence trained by weighted NLL alone: supervised or auxiliary."""
    zeros = np.broadcast_to(np.float32(0), len(tokens))
    return TokenSequence(key, tokens, zeros, zeros, weight, zeros, zeros, channel=channel)


def policy_sequences(
    trajectories: Sequence[Trajectory],
    token_advantages: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    aggregation: losses.Aggregation = "token-mean",
) -> list[TokenSequence]:
    """Trajectories with their loss weights: 1 / global count on every loss-mask token.

    Args:
      trajectories: N rollouts.
      token_advantages: per rollout [T_i] float32.
      loss_masks: per rollout [T_i] bool.
      aggregation: how the policy loss and the KL are averaged (METHOD section 3).

    Raises:
      ValueError: arrays of another length, a masked-in prompt token or a non-finite advantage,
        naming the trajectory.
    """
    for trajectory, advantage, mask in zip(trajectories, token_advantages, loss_masks, strict=True):
        _check_policy_fields(trajectory, advantage, mask)
    counts = losses.count_tokens(loss_masks)
    sequences = []
    for trajectory, advantage, mask in zip(trajectories, token_advantages, loss_masks, strict=True):
        weight = losses.token_weights(mask, aggregation, counts)
        sequences.append(
            TokenSequence(
                key=(trajectory.group, trajectory.uid, ""),
                tokens=trajectory.tokens,
                policy_weight=weight,
                kl_weight=weight,
                nll_weight=np.zeros_like(weight),
                advantage=np.where(mask, advantage, 0).astype(np.float32),
                behaviour_logprobs=trajectory.logprobs,
                temperature=trajectory.temperature,
            )
        )
    return sequences


def _check_policy_fields(trajectory: Trajectory, advantage: np.ndarray, mask: np.ndarray) -> None:
    expected = (len(trajectory.tokens),)
    for name, array in (("advantage", advantage), ("loss mask", mask)):
        if array.shape != expected:
            raise ValueError(
                f"trajectory {trajectory.uid}: {name} has shape {array.shape}, tokens {expected}"
            )
    if (mask & (trajectory.turn_ids < 0)).any():
        raise ValueError(f"trajectory {trajectory.uid}: the loss mask holds an unsampled token")
    if not np.isfinite(advantage[mask]).all():
        raise ValueError(
            f"trajectory {trajectory.uid}: an advantage in the loss mask is not finite"
        )


def auxiliary_sequences(
    pairs: Iterable[AuxiliaryPair],
    layout: BatchLayout,
    *,
    coefficients: dict[str, float],
    max_pairs: int = 64,
) -> tuple[list[TokenSequence], dict[str, float]]:
    """Weighted NLL sequences of L_aux (METHOD section 3).

    Per channel the `max_pairs` fitting pairs of largest delta are kept, ties in key order. The
    weight of a target of pair j is coefficient * delta_j / (n * targets_j) over n kept pairs.

    Args:
      pairs: of both channels, every delta positive.
      layout: pairs longer than its rows are dropped and counted.
      coefficients: by channel; a channel with coefficient 0 is left out.
      max_pairs: kept per channel.

    Returns:
      The sequences, and per channel `aux/<channel>/pairs`, `/too_long`, and the mean `/delta`.
    """
    everything = sorted(pairs, key=lambda pair: (-pair.delta, pair.uid))
    sequences, metrics = [], {}
    for index, channel in enumerate(CHANNELS):
        offered = [p for p in everything if p.channel == channel and coefficients[channel] > 0]
        fitting = [p for p in offered if np.flatnonzero(p.targets)[-1] <= layout.row_length]
        kept = fitting[:max_pairs]
        for pair in kept:
            scale = coefficients[channel] * pair.delta / (len(kept) * pair.targets.sum())
            weight = np.where(pair.targets, scale, 0).astype(np.float32)
            sequences.append(nll_sequence(("", pair.uid, channel), pair.tokens, weight, index + 1))
        metrics[f"aux/{channel}/pairs"] = float(len(kept))
        metrics[f"aux/{channel}/too_long"] = float(len(offered) - len(fitting))
        if kept:
            metrics[f"aux/{channel}/delta"] = float(np.mean([pair.delta for pair in kept]))
    return sequences, metrics


def pack(sequences: Iterable[TokenSequence], layout: BatchLayout) -> Batch:
    """Packs sequences first-fit, in the order of their keys; those without weights are left out.

    Returns:
      A `Batch` of numpy arrays.

    Raises:
      BatchError: a sequence is longer than a row, or the batch needs more than max_micro
        micro-batches.
    """
    active = [sequence for sequence in sequences if sequence.positions]
    return lay_out(first_fit(sorted(active, key=lambda s: s.key), layout.row_length), layout)


def lay_out(rows: Sequence[Sequence[TokenSequence]], layout: BatchLayout) -> Batch:
    """Writes rows of sequences into the arrays of a batch.

    Raises:
      BatchError: there are more rows than max_micro micro-batches hold.
    """
    num_micro = -(-len(rows) // layout.rows)
    if num_micro > layout.max_micro:
        raise BatchError(
            f"the batch fills {num_micro} micro-batches of {layout.rows} x {layout.row_length} "
            f"positions, max_micro is {layout.max_micro}; raise batch.max_micro or batch.rows"
        )
    fields = _empty(layout)
    for row, sequences in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(sequences, 1):
            _place(fields, sequence, row, start, segment)
            start += sequence.positions
    shape = (layout.max_micro, layout.rows, layout.row_length)
    arrays = {name: array.reshape(shape) for name, array in fields.items()}
    return Batch(num_micro=np.asarray(num_micro, np.int32), **arrays)


def first_fit(sequences: Sequence[TokenSequence], row_length: int) -> list[list[TokenSequence]]:
    """Rows of sequences: each goes into the first row with room for it, `max_segments` to a row.

    Raises:
      BatchError: a sequence is longer than a row.
    """
    free = np.full(len(sequences), row_length)
    rows: list[list[TokenSequence]] = []
    for sequence in sequences:
        length = sequence.positions
        if length > row_length:
            raise BatchError(
                f"sequence {sequence.key} needs {length} positions, a row has {row_length}; raise "
                "batch.row_length"
            )
        row = int(np.argmax(free[: len(rows) + 1] >= length))
        if row == len(rows):
            rows.append([])
        rows[row].append(sequence)
        free[row] = free[row] - length if len(rows[row]) < max_segments(row_length) else 0
    return rows


def _empty(layout: BatchLayout) -> dict[str, np.ndarray]:
    """Fields of rows that hold nothing, [rows of all micro-batches, row_length]."""
    shape = (layout.max_micro * layout.rows, layout.row_length)
    integers = ("tokens", "targets", "segment_ids", "positions", "channel")
    floats = ("advantage", "policy_weight", "kl_weight", "nll_weight", "behaviour_logprobs")
    fields = {name: np.zeros(shape, np.int32) for name in integers}
    fields |= {name: np.zeros(shape, np.float32) for name in floats}
    return fields | {"temperature": np.ones(shape, np.float32)}


def _place(fields, sequence: TokenSequence, row: int, start: int, segment: int) -> None:
    length = sequence.positions
    here = (row, slice(start, start + length))
    fields["tokens"][here] = sequence.tokens[:length]
    fields["targets"][here] = sequence.tokens[1 : length + 1]
    fields["segment_ids"][here] = segment
    fields["positions"][here] = np.arange(length)
    fields["temperature"][here] = sequence.temperature
    fields["channel"][here] = sequence.channel
    for name in ("advantage", "policy_weight", "kl_weight", "nll_weight", "behaviour_logprobs"):
        fields[name][here] = getattr(sequence, name)[1 : length + 1]
