"""Group-relative statistics, and GRPO advantages broadcast over each row (METHOD section 2).

Rows belong to groups by an id in [0, num_groups); a row with any other id is padding and enters
nothing. The float32 mean of equal values can be an ulp off, and a division by a small deviation
would make that an advantage: centring is exact for equal values, and deviations have a floor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-6
STD_FLOOR = 1e-6
MAX_REWARD = 1e12


class GrpoOutput(NamedTuple):
    """Advantages of N rows of T tokens.

    Attributes:
      token: [N, T] float32, after the retry mask.
      token_unmasked: [N, T] float32, over every sampled token.
      row: [N] float32.
    """

    token: chex.Array
    token_unmasked: chex.Array
    row: chex.Array


class Groups(NamedTuple):
    """Which row is in which group.

    Attributes:
      ids: [N] int32 in [0, num_groups]; `num_groups` marks padding.
      num_groups: static.
    """

    ids: chex.Array
    num_groups: int

    @property
    def valid(self) -> chex.Array:
        """[N] bool, the rows that are no padding."""
        return self.ids < self.num_groups

    def total(self, x: chex.Array) -> chex.Array:
        """[num_groups, ...] sums of x [N, ...] over each group; 0 for an empty one."""
        return jax.ops.segment_sum(x, self.ids, self.num_groups)

    def rows(self, x: chex.Array) -> chex.Array:
        """[N, ...]: each row's entry of x [num_groups, ...]; 0 for padding."""
        return x.at[self.ids].get(mode="fill", fill_value=0)

    def sizes(self) -> chex.Array:
        """[num_groups] float32 row counts."""
        return self.total(jnp.ones(self.ids.shape, jnp.float32))

    def mean(self, x: chex.Array) -> chex.Array:
        """[N, ...]: for each row the mean of x [N, ...] over its group."""
        sizes = jnp.maximum(self.sizes(), 1.0).reshape(-1, *[1] * (x.ndim - 1))
        return self.rows(self.total(x) / sizes)

    def maximum(self, x: chex.Array) -> chex.Array:
        """[N, ...]: for each row the maximum of x [N, ...] over its group."""
        return self.rows(jax.ops.segment_max(x, self.ids, self.num_groups))

    def centre(self, x: chex.Array) -> chex.Array:
        """x [N, ...] less its group means; 0 on padding.

        The first mean of equal values can be some ulps off; that residue is short enough for its
        own mean to be exact, so the second pass leaves exactly 0.
        """
        for _ in range(2):
            x = x - self.mean(x)
        return jnp.where(self.valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)


def make_groups(group_ids: chex.Array, num_groups: int, valid: chex.Array | bool = True) -> Groups:
    """Groups of rows; rows with an id outside [0, num_groups) or not `valid` are padding."""
    valid = valid & (group_ids >= 0) & (group_ids < num_groups)
    return Groups(jnp.where(valid, group_ids, num_groups), num_groups)


def row_advantages(rewards: chex.Array, groups: Groups, eps: chex.Numeric = EPS) -> chex.Array:
    """Computes (R_i - mean) / (std + eps) over each group, std with ddof 1.

    Let N be rows.

    Args:
      rewards: [N] float32.
      groups: the groups of the rows.
      eps: added to the standard deviation.

    Returns:
      [N] float32; 0 in a group of one row or whose standard deviation is below 1e-6.
    """
    centred = groups.centre(rewards)
    freedom = jnp.maximum(groups.sizes() - 1.0, 1.0)
    std = groups.rows(jnp.sqrt(groups.total(jnp.square(centred)) / freedom))
    return jnp.where(std >= STD_FLOOR, centred / (std + eps), 0.0)


def loss_mask(turn_ids: chex.Array, mask_before_turn: chex.Array) -> chex.Array:
    """[N, T] bool: the sampled tokens that the retry mask leaves, of any array type."""
    return (turn_ids >= 0) & (turn_ids >= mask_before_turn[:, None])


def check_rewards(rewards: chex.Array) -> None:
    """Refuses rewards [N] whose statistics would leave float32, on the host.

    Raises:
      ValueError: naming the first row that is not finite or exceeds 1e12 in size.
    """
    rewards = np.asarray(rewards)
    for row in np.flatnonzero(~(np.abs(rewards) <= MAX_REWARD)):
        raise ValueError(
            f"rewards[{row}] is {rewards[row]}; it must be finite and at most {MAX_REWARD:g} in "
            "size: drop the row, or mend the environment's reward"
        )


def advantages(
    rewards: chex.Array,
    group_ids: chex.Array,
    turn_ids: chex.Array,
    mask_before_turn: chex.Array,
    *,
    num_groups: int,
    eps: chex.Numeric = EPS,
) -> GrpoOutput:
    """Computes GRPO advantages broadcast over the sampled tokens of each row.

    Let N be rows and T tokens. Under an outer transformation the rewards cannot be checked.

    Args:
      rewards: [N] finite scalars.
      group_ids: [N] int in [0, num_groups); any other value marks a padding row.
      turn_ids: [N, T] int, 0-based turn of sampled tokens, -1 elsewhere.
      mask_before_turn: [N] int, first turn kept in the loss; 0 keeps all.
      num_groups: upper bound of the group ids, static.
      eps: added to the standard deviation of a group.

    Returns:
      `GrpoOutput`; padding rows are 0 throughout.

    Raises:
      AssertionError: shapes or types do not fit.
      ValueError: a reward is not finite, or exceeds 1e12 in size.
    """
    arrays = [rewards, group_ids, turn_ids, mask_before_turn]
    chex.assert_rank(arrays, [1, 1, 2, 1])
    chex.assert_equal_shape_prefix(arrays, 1)
    chex.assert_type(arrays[1:], int)
    if not isinstance(rewards, jax.core.Tracer):
        check_rewards(rewards)
    rewards = jnp.asarray(rewards, jnp.float32)
    ids, turn_ids, mask_before_turn = map(jnp.asarray, (group_ids, turn_ids, mask_before_turn))
    return _advantages(rewards, ids, turn_ids, mask_before_turn, eps, num_groups=num_groups)


@functools.partial(jax.jit, static_argnames="num_groups")
def _advantages(rewards, group_ids, turn_ids, mask_before_turn, eps, *, num_groups) -> GrpoOutput:
    row = row_advantages(rewards, make_groups(group_ids, num_groups), eps)
    token = jnp.where(turn_ids >= 0, row[:, None], 0.0)
    masked = jnp.where(loss_mask(turn_ids, mask_before_turn), token, 0.0)
    return GrpoOutput(masked, token, row)
