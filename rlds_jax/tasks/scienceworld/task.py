"""The ScienceWorld task and its options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from rlds_jax.tasks.base import Item, Subtask
from rlds_jax.tasks.scienceworld import commands, items, texts
from rlds_jax.tasks.scienceworld.environment import MAX_REPEATS, ScienceWorldEnvironment
from rlds_jax.tasks.scienceworld.pool import JvmPool

SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)

SUBTASKS = (
    Subtask(
        "goal_decomposition",
        0.20,
        "Splits the task into subgoals, in the sequence in which they have to be reached.",
    ),
    Subtask(
        "object_identification",
        0.20,
        "Knows which objects the task calls for, and finds out where they are.",
    ),
    Subtask(
        "action_sequencing",
        0.20,
        "Acts in the correct causal order, each action prepared by those before it.",
    ),
    Subtask(
        "state_tracking",
        0.15,
        "Follows how objects and surroundings change with each action and with time.",
    ),
    Subtask(
        "scientific_reasoning", 0.15, "Applies the right scientific principles to the experiment."
    ),
    Subtask("exploration_efficiency", 0.10, "Wastes no steps while exploring."),
)


@dataclasses.dataclass(frozen=True)
class ScienceWorld:
    """The task, and its options.

    Attributes:
      max_turns: turns in an episode.
      simplification: the simulator's: "easy", or names of SIMPLIFICATIONS joined by commas; "" for
        none. Recorded in every item.
      fraction: share of the simulator's own train and validation variations that is used.
      seed: orders the variations and the items.
      split_tasks: train on the variations of 17 tasks and validate on the other 13, instead of
        on all 30.
      tasks: use these tasks only; empty for all.
      jvms: most simulators at once, one per live episode; None for what cores and memory allow.
      call_deadline: seconds a command may take before its simulator is killed.
      recycle_after: episodes after which a simulator is replaced.
      deterministic: identical episodes on every simulator, which retries by replay need.

    Raises:
      ValueError: a field that cannot hold, by name.
    """

    max_turns: int = 30
    simplification: str = "easy"
    fraction: float = 0.5
    seed: int = 0
    split_tasks: bool = False
    tasks: tuple[str, ...] = ()
    jvms: int | None = None
    call_deadline: float = 60.0
    recycle_after: int = 100
    deterministic: bool = True

    name: ClassVar[str] = "scienceworld"
    subtasks: ClassVar[tuple[Subtask, ...]] = SUBTASKS
    observation_role: ClassVar[Literal["user", "tool"]] = "user"
    replay: ClassVar[Literal["execute", "restore"]] = "execute"
    tools: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __post_init__(self):
        for field in ("max_turns", "recycle_after"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.jvms is not None and self.jvms < 1:
            raise ValueError(f"jvms must be None or at least 1, got {self.jvms}")
        if not self.call_deadline > 0:
            raise ValueError(f"call_deadline must be above 0 seconds, got {self.call_deadline}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        wrong = set(self.simplification.split(",")) - {*SIMPLIFICATIONS, ""}
        if wrong:
            raise ValueError(f"simplification has {sorted(wrong)}; use {list(SIMPLIFICATIONS)}")
        if unknown := sorted(set(self.tasks) - set(items.VARIATIONS)):
            raise ValueError(f"tasks has {unknown}; use {list(items.VARIATIONS)}")

    @functools.cached_property
    def pool(self) -> JvmPool:
        """The simulators; none is started before an episode needs one."""
        return JvmPool(self.jvms, self.call_deadline, self.recycle_after, self.deterministic)

    def system_prompt(self, guidance: str | None = None) -> str:
        known = commands.available(self.simplification, electrical=True)
        return texts.system_prompt(known, self.max_turns, MAX_REPEATS, guidance)

    def items(self, split: Literal["train", "validation"]) -> Sequence[Item]:
        """Raises ValueError for an unknown split."""
        chosen = list(self.tasks or items.VARIATIONS)
        if self.split_tasks:
            train = split == "train"
            chosen = [task for task in chosen if (task in items.TRAIN_TASKS) == train]
        return items.build(chosen, split, self.fraction, self.simplification, self.seed)

    def environment(self, item: Item) -> ScienceWorldEnvironment:
        """Raises ValueError when the item does not hold (see `items.check`)."""
        return ScienceWorldEnvironment(self.pool, *items.check(item), self.max_turns)

    def close(self) -> None:
        """Ends the simulators."""
        if "pool" in vars(self):
            self.pool.close()
            del vars(self)["pool"]
