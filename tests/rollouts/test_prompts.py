"""Wording, its placeholders and substitutes, and the trajectory text."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from rlds_jax.rollouts import prompts
from rlds_jax.rollouts.prompts import Prompts, shorten, trajectory_text
from rlds_jax.rollouts.types import Turn
from rlds_jax.tasks.base import Subtask

SUBTASKS = (Subtask("walking", 0.6, "Moves on."), Subtask("counting", 0.4, "Knows $where$ it is."))


@dataclasses.dataclass
class Played:
    turns: tuple = (Turn("<think>x</think>left", "cell 0"), Turn("right", "fell"))
    initial_observation: str = "cell 1"
    reward: float = 0.25
    ended_by: str = "fell"


def test_trajectory_text_has_zero_based_steps_and_the_terminal_observation():
    assert trajectory_text(Played()) == (
        "Start:\ncell 1\n"
        "Step 0 action:\n<think>x</think>left\nStep 0 result:\ncell 0\n"
        "Step 1 action:\nright\nStep 1 result:\nfell\n"
        "Outcome: reward 0.25, ended by fell"
    )


def test_a_cap_cuts_the_longest_observations_only():
    played = Played(turns=(Turn("a" * 90, "x" * 40 + "y" * 40), Turn("b", "short")))
    text = trajectory_text(played, cap=20)
    assert "x" * 10 + "[... 60 characters cut ...]" + "y" * 10 in text
    assert "a" * 90 in text
    assert "short" in text
    assert text.count("Step") == 4


@given(st.text(), st.integers(0, 40))
def test_shorten_keeps_both_ends(text, cap):
    short = shorten(text, cap)
    if len(text) <= cap:
        assert short == text
    else:
        kept = short.replace(f"[... {len(text) - cap} characters cut ...]", "", 1)
        assert len(kept) == cap
        assert text.startswith(kept[: (cap + 1) // 2])
        assert text.endswith(kept[(cap + 1) // 2 :])


@given(st.integers(0, 50), st.integers(-1, 60))
def test_fit_cap_is_the_largest_that_fits(longest, threshold):
    cap = prompts.fit_cap(longest, lambda cap: cap <= threshold)
    assert cap == (None if threshold < 0 else min(longest, threshold))


def test_what_is_fixed_for_a_task_is_in_the_system_message_alone():
    first, second = (
        Prompts().grader_messages(SUBTASKS, Played(initial_observation=text)) for text in "ab"
    )
    assert first[0] == second[0]
    assert first[0]["role"] == "system"
    assert "1. walking: Moves on.\n2. counting: Knows $where$ it is." in first[0]["content"]
    assert first[1]["content"].endswith(trajectory_text(Played(initial_observation="a")))


@pytest.mark.parametrize("system", [prompts.GRADER_SYSTEM, prompts.REFLECTOR_SYSTEM])
def test_fixed_text_is_short_enough_for_a_tiny_policy(system):
    assert len(system.split()) <= 260


@pytest.mark.parametrize(
    "point",
    [
        "1 critical failure, 2 poor, 3 adequate, 4 good, 5 excellent",
        "success or success_but_inefficient: the earliest step",
        "failure: the earliest step",
        "null",
        "why again and again",
        "JSON only",
        "every subtask",
        *("trajectory_outcome", "root_cause_analysis", "sub_task_grades"),
        *("sub_task", "score", "assessment", "pivot_step"),
    ],
)
def test_grader_prompt_carries(point):
    assert point in prompts.GRADER_SYSTEM


@pytest.mark.parametrize(
    "point",
    [
        "which subtasks to address",
        "Walk forward to the earliest step where a real choice went wrong",
        "quote its action or observation",
        "to the outcome",
        "principle",
        "0 when the first action was the decisive one",
        "JSON only",
        *("trajectory_summary", "root_cause_analysis", "trajectory_outcome"),
        *("improvement_suggestion", "retry_from_step"),
    ],
)
def test_reflector_prompt_carries(point):
    assert point in prompts.REFLECTOR_SYSTEM


def reflector_user(**sections):
    return Prompts().reflector_messages(SUBTASKS, Played(), **sections)[1]["content"]


def test_reflector_sections_are_optional_and_the_trajectory_comes_last():
    bare = reflector_user()
    assert bare == "Trajectory:\n" + trajectory_text(Played())
    better = Played(ended_by="arrived")
    text = reflector_user(
        grades=(2, None), pivots=(1, None), memory="Never go left.", contrast=better
    )
    assert text.endswith("\n\n" + bare)
    assert "Grades:\nwalking: 2, pivot step 1\ncounting: not graded\n" in text
    assert "Lessons so far:\nNever go left.\n" in text
    assert f"A better attempt, to compare with:\n{trajectory_text(better)}\n" in text


def test_filled_in_text_is_not_filled_again():
    text = reflector_user(memory="costs $grades and $$")
    assert "costs $grades and $$" in text


def test_guidance_says_to_apply_it_silently():
    text = Prompts().guidance_text(" it went left ", "go right\n")
    assert "silently" in text
    assert "Do: go right\nBecause: it went left" in text


def test_prompts_dir_substitutes_by_file(tmp_path):
    (tmp_path / "guidance.txt").write_text("$diagnosis! $suggestion, for $$5")
    loaded = Prompts.load(tmp_path)
    assert loaded.guidance_text("a", "b") == "a! b, for $5"
    assert loaded.grader_system == prompts.GRADER_SYSTEM
    assert Prompts.load(None) == Prompts()


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("grader.txt", "", r"grader.txt is not a prompt; known: .*grader_system.txt"),
        ("guidance.txt", "$suggestion", r"guidance: placeholders must be .*diagnosis"),
        ("grader_user.txt", "$trajectory $extra", r"grader_user: .*extra"),
        ("grader_user.txt", "$trajectory costs $5", r"grader_user: a lone '\$'"),
    ],
)
def test_prompts_dir_refuses(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        Prompts.load(tmp_path)


def test_prompts_dir_must_exist(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        Prompts.load(tmp_path / "absent")


@pytest.mark.parametrize(
    "schema", [prompts.grader_schema(SUBTASKS, 3), prompts.reflector_schema(3)]
)
def test_schemas_compile_to_a_grammar(schema):
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
