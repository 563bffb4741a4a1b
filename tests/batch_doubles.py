"""A small model and unequal trajectories, for the tests of batch, update and sharding."""

import numpy as np

from rlds_jax import batch as batching
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.types import AuxiliaryPair, Trajectory, Turn

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=1e4,
    tie_embeddings=True,
)
COEFFICIENTS = {"reflect": 0.05, "retry": 0.10}


def trajectory(uid, length, rng, temperature=0.7):
    """Prompt of 3 tokens, then turns of 4 sampled and 2 observation tokens."""
    index = np.arange(length) - 3
    turn_ids = np.where((index >= 0) & (index % 6 < 4), index // 6, -1).astype(np.int32)
    sampled = turn_ids >= 0
    return Trajectory(
        uid=uid,
        group="0/0",
        item_id="item",
        initial_observation="",
        tokens=rng.integers(0, MODEL.vocab_size, length).astype(np.int32),
        turn_ids=turn_ids,
        logprobs=np.where(sampled, -rng.uniform(0.1, 5, length), 0).astype(np.float32),
        weight_version=np.where(sampled, 0, -1).astype(np.int32),
        prompt_length=3,
        temperature=temperature,
        reward=1.0,
        success=True,
        ended_by="goal",
        turns=(Turn("a", "o"),) * (int(turn_ids.max()) + 1),
    )


def policy_rows(lengths=(9, 31, 5, 17, 24), seed=0, aggregation="token-mean"):
    """Sequences of random trajectories with random advantages; temperatures differ by row."""
    rng = np.random.default_rng(seed)
    rows = [
        trajectory(f"0/0/{i}", length, rng, temperature=0.7 + 0.1 * i)
        for i, length in enumerate(lengths)
    ]
    advantages = [rng.normal(size=len(t.tokens)).astype(np.float32) for t in rows]
    masks = [t.turn_ids >= (i % 2) for i, t in enumerate(rows)]
    return batching.policy_sequences(rows, advantages, masks, aggregation)


def pair(channel, uid, length, delta, rng):
    tokens = rng.integers(0, MODEL.vocab_size, length).astype(np.int32)
    return AuxiliaryPair(channel, tokens, np.arange(length) >= length // 2, delta, uid)


def all_sequences(seed=0):
    """Policy rows and pairs of both channels."""
    rng = np.random.default_rng(seed + 100)
    pairs = [
        pair("reflect", "0/0/5", 14, 1.0, rng),
        pair("retry", "0/0/5", 22, 1.0, rng),
        pair("retry", "0/0/6", 8, 0.25, rng),
    ]
    layout = batching.BatchLayout(1, 64, 1)
    auxiliary, _ = batching.auxiliary_sequences(pairs, layout, coefficients=COEFFICIENTS)
    return policy_rows(seed=seed) + auxiliary
