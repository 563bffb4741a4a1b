"""Parsers of the grader's and reflector's answers: strict in meaning, lenient in form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_doubles import grades_json, reflection_json

from rlds_jax.rollouts.grading import parse_grades
from rlds_jax.rollouts.judging import Unparseable, find_json, integer
from rlds_jax.rollouts.reflection import Reflection, parse_reflection

NAMES = ("walking", "counting")
GOOD = grades_json()
EXPECTED = ((2, 4), (0, None))


def graded(*entries, turns=5, names=NAMES):
    return parse_grades(json.dumps({"sub_task_grades": list(entries)}), names, turns)


def entry(name="walking", score=3, pivot=None):
    return {"sub_task": name, "score": score, "pivot_step": pivot}


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  \n{GOOD}\n ",
        f"```json\n{GOOD}\n```",
        f"Here it is:\n```\n{GOOD}\n```\nDone.",
        f"<think>\nmaybe {grades_json(1, 1)}\n</think>\n{GOOD}",
        f"\n<think></think>{GOOD}",
        f"In {{braces}} first. {GOOD}",
        f"{{ {GOOD}",
        f'{{"plan": 1}} {GOOD}',
        f"{GOOD} and again {grades_json(5, 5)}",
        GOOD.replace("walked the wrong way", "walked\n\tthe wrong way"),
        GOOD.replace("walked the wrong way", "left in <think>no</think> or </think> {"),
        GOOD.replace('"walking"', '" Walking "'),
        GOOD.replace('"score": 2', '"score": " 2 "').replace('_step": 0', '_step": "0"'),
    ],
)
def test_answers_that_hold(text):
    assert parse_grades(text, NAMES, turns=5) == EXPECTED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not_json"),
        ("no braces", "not_json"),
        ("{", "not_json"),
        ("{}", "not_json"),
        ("[1, 2]", "not_json"),
        (GOOD[:-3], "not_json"),
        ('{"other": 1}', "not_json"),
        (f"<think>{GOOD}", "not_json"),
        (f"<think>{GOOD}</think>", "not_json"),
        ('{"a":' * 3000, "not_json"),
        ('{"trajectory_outcome": ' + "9" * 5000 + "}", "not_json"),
        ('{"trajectory_outcome": "failure"}', "no_grade_list"),
        ('{"sub_task_grades": {"walking": 3}}', "no_grade_list"),
        ('{"sub_task_grades": null}', "no_grade_list"),
        ('{"sub_task_grades": []}', "too_few_scores"),
        ('{"sub_task_grades": [3, "x", null, {"score": 3}, {"sub_task": 3}]}', "too_few_scores"),
    ],
)
def test_answers_that_are_ungraded(text, reason):
    with pytest.raises(Unparseable) as error:
        parse_grades(text, NAMES, turns=5)
    assert error.value.reason == reason


@pytest.mark.parametrize("score", [1, 2, 3, 4, 5])
def test_scores(score):
    assert graded(entry(score=score), entry("counting", str(score))).scores == (score, score)


@pytest.mark.parametrize(
    "score", [0, 6, -1, 4.5, 4.0, True, False, None, "4/5", "4.0", "", "four", "٣", [3], 10**30]
)
def test_scores_that_are_missing(score):
    assert graded(entry(score=score), entry("counting", 3)).scores == (None, 3)


@pytest.mark.parametrize(
    ("pivot", "expected"),
    [
        (0, 0),
        (4, 4),
        (5, 4),
        (10**30, 4),
        ("3", 3),
        (-1, None),
        ("-2", None),
        (None, None),
        (2.0, None),
        (True, None),
        ("step 2", None),
        ([1], None),
    ],
)
def test_pivots(pivot, expected):
    assert graded(entry(pivot=pivot), entry("counting")).pivots == (expected, None)


def test_first_of_duplicate_names_wins_even_when_its_score_is_bad():
    assert graded(entry(score=2), entry(" WALKING", 5), entry("counting")).scores == (2, 3)
    assert graded(entry(score=9), entry(score=5), entry("counting")).scores == (None, 3)


def test_unknown_names_are_ignored():
    grades = graded(entry("flying", 1, 1), entry("counting", 4, 2), entry("walking", 5))
    assert grades == ((5, 4), (None, 2))


def test_half_of_the_scores_is_enough():
    four = ("a", "b", "c", "d")
    assert graded(entry("a"), entry("b"), names=four).scores == (3, 3, None, None)
    with pytest.raises(Unparseable, match="too_few_scores"):
        graded(entry("a"), names=four)
    with pytest.raises(Unparseable, match="too_few_scores"):
        graded(entry("a"), names=("a", "b", "c"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.text() | st.text(alphabet='{}[]":,0aN-.e\\u'))
def test_any_text_parses_or_says_why(text):
    for parse in (lambda: parse_grades(text, NAMES, 3), lambda: parse_reflection(text, 3)):
        with pytest.raises(Unparseable):
            parse()


@given(json_values, json_values, st.integers(1, 9))
def test_any_entry_gives_scores_and_pivots_in_range(score, pivot, turns):
    grades = graded(entry(score=score, pivot=pivot), entry("counting"), turns=turns)
    assert grades.scores[0] in (None, 1, 2, 3, 4, 5)
    assert grades.pivots[0] is None or 0 <= grades.pivots[0] < turns


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4), st.text(alphabet="ab{}[ `"))
def test_find_json_recovers_an_object_behind_any_preamble(fields, preamble):
    wanted = {**fields, "key": 1}
    assert find_json(f"{preamble}\n{json.dumps(wanted)}", ("key",)) == wanted


def test_find_json_prefers_the_object_with_most_fields():
    assert find_json('{"a": 1} {"a": 2, "b": 3} {"a": 4, "b": 5}', ("a", "b")) == {"a": 2, "b": 3}


def test_integer():
    assert [integer(v) for v in (3, "3", " -3\n")] == [3, 3, -3]
    bad = (True, 3.0, "3.0", "1_0", "+3", "", None, "9" * 5000)
    assert [integer(value) for value in bad] == [None] * len(bad)


@pytest.mark.parametrize("step", [0, 4])
def test_reflection_that_holds(step):
    for text in (reflection_json(step), f"<think>{{}}</think> ```json\n{reflection_json(step)}```"):
        assert parse_reflection(text, 5) == Reflection("it went left", "go right", step)
    for outcome in ("failure", "success_but_inefficient"):
        assert parse_reflection(reflection_json(step, trajectory_outcome=outcome), 5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trajectory_outcome": "success"}, "outcome_success"),
        ({"trajectory_outcome": " SUCCESS "}, "outcome_success"),
        ({"trajectory_summary": ""}, "missing_trajectory_summary"),
        ({"root_cause_analysis": None}, "missing_root_cause_analysis"),
        ({"improvement_suggestion": ["go"]}, "missing_improvement_suggestion"),
        ({"trajectory_outcome": 1}, "missing_trajectory_outcome"),
        ({"retry_from_step": None}, "missing_retry_from_step"),
        ({"retry_from_step": True}, "retry_from_step_type"),
        ({"retry_from_step": 2.0}, "retry_from_step_type"),
        ({"retry_from_step": "2"}, "retry_from_step_type"),
        ({"retry_from_step": -1}, "retry_from_step_range"),
        ({"retry_from_step": 5}, "retry_from_step_range"),
    ],
)
def test_reflection_that_is_invalid(fields, reason):
    with pytest.raises(Unparseable) as error:
        parse_reflection(_with(fields), 5)
    assert error.value.reason == reason


def _with(fields):
    return json.dumps(json.loads(reflection_json(0)) | fields)


@pytest.mark.parametrize("field", json.loads(reflection_json(0)))
def test_reflection_without_a_field(field):
    report = json.loads(reflection_json(0))
    del report[field]
    with pytest.raises(Unparseable) as error:
        parse_reflection(json.dumps(report), 5)
    assert error.value.reason == f"missing_{field}"


def test_reflection_on_no_turns_has_no_place_to_retry_from():
    with pytest.raises(Unparseable, match="range"):
        parse_reflection(reflection_json(0), 0)
