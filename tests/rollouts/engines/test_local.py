import asyncio
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlds_jax.models import qwen3
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines import local_kernels
from rlds_jax.rollouts.engines.base import PromptTooLong
from rlds_jax.rollouts.engines.local import EngineStopped, LocalEngine

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


@pytest.fixture(scope="module")
def shared():
    engine = make_engine(num_slots=64)
    yield engine
    engine.close()


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()


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


def assert_identical(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


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


def test_next_turns_prefill_only_what_is_new(engine):
    async def turn(ids):
        engine.metrics()
        completion = await sample(engine, ids, stop_ids=(), max_tokens=10)
        return ids + completion.ids.tolist(), engine.metrics()["engine/prefill_tokens"]

    async def run():
        ids, first = await turn(PROMPTS[8])
        _, second = await turn([*ids, 1, 2, 3, 4, 5])
        _, third = await turn([*ids, 9, 9])
        return first, second, third

    # One token less than the prompt: decode computes the last. The second turn adds its
    # observation and the last sampled token, which was never fed back.
    assert asyncio.run(run()) == (129, 5, 1)


def test_simultaneous_prompts_with_a_common_prefix_share_it(engine):
    system = prompt(50, 70)

    async def run():
        return await asyncio.gather(
            *(sample(engine, [*system, i], seed=i, max_tokens=2) for i in range(6))
        )

    asyncio.run(run())
    metrics = engine.metrics()
    assert metrics["engine/prefill_tokens"] == 70
    assert metrics["engine/prefix_hit_rate"] == pytest.approx(5 * 70 / (6 * 71))


def test_more_requests_than_slots_queue_and_none_is_lost():
    engine = make_engine(num_slots=3)
    prompts = [prompt(100 + i, 5 + i) for i in range(25)]
    crowd = asyncio.run(sample_all(engine, prompts))
    engine.update_weights(PARAMS, 1)
    alone = [asyncio.run(sample(engine, ids, seed=i)) for i, ids in enumerate(prompts[:4])]
    assert_identical(crowd[:4], alone)
    assert len(crowd) == 25
    engine.close()


def test_a_cache_for_one_sequence_serves_many():
    engine = make_engine(cache_tokens=256)
    completions = asyncio.run(sample_all(engine))
    for ids, completion in zip(PROMPTS, completions, strict=True):
        expected = reference_logprobs(PARAMS, ids, completion, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    engine.close()


def test_cancelling_frees_the_slot():
    engine = make_engine(num_slots=1)

    async def run():
        long = asyncio.create_task(sample(engine, PROMPTS[0], max_tokens=250, stop_ids=()))
        queued = asyncio.create_task(sample(engine, PROMPTS[1], max_tokens=250, stop_ids=()))
        await asyncio.sleep(0.05)
        long.cancel()
        queued.cancel()
        completion = await sample(engine, PROMPTS[2], max_tokens=4, stop_ids=())
        assert long.cancelled()
        assert queued.cancelled()
        return completion

    completion = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(completion.ids) == 4
    assert engine.metrics()["engine/decode_tokens"] < 250
    engine.close()


def test_the_event_loop_never_waits(engine):
    async def run():
        longest, last = 0.0, time.perf_counter()
        task = asyncio.create_task(sample(engine, PROMPTS[3], max_tokens=200, stop_ids=()))
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest

    assert asyncio.run(run()) < 0.25


def test_two_event_loops_share_an_engine(shared):
    results = {}

    def run(name):
        results[name] = asyncio.run(sample_all(shared))

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_identical(results["a"], results["b"])


def test_weight_update_waits_then_forgets(engine):
    other = random_params(7)

    async def run():
        before = [asyncio.create_task(sample(engine, ids, max_tokens=60)) for ids in PROMPTS[5:9]]
        await asyncio.sleep(0.01)
        update = asyncio.create_task(asyncio.to_thread(engine.update_weights, other, 3))
        await asyncio.sleep(0.01)
        after = [asyncio.create_task(sample(engine, ids, max_tokens=60)) for ids in PROMPTS[5:9]]
        await update
        return await asyncio.gather(*before), await asyncio.gather(*after)

    before, after = asyncio.run(run())
    assert [c.weight_version for c in before] == [0] * 4
    assert [c.weight_version for c in after] == [3] * 4
    for params, completions in ((PARAMS, before), (other, after)):
        for ids, completion in zip(PROMPTS[5:9], completions, strict=True):
            expected = reference_logprobs(params, ids, completion, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_the_trainer_may_donate_what_it_handed_over(engine):
    handed = random_params(8)
    kept = jax.tree.map(lambda p: jnp.array(p, copy=True), handed)
    engine.update_weights(handed, 1)
    for leaf in jax.tree.leaves(handed):
        leaf.delete()
    completion = asyncio.run(sample(engine, PROMPTS[4]))
    expected = reference_logprobs(kept, PROMPTS[4], completion, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_params_of_another_model_are_refused(engine):
    wrong = dict(PARAMS, embed=PARAMS["embed"][:-1])
    with pytest.raises(ValueError, match="embed"):
        engine.update_weights(wrong, 1)
    assert asyncio.run(sample(engine, PROMPTS[0])).weight_version == 0


def test_long_prompts_are_refused(shared):
    with pytest.raises(PromptTooLong, match="max_context 256"):
        asyncio.run(sample(shared, prompt(0, 250), max_tokens=7))
    fits = asyncio.run(sample(shared, prompt(0, 250), max_tokens=6, stop_ids=()))
    assert len(fits.ids) == 6


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "prompt_ids"),
        ([1, 512], {}, "prompt_ids"),
        ([-1], {}, "prompt_ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": 1e-40}, "temperature"),
        ([1], {"temperature": 1e300}, "temperature"),
        ([1], {"stop_ids": (2**40,)}, "stop_ids"),
        ([1], {"stop_ids": (-1,)}, "stop_ids"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"stop_ids": range(9)}, "stop_ids"),
        ([1], {"json_schema": {}}, "tokenizer"),
    ],
)
def test_bad_requests_are_refused(shared, ids, options, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(sample(shared, ids, **options))


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([1.5], {}),
        ([1], {"max_tokens": 2.5}),
        ([1], {"seed": 0.5}),
        ([1], {"stop_ids": ("a",)}),
    ],
)
def test_a_request_of_wrong_types_leaves_the_worker_alive(shared, ids, options):
    with pytest.raises(TypeError):
        asyncio.run(sample(shared, ids, **options))
    assert len(asyncio.run(sample(shared, [1], max_tokens=1)).ids) == 1


def test_numpy_scalars_are_numbers(shared):
    plain = asyncio.run(sample(shared, [1], seed=5, max_tokens=3))
    options = {"seed": np.int32(5), "max_tokens": np.int64(3), "stop_ids": np.array([7, 7] * 5)}
    same = asyncio.run(sample(shared, np.array([1]), **options))
    np.testing.assert_array_equal(plain.ids, same.ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_cache_bytes": 1000}, "max_cache_bytes"),
        ({"cache_tokens": 255}, "cache_tokens"),
        ({"num_slots": 0}, "num_slots"),
        ({"page_size": 16}, "page_size"),
        ({"page_size": 96}, "page_size"),
        ({"max_context": 1}, "max_context"),
    ],
)
def test_bad_engines_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_cache_bytes_is_what_the_cache_takes(shared):
    cache = local_kernels.empty_cache(CONFIG, 513, 32, jnp.float32)
    assert shared.cache_bytes == sum(pool.nbytes for pool in jax.tree.leaves(cache))


def test_non_finite_weights_fail_the_request():
    broken = dict(PARAMS, final_norm=PARAMS["final_norm"] * jnp.nan)
    engine = make_engine(broken)
    with pytest.raises(FloatingPointError, match="version 0"):
        asyncio.run(sample(engine, PROMPTS[0]))
    engine.update_weights(PARAMS, 1)
    assert np.isfinite(asyncio.run(sample(engine, PROMPTS[0])).logprobs).all()
    engine.close()


def test_close_is_idempotent_and_final():
    engine = make_engine()

    async def run():
        task = asyncio.create_task(sample(engine, PROMPTS[0], max_tokens=200, stop_ids=()))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStopped, match="closed"):
            await task

    asyncio.run(run())
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        asyncio.run(sample(engine, PROMPTS[0]))
    with pytest.raises(EngineStopped, match="closed"):
        engine.update_weights(PARAMS, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_worker_tells_everyone(monkeypatch):
    engine = make_engine(num_slots=2)

    def fail(*args):
        raise MemoryError("no more memory")

    monkeypatch.setattr(engine._batcher, "_dispatch", fail)

    async def run():
        return await asyncio.gather(
            *(sample(engine, ids) for ids in PROMPTS[:5]), return_exceptions=True
        )

    errors = asyncio.run(run())
    assert all(isinstance(error, EngineStopped) for error in errors)
    assert "no more memory" in str(errors[0])
    with pytest.raises(EngineStopped, match="no more memory"):
        asyncio.run(sample(engine, PROMPTS[0]))
    engine.close()


def test_varying_content_compiles_nothing_new(engine):
    asyncio.run(sample_all(engine))
    kernels = local_kernels.build(CONFIG, 8)
    asyncio.run(sample_all(engine, [prompt(1000, 150)] + [prompt(i, 9) for i in range(30)]))
    before = [f._cache_size() for f in kernels]
    rng = np.random.default_rng(0)
    for step in range(10):
        prompts = [prompt(step * 100 + i, int(n)) for i, n in enumerate(rng.integers(1, 150, 20))]
        temperature = float(rng.uniform(0, 2))
        asyncio.run(sample_all(engine, prompts, temperature=temperature))
        engine.update_weights(PARAMS, step)
    assert [f._cache_size() for f in kernels] == before


def test_metrics_count_what_was_done(engine):
    asyncio.run(sample_all(engine, max_tokens=5, stop_ids=()))
    metrics = engine.metrics()
    assert metrics["engine/decode_tokens"] == 5 * len(PROMPTS)
    assert metrics["engine/prefill_tokens"] == sum(len(ids) - 1 for ids in PROMPTS)
    assert 0 <= metrics["engine/idle_slots"] < 1
    assert metrics["engine/decode_s"] + metrics["engine/prefill_s"] <= metrics["engine/busy_s"]
    assert metrics["engine/tokens_per_s"] == pytest.approx(60 / metrics["engine/busy_s"])
    assert "engine/tokens_per_s" not in engine.metrics()
