"""The accelerators' kernels, interpreted, against the dense reference; and what cuDNN is told."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from rlds_jax.models import attention_gate, flash
from rlds_jax.models.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rope_theta=1e4,
    tie_embeddings=True,
)


@pytest.mark.parametrize("name", ["splash", "pallas"])
def test_interpreted_kernels_are_dense_on_unequal_segments(monkeypatch, name):
    interpreted = functools.partial(getattr(flash, name), interpret=True)
    monkeypatch.setattr(flash, name, interpreted)
    attention_gate._value_and_gradients.cache_clear()
    errors = attention_gate.deviations(name, MODEL, "float32")
    assert max(errors.values()) < 1e-5, errors
    attention_gate._value_and_gradients.cache_clear()


def test_segment_bounds_are_lengths_and_starts():
    ids = jnp.asarray([[1, 1, 1, 2, 3, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4], [0] * 8])
    lengths, starts = flash.segment_bounds(ids, 4)
    np.testing.assert_array_equal(lengths, [[3, 1, 2, -1], [8, -1, -1, -1], [-1] * 4])
    np.testing.assert_array_equal(starts, [[0, 3, 4, -1], [0, -1, -1, -1], [-1] * 4])
    assert lengths.dtype == starts.dtype == jnp.int32


def test_segment_bounds_agree_with_numpy_on_random_rows():
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 9, rng.integers(1, 8))
        ids = np.zeros(64, int)
        ids[: sizes.sum()] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        lengths, starts = flash.segment_bounds(jnp.asarray(ids)[None], 10)
        rest = [-1] * (10 - len(sizes))
        np.testing.assert_array_equal(lengths[0], [*sizes, *rest])
        np.testing.assert_array_equal(starts[0], [*(np.cumsum(sizes) - sizes), *rest])


def test_there_is_room_for_many_segments_in_short_rows():
    assert flash.max_segments(40) == 64
    assert flash.max_segments(16384) == 256
