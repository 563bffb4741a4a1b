"""The start-up gate: a wrong kernel is found out, whatever it is called."""

import jax.numpy as jnp
import pytest
from test_flash import MODEL

from rlds_jax.models import attention, attention_gate


def across_segments(q, k, v, segment_ids):
    return attention.dense(q, k, v, jnp.ones_like(segment_ids))


def one_token_late(q, k, v, segment_ids):
    return jnp.roll(attention.dense(q, k, v, segment_ids), 1, axis=1)


def wrong_gradient(q, k, v, segment_ids):
    """Right forward; the keys' gradient is lost."""
    right = attention.dense(q, k, v, segment_ids)
    lost = attention.dense(q, jnp.zeros_like(k), v, segment_ids)
    from jax.lax import stop_gradient

    return lost + stop_gradient(right - lost)


def not_a_number(q, k, v, segment_ids):
    return attention.dense(q, k, v, segment_ids) * jnp.nan


def broken(q, k, v, segment_ids):
    raise NotImplementedError("no such device\nsecond line")


@pytest.fixture
def replace(monkeypatch):
    """Puts another function in a kernel's place."""

    def put(name, function):
        monkeypatch.setattr(attention, name, function)
        attention_gate._value_and_gradients.cache_clear()

    yield put
    attention_gate._value_and_gradients.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (across_segments, "differs from the reference"),
        (one_token_late, "differs from the reference"),
        (wrong_gradient, "gradient differs from the reference"),
        (not_a_number, "differs from the reference by nan"),
        (broken, "does not run: no such device"),
    ],
)
def test_a_wrong_kernel_is_found_out(replace, kernel, message):
    replace("blockwise", kernel)
    found = attention_gate.fault("blockwise", MODEL, "float32")
    assert found is not None
    assert message in found
    assert "second line" not in found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_kernel_passes(replace, dtype):
    replace("blockwise", attention.blockwise)
    assert attention_gate.fault("blockwise", MODEL, dtype) is None


def test_auto_takes_the_next_kernel_and_says_so(monkeypatch):
    monkeypatch.setattr(attention_gate, "candidates", lambda *_: ("cudnn", "pallas", "blockwise"))
    faults = {"cudnn": "it leaks", "pallas": None, "blockwise": None}
    said = []
    chosen = attention_gate.choose(
        "auto", MODEL, "bfloat16", said.append, lambda name, *_: faults[name]
    )
    assert chosen == "pallas"
    assert len(said) == 1
    assert "'cudnn'" in said[0]
    assert "it leaks" in said[0]


def test_a_wrong_kernel_asked_for_by_name_refuses_to_train():
    with pytest.raises(attention_gate.WrongAttention, match=r"compute.attention=pallas: it leaks"):
        attention_gate.choose("pallas", MODEL, "float32", [].append, lambda *_: "it leaks")


def test_every_platform_ends_with_blockwise():
    assert attention_gate.candidates("gpu", 9.0, "bfloat16") == ("cudnn", "pallas", "blockwise")
    assert attention_gate.candidates("gpu", 9.0, "float32") == ("pallas", "blockwise")
    assert attention_gate.candidates("gpu", 8.0, "bfloat16") == ("pallas", "blockwise")
    assert attention_gate.candidates("tpu", 0, "bfloat16") == ("splash", "blockwise")
    assert attention_gate.candidates("cpu", 0, "float32") == ("blockwise",)
