"""From trajectories to token advantages: the arrays, the retry mask, and which estimator runs.

The kernels are `grpo` and `sdae`. An estimator is one function of padded rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from rlds_jax import grpo, sdae
from rlds_jax.rollouts.types import Trajectory

Condition = Literal["rlvr", "base_reflection", "rlds"]
RetryMask = Literal["both", "retry_only", "off"]


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Options of METHOD section 2; the first five are documented in `sdae.advantages`.

    Attributes:
      retry_mask: whose first turns leave the loss: those of the retry and the original it came
        from ("both"), of the retry alone, or nobody's.
      num_turns: turns the kernels are compiled for; a step with more compiles anew, as does every
        new power of two with None.
      min_rows, min_tokens: least padded size. Rows and tokens are padded to powers of two, and each
        new size compiles anew; a bound known in advance makes that one compilation.

    Raises:
      ValueError: naming the field that is out of range.
    """

    kernel_sigma: float = 1.0
    min_graded_fraction: float = 0.5
    negative_rewards: sdae.NegativeRewards = "literal"
    kernel_norm: sdae.KernelNorm = "response"
    eps: float = grpo.EPS
    retry_mask: RetryMask = "both"
    num_turns: int | None = None
    min_rows: int = 1
    min_tokens: int = 1

    def __post_init__(self):
        for name, options in (
            ("negative_rewards", sdae.NegativeRewards),
            ("kernel_norm", sdae.KernelNorm),
            ("retry_mask", RetryMask),
        ):
            allowed = get_args(options)
            _require(getattr(self, name) in allowed, name, getattr(self, name), f"one of {allowed}")
        sigma, fraction = self.kernel_sigma, self.min_graded_fraction
        least = sdae.MIN_KERNEL_SIGMA
        _require(sigma >= least, "kernel_sigma", sigma, f"at least {least}")
        _require(fraction >= 0, "min_graded_fraction", fraction, "at least 0")
        _require(0 < self.eps < math.inf, "eps", self.eps, "positive and finite")
        turns = self.num_turns
        _require(turns is None or turns >= 1, "num_turns", turns, "None or at least 1")
        for name in ("min_rows", "min_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


class Rows(NamedTuple):
    """Trajectories as padded arrays, for the kernels: N rows, T tokens, K subtasks.

    Attributes:
      rewards: [N] float32.
      grades: [N, K] float32, NaN where missing.
      pivots: [N, K] int32, -1 for null.
      weights: [N, K] float32, 0 where the row has no such subtask, and on padding rows.
      group_ids: [N] int32, -1 on padding rows.
      turn_ids: [N, T] int32, -1 where not sampled.
      mask_before_turn: [N] int32.
    """

    rewards: np.ndarray
    grades: np.ndarray
    pivots: np.ndarray
    weights: np.ndarray
    group_ids: np.ndarray
    turn_ids: np.ndarray
    mask_before_turn: np.ndarray


class Estimate(NamedTuple):
    """What an estimator returns.

    Attributes:
      token: [N, T] float32 advantages after the retry mask.
      token_unmasked: [N, T] float32, before it.
      row: [N] float32, their mean over a row's sampled tokens before the retry mask.
      grpo: [N] float32, the GRPO advantage of the row.
      metrics: by name.
      share: [N, K] float32 shares of the reward by subtask; None where it is not decomposed.
    """

    token: np.ndarray
    token_unmasked: np.ndarray
    row: np.ndarray
    grpo: np.ndarray
    metrics: dict[str, float]
    share: np.ndarray | None = None


Estimator = Callable[[Rows, AdvantageConfig], Estimate]


class RowCredit(NamedTuple):
    """The credit of one trajectory as plain numbers, for rollouts.jsonl; rounded to 1e-6.

    Attributes:
      advantage: Ahat_i, the row's scalar.
      grpo_advantage: its reward less the group's mean, over the group's std.
      turn_advantages: per turn the advantage of its tokens, all of which have the same; before the
        retry mask, and None where the turn has no token.
      masked_turns: leading turns that the retry mask takes out of the loss.
    """

    advantage: float
    grpo_advantage: float
    turn_advantages: list[float | None]
    masked_turns: int


class StepAdvantages(NamedTuple):
    """Advantages of one step, in the order of its trajectories.

    Attributes:
      token: per trajectory [T_i] float32, 0 outside the loss mask.
      loss_mask: per trajectory [T_i] bool.
      credit: per trajectory, the same by turn and as plain numbers.
      metrics: by name.
      share: per trajectory [K_i] float32, p_ik; None where the condition decomposes nothing.
    """

    token: list[np.ndarray]
    loss_mask: list[np.ndarray]
    credit: list[RowCredit]
    metrics: dict[str, float]
    share: list[np.ndarray] | None = None


def estimate(
    trajectories: Sequence[Trajectory],
    weights: Sequence[Sequence[float]],
    condition: Condition,
    config: AdvantageConfig | None = None,
) -> StepAdvantages:
    """Computes the token advantages of a step's global batch (METHOD section 2).

    Args:
      trajectories: originals and retries of every group.
      weights: per trajectory, the weights of its task's subtasks.
      condition: selects the estimator.
      config: options; None for the defaults of METHOD.

    Returns:
      `StepAdvantages`; empty for no trajectories.

    Raises:
      ValueError: an argument is out of range, or grades or pivots do not match the subtasks.
    """
    config = config or AdvantageConfig()
    run = estimator(condition)
    if not trajectories:
        return StepAdvantages([], [], [], {})
    rows = pad_rows(trajectories, weights, config)
    mask = grpo.loss_mask(rows.turn_ids, rows.mask_before_turn)
    result = run(rows, config)
    metrics, share = result.metrics, result.share
    if mask.any():
        active = result.token[mask]
        metrics |= {
            "critic/advantages/mean": float(active.mean(dtype=np.float64)),
            "critic/advantages/max": float(active.max()),
            "critic/advantages/min": float(active.min()),
        }
    credit = [
        RowCredit(
            round(float(result.row[i]), 6),
            round(float(result.grpo[i]), 6),
            turn_advantages(result.token_unmasked[i], rows.turn_ids[i], len(trajectory.turns)),
            int(rows.mask_before_turn[i]),
        )
        for i, trajectory in enumerate(trajectories)
    ]
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    return StepAdvantages(
        [result.token[i, :length] for i, length in enumerate(lengths)],
        [mask[i, :length] for i, length in enumerate(lengths)],
        credit,
        metrics,
        None if share is None else [share[i, : len(phi)] for i, phi in enumerate(weights)],
    )


def turn_advantages(token: np.ndarray, turn_ids: np.ndarray, turns: int) -> list[float | None]:
    """The advantage of each of `turns` turns, rounded to 1e-6; None for a turn without tokens.

    Args:
      token: [T] float32, the same over the tokens of a turn.
      turn_ids: [T] int32, -1 where not sampled.
    """
    by_turn: list[float | None] = [None] * turns
    for turn, first in zip(*np.unique(turn_ids, return_index=True), strict=True):
        if turn >= 0:
            by_turn[turn] = round(float(token[first]), 6)
    return by_turn


def estimator(condition: Condition) -> Estimator:
    """The estimator of a condition: SDAE for "rlds", GRPO for the others (METHOD section 1).

    Raises:
      ValueError: `condition` is none of these.
    """
    if condition == "rlds":
        return sdae_estimator
    if condition in ("rlvr", "base_reflection"):
        return grpo_estimator
    raise ValueError(f"condition is {condition!r}; use one of {', '.join(get_args(Condition))}")


def sdae_estimator(rows: Rows, config: AdvantageConfig) -> Estimate:
    """SDAE, with its diagnostics. A row without subtask weights is a ValueError."""
    unweighted = (rows.group_ids >= 0) & ~(rows.weights > 0).any(axis=1)
    if unweighted.any():
        raise ValueError(
            f"condition rlds: trajectory {np.argmax(unweighted)} has no positive subtask weight; "
            "give its task subtasks, or use condition rlvr"
        )
    output = sdae.advantages(
        *rows,
        num_groups=len(rows.rewards),
        num_turns=config.num_turns if _fits(rows.turn_ids, config.num_turns) else None,
        kernel_sigma=config.kernel_sigma,
        min_graded_fraction=config.min_graded_fraction,
        negative_rewards=config.negative_rewards,
        kernel_norm=config.kernel_norm,
        eps=config.eps,
    )
    return Estimate(
        token=np.array(output.token),
        token_unmasked=np.array(output.token_unmasked),
        row=np.array(output.row),
        grpo=np.array(output.grpo),
        metrics=sdae.defined_metrics(output.diagnostics),
        share=np.array(output.share),
    )


def grpo_estimator(rows: Rows, config: AdvantageConfig) -> Estimate:
    """GRPO, broadcast over each row."""
    output = grpo.advantages(
        rows.rewards,
        rows.group_ids,
        rows.turn_ids,
        rows.mask_before_turn,
        num_groups=len(rows.rewards),
        eps=config.eps,
    )
    row = np.array(output.row)
    return Estimate(np.array(output.token), np.array(output.token_unmasked), row, row, {})


def mask_before_turn(
    trajectories: Sequence[Trajectory], retry_mask: RetryMask = "both"
) -> np.ndarray:
    """First turn of each trajectory that stays in the loss (METHOD section 2, retry mask).

    Args:
      trajectories: N rollouts; a retry's original may be absent.
      retry_mask: see `AdvantageConfig`.

    Returns:
      [N] int32, 0 where every turn stays.

    Raises:
      ValueError: `retry_mask` is none of its values.
    """
    if retry_mask not in get_args(RetryMask):
        raise ValueError(f"retry_mask is {retry_mask!r}; use {', '.join(get_args(RetryMask))}")
    first = {trajectory.uid: 0 for trajectory in trajectories}
    for trajectory in trajectories if retry_mask != "off" else ():
        if trajectory.retry_from is None or trajectory.parent is None:
            continue
        first[trajectory.uid] = trajectory.retry_from
        if retry_mask == "both" and trajectory.parent in first:
            first[trajectory.parent] = max(first[trajectory.parent], trajectory.retry_from)
    return np.array([first[trajectory.uid] for trajectory in trajectories], np.int32)


def pad_rows(
    trajectories: Sequence[Trajectory],
    weights: Sequence[Sequence[float]],
    config: AdvantageConfig,
) -> Rows:
    """Trajectories as arrays, rows and tokens padded to powers of two (DESIGN, The one data path).

    Raises:
      ValueError: naming the trajectory whose grades or pivots do not match its weights.
    """
    rows = _power_of_two(max(len(trajectories), config.min_rows))
    tokens = _power_of_two(max(config.min_tokens, *(len(t.tokens) for t in trajectories)))
    subtasks = max(map(len, weights))
    padded = Rows(
        rewards=np.zeros(rows, np.float32),
        grades=np.full((rows, subtasks), np.nan, np.float32),
        pivots=np.full((rows, subtasks), -1, np.int32),
        weights=np.zeros((rows, subtasks), np.float32),
        group_ids=np.full(rows, -1, np.int32),
        turn_ids=np.full((rows, tokens), -1, np.int32),
        mask_before_turn=np.zeros(rows, np.int32),
    )
    groups: dict[str, int] = {}
    for i, (trajectory, phi) in enumerate(zip(trajectories, weights, strict=True)):
        padded.rewards[i] = trajectory.reward
        padded.weights[i, : len(phi)] = phi
        padded.group_ids[i] = groups.setdefault(trajectory.group, len(groups))
        padded.turn_ids[i, : len(trajectory.tokens)] = trajectory.turn_ids
        _place(padded.grades[i], trajectory, "grades", len(phi))
        _place(padded.pivots[i], trajectory, "pivots", len(phi))
    padded.mask_before_turn[: len(trajectories)] = mask_before_turn(trajectories, config.retry_mask)
    return padded


def _place(row: np.ndarray, trajectory: Trajectory, field: str, subtasks: int) -> None:
    """Writes a trajectory's grades or pivots into its row; None leaves the padding value."""
    values = getattr(trajectory, field)
    if values is None:
        return
    if len(values) != subtasks:
        raise ValueError(
            f"Trajectory {trajectory.uid}: {len(values)} {field} for {subtasks} subtask weights"
        )
    for k, value in enumerate(values):
        if value is not None:
            row[k] = max(-1, min(value, np.iinfo(np.int32).max))


def _fits(turn_ids: np.ndarray, num_turns: int | None) -> bool:
    return num_turns is None or int(turn_ids.max(initial=-1)) < num_turns


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"advantage.{name} is {value!r}; it must be {allowed}")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
