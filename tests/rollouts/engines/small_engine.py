"""A small random model in an engine, and prompts for it."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlds_jax.models import qwen3
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.local import LocalEngine

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e4,
    tie_embeddings=True,
)


def random_params(seed=0, config=CONFIG):
    """Random weights, scaled up until the distributions are far from uniform."""
    params = qwen3.init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda p: 5 * p if p.ndim > 2 else p, params)


PARAMS = random_params()
PARAMS["embed"] = PARAMS["embed"] * 8


LENGTH = 256


def make_engine(params=PARAMS, config=CONFIG, **options):
    options = {"max_context": LENGTH, "num_slots": 8, "page_size": 32} | options
    return LocalEngine(params, config, **options)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


PROMPTS = [prompt(i, n) for i, n in enumerate([1, 2, 15, 16, 17, 33, 64, 100, 130, 150, 3, 48])]


async def sample(engine, ids, *, seed=0, max_tokens=24, temperature=1.0, stop_ids=(7,), **more):
    return await engine.generate(
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_ids=stop_ids,
        seed=seed,
        **more,
    )


async def sample_all(engine, prompts=PROMPTS, **options):
    return await asyncio.gather(
        *(sample(engine, ids, seed=i, **options) for i, ids in enumerate(prompts))
    )


def assert_identical(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def reference_logprobs(params, ids, completion, temperature, config=CONFIG):
    """Log-probabilities of a completion by one full forward pass."""
    tokens = [*ids, *completion.ids.tolist()]
    hidden = reference_hidden(params, tokens, config)[: len(tokens) - 1]
    hidden = jnp.pad(hidden, ((0, LENGTH - len(hidden)), (0, 0)))
    targets = jnp.array(tokens[1:] + [0] * (LENGTH + 1 - len(tokens)), jnp.int32)
    logprobs, _ = qwen3.token_logprobs(
        hidden, qwen3.unembedding(params), targets, jnp.full(LENGTH, temperature)
    )
    return np.asarray(logprobs)[len(ids) - 1 : len(tokens) - 1]


@functools.partial(jax.jit, static_argnames="config")
def forward(params, tokens, segments, config):
    positions = jnp.arange(tokens.shape[1])[None]
    return qwen3.hidden_states(params, config, tokens, positions, segments, attention="dense")[0]


def reference_hidden(params, tokens, config=CONFIG):
    """[len(tokens), D], computed at one padded length."""
    count = len(tokens)
    padded = jnp.array([[*tokens, *[0] * (LENGTH - count)]], jnp.int32)
    segments = (jnp.arange(LENGTH) < count).astype(jnp.int32)[None]
    return forward(params, padded, segments, config)[:count]
