"""How the engine serves: cache, queue, cancellation, new weights, bad input, its end."""

import asyncio
import threading
import time

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
    reference_logprobs,
    sample,
    sample_all,
)

from rlds_jax.rollouts.engines import local_kernels
from rlds_jax.rollouts.engines.base import PromptTooLong
from rlds_jax.rollouts.engines.local import EngineStopped


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


def test_varying_content_compiles_no_more_than_the_sizes_of_a_dispatch(engine):
    kernels = local_kernels.build(CONFIG, 8)
    before = [f._cache_size() for f in kernels]
    rng = np.random.default_rng(0)
    for step in range(10):
        prompts = [prompt(step * 100 + i, int(n)) for i, n in enumerate(rng.integers(1, 150, 20))]
        temperature = float(rng.uniform(0, 2))
        asyncio.run(sample_all(engine, prompts, temperature=temperature))
        engine.update_weights(PARAMS, step)
    new = [f._cache_size() - n for f, n in zip(kernels, before, strict=True)]
    batcher = engine._batcher
    sizes = [len(batcher._chunk_counts), len(batcher._decode_rows), 1]  # prefill, decode, copy
    assert all(n <= most for n, most in zip(new, sizes, strict=True)), (new, sizes)


def test_metrics_count_what_was_done(engine):
    asyncio.run(sample_all(engine, max_tokens=5, stop_ids=()))
    metrics = engine.metrics()
    assert metrics["engine/decode_tokens"] == 5 * len(PROMPTS)
    assert metrics["engine/prefill_tokens"] == sum(len(ids) - 1 for ids in PROMPTS)
    assert 0 <= metrics["engine/idle_slots"] < 1
    assert metrics["engine/decode_s"] + metrics["engine/prefill_s"] <= metrics["engine/busy_s"]
    assert metrics["engine/tokens_per_s"] == pytest.approx(60 / metrics["engine/busy_s"])
    assert "engine/tokens_per_s" not in engine.metrics()
