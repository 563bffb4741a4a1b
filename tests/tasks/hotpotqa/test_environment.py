import asyncio

import pytest
from hotpotqa_doubles import Shelf, call, play
from hypothesis import given, settings
from hypothesis import strategies as st

from rlds_jax.tasks.base import TaskUnavailable
from rlds_jax.tasks.hotpotqa.environment import HotpotQAEnvironment, Limits, show
from rlds_jax.tasks.hotpotqa.passages import Passage
from rlds_jax.tasks.hotpotqa.retriever import RetrievalError
from rlds_jax.tasks.hotpotqa.task import HotpotQA

BOX = r"It is \boxed{the river Nile}."


def environment(*answers, golds=("River Nile",), **limits):
    shelf = Shelf(*answers)
    return HotpotQAEnvironment("Which river?", golds, shelf, Limits(**limits)), shelf


def test_a_search_and_a_correct_answer():
    env, shelf = environment()
    first, (found, end) = play(env, [f"<think>hm</think>{call('long river', top_k=2)}", BOX])
    assert first == "Question: Which river?"
    assert shelf.asked == [("long river", 2)]
    assert (found.observation, found.done) == ("[1] Nile A river.", False)
    assert (end.done, end.reward, end.success, end.ended_by) == (True, 1, True, "answer")
    assert end.observation == "The answer is correct."
    assert end.metrics == {
        "exact_match": 1,
        "answered": 1,
        "tools/calls_per_rollout": 1,
        "tools/malformed_per_rollout": 0,
        "tools/failed_per_rollout": 0,
        "tools/valid_call_rate": 1,
        "tools/cache_hit_rate": 0,
    }


@pytest.mark.parametrize(
    ("text", "reward", "success", "words"),
    [
        (r"\boxed{Nile}", 2 / 3, False, "partially correct (F1 score: 0.67)"),
        (r"\boxed{Nile River}", 1, False, "partially correct (F1 score: 1.00)"),
        (r"\boxed{Congo}", 0, False, "The answer is incorrect."),
        (r"\boxed{}", 0, False, "The answer is incorrect."),
        (r"\boxed{Congo} \boxed{River Nile}", 1, True, "correct"),
    ],
)
def test_the_terminal_text_tells_the_verdict_and_never_the_answer(text, reward, success, words):
    (end,) = play(environment()[0], [text])[1]
    assert (end.done, end.reward, end.success) == (True, pytest.approx(reward), success)
    assert words in end.observation
    assert "Nile" not in end.observation


def test_a_turn_with_a_call_is_a_tool_turn_whatever_else_it_holds():
    env, shelf = environment()
    _, results = play(env, [BOX + call("river"), "<tool_call>broken</tool_call>" + BOX, BOX])
    assert [result.done for result in results] == [False, False, True]
    assert len(shelf.asked) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{'name': 'search'}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": "ri', "not closed"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', '"query" is missing'),
        ('<tool_call>{"name": "browse", "arguments": {}}</tool_call>', 'no tool "browse"'),
        (call("river", top_k=51), '"top_k" must be from 1 to 50'),
        (call("river", top_k="5"), '"top_k" must be of type integer'),
        (call(" \n\0"), '"query" is empty'),
    ],
)
def test_a_malformed_call_is_told_what_is_wrong_and_is_not_executed(text, words):
    env, shelf = environment()
    _, (told, end) = play(env, [text, BOX])
    assert "was not executed" in told.observation
    assert words in told.observation
    assert not told.done
    assert shelf.asked == []
    assert end.metrics["tools/malformed_per_rollout"] == 1
    assert end.metrics["tools/valid_call_rate"] == 0
    assert end.metrics["tools/calls_per_rollout"] == 0


def test_calls_and_boxes_inside_a_think_block_are_ignored():
    env, shelf = environment()
    _, (told,) = play(env, [f"<think>{call('river')}{BOX}</think> so"])
    assert "neither a tool call nor an answer" in told.observation
    assert not shelf.asked


def test_only_the_first_calls_are_looked_at():
    env, shelf = environment(max_parallel_calls=2)
    _, (found,) = play(env, [call("a") + call("b") + call("c")])
    assert shelf.asked == [("a", 5), ("b", 5)]
    assert found.observation == (
        "Call 1:\n[1] Nile A river.\nCall 2:\n[1] Nile A river.\n"
        "[only the first 2 of 3 calls were looked at]"
    )


def test_the_last_turn_ends_the_episode_and_its_call_is_not_executed():
    env, shelf = environment(max_turns=3)
    _, results = play(env, [call("river")] * 9)
    assert [result.done for result in results] == [False, False, True]
    assert (results[-1].ended_by, results[-1].reward) == ("max_turns", 0)
    assert "No answer was given (max_turns)" in results[-1].observation
    assert len(shelf.asked) == 2
    assert play(environment(max_turns=1)[0], [BOX])[1][0].reward == 1


def test_the_budget_ends_the_episode_without_an_answer():
    env, _ = environment()

    async def run():
        await env.reset()
        await env.step(call("river"))
        return await env.conclude("response_budget")

    end = asyncio.run(run())
    assert (end.done, end.reward, end.ended_by) == (True, 0, "response_budget")
    with pytest.raises(RuntimeError, match="reset"):
        asyncio.run(env.step(BOX))


def test_restored_turns_count_and_call_no_tool():
    env, shelf = environment(max_turns=3)
    turns = [(call("river"), "[1] Nile A river."), ("<tool_call>x</tool_call>", "not executed")]
    _, (end,) = play(env, ["no answer"], restored=turns)
    assert (end.ended_by, shelf.asked) == ("max_turns", [])
    assert end.metrics["tools/calls_per_rollout"] == 1
    assert end.metrics["tools/valid_call_rate"] == 0.5


def test_a_failed_search_is_an_observation_and_counted():
    env, _ = environment(RetrievalError("down"))
    _, (told, end) = play(env, [call("river"), BOX])
    assert "did not answer" in told.observation
    assert (told.done, end.reward) == (False, 1)
    assert end.metrics["tools/failed_per_rollout"] == 1


def test_a_retriever_that_is_gone_ends_the_run():
    env, _ = environment(TaskUnavailable("gone"))
    with pytest.raises(TaskUnavailable):
        play(env, [call("river")])


def test_long_results_are_cut_with_a_notice():
    limits = Limits(result_chars=30, call_chars=100)
    passages = [Passage(str(i), "Nile", "river\n" * 20) for i in range(4)]
    one = show(passages[:1], limits)
    assert one == "[1] Nile river river river riv [cut at 30 characters]"
    several = show(passages, limits)
    assert several.startswith(one + "\n[2] Nile")
    assert several.endswith("\n[results cut at 100 characters: ask for fewer]")
    assert len(several) <= 100 + len("\n[results cut at 100 characters: ask for fewer]")
    assert show([], limits) == "No results."


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=40), st.text(max_size=9).map(call)), max_size=6))
def test_any_text_is_answered(texts):
    _, results = play(environment()[0], texts)
    assert all(isinstance(result.observation, str) for result in results)
    assert not any(result.done for result in results[:-1])


# The task


def test_the_prompt_asks_for_what_the_method_says():
    prompt = HotpotQA().system_prompt()
    for words in (r"\boxed{}", "search", "top_k", "double-quoted", "no schemas"):
        assert words in prompt
    assert HotpotQA().system_prompt("look twice").endswith("\n\n## Advice\nlook twice")


def test_subtasks_are_those_of_the_method():
    weights = {subtask.name: subtask.weight for subtask in HotpotQA().subtasks}
    assert weights == {
        "search_planning": 0.25,
        "evidence_extraction": 0.30,
        "search_iteration": 0.30,
        "answer_grounding": 0.15,
    }


@pytest.mark.parametrize(
    "field", ["max_turns", "train_items", "timeout", "retriever_form", "seed", "cache_size"]
)
def test_bad_options_are_refused_by_name(field):
    with pytest.raises(ValueError, match=field):
        HotpotQA(**{field: "soap" if field == "retriever_form" else -1})
