"""Which attention kernel a device gets, and the proof at start-up that it is right there.

A kernel that compiles can still attend across packed segments, so on an accelerator it is compared
with the dense reference first, forward and gradients, on segments of unequal lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rlds_jax.models import attention
from rlds_jax.models.attention import Choice, Implementation
from rlds_jax.models.config import ModelConfig

SEGMENTS = (100, 37, 3, 130, 201)  # of the first probe row; the rest of its 512 is padding
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}


class WrongAttention(ValueError):
    """No attention kernel that may be used agrees with the reference on this device."""


def candidates(platform: str, capability: float, dtype: str) -> tuple[Implementation, ...]:
    """Kernels for a device, the fastest first.

    Args:
      platform: of the device: "cpu", "gpu" or "tpu".
      capability: CUDA compute capability, 0 elsewhere.
      dtype: of the activations.
    """
    if platform == "tpu":
        return ("splash", "blockwise")
    if platform == "gpu":
        packed: tuple[Implementation, ...] = ("cudnn",)
        hopper = capability >= 9.0 and dtype != "float32"
        return (*(packed if hopper else ()), "pallas", "blockwise")
    return ("blockwise",)


def choose(
    wanted: Choice,
    model: ModelConfig,
    dtype: str,
    say: Callable[[str], None] = print,
    check: Callable[[Implementation, ModelConfig, str], str | None] | None = None,
) -> Implementation:
    """The kernel to train with on this process's first device.

    "auto" takes the first of `candidates` that passes and says which failed; a kernel asked for by
    name must pass. On the CPU nothing is compared: its kernels are XLA's.

    Args:
      say: is told what failed and what is taken instead.
      check: says what is wrong with a kernel, or None; by default `fault`.

    Raises:
      WrongAttention: nothing that may be used passes.
    """
    device = jax.local_devices()[0]
    capability = float(getattr(device, "compute_capability", 0))
    names = candidates(device.platform, capability, dtype) if wanted == "auto" else (wanted,)
    check = check or (fault if device.platform != "cpu" else lambda *_: None)
    for name in names:
        problem = check(name, model, dtype)
        if problem is None:
            return name
        say(f"attention {name!r} is not used on {device.device_kind}: {problem}")
    raise WrongAttention(
        f"compute.attention={wanted}: {problem}; use compute.attention=auto or blockwise"
    )


def fault(name: Implementation, model: ModelConfig, dtype: str) -> str | None:
    """What is wrong with a kernel on the default device, or None."""
    try:
        errors = deviations(name, model, dtype)
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"it does not run: {lines[0]}"
    worst = max(errors, key=lambda key: np.nan_to_num(errors[key], nan=np.inf))
    if errors[worst] <= TOLERANCE[dtype]:
        return None
    return f"its {worst} differs from the reference by {errors[worst]:.3g} of the largest value"


def deviations(name: Implementation, model: ModelConfig, dtype: str) -> dict[str, float]:
    """Largest differences from dense float32, relative to the largest value; padding left out."""
    arrays, weight, segments = probe(model)
    low = [x.astype(dtype) for x in arrays]
    actual = _value_and_gradients(name)(*low, weight, segments)
    with jax.default_matmul_precision("highest"):
        expected = _value_and_gradients("dense")(
            *(x.astype(jnp.float32) for x in low), weight, segments
        )
    valid = np.asarray(segments > 0)
    names = ("output", "query gradient", "key gradient", "value gradient")
    return {
        key: float(np.abs(a - e).max() / np.abs(e).max())
        for key, a, e in zip(
            names,
            (np.asarray(x, np.float32)[valid] for x in actual),
            (np.asarray(x, np.float32)[valid] for x in expected),
            strict=True,
        )
    }


def probe(model: ModelConfig, rows: Sequence[Sequence[int]] = (SEGMENTS, (512,))):
    """Random queries, keys, values and output weights [2, 512, heads, hd], and segment_ids."""
    rng = np.random.default_rng(0)
    segments = np.zeros((len(rows), 512), np.int32)
    for row, lengths in zip(segments, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)

    def array(heads: int):
        return jnp.asarray(rng.normal(size=(*segments.shape, heads, model.head_dim)), jnp.float32)

    arrays = [array(model.num_heads), array(model.num_kv_heads), array(model.num_kv_heads)]
    weight = array(model.num_heads) * (segments > 0)[:, :, None, None]
    return arrays, weight, jnp.asarray(segments)


@functools.cache
def _value_and_gradients(name: Implementation):
    def loss(q, k, v, weight, segments):
        out = attention.attend(q, k, v, segments, implementation=name)
        return jnp.sum(weight * out.astype(jnp.float32)), out

    def run(q, k, v, weight, segments):
        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            q, k, v, weight, segments
        )
        return out, *gradients

    return jax.jit(run)
