"""The scripted play of the tiny ScienceWorld, and a few steps of its config."""

import asyncio
import random

import pytest

from configs import scienceworld
from experiments.tiny_policy.recipe import load
from experiments.tiny_policy.scienceworld import critics
from experiments.tiny_policy.scienceworld.actor import Skill, act, stated_room
from experiments.tiny_policy.scienceworld.critics import Episode
from experiments.tiny_policy.scienceworld.demonstrations import play
from experiments.tiny_policy.scienceworld.plan import (
    Goal,
    State,
    Target,
    remaining,
    states,
    target_of,
    targets,
)
from experiments.tiny_policy.scienceworld.renaming import renamed
from rlds_jax.play import make_task
from rlds_jax.rollouts.types import Turn
from rlds_jax.trainer import Trainer

PERFECT = Skill(0, 0, 0, 0, 0, 0, 0)
START = """\
Your task is to find a(n) animal. First, focus on the thing. Then, move it to the red box in the \
kitchen.

This room is called the hallway. In it, you see:
\ta picture"""
DOVE = Target("dove", "outside")
OUTSIDE = "This outside location is called the outside. Here you see:\n\ta dove egg\n\tan axe"


def turn(action, said, room="hallway"):
    return Turn(f"<think>In {room}. Next: x. </think><action>{action}</action>", said)


FOUND = (
    turn("teleport to outside", "You teleport to the outside."),
    turn("look around", OUTSIDE, "outside"),
    turn("focus on dove", "You focus on the dove egg.", "outside"),
)
LEFT = (*FOUND, turn("teleport to kitchen", "You teleport to the kitchen.", "outside"))


def test_a_goal_is_read_from_the_task_text():
    assert Goal.read(START) == Goal("animal", "red box", "kitchen")
    lifespan = "Your task is to find the animal with the longest life span.  The animals are"
    assert Goal.read(lifespan) == Goal("longest life span", None, None)


def test_a_solution_tells_its_target():
    path = ["open door to outside", "go to outside", "focus on baby baby brown bear", "wait1"]
    assert target_of(path, "kitchen") == Target("brown bear", "outside")


def test_what_is_left_follows_the_turns():
    goal = Goal.read(START)
    names = [
        [stage.name for stage in remaining(goal, DOVE, state)] for state in states(START, LEFT)
    ]
    assert names == [
        ["find", "look", "focus", "take", "carry", "place"],
        ["look", "focus", "take", "carry", "place"],
        ["focus", "take", "carry", "place"],
        ["take", "carry", "place"],
        ["find", "take", "carry", "place"],  # it was left behind
    ]


def test_an_ambiguous_request_is_answered_with_the_carried_thing():
    said = "Ambiguous request: ...\n0:\tmove dove (on the ground)\n1:\tmove dove (in inventory)"
    state = State("kitchen").after(turn("move dove to red box", said))
    assert [stage.command for stage in remaining(Goal.read(START), DOVE, state)] == ["1"]


def test_leaving_the_thing_behind_is_where_the_retry_starts():
    episode = Episode(DOVE, START, LEFT, 0.4, "max_turns")
    assert critics.retry_step(episode) == 3
    assert critics.suggestion(episode) == (
        "At step 3: pick up dove, teleport to kitchen, move dove to red box."
    )
    goals, objects, _, tracking, reasoning, efficiency = critics.grade(episode)
    assert (goals.score, goals.pivot) == (2, 3)
    assert (objects.score, objects.pivot) == (5, None)
    assert (tracking.score, reasoning.score) == (5, 5)
    assert (efficiency.score, efficiency.pivot) == (4, 3)


def test_a_wrong_focus_is_the_pivot():
    wrong = (*FOUND[:2], turn("focus on axe", "You focus on the axe.", "kitchen"))
    episode = Episode(DOVE, START, wrong, 0.1, "wrong_focus")
    goals, objects, _, tracking, reasoning, _ = critics.grade(episode)
    assert {(g.score, g.pivot) for g in (goals, objects, reasoning)} == {(1, 2)}
    assert (tracking.score, tracking.pivot) == (3, 2)  # says it is in the kitchen
    assert critics.root_cause(episode) == "Step 2, focus on axe, was wrong."


def test_every_mistake_is_valid_text():
    always = Skill(0, 0, 1, 1, 1, 1, 1)
    rng = random.Random(0)
    for state in states(START, LEFT):
        text = act(Goal.read(START), DOVE, state, ["axe"], always, rng)
        assert stated_room(text)
        assert text.endswith("</action>")


def test_other_names_are_the_same_in_all_messages():
    said = ["Move it to the red box in the living room.", "Outside: a dove egg, a wolf", "the dove"]
    transcript = {"messages": [{"role": "user", "content": text} for text in said]}
    changed = renamed(transcript, random.Random(1))
    goal, listing, last = (message["content"] for message in changed["messages"])
    assert "red box" not in goal
    assert "living room" not in goal
    assert listing.startswith("Outside: a ")
    assert "dove" not in listing
    assert last.removeprefix("the ") in listing
    lives = {"messages": [{"role": "user", "content": "the longest life span: dove, wolf"}]}
    assert renamed(lives, random.Random(1)) == lives


def test_the_targets_are_of_the_tiny_items():
    config = scienceworld.get_config("tiny")
    task = make_task(config.task)
    ids = {item.id for split in ("train", "validation") for item in task.items(split)}
    assert targets().keys() == ids
    assert sum(target.clear for target in targets().values()) > 0.9 * len(ids)
    assert load("scienceworld").items == len(task.items("train"))


@pytest.mark.jvm
def test_the_simulator_s_own_targets_are_reached():
    task = make_task(scienceworld.get_config("tiny").task)
    chosen = {}
    for item in task.items("validation"):
        if targets()[item.id].clear:
            chosen.setdefault(item.data["task"], item)

    async def run():
        return await asyncio.gather(
            *(play(task, item, PERFECT, random.Random(0)) for item in chosen.values())
        )

    try:
        episodes = asyncio.run(run())
    finally:
        task.close()
    assert len(episodes) == len(scienceworld.TINY_TASKS)
    assert all(episode.success and episode.outcome == "success" for episode in episodes)


@pytest.mark.jvm
def test_two_steps_of_the_tiny_config(tmp_path):
    config = scienceworld.get_config("tiny")
    config.update(steps=2, prompts_per_step=1)
    config.task.options.jvms = 2
    config.validation.every = 0
    trainer = Trainer(config, tmp_path)
    try:
        trainer.run()
    finally:
        trainer.close()
    rows = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert len(rows) >= 2 * config.rollout.group_size
