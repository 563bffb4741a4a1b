"""Whole steps on FrozenLake: records agree with the transcripts and with the boards."""

import asyncio
import json

import numpy as np
import pytest
from rollout_doubles import make_context

from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.statistics import rollout_metrics
from rlds_jax.tasks.frozenlake import STEPS, SUBTASKS, FrozenLake


def policy(request):
    """Random moves, grades and restarts, from the request's seed."""
    rng = np.random.default_rng(request.seed)
    if request.role == "actor":
        move = rng.choice([*STEPS, "Stay"])
        return f"<think>I go {move}.</think><action>{move}</action>"
    if request.role == "grader":
        entries = [
            {
                "sub_task": subtask.name,
                "score": int(rng.integers(0, 6)),
                "assessment": "as seen",
                "pivot_step": int(rng.integers(0, 12)) if rng.random() < 0.7 else None,
            }
            for subtask in SUBTASKS
        ]
        return json.dumps({"trajectory_outcome": "failure", "sub_task_grades": entries})
    last = request.text.count(" action:\n") - 1
    report = {
        "trajectory_summary": "it fell",
        "root_cause_analysis": "it did not look",
        "trajectory_outcome": "failure",
        "improvement_suggestion": "look first",
        "retry_from_step": int(rng.integers(0, last + 1)),
    }
    return f"```json\n{json.dumps(report)}\n```"


@pytest.fixture(scope="module")
def step(tokenizer):
    task = FrozenLake(size=(4, 6))
    context = make_context(tokenizer, policy, task=task, group_size=4)
    return context, asyncio.run(run_groups(context, task.items("train")[:8], 3))


def messages(context, trajectory):
    """The conversation a trajectory had, guidance included."""
    start = trajectory.retry_from
    system = context.task.system_prompt(trajectory.guidance if start == 0 else None)
    yield {"role": "system", "content": system}
    yield {"role": "user", "content": trajectory.initial_observation}
    for turn, (action, observation) in enumerate(trajectory.turns):
        yield {"role": "assistant", "content": action}
        if turn + 1 == start:
            yield {"role": "system", "content": trajectory.guidance}
        if turn + 1 < len(trajectory.turns):
            yield {"role": "user", "content": observation}


def test_every_record_is_its_conversations_transcript(step):
    context, results = step
    rows = [t for result in results for t in result.trajectories]
    assert {t.retry_from is not None and t.retry_from > 0 for t in rows} == {True, False}
    for trajectory in rows:
        ids, mask = context.chat.transcript(list(messages(context, trajectory)))
        assert trajectory.tokens.tolist() == ids.tolist()
        assert (trajectory.turn_ids >= 0).tolist() == mask.tolist()


def test_rewards_and_observations_are_the_boards(step):
    context, results = step
    items = context.task.items("train")[:8]

    async def replay(item, trajectory):
        environment = context.task.environment(item)
        assert await environment.reset() == trajectory.initial_observation
        for action, observation in trajectory.turns:
            outcome = await environment.step(action)
            assert outcome.observation == observation
        assert outcome.done
        assert (outcome.reward, outcome.ended_by) == (trajectory.reward, trajectory.ended_by)

    for item, result in zip(items, results, strict=True):
        for trajectory in result.trajectories:
            asyncio.run(replay(item, trajectory))


def test_no_replay_diverges_and_every_failure_is_counted(step):
    context, results = step
    metrics = rollout_metrics(results, context.task, context.clock.seconds())
    assert metrics["retry/replay_diverged"] == 0
    assert metrics["rollout/dropped"] == 0
    assert metrics["retry/count"] == metrics["retry/candidates"] > 8
    assert metrics["reflection/valid_rate"] == 1
    assert 0 < metrics["frozenlake/invalid_actions"] < 10
    assert set(metrics) >= {f"subtask/frozenlake/{s.name}/grade" for s in SUBTASKS}


def test_pivots_are_turns_of_their_rollouts(step):
    _, results = step
    pivots = [
        (pivot, len(t.turns))
        for result in results
        for t in result.trajectories
        for pivot in t.pivots or ()
        if pivot is not None
    ]
    assert len(pivots) > 50
    assert all(0 <= pivot < turns for pivot, turns in pivots)
