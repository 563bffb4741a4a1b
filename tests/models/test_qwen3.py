"""The model against transformers, and its log-probabilities against the plain formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import traverse_util

from rlds_jax.models import qwen3, weights
from rlds_jax.models.config import ModelConfig

QWEN3 = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    tie_embeddings=True,
)
FAMILIES = {
    "qwen3_tied": QWEN3,
    "qwen3_untied": dataclasses.replace(QWEN3, tie_embeddings=False),
    "qwen2": dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True, head_dim=8),
    "llama": dataclasses.replace(QWEN3, qk_norm=False, tie_embeddings=False, head_dim=8),
}


def random_params(config, seed=0):
    """Every parameter random, so that a norm or bias left out shows."""
    params = qwen3.init_params(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Our config and parameters, and the transformers model that read them from disk."""
    config = FAMILIES[request.param]
    params = random_params(config)
    directory = tmp_path_factory.mktemp(request.param)
    weights.save(params, config, directory, jnp.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return config, params, reference


def reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor(tokens)[None]).logits[0].numpy()


@functools.partial(jax.jit, static_argnames=("config", "attention"))
def our_logits(config, params, tokens, positions, segments, attention="blockwise"):
    hidden = qwen3.hidden_states(params, config, tokens, positions, segments, attention=attention)
    return hidden @ qwen3.unembedding(params).T


def packed_row(sequences, length):
    """tokens, positions and segment ids [1, length] of sequences one after another."""
    row = np.zeros((3, 1, length), np.int32)
    start = 0
    for segment, tokens in enumerate(sequences, 1):
        here = slice(start, start + len(tokens))
        row[0, 0, here], row[1, 0, here], row[2, 0, here] = tokens, np.arange(len(tokens)), segment
        start += len(tokens)
    return row


def test_it_loads_as_the_family_it_is(pair):
    config, _, reference = pair
    assert reference.config.model_type == config.to_hf()["model_type"]


@pytest.mark.parametrize("attention", ["dense", "blockwise"])
def test_logits_match_transformers_packed_and_padded(pair, attention):
    config, params, reference = pair
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, config.vocab_size, n) for n in (23, 5, 41)]
    row = packed_row(sequences, 90)
    logits = our_logits(config, params, *row, attention=attention)[0]
    start = 0
    for tokens in sequences:
        expected = reference_logits(reference, tokens)
        np.testing.assert_allclose(logits[start : start + len(tokens)], expected, atol=1e-4)
        start += len(tokens)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat):
    params = random_params(QWEN3)
    row = packed_row([np.arange(20), np.arange(11)], 40)

    @functools.partial(jax.jit, static_argnames="policy")
    @jax.grad
    def gradient(params, policy):
        return jnp.sum(qwen3.hidden_states(params, QWEN3, *row, remat=policy) ** 2)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        gradient(params, policy="none"),
        gradient(params, policy=remat),
    )


def test_unknown_remat_and_attention_are_named():
    params, row = random_params(QWEN3), packed_row([np.arange(4)], 4)
    with pytest.raises(ValueError, match="remat 'some'"):
        qwen3.hidden_states(params, QWEN3, *row, remat="some")
    with pytest.raises(ValueError, match="attention 'fast'"):
        qwen3.hidden_states(params, QWEN3, *row, attention="fast")


def test_bfloat16_computes_in_bfloat16():
    hidden = qwen3.hidden_states(
        random_params(QWEN3), QWEN3, *packed_row([np.arange(4)], 4), compute_dtype=jnp.bfloat16
    )
    assert hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_table_is_what_init_makes(config):
    table = qwen3.parameter_table(config)
    shapes = jax.eval_shape(lambda: qwen3.init_params(config, jax.random.key(0)))
    flat = traverse_util.flatten_dict(shapes, sep="/")
    assert {path: x.shape for path, x in flat.items()} == {
        path: parameter.shape for path, parameter in table.items()
    }
    for path, parameter in table.items():
        assert len(parameter.axes) == len(parameter.shape), path


def test_a_segment_does_not_see_another():
    params = random_params(QWEN3)
    first, second = np.arange(9), np.arange(30, 47)
    before = our_logits(QWEN3, params, *packed_row([first, second], 32))[0, 9:26]
    after = our_logits(QWEN3, params, *packed_row([first[::-1], second], 32))[0, 9:26]
    np.testing.assert_array_equal(before, after)


def plain_logprobs(hidden, unembed, targets, temperature):
    logp = jax.nn.log_softmax(hidden @ unembed.T / temperature[..., None])
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


@pytest.fixture
def tokens():
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(3, 14, 16)), jnp.float32)
    unembed = jnp.asarray(rng.normal(size=(50, 16)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 50, (3, 14)))
    temperature = jnp.asarray(rng.uniform(0.5, 1.5, (3, 14)), jnp.float32)
    return hidden, unembed, targets, temperature


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_token_logprobs_are_the_plain_ones(tokens, chunk_size):
    hidden, unembed, targets, temperature = tokens
    flat = (hidden.reshape(42, 16), unembed, targets.reshape(42), temperature.reshape(42))
    for actual, expected in zip(
        qwen3.token_logprobs(*flat, chunk_size=chunk_size), plain_logprobs(*flat), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [3, 7, 12, 1000])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_row_logprobs_and_gradients_of_active_tokens(tokens, chunk_size, density):
    hidden, unembed, targets, temperature = tokens
    active = jnp.asarray(np.random.default_rng(2).random((3, 14)) < density)
    weight = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 14)), jnp.float32)

    def chunked(hidden, unembed):
        return qwen3.row_logprobs(
            hidden, unembed, targets, temperature, active, chunk_size=chunk_size
        )

    def plain(hidden, unembed):
        both = plain_logprobs(hidden, unembed, targets, temperature)
        return tuple(jnp.where(active, x, 0.0) for x in both)

    for actual, expected in zip(chunked(hidden, unembed), plain(hidden, unembed), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)

    def gradient(function):
        def loss(*args):
            logprobs, entropy = function(*args)
            return jnp.sum(weight[0] * logprobs) + jnp.sum(weight[1] * jnp.sin(entropy))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, unembed)

    for actual, expected in zip(gradient(chunked), gradient(plain), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_no_array_of_all_logits_exists():
    """Neither forward nor backward holds [rows, length, vocabulary]."""
    rows, length, vocabulary = 4, 256, 1000
    hidden = jnp.ones((rows, length, 8))
    unembed = jnp.ones((vocabulary, 8))

    def loss(hidden, unembed):
        logprobs, _ = qwen3.row_logprobs(
            hidden,
            unembed,
            jnp.zeros((rows, length), int),
            jnp.ones((rows, length)),
            jnp.ones((rows, length), bool),
            chunk_size=64,
        )
        return logprobs.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, unembed).compile()
    all_logits = rows * length * vocabulary * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits / 2
