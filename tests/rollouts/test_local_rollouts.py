"""A step sampled by the real engine on random weights: the trainer sees what was sampled."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_doubles import ScriptedEngine, grades_json, make_context, reflection_json

from rlds_jax.models import qwen3
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.local import LocalEngine
from rlds_jax.rollouts.group import run_groups
from rlds_jax.tasks.frozenlake import FrozenLake

TEMPERATURE = 0.8


class JudgedEngine:
    """The local engine for the actor; scripted judges, which random weights could not be."""

    def __init__(self, local, tokenizer):
        self.local = local
        self.judges = ScriptedEngine(
            tokenizer, lambda r: grades_json() if r.role == "grader" else reflection_json(2)
        )
        self.max_context = self.judges.max_context
        self.tokenizer = tokenizer

    async def generate(self, prompt_ids, **options):
        opening = self.tokenizer.decode(list(prompt_ids)[:40])
        judge = "You grade" in opening or "You review" in opening
        engine = self.judges if judge else self.local
        return await engine.generate(prompt_ids, **options)


@pytest.fixture(scope="module")
def sampled(tokenizer):
    config = ModelConfig(
        vocab_size=len(tokenizer) + 8,  # ids past the tokenizer are sampled too
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rope_theta=1e4,
        tie_embeddings=True,
    )
    params = qwen3.init_params(config, jax.random.key(0))
    task = FrozenLake(size=(4, 4), max_turns=5)
    local = LocalEngine(params, config, max_context=1024, num_slots=8, version=3)
    context = make_context(
        tokenizer,
        None,
        task=task,
        group_size=3,
        temperature=TEMPERATURE,
        max_turn_tokens=6,
        max_response_tokens=400,
        max_judge_tokens=400,
    )
    object.__setattr__(context, "engine", JudgedEngine(local, tokenizer))
    try:
        results = asyncio.run(run_groups(context, task.items("train")[:2], 0))
    finally:
        local.close()
    return config, params, [t for result in results for t in result.trajectories]


def test_retries_are_sampled_after_their_replayed_prefix(sampled):
    _, _, rows = sampled
    retries = [t for t in rows if t.parent is not None]
    assert len(retries) == 4
    for retry in retries:
        assert retry.retry_from == 2
        assert len(retry.turns) == 5
    assert {int(v) for t in rows for v in t.weight_version[t.turn_ids >= 0]} == {3}


def test_logprobs_are_those_of_a_full_forward_pass(sampled):
    """Originals and retries, the latter with their guidance in the context."""
    config, params, rows = sampled
    length = max(len(t.tokens) for t in rows)
    tokens = np.zeros((len(rows), length), np.int32)
    for row, trajectory in enumerate(rows):
        tokens[row, : len(trajectory.tokens)] = trajectory.tokens
    segments = [np.arange(length) < len(t.tokens) for t in rows]
    hidden = qwen3.hidden_states(
        params,
        config,
        jnp.array(tokens),
        jnp.tile(jnp.arange(length), (len(rows), 1)),
        jnp.array(segments, jnp.int32),
        compute_dtype=jnp.float32,
    )
    logprobs, _ = qwen3.token_logprobs(
        hidden[:, :-1].reshape(-1, config.hidden_size),
        qwen3.unembedding(params),
        jnp.array(tokens[:, 1:].ravel()),
        jnp.full(len(rows) * (length - 1), TEMPERATURE),
    )
    for trajectory, row in zip(rows, np.asarray(logprobs).reshape(len(rows), -1), strict=True):
        end = len(trajectory.tokens) - 1
        own = trajectory.turn_ids[1:] >= (trajectory.retry_from or 0)
        assert own.sum() == trajectory.sampled_tokens > 0
        np.testing.assert_allclose(row[:end][own], trajectory.logprobs[1:][own], atol=1e-4)
