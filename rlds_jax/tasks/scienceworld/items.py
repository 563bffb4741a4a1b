"""Which task variations are trained and validated on.

The counts are the simulator's (scienceworld 1.2.3), kept here so that no JVM is needed to list
items; a test compares them with the simulator. Its own split: the first half of a task's variations
is for training, the next quarter for validation, the rest for testing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlds_jax.tasks.base import Item

Split = Literal["train", "validation"]

VARIATIONS = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}

# The 17 tasks that train when tasks are split; the other 13 are held out.
TRAIN_TASKS = (
    "boil",
    "melt",
    "change-the-state-of-matter-of",
    "use-thermometer",
    "measure-melting-point-known-substance",
    "power-component",
    "test-conductivity",
    "find-living-thing",
    "find-plant",
    "grow-plant",
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "lifespan-shortest-lived",
    "identify-life-stages-2",
    "inclined-plane-determine-angle",
    "inclined-plane-friction-named-surfaces",
    "mendelian-genetics-known-plant",
)


def variations(task: str, split: Split) -> range:
    """The simulator's own split of a task with at least five variations.

    Raises:
      ValueError: an unknown split.
    """
    quarter = VARIATIONS[task] // 4
    ranges = {"train": range(2 * quarter), "validation": range(2 * quarter, 3 * quarter)}
    if split not in ranges:
        raise ValueError(f"split must be one of {sorted(ranges)}, got {split!r}")
    return ranges[split]


def build(
    tasks: Sequence[str], split: Split, fraction: float, simplification: str, seed: int
) -> list[Item]:
    """The first int(fraction n) variations of each task in a seeded order, all shuffled.

    A task's choice does not depend on which other tasks there are.
    """
    names = list(VARIATIONS)
    chosen = []
    for task in tasks:
        numbers = variations(task, split)
        rng = np.random.default_rng((seed, names.index(task), split == "validation"))
        order = rng.permutation(len(numbers))[: int(fraction * len(numbers))]
        chosen += [_item(task, numbers[i], simplification) for i in order]
    shuffle = np.random.default_rng((seed, len(names), split == "validation"))
    return [chosen[i] for i in shuffle.permutation(len(chosen))]


def _item(task: str, variation: int, simplification: str) -> Item:
    data = {"task": task, "variation": variation, "simplification": simplification}
    return Item(f"{task}-{variation}", data)


def check(item: Item) -> tuple[str, int, str]:
    """Task, variation and simplification of an item.

    Raises:
      ValueError: the item lacks one, or the simulator has no such task or variation.
    """
    missing = {"task", "variation", "simplification"} - item.data.keys()
    if missing:
        raise ValueError(f"item {item.id}: data needs {sorted(missing)}")
    task, variation = item.data["task"], item.data["variation"]
    if task not in VARIATIONS:
        raise ValueError(f"item {item.id}: task {task!r} is unknown; use one of {[*VARIATIONS]}")
    if not 0 <= variation < VARIATIONS[task]:
        raise ValueError(
            f"item {item.id}: variation {variation} of {task} must be in 0..{VARIATIONS[task] - 1}"
        )
    return task, variation, item.data["simplification"]
