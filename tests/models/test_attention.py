"""Blockwise attention against the dense reference, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlds_jax.models import attention


def inputs(length, seed=0, rows=3, heads=4, kv_heads=2, head_dim=8):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, length, n, head_dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    )
    segments = np.sort(rng.integers(1, 6, (rows, length)), axis=1)
    segments[1, length // 2 :] = 0
    segments[2] = 1
    return q, k, v, jnp.asarray(segments)


@pytest.mark.parametrize(("length", "block"), [(5, 64), (37, 8), (64, 16), (64, 64), (130, 64)])
def test_blockwise_is_dense(length, block):
    q, k, v, segments = inputs(length)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def blockwise(*args):
        return attention.blockwise(*args, block=block)

    np.testing.assert_allclose(
        blockwise(q, k, v, segments), attention.dense(q, k, v, segments), atol=1e-5
    )

    def gradient(function):
        def loss(q, k, v):
            return jnp.sum(weight * function(q, k, v, segments))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    for actual, expected in zip(
        gradient(blockwise)(q, k, v), gradient(attention.dense)(q, k, v), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("function", [attention.dense, attention.blockwise])
def test_later_tokens_and_other_segments_do_not_matter(function):
    q, k, v, _ = inputs(40)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], 3, axis=0).repeat([15, 20, 5], axis=1))
    before = function(q, k, v, segments)
    moved = jnp.zeros((40,)).at[:15].set(7.0).at[30:].set(-3.0)[None, :, None, None]
    after = function(q, k + moved, v + moved, segments)
    np.testing.assert_array_equal(before[:, 15:30], after[:, 15:30])


def test_large_scores_stay_finite():
    q, k, v, segments = inputs(40)
    gradient = jax.grad(lambda q: attention.blockwise(q * 1e3, k * 1e3, v, segments).sum())(q)
    assert np.isfinite(gradient).all()


def test_memory_is_linear_in_length():
    def temporaries(length):
        x = jnp.ones((1, length, 2, 16))
        segments = jnp.ones((1, length), int)
        function = jax.jit(jax.grad(lambda q: attention.blockwise(q, x, x, segments).sum()))
        return function.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.5 * temporaries(2048)


def test_bfloat16_follows_float32():
    q, k, v, segments = inputs(50)
    low = attention.blockwise(*(x.astype(jnp.bfloat16) for x in (q, k, v)), segments)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        low.astype(jnp.float32), attention.dense(q, k, v, segments), atol=0.05
    )
