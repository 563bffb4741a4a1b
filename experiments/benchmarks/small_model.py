"""The Qwen3-shaped model of 12.6 M parameters that benchmarks on a CPU share."""

from rlds_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    tie_embeddings=True,
    max_positions=2048,
)
