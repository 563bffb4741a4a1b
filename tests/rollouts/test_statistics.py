"""Metrics and records of a step."""

import json

import numpy as np
import pytest
from rollout_doubles import ITEMS, grades_json, make_context, only, policy, reflection_json, run

from rlds_jax.rollouts.statistics import rollout_metrics, trajectory_record


def test_metrics_of_a_step(tokenizer):
    answers = policy()

    def answer(request):
        if request.role == "grader" and "arrived" in request.text:
            return grades_json(5, 5, (1, 2))
        return answers(request)

    context = make_context(tokenizer, only(0, "grader", "?", answer), group_size=4)
    results = run(context)
    seconds = {"gen": 2.0, "retry": 1.0, "grade": 0.5}
    metrics = rollout_metrics(results, context.task, seconds)
    originals = [t for r in results for t in r.trajectories if t.parent is None]
    retries = [t for r in results for t in r.trajectories if t.parent is not None]
    assert all(isinstance(value, float) for value in metrics.values())
    expected = {
        "critic/rewards/mean": 0.0,
        "rollout/success_rate": 0.0,
        "rollout/count": 8.0,
        "rollout/ended_by/max_turns": 1.0,
        "num_turns/mean": 6.0,
        "response_length/mean": np.mean([len(t.tokens) - t.prompt_length for t in originals]),
        "grader/parse_rate": 11 / 12,
        "grader/ungraded": 1.0,
        "grader/ungraded/not_json": 1.0,
        "reflection/valid_rate": 1.0,
        "reflection/invalid": 0.0,
        "retry/count": 4.0,
        "retry/candidates": 4.0,
        "retry/success_rate": 1.0,
        "retry/improved_rate": 1.0,
        "retry/delta/mean": 1.0,
        "retry/from_step/mean": 1.0,
        "retry/replay_diverged": 0.0,
        "retry/gen_ratio": np.mean([t.sampled_tokens for t in retries])
        / np.mean([t.sampled_tokens for t in originals]),
        "retry/gen_time_ratio": 0.5,
        "timing_s/gen": 2.0,
        "timing_s/grade": 0.5,
        "rollout/dropped": 0.0,
        "subtask/corridor/walking/grade": (7 * 2 + 4 * 5) / 11,
        "subtask/corridor/walking/pivot_step": (7 * 0 + 4 * 1) / 11,
        "subtask/corridor/counting/pivot_step": 2.0,
        "subtask/corridor/walking/retry_grade_delta": 3.0,
        "subtask/corridor/counting/retry_grade_delta": 1.0,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)


def test_environment_metrics_are_averaged_over_the_originals(tokenizer):
    context = make_context(tokenizer, policy(actor="right"), group_size=2, condition="rlvr")
    metrics = rollout_metrics(run(context), context.task, {})
    assert metrics["tools/calls"] == 3.0
    assert not [name for name in metrics if name.startswith(("subtask/", "timing_s/"))]
    assert "grader/parse_rate" not in metrics


def test_metrics_of_dropped_rows(tokenizer):
    context = make_context(tokenizer, only(1, "actor", OSError("boom")), group_size=2)
    metrics = rollout_metrics(run(context), context.task, {})
    assert metrics["rollout/dropped"] == metrics["rollout/dropped/OSError"] == 1.0


def test_records_hold_the_texts(tokenizer):
    context = make_context(tokenizer, policy(), group_size=1)
    (result,) = run(context, ITEMS[:1])
    original, retry = (
        trajectory_record(t, result, context.task.subtasks) for t in result.trajectories
    )
    assert original["turns"][0] == {"action": "hmm", "observation": "cell 0"}
    texts = [context.chat.decode(ids) for ids in original["turn_tokens"]]
    assert texts == [turn["action"] for turn in original["turns"]]
    assert original["grades"] == {"walking": 2, "counting": 4}
    assert original["pivots"] == {"walking": 0, "counting": None}
    assert original["reflector"] == {"text": reflection_json(1), "error": None}
    assert original["grader"]["text"] == grades_json()
    assert (original["guidance"], original["retry_from"]) == (None, None)
    assert (retry["parent"], retry["retry_from"]) == ("5-0/0", 1)
    assert "Do: go right" in retry["guidance"]
    assert "reflector" not in retry
    assert retry["reward"] == 1.0
    assert json.loads(json.dumps(retry)) == retry


def test_results_have_a_short_repr(tokenizer):
    (result,) = run(make_context(tokenizer, policy(), group_size=2), ITEMS[:1])
    assert "5-0/0" in repr(result)
    assert len(repr(result)) < 3000
    assert "array" not in repr(result)
