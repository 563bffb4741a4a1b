"""What the engine samples: exact logprobs, bitwise invariant, by seed, temperature and stop ids."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    CONFIG,
    PARAMS,
    PROMPTS,
    assert_identical,
    make_engine,
    prompt,
    random_params,
    reference_hidden,
    reference_logprobs,
    sample,
    sample_all,
)

from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines import local_kernels


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward(shared, temperature):
    completions = asyncio.run(sample_all(shared, temperature=temperature))
    for ids, completion in zip(PROMPTS, completions, strict=True):
        expected = reference_logprobs(PARAMS, ids, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": False, "attention_bias": True, "tie_embeddings": False},
        {"num_kv_heads": 4, "qk_norm": False},
        {"num_kv_heads": 1},
    ],
)
def test_every_family_agrees_with_a_full_forward(change):
    config = ModelConfig(**{**vars(CONFIG), **change})
    params = random_params(1, config)
    engine = make_engine(params, config)
    (completion,) = asyncio.run(sample_all(engine, [PROMPTS[7]]))
    expected = reference_logprobs(params, PROMPTS[7], completion, 1.0, config)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    engine.close()


def test_alone_in_a_crowd_cold_and_warm_are_bitwise_equal(engine):
    async def alone():
        return [await sample(engine, ids, seed=i) for i, ids in enumerate(PROMPTS)]

    cold_alone = asyncio.run(alone())
    engine.update_weights(PARAMS, 1)
    cold_crowd = asyncio.run(sample_all(engine))
    engine.metrics()
    warm_crowd = asyncio.run(sample_all(engine, PROMPTS[:6]))
    assert engine.metrics()["engine/prefix_hit_rate"] > 0.8
    assert_identical(cold_alone, cold_crowd)
    assert_identical(cold_alone[:6], warm_crowd)


def test_decode_and_prefill_compute_the_same_bits(engine):
    """A continuation is the same whether its context was sampled or given."""
    whole = asyncio.run(sample(engine, PROMPTS[5], max_tokens=60, stop_ids=()))

    async def continued(cut):
        ids = PROMPTS[5] + whole.ids[:cut].tolist()
        return await sample(engine, ids, max_tokens=60 - cut, temperature=0, stop_ids=())

    from_decode = asyncio.run(continued(40))
    engine.update_weights(PARAMS, 1)  # now the context must be prefilled
    from_prefill = asyncio.run(continued(40))
    assert_identical([from_decode], [from_prefill])


@pytest.mark.parametrize(
    "change",
    [{}, {"num_kv_heads": 1}, {"hidden_size": 192, "num_heads": 6, "head_dim": 64}],
)
def test_prefilled_and_decoded_pages_hold_the_same_bits(change):
    config = ModelConfig(**{**vars(CONFIG), **change})
    params = random_params(2, config)
    tokens = prompt(3, 64)
    weights = local_kernels.prepare(params, config, jnp.float32, 256)
    kernels = local_kernels.build(config, 1)
    table = np.array([1, 2], np.int32)

    chunks = np.zeros((8, 16), np.int32)
    starts, lengths = np.zeros((2, 8), np.int32)
    chunks[:4], starts[:4], lengths[:4] = np.reshape(tokens, (4, 16)), np.arange(0, 64, 16), 16
    prefilled = kernels.prefill(
        weights,
        local_kernels.empty_cache(config, 3, 32, jnp.float32),
        chunks,
        starts,
        lengths,
        np.tile(table, (len(chunks), 1)),
    )
    decoded = local_kernels.empty_cache(config, 3, 32, jnp.float32)
    rows = min(local_kernels.invariant_rows(config, jnp.float32))
    for position, token in enumerate(tokens):
        decoded, *_ = kernels.decode(
            weights, decoded, one_row(rows, token, position, table), 1, None
        )
    for a, b in zip(jax.tree.leaves(prefilled), jax.tree.leaves(decoded), strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])


def test_every_row_count_rounds_alike():
    """What lets a dispatch be as small as its work; the engine would fall back on larger ones."""
    measured = local_kernels.invariant_rows(CONFIG, jnp.float32)
    assert measured == local_kernels.ROW_CANDIDATES


def one_row(rows, token, position, table):
    """Decode rows of which only the first does anything."""

    def first(value, dtype=np.int32):
        array = np.zeros((rows, *np.shape(value)), dtype)
        array[0] = value
        return array

    return local_kernels.DecodeRows(
        tokens=first(token),
        positions=first(position),
        tables=first(table),
        counts=first(0),
        limits=first(1),
        seeds=first((0, 0), np.uint32),
        temperatures=first(1.0, np.float32),
        stop_ids=np.full((rows, 8), -1, np.int32),
    )


def test_garbage_in_the_cache_never_leaks():
    """NaN in every page but the row's own, and past its position in those."""
    weights = local_kernels.prepare(PARAMS, CONFIG, jnp.float32, 256)
    kernels = local_kernels.build(CONFIG, 1)
    rows = min(local_kernels.invariant_rows(CONFIG, jnp.float32))
    table = np.array([1, 2, 0, 0], np.int32)
    outcomes = []
    for garbage in (0.0, np.nan):
        cache = local_kernels.empty_cache(CONFIG, 6, 32, jnp.float32)
        cache = jax.tree.map(lambda pool, g=garbage: jnp.full_like(pool, g), cache)
        for position, token in enumerate(prompt(0, 40)):
            inputs = one_row(rows, token, position, table)
            cache, ids, logprobs, *_ = kernels.decode(weights, cache, inputs, 1, None)
            outcomes.append((ids[0, 0], logprobs[0, 0]))
    half = len(outcomes) // 2
    assert np.isfinite(outcomes).all()
    assert outcomes[:half] == outcomes[half:]


def test_seeds_decide_alone(shared):
    async def run():
        same = await asyncio.gather(*(sample(shared, PROMPTS[6], seed=5) for _ in range(4)))
        large = [await sample(shared, PROMPTS[6], seed=5 + (k << 40)) for k in range(3)]
        return same, large

    same, large = asyncio.run(run())
    assert_identical(same[:1] * 3, same[1:])
    assert_identical(same[:1], large[:1])
    assert len({tuple(c.ids.tolist()) for c in large}) == 3


def test_temperature_belongs_to_the_request(shared):
    async def run():
        together = await asyncio.gather(
            *(sample(shared, PROMPTS[6], seed=9, temperature=t) for t in (0.0, 0.5, 1.0, 2.0))
        )
        alone = [
            await sample(shared, PROMPTS[6], seed=9, temperature=t) for t in (0.0, 0.5, 1.0, 2.0)
        ]
        return together, alone

    together, alone = asyncio.run(run())
    assert_identical(together, alone)
    greedy = together[0]
    expected = reference_logprobs(PARAMS, PROMPTS[6], greedy, 1.0)
    np.testing.assert_allclose(greedy.logprobs, expected, atol=1e-4)
    hidden = reference_hidden(PARAMS, PROMPTS[6] + greedy.ids.tolist())
    best = jnp.argmax(hidden @ PARAMS["embed"].T, axis=-1)
    np.testing.assert_array_equal(best[len(PROMPTS[6]) - 1 : -1], greedy.ids)


def test_stop_ids_and_budget(shared):
    free = asyncio.run(sample(shared, PROMPTS[4], seed=3, max_tokens=20, stop_ids=()))
    assert free.finish_reason == "length"
    assert len(free.ids) == 20
    stop = int(free.ids[11])
    first = free.ids.tolist().index(stop)
    stopped = asyncio.run(sample(shared, PROMPTS[4], seed=3, max_tokens=20, stop_ids=(600, stop)))
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.ids, free.ids[: first + 1])
    at_budget = asyncio.run(
        sample(shared, PROMPTS[4], seed=3, max_tokens=first + 1, stop_ids=(stop,))
    )
    assert at_budget.finish_reason == "stop"


def test_special_ids_are_ordinary_tokens(shared):
    """Ids 0 and 1, pad and end of text in many vocabularies, attend and are attended to."""
    ids = [0, 0, 5, 1, 0, 9]
    completion = asyncio.run(sample(shared, ids, seed=2))
    np.testing.assert_allclose(
        completion.logprobs, reference_logprobs(PARAMS, ids, completion, 1.0), atol=1e-4
    )
    shorter = asyncio.run(sample(shared, ids[2:], seed=2))
    assert abs(shorter.logprobs[0] - completion.logprobs[0]) > 1e-3


def test_sampling_follows_the_exact_softmax(shared):
    draws = 3000
    hidden = reference_hidden(PARAMS, [3, 4, 5])[-1]
    expected = np.asarray(jax.nn.softmax(hidden @ PARAMS["embed"].T / 0.8))

    async def run():
        return await asyncio.gather(
            *(
                sample(shared, [3, 4, 5], seed=s, max_tokens=1, temperature=0.8, stop_ids=())
                for s in range(draws)
            )
        )

    observed = np.bincount([c.ids[0] for c in asyncio.run(run())], minlength=CONFIG.vocab_size)
    order = np.argsort(-expected)
    frequent = order[expected[order] * draws > 5]
    counts = np.append(observed[frequent], draws - observed[frequent].sum())
    means = draws * np.append(expected[frequent], 1 - expected[frequent].sum())
    assert len(frequent) > 20
    statistic = ((counts - means) ** 2 / means).sum()
    freedom = len(frequent)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
