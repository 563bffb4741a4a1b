"""Auxiliary pairs of retries that did better."""

import numpy as np
import pytest
from rollout_doubles import ITEMS, Corridor, make_context, policy, reflection_json, run

from rlds_jax.rollouts.pairs import auxiliary_pairs
from rlds_jax.tasks.base import StepResult


@pytest.mark.parametrize("start", [0, 1, 3])
def test_pairs_of_an_improving_retry(tokenizer, start):
    context = make_context(tokenizer, policy(reflector=reflection_json(start)), group_size=1)
    (result,) = run(context, ITEMS[:1])
    original, retry = result.trajectories
    reflect_pair, retry_pair = auxiliary_pairs(result)
    assert (reflect_pair.channel, retry_pair.channel) == ("reflect", "retry")
    assert reflect_pair.delta == retry_pair.delta == 1.0
    assert reflect_pair.uid == retry_pair.uid == retry.uid

    judgement = next(j for j in result.judgements if j.role == "reflector")
    n = len(judgement.prompt_ids)
    assert reflect_pair.tokens.tolist() == [*judgement.prompt_ids, *judgement.ids]
    assert reflect_pair.targets.tolist() == [False] * n + [True] * len(judgement.ids)

    decoded = context.chat._full.decode(retry_pair.tokens.tolist(), skip_special_tokens=False)
    assert "go right" not in decoded
    learned = retry_pair.tokens[retry_pair.targets].tolist()
    assert learned == retry.tokens[retry.turn_ids >= start].tolist()
    clean = int(np.argmax(original.turn_ids == start))
    assert retry_pair.tokens[:clean].tolist() == original.tokens[:clean].tolist()
    assert not retry_pair.targets[:clean].any()
    assert retry_pair.targets[clean]
    assert retry_pair.tokens.dtype == np.int32


def test_no_pair_without_improvement(tokenizer):
    context = make_context(tokenizer, policy(retry="hmm"), group_size=2)
    (result,) = run(context, ITEMS[:1])
    assert len(result.trajectories) == 3
    assert auxiliary_pairs(result) == []


def test_pairs_may_require_success(tokenizer):
    def answer(request):
        return "crash" if "Do: go right" in request.text else policy()(request)

    def step(walk, text):
        if text == "crash":
            return StepResult("halfway", True, 0.5, False, "crash")

    context = make_context(tokenizer, answer, task=Corridor(step=step), group_size=1)
    (result,) = run(context, ITEMS[:1])
    assert [pair.delta for pair in auxiliary_pairs(result)] == [0.5, 0.5]
    assert auxiliary_pairs(result, require_success=True) == []
