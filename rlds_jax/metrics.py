"""Model FLOPs and their utilisation, and the memory that was needed."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from rlds_jax import topology
from rlds_jax.models.config import ModelConfig


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
    chip = topology.chip(jax.devices()[0].device_kind)
    return None if chip is None else flops / (seconds * chip.flops * jax.device_count())


def memory_peak() -> int | None:
    """Most bytes ever in use on one device of this process; None where devices do not say."""
    reported = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in reported if "peak_bytes_in_use" in stats]
    return max(peaks, default=None)
