"""FLOPs counted by hand."""

from rlds_jax.metrics import train_flops
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
