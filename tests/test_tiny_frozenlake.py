"""The demonstrations of the tiny FrozenLake policy, and how it is measured."""

import random
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from experiments.tiny_policy import evaluate
from experiments.tiny_policy.frozenlake import critics
from experiments.tiny_policy.frozenlake.actor import GUIDED, UNGUIDED, Skill, stated_cell
from experiments.tiny_policy.frozenlake.demonstrations import play
from experiments.tiny_policy.recipe import bundled, load
from experiments.tiny_policy.transcripts import Scribe
from rlds_jax.play import make_task
from rlds_jax.rollouts.grading import parse_grades
from rlds_jax.rollouts.reflection import parse_reflection
from rlds_jax.rollouts.types import GroupResult, Trajectory, Turn
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import SUBTASKS

RECIPE = load("frozenlake")
TASK = make_task(RECIPE.config().task)
NAMES = [subtask.name for subtask in SUBTASKS]
PERFECT = Skill(invalid=0, misread=0, wander=0, reckless=0)
SCRIBE = Scribe(TASK, critics)
BOARD = ["A D C", "D D D", "C D B"]


def test_cells_moves_digits_and_tags_are_single_tokens():
    tokenizer = AutoTokenizer.from_pretrained(bundled(RECIPE))

    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("A D C\nD B D") == ["A", " D", " C", "\n", "D", " B", " D"]
    assert pieces("<think>go</think><action>Up</action>")[-3:] == ["<action>", "Up", "</action>"]
    assert pieces("Turns left: 6")[-1] == " 6"


@pytest.fixture(scope="module")
def transcripts():
    return list(RECIPE.transcripts(TASK, "train", 0, 150, seed=0))


def test_demonstrations_are_reproducible_and_of_all_roles(transcripts):
    assert list(RECIPE.transcripts(TASK, "train", 0, 150, seed=0)) == transcripts
    assert list(RECIPE.transcripts(TASK, "train", 0, 150, seed=1)) != transcripts
    transcripts = [transcript["messages"] for transcript in transcripts]
    starts = [transcript[0]["content"] for transcript in transcripts]
    assert sum(start.startswith("You grade") for start in starts) > 20
    assert sum(start.startswith("You review") for start in starts) > 20
    guided_in_system = [t for t in transcripts if "Advice" in t[0]["content"]]
    guided_later = [t for t in transcripts if any("Advice" in m["content"] for m in t[1:])]
    assert len(guided_in_system) > 5
    assert len(guided_later) > 5
    for transcript in guided_later:
        at = next(i for i, m in enumerate(transcript) if i and m["role"] == "system")
        assert [m["role"] for m in transcript[at - 1 : at + 2]] == ["assistant", "system", "user"]


def test_guidance_makes_the_scripted_actor_better():
    def success(skill):
        items = TASK.items("validation")[:100]
        return np.mean([play(TASK, item, skill, random.Random(item.id)).success for item in items])

    assert success(GUIDED) > success(UNGUIDED) + 0.3
    assert success(PERFECT) == 1


def _answer(transcript):
    return transcript["messages"][-1]["content"]


def test_scripted_answers_are_valid_and_say_the_truth():
    for item in TASK.items("train")[:100]:
        episode = play(TASK, item, UNGUIDED, random.Random(item.id))
        true = critics.grade(episode)
        grades = parse_grades(_answer(SCRIBE.grader(episode)), NAMES, len(episode.turns))
        assert grades.scores == tuple(grade.score for grade in true)
        assert grades.pivots == tuple(grade.pivot for grade in true)
        if not episode.success:
            answer = _answer(SCRIBE.reflector(episode, graded=True))
            report = parse_reflection(answer, len(episode.turns))
            assert report.retry_from == critics.retry_step(episode)


def _episode(moves):
    """Plays (move, stated position) pairs on BOARD, and on from there without a mistake."""
    texts = [f"<think>A {r + 1} {c + 1},</think><action>{m}</action>" for m, (r, c) in moves]
    prefix = tuple(Turn(text, "") for text in texts)
    return play(TASK, Item("x", {"board": BOARD}), PERFECT, random.Random(0), prefix)


def test_a_hole_is_the_hazard_pivot_and_where_the_retry_starts():
    episode = _episode([("Right", (0, 0)), ("Right", (0, 1))])
    assert episode.ended_by == "hole"
    assert critics.retry_step(episode) == 1
    planning, hazard, tracking, _, boundary = critics.grade(episode)
    assert (hazard.score, hazard.pivot) == (1, 1)
    assert (planning.score, planning.pivot) == (2, 1)
    assert (tracking.score, boundary.score) == (5, 5)
    assert "Step 1 went Right onto C." in critics.root_cause(episode)
    report = _answer(SCRIBE.reflector(episode, graded=True))
    assert "At step 1 go Down Down Right to B" in report


def test_edges_and_misread_positions_are_graded_where_they_happen():
    episode = _episode([("Down", (0, 0)), ("Left", (1, 0)), ("Right", (2, 2))])
    assert episode.success
    _, _, tracking, _, boundary = critics.grade(episode)
    assert (boundary.score, boundary.pivot) == (3, 1)
    assert (tracking.score, tracking.pivot) == (3, 2)
    assert episode.outcome == "success_but_inefficient"


def test_running_out_of_turns_pivots_on_the_last_escape():
    up = ("Up", (0, 0))
    episode = _episode([up] * 6)
    assert episode.ended_by == "max_turns"
    dead_end = critics.grade(episode)[3]
    assert (dead_end.score, dead_end.pivot) == (1, 2)  # 4 moves to B, 4 turns left at step 2
    assert critics.retry_step(episode) == 0


def test_stated_cell():
    assert stated_cell("<think>A 2 3, B 1 1: Up D</think>") == (1, 2)
    assert stated_cell("<think>hm</think>") is None


# The evaluation


def _trajectory(episode, **fields):
    turns = len(episode.turns)
    return Trajectory(
        uid="0-0/0",
        group="0-0",
        item_id="x",
        initial_observation=episode.initial_observation,
        tokens=np.zeros(1 + turns, np.int32),
        turn_ids=np.arange(-1, turns, dtype=np.int32),
        logprobs=np.zeros(1 + turns, np.float32),
        weight_version=np.arange(-1, turns, dtype=np.int32),
        prompt_length=1,
        temperature=0.7,
        reward=episode.reward,
        success=episode.success,
        ended_by=episode.ended_by,
        turns=episode.turns,
        metrics={"invalid_actions": 0},
        **fields,
    )


def test_quality_compares_grades_with_the_true_log():
    episode = _episode([("Right", (0, 0)), ("Right", (0, 1))])
    true = critics.grade(episode)
    scores = (5, *(grade.score for grade in true[1:]))
    trajectory = _trajectory(episode, grades=scores, pivots=tuple(grade.pivot for grade in true))
    group = GroupResult("0-0", (trajectory,), (), Counter())
    measured = evaluate.quality(RECIPE, TASK, [Item("x", {"board": BOARD})], [group])
    assert measured["success"] == 0
    assert measured["path_planning/score"] == 0
    assert measured["hazard_identification/score"] == 1
    assert all(measured[f"{name}/pivot"] == 1 for name in NAMES)
