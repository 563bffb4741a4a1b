"""Each term of the shaped reward, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlds_jax.tasks.scienceworld import reward
from rlds_jax.tasks.scienceworld.reward import PlayedTurn


def played(*scores, thought=True, verb=None):
    return [PlayedTurn(score, thought, verb) for score in scores]


def test_base_is_the_highest_score():
    assert reward.base(played(0, 30, 70, -100)) == 0.7
    assert reward.base(played(-100)) == 0
    assert reward.base([]) == 0


@pytest.mark.parametrize(
    ("scores", "factor"),
    [
        ((0, 30, 30, 30), 0.5),
        ((30, 0), 0.5),
        ((30, -100), 0.5),
        ((0, 30, 40), 1),
        ((0, 30, 30, 40), 1),
        ((0, 0, 30), 1),  # the episode did not go on
        ((0, 100, 100), 1),
        ((0, 0, 0), 1),
        ((), 1),
    ],
)
def test_stall(scores, factor):
    assert reward.stall(played(*scores)) == factor


@pytest.mark.parametrize(
    ("task", "score", "verb", "factor"),
    [
        ("boil", 50, "look at", 0.25),
        ("boil", 49, "look at", 1),
        ("boil", 50, "wait", 1),
        ("boil", 50, None, 0.25),
        ("find-plant", 100, "focus", 1),
        ("lifespan-longest-lived", 100, "focus", 1),
        ("identify-life-stages-1", 100, "focus", 1),
        ("mendelian-genetics-known-plant", 100, "focus", 0.25),
        ("mendelian-genetics-known-plant", 100, "pour", 1),
    ],
)
def test_procedure(task, score, verb, factor):
    assert reward.procedure(played(score, verb=verb), task) == factor


def test_the_think_penalty_needs_fewer_than_half():
    with_, without = played(0), played(0, thought=False)
    assert reward.think_penalty(with_ + without) == 0
    assert reward.think_penalty(with_ + 2 * without) == -0.1
    assert reward.think_penalty([]) == 0


def test_the_verb_bonus_counts_distinct_accepted_verbs():
    turns = [PlayedTurn(0, True, verb) for verb in ("go", "go", None, "open", "wait")]
    assert reward.verb_bonus(turns) == pytest.approx(0.025)
    many = [PlayedTurn(0, True, str(i)) for i in range(9)]
    assert reward.verb_bonus(many) == 0.05
    assert reward.verb_bonus(played(0)) == 0


def test_terms_combine_in_order():
    turns = [PlayedTurn(60, False, "go"), PlayedTurn(60, False, "focus")]
    terms = reward.reward(turns, "boil")
    assert terms._asdict() == pytest.approx(
        {"base": 0.6, "stall": 0.5, "procedure": 0.25, "think": -0.1, "verbs": 0.05 / 3}
    )
    assert terms.total == pytest.approx(0.6 * 0.5 * 0.25 - 0.1 + 0.05 / 3)


turns = st.lists(
    st.builds(
        PlayedTurn,
        st.integers(-100, 100),
        st.booleans(),
        st.sampled_from([None, "go", "wait", "pour", "open"]),
    )
)


@given(turns, st.sampled_from(["boil", "find-plant"]))
def test_the_total_is_bounded(turns, task):
    terms = reward.reward(turns, task)
    assert 0 <= terms.base <= 1
    assert -0.1 <= terms.total <= 1.05
