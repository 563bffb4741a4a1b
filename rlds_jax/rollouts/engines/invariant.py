"""Row-wise functions that round alike for any number of rows.

XLA's CPU matrix library accumulates in an order that depends on the number of rows when a weight is
[in, out], but not when it is [out, in] (measured from 2 to 512 rows; one row alone differs). Its
reductions change order with the number of elements, so sums over features are products with ones.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def linear(x, weight):
    """x [n, in] times weight [out, in]."""
    return jnp.einsum("nd,fd->nf", x, weight)


def row_sums(x):
    """[...] sums over the last axis of x [..., n]."""
    ones = jnp.ones((8, x.shape[-1]), x.dtype)
    return linear(x.reshape(-1, x.shape[-1]), ones)[:, 0].reshape(x.shape[:-1])


def rms_norm(x, scale, eps: float):
    """`qwen3.rms_norm`, accumulated in one order whatever the number of rows."""
    x32 = x.astype(jnp.float32)
    mean = row_sums(x32 * x32)[..., None] / x.shape[-1]
    return (x32 * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(x.dtype)
