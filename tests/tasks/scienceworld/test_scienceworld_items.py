"""Counts and splits; a test with a JVM compares them with the simulator."""

from collections import Counter

import pytest

from rlds_jax.tasks.base import Item
from rlds_jax.tasks.scienceworld import items
from rlds_jax.tasks.scienceworld.task import ScienceWorld

SPLITS = ("train", "validation")


def pairs(found):
    return [(item.data["task"], item.data["variation"]) for item in found]


def test_the_default_counts_are_the_method_s():
    train, validation = (ScienceWorld().items(split) for split in SPLITS)
    assert (len(train), len(validation)) == (1796, 887)
    assert len({item.id for item in [*train, *validation]}) == 1796 + 887
    for split, found in zip(SPLITS, (train, validation), strict=True):
        by_task = Counter(task for task, _ in pairs(found))
        assert {t: len(items.variations(t, split)) // 2 for t in items.VARIATIONS} == by_task
        assert all(number in items.variations(task, split) for task, number in pairs(found))
    assert {item.data["simplification"] for item in train} == {"easy"}


def test_items_are_seeded_and_shuffled():
    first = ScienceWorld().items("train")
    assert first == ScienceWorld().items("train")
    assert len({task for task, _ in pairs(first[:20])}) > 5
    other = ScienceWorld(seed=1).items("train")
    assert len(other) == 1796
    assert set(pairs(other)) != set(pairs(first))
    everything = ScienceWorld(fraction=1.0).items("train")
    assert set(pairs(first)) < set(pairs(everything))
    assert len(everything) == sum(len(items.variations(t, "train")) for t in items.VARIATIONS)


def test_a_task_keeps_its_variations_whatever_tasks_are_used():
    alone = ScienceWorld(tasks=("find-plant",)).items("train")
    among = [pair for pair in pairs(ScienceWorld().items("train")) if pair[0] == "find-plant"]
    assert sorted(pairs(alone)) == sorted(among)


def test_split_tasks_holds_thirteen_tasks_out():
    task = ScienceWorld(split_tasks=True)
    train, validation = ({t for t, _ in pairs(task.items(split))} for split in SPLITS)
    assert (len(train), len(validation)) == (17, 13)
    assert train == set(items.TRAIN_TASKS)
    assert train | validation == set(items.VARIATIONS)


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="test"):
        ScienceWorld().items("test")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "simplification"),
        ({"task": "brew", "variation": 0, "simplification": ""}, "brew"),
        ({"task": "boil", "variation": 30, "simplification": ""}, r"30 of boil.*0\.\.29"),
        ({"task": "boil", "variation": -1, "simplification": ""}, "-1 of boil"),
    ],
)
def test_a_bad_item_is_named(data, message):
    with pytest.raises(ValueError, match=f"item x: .*{message}"):
        ScienceWorld().environment(Item("x", data))


@pytest.mark.parametrize(
    "options",
    [
        {"max_turns": 0},
        {"simplification": "hard"},
        {"fraction": 0.0},
        {"seed": -1},
        {"tasks": ("brew",)},
        {"jvms": 0},
        {"call_deadline": 0.0},
        {"recycle_after": 0},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ScienceWorld(**options)


def test_subtask_weights_sum_to_one():
    assert sum(subtask.weight for subtask in ScienceWorld().subtasks) == pytest.approx(1)
    assert len(ScienceWorld().subtasks) == 6


def test_closing_an_unused_task_starts_nothing():
    task = ScienceWorld()
    task.close()
    assert "pool" not in vars(task)
