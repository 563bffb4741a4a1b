"""Subtask-decomposed advantage estimation, SDAE (METHOD section 2), and its diagnostics.

Everything a token gets depends on its turn alone. So the kernels run over the S turns of a row,
weighted by the sampled tokens of each turn, and one gather spreads the result: the cost is
O(N T + N K S) for N rows of T tokens and K subtasks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlds_jax import grpo

SIGN_FLOOR = 1e-8
VARIANCE_FLOOR = 1e-12
MIN_KERNEL_SIGMA = 1e-3
COUNT_BLOCK_TOKENS = 2**19

NegativeRewards = Literal["literal", "uniform"]
KernelNorm = Literal["response", "active"]


class Diagnostic(NamedTuple):
    """A scalar of the step, and whether it is defined; it is 0 where it is not."""

    value: chex.Array
    defined: chex.Array


class SdaeOutput(NamedTuple):
    """Advantages of N rows of T tokens with K subtasks; padding rows are 0 throughout.

    Attributes:
      token: [N, T] float32, Ahat_it after the retry mask.
      token_unmasked: [N, T] float32, Ahat_it over every sampled token.
      row: [N] float32, Ahat_i.
      grpo: [N] float32, the GRPO advantage of the same rows.
      subtask: [N, K] float32, A_ik; 0 in groups that fall back to GRPO.
      share: [N, K] float32, p_ik, summing to one over the row's subtasks; uniform if ungraded.
      decomposed: [N] bool, whether the row's group is decomposed; if not, it falls back to GRPO.
      sigma_batch: scalar float32, before the guard.
      diagnostics: by metric name; see `diagnostics`.
    """

    token: chex.Array
    token_unmasked: chex.Array
    row: chex.Array
    grpo: chex.Array
    subtask: chex.Array
    share: chex.Array
    decomposed: chex.Array
    sigma_batch: chex.Array
    diagnostics: dict[str, Diagnostic]


def advantages(
    rewards: chex.Array,
    grades: chex.Array,
    pivots: chex.Array,
    weights: chex.Array,
    group_ids: chex.Array,
    turn_ids: chex.Array,
    mask_before_turn: chex.Array,
    *,
    num_groups: int,
    num_turns: int | None = None,
    kernel_sigma: float = 1.0,
    min_graded_fraction: float = 0.5,
    negative_rewards: NegativeRewards = "literal",
    kernel_norm: KernelNorm = "response",
    eps: float = grpo.EPS,
) -> SdaeOutput:
    """Computes SDAE advantages of a global batch (METHOD section 2, stages 1 to 3).

    Let N be rows, T tokens, K subtasks. Under an outer transformation the values cannot be checked
    and `num_turns` defaults to T, so later turns would count as turn T - 1.

    Args:
      rewards: [N] finite scalars R_i.
      grades: [N, K] in 1..5; NaN, or anything outside 1..5, is a missing grade.
      pivots: [N, K] int turn of each subtask; negative = null, past the last turn = the last turn.
      weights: [N, K] phi_k; 0 = the row has no such subtask. A row of zeros is padding. Rows of
        one group have the same subtasks.
      group_ids: [N] int in [0, num_groups); a row with any other id is padding.
      turn_ids: [N, T] int, 0-based turn of sampled tokens, -1 elsewhere.
      mask_before_turn: [N] int, first turn kept in the loss; 0 keeps all.
      num_groups: upper bound of the group ids, static.
      num_turns: upper bound of the turn ids, static; None takes the next power of two that fits.
      kernel_sigma: width of the temporal kernel, in turns.
      min_graded_fraction: a group with a smaller share of graded rows falls back to GRPO.
      negative_rewards: shares of rows with R_i < 0: by the grades, or uniform.
      kernel_norm: mean of a kernel over which it is one: the sampled tokens, or those of the loss
        mask, outside which it is then 0.
      eps: added to standard deviations.

    Returns:
      `SdaeOutput`. Nothing in it is NaN.

    Raises:
      AssertionError: shapes or types do not fit.
      ValueError: a reward is not finite or exceeds 1e12 (its square would leave float32), a weight
        is negative or not finite, a turn is beyond `num_turns`, or an option is out of range.
    """
    arrays = [rewards, grades, pivots, weights, group_ids, turn_ids, mask_before_turn]
    chex.assert_rank(arrays, [1, 2, 2, 2, 1, 2, 1])
    chex.assert_equal_shape_prefix(arrays, 1)
    chex.assert_equal_shape([grades, pivots, weights])
    chex.assert_type([pivots, group_ids, turn_ids, mask_before_turn], int)
    if negative_rewards not in get_args(NegativeRewards):
        raise ValueError(f"negative_rewards is {negative_rewards!r}; use literal or uniform")
    if kernel_norm not in get_args(KernelNorm):
        raise ValueError(f"kernel_norm is {kernel_norm!r}; use response or active")
    if not any(isinstance(x, jax.core.Tracer) for x in (rewards, weights, turn_ids, kernel_sigma)):
        _check_values(rewards, weights, kernel_sigma)
        num_turns = _check_turns(turn_ids, num_turns)
    return _advantages(
        jnp.asarray(rewards, jnp.float32),
        jnp.asarray(grades, jnp.float32),
        jnp.asarray(pivots),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(group_ids),
        jnp.asarray(turn_ids),
        jnp.asarray(mask_before_turn),
        kernel_sigma=kernel_sigma,
        min_graded_fraction=min_graded_fraction,
        eps=eps,
        num_groups=num_groups,
        num_turns=turn_ids.shape[1] if num_turns is None else num_turns,
        negative_rewards=negative_rewards,
        kernel_norm=kernel_norm,
    )


def _check_values(rewards: chex.Array, weights: chex.Array, kernel_sigma: float) -> None:
    grpo.check_rewards(rewards)
    weights = np.asarray(weights)
    for row in np.flatnonzero(~((weights >= 0) & np.isfinite(weights)).all(axis=-1)):
        raise ValueError(
            f"weights[{row}] is {weights[row]}; subtask weights must be finite and not negative"
        )
    if not kernel_sigma >= MIN_KERNEL_SIGMA:
        raise ValueError(f"kernel_sigma is {kernel_sigma}; it must be at least {MIN_KERNEL_SIGMA}")


def _check_turns(turn_ids: chex.Array, num_turns: int | None) -> int:
    turns = int(np.max(turn_ids, initial=-1)) + 1
    if num_turns is None:
        return 1 << max(turns - 1, 0).bit_length()
    if turns > num_turns:
        raise ValueError(f"turn_ids hold turn {turns - 1}; raise num_turns (now {num_turns})")
    return num_turns


@functools.partial(
    jax.jit, static_argnames=("num_groups", "num_turns", "negative_rewards", "kernel_norm")
)
def _advantages(
    rewards: chex.Array,
    grades: chex.Array,
    pivots: chex.Array,
    weights: chex.Array,
    group_ids: chex.Array,
    turn_ids: chex.Array,
    mask_before_turn: chex.Array,
    *,
    kernel_sigma: chex.Numeric,
    min_graded_fraction: chex.Numeric,
    eps: chex.Numeric,
    num_groups: int,
    num_turns: int,
    negative_rewards: NegativeRewards,
    kernel_norm: KernelNorm,
) -> SdaeOutput:
    """`advantages` after the checks; the continuous options are traced."""
    groups = grpo.make_groups(group_ids, num_groups, (weights > 0).any(axis=1))
    weights = jnp.where(groups.valid[:, None], weights, 0.0)

    # Stages 1 and 2: rewards to subtasks to rows.
    share, graded = jax.vmap(subtask_shares)(grades, weights)
    if negative_rewards == "uniform":
        share = jnp.where((rewards < 0)[:, None], uniform_shares(weights), share)
    decomposed = decomposed_rows(graded, groups, min_graded_fraction)
    subtask = subtask_advantages(rewards, share, groups)
    subtask = jnp.where(decomposed[:, None], subtask, 0.0)
    raw = jax.vmap(combine_subtasks)(subtask, groups.centre(rewards), weights)
    sigma_batch = masked_std(raw, decomposed)
    guarded = sigma_batch < grpo.STD_FLOOR
    denominator = jnp.where(guarded, 1.0, sigma_batch + eps)
    scalar = grpo.row_advantages(rewards, groups, eps)
    row = jnp.where(decomposed, raw / denominator, scalar)

    # Stage 3: rows to turns to tokens.
    pivots = jnp.where((decomposed & graded)[:, None] & (weights > 0), pivots, -1)
    counts = count_turns(turn_ids, num_turns)
    active = jnp.where(jnp.arange(num_turns) >= mask_before_turn[:, None], counts, 0.0)
    kernels = jax.vmap(jax.vmap(temporal_kernel, in_axes=(None, 0, None)), in_axes=(0, 0, None))
    kernel = kernels(active if kernel_norm == "active" else counts, pivots, kernel_sigma)
    # The token mean of m - 1 is 0, and m - 1 itself where the pivot is null.
    spread = jnp.einsum("nk,nks->ns", weights * subtask, kernel - 1.0, precision="highest")
    profile = row[:, None] + spread / denominator
    sampled = (turn_ids >= 0) & groups.valid[:, None]
    token = jnp.where(sampled, jax.vmap(spread_turns)(profile, turn_ids), 0.0)
    kept = sampled & grpo.loss_mask(turn_ids, mask_before_turn)

    return SdaeOutput(
        token=jnp.where(kept, token, 0.0),
        token_unmasked=token,
        row=row,
        grpo=scalar,
        subtask=subtask,
        share=share,
        decomposed=decomposed,
        sigma_batch=sigma_batch,
        diagnostics={
            "sdae/sigma_batch": Diagnostic(sigma_batch, decomposed.any()),
            "sdae/sigma_guarded": Diagnostic(guarded.astype(jnp.float32), decomposed.any()),
            **grading_diagnostics(graded, decomposed, groups),
            **sign_diagnostics(subtask, decomposed, groups),
            "sdae/grpo_correlation": correlation(raw, scalar, decomposed),
            "sdae/centred_correlation": correlation(raw, groups.centre(rewards), decomposed),
            "sdae/token_advantage_std": token_std(profile, active, (pivots >= 0).any(axis=1)),
        },
    )


def uniform_shares(weights: chex.Array) -> chex.Array:
    """1/K over the subtasks of positive weight along the last axis, 0 at the others."""
    exists = weights > 0
    return exists / jnp.maximum(exists.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)


def subtask_shares(grades: chex.Array, weights: chex.Array) -> tuple[chex.Array, chex.Array]:
    """Computes the shares p_k of one row: (g_k - 1) / sum_j (g_j - 1), or 1/K if all grades are 1.

    A row with at least half its grades is graded, and its missing ones take the mean of the
    others; with fewer it is ungraded, and its shares are uniform.

    Args:
      grades: [K] float32; outside 1..5 = missing.
      weights: [K] float32; 0 = no such subtask.

    Returns:
      [K] float32 shares and a scalar bool, whether the row is graded.
    """
    chex.assert_rank([grades, weights], 1)
    exists = weights > 0
    parsed = exists & (grades >= 1) & (grades <= 5)
    num_parsed = parsed.sum()
    graded = (num_parsed > 0) & (2 * num_parsed >= exists.sum())
    points = jnp.where(parsed, grades - 1, 0.0)
    mean = points.sum() / jnp.maximum(num_parsed, 1)
    points = jnp.where(exists & ~parsed, mean, points)
    total = points.sum()
    share = points / jnp.where(total > 0, total, 1.0)
    return jnp.where(graded & (total > 0), share, uniform_shares(weights)), graded


def decomposed_rows(
    graded: chex.Array, groups: grpo.Groups, min_graded_fraction: chex.Numeric
) -> chex.Array:
    """[N] bool: rows of groups with a graded row and at least `min_graded_fraction` of them."""
    num_graded = groups.total(graded.astype(jnp.float32))
    enough = (num_graded > 0) & (num_graded >= min_graded_fraction * groups.sizes())
    return groups.rows(enough) & groups.valid


def subtask_advantages(rewards: chex.Array, share: chex.Array, groups: grpo.Groups) -> chex.Array:
    """Computes A_ik = R_i p_ik less its group mean (stage 1).

    R p is written as its difference from the group's maxima, (R - Rmax) p + Rmax (p - pmax): rows
    of equal rewards and shares get exactly 0, however a compiler contracts the products.

    Args:
      rewards: [N] float32.
      share: [N, K] float32.
      groups: the groups of the rows.

    Returns:
      [N, K] float32, summing to 0 over each group.
    """
    top_reward = groups.maximum(rewards)
    below = (rewards - top_reward)[:, None] * share
    return groups.centre(below + top_reward[:, None] * (share - groups.maximum(share)))


def combine_subtasks(
    subtask: chex.Array, centred_reward: chex.Array, weights: chex.Array
) -> chex.Array:
    """Computes A_i = sum_k phi_k A_ik of one row (stage 2).

    Since sum_k A_ik is the centred reward, this is mean(phi) times that plus the sum over
    (phi_k - mean(phi)) A_ik: exact for uniform phi, where sigma_batch would magnify rounding.

    Args:
      subtask: [K] float32, A_ik.
      centred_reward: scalar, R_i less its group mean.
      weights: [K] float32, phi_k; 0 = no such subtask.

    Returns:
      Scalar float32.
    """
    exists = weights > 0
    below = jnp.where(exists, weights - weights.max(), 0.0)
    mean_below = below.sum() / jnp.maximum(exists.sum(), 1)
    deviation = jnp.where(exists, below - mean_below, 0.0)
    return (weights.max() + mean_below) * centred_reward + jnp.sum(deviation * subtask)


def masked_std(x: chex.Array, mask: chex.Array) -> chex.Array:
    """Standard deviation (ddof 1) of x [N] over the mask [N]; 0 for fewer than two entries."""
    count = mask.sum()
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
    squares = jnp.where(mask, jnp.square(x - mean), 0.0)
    return jnp.sqrt(squares.sum() / jnp.maximum(count - 1, 1))


def count_turns(turn_ids: chex.Array, num_turns: int) -> chex.Array:
    """[N, num_turns] float32: the sampled tokens of each turn among turn_ids [N, T]."""

    def count(row: chex.Array) -> chex.Array:
        bins = jnp.where(row < 0, num_turns, jnp.minimum(row, num_turns - 1))
        # Bounds hold by construction, and checking them makes this scatter several times slower.
        counts = jnp.zeros(num_turns + 1, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
        return counts[:num_turns].astype(jnp.float32)

    # A scatter's index array is twice the size of turn_ids: in blocks of rows it stays small.
    rows, tokens = turn_ids.shape
    block = max(1, COUNT_BLOCK_TOKENS // max(tokens, 1))
    return jax.lax.map(count, turn_ids, batch_size=min(block, rows))


def temporal_kernel(
    counts: chex.Array, pivot: chex.Array, kernel_sigma: chex.Numeric
) -> chex.Array:
    """Computes m = T w / sum(w) over T tokens, w Gaussian in turns around the pivot (stage 3).

    Args:
      counts: [S] float32, the tokens of each turn.
      pivot: scalar int, negative = null (m = 1), past the last turn with tokens = that turn.
      kernel_sigma: width in turns.

    Returns:
      [S] float32, of mean one over the tokens; 0 at turns without tokens unless the pivot is null.
    """
    chex.assert_rank([counts, pivot], [1, 0])
    turns = jnp.arange(counts.shape[0])
    present = counts > 0
    last = jnp.max(jnp.where(present, turns, 0))
    distance = jnp.square((turns - jnp.minimum(pivot, last)).astype(jnp.float32))
    # The nearest turn gets weight one, so the sum cannot vanish.
    excess = distance - jnp.min(jnp.where(present, distance, jnp.inf))
    weight = jnp.where(present, jnp.exp(-excess / (2 * jnp.square(kernel_sigma))), 0.0)
    kernel = counts.sum() * weight / jnp.maximum(jnp.sum(counts * weight), 1.0)
    return jnp.where(pivot < 0, 1.0, kernel)


def spread_turns(profile: chex.Array, turn_ids: chex.Array) -> chex.Array:
    """[T]: the entry of profile [S] for each token's turn; arbitrary where turn_ids [T] is -1."""
    return profile.at[jnp.clip(turn_ids, 0, profile.shape[0] - 1)].get(mode="promise_in_bounds")


def grading_diagnostics(
    graded: chex.Array, decomposed: chex.Array, groups: grpo.Groups
) -> dict[str, Diagnostic]:
    """The share of rows that are graded, and the share of groups that fall back to GRPO."""
    fallen = groups.total((~decomposed).astype(jnp.float32)) > 0
    exists = groups.sizes() > 0
    return {
        "grader/parse_rate": share_of(graded, groups.valid),
        "sdae/fallback_group_rate": share_of(fallen, exists),
    }


def sign_diagnostics(
    subtask: chex.Array, decomposed: chex.Array, groups: grpo.Groups
) -> dict[str, Diagnostic]:
    """Shares of decomposed rows, and of groups with such a row, whose subtasks differ in sign."""
    disagree = (subtask.max(axis=1) > SIGN_FLOOR) & (subtask.min(axis=1) < -SIGN_FLOOR)
    return {
        "sdae/sign_disagreement_rate": share_of(disagree, decomposed),
        "sdae/sign_disagreement_groups": share_of(
            groups.total((disagree & decomposed).astype(jnp.float32)) > 0,
            groups.total(decomposed.astype(jnp.float32)) > 0,
        ),
    }


def share_of(hits: chex.Array, mask: chex.Array) -> Diagnostic:
    """The share of the mask's entries that are hits; undefined for an empty mask."""
    count = mask.sum()
    value = jnp.sum(hits & mask) / jnp.maximum(count, 1)
    return Diagnostic(value.astype(jnp.float32), count > 0)


def correlation(x: chex.Array, y: chex.Array, mask: chex.Array) -> Diagnostic:
    """Pearson correlation of x and y [N] over the mask; undefined if a variance is below 1e-12."""
    count = jnp.maximum(mask.sum(), 1)

    def centred(z: chex.Array) -> chex.Array:
        return jnp.where(mask, z - jnp.sum(jnp.where(mask, z, 0.0)) / count, 0.0)

    x, y = centred(x), centred(y)
    variances = jnp.stack([jnp.sum(jnp.square(x)), jnp.sum(jnp.square(y))]) / count
    defined = (variances >= VARIANCE_FLOOR).all()
    scale = jnp.prod(jnp.sqrt(jnp.where(defined, variances, 1.0)))
    value = jnp.clip(jnp.sum(x * y) / count / scale, -1.0, 1.0)
    return Diagnostic(jnp.where(defined, value, 0.0), defined)


def token_std(profile: chex.Array, active: chex.Array, mask: chex.Array) -> Diagnostic:
    """Standard deviation (ddof 0) over a row's loss-mask tokens, averaged over the mask's rows.

    Args:
      profile: [N, S] float32, the advantage of each turn.
      active: [N, S] float32, the loss-mask tokens of each turn.
      mask: [N] bool; rows without a loss-mask token are left out.

    Returns:
      The average, undefined without rows.
    """
    counts = active.sum(axis=1)
    mask = mask & (counts > 0)
    counts = jnp.maximum(counts, 1.0)
    mean = jnp.sum(active * profile, axis=1) / counts
    squares = jnp.sum(active * jnp.square(profile - mean[:, None]), axis=1)
    stds = jnp.where(mask, jnp.sqrt(squares / counts), 0.0)
    return Diagnostic(stds.sum() / jnp.maximum(mask.sum(), 1), mask.any())


def defined_metrics(diagnostics: Mapping[str, Diagnostic]) -> dict[str, float]:
    """The diagnostics that are defined, as floats on the host."""
    return {name: float(x.value) for name, x in diagnostics.items() if x.defined}
