"""What failures cost a group: their own row, counted by reason."""

import pytest
from rollout_doubles import ITEMS, Corridor, make_context, only, policy, reflection_json, run

from rlds_jax.rollouts.group import AllRolloutsDropped
from rlds_jax.tasks.base import EpisodeError, Item, TaskUnavailable


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


def test_a_task_that_cannot_go_on_ends_every_group(tokenizer):
    def step(walk, text):
        if walk.task.opened > 3:
            raise TaskUnavailable("the server is down")

    context = make_context(tokenizer, policy(), task=Corridor(step=step), group_size=2)
    with pytest.raises(TaskUnavailable, match="server is down"):
        run(context)


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
