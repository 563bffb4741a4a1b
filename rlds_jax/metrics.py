"""Model FLOPs and their utilisation."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from rlds_jax.models.config import ModelConfig

# Dense bf16 peak of one device, FLOP/s, by a part of jax's device_kind.
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def train_flops(config: ModelConfig, lengths: Iterable[int]) -> float:
    """Forward and backward FLOPs of one pass over sequences of these lengths.

    A multiply-add counts two; backward counts twice the forward; causal attention counts the half
    it needs; recomputation under remat is not counted (the convention of MFU).
    """
    attention_width = config.num_heads * config.head_dim
    per_layer = (
        2 * config.hidden_size * (attention_width + config.num_kv_heads * config.head_dim)
        + 3 * config.hidden_size * config.intermediate_size
    )
    weights = config.num_layers * per_layer + config.hidden_size * config.vocab_size
    lengths = list(lengths)
    quadratic = sum(length * length for length in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * config.num_layers * attention_width * quadratic


def mfu(flops: float, seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices; None where the device's peak is not known."""
    device = jax.devices()[0]
    for kind, peak in PEAK_FLOPS.items():
        if kind in device.device_kind:
            return flops / (seconds * peak * jax.device_count())
    return None
