"""Sampling by inverse CDF, one uniform per token, with exact log-probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rlds_jax.rollouts.engines.invariant import row_sums

CDF_BLOCK = 128


def sample(logits, seeds, counts, temperatures):
    """Inverse-CDF sampling with one uniform per token, drawn from fold_in(key(seed), index).

    Temperature 0 takes the argmax and reports its log-probability at temperature 1.

    Args:
      logits: [R, V] float32.
      seeds: [R, 2] uint32 key data; counts: [R] index of the token; temperatures: [R].

    Returns:
      ids [R] int32 and logprobs [R] float32 at the sampling temperature.
    """
    greedy = temperatures <= 0
    inverse = 1 / jnp.where(greedy, 1.0, temperatures)
    top = logits.max(-1)
    mass = jnp.exp((logits - top[:, None]) * inverse[:, None])
    mass = jnp.pad(mass, ((0, 0), (0, -mass.shape[1] % CDF_BLOCK)))
    blocks = mass.reshape(len(mass), -1, CDF_BLOCK)
    cdf = jnp.cumsum(row_sums(blocks), axis=-1)
    total = cdf[:, -1]
    ids = _inverse_cdf(blocks, cdf, _uniform(seeds, counts) * total)
    ids = lax.cond(  # argmax costs more than all the rest
        greedy.any(),
        lambda: jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), ids),
        lambda: ids,
    )
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    return ids, (chosen - top) * inverse - jnp.log(total)


def _uniform(seeds, counts):
    """[R] float32 in [0, 1 - 2^-23]."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(lambda key, n: jax.random.uniform(jax.random.fold_in(key, n)))(keys, counts)


def _inverse_cdf(blocks, cdf, target):
    """First index whose cumulative mass exceeds target: the block first, then inside it.

    Rounding inside the block may leave no such index; the last one with any mass is taken then.
    """
    block = jnp.minimum((cdf <= target[:, None]).sum(-1), cdf.shape[1] - 1)[:, None]
    before = jnp.take_along_axis(jnp.pad(cdf, ((0, 0), (1, 0))), block, axis=1)
    mass = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    within = (jnp.cumsum(mass, axis=-1) + before <= target[:, None]).sum(-1)
    last = jnp.where(mass > 0, jnp.arange(CDF_BLOCK), 0).max(-1)
    return (block[:, 0] * CDF_BLOCK + jnp.minimum(within, last)).astype(jnp.int32)
