"""Groups: who is graded, reflected on and retried, and in which order."""

import asyncio

import numpy as np
import pytest
from rollout_doubles import ITEMS, Corridor, make_context, policy, run

from rlds_jax.rollouts.engines.base import request_seed
from rlds_jax.rollouts.group import best_sibling, retry_candidates, run_groups
from rlds_jax.rollouts.types import Trajectory, Turn
from rlds_jax.tasks.base import Item


def row(reward, success=False, uid="5-0/0"):
    prompt = np.zeros(1, np.int32)
    return Trajectory(
        uid=uid,
        group="5-0",
        item_id="a",
        initial_observation="",
        tokens=prompt,
        turn_ids=prompt - 1,
        logprobs=np.zeros(1, np.float32),
        weight_version=prompt - 1,
        prompt_length=1,
        temperature=1.0,
        reward=reward,
        success=success,
        ended_by="end",
        turns=(Turn("", ""),),
    )


def test_rlds_step(tokenizer):
    context = make_context(tokenizer, policy(), group_size=4, retry_budget=3)
    results = run(context)
    assert [result.uid for result in results] == ["5-0", "5-1"]
    for result in results:
        uids = [t.uid for t in result.trajectories]
        assert uids[:4] == [f"{result.uid}/{i}" for i in range(4)]
        assert len(uids) == 4 + 2  # min(3, ceil(0.5 * 4))
        assert all(uid.endswith("r") for uid in uids[4:])
        assert uids[4:] == sorted(uids[4:])
        for t in result.trajectories:
            assert (t.grades, t.pivots) == ((2, 4), (0, None))
            assert t.success == (t.parent is not None)
            assert t.retry_from == (None if t.parent is None else 1)
        roles = [(j.trajectory, j.role) for j in result.judgements]
        assert len(roles) == 4 + 2 * 2
        assert roles == sorted(roles, key=lambda r: (r[0].rstrip("r"), "r" in r[0].split("/")[1]))
        assert result.events == {"retry_candidates": 2}
    assert context.task.opened == context.task.closed == 12
    assert set(context.clock.seconds()) == {"gen", "grade", "reflect", "retry"}


@pytest.mark.parametrize(
    ("settings", "graders", "reflectors"),
    [
        ({"condition": "rlvr"}, 0, 0),
        ({"condition": "base_reflection"}, 4, 2),
        ({"condition": "base_reflection", "two_pass": False}, 0, 2),
        ({"condition": "base_reflection", "grade_retries": True}, 6, 2),
        ({"condition": "rlds"}, 6, 2),
        ({"condition": "rlds", "retry_budget": 1}, 5, 1),
        ({"condition": "rlds", "retry_budget": 0}, 4, 0),
        ({"condition": "rlds", "retry_fraction": 0.25}, 5, 1),
    ],
)
def test_conditions(tokenizer, settings, graders, reflectors):
    context = make_context(tokenizer, policy(), group_size=4, **settings)
    (result,) = run(context, ITEMS[:1])
    assert len(context.engine.of("grader")) == graders
    assert len(context.engine.of("reflector")) == reflectors
    assert len(result.trajectories) == 4 + reflectors
    if settings.get("two_pass") is False:
        assert "Grades:" not in context.engine.of("reflector")[0].text


def test_no_failures_no_reflection(tokenizer):
    context = make_context(tokenizer, policy(actor="right"), group_size=3)
    (result,) = run(context, ITEMS[:1])
    assert len(result.trajectories) == 3
    assert not context.engine.of("reflector")


def test_candidates_are_failures_lowest_reward_first():
    rows = [row(r, success=r == 1, uid=str(i)) for i, r in enumerate([0.5, 0.1, 1.0, 0.3, 0.2])]
    chosen = retry_candidates(rows, budget=3, fraction=0.5, seed=0)
    assert [t.reward for t in chosen] == [0.1, 0.2]
    assert len(retry_candidates(rows, budget=3, fraction=1.0, seed=0)) == 3
    assert retry_candidates(rows[2:3], budget=3, fraction=0.5, seed=0) == []


def test_failure_is_the_flag_not_the_reward():
    rows = [row(0.0, success=True, uid="0"), row(1.0, success=False, uid="1")]
    assert [t.uid for t in retry_candidates(rows, 3, 0.5, 0)] == ["1"]


def test_ties_are_broken_by_the_seed():
    rows = [row(0.0, uid=str(i)) for i in range(6)]

    def picked(seed):
        return tuple(t.uid for t in retry_candidates(rows, 3, 0.5, seed))

    assert picked(1) == picked(1)
    assert len({picked(seed) for seed in range(20)}) > 5


def test_best_sibling_must_be_better():
    rows = [row(0.0), row(0.5), row(0.5)]
    assert best_sibling(rows[0], rows) is rows[1]
    assert best_sibling(rows[1], rows) is None


def test_reflector_sees_grades_memory_and_best_sibling(tokenizer):
    def answer(request):
        first = request.seed == request_seed(3, 5, 0, 0, "actor", request.turn)
        return "right" if first and request.role == "actor" else policy()(request)

    context = make_context(
        tokenizer, answer, group_size=3, contrast=True, memory="Doors are locked."
    )
    run(context, ITEMS[:1])
    text = context.engine.of("reflector")[0].text
    assert "Grades:\nwalking: 2, pivot step 0\ncounting: 4\n" in text
    assert "Lessons so far:\nDoors are locked.\n" in text
    better = text[text.index("A better attempt") : text.rindex("Trajectory:")]
    assert "ended by arrived" in better


def test_judges_have_temperatures_limits_seeds_and_schemas_of_their_own(tokenizer):
    context = make_context(
        tokenizer,
        policy(),
        group_size=1,
        temperature=0.9,
        grader_temperature=0.1,
        reflector_temperature=0.2,
        max_judge_tokens=999,
        constrained_json=True,
    )
    run(context, ITEMS[:1])
    graded, regraded = context.engine.of("grader")
    (reflected,) = context.engine.of("reflector")
    assert (graded.temperature, reflected.temperature) == (0.1, 0.2)
    assert {graded.max_tokens, reflected.max_tokens} == {999}
    assert graded.schema["required"][-1] == "sub_task_grades"
    assert reflected.schema["required"][-1] == "retry_from_step"
    assert graded.seed == request_seed(3, 5, 0, 0, "grader", 0)
    assert regraded.seed == request_seed(3, 5, 0, 0, "retry_grader", 0)
    assert {r.temperature for r in context.engine.of("actor")} == {0.9}
    assert {r.schema for r in context.engine.of("actor")} == {None}


def test_all_seeds_of_a_step_differ_even_for_the_same_item_twice(tokenizer):
    context = make_context(tokenizer, policy(), group_size=4)
    run(context, [ITEMS[0], ITEMS[0]])
    seeds = [request.seed for request in context.engine.requests]
    assert len(set(seeds)) == len(seeds)


def test_a_share_of_a_step_keeps_its_uids_and_seeds(tokenizer):
    context = make_context(tokenizer, policy(), group_size=1, condition="rlvr")
    (played,) = run(context, ITEMS, slots=[1])
    assert played.uid == "5-1"
    assert played.trajectories[0].item_id == ITEMS[1].id
    assert context.engine.requests[0].seed == request_seed(3, 5, 1, 0, "actor", 0)


def test_results_do_not_depend_on_timing(tokenizer):
    def slow(delays):
        async def answer(request):
            await asyncio.sleep(0.002 * (request.seed % delays))
            return policy()(request)

        return answer

    runs = []
    for delays in (1, 5):
        results = run(make_context(tokenizer, slow(delays), group_size=3))
        runs.append([(t.uid, t.tokens.tolist()) for r in results for t in r.trajectories])
    assert runs[0] == runs[1]


# Pipelining.


def test_a_slow_group_delays_no_other(tokenizer):
    gate = asyncio.Event()

    async def answer(request):
        if request.role == "actor" and "cell 9" in request.text:
            await gate.wait()  # the first group's originals
        return policy()(request)

    context = make_context(tokenizer, answer, group_size=2)
    items = [Item("slow", {"length": 3, "first": "cell 9"}), ITEMS[1]]

    async def main():
        running = asyncio.create_task(run_groups(context, items, 5))
        for _ in range(400):
            await asyncio.sleep(0)
        regraded = [r for r in context.engine.of("grader") if "arrived" in r.text]
        assert len(regraded) == 1  # the other group has finished everything
        assert not running.done()
        gate.set()
        return await running

    assert [len(r.trajectories) for r in asyncio.run(main())] == [3, 3]


def test_originals_are_graded_as_they_end_and_reflection_waits_for_all(tokenizer):
    gate = asyncio.Event()

    async def answer(request):
        if request.seed == request_seed(3, 5, 0, 1, "actor", 2):
            await gate.wait()
        return policy()(request)

    context = make_context(tokenizer, answer, group_size=2)

    async def main():
        running = asyncio.create_task(run_groups(context, ITEMS[:1], 5))
        for _ in range(400):
            await asyncio.sleep(0)
        assert len(context.engine.of("grader")) == 1
        assert not context.engine.of("reflector")
        gate.set()
        await running
        assert len(context.engine.of("reflector")) == 1

    asyncio.run(main())


def test_environments_alive_are_bounded(tokenizer):
    task = Corridor()
    most = 0

    def answer(request):
        nonlocal most
        most = max(most, task.opened - task.closed)
        return policy()(request)

    context = make_context(tokenizer, answer, task=task, group_size=4, max_environments=3)
    run(context)
    assert most == 3


def test_cancelling_a_step_closes_environments_and_requests(tokenizer):
    async def answer(request):
        await asyncio.Event().wait()

    context = make_context(tokenizer, answer, group_size=3)

    async def main():
        running = asyncio.create_task(run_groups(context, ITEMS, 5))
        for _ in range(20):
            await asyncio.sleep(0)
        assert context.engine.in_flight == 6
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert context.engine.in_flight == 0
    assert context.task.opened == context.task.closed == 6
