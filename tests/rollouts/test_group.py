"""Groups: who is graded, reflected on and retried, in which order, and what failures cost."""

import asyncio
import json

import numpy as np
import pytest
from rollout_doubles import Corridor, grades_json, make_context, reflection_json

from rlds_jax.rollouts.engines.base import request_seed
from rlds_jax.rollouts.group import (
    AllRolloutsDropped,
    best_sibling,
    retry_candidates,
    run_groups,
)
from rlds_jax.rollouts.pairs import auxiliary_pairs
from rlds_jax.rollouts.statistics import rollout_metrics, trajectory_record
from rlds_jax.rollouts.types import Trajectory, Turn
from rlds_jax.tasks.base import EpisodeError, Item, StepResult

ITEMS = [Item("a", {"length": 3}), Item("b", {"length": 3})]


def run(context, items=ITEMS, step=5, **options):
    return asyncio.run(run_groups(context, items, step, **options))


def policy(actor="hmm", retry="right", grader=None, reflector=None):
    """The actor hesitates, and walks once it has advice in its context."""

    def answer(request):
        if request.role == "grader":
            return grades_json() if grader is None else grader
        if request.role == "reflector":
            return reflection_json(1) if reflector is None else reflector
        return retry if "Do: go right" in request.text else actor

    return answer


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


def test_first_slot_shifts_uids_and_seeds(tokenizer):
    context = make_context(tokenizer, policy(), group_size=1, condition="rlvr")
    (shifted,) = run(context, ITEMS[1:], first_slot=1)
    assert shifted.uid == "5-1"
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


# What failures cost.


def only(rollout, role, failure, otherwise=None):
    """Fails requests of one rollout's role in slot 0, answers the rest as `policy`."""
    bad = {request_seed(3, 5, 0, rollout, role, turn) for turn in range(9)}
    return lambda request: failure if request.seed in bad else (otherwise or policy())(request)


def test_a_failing_rollout_is_dropped_and_counted_and_spares_the_others(tokenizer, caplog):
    context = make_context(tokenizer, only(1, "actor", OSError("boom")), group_size=4)
    first, second = run(context)
    assert [t.uid for t in first.trajectories if t.parent is None] == ["5-0/0", "5-0/2", "5-0/3"]
    assert first.events["dropped/OSError"] == 1
    assert "boom" in caplog.text
    assert len(second.trajectories) == 6
    assert context.task.opened == context.task.closed


def test_a_failing_grader_leaves_its_row_ungraded(tokenizer):
    context = make_context(tokenizer, only(1, "grader", OSError("boom")), group_size=2)
    first, _ = run(context)
    assert [t.grades for t in first.trajectories[:2]] == [(2, 4), None]
    assert first.events["ungraded/OSError"] == 1


@pytest.mark.parametrize(
    ("answer", "reason"), [("no json", "not_json"), ('{"sub_task_grades": 1}', "no_grade_list")]
)
def test_an_unparseable_grade_is_ungraded_and_kept_as_a_judgement(tokenizer, answer, reason):
    context = make_context(tokenizer, only(0, "grader", answer), group_size=2)
    (result,) = run(context, ITEMS[:1])
    assert result.trajectories[0].grades is None
    judgement = next(j for j in result.judgements if j.trajectory == "5-0/0")
    assert (judgement.text, judgement.error) == (answer, reason)
    assert result.events[f"ungraded/{reason}"] == 1


def test_an_answer_cut_by_its_limit_is_counted_as_truncated(tokenizer):
    context = make_context(tokenizer, policy(), group_size=2, max_judge_tokens=20)
    (result,) = run(context, ITEMS[:1])
    assert result.events["ungraded/truncated"] == 2
    assert result.events["reflection_invalid/truncated"] == 1
    assert len(result.trajectories) == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("no json", "not_json"),
        (reflection_json(99), "retry_from_step_range"),
        (reflection_json(0, trajectory_outcome="success"), "outcome_success"),
    ],
)
def test_an_invalid_reflection_means_no_retry(tokenizer, answer, reason):
    context = make_context(tokenizer, policy(reflector=answer), group_size=2)
    (result,) = run(context, ITEMS[:1])
    assert len(result.trajectories) == 2
    assert result.events == {"retry_candidates": 1, f"reflection_invalid/{reason}": 1}


def test_a_failing_retry_is_dropped_and_counted(tokenizer):
    answer = policy(retry=OSError("boom"))
    (result,) = run(make_context(tokenizer, answer, group_size=2), ITEMS[:1])
    assert len(result.trajectories) == 2
    assert result.events["retry_dropped/OSError"] == 1


def test_an_environment_that_cannot_start_drops_the_row(tokenizer):
    task = Corridor()
    fresh = task.environment

    def environment(item):
        walk = fresh(item)
        if task.opened == 1:

            async def reset():
                raise EpisodeError("no java")

            walk.reset = reset
        return walk

    task.environment = environment
    (result,) = run(make_context(tokenizer, policy(), task=task, group_size=3), ITEMS[:1])
    assert result.events["dropped/env_error"] == 1
    assert task.opened == task.closed


def test_a_step_without_any_rollout_stops_the_run(tokenizer):
    context = make_context(tokenizer, lambda request: OSError("boom"), group_size=2)
    with pytest.raises(AllRolloutsDropped, match="boom") as error:
        run(context)
    assert isinstance(error.value.__cause__, OSError)


def test_judge_prompt_is_fitted_to_the_context(tokenizer):
    item = Item("long", {"length": 3, "first": "cell " + "x" * 3000})
    context = make_context(
        tokenizer, policy(), group_size=1, max_prompt_tokens=4000, max_response_tokens=300
    )
    context.engine.max_context = 4500  # fits the episode, not its 3000 x beside 2048 tokens
    (result,) = run(context, [item])
    request = context.engine.of("grader")[0]
    assert len(request.prompt) + request.max_tokens <= 4500
    assert len(request.prompt) + request.max_tokens > 4480  # and no shorter than it must be
    assert "characters cut ...]" in request.text
    assert request.text.count("Step ") >= 2 * len(result.trajectories[0].turns)
    assert result.events["trajectory_cut/grader"] == 2
    assert result.events["trajectory_cut/reflector"] == 1


def test_judge_prompt_that_cannot_fit_leaves_the_row_ungraded(tokenizer):
    context = make_context(
        tokenizer, policy(), group_size=1, max_response_tokens=400, max_judge_tokens=2000
    )
    context.engine.max_context = 2100
    (result,) = run(context, ITEMS[:1])
    assert result.trajectories[0].grades is None
    assert result.events["ungraded/prompt_too_long"] == 1
    assert result.events["reflection_invalid/prompt_too_long"] == 1


# Auxiliary pairs.


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


# Metrics and records.


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
