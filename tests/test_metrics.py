"""FLOPs counted by hand, and what devices report."""

import types

import jax

from rlds_jax.metrics import memory_peak, mfu, train_flops
from rlds_jax.models.config import ModelConfig

SMALL = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rope_theta=1e4,
    tie_embeddings=True,
)


def test_train_flops_by_hand():
    # Per layer: q and o 2*8*8, k and v 2*8*4, three feed-forward matrices 3*8*12; head 8*11.
    weights = 3 * (2 * 64 + 2 * 32 + 288) + 88
    # Attention: 2 products * 2 FLOPs * 8 wide * T^2 / 2, times 3 passes, times 3 layers.
    attention = 3 * 3 * 2 * 2 * 8 * (5 * 5 + 2 * 2) / 2
    assert train_flops(SMALL, [5, 2]) == 6 * weights * 7 + attention


def test_a_device_is_known_by_its_kind(monkeypatch):
    def on(kind):
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
        return mfu(394e12, 4.0)

    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert on("TPU v5 lite") == 0.25
    assert on("NVIDIA H100 80GB HBM3") == 394 / (4 * 989 * 2)
    assert on("cpu") is None


def test_the_fullest_device_gives_the_peak(monkeypatch):
    assert memory_peak() is None  # a CPU does not say
    devices = [
        types.SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (3, 7)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory_peak() == 7
