import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlds_jax.tasks.hotpotqa.reward import exact_match, extract_boxed, f1, normalise, reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no box", None),
        (r"\boxed{Paris}", "Paris"),
        (r"so \boxed{ Paris } it is", "Paris"),
        (r"\boxed{Rome}, no: \boxed{Paris}", "Paris"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"\fbox{Paris}", "Paris"),
        (r"\boxed {Paris}", "Paris"),
        (r"\boxed{\boxed{Paris}}", "Paris"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{two" + "\n" + "lines}", "two\nlines"),
        (r"\boxed{}", ""),
        (r"\boxed{Par", None),
        (r"\boxed{Paris} and \boxed{Lond", "Paris"),
        (r"\boxed{a {b}", None),
        (r"boxed{Paris}", None),
        (r"<think>\boxed{Rome}</think> \boxed{Paris}", "Paris"),
        (r"\boxed{Paris} <think>or \boxed{Rome}?</think>", "Paris"),
        (r"<think>\boxed{Rome}", None),
        (r"\boxed{Rome}</think> nothing", None),
    ],
)
def test_the_last_box_counts(text, answer):
    assert extract_boxed(text) == answer


# Worked by hand after the official evaluation scripts of SQuAD and HotpotQA.
@pytest.mark.parametrize(
    ("prediction", "gold", "overlap", "scored"),
    [
        ("Paris", "Paris", 1, 1),
        ("the  PARIS!", "Paris", 1, 1),
        ("A Tale of Two Cities", "Tale of two cities", 1, 1),
        ("U.S.A.", "USA", 1, 1),
        ("Anne-Marie", "AnneMarie", 1, 1),
        ("rock 'n' roll", "rock n roll", 1, 1),
        ("theatre", "atre", 0, 0),
        ("York New", "New York", 1, 1),
        ("New York City", "New York", 4 / 5, 4 / 5),
        ("Paris", "Paris, in the north of France", 2 / 6, 2 / 6),
        ("Paris", "a city in the north of Western France called Paris", 2 / 9, 0),
        ("x b c d e", "x f g h i", 2 / 10, 0),
        ("x y z b c", "x f y g z", 6 / 10, 6 / 10),
        ("no no no", "no", 2 / 4, 0),
        ("b b c", "b c c", 4 / 6, 4 / 6),
        ("yes", "yes", 1, 1),
        ("Yes.", "yes", 1, 1),
        ("yes it is", "yes", 2 / 4, 0),
        ("yes", "yes and no", 2 / 4, 0),
        ("no", "yes", 0, 0),
        ("noanswer", "noanswer given", 2 / 3, 0),
        ("", "Paris", 0, 0),
        ("the", "a", 1, 1),
        ("", "", 1, 1),
        ("naïve café", "naïve cafe", 2 / 4, 2 / 4),
        ("1,000", "1000", 1, 1),
    ],
)
def test_scores(prediction, gold, overlap, scored):
    assert f1(prediction, gold) == pytest.approx(overlap)
    assert reward(prediction, gold) == pytest.approx(scored)


def test_the_least_overlap_that_counts_is_exactly_three_tenths():
    assert reward("x y z b", "x y z " + "c d e f g h i j k l m n o") == 6 / 20
    assert reward("x y z b e", "x y z " + "c d e2 f g h i j k l m n o") == 0


def test_yes_and_no_are_words_like_others_without_the_rule():
    assert reward("yes it is", "yes", strict_yes_no=False) == 0.5
    assert reward("no", "yes", strict_yes_no=False) == 0


def test_the_best_of_several_accepted_answers_counts():
    assert reward("NYC", ["New York", "NYC"]) == 1
    assert reward("New York City", ["New York", "NYC"]) == 0.8
    assert reward("yes", ["yes indeed", "yes"]) == 1
    with pytest.raises(ValueError, match="accepted"):
        reward("NYC", [])


def test_no_answer_earns_nothing():
    assert reward(None, "Paris") == 0
    assert reward(None, ["", "Paris"]) == 0


WORDS = st.lists(st.sampled_from(["x", "y", "z", "the", "yes", "No", "é", "!", "u.s."]), max_size=7)
TEXT = st.one_of(WORDS.map(" ".join), st.text(max_size=12))


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.randoms())
def test_f1_properties(prediction, gold, rng):
    value = f1(prediction, gold)
    tokens = normalise(prediction).split()
    same = sorted(tokens) == sorted(normalise(gold).split())
    assert 0 <= value <= 1
    assert value == f1(gold, prediction)
    assert (value == 1) == same
    rng.shuffle(tokens)
    assert f1(" ".join(tokens), gold) == value


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_reward_properties(answer, golds):
    value = reward(answer, golds)
    assert value == 0 or 0.3 <= value <= 1
    assert value == max(reward(answer, gold) for gold in golds)
    assert value <= max(f1(answer, gold) for gold in golds)
    if any(exact_match(answer, gold) for gold in golds):
        assert value == 1
    assert value == reward(answer.upper().lower() if answer.isascii() else answer, golds)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_normalising_leaves_no_case_punctuation_or_outer_space(text):
    plain = normalise(text)
    assert plain == plain.strip()
    assert not set(plain) & set(string.punctuation)
    assert "  " not in plain


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab{}\\ ", max_size=20))
def test_extraction_never_raises_and_balances(text):
    found = extract_boxed(rf"\boxed{{{text}")
    if found is not None:
        bare = found.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert bare.count("{") == bare.count("}")


def test_a_box_survives_any_text_before_it():
    rng = random.Random(0)
    for _ in range(50):
        noise = "".join(rng.choices("ab {}\\", k=20))
        assert extract_boxed(noise + r"a \boxed{Paris}") == "Paris"
