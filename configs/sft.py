"""Supervised fine-tuning of a small Qwen3 from scratch on chat transcripts.

    python -m rlds_jax.sft --config=configs/sft.py --config.train=train.jsonl \
        --config.validation=validation.jsonl --config.tokenizer=tokenizer_dir --workdir=runs/sft

Trains a 1.8 M parameter policy (hidden 192, 4 layers) for 4 epochs in rows of 512 tokens. With
--config.init=DIR it fine-tunes a Hugging Face directory instead, at its own size; lower the
learning rate then (1e-5 for a pretrained model).
"""

from ml_collections import ConfigDict

from configs.common import section
from rlds_jax.models.config import ModelConfig
from rlds_jax.update import ComputeConfig, OptimizerConfig


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.train = ""  # jsonl of transcripts
    config.validation = ""  # jsonl of transcripts; "" for none
    config.tokenizer = ""  # Hugging Face directory; "" for that of `init`
    config.init = ""  # Hugging Face directory; "" for fresh weights of shape `model`
    config.epochs = 4
    config.log_every = 20
    config.save_dtype = "bfloat16"

    config.model = section(
        ModelConfig,
        vocab_size=0,  # 0: the tokenizer's
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        tie_embeddings=True,
        max_positions=4096,
    )
    # One optimizer step sees rows * max_micro rows, `rows` at a time.
    config.batch = ConfigDict()
    config.batch.rows = 16
    config.batch.row_length = 512
    config.batch.max_micro = 1

    config.optimizer = section(
        OptimizerConfig, learning_rate=2e-3, b2=0.95, schedule="cosine", warmup_steps=50
    )
    del config.optimizer.total_steps  # the epochs decide
    config.compute = section(ComputeConfig)
    return config
