import asyncio
import json

import numpy as np
import pytest
from test_local import CONFIG, PARAMS, PROMPTS, make_engine, sample

from rlds_jax.rollouts.engines.constrained import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "outcome": {"enum": ["success", "failure"]},
        "score": {"type": "integer", "minimum": 1, "maximum": 5},
        "pivot": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["outcome", "score", "pivot"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tokenizer):
    engine = make_engine(tokenizer=tokenizer)
    yield engine
    engine.close()


def constrained(engine, tokenizer, seed, **options):
    options = {"max_tokens": 80, "stop_ids": (tokenizer.eos_token_id,)} | options
    return sample(engine, PROMPTS[4], seed=seed, json_schema=SCHEMA, **options)


def test_completions_are_compact_json_of_the_schema(engine, tokenizer):
    async def run():
        free = [sample(engine, ids, seed=i) for i, ids in enumerate(PROMPTS)]
        bound = [constrained(engine, tokenizer, seed) for seed in range(12)]
        done = await asyncio.gather(*free, *bound)
        return done[: len(PROMPTS)], done[len(PROMPTS) :]

    free, bound = asyncio.run(run())
    assert not any(completion.constrained for completion in free)
    answers = []
    for completion in bound:
        assert completion.constrained
        assert completion.finish_reason == "stop"
        assert completion.ids[-1] == tokenizer.eos_token_id
        assert len(completion.ids) == len(completion.logprobs)
        assert (completion.logprobs <= 1e-6).all()
        text = tokenizer.decode(completion.ids[:-1])
        answer = json.loads(text)
        assert text == json.dumps(answer, separators=(",", ":"))
        assert list(answer) == ["outcome", "score", "pivot"]
        assert answer["outcome"] in ("success", "failure")
        assert answer["score"] in range(1, 6)
        assert answer["pivot"] is None or answer["pivot"] in range(100)
        answers.append(text)
    assert len(set(answers)) > 3


def test_constrained_requests_ignore_the_crowd_too(engine, tokenizer):
    async def alone():
        return [await constrained(engine, tokenizer, seed) for seed in range(3)]

    async def crowd():
        return await asyncio.gather(*(constrained(engine, tokenizer, seed) for seed in range(3)))

    for a, b in zip(asyncio.run(alone()), asyncio.run(crowd()), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_the_budget_cuts_forced_tokens(engine, tokenizer):
    completion = asyncio.run(constrained(engine, tokenizer, 0, max_tokens=5))
    assert completion.finish_reason == "length"
    assert len(completion.ids) == 5


def test_a_stop_id_is_required(engine, tokenizer):
    with pytest.raises(ValueError, match="stop id"):
        asyncio.run(constrained(engine, tokenizer, 0, stop_ids=()))


def test_unsupported_schemas_are_refused(engine):
    with pytest.raises(ValueError, match="json_schema"):
        asyncio.run(sample(engine, [1], json_schema={"type": "no such type"}))


def test_a_tokenizer_directory_will_do(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine(PARAMS, CONFIG, tokenizer=tmp_path)
    completion = asyncio.run(constrained(engine, tokenizer, 1))
    json.loads(tokenizer.decode(completion.ids[:-1]))
    engine.close()


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Grammar(tmp_path, CONFIG.vocab_size)
